"""Settings: files, variables and flags with their origins; /set, /show, /system, /tokens."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from fakes import ByteTokenizer, ChatML, FakeEngine
from small_chat import chat_over
from typer.testing import CliRunner, Result

import minikv
from minikv.chat.closing import Facts
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli import (
    config,
    config_command,
    context_command,
    document_commands,
    kept,
    settings_commands,
)
from minikv.cli.command import Context
from minikv.cli.config import SETTINGS, Config, Interface, load
from minikv.cli.context_command import usage
from minikv.cli.flags import Call, Only, _file_text, command
from minikv.cli.interrupt import Interrupts
from minikv.cli.main import app
from minikv.cli.saved.keeper import Keeper
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError
from minikv.policies import registry
from minikv.settings import PRESETS, Generation, Settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MINIKV_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/.config/minikv").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    return tmp_path


def read(home: Path, own: str = "", local: str = "", **environ: str) -> Config:
    """What `load` makes of the user's file, the folder's file and variables."""
    if own:
        (home / "home/.config/minikv/config.toml").write_text(own)
    if local:
        (home / "here/minikv.toml").write_text(local)
    return load(environ, home / "here")


# -- what wins ------------------------------------------------------------------------------


def test_a_variable_wins_over_the_folder_and_the_folder_over_the_user(home: Path) -> None:
    made = read(
        home,
        "budget = 64\ntop_k = 5\nseed = 1\n",
        'budget = "20%"\nseed = 2\n',
        MINIKV_BUDGET="300",
    )
    told = {name: (value.value, value.origin) for name, value in made.values.items()}
    assert told == {
        "budget": ("300", "MINIKV_BUDGET"),
        "seed": (2, "./minikv.toml"),
        "top_k": (5, "~/.config/minikv/config.toml"),
    }
    origins = made.origins({"seed"})
    assert origins["seed"] == "--seed"
    assert origins["budget"] == "MINIKV_BUDGET"
    assert origins["temperature"] == "default"
    assert set(origins) == set(SETTINGS)


def test_nothing_said_is_nothing_set(home: Path) -> None:
    assert read(home) == Config()
    assert load({}, home / "here") == Config()
    assert read(home, MINIKV_SEED="") == Config()


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("TEMPERATURE", "0.5", 0.5),
        ("TOP_K", "40", 40),
        ("OFFLINE", "yes", True),
        ("OFFLINE", "0", False),
        ("MODEL", "a/b", "a/b"),
        ("BUDGET", "20%", "20%"),
        ("DTYPE", "bfloat16", "bfloat16"),
        ("SEED", "-3", -3),
        ("STOP", r"\nQ: ", ("\nQ: ",)),
    ],
)
def test_variables_have_the_type_of_their_flag(
    home: Path, variable: str, text: str, value: object
) -> None:
    got = read(home, **{f"MINIKV_{variable}": text}).values[variable.lower()].value
    assert got == value
    assert type(got) is type(value)


def test_files_have_the_types_of_toml(home: Path) -> None:
    assert read(home, 'temperature = "auto"').values["temperature"].value == "auto"
    made = read(home, "temperature = 1\nbudget = 512\nquiet = true\nmax_tokens = 9")
    values = {name: value.value for name, value in made.values.items()}
    assert values == {"temperature": 1.0, "budget": "512", "quiet": True, "max_tokens": 9}
    assert type(values["temperature"]) is float
    for text in ("stop = ['a', '\\n']", """stop = ["a", '\\n']"""):
        assert read(home, text).values["stop"].value == ("a", "\\n")  # TOML has its own escapes
    assert read(home, "stop = 'a'").values["stop"].value == ("a",)


# -- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "message", "hint"),
    [
        ("temprature = 1", "./minikv.toml: unknown key 'temprature'", "did you mean temperature?"),
        ("colour = 1", "unknown key 'colour'", "minikv config init"),
        ("top_k = 0.5", "./minikv.toml: top_k must be a whole number, got 0.5", ""),
        ("top_k = true", "top_k must be a whole number, got True", ""),
        ("temperature = '1'", "temperature must be a number or auto, got '1'", ""),
        ("budget = 1.5", "budget must be a text in quotes", ""),
        ("quiet = 1", "quiet must be true or false", ""),
        ("model = ['a']", "model must be a text", ""),
        ("stop = 1", "stop must be a list of texts, got 1", ""),
        ("stop = ['a', 1]", "stop must be a list of texts", ""),
        ("stop = ['a', '']", "stop must not have an empty text", ""),
        ("dtype = 'int3'", "dtype must be one of auto, float32", ""),
        ("a = = 1", "./minikv.toml is not valid TOML", "for example"),
        ("seed = 1\nseed = 2", "is not valid TOML", ""),
        ("seed = " + "9" * 5000, "is not valid TOML", ""),
        ("seed = 0x" + "f" * 9000, "seed is too large a number", ""),
        ("temperature = " + "9" * 400, "temperature is too large a number", ""),
        ("budget = 0x" + "f" * 9000, "budget is too large a number", ""),
        ("aliases = 3", "./minikv.toml: [aliases] must be a table", ""),
        ("[aliases]\nx = 3", "[aliases]: 'x' must be a text", ""),
        ("[loaders]\nx = 'rm {path}'", "./minikv.toml: [loaders] names commands to run", ""),
        ('"\\u001b[2J" = 1', "unknown key '\\x1b[2J'", ""),
        ("x" * 500 + " = 1", "unknown key 'xxx", ""),
    ],
)
def test_a_bad_file_is_refused_by_file_and_key(
    home: Path, local: str, message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read(home, local=local)
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert "\x1b" not in str(caught.value) + caught.value.hint
    assert len(str(caught.value)) < 200


def test_a_bad_variable_is_refused_by_name(home: Path) -> None:
    for variable, text in (("TOP_K", "x"), ("OFFLINE", "maybe"), ("KERNELS", "cuda")):
        with pytest.raises(UsageError, match=f"MINIKV_{variable} must be"):
            read(home, **{f"MINIKV_{variable}": text})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("budget", "abc", "cannot read the budget 'abc'"),
        ("policy", "nope", "unknown policy 'nope'"),
        ("decode", "snapkv", "snapkv works only as `policy`"),
        ("device", "gpu", "unknown device 'gpu'"),
        ("max_tokens", 0, "must be at least 1, got 0"),
        ("threads", 9999, "must be at least 0 and at most 4,096, got 9999"),
        ("stride", 512, "must be at least 0 and at most 256"),
        ("top_k", -1, "must be at least 0"),
        ("top_p", 1.5, "must be at least 0 and at most 1, got 1.5"),
        ("temperature", float("nan"), "must be at least 0 and at most 100, got nan"),
    ],
)
def test_a_value_that_cannot_be_is_refused_where_it_was_said(
    home: Path, key: str, value: object, message: str
) -> None:
    shown = f'"{value}"' if isinstance(value, str) else value
    with pytest.raises(UsageError) as caught:
        read(home, local=f"{key} = {shown}")
    assert re.match(rf"\./minikv\.toml: {key}:? {message}", str(caught.value))
    (home / "here/minikv.toml").unlink()
    with pytest.raises(UsageError) as caught:
        read(home, **{f"MINIKV_{key.upper()}": str(value)})
    assert re.match(rf"MINIKV_{key.upper()}:? {message}", str(caught.value))


def test_a_step_policy_and_auto_may_be_said(home: Path) -> None:
    made = read(home, 'policy = "roco"\ndecode = "auto"\nstride = 32\nsystem = ""\nbudget = ""')
    assert made.values["policy"].value == "roco"


def test_config_show_has_the_warnings_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "here")
    monkeypatch.setenv("MINIKV_BUGET", "3")
    done = CliRunner().invoke(app, ["config", "show"])
    assert "MINIKV_BUGET sets nothing; did you mean MINIKV_BUDGET?" in done.stderr
    assert "MINIKV_BUGET" not in done.stdout
    monkeypatch.setenv("MINIKV_BUDGET", "abc")
    done = CliRunner().invoke(app, ["config", "show"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: MINIKV_BUDGET: cannot read the budget 'abc'")


def test_variables_that_are_no_settings_are_known(home: Path) -> None:
    from minikv.kernels.native.build import OFF

    assert read(home, **{OFF: "0", "MINIKV_HOME": str(home)}).notes == ()


def test_a_variable_that_sets_nothing_is_told(home: Path) -> None:
    made = read(home, MINIKV_TEMPRATURE="1", MINIKV_HOME=str(home / "nowhere"))
    assert made.notes == (
        "the variable MINIKV_TEMPRATURE sets nothing; did you mean MINIKV_TEMPERATURE?",
    )


def test_files_that_are_no_files(home: Path) -> None:
    local = home / "here/minikv.toml"
    os.mkfifo(local)
    with pytest.raises(UsageError, match="not a regular file"):
        read(home)
    local.unlink()
    local.mkdir()
    with pytest.raises(UsageError, match="not a regular file"):
        read(home)
    local.rmdir()
    local.write_bytes(b"model = '\xff'")
    with pytest.raises(UsageError, match="not valid UTF-8: byte 9"):
        read(home)
    local.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read(home)
    for many in ("a." + "b." * 20_000 + "c = 1", "a.b.c.d.e.f = 1\n" * 3000):
        local.write_text(many)  # tomllib would take a gigabyte
        with pytest.raises(UsageError, match="has too many dots"):
            read(home)
    local.write_text("[a" + ".a" * 900 + "]\n" + "".join(f"k{i}=1\n" for i in range(20_000)))
    with pytest.raises(UsageError, match="has 20,002 lines, and 5,000 are allowed"):
        read(home)  # it took a minute


# -- aliases and loaders --------------------------------------------------------------------


def test_aliases_of_both_files_and_loaders_of_the_users(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = '[aliases]\nllama3 = "meta/l3"\nm = "a"\n[loaders]\ndocx = "pandoc {path}"'
    made = read(home, own, '[aliases]\nm = "b"')
    assert made.aliases == {"llama3": "meta/l3", "m": "b"}
    assert made.loaders == {"docx": "pandoc {path}"}
    assert made.model("llama3") == "meta/l3"
    assert made.model("other/model") == "other/model"
    assert made.model(None) is None
    assert made.model("") is None
    assert made.model("bundled") is None
    (tmp_path / "bundled").mkdir()
    monkeypatch.chdir(tmp_path)
    assert made.model("bundled") == "bundled"  # a directory of the user's


# -- into the command line ------------------------------------------------------------------


SEEN: dict[str, Any] = {}
OTHER_BUDGET = replace(SETTINGS["budget"], default="1")


@command
def ask(
    call: Call, question: str, settings: Settings, generation: Generation, interface: Interface
) -> None:
    for group in (settings, generation, interface):
        SEEN.update(vars_of(group))
    SEEN["origins"] = call.config.origins(call.given)
    SEEN["given"] = set(call.given)


@command
def other(call: Call, settings: Annotated[Settings, Only("budget model", OTHER_BUDGET)]) -> None:
    SEEN.update(budget=settings.budget, model=settings.model)


def invoke(made: Config, *arguments: str) -> Result:
    """Run a command line whose commands only note in `SEEN` what their settings came to be."""
    small = typer.Typer()

    @small.callback()
    def main(context: typer.Context) -> None:
        config.install(context, made)

    small.command()(ask)
    small.command()(other)
    SEEN.clear()
    return CliRunner().invoke(small, list(arguments))


def vars_of(settings: Any) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def test_flags_win_over_the_configuration_and_origins_are_known(home: Path) -> None:
    made = read(
        home,
        'budget = 64\ntemperature = 0.5\nquiet = true\nmodel = "a"',
        MINIKV_MAX_TOKENS="7",
        MINIKV_MODEL="b/c",
    )
    done = invoke(made, "ask", "q", "--budget", "9")
    assert done.exit_code == 0, done.output
    origins = SEEN.pop("origins")
    assert SEEN.pop("given") >= {"budget"}
    changed = {
        "budget": "9",
        "temperature": 0.5,
        "quiet": True,
        "model": "b/c",
        "max_tokens": 7,
    }
    plain = vars_of(Settings(reuse="auto", threads=0, keep_packed="20GiB")) | vars_of(Generation())
    assert plain | vars_of(Interface()) | changed == SEEN
    assert origins["budget"] == "--budget"
    assert origins["temperature"] == "~/.config/minikv/config.toml"
    assert origins["max_tokens"] == "MINIKV_MAX_TOKENS"
    assert origins["seed"] == "default"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_was_not_given(home: Path, name: str) -> None:
    """It wins over files and variables, and a flag over it. A preset's settings count as given if
    it was: they are not taken from a saved chat."""
    sets = PRESETS[name]
    policy = "h2o" if sets["policy"] != "h2o" else "l2"
    made = read(home, f'policy = "{policy}"', MINIKV_REUSE="refresh")
    done = invoke(made, "ask", "q", "--preset", name)
    assert done.exit_code == 0, done.output
    assert SEEN["preset"] == name
    assert {key: SEEN[key] for key in sets} == sets
    assert {SEEN["origins"][key] for key in sets} == {f"--preset {name}"}
    assert set(sets) <= set(SEEN["given"])
    Settings(**{key: SEEN[key] for key in sets}).eviction()  # they can be had
    invoke(made, "ask", "q", "--preset", name, "--policy", policy)
    assert SEEN["policy"] == policy
    assert SEEN["reuse"] == sets["reuse"]
    assert SEEN["origins"]["policy"] == "--policy"
    invoke(read(home, f'preset = "{name}"'), "ask", "q")
    assert {key: SEEN[key] for key in sets} == sets
    assert not SEEN["given"] & set(sets)
    refused = invoke(made, "ask", "q", "--preset", "nonsense")
    assert refused.exit_code == 2


def test_an_empty_text_leaves_the_flags_own_default(home: Path) -> None:
    made = read(home, 'model = "a"', 'model = ""')
    invoke(made, "ask", "q")
    assert SEEN["model"] is None


def test_settings_of_a_chat_do_not_reach_other_commands(home: Path) -> None:
    made = read(home, 'budget = 64\nmodel = "a"')
    invoke(made, "other")
    assert SEEN == {"budget": "1", "model": "a"}


def test_the_help_shows_what_the_configuration_says(home: Path) -> None:
    made = read(home, "budget = 4321")
    assert "4321" in invoke(made, "ask", "--help").output


def flags() -> dict[str, dict[str, Any]]:
    """Parameters and defaults of the real commands."""
    group: Any = typer.main.get_command(app)
    return {name: {p.name: p for p in group.whole(name).params} for name in ("ask", "chat")}


def test_every_key_is_a_real_flag_with_the_same_default() -> None:
    known = flags()
    for name, setting in SETTINGS.items():
        homes = [c for c in setting.commands or ("ask", "chat") if c in known]
        assert homes
        for home in homes:
            default = known[home][name].default
            assert default == setting.default
            assert type(default) is type(setting.default)
            assert {setting.flag, *setting.letters} == set(known[home][name].opts)


def test_help_speaks_of_tokens_per_head() -> None:
    for setting in SETTINGS.values():
        assert not re.search(r"\brows?\b", setting.help), setting.name
    assert SETTINGS["budget"].help.startswith("tokens per head")


def test_what_python_loads_with_are_settings_with_the_same_defaults() -> None:
    parameters = inspect.signature(minikv.load).parameters
    assert set(parameters) - {"policy_options"} <= {field.name for field in fields(Settings)}
    for name, parameter in parameters.items():
        if name != "policy_options":
            assert str(parameter.default) == str(getattr(Settings(), name)), name


@pytest.mark.parametrize("name", ["dtype", "weights", "kernels", "kv", "reuse"])
def test_python_is_refused_what_the_flags_refuse(name: str) -> None:
    some = ", ".join(SETTINGS[name].choices)
    with pytest.raises(UsageError, match=re.escape(f"{name} must be one of {some}, got 'int3'")):
        minikv.load(**{name: "int3"})  # type: ignore[arg-type]


# -- minikv config --------------------------------------------------------------------------


def screen() -> Terminal:
    terminal = Terminal()
    terminal.out, terminal.err = io.StringIO(), io.StringIO()
    return terminal


def out(terminal: Terminal) -> str:
    return terminal.out.getvalue()  # type: ignore[attr-defined]


def err(terminal: Terminal) -> str:
    return terminal.err.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "adkv"},
        {"policy": "roco"},
        {"policy": "h2o+snapkv"},
        {"decode": "adakv"},
        {"budget": "few"},
        {"stride": 3, "policy": "roco"},
        {"options": {"windw": 3}},
    ],
)
def test_wrong_policies_are_refused_in_the_same_words_before_documents_are_read(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises(UsageError) as early:
        Settings(**wrong).check_eviction()
    with pytest.raises(UsageError) as late:
        Settings(**wrong).eviction()
    assert (str(early.value), early.value.hint) == (str(late.value), late.value.hint)


def test_init_writes_every_key_with_its_default_and_never_overwrites(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(home / "new/place"))
    config_command.init(screen())
    path = home / "new/place/config.toml"
    assert path.stat().st_mode & 0o777 == 0o600
    assert load({}, home) == Config()
    lines = path.read_text().splitlines()
    live = [line.removeprefix("# ") for line in lines if " = " in line or "[" in line[:3]]
    values = tomllib.loads("\n".join(live))
    assert {k: v for k, v in values.items() if k not in ("aliases", "loaders")} == {
        name: list(setting.default) if isinstance(setting.default, tuple) else setting.default
        for name, setting in SETTINGS.items()
    }
    with pytest.raises(UsageError, match="exists already"):
        config_command.init(screen())


def test_init_says_why_it_cannot_write(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("MINIKV_HOME", str(home / "file/below"))
    with pytest.raises(UsageError, match="cannot write"):
        config_command.init(screen())
    monkeypatch.delenv("MINIKV_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(UsageError, match="no home directory"):
        config_command.init(screen())


def test_paths_and_show(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = read(home, 'seed = 3\n[aliases]\nx = "y/z"\n[loaders]\ndocx = "p {path}"')
    monkeypatch.setenv("MINIKV_HOME", str(home / "home/.config/minikv"))
    monkeypatch.chdir(home / "here")
    terminal = screen()
    config_command.paths(terminal)
    first, second = out(terminal).splitlines()
    assert first == f"{home / 'here/minikv.toml'}  (not there)"
    assert second == str(home / "home/.config/minikv/config.toml")
    terminal = screen()
    config_command.show(made, terminal)
    lines = out(terminal).splitlines()
    assert [line.split() for line in lines if line.startswith("seed")] == [
        ["seed", "3", "~/.config/minikv/config.toml"]
    ]
    assert "x = y/z" in lines
    assert "docx = p {path}" in lines
    assert len(lines) == len(SETTINGS) + 4
    terminal = screen()
    config_command.show(made, terminal, as_json=True)
    record = json.loads(out(terminal))
    assert record["settings"]["seed"] == {
        "value": 3,
        "origin": "~/.config/minikv/config.toml",
    }
    assert record["settings"]["top_p"] == {"value": 1.0, "origin": "default"}
    assert record["aliases"] == {"x": "y/z"}


# -- slash commands -------------------------------------------------------------------------

RUN = {
    word: command.run
    for command in (*settings_commands.COMMANDS, *context_command.COMMANDS)
    for word in command.words
}


def traced(session: ChatSession) -> Context:
    """A context whose settings have origins, as in a chat."""
    terminal = screen()
    return Context(
        session,
        terminal,
        "strict",
        Generation(),
        Interrupts(),
        Keeper(terminal, active=False),
        origins=Config().origins({"seed"}),
    )


@pytest.fixture
def context() -> Context:
    tokenizer = ByteTokenizer()
    return traced(
        chat_over(FakeEngine(), tokenizer, ChatML(tokenizer))
    )


@pytest.fixture(scope="module")
def bundled() -> ChatSession:
    return minikv.load(device="cpu", budget=64)


def do(context: Context, word: str, *arguments: str) -> str:
    context.terminal.err = io.StringIO()
    RUN[word](context, list(arguments))
    return err(context.terminal)


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_set_lists_every_value_and_where_it_came_from(context: Context) -> None:
    text = do(context, "set")
    assert row(text, "temperature") == ["temperature", "0", "default"]
    assert row(text, "seed") == ["seed", "0", "--seed"]
    assert row(text, "budget") == ["budget", "auto", "default"]
    for name in SETTINGS:
        assert name == "stats" or row(text, name)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("temperature", "0.7", "0.7"),
        ("temperature", "auto", "auto"),
        ("repeat_penalty", "1.1", "1.1"),
        ("temp", "0.25", "0.25"),
        ("top_p", "0.9", "0.9"),
        ("top-k", "40", "40"),
        ("min_p", "0.05", "0.05"),
        ("max_tokens", "99", "99"),
        ("--max-tokens", "99", "99"),
        ("seed", "5", "5"),
        ("budget", "20%", "20%"),
        ("policy", "snapkv", "snapkv"),
        ("decode", "none", "none"),
        ("encoding_errors", "replace", "replace"),
        ("stop", "Q:", '["Q:"]'),
        ("stop", r"\n", r'["\n"]'),
        ("refresh_every", "64", "64"),
        ("quality", "0.05", "0.05"),
        ("fidelity", "off", "off"),
    ],
)
def test_set_changes_a_value_and_its_origin(
    context: Context, key: str, value: str, shown: str
) -> None:
    name = {"temp": "temperature"}.get(key, key.lstrip("-").replace("-", "_"))
    for arguments in ((key, value), (f"{key}={value}",)):
        text = do(context, "set", *arguments)
        assert row(text, name) == [name, shown, "/set"]
    assert row(do(context, "set"), name) == [name, shown, "/set"]
    assert row(do(context, "set", key), name) == [name, shown, "/set"]


def test_what_set_changes_is_what_the_next_answer_uses(context: Context) -> None:
    for key, value in (
        ("temperature", "0.5"),
        ("top_k", "3"),
        ("top_p", "0.5"),
        ("min_p", "0.1"),
        ("max_tokens", "4"),
    ):
        do(context, "set", key, value)
    assert context.generation == Generation(4, 0.5, 3, 0.5, 0.1)
    do(context, "set", "stop", "a b", r"\n")
    assert context.generation.stop == ("a b", "\n")
    do(context, "set", "stop", "")
    assert context.generation.stop == ()
    do(context, "set", "policy", "random")
    do(context, "set", "seed", "11")
    eviction = context.session.eviction
    assert (eviction.policy, context.session.seed) == ("random", 11)
    assert eviction.policy_options["seed"] == eviction.decode_options["seed"] == 11
    assert context.session.engine.kv.configured[-1] is not None  # type: ignore[attr-defined]
    do(context, "set", "policy", "snapkv")
    do(context, "set", "decode", "scissorhands")
    eviction, fresh = (
        context.session.eviction,
        EvictionConfig.read("snapkv", "scissorhands", seed=11),
    )
    assert eviction.decode_options == fresh.decode_options  # nothing of the prompt policy's
    assert eviction.policy_options == fresh.policy_options


def test_set_reaches_the_chat_for_what_a_tier_is_used_for(context: Context) -> None:
    for key, value in (("refresh_every", "8"), ("quality", "0.5"), ("fidelity", "off")):
        do(context, "set", key, value)
    session = context.session
    assert (session.refresh_every, session.quality, session.fidelity) == (8, 0.5, False)
    do(context, "set", "fidelity", "on")
    assert session.fidelity is True


@pytest.mark.parametrize(
    ("name", "value"),
    [("refresh_every", -1), ("quality", -0.1), ("quality", float("nan")), ("quality", "much")],
)
def test_python_is_refused_what_a_tier_cannot_be_used_for(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"`{name}` must be"):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("temperature", "-1"), "--temperature must be between"),
        (("temperature", "hot"), "temperature must be a number or auto, got 'hot'"),
        (("temperature", "nan"), "--temperature must be between"),
        (("top_k", "1.5"), "top_k must be a whole number"),
        (("max_tokens", "0"), "--max-tokens must be at least 1"),
        (("budget", "lots"), "cannot read the budget"),
        (("budget", "8"), "below the smallest"),
        (("policy", "adakb"), "unknown policy 'adakb'"),
        (("decode", "snapkv"), "works only as `policy`"),
        (("seed", "x"), "seed must be a whole number"),
        (("encoding_errors", "maybe"), "must be one of strict, replace"),
        (("quiet", "maybe"), "quiet must be true or false"),
        (("device", "cuda"), "device cannot change in a chat"),
        (("temprature", "1"), "no setting 'temprature'"),
        (("top_k", "1", "2"), "top_k takes one value"),
        (("refresh_every", "-1"), "refresh_every` must be between 0"),
        (("quality", "nan"), "quality` must be between 0"),
        (("fidelity", "some"), "must be one of on, off"),
    ],
)
def test_a_refused_value_changes_nothing(
    context: Context, arguments: tuple[str, ...], message: str
) -> None:
    before = do(context, "set")
    with pytest.raises(UsageError, match=message):
        do(context, "set", *arguments)
    assert do(context, "set") == before


def test_set_has_the_tier(context: Context) -> None:
    text = do(context, "set")
    assert row(text, "tier") == ["tier", context.session.recall.kind, "default"]
    assert row(text, "tier_dtype") == ["tier_dtype", "same", "default"]


def test_set_has_what_the_model_was_loaded_with(context: Context) -> None:
    context.session.facts = Facts(weights="int8")
    context.offline = True
    text = do(context, "set")
    assert row(text, "weights") == ["weights", "int8", "default"]
    assert row(text, "offline") == ["offline", "true", "default"]
    context.session.facts = Facts()
    assert row(do(context, "set"), "weights") == ["weights", "plain", "default"]


def test_an_unknown_setting_names_the_nearest(context: Context) -> None:
    with pytest.raises(UsageError) as caught:
        do(context, "set", "temprature", "1")
    assert "did you mean temperature?" in caught.value.hint


def test_show_has_a_view_of_everything(bundled: ChatSession) -> None:
    context = traced(bundled)
    model = do(context, "show")
    assert do(context, "show", "model") == model
    assert "bundled" in model
    assert "8,192 positions" in model
    assert "4 · 6 heads, 3 KV heads of 64" in model
    policy = do(context, "show", "policy")
    assert "adakv, then h2o" in policy
    assert row(policy, "adakv.window") == ["adakv.window", "32"]
    assert "no system prompt" in do(context, "show", "system")
    template = do(context, "show", "template")
    assert re.search(r"<\|user\|>\s*QUESTION(.|\n)*<\|assistant\|>", template)
    assert do(context, "show", "settings") == do(context, "set")
    with pytest.raises(UsageError, match="does not know 'weather'"):
        do(context, "show", "weather")


def test_show_policy_has_every_option_of_a_composition(bundled: ChatSession) -> None:
    before = bundled.eviction
    bundled.configure(EvictionConfig.read("adakv+pyramid", "h2o", 96, {"window": 16}))
    text = do(traced(bundled), "show", "policy")
    bundled.configure(before)
    assert row(text, "adakv+pyramid.window") == ["adakv+pyramid.window", "16"]
    assert row(text, "h2o.sinks")
    assert row(text, "h2o") == ["h2o", *registry.method("h2o").summary.split()]
    assert not [line for line in text.splitlines() if line.split()[:1] == ["adakv+pyramid"]]


def test_the_system_prompt_holds_at_once_before_the_first_question(
    context: Context, tmp_path: Path
) -> None:
    session = context.session
    session.attach("A text.", "a.txt")
    do(context, "system", "Be", "brief.")
    assert session.system == "Be brief."
    assert [m.role for m in session.messages] == ["system"]
    assert [d.name for d in session.pending] == ["a.txt"]
    assert row(do(context, "set"), "system") == ["system", "Be", "brief.", "/system"]
    assert "(9 tokens; may be evicted)" in do(context, "system")
    session.pin_system = True
    assert "(9 tokens; never evicted)" in do(context, "system")
    session.pin_system = False
    (tmp_path / "s.txt").write_text("From a file.\n")
    do(context, "system", f"@{tmp_path / 's.txt'}")
    assert session.system == "From a file."
    "".join(session.ask("q", max_tokens=3))
    assert session.messages[0].content == "From a file."
    text = do(context, "system", "Other.")
    assert "/clear" in text
    assert session.messages[0].content == "From a file."
    session.reset(keep_documents=True)
    assert session.messages[0].content == "Other."
    do(context, "system", "")
    assert session.messages == []
    assert "no system prompt" in do(context, "system")
    with pytest.raises(UsageError, match="names no file"):
        do(context, "system", "@")


def test_tokens_adds_up_to_the_context(context: Context) -> None:
    session = context.session
    assert sum(n for name, n, _ in usage(session)) == 4096
    do(context, "system", "Be brief.")
    session.attach("A first text.", "a.txt")
    session.attach("A second text.", None)
    "".join(session.ask("What is it?", max_tokens=5))
    "".join(session.ask("And then?", max_tokens=5))
    session.attach("Not yet read.", "c.txt")
    rows = {name: count for name, count, _ in usage(session)}
    waiting = rows.pop("waiting: c.txt")
    assert waiting == len("Not yet read.")
    assert sum(rows.values()) == 4096
    assert rows["system prompt"] == 9
    assert rows["document 1: a.txt"] == len("A first text.")
    assert rows["document 2: piped text"] == len("A second text.")
    assert rows["questions"] == len("What is it?") + len("And then?")
    assert rows["answers"] + rows["the last token, not read yet"] == 10
    assert rows["room left"] == session.room
    frees = {name: how for name, _, how in usage(session)}
    assert frees["system prompt"] == '/system "", then /clear'
    assert (frees["questions"], frees["answers"]) == ("/clear", "/clear")
    assert (frees["names and turn markers"], frees["room left"]) == ("", "")
    assert (frees["document 2: piped text"], frees["waiting: c.txt"]) == ("/drop 2", "/drop 3")
    session.system = ""
    session.reset()
    frees = {name: how for name, _, how in usage(session)}
    assert set(frees.values()) == {""}, "nothing is there to be freed"
    session.attach("A first text.", "a.txt")
    "".join(session.ask("What is it?", max_tokens=5))
    text = do(context, "tokens")
    assert "/drop 1" in text
    used = len(session.fed)
    assert f"{used:,} tokens read of 4,096 positions" in text


def test_tokens_of_a_real_tokenizer_adds_up_too(bundled: ChatSession) -> None:
    bundled.reset()
    bundled.attach("The mill on the river is run by Ada. " * 9, "mill\x1b[2J.txt")
    "".join(bundled.ask("Who runs the mill?", max_tokens=5))
    rows = usage(bundled)
    assert all(count >= 0 for _, count, _ in rows)
    assert sum(count for _, count, _ in rows) == bundled.max_context
    assert "\x1b" not in do(traced(bundled), "tokens")


@pytest.mark.parametrize(
    ("names", "most"), [(("mill.txt", None), 5), (("a.txt", "b.txt"), 1), ((None,), 60)]
)
def test_tokens_docs_and_kept_count_alike(
    names: tuple[str | None, ...], most: int, bundled: ChatSession
) -> None:
    """Every document, and all that was read, with a tokenizer that joins letters; the text of one
    document is also in the system prompt and in another one."""
    session = bundled
    session.system = "Say who runs it."
    session.reset()
    for number, name in enumerate(names):
        session.attach("The mill on the river is run by Ada. " * (4 - 3 * number), name)
    "".join(session.ask("Who runs it?", max_tokens=most))
    session.attach("It is run by Ida, not by Ada.", "later.txt")
    facts = kept.read(session)
    parts = [part.last - part.first for part in facts.parts]
    talk = traced(session)
    talk.terminal.err = io.StringIO()
    document_commands._docs(talk, [])
    listed = talk.terminal.err.getvalue()
    rows = usage(session)
    for n, count in enumerate(parts, 1):
        (own,) = [row for row in rows if row[0].startswith(f"document {n}: ")]
        assert own[1] == count
        assert f" {count:,} token" in listed.splitlines()[n - 1]
    (waiting,) = [row for row in rows if row[0] == "waiting: later.txt"]
    assert f" {waiting[1]} tokens" in listed.splitlines()[-1]
    elsewhere = ("waiting", "room left", "the last token")
    read = sum(count for name, count, _ in rows if not name.startswith(elsewhere))
    assert read == facts.held.shape[2] == len(session.fed)
    session.system = ""


def test_reading_settings_loads_no_torch() -> None:
    code = (
        "import sys, minikv.cli.settings_commands\n"
        "from minikv.cli import config, config_command\n"
        "config.load({}); config_command.template(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_choice_is_left_alone_by_looking(context: Context) -> None:
    before: EvictionConfig = context.session.eviction
    for word in ("set", "tokens", "system"):
        do(context, word)
    assert context.session.eviction == before


def test_a_configuration_file_names_no_pipe_as_the_system_prompt(tmp_path: Path) -> None:
    """It may be anyone's, and reading would wait for ever. What the user types may be a pipe."""
    file, pipe = tmp_path / "s.txt", tmp_path / "pipe"
    file.write_text("Be brief.\n")
    os.mkfifo(pipe)
    assert _file_text(str(file), typed=False) == "Be brief."
    with pytest.raises(UsageError, match="is not a regular file"):
        _file_text(str(pipe), typed=False)
    with pytest.raises(UsageError, match="no such file"):
        _file_text(str(tmp_path / "none"), typed=False)
    with pytest.raises(UsageError, match="is a directory") as refused:
        _file_text(str(tmp_path), typed=False)
    assert refused.value.hint == "name a file"
    for name, says in (("~no-such-user/x", "home directory"), ("a" * 300, "name too long")):
        for typed in (False, True):
            with pytest.raises(UsageError, match=f"cannot read .*(?i:{says})"):
                _file_text(name, typed=typed)
    threading.Thread(target=pipe.write_text, args=("From a pipe.",)).start()
    assert _file_text(str(pipe), typed=True) == "From a pipe."

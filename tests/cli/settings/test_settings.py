"""Settings: one row of a table is tried as a flag, in a file, as a variable and with /set; what
Tab and a shell offer for them; what the runtime says in Python becomes what is typed."""

from __future__ import annotations

import inspect
import json
import os
import re
import threading
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typed
import typer
from processes import python
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from refusals import refused
from small_chat import chat
from tables import table
from typed import fails, fake_chat, invoke
from typer.testing import CliRunner, Result

import minikv
from minikv.chat.closing import Facts
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.chat import settings_commands, slash_commands
from minikv.cli.chat.command import _help
from minikv.cli.chat.slash import Command, Context
from minikv.cli.chat.slash_commands import execute
from minikv.cli.documents import commands as document_commands
from minikv.cli.failures import explain
from minikv.cli.main import app
from minikv.cli.paths import chats_folder
from minikv.cli.screen.editor import Commands
from minikv.cli.settings import config
from minikv.cli.settings.config import SETTINGS, Config, Interface, load, worded
from minikv.cli.settings.flags import Call, command, file_text
from minikv.errors import UsageError
from minikv.policies import prompt_names, step_names
from minikv.settings import GONE, Generation, Settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MINIKV_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/.config/minikv").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    return tmp_path


OWN, LOCAL = "home/.config/minikv/config.toml", "here/minikv.toml"


def read(home: Path, own: str = "", local: str = "", **environ: str) -> Config:
    """What `load` makes of the user's file, the folder's file and variables."""
    (home / OWN).write_text(own)
    (home / LOCAL).write_text(local)
    return load(environ, home / "here")


SEEN: dict[str, Any] = {}


@command
def ask(
    call: Call, question: str, settings: Settings, generation: Generation, interface: Interface
) -> None:
    for group in (settings, generation, interface):
        SEEN.update({field.name: getattr(group, field.name) for field in fields(group)})
    SEEN["origins"] = call.config.origins(call.given)


def called(made: Config, *arguments: str) -> Result:
    """Run a command that only notes in `SEEN` what its settings came to be."""
    small = typer.Typer()

    @small.callback()
    def main(context: typer.Context) -> None:
        config.install(context, made)

    small.command()(ask)
    small.command("other")(lambda: None)
    SEEN.clear()
    return CliRunner().invoke(small, ["ask", "q", *arguments])


# -- a value from everywhere ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "text", "toml", "value"),
    [
        ("temperature", "0.5", "0.5", 0.5),
        ("temperature", "1", "1", 1.0),
        ("temperature", "auto", "'auto'", "auto"),
        ("top_k", "40", "40", 40),
        ("offline", "yes", "true", True),
        ("quiet", "0", "false", False),
        ("model", "a/b", "'a/b'", "a/b"),
        ("budget", "20%", "'20%'", "20%"),
        ("budget", "512", "512", "512"),
        ("dtype", "bfloat16", "'bfloat16'", "bfloat16"),
        ("policy", "snapkv", "'snapkv'", "snapkv"),
        ("seed", "-3", "-3", -3),
        ("tier", "ram", "'ram'", "ram"),
        ("stop", r"\nQ: ", r"""["\nQ: "]""", ("\nQ: ",)),
        ("stop", "a", "'a'", ("a",)),
    ],
)
def test_a_value_is_the_same_from_a_flag_a_file_and_a_variable(
    home: Path, key: str, text: str, toml: str, value: object
) -> None:
    for made in (
        read(home, own=f"{key} = {toml}"),
        read(home, local=f"{key} = {toml}"),
        read(home, **{f"MINIKV_{key.upper()}": text}),
    ):
        found = made.values[key]
        assert (found, type(found)) == (value, type(value))
        assert called(made).exit_code == 0
        assert SEEN[key] == value
        assert SEEN["origins"][key] == made.sources[key]
    if not isinstance(value, bool):
        done = called(read(home, own=f"{key} = {toml}"), f"{SETTINGS[key].flag}={text}")
        assert done.exit_code == 0, done.output
        assert (SEEN[key], SEEN["origins"][key]) == (value, SETTINGS[key].flag)


def test_what_wins_and_what_nothing_said_is(home: Path) -> None:
    own, local = "budget = 64\ntop_k = 5\nseed = 1", 'budget = "20%"\nseed = 2'
    made = read(home, own, local, MINIKV_BUDGET="3")
    found = {name: (value, made.sources[name]) for name, value in made.values.items()}
    assert found.pop("budget") == ("3", "MINIKV_BUDGET")
    assert found == {"seed": (2, "./minikv.toml"), "top_k": (5, "~/.config/minikv/config.toml")}
    assert made.origins({"seed"})["seed"] == "--seed"
    assert set(made.origins(())) == set(SETTINGS)
    assert read(home) == read(home, MINIKV_SEED="") == Config()
    called(read(home))
    plain = {**vars_of(Settings(threads=0)), **vars_of(Generation())}
    assert SEEN.items() >= (plain | vars_of(Interface())).items()
    called(read(home, 'model = "a"', 'model = ""'))
    assert SEEN["model"] is None  # an empty text leaves the flag's own default
    called(read(home, 'policy = "roco"\ndecode = "auto"\nstride = 32\nsystem = ""\nbudget = ""'))
    assert (SEEN["policy"], SEEN["stride"]) == ("roco", 32)
    assert "4321" in called(read(home, "budget = 4321"), "--help").output


def vars_of(settings: Any) -> dict[str, Any]:
    names = (field.name for field in fields(settings) if field.name != "options")
    return {name: getattr(settings, name) for name in names}


# -- what is refused ------------------------------------------------------------------------
@table(f"""
    key         | text      | message
    top_k       | 0.5       | must be a whole number, got
    top_k       | -1        | must be between 0 and 2,147,483,648, got -1
    temperature | -1        | must be between 0 and 100, got -1
    temperature | nan       | must be between 0 and 100, got nan
    temperature | hot       | must be a number or auto, got 'hot'
    top_p       | 1.5       | must be between 0 and 1, got 1.5
    max_tokens  | 0         | must be at least 1, got 0
    threads     | 9999      | must be between 0 and 4,096, got 9999
    stride      | 512       | must be between 0 and 256, got 512
    dtype       | int3      | must be one of auto, float32, bfloat16, float16, got 'int3'
    kv          | int4      | must be one of auto, int8, got 'int4'
    fidelity    | some      | must be one of on, off, got 'some'
    quiet       | maybe     | must be true or false, got 'maybe'
    budget      | abc       | the budget cannot be 'abc'
    policy      | nope      | unknown policy 'nope'
    decode      | snapkv    | snapkv works only as --policy
    device      | gpu       | unknown device 'gpu'
    remember    | much      | 'much' is neither off nor a size
    seed        | {"9" * 30} | is too large a number
""")
def test_a_wrong_value_is_refused_in_the_same_words_wherever_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch, context: Context, key: str, text: str, message: str
) -> None:
    """With the place at the beginning: a file and a key, a variable, a flag, or /set. Nothing
    changes."""
    monkeypatch.chdir(home / "here")
    monkeypatch.setenv("NO_COLOR", "1")
    number = text.lstrip("-").replace(".", "").isdigit() or text == "nan"
    (home / LOCAL).write_text(f"{key} = {text if number else repr(text)}\n")
    told = {f"./minikv.toml: {key}": invoke("plan")}
    (home / LOCAL).unlink()
    with monkeypatch.context() as patch:
        patch.setenv(f"MINIKV_{key.upper()}", text)
        told[f"MINIKV_{key.upper()}"] = invoke("plan")
    told[key] = invoke("config", "set", "--", key, text)
    if key != "quiet":
        told[""] = invoke("ask", "q", "/dev/null", f"{SETTINGS[key].flag}={text}")
    for where, done in told.items():
        said = fails(done, 2, message)
        assert said.startswith(f"error: {where}")
        assert said.count("\n") <= 2
    assert not (home / OWN).exists()
    before = do(context, "set")
    error = str(refused("", do, context, "set", key, text))
    assert (
        f"{key} cannot change in a chat" in error
        or message.replace("--policy", "`policy`") in error
    )
    assert do(context, "set") == before


@pytest.mark.parametrize("key", GONE)
def test_what_is_gone_is_refused_with_what_to_use(home: Path, context: Context, key: str) -> None:
    """From everywhere, in one line; `config unset` removes the line."""
    variable = f"MINIKV_{key.upper()}"
    assert GONE[key].count("`") == 2  # what the command line words as a flag
    for where, act in {
        f"./minikv.toml: {key}": lambda: read(home, local=f"{key} = 1"),
        variable: lambda: read(home, **{variable: "1"}),
        f"`{key}`": lambda: minikv.load(**{key: 1}),
        key: lambda: do(context, "set", key, "1"),
    }.items():
        assert str(refused("", act)) == f"{where} is gone: {GONE[key]}"
    assert "--" not in worded(GONE[key], chat=True)  # in a chat there are no flags
    own = home / OWN
    own.write_text(f"{key} = 1 # mine\nseed = 3\n")
    assert f"{key} is gone: {worded(GONE[key])}" in invoke("config", "set", key, "1").stderr
    invoke("config", "unset", key)
    assert own.read_text() == "seed = 3\n"


@pytest.mark.parametrize(
    ("local", "message", "hint"),
    [
        ("temprature = 1", "./minikv.toml: unknown key 'temprature'", "did you mean temperature?"),
        ("colour = 1", "unknown key 'colour'", "minikv config init"),
        ("top_k = true", "top_k must be a whole number, got True", ""),
        ("temperature = '1'", "temperature must be a number or auto, got '1'", ""),
        ("budget = 1.5", "budget must be a text", ""),
        ("quiet = 1", "quiet must be true or false", ""),
        ("model = ['a']", "model must be a text", ""),
        ("stop = ['a', 1]", "stop must be a list of texts", ""),
        ("stop = ['a', '']", "stop must not have an empty text", ""),
        ("a = = 1", "./minikv.toml is not valid TOML", "for example"),
        ("seed = 1\nseed = 2", "is not valid TOML", ""),
        ("seed = " + "9" * 5000, "is not valid TOML", ""),
        ("budget = 0x" + "f" * 9000, "budget is too large a number", ""),
        ("temperature = " + "9" * 400, "temperature is too large a number", ""),
        ("aliases = 3", "./minikv.toml: [aliases] must be a table", ""),
        ("[aliases]\nx = 3", "[aliases]: 'x' must be a text", ""),
        ("[aliases]\nx = ''", "[aliases]: 'x' must be a text", ""),
        ("[loaders]\nx = 'rm {path}'", "./minikv.toml: loaders is gone: pipe the text in", ""),
        ('"\\u001b[2J" = 1', "unknown key '\\x1b[2J'", ""),
        ("x" * 500 + " = 1", "unknown key 'xxx", ""),
        ("#" * (1 << 16) + "\n", "larger than 64 KiB", ""),
        ("a." + "b." * 20_000 + "c = 1", "has more than 2,000 dots", "@FILE"),  # a gigabyte
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_file_is_refused_by_key(home: Path, local: str, message: str, hint: str) -> None:
    error = refused("", read, home, local=local)
    assert (message in str(error), hint in error.hint) == (True, True), error
    assert len(str(error)) < 200


def test_files_that_are_no_files(home: Path) -> None:
    local = home / LOCAL
    for make, message in (
        (lambda: os.mkfifo(local), "not a regular file"),
        (local.mkdir, "not a regular file"),
        (lambda: local.write_bytes(b"model = '\xff'"), "not valid UTF-8: byte 9"),
    ):
        make()
        refused(message, load, {}, home / "here")
        local.rmdir() if local.is_dir() else local.unlink()


def test_variables_that_set_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minikv.kernels.native.build import OFF

    assert read(home, **{OFF: "0", "MINIKV_HOME": str(home / "nowhere")}).notes == ()
    monkeypatch.chdir(home / "here")
    monkeypatch.setenv("MINIKV_TEMPRATURE", "3")
    for line in ("config show", "models"):
        done = invoke(*line.split())
        told = "the variable MINIKV_TEMPRATURE sets nothing; did you mean temperature?"
        assert told in done.stderr
        assert "MINIKV_TEMPRATURE" not in done.stdout


def test_python_has_the_defaults_of_the_flags() -> None:
    for name, parameter in inspect.signature(minikv.load).parameters.items():
        if name != "settings":
            assert str(parameter.default) == str(getattr(Settings(), name)), name
    # Every key is a flag of the real commands.
    group: Any = typer.main.get_command(app)
    known = {name: {p.name: p for p in group.whole(name).params} for name in ("ask", "chat")}
    for name, setting in SETTINGS.items():
        assert "rows" not in setting.help.split(), "users read: tokens per head"
        homes = [known[c][name] for c in setting.commands or known if c in known]
        assert homes
        for param in homes:
            assert str(param.default) == str(setting.default)
            assert {setting.flag, *setting.letters} == set(param.opts)


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
    ids=str,
)
def test_wrong_policies_are_refused_before_documents_are_read(wrong: dict[str, Any]) -> None:
    early = refused("", Settings(**wrong).check_eviction)
    late = refused("", Settings(**wrong).eviction)
    assert (str(early), early.hint) == (str(late), late.hint)


def test_a_system_prompt_from_a_file_and_from_a_pipe(tmp_path: Path) -> None:
    """A configuration file may be anyone's and names no pipe; what the user types may be one."""
    file, pipe = tmp_path / "s.txt", tmp_path / "pipe"
    file.write_text("Be brief.\n")
    os.mkfifo(pipe)
    assert file_text(str(file), typed=False) == "Be brief."
    for name, says in (
        (str(pipe), "is not a regular file"),
        (str(tmp_path / "none"), "no such file"),
        (str(tmp_path), "is a directory"),
        ("~no-such-user/x", "cannot read .*home directory"),
        ("a" * 300, "cannot read .*name too long"),
        ("", "names no file"),
    ):
        refused(f"(?i:{says})", file_text, name, typed=False)
    threading.Thread(target=pipe.write_text, args=("From a pipe.",)).start()
    assert file_text(str(pipe), typed=True) == "From a pipe."


# -- minikv config --------------------------------------------------------------------------
def test_show(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And aliases of both files."""
    monkeypatch.chdir(home / "here")
    read(home, 'seed = 3\n[aliases]\nx = "y/z"')
    lines = invoke("config", "show").stdout.splitlines()
    assert ["seed", "3", "~/.config/minikv/config.toml"] in [line.split() for line in lines]
    assert "x = y/z" in lines
    assert len(lines) == len(SETTINGS) + 2
    own = '[aliases]\nllama3 = "meta/l3"\nm = "a"'
    made = read(home, own, '[aliases]\nm = "b"')
    assert made.aliases == {"llama3": "meta/l3", "m": "b"}
    names = ("llama3", "other/model", None, "", "bundled")
    assert [made.model(name) for name in names] == ["meta/l3", "other/model", None, None, None]
    (home / "here/bundled").mkdir()
    assert made.model("bundled") == "bundled"  # a directory of the user's


def test_init_writes_every_key_and_default(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(home / "new/place"))
    invoke("config", "init")
    path = home / "new/place/config.toml"
    assert path.stat().st_mode & 0o777 == 0o600
    assert load({}, home) == Config()
    lines = path.read_text().splitlines()
    live = [line.removeprefix("# ") for line in lines if " = " in line or "[" in line[:3]]
    values = tomllib.loads("\n".join(live))
    values.pop("aliases", None)
    plain = {name: setting.default for name, setting in SETTINGS.items()}
    assert values == {k: [*v] if isinstance(v, tuple) else v for k, v in plain.items()}
    assert "exists already" in invoke("config", "init").stderr
    (home / "file").write_text("")
    monkeypatch.setenv("MINIKV_HOME", str(home / "file/below"))
    assert "cannot write" in invoke("config", "init").stderr
    monkeypatch.delenv("MINIKV_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert "no home directory" in invoke("config", "init").stderr


# -- slash commands -------------------------------------------------------------------------
COMMANDS = (*settings_commands.COMMANDS, *document_commands.COMMANDS)


def talk_of(session: ChatSession) -> Context:
    """A context whose settings have origins, as in a chat."""
    return typed.context(session, generation=Generation(), origins=Config().origins({"seed"}))


@pytest.fixture
def context() -> Context:
    return talk_of(fake_chat())


def do(context: Context, word: str, *arguments: str) -> str:
    return typed.run(COMMANDS, context, word, *arguments)


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


@pytest.mark.parametrize(
    "line",
    "temperature=0.7 temperature=auto temp=0.25 top-k=40 --max-tokens=99 seed=5 budget=20% "
    r"policy=snapkv decode=none stop=Q: stop=\n fidelity=off check=on".split(),
)
def test_set_changes_a_value_and_its_origin(context: Context, line: str) -> None:
    key, value = line.split("=")
    shown = f'["{value}"]' if key == "stop" else value
    name = {"temp": "temperature"}.get(key, key.lstrip("-").replace("-", "_"))
    for arguments in ((key, value), (f"{key}={value}",), (key,), ()):
        assert row(do(context, "set", *arguments), name) == [name, shown, "/set"]


def test_set_lists_every_value_and_where_it_came_from(context: Context) -> None:
    context.session.facts = Facts(weights="int8")
    context.began = {"offline": True, "remember": "2GiB", "stats": True}
    text, values = do(context, "set"), {"temperature": "0", "seed": "0", "budget": "auto"}
    values |= {"tier": context.session.recall.kind, "weights": "int8", "offline": "true"}
    for name, value in (values | {"remember": "2GiB", "stats": "true"}).items():
        assert row(text, name) == [name, value, "--seed" if name == "seed" else "default"]
    assert all(row(text, name) for name in SETTINGS)


def test_what_set_changes_is_what_the_next_answer_uses(context: Context) -> None:
    lines = ("temperature 0.5", "top_k 3", "max_tokens 4", "fidelity off", r"stop a \n")
    for line in (*lines, "policy random", "seed 11"):
        do(context, "set", *line.split())
    session, eviction = context.session, context.session.eviction
    assert context.generation == Generation(4, 0.5, 3, stop=("a", "\n"))
    assert (session.fidelity, session.seed) == (False, 11)
    assert eviction.policy_options["seed"] == eviction.decode_options["seed"] == 11
    assert session.engine.kv.configured[-1] is not None  # type: ignore[attr-defined]
    do(context, "set", "stop", "")
    assert context.generation.stop == ()
    for line in ("policy snapkv", "decode scissorhands"):
        do(context, "set", *line.split())
    fresh = EvictionConfig.read("snapkv", "scissorhands", seed=11)
    assert session.eviction.decode_options == fresh.decode_options  # none of the prompt policy's
    assert session.eviction.policy_options == fresh.policy_options


@table("""
    line         | message                         | hint
    budget 8     | below the smallest              |
    device cuda  | device cannot change in a chat  |
    stats on     | stats is a flag of `minikv ask` | /stats
    temprature 1 | no setting 'temprature'         | did you mean temperature?
    top_k 1 2    | top_k takes one value           |
""")
def test_what_set_does_not_take(context: Context, line: str, message: str, hint: str) -> None:
    before = do(context, "set")
    assert hint in refused(message, do, context, "set", *line.split()).hint
    assert do(context, "set") == before


def test_policy_alone_says_what_is_in_force() -> None:
    options = {"window": 16}
    chat = minikv.load(policy="adakv+pyramid", decode="h2o", budget=96, device="cpu", **options)
    context = talk_of(chat)
    text = do(context, "policy")
    assert text.startswith("adakv+pyramid, then h2o · budget 96 tokens per head\n")
    assert "  adakv+pyramid: " in text
    assert " window=16 " in text
    refused("/show is gone", execute, context, "/show model")


def test_the_system_prompt_before_the_first_question(context: Context, tmp_path: Path) -> None:
    session = context.session
    session.attach("A text.", "a.txt")
    do(context, "system", "Be", "brief.")
    assert [(m.role, m.content) for m in session.messages] == [("system", "Be brief.")]
    assert [d.name for d in session.pending] == ["a.txt"]
    assert row(do(context, "set"), "system") == ["system", "Be", "brief.", "/set"]
    assert "(9 tokens; may be evicted)" in do(context, "system")
    session.pin_system = True
    assert "(9 tokens; never evicted)" in do(context, "system")
    (tmp_path / "s.txt").write_text("From a file.\n")
    do(context, "system", f"@{tmp_path / 's.txt'}")
    session.pin_system = False
    "".join(session.ask("q", max_tokens=3))
    assert session.messages[0].content == "From a file."
    assert "/clear" in do(context, "system", "Other.")
    assert session.messages[0].content == "From a file."
    session.reset(keep_documents=True)
    assert session.messages[0].content == "Other."
    do(context, "system", "")
    assert session.messages == []
    assert "no system prompt" in do(context, "system")
    do(context, "system", "a")
    assert "(1 token; may be evicted)" in do(context, "system")
    refused("names no file", do, context, "system", "@")


# -- what Tab offers, and a shell ------------------------------------------------------------
Offers = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def session() -> ChatSession:
    made = chat()
    made.attach("text", "my report (1).txt")
    return made


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file, and a home with a saved chat, as far as a list reads it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").write_text("x")
    folder = chats_folder() / "thesis"
    folder.mkdir(parents=True)
    (folder / "chat.jsonl").write_text('{"turns": 1, "title": "q", "identity": {"model": "m"}}\n')
    return tmp_path


@pytest.fixture
def tab(session: ChatSession, saved: Path) -> Offers:
    """What Tab puts in for the last word of a line; for a path, behind it."""
    offers, event = Commands(_help(session)).get_completions, CompleteEvent()
    return lambda line: [one.text for one in offers(Document(line), event)]


def test_chats_settings_and_their_values(tab: Offers) -> None:
    assert {"reuse", "policy", "temperature"} <= {*tab("/set ")}
    assert "h2o+ada" in tab("/policy h2o+a")
    assert "h2o" not in tab("/compare h2o ")
    assert "64MiB" in tab("/retry --budget ")
    assert {"512", "20%", "64MiB"} <= {*tab("/set budget ")}
    assert "kept" in tab("/help k")
    offers = {
        "/load ": ["thesis"],  # not the file
        "/load thesis --": ["--reread"],
        "/set reus": ["reuse"],
        "/set reuse ": [*SETTINGS["reuse"].choices],
        "/set quiet ": ["on", "off"],
        "/set policy snap": ["snapkv"],
        "/set decode ": ["auto", *step_names()],
        "/policy ": prompt_names(),
        "/policy snapkv win": ["window="],
        "/policy snapkv decode=ro": ["decode=roco"],
        "/compare ": [*prompt_names(), "budget="],
        "/compare h2o budget=5": ["budget=512"],
        "/retry --": ["--policy", "--budget", "--seed"],
        "/retry --policy stream": ["streaming"],
        "/retry --policy streaming --": ["--budget", "--seed"],
        "/kept ": ["all", "find"],
        "/drop ": ["my\\ report\\ (1).txt"],
        "/drop my\\ r": ["my\\ report\\ (1).txt"],
        "/add thes": ["is.txt"],
        "/export thes": ["is.txt"],
        "/export --": ["--force"],
    }
    none = ("set reuse once", "set model", "set top_p", "retry --seed", "none", "stats")
    offers |= {f"/{line} ": [] for line in none}
    assert {line: tab(line) for line in offers} == offers


@pytest.mark.parametrize("command", slash_commands.COMMANDS, ids=lambda command: command.words[0])
def test_every_command_that_takes_words_of_ours_offers_them(tab: Offers, command: Command) -> None:
    """What a command's usage writes in small letters, Tab offers."""
    words = re.findall(r"(?<![\w\"=.])(?:--)?[a-z]{3,}", command.takes.split("FILE")[0])
    offered = [*tab(f"/{command.words[0]} "), *tab(f"/{command.words[0]} --")]
    assert {*words} - {"option", "value"} <= {one.rstrip("=") for one in offered}


ALL = """
import contextlib, io, json, os, sys
from minikv.cli.__main__ import run
os.environ["_MINIKV_COMPLETE"], sys.argv, found = "complete_bash", ["minikv"], []
for line in json.load(sys.stdin):
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        run()
    found.append([said.getvalue().split(), [*sys.modules]])
print(json.dumps(found))
"""


def test_the_shell_completes_values_without_torch(saved: Path) -> None:
    """What bash is offered for the last word of each line. Only the options of a policy need torch:
    they are in the policy's file, which imports it."""
    (saved / "minikv.toml").write_text('[aliases]\nbigger = "some/model"\n')
    lines = {
        "chat --policy ": prompt_names(),
        "chat --policy h2o+ad": ["h2o+ada"],
        "ask q --decode ro": ["roco"],
        "chat --budget 5": ["512"],
        "chat --resume ": ["thesis"],
        "chats show ": ["thesis"],
        "chats rm th": ["thesis"],
        "chat --reuse o": ["once"],
        "eval --policy adakv,snap": ["adakv,snapkv"],
        "eval --tasks facts,nee": ["facts,needle"],
        "chat -m big": ["bigger"],
        "chat the": [],  # left to the shell, which knows files
        "chat --policy snapkv -o win": ["window="],
    }
    done = python("-c", ALL, input=json.dumps([f"minikv {line}" for line in lines]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {line: said for line, (said, _) in zip(lines, found, strict=True)} == lines
    *others, (_, loaded) = found
    assert {"minikv.cli.settings.flags", "torch"} <= {*loaded}
    for _, loaded in others:
        assert not {*loaded} & {"torch", "numpy", "transformers", "huggingface_hub"}


# -- what the runtime says in python is shown as it is typed ---------------------------------
@table("""
    text                                     | shown
    try `dtype="float32"`                    | try --dtype float32
    `dtype="auto", weights="int4+head"` fits | --dtype auto --weights int4+head fits
    run without `offline=True` once          | run without --offline once
    `max_tokens` must be 1                   | --max-tokens must be 1
    a larger `budget` or less                | a larger --budget or less
    start anew with `chat.reset()`           | start anew with /reset
    `chat.undo(2)` works                     | /undo 2 works
    `chat.reuse = "once"` turns it off       | /set reuse once turns it off
    log in with `hf auth login`              | log in with `hf auth login`
    `minikv ask -` reads                     | `minikv ask -` reads
    `nonsense=3` and `budgt`                 | `nonsense=3` and `budgt`
    no code at all                           | no code at all
""")
def test_python_becomes_flags_and_commands(text: str, shown: str) -> None:
    """Errors and hints, too."""
    assert worded(text) == shown
    error = UsageError("`top_p` is wrong", 'use `device="cpu"`; `policy` takes: h2o')
    for talking, flag, policy in ((False, "--top-p", "--policy"), (True, "/set top_p", "/policy")):
        made = explain(error, chat=talking)
        hint = f"use --device cpu; {policy} takes: h2o"
        assert (made.message, made.hint) == (f"{flag} is wrong", hint)

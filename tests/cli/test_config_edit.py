"""`minikv config set`: one key changes, everything else in the file stays."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hub import cache  # noqa: F401
from test_settings import err, out, screen
from typer.testing import CliRunner, Result

import minikv.cli.ask
from minikv.cli import completion, config_command
from minikv.cli.config import load, short
from minikv.cli.config_edit import edited, literal
from minikv.cli.main import app
from minikv.errors import UsageError
from minikv.settings import Plain


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", 'budget = "64"\n'),
        ('budget = "512"\n', 'budget = "64"\n'),
        ('  budget="512"   # as usual\nseed = 1', 'budget = "64"   # as usual\nseed = 1'),
        ('"budget" = 512 # a "# b\n', 'budget = "64" # a "# b\n'),
        ('budget = "a # b" # c\n', 'budget = "64" # c\n'),
        ("# budget = 1\n# more\n", 'budget = "64"\n# more\n'),
        ("# first\r\nseed = 1\r\n", '# first\r\nseed = 1\r\nbudget = "64"\r\n'),
        ("seed = 1", 'seed = 1\nbudget = "64"\n'),
        ('[aliases]\nbudget = "x"\n', 'budget = "64"\n[aliases]\nbudget = "x"\n'),
        (
            'seed = 1\n\n# names\n[aliases]\na = "x"',
            'seed = 1\n\n# names\nbudget = "64"\n[aliases]\na = "x"',
        ),
        ('budget = """a\nb"""\nseed = 1\n', 'budget = "64"\nseed = 1\n'),
        ('system = """\nbudget = 1\n"""\n', 'system = """\nbudget = 1\n"""\nbudget = "64"\n'),
    ],
)
def test_a_line_is_changed_and_the_others_stay(before: str, after: str) -> None:
    assert edited(before, "budget", "64") == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '[aliases]\n"l3.1" = "o/m"\n'),
        ("seed = 1", 'seed = 1\n\n[aliases]\n"l3.1" = "o/m"\n'),
        ('[aliases] # mine\na = "b"\n', '[aliases] # mine\n"l3.1" = "o/m"\na = "b"\n'),
        ("[aliases]", '[aliases]\n"l3.1" = "o/m"\n'),
        ('[aliases]\n"l3.1"="x" # c\n[loaders]', '[aliases]\n"l3.1" = "o/m" # c\n[loaders]'),
        ("[aliases]\n'l3.1' = 'x'", '[aliases]\n"l3.1" = "o/m"\n'),
        ('aliases."l3.1" = "x"\nseed = 1\n', 'aliases."l3.1" = "o/m"\nseed = 1\n'),
        ('[loaders]\n"l3.1" = "x"\n', '[loaders]\n"l3.1" = "x"\n\n[aliases]\n"l3.1" = "o/m"\n'),
    ],
)
def test_a_key_of_a_table_is_set_there_and_removed_again(before: str, after: str) -> None:
    assert edited(before, "l3.1", "o/m", "aliases") == after
    left = tomllib.loads(edited(after, "l3.1", None, "aliases"))
    wanted = tomllib.loads(before)
    wanted.get("aliases", {}).pop("l3.1", None)
    assert {**left, "aliases": left.get("aliases", {})} == {"aliases": {}, **wanted}


@pytest.mark.parametrize("text", ["aliases = 3\n", "aliases = {a = 'b'}\n"])
def test_a_table_in_another_form_is_left_alone(text: str) -> None:
    with pytest.raises(ValueError, match=r"no table|cannot be changed safely"):
        edited(text, "a", "o/m", "aliases")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('budget = "512"   # as usual\nseed = 1', "seed = 1"),
        ('# budget = 1\n"budget" = 512\n', "# budget = 1\n"),
        ('budget = """a\nb"""\nseed = 1\n', "seed = 1\n"),
        ('budget = 1\n[aliases]\nbudget = "x"\n', '[aliases]\nbudget = "x"\n'),
        ('system = """\nbudget = 1\n"""\nbudget = 2', 'system = """\nbudget = 1\n"""\n'),
    ],
)
def test_a_key_is_removed_with_its_line_alone(before: str, after: str) -> None:
    assert edited(before, "budget", None) == after


@given(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.booleans(),
        st.integers(-(1 << 40), 1 << 40),
        st.floats(allow_nan=False, allow_infinity=False),
        st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3).map(tuple),
    )
)
def test_any_value_is_read_as_it_was_written(value: Plain) -> None:
    read = tomllib.loads(f"key = {literal(value)}")["key"]
    assert read == (list(value) if isinstance(value, tuple) else value)
    assert type(read) is (list if isinstance(value, tuple) else type(value))


@given(
    st.lists(
        st.sampled_from(
            ['budget = "1"', "# budget = 2", "[t]", "", "seed = 1", "x = '''", "'''", "#"]
        ),
        max_size=7,
    )
)
def test_whatever_the_file_holds_nothing_else_changes(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    after = tomllib.loads(edited(text, "budget", "64"))
    assert after == {**before, "budget": "64"}
    assert [line for line in text.splitlines() if line.startswith("seed")] == [
        line for line in edited(text, "budget", "64").splitlines() if line.startswith("seed")
    ]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "new"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "new/config.toml"


def test_set_makes_the_file_and_says_what_it_wrote(file: Path) -> None:
    terminal = screen()
    config_command.change("max-tokens", ["99"], terminal)
    assert file.read_text() == "max_tokens = 99\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert out(terminal) == "max_tokens = 99\n"
    assert str(file) in err(terminal).replace("~", str(Path.home()))
    config_command.change("stop", [r"\n", "Q:"], terminal)
    config_command.change("quiet", ["yes"], terminal)
    values = {name: value.value for name, value in load().values.items()}
    assert values == {"max_tokens": 99, "stop": ("\n", "Q:"), "quiet": True}


def test_a_file_of_config_init_gets_its_line(file: Path) -> None:
    config_command.init(screen())
    lines = file.read_text().splitlines()
    config_command.change("budget", ["20%"], screen())
    changed = file.read_text().splitlines()
    assert len(changed) == len(lines)
    assert [line for line in changed if line not in lines] == ['budget = "20%"']
    assert load().values["budget"].value == "20%"


def test_a_link_stays_a_link_and_permissions_stay(file: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("# mine\n")
    real.chmod(0o644)
    file.parent.mkdir()
    file.symlink_to(real)
    config_command.change("seed", ["3"], screen())
    assert file.is_symlink()
    assert real.read_text() == "# mine\nseed = 3\n"
    assert real.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["dotfiles.toml", "new"]


@pytest.mark.parametrize(
    ("key", "words", "message", "hint"),
    [
        ("tempratre", ["1"], "no key 'tempratre'", "did you mean temperature?"),
        ("budget", ["lots"], "budget: cannot read the budget 'lots'", ""),
        ("temperature", ["-1"], "temperature must be at least 0", ""),
        ("top_k", ["x"], "top_k must be a whole number", ""),
        ("dtype", ["int3"], "dtype must be one of auto", ""),
        ("system", ["be", "brief"], "system takes one value", "quote"),
        ("stats", ["perhaps"], "stats must be true or false", ""),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    file: Path, key: str, words: list[str], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        config_command.change(key, words, screen())
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert not file.exists()


def test_a_file_that_is_no_toml_is_left_alone(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("a = = 1\n")
    with pytest.raises(UsageError, match="is not valid TOML"):
        config_command.change("seed", ["3"], screen())
    assert file.read_text() == "a = = 1\n"


def test_aliases_are_set_listed_and_removed(
    file: Path,
    cache: Path,  # noqa: F811
) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    assert (
        run("config", "set", "aliases.l3.1", "owner/name").stdout
        == 'aliases."l3.1" = "owner/name"\n'
    )
    assert load().model("l3.1") == "owner/name"
    assert run("config", "set", "aliases.fast", "a/b").exit_code == 0
    assert "[aliases]\nfast = a/b\nl3.1 = owner/name\n" in run("config", "show").stdout
    assert "alias l3.1 = owner/name\n" in run("models").stderr
    assert completion.keys_set("") == ["aliases.fast", "aliases.l3.1"]
    failed = run("ask", "Who?", "-m", "l3.1", "--offline", "/dev/null")
    assert failed.exit_code == 2  # the document is read first
    failed = run("plan", "-m", "l3.1", "--offline")
    assert failed.exit_code == 3
    assert "/config.toml: [aliases] l3.1: owner/name is not" in failed.stderr
    assert run("config", "unset", "aliases.l3.1").stdout == 'aliases."l3.1" removed\n'
    assert load().aliases == {"fast": "a/b"}
    again = run("config", "unset", "aliases.l3.1")
    assert (again.exit_code, "aliases.l3.1 is not set in " in again.stderr) == (2, True)
    for words in (["bundled", "a/b"], ["x", ""], ["x", "a", "b"], ["a/b", "a/b"]):
        assert run("config", "set", f"aliases.{words[0]}", *words[1:]).exit_code == 2


def test_unset_removes_what_set_wrote_and_says_what_still_sets_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="seed is not set in"):
        config_command.unset("seed", screen())
    config_command.change("max-tokens", ["3"], screen())
    config_command.change("seed", ["3"], screen())
    monkeypatch.setenv("MINIKV_SEED", "5")
    terminal = screen()
    config_command.unset("--max-tokens", terminal)
    config_command.unset("seed", terminal)
    assert file.read_text() == ""
    assert out(terminal) == "max_tokens removed\nseed removed\n"
    assert "! MINIKV_SEED still sets seed" in err(terminal)
    file.write_text("bugdet = 3\nseed = 1\n[loaders]\ndocx = 'p {path}'\n")
    with pytest.raises(UsageError, match="unknown key 'bugdet'"):
        load()
    config_command.unset("bugdet", screen())  # what no command can read is removed, too
    assert load().values["seed"].value == 5
    with pytest.raises(UsageError, match="loaders is not set"):
        config_command.unset("loaders", screen())


@pytest.mark.parametrize(
    ("text", "variable", "flag", "begin"),
    [
        ('model = "nosuch"', "", "", "{file}: model: model 'nosuch' not found"),
        (
            'model = "fast"',
            "",
            "",
            "{file}: model: {file}: [aliases] fast: model 'nosuch' not found",
        ),
        ("", "nosuch", "", "MINIKV_MODEL: model 'nosuch' not found"),
        ("", "", "fast", "{file}: [aliases] fast: model 'nosuch' not found"),
        ('model = "other"', "other", "nosuch", "model 'nosuch' not found"),
    ],
)
def test_a_wrong_model_names_the_file_that_it_is_from(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    variable: str,
    flag: str,
    begin: str,
) -> None:
    file.parent.mkdir()
    file.write_text(f'{text}\n[aliases]\nfast = "nosuch"\n')
    monkeypatch.setenv("MINIKV_MODEL", variable)
    for command in (["ask", "-"], ["plan"]):
        words = [*command, *(["-m", flag] if flag else [])]
        done = CliRunner().invoke(app, words, input="Who?")
        assert done.exit_code == 3
        assert f"error: {begin.format(file=short(file))}" in done.stderr
    # A saved chat says itself which model it is.
    monkeypatch.setattr(minikv.cli.ask, "newest", lambda: "thesis")
    monkeypatch.setattr(minikv.cli.ask, "header", lambda name: name)
    gone = partial(replace, model="gone")
    monkeypatch.setattr(minikv.cli.ask, "resumed", lambda settings, *saved: gone(settings))
    done = CliRunner().invoke(app, ["ask", "Who?", "--continue"])
    assert "error: model 'gone' not found" in done.stderr


def test_it_says_what_wins_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_SEED", "5")
    terminal = screen()
    config_command.change("seed", ["3"], terminal)
    assert "! MINIKV_SEED sets seed, too, and wins over it here" in err(terminal)
    Path("minikv.toml").write_text("top_k = 3\n")
    config_command.change("top_k", ["4"], terminal)
    assert "! ./minikv.toml sets top_k" in err(terminal)

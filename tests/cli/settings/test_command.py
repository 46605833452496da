"""`minikv config set` and `unset`: one key changes, everything else in the file stays."""

# ruff: noqa: F401, F811 (fixtures that another file has)
from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from refusals import refused
from tables import table
from test_hub import cache
from typed import fails, invoke

from minikv.cli.settings.config import load

ALIAS, OWN = "aliases.l3.1", 'aliases."l3.1"'
LONG = "system = '''\nb = 1\n'''\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "new"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "new/config.toml"


@pytest.mark.parametrize(
    ("key", "before", "after", "unset"),
    [
        ("budget", "", 'budget = "64"\n', ""),
        ("budget", '  budget="5"  # mine\nseed = 1', '  budget="64"  # mine\nseed = 1', "seed = 1"),
        ("budget", '"budget" = 512 # a "# b\n', '"budget" = "64" # a "# b\n', ""),
        ("budget", "# more\n", '# more\nbudget = "64"\n', "# more\n"),
        ("budget", "seed = 1", 'seed = 1\nbudget = "64"\n', "seed = 1\n"),
        (
            "budget",
            'seed = 1\n\n# names\n[aliases]\na = "x" # b',
            'seed = 1\n\n# names\nbudget = "64"\n\n[aliases]\na = "x" # b',
            'seed = 1\n\n# names\n\n[aliases]\na = "x" # b',
        ),
        ("budget", 'budget = """a\nb"""\nseed = 1\n', 'budget = "64"\nseed = 1\n', "seed = 1\n"),
        ("budget", LONG, f'{LONG}budget = "64"\n', None),
        (ALIAS, "", '[aliases]\n"l3.1" = "64"\n', "[aliases]\n"),
        (ALIAS, '[aliases] # x\na = "b"\n', '[aliases] # x\na = "b"\n"l3.1" = "64"\n', None),
        (ALIAS, '[aliases]\n"l3.1"="x" # c\n', '[aliases]\n"l3.1"="64" # c\n', "[aliases]\n"),
        (ALIAS, f'{OWN} = "x"\nseed = 1\n', f'{OWN} = "64"\nseed = 1\n', "seed = 1\n"),
    ],
)
def test_a_line_is_changed_and_the_others_stay(
    file: Path, key: str, before: str, after: str, unset: str | None
) -> None:
    file.parent.mkdir()
    file.write_text(before)
    for words, text in ((("set", key, "64"), after), (("unset", key), unset)):
        assert invoke("config", *words).exit_code == 0
        assert file.read_text() == (before if text is None else text)


def test_set_makes_the_file_and_says_what_it_wrote(file: Path, tmp_path: Path) -> None:
    done = invoke("config", "set", "max-tokens", "99")
    assert file.read_text() == done.stdout == "max_tokens = 99\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert str(file) in done.stderr.replace("~", str(Path.home()))
    invoke("config", "set", "stop", r"\n", "Q:")
    invoke("config", "set", "quiet", "yes")
    values = dict(load().values)
    assert values == {"max_tokens": 99, "stop": ("\n", "Q:"), "quiet": True}
    # A link stays a link, and permissions stay.
    file.unlink()
    real = tmp_path / "dotfiles.toml"
    real.write_text("# mine\n")
    real.chmod(0o644)
    file.symlink_to(real)
    invoke("config", "set", "seed", "3")
    assert file.is_symlink()
    assert real.read_text() == "# mine\nseed = 3\n"
    assert real.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["dotfiles.toml", "new"]


@table("""
    words                   | message                                            | text
    set tempratre 1         | no key 'tempratre'\\n  did you mean temperature?   |
    set system be brief     | system takes one value, got 'be brief'\\n  put     |
    set aliases.bundled a/b | bundled cannot be an alias of a/b                  |
    set aliases.x ''        | x cannot be an alias of nothing                    |
    set aliases.x a b       | x cannot be an alias of a b                        |
    set aliases.a/b a/b     | a/b cannot be an alias of a/b                      |
    unset seed              | seed is not set in                                 |
    unset aliases.x         | aliases.x is not set in                            |
    unset aliases           | aliases is not set in                         | [aliases]\\nx = 'p'\\n
    set seed 3              | is not valid TOML                                  | a = = 1\\n
    set aliases.a b         | aliases is not a table\\n  edit it by hand         | aliases = 3\\n
""")
def test_what_is_refused_writes_nothing(file: Path, text: str, words: str, message: str) -> None:
    if text:
        file.parent.mkdir()
        file.write_text(text)
    fails(invoke("config", *shlex.split(words)), 2, message)
    assert file.exists() == bool(text)
    assert not text or file.read_text() == text


def test_aliases_are_set_listed_and_removed(file: Path, cache: Path) -> None:
    made = invoke("config", "set", "aliases.l3.1", "owner/name").stdout
    assert made == 'aliases."l3.1" = "owner/name"\n'
    assert load().model("l3.1") == "owner/name"
    assert invoke("config", "set", "aliases.fast", "a/b").exit_code == 0
    assert "[aliases]\nl3.1 = owner/name\nfast = a/b\n" in invoke("config", "show").stdout
    assert "alias l3.1 = owner/name\n" in invoke("models").stderr
    fails(invoke("plan", "-m", "l3.1", "--offline"), 3, "error: owner/name is not")
    assert invoke("config", "unset", "aliases.l3.1").stdout == 'aliases."l3.1" removed\n'
    assert load().aliases == {"fast": "a/b"}


def test_set_and_unset_say_what_else_sets_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("config", "set", "max-tokens", "3")
    monkeypatch.setenv("MINIKV_SEED", "5")
    Path("minikv.toml").write_text("top_k = 3\n")
    told = "! MINIKV_SEED also sets seed, and wins over it here"
    assert told in invoke("config", "set", "seed", "3").stderr
    assert "! ./minikv.toml also sets top_k" in invoke("config", "set", "top_k", "4").stderr
    assert invoke("config", "unset", "max-tokens").stdout == "max_tokens removed\n"
    assert "! MINIKV_SEED still sets seed" in invoke("config", "unset", "seed").stderr
    invoke("config", "unset", "top_k")
    assert file.read_text() == ""
    file.write_text("bugdet = 3\nseed = 1\n")
    refused("unknown key 'bugdet'", load)
    invoke("config", "unset", "bugdet")  # what no command can read is removed, too
    assert load().values["seed"] == 5
    file.write_text("quality = 1 # mine\nseed = 3\n[loaders]\nodt = 'p'\n")
    for key in ("quality", "loaders"):
        assert invoke("config", "unset", key).exit_code == 0
    assert file.read_text() == "seed = 3\n"

"""--help: the flags that people use, --help-all: all of them, and words instead of types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
import typer
from typed import invoke

from minikv.cli.main import app
from minikv.cli.settings.help import Group

MOST = 13
"""Flags that --help shows, at most, with --help and --help-all."""


def paths(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group, as the words that are typed for it."""
    yield path
    if isinstance(group, Group):
        for name in group.commands:
            yield from paths(group.whole(name), (*path, name))


PATHS = list(paths(typer.main.get_command(app)))


def flags_of(path: tuple[str, ...]) -> set[str]:
    """The long flags that the command parses."""
    command: object = typer.main.get_command(app)
    for word in path:
        assert isinstance(command, Group)
        command = command.whole(word)
    names = (name for param in command.params for name in param.opts)  # type: ignore[attr-defined]
    return {name for name in names if name.startswith("--")}


@cache
def shown(*arguments: str) -> str:
    result = invoke(*arguments, env={"COLUMNS": "100", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(text: str) -> list[str]:
    """The lines of the panels that begin with a flag."""
    return re.findall(r"^│ (?:\* )? {0,3}(--\S+)|^│ +-o +NAME=VALUE", text, re.MULTILINE)


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_is_short_and_help_all_is_complete(path: tuple[str, ...]) -> None:
    """And neither shows a type, nor a name in braces."""
    text, flags = shown(*path, "--help"), flags_of(path)
    assert re.findall(r"<[^ >]*>|\{\w*\}", text) == []
    assert len(rows(text)) <= MOST
    if "--help-all" not in text:
        assert {flag for flag in flags if flag not in text} == set()
        return
    hidden = re.search(r"--help-all +also show the other (?:(\d+) flags|flag)", text)
    assert hidden is not None
    whole = shown(*path, "--help-all")
    assert re.findall(r"<[^ >]*>", whole) == []
    assert {flag for flag in flags if flag not in whole} == set()
    assert len(rows(whole)) == len(rows(text)) - 1 + int(hidden[1] or 1)


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_what_people_use_is_in_the_first_tier(command: str) -> None:
    first, every = ({*rows(shown(command, flag))} for flag in ("--help", "--help-all"))
    assert first >= {"--model", "--budget", "--policy", "--weights", "--system", "--max-tokens"}
    assert every - first >= {"--stride", "--kernels", "--min-p", "--dtype", "--debug"}


def test_what_json_prints_is_said_and_a_flag_of_the_second_tier_works() -> None:
    """Completion offers no hidden flags, so none is hidden from it."""
    ask, plan = "the answer and the figures of the turn", "the forecast as one JSON object"
    for command, words in (("ask", ask), ("plan", plan)):
        assert words in re.sub(r"[\s│]+", " ", shown(command, "--help"))
    said = invoke("plan", "--stride", "x")
    assert "--stride must be a whole number, got 'x'" in said.output
    assert "--min-p" in shown("ask", "--help-all")  # which does not ask for the arguments
    env = {"_MINIKV_COMPLETE": "complete_bash", "COMP_WORDS": "minikv chat --str"}
    done = invoke(prog_name="minikv", env=env | {"COMP_CWORD": "2"})
    assert done.output.split() == ["--stride"]


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_a_narrow_terminal_gets_every_word(path: tuple[str, ...]) -> None:
    """And a list of commands says what each does, not how it is typed."""
    said = invoke(*path, "--help", env={"COLUMNS": "50", "TERM": "dumb"}).stdout
    assert "…" not in said
    commands = said.partition("Commands:")[2]
    assert re.findall(r"^ +\w+ +minikv ", commands, re.MULTILINE) == []

"""`minikv chats`: the list, what was said, and removal."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from forked import Forked
from test_keeper import keeper, talked
from typed import World, fails, invoke
from typer.testing import Result

from minikv.chat.report import size
from minikv.cli.saved.commands import age
from minikv.cli.screen.text import clean


@pytest.fixture
def two(home: Path) -> Path:
    """Two saved chats, `thesis` the newer."""
    for at, name in enumerate(("budget-talk", "thesis")):
        put(home, name, 1000.0 + at)
    return home


def put(home: Path, name: str, at: float) -> None:
    """A chat that was saved last at this time."""
    one = keeper()
    one.save(talked(), name)
    one.close()
    os.utime(home / name / "chat.db", (at, at))


def run(*arguments: str) -> Result:
    return invoke("chats", *arguments)


def test_the_list_has_names_turns_documents_age_and_size(two: Path) -> None:
    result = run()
    assert result.exit_code == 0
    head, first, second = result.stdout.splitlines()
    assert head.split() == ["NAME", "TURNS", "AGE", "SIZE", "DOCS", "FIRST", "QUESTION"]
    total = sum(path.stat().st_size for path in two.glob("*/*"))
    assert result.stderr.splitlines() == [f"2 chats, {size(total)}"]
    assert re.match(r"thesis +2 +[\d,]+ d +[\d.]+ KiB +3  Who owns the mill\?$", first)
    assert second.startswith("budget-talk ")
    text = run("show", "thesis").stdout
    assert text.startswith("document mill.txt\n> Who owns\nthe mill?\n")
    assert text.endswith("document w.txt, not read yet\n")
    assert all(clean(turn.answer.strip("\n")) in text for turn in talked().turns)
    # Without chats it says where they would be.
    shutil.rmtree(two)
    result = run()
    fails(result, 0, f"no saved chat in {two}")
    assert result.stdout == ""


@pytest.mark.parametrize("command", [("show",), ("rm", "--yes")])
def test_a_name_that_is_not_there_names_the_nearest(two: Path, command: tuple[str, ...]) -> None:
    fails(run(*command, "thesys"), 2, "error: no saved chat 'thesys'", "did you mean thesis?")
    fails(run(*command, "../thesis"), 2, "cannot be the name of a chat")
    assert sorted(os.listdir(two)) == ["budget-talk", "thesis"]


def test_rm_asks_nobody_where_nobody_is_there(two: Path) -> None:
    """A damaged chat can be removed."""
    shutil.copytree(two / "thesis", two / "damaged")
    (two / "damaged" / "chat.db").write_text("{")
    assert run("show", "damaged").exit_code == 2
    assert run("rm", "damaged", "-y").exit_code == 0
    assert sorted(os.listdir(two)) == ["budget-talk", "thesis"]
    for words in (("thesis",), ("--older", "1d")):
        fails(run("rm", *words), 2, "--yes removes without asking")
        assert len(os.listdir(two)) == 2
    fails(run("rm", "thesis", "budget-talk", "--yes"), 0, "removed thesis")
    assert os.listdir(two) == []


@pytest.mark.parametrize(
    ("words", "code", "left"),
    [
        (("thesis", "nosuch"), 2, ["budget-talk", "thesis"]),
        (("thesis", "budget-talk"), 2, ["budget-talk", "thesis"]),
        (("--older", "1d"), 0, ["budget-talk"]),
    ],
)
def test_rm_leaves_an_open_chat(
    two: Path, words: tuple[str, ...], code: int, left: list[str]
) -> None:
    """What was named is removed as a whole, or not at all."""
    one = keeper()
    one.load(talked(), "budget-talk")
    result = run("rm", *words, "--yes")
    one.close()
    assert (result.exit_code, sorted(os.listdir(two))) == (code, left)
    assert ("open in another minikv" in result.stderr) == ("nosuch" not in words)
    assert ("budget-talk is open in another minikv: it stays" in result.stderr) == (code == 0)


DAY = 86400


@pytest.mark.parametrize(
    ("older", "left"),
    [
        ("30d", "new day week"),
        ("1mo", "new day week"),
        ("8 d", "new day week"),
        ("1w", "new day"),
        ("36h", "new day"),
        ("23.5h", "new"),
        ("90min", "new"),
        ("1y", "new day week month"),
        ("10y", "new day week month years"),
    ],
)
def test_rm_older(two: Path, older: str, left: str) -> None:
    ages = {"new": 60, "day": DAY + 60, "week": 7.5 * DAY, "month": 31 * DAY, "years": 800 * DAY}
    for name, seconds in ages.items():
        shutil.copytree(two / "thesis", two / name)
        os.utime(two / name / "chat.db", (time.time() - seconds,) * 2)
    for name in ("thesis", "budget-talk"):
        shutil.rmtree(two / name)
    result = run("rm", "--older", older, "--yes")
    assert result.exit_code == 0
    assert set(os.listdir(two)) == set(left.split())
    assert ("nothing was removed" in result.stderr) == ("years" in left)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "rm takes the names of chats, or --older"),
        (("thesis", "--older", "1d"), "rm takes the names of chats, or --older"),
        *((("--older", age), "cannot read the age") for age in ("", "30", "-1d", "d", "1q")),
    ],
)
def test_rm_refuses(two: Path, words: tuple[str, ...], said: str) -> None:
    fails(run("rm", *words, "--yes"), 2, said)
    assert sorted(os.listdir(two)) == ["budget-talk", "thesis"]


@pytest.mark.parametrize("command", ["/clear", "/reset", "/drop 1", "/load first"])
def test_a_new_conversation_says_where_the_old_one_is(
    world: World, document: str, home: Path, command: str
) -> None:
    def said(*lines: str, flags: str = "") -> list[str]:
        result = world.ok("chat", document, *flags.split(), input="\n".join((*lines, "")))
        assert "None" not in result.stderr
        return result.stderr.splitlines()

    said("First?", "/save first")
    lines = said("Who?", command)
    (name,) = set(os.listdir(home)) - {"first"}
    assert f"  the chat so far is saved as {name}; /load {name} goes back to it" in lines
    said("Other?", command, f"/load {name}", "Why?")
    assert [turn.question for turn in world.session.turns] == ["Who?", "Why?"]
    assert "  the chat so far was not saved and is lost" in said("Who?", command, flags="--no-save")
    assert not any("the chat so far" in line for line in said(command))
    assert not any("the chat so far" in line for line in said("Who?", "/undo", command))
    named = said("Who?", "/save x", "/undo", command)  # without a turn, and it stays
    back = "  the chat so far is saved as x; /load x goes back to it"
    assert (back in named) == (command != "/drop 1")


@pytest.mark.parametrize(("typed", "left"), [("n\n", 2), ("\n", 2), ("\x04", 2), ("y\n", 1)])
def test_rm_asks_on_a_terminal(two: Path, typed: str, left: int) -> None:
    env = {"TERM": "xterm", "MINIKV_HOME": str(two.parent)}
    with closing(Forked("chats", "rm", "thesis", env=env)) as terminal:
        assert "remove chat thesis, " in terminal.until("[y/N] ")
        terminal.type(typed)
        assert terminal.code() == 0
    assert len(os.listdir(two)) == left
    assert ("nothing was removed" in terminal.seen) == (left == 2)


@pytest.mark.parametrize("columns", [32, 50, 80])
def test_the_list_fits_the_terminal(two: Path, columns: int) -> None:
    env = {"TERM": "xterm", "MINIKV_HOME": str(two.parent)}
    with closing(Forked("chats", env=env, columns=columns)) as terminal:
        assert terminal.code() == 0
    assert "thesis" in terminal.seen.split()
    assert max(map(len, terminal.seen.splitlines())) <= columns


def test_ages() -> None:
    told = {-1: "0 s", 0: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h"}
    told |= {86399: "23 h", 86400: "1 d", 1e8: "1,157 d"}
    assert {seconds: age(seconds) for seconds in told} == told


# -- the chat itself ------------------------------------------------------------------------
def test_leaving_says_how_to_come_back(world: World, document: str, home: Path) -> None:
    result = world.run("chat", document, input="Who runs it?\n")
    (name,) = os.listdir(home)
    assert result.stderr.splitlines()[-1] == f"minikv chat --resume {name} continues this chat"
    assert result.stderr.count("--resume") == 1
    assert "--no-save" not in result.stderr  # on a terminal only
    assert "--resume" not in world.run("chat", document, "--no-save", input="x\n").stderr
    assert "--resume" not in world.run("chat", document, input="\n").stderr


def test_coming_back_shows_documents_and_the_last_exchange(world: World, document: str) -> None:
    said = world.run("chat", document, input="Who runs it?\nAnd\twhy?\n").stdout.splitlines()
    lines = world.run("chat", "--resume=", input="").stderr.splitlines()
    assert lines[0].split(": ")[1].startswith("2 turns, resumed in ")
    assert lines[2:] == ["  report.txt: 23 characters", "› And why?", said[-1]]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (partial(Path.write_text, data="The mill is run by Ida."), "was changed since it was read"),
        (os.unlink, "is no longer there"),
        (partial(os.utime, times=(5, 5)), ""),  # touched, and the same
        (str, ""),
    ],
)
@pytest.mark.parametrize("command", ["chat", "ask"])
def test_a_document_that_changed_is_told(
    world: World, document: str, act: Callable[[Path], object], said: str, command: str
) -> None:
    if command == "chat":
        world.run("chat", document, input="Who runs it?\n")
    else:
        world.run("ask", "Who runs it?", document)
    act(Path(document))
    arguments = ("chat", "--resume=") if command == "chat" else ("ask", "--continue", "Why?")
    text = world.run(*arguments, input="").stderr
    told = [line for line in text.splitlines() if "report.txt" in line and line[0] == "!"]
    line = f"! report.txt {said}; this chat keeps the text as it was"
    assert told == [line] * bool(said)


def test_that_text_is_stored_is_told_once_on_a_terminal(document: str, home: Path) -> None:
    env = {"TERM": "dumb", "MINIKV_HOME": str(home.parent)}
    with closing(Forked("chat", document, env=env, columns=200, pace=0)) as terminal:
        for question in ("Who?", "Why?"):
            terminal.ready()
            terminal.type(f"{question}\n")
            terminal.until("without eviction")
        terminal.ready()
        terminal.type("\x04")
        assert terminal.code() == 0
    (name,) = os.listdir(home)
    seen = " ".join(terminal.seen.split())
    where = f"saved with all its text in {home / name}; --no-save turns that off"
    assert seen.count(where) == 1
    assert seen.count(f"minikv chat --resume {name} continues this chat") == 1

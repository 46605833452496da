"""`minikv chats`: the list, what was said, and removal; /save, /fork and /load."""

from __future__ import annotations

import errno
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
from lettered import lettered
from pairwise import pairwise
from refusals import refused
from small_chat import chat, reported
from tables import table
from talk import Talk, make
from test_keeper import keeper, saved, talked
from typed import World, fails, invoke
from typer.testing import Result

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.cli.saved import commands
from minikv.cli.saved.commands import age
from minikv.cli.saved.database import ChatFile
from minikv.cli.saved.transcript import read
from minikv.cli.screen.text import clean
from minikv.cli.settings.config import SETTINGS


@pytest.fixture
def two(home: Path) -> Path:
    """Two saved chats, `thesis` the newer."""
    for at, name in enumerate(("budget-talk", "thesis")):
        saved(talked(), name).close()
        os.utime(home / name / "chat.db", (1000 + at, 1000 + at))
    return home


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


@table(r"""
    words                | said
    show thesys          | error: no saved chat 'thesys'\n  did you mean thesis?
    rm --yes thesys      | error: no saved chat 'thesys'\n  did you mean thesis?
    show ../thesis       | cannot be the name of a chat
    rm --yes ../thesis   | cannot be the name of a chat
    rm thesis            | --yes removes without asking
    rm --older 1d        | --yes removes without asking
    rm -y                | rm takes the names of chats, or --older
    rm -y thesis --older 1d | rm takes the names of chats, or --older
    rm -y --older=       | cannot read the age
    rm -y --older 30     | cannot read the age
    rm -y --older -1d    | cannot read the age
    rm -y --older d      | cannot read the age
    rm -y --older 1q     | cannot read the age
""")
def test_what_is_refused_removes_nothing(two: Path, words: str, said: str) -> None:
    fails(run(*words.split()), 2, said)
    assert sorted(os.listdir(two)) == ["budget-talk", "thesis"]


def test_rm_removes_a_damaged_chat_and_several(two: Path) -> None:
    shutil.copytree(two / "thesis", two / "damaged")
    (two / "damaged" / "chat.db").write_text("{")
    assert run("show", "damaged").exit_code == 2
    assert run("rm", "damaged", "-y").exit_code == 0
    assert sorted(os.listdir(two)) == ["budget-talk", "thesis"]
    fails(run("rm", "thesis", "budget-talk", "--yes"), 0, "removed thesis")
    assert os.listdir(two) == []


@table("""
    words              | code | left
    thesis nosuch      | 2    | budget-talk thesis
    thesis budget-talk | 2    | budget-talk thesis
    --older 1d         | 0    | budget-talk
""")
def test_rm_leaves_an_open_chat(two: Path, words: str, code: str, left: str) -> None:
    """What was named is removed as a whole, or not at all."""
    one = keeper()
    one.load(talked(), "budget-talk")
    result = run("rm", *words.split(), "--yes")
    one.close()
    assert (result.exit_code, sorted(os.listdir(two))) == (int(code), left.split())
    assert ("open in another minikv" in result.stderr) == ("nosuch" not in words)
    assert ("budget-talk is open in another minikv: it stays" in result.stderr) == (code == "0")


DAY = 86400


@table("""
    older | left
    30d   | new day week
    1mo   | new day week
    8 d   | new day week
    1w    | new day
    36h   | new day
    23.5h | new
    90min | new
    1y    | new day week month
    10y   | new day week month years
""")
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


@pytest.mark.parametrize("command", ["/clear", "/reset", "/drop 1", "/load first"])
def test_where_the_old_conversation_is(
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
def test_leaving_says_how_to_come_back(
    world: World, document: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = world.run("chat", document, input="Who runs it?\n")
    (name,) = os.listdir(home)
    assert result.stderr.splitlines()[-1] == f"minikv chat --resume {name} continues this chat"
    assert result.stderr.count("--resume") == 1
    assert "--no-save" not in result.stderr  # on a terminal only
    assert "--resume" not in world.run("chat", document, "--no-save", input="x\n").stderr
    assert "--resume" not in world.run("chat", document, input="\n").stderr
    # Coming back shows documents and the last exchange.
    said = world.run("chat", document, input="Who runs it?\nAnd\twhy?\n").stdout.splitlines()
    lines = world.run("chat", "--resume=", input="").stderr.splitlines()
    assert lines[0].split(": ")[1].startswith("2 turns, resumed in ")
    assert lines[2:] == ["  report.txt: 23 characters", "› And why?", said[-1]]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(ChatFile, "write", full)
        lines = world.run("chat", document, input="Who runs it?\nWhy?\n").stderr.splitlines()
    assert lines[-1].endswith("continues this chat, as it was last saved")
    assert any("it continues unsaved" in line for line in lines)


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


# -- /save, /fork and /load as a person sees them ---------------------------------------------
def test_where_settings_come_from_after_a_retry_and_a_load(real: Talk) -> None:
    """And what a run took from the chat that it resumed."""

    def changed() -> dict[str, str]:
        return {name: origin for name, origin in origins.items() if origin != "default"}

    origins = real.context.origins
    origins |= dict.fromkeys(SETTINGS, "default")
    real.ask("Who?")
    real.run("save mine")
    real.run("retry --policy streaming --seed 3")
    assert changed() == {}
    origins["temperature"] = "--temperature"
    real.run("load mine")
    held = {"policy", "decode", "budget", "stride"}
    own = {"seed", "system", "pin_system", "reuse", "overflow"}
    run = {"model", "revision", "dtype", "kv", "weights"}
    from_chat = dict.fromkeys(held | own, "chat mine")
    assert changed() == {**from_chat, "temperature": "--temperature"}
    mine, session = read("mine"), real.session
    assert commands.origins_of(session, mine, ()) == dict.fromkeys(held | own | run, "chat mine")
    stated = set(commands.origins_of(session, mine, {"seed", "model"}))
    assert stated == (held | own | run) - {"seed", "model", "revision"}
    for name in ("budget", "policy"):
        assert {*commands.origins_of(session, mine, {name})} == (held | own | run) - {name}
        session.configure(EvictionConfig.read("snapkv", budget=48))


def test_save_and_load(real: Talk) -> None:
    real.ask("Who?")
    _, err = real.run("save mine")
    assert err.startswith("saved as mine, and after every turn from now on: ")
    assert "minikv chat --resume mine" in err
    want = real.ask("Why?")
    keeper = real.context.keeper
    keeper.keep(real.session)
    real.run("undo")
    real.session.reset()
    real.ask("Something else")
    keeper.keep(real.session)
    _, err = real.run("load mine")
    first, *lines = err.splitlines()
    assert first.startswith("mine: 2 turns, resumed in ")
    assert first.endswith(" ms; nothing was read again")
    policy = "  adakv, then h2o · budget 48 tokens per head"
    assert lines[:3] == [policy, "  mill.txt: 224 characters", "› Why?"]
    assert clean(real.session.turns[-1].answer).rstrip("\n") == want.rstrip("\n")
    assert "your next question reads it again" in real.run("load mine --reread")[1]
    _, err = real.run("load")
    head, _, last = err.splitlines()
    assert head.split()[:3] == ["NAME", "TURNS", "AGE"]
    assert last.split()[:2] == ["mine", "2"]
    assert last.endswith("Who?")
    real.run("load mine")
    real.ask("And now?")
    rest = "your next question reads the rest of the conversation again"
    assert rest in real.run("undo 2")[1]
    assert [turn.question for turn in real.session.turns] == ["Who?"]
    real.run("load mine")
    assert "asking again: Why?" in real.run("retry")[1]
    assert real.session.reports[-1].reuse == "refresh"


def test_without_saving(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    talk = make(chat(), capsys, active=False)
    assert talk.run("load")[1] == f"no saved chat in {home}\n"
    talk.ask("Who?")
    talk.context.keeper.keep(talk.session)
    assert not home.exists()
    talk.run("save mine")
    talk.ask("Why?")
    talk.context.keeper.keep(talk.session)
    assert len(read("mine").turns) == 2
    other = make(chat(), capsys, active=False)
    other.ask("not saved")
    refused("open in another", other.run, "load mine")
    assert not capsys.readouterr().err


POLICIES = ("adakv", "streaming", "full")


@pytest.mark.parametrize(
    ("policy", "tier", "reuse"),
    pairwise(POLICIES, ("auto", "file", "none"), ("auto", "recall", "refresh", "once")),
)
def test_a_chat_that_is_opened_says_what_the_next_question_reads(
    policy: str, tier: str, reuse: str, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    """One thing, and that is what happens."""
    if reuse == "recall" and (tier == "none" or policy == "full"):
        return  # refused, or nothing to recall

    def started() -> Talk:
        eviction = EvictionConfig.read(policy, budget="48")
        return make(lettered(eviction, tier=tier, reuse=reuse), capsys)

    first = started()
    first.session.attach("A mill stands by the river. " * 8, "mill.txt")
    first.ask("Who?")
    first.run("save mine")
    if tier != "file":  # a tier in memory is not there in the next process
        shutil.rmtree(home / "mine" / "tier.kv", ignore_errors=True)
    first.context.keeper.close()
    first.session.recall.leave()
    second = started()
    _, err = second.run("load mine")
    seen = len(second.session.fed)
    said = next(line for line in err.splitlines() if line.startswith("mine: 1 turn, resumed in"))
    second.ask("Why?")
    read = reported(second.session).tokens.prompt_new
    again = re.search(r"; your next question reads ([\d,]+) tokens again$", said)
    assert said.endswith("; nothing was read again") == (again is None)
    question = read - (int(again[1].replace(",", "")) if again else 0)
    assert 0 < question < 60 < seen
    second.session.recall.leave()

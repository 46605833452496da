"""A chat is a file: it continues without being read again, under any policy, budget or --kv."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked
import pytest
import torch
from refusals import failing, refused
from small_chat import chat, held_of, say
from sqlite_calls import edit
from tiers import MILL, RIVER

from minikv.cache.tier_file import FileRows, Header, is_open, remove
from minikv.cache.tier_rows import RamRows
from minikv.chat.closing import Facts
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.cli.saved import keeper as keepers
from minikv.cli.saved import transcript
from minikv.cli.saved.keeper import TIER, Keeper
from minikv.cli.saved.transcript import read
from minikv.cli.screen.terminal import Terminal

pytestmark = pytest.mark.usefixtures("home")
OPEN: list[tuple[Keeper, ChatSession]] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """What a process leaves open is closed with it."""
    yield
    end()


def end() -> None:
    for keeper, session in OPEN:
        session.recall.leave()
        keeper.close()
    OPEN.clear()


def begun(kind: str = "file", dtype: str = "same", **given: Any) -> ChatSession:
    session = chat(reuse="auto", **given)
    session.recall = Recall(session.engine.kv, kind, dtype)
    return session


def start(
    kind: str = "file", dtype: str = "same", *, save: bool = True, **given: Any
) -> tuple[Keeper, ChatSession]:
    """A process, as `minikv chat` begins one."""
    keeper, session = Keeper(Terminal(), active=save), begun(kind, dtype, **given)
    keeper.attend(session)
    OPEN.append((keeper, session))
    return keeper, session


def asked(name: str | None = None, **given: Any) -> tuple[Keeper, ChatSession]:
    """A process whose chat has been asked about the mill."""
    keeper, session = start(**given)
    session.attach(MILL, name)
    say(session, "Who?")
    return keeper, session


def resumed(name: str, given: tuple[str, ...] = (), **kept: Any) -> tuple[Keeper, ChatSession]:
    """The process ends; another one takes the chat up."""
    end()
    keeper, session = start(**kept)
    keeper.load(session, name, given=given)
    return keeper, session


def river(session: ChatSession) -> None:
    session.attach(RIVER, "river.txt")
    say(session, "Why?")


def talked(kind: str = "file", dtype: str = "same", **given: Any) -> tuple[Keeper, ChatSession]:
    """A chat of two turns that is saved as "one"."""
    keeper, session = asked("mill.txt", kind=kind, dtype=dtype, **given)
    keeper.keep(session)
    river(session)
    keeper.save(session, "one")
    return keeper, session


def unread(session: ChatSession, question: str) -> tuple[str, list[int]]:
    """Ask; all of the documents must come from the tier."""
    found = say(session, question)
    report = session.reports[-1]
    assert (report.reuse, report.tokens.prompt_new < len(MILL) // 2) == ("recall", True)
    return found


full = failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


# -- resumed ---------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["file", "ram"])
@pytest.mark.parametrize("dtype", ["same", "int8"])
def test_the_next_question_is_a_recall(home: Path, kind: str, dtype: str) -> None:
    """With --tier file, and with /save of a chat whose tier is in memory."""
    _, session = talked(kind, dtype)
    twin = talked_on(kind, dtype)
    assert stat.S_IMODE((home / "one" / TIER).stat().st_mode) == 0o700
    _, again = resumed("one", kind="auto")
    assert (again.recall.place, again.fed) == ("file", session.fed)
    assert unread(again, "And now?") == twin[0]
    assert unread(again, "Then?") == twin[1]
    assert held_of(again) == twin[2]


def talked_on(kind: str = "file", dtype: str = "same") -> tuple[Any, Any, Any]:
    """What the chat answers that was never closed."""
    session = begun(kind, dtype)
    session.attach(MILL, "mill.txt")
    say(session, "Who?")
    river(session)
    found = say(session, "And now?"), say(session, "Then?"), held_of(session)
    session.recall.leave()
    return found


@pytest.mark.parametrize(
    ("policy", "budget", "given"),
    [
        ("snapkv", 64, "policy budget"),
        ("adakv", 96, "budget"),
        ("streaming", 48, "policy"),
        ("adakv", 48, "kv"),
    ],
)
def test_another_policy_budget_or_kv(policy: str, budget: int, given: str) -> None:
    """As a chat that reads all of it under them."""
    talked()
    facts = Facts(kv="int8" if given == "kv" else "float32")
    _, again = resumed("one", tuple(given.split()), policy=policy, budget=budget, facts=facts)
    assert (again.eviction, again.fed) == (EvictionConfig.read(policy, budget=budget), [])
    plain = begun("ram", policy=policy, budget=budget)
    plain.restore(again.snapshot())
    assert unread(again, "And now?") == say(plain, "And now?")
    assert held_of(again) == held_of(plain)
    assert plain.reports[-1].reuse == "refresh"


def test_without_eviction() -> None:
    """All that the tier has is in the cache, as if it had been read."""
    talked()
    _, again = resumed("one", ("policy",), policy="full")
    known = list(again.known)
    unread(again, "And now?")
    plain = chat("full")
    plain.engine.prompt(again.fed)
    assert again.fed[: len(known)] == known
    assert held_of(again) == held_of(plain)
    logits = again.engine.step(1), plain.engine.step(1)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    say(again, "Then?")
    assert again.reports[-1].reuse == "once"


def test_a_cache_that_is_damaged_or_was_not_saved_is_not_missed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = talked_on()
    talked()
    end()
    edit(home / "one" / "chat.db", "cache", lambda row: row.__setitem__(0, row[0][:-100]))
    keeper, again = resumed("one")
    assert "damaged" in capsys.readouterr().err
    monkeypatch.setattr(transcript, "CACHE_BYTES", 100)
    assert unread(again, "And now?") == twin[0]
    keeper.keep(again)
    assert not read("one").facts["cache"]
    _, third = resumed("one")
    assert capsys.readouterr().err == ""
    assert unread(third, "Then?") == twin[1]


def test_memory_is_taken_where_it_was_asked_for(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing where no tier or another number format was. Where there is no memory, the chat is
    loaded, says so, and answers as one that reads all of it."""
    twin = talked_on()
    talked()
    _, again = resumed("one", kind="ram")
    assert again.recall.place == "ram"
    assert not is_open(home / "one" / TIER)
    assert unread(again, "And now?") == twin[0]
    for given in ({"kind": "none"}, {"given": ("tier_dtype",), "dtype": "int8"}):
        _, again = resumed("one", **given)
        assert again.recall.tier is None
    assert capsys.readouterr().err == ""
    with patch.object(RamRows, "reserve", failing(MemoryError())):
        keeper, again = resumed("one", kind="ram")
    assert "the tier cannot be used: out of memory" in capsys.readouterr().err
    assert (keeper.name, len(again.turns), again.recall.tier) == ("one", 2, None)
    assert FileRows.open(home / "one" / TIER).rows > 0  # nobody holds it
    assert say(again, "And now?") == twin[0]


def test_a_tier_of_another_model_is_left_alone(home: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text(name)
    keeper, session = asked(facts=Facts(model=str(tmp_path / "a")))
    keeper.save(session, "one")
    end()
    rows = home / "one" / TIER / "rows"
    before = rows.read_bytes()
    keeper, other = start()
    other.facts = replace(other.facts, model=str(tmp_path / "b"))
    refused("does not belong to this run", keeper.load, other, "one")
    assert other.recall.tier is None
    keeper.load(other, "one", reread=True)
    say(other, "Why?")
    end()
    assert other.reports[-1].reuse == "refresh"
    assert rows.read_bytes() == before


def test_a_loaded_chat_leaves_the_file_of_the_one_before(home: Path) -> None:
    keeper, session = talked()
    session.reset()
    session.attach(RIVER)
    say(session, "Else?")
    keeper.save(session, "two")
    rows = home / "two" / TIER / "rows"
    before = rows.read_bytes()
    keeper.load(session, "one")
    unread(session, "And now?")
    keeper.keep(session)
    assert rows.read_bytes() == before
    keeper.load(session, "one")  # the one that is open
    assert not session.pending
    unread(session, "Then?")
    keeper.load(session, "two")
    unread(session, "Then?")


# -- forks --------------------------------------------------------------------------------------
def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["file", "ram"])
def test_a_fork_goes_on_and_leaves_the_other(home: Path, kind: str) -> None:
    twin = talked_on()
    keeper, session = talked(kind)
    keeper.save(session, "two", fork=True)
    assert (keeper.name, session.recall.place) == ("two", kind)
    before = contents(home / "one")
    say(session, "Elsewhere?")
    keeper.keep(session)
    assert contents(home / "one") == before
    assert [len(read(name).turns) for name in ("one", "two")] == [2, 3]
    _, again = resumed("one")
    assert unread(again, "And now?") == twin[0]
    _, other = resumed("two")
    unread(other, "And now?")
    for name in ("one", "two", "a b"):
        keeper, session = OPEN[-1]
        refused("", keeper.save, session, name, fork=True)
        assert keeper.name == "two"


@pytest.mark.parametrize(
    ("owner", "call", "saved"),
    [(keepers, "renew", False), (keepers, "renew", True), (os, "posix_fallocate", True)],
)
def test_a_save_that_fails_leaves_the_chat_and_its_tier(
    home: Path, owner: object, call: str, saved: bool
) -> None:
    """As does a fork of a saved one. What was made of the new chat by then is removed."""
    twin = talked_on()
    keeper, session = talked() if saved else asked("mill.txt")
    with patch.object(owner, call, full):
        refused("cannot be saved.*No space left", keeper.save, session, "two", fork=saved)
    assert not (home / "two").exists()
    if saved:
        assert (keeper.name, os.listdir(home)) == ("one", ["one"])
        assert unread(session, "And now?") == twin[0]
        keeper.keep(session)
        keeper, session = resumed("one")
        assert unread(session, "Then?") == twin[1]
    for question in ("Why?", "When?", "Where?"):
        unread(session, question)
    keeper.save(session, "two")
    assert (home / "two" / TIER).is_dir()


# -- what goes wrong ----------------------------------------------------------------------------
@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.9, 0.999, "manifest", "short", "earlier", "gone"])
def test_a_damaged_part_is_read_again_and_said_in_one_line(
    home: Path, at: float | str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or all of it, where the manifest is damaged or the tier is one file, as it was earlier. The
    line comes when the chat is opened, if the file is too short for its rows."""
    twin = talked_on()
    talked()
    end()
    path = home / "one" / TIER
    if at == "earlier":
        remove(path)
        path.write_bytes(b"minikv tier 1\n")
    elif at == "gone":
        (path / "rows").unlink()
    elif at == "short":
        os.truncate(path / "rows", (path / "rows").stat().st_size // 2)
    else:
        path /= "manifest" if at == "manifest" else "rows"
        data = bytearray(path.read_bytes())
        data[int(at * len(data)) if isinstance(at, float) else 50] ^= 4
        path.write_bytes(data)
    _, again = resumed("one")
    notes: list[str] = []
    text = "".join(again.ask("And now?", 8, 0.7, notice=notes.append))
    said = [line for line in capsys.readouterr().err.split("\n") if line] + notes
    assert len(said) == 1
    assert "tier" in said[0]
    assert text == twin[0][0]
    assert (again.fed, again.pending_token is None) == (twin[0][1], False)
    assert unread(again, "Then?") == twin[1]
    if at == "earlier":
        assert "an earlier version wrote tier.kv, as one file" in said[0]
        keeper, _ = OPEN[-1]
        keeper.save(again)  # in place of the old file
        _, third = resumed("one")
        unread(third, "And then?")


def test_a_full_disk_is_said_at_the_beginning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a directory that cannot be written."""
    (file := home.parents[1] / "file").write_text("")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("MINIKV_HOME", str(file))
        _, session = start()
        session.attach(MILL)
        refused(r"tier=.file.. is not possible", list, session.ask("Who?"))
    keeper, session = start()
    session.attach(MILL)
    with patch.object(os, "posix_fallocate", full):
        refused(r"tier=.file.. is not possible: .*No space left", list, session.ask("Who?"))
    assert (session.fed, len(session.pending), os.listdir(home)) == ([], 1, [])
    say(session, "Who?")
    keeper.keep(session)
    assert session.recall.place == "file"


@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev"])
def test_a_disk_that_becomes_full_costs_the_tier(call: str) -> None:
    keeper, session = asked()
    keeper.keep(session)
    session.recall.file.sync()
    notes: list[str] = []
    with patch.object(os, call, full):
        list(session.ask("Why?", 8, 0.7, notice=notes.append))
    assert session.turn == 2
    assert re.search("the tier can no longer be used: .*No space left", notes[0])
    keeper.keep(session)
    say(session, "And now?")
    assert session.reports[-1].reuse == "refresh"
    assert keeper.name is not None
    again = resumed(keeper.name)[1]  # what was written before is still good
    say(again, "Then?")
    assert again.reports[-1].reuse == "recall"


# -- a chat that is not saved ---------------------------------------------------------------------
def test_a_chat_that_is_not_saved_leaves_nothing(home: Path) -> None:
    cache = home.parent / "cache"
    keeper, session = asked(save=False)
    unread(session, "Why?")
    assert session.recall.place == "file"
    assert os.listdir(cache) == []  # it has no name, so that no crash leaves it there
    assert not home.exists()
    keeper.save(session, "one")  # unless one saves it after all
    unread(session, "And now?")
    _, again = resumed("one")
    unread(again, "Then?")
    end()
    # Nor does one without an answer.
    _, session = start()
    session.attach(MILL)
    with pytest.raises(Exception, match="stopped"):
        list(session.ask("Who?", progress=lambda done, total: session.cancel()))
    assert len(os.listdir(home)) == 2
    end()
    assert os.listdir(home) == ["one"]


def test_what_a_killed_process_left_is_removed(home: Path) -> None:
    home.mkdir(parents=True)
    header = Header(1, 1, {"k": (torch.float32, (8,))})
    FileRows.create(home / ".tier-0123456789abcdef.kv", header).close()
    other = FileRows.create(home / ".tier-fedcba9876543210.kv", header)
    (home / ".tier-mine").write_text("precious")
    talked()
    assert sorted(os.listdir(home)) == [".tier-fedcba9876543210.kv", ".tier-mine", "one"]
    other.close()
    # The files are of one process at a time.
    code = f"{_BEGIN}keeper.load(session, 'one')"
    assert "is open in another minikv" in forked.run(*PATHS, code=code).err
    tier = FileRows.open(home / "one" / TIER, shared=True)
    assert tier.header.identity["dtype"] == "float32"
    tier.close()


# -- killed -----------------------------------------------------------------------------------
PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]
_BEGIN = """
import sys; sys.path[:0] = sys.argv[1:]
import test_tier
keeper, session = test_tier.start()
"""
_TALKER = f"""{_BEGIN}
from small_chat import say
session.attach(test_tier.MILL, "mill.txt")
say(session, "Who?")
keeper.save(session, "one")
print("begun", flush=True)
for turn in range(10_000):
    if turn % 5 == 3:
        session.undo(2)
    if turn % 7 == 5:
        session.attach("Rain falls. " * 5 + str(turn))
    say(session, f"And {{turn}}?", 4)
    keeper.keep(session)
    if len(session.fed) > 1500:
        session.undo(len(session.turns) - 1)
"""


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_a_killed_chat_is_its_last_complete_turn(
    home: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whenever it was killed: the transcript is whole, the tier has no wrong row, and the next
    answer is that of a chat that reads all of it."""
    given = []
    for i in range(count):
        with forked.Piped(*PATHS, code=_TALKER) as process:
            assert process.stdout.readline() == b"begun\n"
            time.sleep(i / (count - 1))
            process.send_signal(signal.SIGKILL)
        _, session = resumed("one")
        assert capsys.readouterr().err == ""  # nothing is damaged
        saved = read("one")
        assert session.turns == list(saved.turns)
        before = list(session.fed)
        given.append(session.recall.tokens)
        want = begun("ram")
        want.restore(session.snapshot())
        assert say(session, "Last?", 4) == say(want, "Last?", 4)
        assert session.fed[: len(before)] == before
        assert want.reports[-1].reuse == "refresh"
        rows, exact = session.recall.file, want.recall.tier
        for layer in range(2):
            for name, column in rows.read(layer, rows.rows).items():
                other = exact.rows.read(layer, rows.rows)[name]
                torch.testing.assert_close(column, other, atol=1e-5, rtol=1e-5)
        rows.drop()
        end()
        shutil.rmtree(home)
    assert max(given) > len(MILL)

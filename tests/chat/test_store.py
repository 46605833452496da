"""No document is read twice: what one conversation read, a later one finds on disk, and it answers
as if it had read it. Whatever happens to the files, every answer is that of a chat without them."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_chat import chat, held_of, reported, say
from tiers import MILL, RIVER, served
from twins import Nth

from minikv.cache.tier_file import FileRows
from minikv.chat.recall import Place, Recall
from minikv.chat.session import ChatSession
from minikv.chat.store import Store, taken
from minikv.errors import ContextError, Interrupted

LIMIT = 1 << 30
LONG = MILL + RIVER * 2


def remembering(folder: Path, model: str = "x", limit: int = LIMIT, **given: Any) -> ChatSession:
    """A chat whose prompts of 100 tokens and more are remembered in this folder."""
    kind, dtype = given.pop("tier", "file"), given.pop("tier_dtype", "same")
    session = chat(reuse=given.pop("reuse", "auto"), **given)
    session.recall = Recall(session.engine.kv, kind, dtype)
    session.recall.store = Store(folder, limit, {"model": model}, least=100)
    return session


def told(session: ChatSession, question: str, *documents: str) -> tuple[str, list[list[int]], int]:
    """The answer, the rows that were kept, and how many tokens were read."""
    for document in documents:
        session.attach(document, "a.txt")
    answer = say(session, question)[0]
    return answer, held_of(session), reported(session).tokens.prompt_new


def anew(question: str, *documents: str, **given: Any) -> tuple[str, list[list[int]]]:
    """The same of a chat that remembers nothing."""
    session = chat(reuse="auto", **given)
    session.recall = Recall(session.engine.kv, "none")
    answer, held, read = told(session, question, *documents)
    assert read > len("".join(documents))
    return answer, held


def leave(*sessions: ChatSession) -> None:
    """What the end of a process does."""
    for session in sessions:
        session.recall.leave()


def once(
    folder: Path, question: str, *documents: str, **how: Any
) -> tuple[tuple[str, list[list[int]]], int]:
    """What a process says that asks one question: answer and rows; and how much it read."""
    session = remembering(folder, **how)
    *found, new = told(session, question, *documents)
    leave(session)
    return (found[0], found[1]), new


def abouts(folder: Path) -> list[str]:
    return [one.about for one in Store(folder, LIMIT, {}).entries()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


@pytest.fixture
def read(folder: Path) -> Path:
    """A folder in which one conversation about the mill and the river is remembered."""
    once(folder, "Who?", LONG)
    assert abouts(folder) == ["a.txt"]
    return folder


CASES: list[dict[str, Any]] = [{"policy": name} for name in served()]
CASES += [{"policy": "full", "decode": "none"}, {"policy": "full"}, {"budget": "auto"}]
CASES += [{"budget": "20%"}, {"window": 64}, {"decode": "none"}]
CASES += [{"tier": "none"}, {"tier": "ram"}]


@pytest.mark.parametrize("how", CASES, ids=str)
def test_a_later_chat_reads_only_the_question(folder: Path, how: dict[str, Any]) -> None:
    """Under every policy that can choose from a tier, whatever read the document first."""
    rest = {name: value for name, value in how.items() if name != "tier"}
    first = remembering(folder, **how)
    assert told(first, "Who?", LONG)[:2] == anew("Who?", LONG, **rest)
    second = told(first, "Since when?")[0]  # the chat itself continues
    leave(first)
    found, new = once(folder, "And the river?", LONG, **how)
    assert found == anew("And the river?", LONG, **rest)
    assert new < 60
    assert len(Store(folder, LIMIT, {}).entries()) == 1
    without = chat(reuse="auto", **rest)
    without.recall = Recall(without.engine.kv, how.get("tier", "ram"))
    told(without, "Who?", LONG)
    assert told(without, "Since when?")[0] == second


def test_the_longest_known_beginning_is_used_and_shared(read: Path) -> None:
    more = MILL * 2
    found, new = once(read, "Who?", LONG, more)
    assert found == anew("Who?", LONG, more)
    assert len(more) < new < len(more) + 60
    store = Store(read, LIMIT, {})
    entries = store.entries()
    assert len(entries) == 2
    links = {path.stat().st_nlink for one in entries for path in one.path.glob("[rb]*[0-9s]")}
    assert links == {1, 2}
    store.remove(min(entries, key=lambda one: one.tokens))
    for documents in ((LONG, more), (LONG,), (LONG[:-9] + "otherwise",)):
        found, new = once(read, "Why?", *documents)
        assert found == anew("Why?", *documents)
        assert new < 70


OTHERWISE: list[dict[str, Any]] = [{"policy": "h2o"}, {"policy": "kvzip"}, {"reuse": "blind"}]
OTHERWISE += [{"documents": (MILL[:40],)}, {"model": "another"}]
OTHERWISE += [{"tier_dtype": "int8", "foreign": True}]


@pytest.mark.parametrize("how", OTHERWISE, ids=str)
def test_what_is_not_remembered(read: Path, how: dict[str, Any]) -> None:
    """Policies that need what no tier has, short prompts, other models and formats."""
    foreign = how.pop("foreign", False)
    documents = how.pop("documents", (LONG,))
    before = len(Store(read, LIMIT, {}).entries())
    session = remembering(read, **how)
    said = list[str]()
    session.recall.say = said.append
    _, _, new = told(session, "Who?", *documents)
    assert new > len("".join(documents))
    leave(session)
    why = [line for line in said if "were read before, and are read again: " in line]
    assert len(why) == ("policy" in how or "reuse" in how)
    after = len(Store(read, LIMIT, {}).entries())
    assert after - before == (foreign or "model" in how)


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_remembered_does_not_count_as_read_again(folder: Path, cached: bool) -> None:
    """By a chat that is opened without its tier; with `tier="none"`, only if its cache is gone."""
    session = remembering(folder, tier="ram")
    told(session, "Who?", LONG)
    leave(session)
    snapshot = session.snapshot()
    for kind in ("ram", "none"):
        other = remembering(folder, tier=kind)
        other.restore(snapshot if cached else replace(snapshot, held=None))
        again = other.reads_again
        assert (again > len(LONG)) == (cached and kind == "none")
        assert told(other, "Why?")[2] - again in range(60)
        leave(other)


@pytest.mark.parametrize("how", [{}, {"tier": "ram"}, {"first": MILL[:20]}], ids=str)
def test_a_later_document_is_remembered_with_what_came_before(
    folder: Path, how: dict[str, Any]
) -> None:
    """The chat itself continues, and one that has the same turns but no rows reads only what
    follows."""
    first = how.pop("first", LONG)
    session, twin = remembering(folder, **how), chat(reuse="auto")
    twin.recall = Recall(twin.engine.kv, "ram")
    for question, document in (("Who?", first), ("Why?", MILL + RIVER)):
        assert told(session, question, document)[:2] == told(twin, question, document)[:2]
    tokens = reported(session).tokens.seen_total
    assert max(one.tokens for one in Store(folder, LIMIT, {}).entries()) > tokens - 60
    held = replace(session.snapshot(), held=None)
    assert told(session, "Since when?") == told(twin, "Since when?")
    other = remembering(folder, **how)
    other.restore(held)
    answer, rows, new = told(other, "Since when?")
    assert (answer, rows) == (session.turns[-1].answer, held_of(session))
    assert new < 60
    leave(session, other)
    held_twice = Store(folder, LIMIT, {}).entries()
    files = {path.stat().st_ino: path.stat().st_size for path in folder.glob("*/*")}
    assert taken(held_twice) == sum(files.values())
    assert (sum(one.nbytes for one in held_twice) > taken(held_twice)) == (first == LONG)


def test_the_least_recently_used_leave(folder: Path) -> None:
    """Two fit. A prompt that takes more than the limit is not remembered, and removes nothing."""
    store, limit = Store(folder, LIMIT, {}), LIMIT
    told_of = [("A", False), ("B", False), ("A", True), ("C", False), ("A", True), ("B", False)]
    for letter, found in told_of:
        assert (once(folder, "Who?", letter + LONG, limit=limit)[1] < 60) == found
        limit = store.entries()[0].nbytes * 5 // 2
    assert len(store.entries()) == 2
    assert once(folder, "Who?", "D" + LONG, limit=limit // 3)[0] == anew("Who?", "D" + LONG)
    assert len(store.entries()) == 2


def test_every_altered_byte_is_found(read: Path, tmp_path: Path) -> None:
    """The damaged entry is removed, and the document is read again."""
    entry = Store(read, LIMIT, {}).entries()[0].path
    draw, want = random.Random(3), anew("Why?", LONG)
    for name in ("rows", "manifest"):
        data = (entry / name).read_bytes()
        for at in draw.sample(range(len(data)), 8):
            copy = tmp_path / f"{name}{at}"
            shutil.copytree(read, copy)
            altered = bytearray(data)
            altered[at] ^= 1 << draw.randrange(8)
            (copy / entry.name / name).write_bytes(altered)
            for count in (3, 2, 1):  # what was read instead is remembered, at the latest now
                found, new = once(copy, "Why?", LONG)
                assert found == want
                assert new < 60 or count > 1
            shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["rows", "manifest"])
@pytest.mark.parametrize("what", ["gone", "empty", "cut", "folder", "link"])
def test_damaged_entries_stop_nothing(read: Path, name: str, what: str) -> None:
    path = Store(read, LIMIT, {}).entries()[0].path / name
    data = path.read_bytes()
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to("/dev/zero")
    elif what != "gone":
        path.write_bytes(data[: len(data) // 2 if what == "cut" else 0])
    assert once(read, "Why?", LONG)[0] == anew("Why?", LONG)
    assert "damaged" not in abouts(read)


CALLS = [("posix_fallocate", errno.ENOSPC), ("pwritev", errno.ENOSPC), ("preadv", errno.EIO)]
CALLS += [("fdatasync", errno.EIO), ("fsync", errno.EIO), ("rename", errno.EROFS)]
CALLS += [("mkdir", errno.EROFS), ("makedirs", errno.EROFS), ("open", errno.EACCES)]
CALLS += [("link", errno.EXDEV), ("dup", errno.EMFILE), ("utime", errno.EROFS)]


@pytest.mark.parametrize(("name", "code"), CALLS)
def test_whichever_call_fails_answers_are_right(
    tmp_path: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    """In the chat itself and in the one after it: a full disk, one that can only be read, one that
    does not answer."""
    asked = [("Who?", LONG), ("Why?", LONG, MILL * 2)]
    wants = [anew(*one) for one in asked]
    for n in itertools.count(0, 1 if part == 1 else 3):
        folder, number = tmp_path / str(n), itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Nth(getattr(os, name), number, n, code))
            for one, want in zip(asked, wants, strict=True):
                assert once(folder, *one)[0] == want
        assert once(folder, *asked[1])[0] == wants[1]
        if next(number) <= n:
            break
    assert n > 0


def test_a_prompt_that_is_stopped_leaves_nothing(folder: Path) -> None:
    session = remembering(folder)
    session.attach(LONG, "a.txt")
    with pytest.raises(Interrupted):
        list(session.ask("Who?", progress=lambda done, total: session.cancel()))
    assert told(session, "Why?")[:2] == anew("Why?", LONG)
    leave(session)
    names = [path.name for path in folder.iterdir()]
    assert len(names) == 1
    assert not names[0].startswith(".")


def test_two_chats_at_once(folder: Path) -> None:
    """Each writes its own entry, or rests on that of the other, which may be removed meanwhile."""
    one, two = remembering(folder), remembering(folder)
    for session in (one, two):
        session.attach(LONG, "a.txt")
    first, second = one.ask("Who?", 8, 0.7), two.ask("Who?", 8, 0.7)
    pieces = list(itertools.zip_longest(first, second, fillvalue=""))
    assert {"".join(side) for side in zip(*pieces, strict=True)} == {anew("Who?", LONG)[0]}
    three = remembering(folder)
    leave(one, two)
    assert told(three, "Why?", LONG)[2] < 60
    shutil.rmtree(folder)
    four = chat(reuse="auto")
    four.recall = Recall(four.engine.kv, "file")
    told(four, "Why?", LONG)
    assert told(three, "Since when?")[0] == told(four, "Since when?")[0]
    leave(three)


@pytest.mark.parametrize("linked", [True, False])
def test_a_saved_chat_has_what_it_rests_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """Its tier in a directory has all rows after the first turn. On another disk, where no link can
    be made, the chat continues without reading again, too."""
    session, path = remembering(folder), tmp_path / "tier.kv"
    session.recall.where = lambda: Place(path, {}, named=True)
    if not linked:
        monkeypatch.setattr(os, "link", Nth(os.link, itertools.repeat(0), 0, errno.EXDEV))
    told(session, "Who?", LONG)
    if linked:
        copy = Path(shutil.copytree(path, tmp_path / "copy"))
        assert FileRows.open(copy).rows == session.recall.tokens > len(LONG)
    assert told(session, "Since when?")[2] < 60
    leave(session)


def test_shared_rows_of_several_files_may_be_cut(folder: Path, tmp_path: Path) -> None:
    session, documents = remembering(folder), [LONG]
    for more in (MILL, RIVER, MILL):
        told(session, "Who?", *documents)
        leave(session)
        documents.append(more)
        session = remembering(folder)
    path = tmp_path / "tier.kv"
    session.recall.where = lambda: Place(path, {}, named=True)
    told(session, "Who?", *documents[:3])
    session.undo()
    session.pending.clear()
    assert told(session, "Why?", LONG)[:2] == anew("Why?", LONG)
    rows = session.recall.file
    rows.sync()
    assert FileRows.open(Path(shutil.copytree(path, tmp_path / "copy"))).rows == rows.rows
    leave(session)


def test_what_cannot_be_read_now_or_does_not_fit_removes_nothing(
    read: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", Nth(os.open, itertools.count(), 0, errno.EMFILE))
        assert Store(read, LIMIT, {}).find(remembering(read).recall.header, range(999)) is None
    size = Store(read, LIMIT, {}).entries()[0].nbytes
    session = remembering(read, limit=size * 4)
    session.attach("Z" * 3000, "long.txt")
    with pytest.raises(ContextError):
        list(session.ask("Who?"))
    leave(session)
    assert abouts(read) == ["a.txt"]


def test_a_document_without_a_name_is_listed(folder: Path) -> None:
    session = remembering(folder)
    session.attach(LONG)
    list(session.ask("Who?", 3))
    leave(session)
    assert abouts(folder) == ["piped or unnamed text"]


KILLED = """
import sys, threading, time, os, signal
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_store import LONG, once
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    for letter in "ABC":
        once(Path(sys.argv[1]), "Who?", letter + LONG, limit=700_000)
"""


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_after_200_kills_answers_are_right(folder: Path) -> None:
    draw = random.Random(7)
    wants = {letter: anew("Why?", letter + LONG) for letter in "ABC"}
    found = 0
    for _ in range(200):
        paths = [path for path in sys.path if path.endswith(("tests/chat", "tests/support"))]
        command = [sys.executable, "-c", KILLED, str(folder), str(draw.uniform(0.05, 1.0)), *paths]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        for letter, want in wants.items():
            answered, new = once(folder, "Why?", letter + LONG, limit=700_000)
            assert answered == want
            found += new < 60
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert found > 20

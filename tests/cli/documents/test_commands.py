"""/add, /docs, /drop and /tokens."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import typed
from processes import scripted
from refusals import refused
from tables import table
from typed import context, fake_chat

import minikv
from minikv.chat.session import ChatSession
from minikv.cli.chat import kept
from minikv.cli.documents import commands
from minikv.cli.documents.commands import usage
from minikv.cli.screen import render
from minikv.errors import Interrupted

Run = Callable[..., str]


@pytest.fixture
def session() -> ChatSession:
    return fake_chat()


@pytest.fixture
def run(session: ChatSession) -> Run:
    """Run a command by its word and return what it said."""
    return partial(typed.run, commands.COMMANDS, typed.context(session))


def file(folder: Path, name: str, data: bytes = b"some text") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return str(path)


def test_add_says_what_it_read_in_order(run: Run, session: ChatSession, tmp_path: Path) -> None:
    refused("no such file", run, "add", file(tmp_path, "good.txt"), str(tmp_path / "bad.txt"))
    assert session.pending == []
    said = run("add", file(tmp_path, "b.txt"), file(tmp_path, "a b.md", "héé".encode()))
    assert said == (
        "b.txt: 9 characters, read with your next question\n"
        "a b.md: 3 characters, read with your next question\n"
    )
    pending = [(document.name, document.text) for document in session.pending]
    assert pending == [("b.txt", "some text"), ("a b.md", "héé")]


def test_two_documents_of_one_name_differ_and_a_file_named_twice_is_read_once(
    run: Run, session: ChatSession, tmp_path: Path
) -> None:
    run("add", file(tmp_path, "r.txt", b"one"))
    list(session.ask("q", 3))
    run("add", file(tmp_path / "x", "r.txt", b"two"), file(tmp_path / "y", "r.txt", b"three"))
    run("add", file(tmp_path / "z", "r.txt (2)", b"two"))
    assert [d.name for d in session.pending] == ["r.txt (2)", "r.txt (3)", "r.txt (2) (2)"]
    list(session.ask("q", 3))
    assert "Document: r.txt (2)\n\ntwo" in session.messages[-2].content
    assert "two" not in session.messages[0].content
    session.reset()
    here = "r.txt is here already: it is read once\n"
    name, other = file(tmp_path, "r.txt", b"one"), file(tmp_path / "x", "r.txt", b"one")
    assert run("add", name, name).startswith(here)
    list(session.ask("q", 3))
    assert run("add", name) == here
    assert not session.pending
    assert here not in run("add", other)  # another file with the same text
    file(tmp_path, "r.txt", b"changed")
    assert here not in run("add", name)
    assert [d.text for d in session.pending] == ["one", "changed"]


def test_a_directory_is_a_line_a_file(run: Run, session: ChatSession, tmp_path: Path) -> None:
    for n in range(9):
        file(tmp_path / "d", f"{n}.txt")
    said = run("add", str(tmp_path / "d"))
    header = " ".join(render.header(session, "0", 512).split())
    assert header.endswith("documents 9 · 81 characters · /docs")
    assert said.splitlines() == [
        f"{tmp_path}/d: 9 documents, in the order of their paths",
        *(f"  {n}.txt: 9 characters" for n in range(9)),
        "9 documents: 81 characters, read with your next question; /docs lists them",
    ]


def test_ctrl_c_stops_a_parser_and_not_the_chat(
    run: Run, session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(f"kill -INT {os.getpid()}\nsleep 60", tmp_path, monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    page = file(tmp_path, "x.html")
    stopped = refused("stopped reading", run, "add", page, error=Interrupted)
    assert stopped.hint == "nothing was added"
    assert session.pending == []
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_the_wait_for_a_pipe_that_nobody_writes_to(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    refused("stopped reading", run, "add", str(tmp_path / "pipe"), error=Interrupted)
    timer.join(60)


def test_docs_lists_what_was_read_and_what_waits(
    run: Run, session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no documents" in run("docs")
    session.attach("from a pipe")
    list(session.ask("q", 3))
    run("add", file(tmp_path, "b.txt", "héé".encode()))
    assert run("docs") == (
        "1  piped text · 11 characters · 11 tokens · read\n"
        "2  b.txt · 3 characters · 5 tokens · read with your next question\n"
    )
    # A text that would take long to tokenize goes without.
    monkeypatch.setattr(commands, "COUNTED", 2)
    assert "3 characters · read with your next question" in run("docs")
    assert "11 characters · 11 tokens · read" in run("docs")
    # No control characters are shown.
    session.attach("text", "a\x1b]0;b[bold]")
    assert "a]0;b[bold] · 4 characters" in run("docs")


def test_drop_of_a_waiting_and_of_a_read_document(
    run: Run, session: ChatSession, tmp_path: Path
) -> None:
    run("add", file(tmp_path, "a.txt"))
    list(session.ask("q", 3))
    run("add", file(tmp_path, "b.txt"), file(tmp_path, "c.txt"))
    assert "b.txt is dropped; it had not been read" in run("drop", "2")
    assert [d.name for d in session.pending] == ["c.txt"]
    run("drop", "c.txt")
    assert session.pending == []
    assert (session.turn, len(session.documents)) == (1, 1)  # the conversation continues
    # One that was read begins a new conversation.
    session.reset()
    run("add", file(tmp_path, "a.txt", b"AAA"), file(tmp_path, "b.txt", b"BBB"))
    list(session.ask("q", 3))
    run("add", file(tmp_path, "c.txt", b"CCC"))
    said = run("drop", "a.txt")
    assert said == (
        "a.txt had been read, and cannot be taken out of the cache: new conversation with the "
        "other 2 documents, read again with your next question\n"
        "  the chat so far was not saved and is lost\n"
    )
    assert [d.name for d in session.pending] == ["b.txt", "c.txt"]
    assert (session.turn, session.documents, session.fed) == (0, [], [])
    list(session.ask("q", 3))
    fed = session.tokenizer.decode(session.fed)
    assert "BBB" in fed
    assert "AAA" not in fed
    assert "new conversation with the other document," in run("drop", "b.txt")
    list(session.ask("q", 3))
    assert "new conversation with no other document\n" in run("drop", "1")


@table(f"""
    words       | message              | hint
                | takes a number       | /drop 2
    a.txt b.txt | takes a number       | /drop 2
    3           | no document '3'      | /docs
    0           | no document '0'      | /docs
    a.text      | no document 'a.text' | did you mean a.txt?
    ²           | no document          | /docs
    {"9" * 5000} | no document          | /docs
""")
def test_drop_refuses_what_it_cannot_find(
    run: Run, session: ChatSession, words: str, message: str, hint: str
) -> None:
    refused("no document to drop", run, "drop", *words.split())
    for text, name in (("x", "a.txt"), ("y", "b.txt")):
        session.attach(text, name)
    assert hint in refused(message, run, "drop", *words.split()).hint
    assert len(session.pending) == 2


# -- /tokens ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bundled() -> ChatSession:
    return minikv.load(device="cpu", budget=64)


def test_tokens_adds_up_to_the_context() -> None:
    session = fake_chat()
    assert sum(n for name, n, _ in usage(session)) == 4096
    session.system = "Be brief."
    session.reset()
    session.attach("A first text.", "a.txt")
    session.attach("A second text.", None)
    "".join(session.ask("What is it?", max_tokens=5))
    "".join(session.ask("And then?", max_tokens=5))
    session.attach("Not yet read.", "c.txt")
    rows = {name: count for name, count, _ in usage(session)}
    assert rows.pop("waiting: c.txt") == len("Not yet read.")
    assert sum(rows.values()) == 4096
    told = {"system prompt": 9, "document 1: a.txt": 13, "document 2: piped text": 14}
    told |= {"questions": len("What is it?" + "And then?"), "room left": session.room}
    assert rows.items() >= told.items()
    assert rows["answers"] + rows["the last token, not read yet"] == 10
    frees = {name: how for name, _, how in usage(session)}
    ways = {"system prompt": '/system "", then /clear', "questions": "/clear", "answers": "/clear"}
    ways |= {"names and turn markers": "", "room left": ""}
    ways |= {"document 2: piped text": "/drop 2", "waiting: c.txt": "/drop 3"}
    assert frees.items() >= ways.items()
    session.system = ""
    session.reset()
    frees = {name: how for name, _, how in usage(session)}
    assert set(frees.values()) == {""}, "nothing is there to be freed"
    session.attach("A first text.", "a.txt")
    "".join(session.ask("What is it?", max_tokens=5))
    text = typed.run(commands.COMMANDS, context(session), "tokens")
    assert "/drop 1" in text
    assert f"{len(session.fed):,} tokens read of 4,096 positions" in text


@pytest.mark.parametrize(
    ("names", "most"), [(("mill\x1b[2J.txt", None), 5), (("a.txt", "b.txt"), 1), ((None,), 60)]
)
def test_tokens_docs_and_kept_count_alike(
    names: tuple[str | None, ...], most: int, bundled: ChatSession
) -> None:
    """Every document, all that was read and the whole context, with a tokenizer that joins letters;
    the text of one document is also in the system prompt and in another one."""
    session = bundled
    session.system = "Say who runs it."
    session.reset()
    for number, name in enumerate(names):
        session.attach("The mill on the river is run by Ada. " * (4 - 3 * number), name)
    "".join(session.ask("Who runs it?", max_tokens=most))
    session.attach("It is run by Ida, not by Ada.", "later.txt")
    facts = kept.read(session)
    parts = [part.last - part.first for part in facts.parts]
    listed = typed.run(commands.COMMANDS, context(session), "docs")
    rows = usage(session)
    for n, count in enumerate(parts, 1):
        assert [row[1] for row in rows if row[0].startswith(f"document {n}: ")] == [count]
        assert f" {count:,} token" in listed.splitlines()[n - 1]
    (waiting,) = [row[1] for row in rows if row[0] == "waiting: later.txt"]
    assert sum(count for _, count, _ in rows) == session.max_context + waiting
    assert f" {waiting} tokens" in listed.splitlines()[-1]
    elsewhere = ("waiting", "room left", "the last token")
    read = sum(count for name, count, _ in rows if not name.startswith(elsewhere))
    assert read == facts.held.shape[2] == len(session.fed)
    assert all(count >= 0 for _, count, _ in rows)
    assert "\x1b" not in typed.run(commands.COMMANDS, context(session), "tokens")
    session.system = ""

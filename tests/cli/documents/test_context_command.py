"""/tokens: what fills the context, and that /docs and /kept count alike."""

from __future__ import annotations

import pytest
from typed import context, fake_chat, run

import minikv
from minikv.chat.session import ChatSession
from minikv.cli.chat import kept
from minikv.cli.documents import commands as document_commands
from minikv.cli.documents.commands import usage


@pytest.fixture(scope="module")
def bundled() -> ChatSession:
    return minikv.load(device="cpu", budget=64)


def tokens(session: ChatSession) -> str:
    return run(document_commands.COMMANDS, context(session), "tokens")


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
    text = tokens(session)
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
    assert "\x1b" not in tokens(bundled)


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
    listed = run(document_commands.COMMANDS, context(session), "docs")
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

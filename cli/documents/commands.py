"""/add, /docs, /drop and /tokens: the documents of a chat, and the use of its context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from minikv.chat.report import amount
from minikv.checks import guess
from minikv.cli.chat.kept import locate, spell
from minikv.cli.chat.slash import Command, Context
from minikv.cli.documents.named import attach, read
from minikv.cli.saved.commands import left
from minikv.cli.screen.render import PIPED
from minikv.cli.screen.text import cut, grid
from minikv.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Document

COUNTED = 1_000_000
"""The most characters of a pending document whose tokens /docs counts: a tokenizer takes about a
second for them."""


def _add(context: Context, arguments: list[str]) -> None:
    if not arguments:
        raise UsageError(
            "/add takes files, directories and patterns", "/add report.txt, /add notes, /add *.md"
        )
    session, terminal = context.session, context.terminal

    def stop() -> None:
        raise Interrupted("stopped reading the documents", "nothing was added")

    # All are read before any is attached, so that a bad name or Ctrl-C adds nothing.
    with context.interrupts.stopping(stop):
        texts, notes = read(arguments, terminal)
    for note in notes:
        terminal.say(note)
    texts = attach(session, texts, terminal)
    if notes and texts:
        characters = sum(len(text.text) for text in texts)
        terminal.say(
            f"{amount(len(texts), 'document')}: {amount(characters, 'character')}, read with your "
            "next question; /docs lists them"
        )
        return
    for text in texts:
        terminal.say(f"{text.name or PIPED}: {text.facts}, read with your next question")


def _docs(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    listed = _all(session)
    if not listed:
        terminal.say("no documents; /add FILE puts one before your next question")
        return
    rows, counts = [], counted(session, COUNTED)
    for n, (document, count) in enumerate(zip(listed, counts, strict=True), 1):
        size = amount(len(document.text), "character")
        tokens = "" if count is None else f" · {amount(count, 'token')}"
        state = "read" if n <= len(session.documents) else "read with your next question"
        rows.append(
            f"{n:>{len(str(len(listed)))}}  {document.name or PIPED} · {size}{tokens} · {state}"
        )
    terminal.say("\n".join(rows))


def counted(session: ChatSession, most: float = math.inf) -> list[int | None]:
    """The number of tokens of each document, in the order of /docs. For a document that was read,
    those that /kept shows; otherwise those of its text alone, or None if it has more than `most`
    characters."""
    ids = session.fed or session.known
    read = locate(spell(session.tokenizer, ids), session.documents) if ids else []

    def alone(text: str) -> int | None:
        return None if len(text) > most else len(session.tokenizer.encode(text))

    return [
        alone(document.text) if part is None else part.last - part.first
        for document, part in zip_longest([*session.documents, *session.pending], read)
    ]


def _drop(context: Context, arguments: list[str]) -> None:
    """A pending document is dropped at once. A document that was read has changed the keys and
    values of everything after it, so dropping it begins a new conversation about the others."""
    session, terminal = context.session, context.terminal
    listed = _all(session)
    if not listed:
        raise UsageError("there is no document to drop", "/add FILE puts one in")
    if len(arguments) != 1:
        raise UsageError("/drop takes a number from /docs, or a name", "/drop 2, /drop report.txt")
    at = _find(listed, arguments[0])
    name, read = listed[at].name or PIPED, len(session.documents)
    if at >= read:
        del session.pending[at - read]
        terminal.say(f"{name} is dropped; it had not been read")
        return
    was = left(context)
    session.reset(keep_documents=True)
    del session.pending[at]
    rest = len(session.pending)
    others = "no other document"
    if rest:
        others = f"the other {rest:,} documents" if rest > 1 else "the other document"
    again = ", read again with your next question" if rest else ""
    terminal.say(
        f"{name} had been read, and cannot be taken out of the cache: new conversation "
        f"with {others}{again}"
    )
    if was:
        terminal.say(was)


def _find(listed: list[Document], wanted: str) -> int:
    """The index of the document with this number in /docs or this name; a number wins. Raises
    UsageError."""
    if wanted.isdecimal() and 1 <= int(wanted[:9]) <= len(listed):
        return int(wanted) - 1
    names = [document.name or PIPED for document in listed]
    if wanted in names:
        return names.index(wanted)
    near = guess(wanted, names)
    raise UsageError(f"no document {wanted!r}", f"{near}/docs lists them with their numbers")


def _all(session: ChatSession) -> list[Document]:
    """The documents that were read, then the pending ones: the order of /docs."""
    return [*session.documents, *session.pending]


def _after_drop(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    return () if before else (document.name or PIPED for document in _all(session))


def _tokens(context: Context, arguments: list[str]) -> None:
    session = context.session
    lines = [
        (name, f"{count:,}", f"{count / session.max_context:.1%}", frees)
        for name, count, frees in usage(session)
    ]
    context.terminal.say(grid(lines, "<>><"))
    context.terminal.say(
        f"{len(session.fed or session.known):,} tokens read of {session.max_context:,} positions; "
        "eviction frees memory, not positions"
    )


def usage(session: ChatSession) -> list[tuple[str, int, str]]:
    """(what, tokens, the command that frees it). All entries but the pending documents sum to the
    model's context. A document has the tokens that /docs and /kept count; its name and the joins
    between parts count as markers."""

    def tokens(texts: Iterable[str]) -> int:
        return sum(len(session.tokenizer.encode(text)) for text in texts if text)

    def frees(count: int) -> str:
        return "/clear" if count else ""

    fed, turns = len(session.fed or session.known), session.turns
    read = len(session.documents) if fed else 0
    documents = [
        (cut(document.name or PIPED, 28), count or 0, f"/drop {n}")
        for n, (document, count) in enumerate(zip(_all(session), counted(session), strict=True), 1)
    ]
    owed = int(session.pending_token is not None)
    system = questions = answers = thoughts = 0
    if fed:
        system = tokens(one.content for one in session.messages if one.role == "system")
        questions = tokens(turn.question for turn in turns)
        answers = tokens(turn.answer for turn in turns) - owed
        there = turns
        if session.forgets:  # the last thoughts stay until the next question
            last = session.report
            there = turns[-1:] if last is not None and last.tokens.seen_total == fed else []
        thoughts = sum(turn.report.tokens.thoughts for turn in there)
    markers = fed - system - sum(count for _, count, _ in documents[:read])
    markers -= questions + thoughts + answers
    if markers < 0:  # parts encoded separately can take a few tokens more
        questions, markers = max(0, questions + markers), 0
    rows = [
        ("system prompt", system, '/system "", then /clear' if system else ""),
        *(
            (f"document {n}: {name}", count, drop)
            for n, (name, count, drop) in enumerate(documents[:read], 1)
        ),
        ("questions", questions, frees(questions)),
        ("answers", answers, frees(answers)),
        ("thoughts", thoughts, frees(thoughts)),
        ("names and turn markers", markers, ""),
        ("the last token, not read yet", owed, ""),
        ("room left", session.room, ""),
        *((f"waiting: {name}", count, drop) for name, count, drop in documents[read:]),
    ]
    rare = ("thoughts", "the last token, not read yet")
    return [row for row in rows if row[1] or row[0] not in rare]


COMMANDS = (
    Command(
        ("add",),
        "FILE...",
        "put documents before the next question: files, directories, patterns",
        _add,
        files=True,
    ),
    Command(("docs",), "", "the documents, their sizes, and which were read", _docs),
    Command(
        ("drop",),
        "NUMBER | NAME",
        "remove a document; if it was read, a new conversation begins",
        _drop,
        follows=_after_drop,
    ),
    Command(("tokens",), "", "what the context is used for, and what frees it", _tokens),
)

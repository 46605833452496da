"""/tokens: what the model's context is used for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minikv.cli.chat.kept import counted
from minikv.cli.chat.slash import Command, Context
from minikv.cli.screen.text import cells, cut_middle, padded

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession


def _tokens(context: Context, arguments: list[str]) -> None:
    session = context.session
    rows = usage(session)
    share = 100.0 / session.max_context
    wide = max(cells(name) for name, _, _ in rows)
    lines = [
        f"{padded(name, wide)}  {count:>9,}  {share * count:>5.1f}%  {frees}".rstrip()
        for name, count, frees in rows
    ]
    for line in lines:
        context.terminal.say(line)
    context.terminal.say(
        f"{len(session.fed or session.known):,} tokens read of {session.max_context:,} positions; "
        "eviction frees memory, not positions"
    )


def usage(session: ChatSession) -> list[tuple[str, int, str]]:
    """(what, tokens, the command that frees it). All but the waiting documents sum to the model's
    context. A document has the tokens that /docs and /kept count; its name and the joins between
    parts count as markers."""
    fed = len(session.fed or session.known)
    tokens, documents = counted(session), [*session.documents, *session.pending]
    read = len(session.documents) if fed else 0
    owed = int(session.pending_token is not None)
    system = questions = answers = thoughts = 0
    if fed:
        said = [message.content for message in session.messages if message.role == "system"]
        system = sum(count_tokens(session, text) for text in said)
        questions = sum(count_tokens(session, turn.question) for turn in session.turns)
        answers = sum(count_tokens(session, turn.answer) for turn in session.turns) - owed
        there = session.turns
        if session.forgets:  # the last thoughts stay until the next question
            last = session.report
            there = there[-1:] if last is not None and last.tokens.seen_total == fed else []
        thoughts = sum(turn.report.tokens.thoughts for turn in there)
    markers = fed - system - sum(count or 0 for count in tokens[:read])
    markers -= questions + thoughts + answers
    if markers < 0:  # parts encoded apart can take a few tokens more than together
        questions, markers = max(0, questions + markers), 0
    rows = [("system prompt", system, '/system "", then /clear' if system else "")]
    named = [
        (cut_middle(document.name or "piped text", 28), count or 0, f"/drop {i}")
        for i, (document, count) in enumerate(zip(documents, tokens, strict=True), 1)
    ]
    rows += [
        (f"document {i}: {name}", count, drop)
        for i, (name, count, drop) in enumerate(named[:read], 1)
    ]
    rows += [
        ("questions", questions, "/clear" if questions else ""),
        ("answers", answers, "/clear" if answers else ""),
        *([("thoughts", thoughts, "/clear")] if thoughts else []),
        ("names and turn markers", markers, ""),
    ]
    if owed:
        rows.append(("the last token, not read yet", owed, ""))
    rows.append(("room left", session.room, ""))
    return rows + [(f"waiting: {name}", count, drop) for name, count, drop in named[read:]]


def count_tokens(session: ChatSession, content: str) -> int:
    """Tokens of a text alone."""
    return len(session.tokenizer.encode(content)) if content else 0


COMMANDS = (Command(("tokens",), "", "what the context is used for, and what frees it", _tokens),)

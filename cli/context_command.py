"""/tokens: what the model's context is used for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minikv.cli.command import Command, Context
from minikv.cli.tables import cells, cut_middle, padded

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
        f"of {session.max_context:,} positions; eviction frees memory, not positions"
    )


def usage(session: ChatSession) -> list[tuple[str, int, str]]:
    """(what, tokens, the command that frees it). All but the waiting documents sum to the
    model's context; the joins between parts count as markers."""
    system = documents_ = questions = answers = 0
    names: list[tuple[str, int]] = []
    read = list(session.documents)
    for message in session.messages:
        count = count_tokens(session, message.content)
        if message.role == "system":
            system += count
        elif message.role == "assistant":
            answers += count
        else:
            rest, own = message.content, 0
            while read and rest.startswith(read[0].rendered()):
                document = read.pop(0)
                rest = rest.removeprefix(document.rendered())
                part = min(count_tokens(session, document.rendered()), count - own)
                names.append((document.name or "piped text", part))
                own += part
            documents_ += own
            questions += count - own
    if not session.fed:
        system = questions = answers = 0  # set, but not read yet
    used = session.max_context - session.room
    markers = used - system - documents_ - questions - answers
    if markers < 0:  # parts encoded apart can take a few tokens more than together
        questions, markers = max(0, questions + markers), 0
    rows = [("system prompt", system, '/system "", then /clear' if system else "")]
    for i, (name, count) in enumerate(names, 1):
        rows.append((f"document {i}: {cut_middle(name, 28)}", count, f"/drop {i}"))
    rows += [
        ("questions", questions, "/clear" if questions else ""),
        ("answers", answers, "/clear" if answers else ""),
        ("turn markers", markers, ""),
        ("room left", session.room, ""),
    ]
    for i, pending in enumerate(session.pending, len(session.documents) + 1):
        count = count_tokens(session, pending.rendered())
        name = cut_middle(pending.name or "piped text", 28)
        rows.append((f"waiting: {name}", count, f"/drop {i}"))
    return rows


def count_tokens(session: ChatSession, content: str) -> int:
    """Tokens of a text alone."""
    return len(session.tokenizer.encode(content)) if content else 0


COMMANDS = (Command(("tokens",), "", "what the context is used for, and what frees it", _tokens),)

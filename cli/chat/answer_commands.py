"""/continue, /copy and /refresh: the last answer, and how the next one is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from minikv.cli.chat.slash import Command, Context
from minikv.cli.chat.turn import continue_turn, note_report
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

MOST = 75_000
"""Bytes that /copy sends: more than that, most terminals drop without a word."""


def _continue(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    before = session.report
    try:
        continue_turn(session, context.generation, terminal, context.interrupts)
    finally:
        if session.report is not before and session.report is not None:
            note_report(session.report, terminal)


def _copy(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    if not session.turns:
        raise UsageError("there is no answer to copy", "ask something first")
    answer = session.turns[-1].answer.strip("\n")
    elsewhere = "/export FILE.md writes the chat to a file"
    size = len(answer.encode())
    if size > MOST:
        raise UsageError(
            f"the answer has {size:,} bytes, and a terminal's clipboard takes about {MOST:,}",
            elsewhere,
        )
    if not terminal.copy(answer):
        raise UsageError("/copy needs a terminal that takes escape sequences", elsewhere)
    count = len(answer)
    terminal.say(
        f"sent {count:,} character{'' if count == 1 else 's'} to the terminal's clipboard, which "
        "not every terminal allows (OSC 52)"
    )


def _refresh(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    if arguments not in ([], ["off"]):
        raise UsageError(
            "/refresh takes nothing, or off", "/set reuse refresh does it for each question"
        )
    if session.recall.place and session.reuse in ("auto", "recall"):
        terminal.say("nothing to do: every question is answered from all that was read")
        return
    if not arguments:
        session.refresh()
        what = "the documents and all that was said" if session.documents else "all that was said"
        terminal.say(f"your next question reads {what} again; /refresh off takes that back")
        return
    was = session.rereads
    session.refresh(wanted=False)
    terminal.say("your next question is read as any other" if was else "no /refresh was waiting")


def _after_refresh(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    return () if before else ("off",)


COMMANDS = (
    Command(("continue",), "", "write more of an answer that was cut off", _continue),
    Command(("copy",), "", "the last answer to the clipboard", _copy),
    Command(
        ("refresh",),
        "[off]",
        "read everything again with the next question",
        _refresh,
        follows=_after_refresh,
    ),
)

"""/continue and /copy: what can be done with the last answer."""

from __future__ import annotations

from minikv.cli.command import Command, Context
from minikv.cli.turn import continue_turn, note_report
from minikv.errors import UsageError

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


COMMANDS = (
    Command(("continue",), "", "go on with an answer that was cut off", _continue),
    Command(("copy",), "", "the last answer to the clipboard", _copy),
)

"""Commands about the last answer: /continue, /copy, /verify and --check; and /refresh, about the
next one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from minikv.chat.report import amount
from minikv.cli.chat.slash import Command, Context
from minikv.cli.chat.turn import continue_turn, note_report
from minikv.cli.failures import Interrupts
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clipped
from minikv.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from minikv.chat.answer import Verification
    from minikv.chat.session import ChatSession

MOST = 75_000
"""The most bytes that /copy sends: most terminals silently drop more."""
_TOKEN = 24  # most cells of a quoted token


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
        f"sent {amount(count, 'character')} to the terminal's clipboard, which "
        "not every terminal allows (OSC 52)"
    )


def _refresh(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    if session.recall.place and session.reuse in ("auto", "recall"):
        terminal.say("nothing to do: every question is answered from all that was read")
        return
    session.refresh()
    what = "the documents and all that was said" if session.documents else "all that was said"
    terminal.say(f"your next question reads {what} again")


# -- /verify and --check ---------------------------------------------------------------------


def _verify(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    known = session.report.against_full if session.report is not None else None
    if known is not None and known.same and not known.checked:
        terminal.say("as without eviction: nothing was evicted")
        return
    found = _written_again(session, terminal, context.interrupts)
    if found.differs or found.complete:
        terminal.say(shown(session.turns[-1].answer, found))
    if not found.complete:
        raise Interrupted(
            f"stopped verifying after {amount(len(found.tokens), 'token')}", "the chat is as it was"
        )


def check(session: ChatSession, terminal: Terminal, interrupts: Interrupts) -> bool:
    """Compare the last answer with the answer of a full cache, and say whether they agree. Stops
    when a key is typed, or at Ctrl-C. Returns False if this chat's answers cannot be compared."""
    report = session.report
    if report is None or report.against_full.same is not None or not report.tokens.generated:
        return True
    keyboard = terminal.keyboard
    typed = keyboard.waiting if keyboard is not None else lambda: False
    try:
        found = _written_again(session, terminal, interrupts, typed)
    except UsageError as error:
        terminal.note(f"  {terminal.words(str(error))}; answers are not checked from here on")
        return False
    except Interrupted as stopped:
        terminal.note(f"  {terminal.words(str(stopped))}")
        return True
    if found.differs or found.complete:
        terminal.note(f"  {session.report.against_full.words}" if session.report else "")
    return True


def _written_again(
    session: ChatSession,
    terminal: Terminal,
    interrupts: Interrupts,
    typed: Callable[[], bool] = lambda: False,
) -> Verification:
    """What `ChatSession.verify` finds. typed: whether to stop."""

    def show(done: int, total: int) -> None:
        terminal.frame(lambda: f"checking  {done:,} of {amount(total, 'token')}")
        if typed():
            session.cancel()

    with (
        terminal.silent(),
        closing(session.verify(progress=show)) as pieces,
        interrupts.stopping(session.cancel),
    ):
        for _ in pieces:
            pass
    found = session.verified
    assert found is not None
    return found


def shown(answer: str, found: Verification) -> str:
    """What /verify says: that the answers are the same, or both and where they first differ."""
    took = f"{found.seconds:.1f} s"
    if not found.differs:
        return (
            f"the same: {'all ' if found.same > 1 else ''}{amount(found.same, 'token')}, each "
            f"written from all that was read ({took})"
        )
    lines = []
    for name, text in (("the answer", answer), ("from all that was read", found.text)):
        rows = (text.strip() or "(empty)").split("\n")
        lines += [f"{name}:", *(f"    {row}".rstrip() for row in rows)]
    lines.append(
        f"the same: {amount(found.same, 'token')}; then the answer has {_quoted(found.was)}, and "
        f"from all that was read it is {_quoted(found.now)} ({took})"
    )
    return "\n".join(lines)


def _quoted(token: str | None) -> str:
    if token is None:
        return "its end"
    seen = clipped(token, _TOKEN)
    return f'"{seen}"' if seen else ascii(token)


COMMANDS = (
    Command(("continue",), "", "write more of an answer that was cut off", _continue),
    Command(("copy",), "", "the last answer to the clipboard", _copy),
    Command(("refresh",), "", "read everything again with the next question", _refresh),
    Command(
        ("verify",),
        "",
        "write the last answer again from all that was read, and show where the two differ",
        _verify,
    ),
)

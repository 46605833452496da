"""/refresh, and the line that explains --reuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from minikv.cli.command import Command, Context
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

_WORDS = {
    "auto": "later questions look at all that was read, or read it again",
    "recall": "later questions look at all that was read",
    "refresh": "each question reads everything again",
    "once": "later questions find what the first question left",
    "blind": "documents are evicted before a question is seen",
}


def line(session: ChatSession) -> str:
    """The value of --reuse, what it means, and whether /refresh is waiting."""
    armed = "; /refresh: the next one reads everything again" if session.rereads else ""
    return f"{session.reuse}: {_WORDS[session.reuse]}{armed}"


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
    Command(
        ("refresh",),
        "[off]",
        "read everything again with the next question",
        _refresh,
        follows=_after_refresh,
    ),
)

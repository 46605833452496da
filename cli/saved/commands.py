"""/save, /fork and /load, and what is said about a chat that is opened or left."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from minikv.chat.report import amount
from minikv.cli.chat.slash import Command, Context
from minikv.cli.documents.text import changes
from minikv.cli.paths import chats_folder
from minikv.cli.saved.chats import table
from minikv.cli.saved.listing import listing
from minikv.cli.saved.transcript import Saved
from minikv.cli.screen import render
from minikv.cli.screen.text import cut
from minikv.cli.settings import values
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

_LAST = 600
"""Characters of the last question, and of its answer, that are shown when a chat is opened."""
_CACHED = ("policy", "decode", "budget", "stride")


def _save(context: Context, arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise UsageError("/save takes one name", "/save thesis")
    keeper = context.keeper
    before = keeper.name
    path = keeper.save(context.session, arguments[0] if arguments else None)
    context.terminal.say(f"saved as {keeper.name}, and after every turn from now on: {path}")
    context.terminal.say(f"  minikv chat --resume {keeper.name} continues it")
    if before not in ("", keeper.name):
        context.terminal.say(f"  it was called {before}; /fork would have kept both")


def _fork(context: Context, arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UsageError("/fork takes one name", "/fork other")
    keeper, session = context.keeper, context.session
    before = keeper.name
    if not session.turns:
        raise UsageError("there is nothing to copy yet", "ask something first")
    path = keeper.save(session, arguments[0], fork=True)
    was = f"; {before} stays as it is" if before else ""
    context.terminal.say(f"from here on this is {keeper.name}{was}: {path}")


def _load(context: Context, arguments: list[str]) -> None:
    names = [argument for argument in arguments if argument != "--reread"]
    if not arguments:
        entries = listing()
        where = f"no saved chat in {chats_folder()}"
        context.terminal.say("\n".join(table(entries)) if entries else where)
        return
    if len(names) != 1 or len(arguments) - len(names) > 1 or names[0].startswith("-"):
        raise UsageError("/load takes a name", "/load thesis, or /load thesis --reread")
    keeper, session = context.keeper, context.session
    began = perf_counter()
    was = "" if keeper.name == names[0] else left(context)
    saved = keeper.load(session, names[0], reread=len(arguments) > 1)
    context.origins |= origins_of(session, saved)
    context.terminal.say(summary(session, saved, perf_counter() - began))
    if was:
        context.terminal.say(was)
    for line in changes((*saved.documents, *saved.pending)):
        context.terminal.warn(line)


def origins_of(
    session: ChatSession, saved: Saved, given: Collection[str] | None = None
) -> dict[str, str]:
    """Where the settings came from that were loaded with a chat. `given`: as the user stated them
    for a run that began with this chat; None: the chat was loaded later."""
    now, then = session.eviction, saved.eviction
    names = {name for name in _CACHED if getattr(now, name) == getattr(then, name)}
    names |= {"seed", "system", "pin_system", "reuse", "overflow"}
    if given is not None:
        names |= set(saved.facts["run"])  # the model, and how it is kept
        names -= {*given, *(("revision",) if "model" in given else ())}
    return dict.fromkeys(names, f"chat {saved.name}")


def summary(session: ChatSession, saved: Saved, seconds: float) -> str:
    """The lines about a chat that was loaded in `seconds`."""
    how = f"resumed in {1000 * seconds:.0f} ms"
    if not session.fed and not (session.recall.tokens and session.recalls):
        how = "your next question reads it again"
    elif not session.fed:
        how += ", with all that was read"
    elif again := _read_again(session):
        how += f"; your next question reads {amount(again, 'token')} again"
    else:
        how += "; nothing was read again"
    lines = [
        f"{saved.name}: {amount(len(saved.turns), 'turn')}, {how}",
        f"  {render.policy_line(session)}",
    ]
    lines += [
        f"  {document.name or 'piped text'}: {amount(len(document.text), 'character')}"
        for document in (*saved.documents, *saved.pending)
    ]
    for turn in saved.turns[-1:]:
        question = " ".join(turn.question.split())
        lines += [f"› {cut(question, _LAST)}", cut(turn.answer.strip(), _LAST)]
    return "\n".join(lines)


def _read_again(session: ChatSession) -> int:
    """How many of the tokens that the cache has seen the next question reads again."""
    recalls = session.recall.tokens and session.recalls
    if session.reuse == "refresh" or (session.rereads and not recalls):
        return len(session.fed)
    if session.reuse != "recall" or not session.eviction.evicts:
        return session.reads_again
    last, has = session.turns[-1].report.tokens, session.recall.has(session.fed)
    return len(session.fed) - has if has < last.prompt_reused + last.prompt_new else 0


def left(context: Context) -> str:
    """Where the chat is saved that a new one will replace, and how to get back to it; "" if nothing
    was asked in it."""
    name = context.keeper.kept(context.session)
    if name is not None:
        return f"  the chat so far is saved as {name}; /load {name} goes back to it"
    return "  the chat so far was not saved and is lost" if context.session.turns else ""


def _after_load(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    named = any(not one.startswith("-") for one in before)
    return ("--reread",) if named or word.startswith("-") else values.saved()


COMMANDS = (
    Command(("save",), "[NAME]", "save now; with a name, under it from now on", _save),
    Command(("fork",), "NAME", "copy this chat under a new name, and continue in the copy", _fork),
    Command(
        ("load",),
        "[NAME] [--reread]",
        "open a saved chat; alone: list them",
        _load,
        follows=_after_load,
    ),
)

"""`minikv chats` and `minikv cache`: what is saved, and its removal; and /save, /fork and /load."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from minikv.chat.report import amount, size, thought_for
from minikv.checks import quoted
from minikv.cli.chat.slash import Command, Context
from minikv.cli.documents.text import changes
from minikv.cli.paths import chats_folder
from minikv.cli.saved.database import DAMAGE, ChatFile, OpenElsewhere, check_name
from minikv.cli.saved.listing import Entry, listing, unknown
from minikv.cli.saved.transcript import Saved, read
from minikv.cli.screen import render
from minikv.cli.screen.terminal import window
from minikv.cli.screen.text import clean, cut, grid
from minikv.cli.settings import flags
from minikv.cli.settings.flags import Call, Yes, command, flag, group
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.chat.store import Store


_UNITS = {"min": 60, "h": 3600, "d": 86400, "w": 604_800, "mo": 2_592_000, "y": 31_536_000}
"""Seconds."""

chats = group("minikv chats show NAME\n\nThe saved chats, the newest first.")
Named = Annotated[
    str, typer.Argument(help="a name from `minikv chats`", autocompletion=flags.saved)
]


@chats.callback(invoke_without_command=True)
@command
def listed(call: Call) -> None:
    terminal, entries = call.terminal, listing()
    if not entries:
        terminal.say(f"no saved chat in {chats_folder()}")
        return
    width = window(terminal.out)[0] if terminal.out.isatty() else 10_000
    for line in table(entries):
        terminal.data(cut(line, width))
    total = sum(entry.nbytes for entry in entries)
    terminal.say(f"{amount(len(entries), 'chat')}, {size(total)}")


def table(entries: Sequence[Entry]) -> list[str]:
    """A line for each saved chat, below a head."""
    rows = [("NAME", "TURNS", "AGE", "SIZE", "DOCS", "FIRST QUESTION")]
    rows += [
        (
            entry.name,
            f"{entry.turns:,}",
            age(time.time() - entry.saved),
            size(entry.nbytes),
            f"{entry.documents:,}",
            clean(entry.title),
        )
        for entry in entries
    ]
    return grid(rows, "<>>>><").split("\n")


@chats.command()
@command
def show(call: Call, name: Named) -> None:
    """What was said in a saved chat."""
    saved, lines = read(name), list[str]()
    for turn in saved.turns:
        lines += [f"document {d.name or 'piped text'}" for d in turn.documents]
        lines.append(f"> {turn.question.strip()}")
        lines += [f"({thought_for(turn.report.tokens.thoughts)})"] if turn.thoughts else []
        lines += [turn.answer.strip("\n"), ""]
    lines += [f"document {d.name or 'piped text'}, not read yet" for d in saved.pending]
    call.terminal.data("\n".join(lines).rstrip("\n"))


@chats.command("rm", short_help="Remove saved chats, with their documents and caches.")
@command
def remove(
    call: Call,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", autocompletion=flags.saved)
    ] = None,
    older: Annotated[
        str | None,
        flag(
            "--older",
            "all that were saved longer ago: 90min, 12h, 30d, 8w, 6mo or 1y",
            metavar="AGE",
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """minikv chats rm thesis

    Remove saved chats, with their documents and caches.
    """
    terminal = call.terminal
    if bool(names) == (older is not None):
        raise UsageError(
            "rm takes the names of chats, or --older", "minikv chats rm thesis, or --older 30d"
        )
    entries = {entry.name: entry for entry in listing()}
    if older is None:
        names = list(dict.fromkeys(names or []))
    else:
        oldest = time.time() - read_age(older)
        names = [name for name, entry in entries.items() if entry.saved < oldest]
    for name in names:
        check_name(name)
        if name not in entries:
            raise unknown(name)
    with contextlib.ExitStack() as held:
        for name in names[:]:
            try:
                with contextlib.suppress(OSError, *DAMAGE):
                    held.enter_context(contextlib.closing(ChatFile(name, lock=True)))
            except OpenElsewhere as error:
                if older is None:
                    raise
                terminal.note(f"{error}: it stays")
                names.remove(name)
        total = size(sum(entries[name].nbytes for name in names))
        what = f"chat {names[0]}" if len(names) == 1 else f"{len(names):,} chats"
        if not names or not terminal.confirmed(f"remove {what}, {total}?", yes=yes):
            terminal.say("nothing was removed")
            return
        for name in names:
            shutil.rmtree(chats_folder() / name)
            terminal.note(f"removed {name}")


def age(seconds: float) -> str:
    """ "40 s", "5 min", "3 h", "12 d": whole numbers, rounded down."""
    for unit in ("d", "h", "min"):
        if seconds >= _UNITS[unit]:
            return f"{int(seconds // _UNITS[unit]):,} {unit}"
    return f"{max(0, int(seconds))} s"


def read_age(text: str) -> float:
    """ "30d", "12 h" or "1.5y" in seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z]+)", text.strip().lower())
    if found and found[2] in _UNITS:
        return float(found[1]) * _UNITS[found[2]]
    raise UsageError(
        f"cannot read the age {quoted(text)}",
        "give a number with its unit: 90min, 12h, 30d, 8w, 6mo or 1y",
    )


cache = group(
    "minikv cache\n\nThe prompts that were read and are kept for later, the last used first."
)


@cache.callback(invoke_without_command=True)
@command
def prompts(call: Call) -> None:
    from minikv.chat.store import taken

    terminal = call.terminal
    store = _store()
    entries = store.entries()
    if not entries:
        terminal.say(f"no prompt is kept in {store.folder}")
        return
    lines = [("NAME", "TOKENS", "SIZE", "USED", "MODEL", "DOCUMENTS")]
    for one in entries:
        used, about = age(time.time() - one.used), clean(one.about) or "-"
        tokens, bytes_ = f"{one.tokens:,}", size(one.nbytes)
        lines.append((one.path.name, tokens, bytes_, used, clean(one.model), about))
    terminal.data(grid(lines, "<>>><<"), fold=True)
    terminal.say(f"{amount(len(entries), 'prompt')}, {size(taken(entries))}")


@cache.command("rm")
@command
def forget(
    call: Call,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME")] = None,
    yes: Yes = False,
) -> None:
    """Remove these prompts, or all."""
    from minikv.chat.store import taken

    terminal, names = call.terminal, names or []
    store = _store()
    entries = {one.path.name: one for one in store.entries()}
    for name in names:
        if name not in entries:
            raise UsageError(f"no prompt {name!r} is kept", "`minikv cache` lists them")
    chosen = [entries[name] for name in names or entries]
    rest = [one for one in entries.values() if one not in chosen]
    total, what = taken(entries.values()) - taken(rest), amount(len(chosen), "prompt")
    if not chosen or not terminal.confirmed(f"remove {what}, {size(total)}?", yes=yes):
        terminal.say("nothing was removed")
        return
    for one in chosen:
        store.remove(one)
    terminal.note(f"removed {what}, {size(total)}")


def _store() -> Store:
    from minikv.chat.store import Store, cache_folder  # with torch

    return Store(cache_folder() / "prompts", 0, {})


_LAST = 600
"""The most characters of the last question, and of its answer, that opening a chat shows."""
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
    """The origins of the settings that were loaded with a chat. given: what the user stated for a
    run that began with this chat; None: the chat was loaded later."""
    now, then = session.eviction, saved.eviction
    names = {name for name in _CACHED if getattr(now, name) == getattr(then, name)}
    names |= {"seed", "system", "pin_system", "reuse", "overflow"}
    if given is not None:
        names |= set(saved.facts["run"])  # the model and its number formats
        names -= {*given, *(("revision",) if "model" in given else ())}
    return dict.fromkeys(names, f"chat {saved.name}")


def summary(session: ChatSession, saved: Saved, seconds: float) -> str:
    """The lines about a chat that was loaded in `seconds`."""
    how = f"resumed in {1000 * seconds:.0f} ms"
    if not (session.log.ids or (session.recall.tokens and session.recalls)):
        how = "your next question reads it again"
    elif again := session.reads_again:
        how += f"; your next question reads {amount(again, 'token')} again"
    else:
        how += "; nothing was read again" if session.fed else ", with all that was read"
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


def left(context: Context) -> str:
    """A line that says where the present chat is saved, before another one replaces it; "" if
    nothing was asked in it."""
    name = context.keeper.kept(context.session)
    if name is not None:
        return f"  the chat so far is saved as {name}; /load {name} goes back to it"
    return "  the chat so far was not saved and is lost" if context.session.turns else ""


def _after_load(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    named = any(not one.startswith("-") for one in before)
    return ("--reread",) if named or word.startswith("-") else flags.saved()


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

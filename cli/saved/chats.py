"""`minikv chats`: the saved chats, what was said in one, and their removal."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from minikv.cache.budget import Budget
from minikv.chat.report import amount, size, thought_for
from minikv.checks import quoted
from minikv.cli.paths import chats_folder
from minikv.cli.saved.database import DAMAGE, ChatFile, OpenElsewhere, check_name
from minikv.cli.saved.listing import Entry, listing, unknown
from minikv.cli.saved.transcript import read
from minikv.cli.screen.terminal import Terminal, window
from minikv.cli.screen.text import clean, cut, grid
from minikv.cli.settings import values
from minikv.cli.settings.config import Interface
from minikv.cli.settings.flags import Call, Only, Yes, command, flag, group
from minikv.errors import UsageError

_UNITS = {"min": 60, "h": 3600, "d": 86400, "w": 604_800, "mo": 2_592_000, "y": 31_536_000}
"""Seconds."""

chats = group("minikv chats show NAME\n\nThe saved chats, the newest first.")
Saved = Annotated[
    str, typer.Argument(help="a name from `minikv chats`", autocompletion=values.saved)
]


@chats.callback(invoke_without_command=True)
@command
def listed(call: Call, interface: Annotated[Interface, Only("chats_limit")]) -> None:
    terminal, entries = call.terminal, listing()
    if not entries:
        terminal.say(f"no saved chat in {chats_folder()}")
        return
    width = window(terminal.out)[0] if terminal.out.isatty() else 10_000
    for line in table(entries):
        terminal.data(cut(line, width))
    total = sum(entry.nbytes for entry in entries)
    terminal.say(f"{amount(len(entries), 'chat')}, {size(total)}")
    warn_of(interface.chats_limit, terminal)


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


def warn_of(limit: str, terminal: Terminal) -> None:
    """Warn if all saved chats together take more than --chats-limit."""
    most = None if limit == "off" else Budget.size(limit)
    total = 0 if most is None else sum(entry.nbytes for entry in listing())
    if most is not None and total > most:
        terminal.warn(
            f"the saved chats take {size(total)}, more than --chats-limit {size(most)}: `minikv "
            "chats rm --older 30d` removes old ones"
        )


@chats.command()
@command
def show(call: Call, name: Saved) -> None:
    """What was said in a saved chat."""
    saved, lines = read(name), list[str]()
    for turn in saved.turns:
        lines += [f"document {d.name or 'piped text'}" for d in turn.documents]
        lines.append(f"> {turn.question.strip()}")
        lines += [f"({thought_for(turn.report.tokens.thoughts)})"] if turn.thoughts else []
        lines += [turn.answer.strip("\n"), ""]
    lines += [f"document {d.name or 'piped text'}, not read yet" for d in saved.pending]
    call.terminal.data("\n".join(lines).rstrip("\n"))


@chats.command("rm")
@command
def remove(
    call: Call,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", autocompletion=values.saved)
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

"""`minikv chats`: the saved chats, what was said in one, and their removal. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import typer

from minikv.cache.budget import Budget
from minikv.chat.report import size, thought_for
from minikv.checks import quoted
from minikv.cli.chat.turn import record
from minikv.cli.paths import chats_folder
from minikv.cli.saved.database import DAMAGE, ChatFile, OpenElsewhere
from minikv.cli.saved.files import check_name
from minikv.cli.saved.listing import listing, unknown
from minikv.cli.saved.old import is_old, locked
from minikv.cli.saved.transcript import read
from minikv.cli.screen.terminal import Terminal, window
from minikv.cli.screen.text import cells, clean, cut, grid, padded
from minikv.cli.settings import completion
from minikv.cli.settings.config import Interface
from minikv.cli.settings.flags import Call, Json, Only, Yes, command, flag, group
from minikv.errors import UsageError

_UNITS = {
    "s": (1, "sec second seconds"),
    "min": (60, "mins minute minutes"),
    "h": (3600, "hour hours"),
    "d": (86400, "day days"),
    "w": (7 * 86400, "week weeks"),
    "mo": (30 * 86400, "month months"),
    "y": (365 * 86400, "year years"),
}
_TITLE = 12
"""Columns that the first question must have at the least to be in the list."""


chats = group("minikv chats show NAME\n\nThe saved chats, the newest first.")
Saved = Annotated[
    str, typer.Argument(help="a name from `minikv chats`", autocompletion=completion.saved)
]


@chats.callback(invoke_without_command=True)
@command
def listed(
    call: Call, interface: Annotated[Interface, Only("chats_limit")], as_json: Json = False
) -> None:
    terminal, most = call.terminal, read_limit(interface.chats_limit)
    entries = listing()
    takes = [_bytes(entry.name) for entry in entries]
    if as_json:
        rows = [
            {
                "name": entry.name,
                "saved": entry.time,
                "turns": entry.turns,
                "documents": list(entry.documents),
                "bytes": nbytes,
                "model": entry.model,
                "title": entry.title,
            }
            for entry, nbytes in zip(entries, takes, strict=True)
        ]
        terminal.data(json.dumps(rows))
        return
    if not entries:
        terminal.say(f"no saved chat in {chats_folder()}")
        return
    lines: list[tuple[str, ...]] = [("NAME", "TURNS", "AGE", "SIZE", "DOCS")]
    lines += [
        (e.name, f"{e.turns:,}", age(time.time() - e.saved), size(nbytes), str(len(e.documents)))
        for e, nbytes in zip(entries, takes, strict=True)
    ]
    width = window(terminal.out)[0] if terminal.out.isatty() else 10_000
    for shown in range(5, 1, -1):  # without the last columns, where they do not fit
        table = grid([line[:shown] for line in lines], "<>>>>"[:shown]).split("\n")
        if (wide := max(map(cells, table))) <= width:
            break
    room = width - wide - 2
    if room >= _TITLE:
        titles = ["FIRST QUESTION", *(clean(entry.title) for entry in entries)]
        table = [
            f"{padded(line, wide)}  {cut(title, room)}".rstrip()
            for line, title in zip(table, titles, strict=True)
        ]
    terminal.data("\n".join(table))
    total = sum(takes)
    count = "1 chat" if len(entries) == 1 else f"{len(entries):,} chats"
    terminal.say(f"{count}, {size(total)}")
    _warn(total, most, terminal)


def read_limit(text: str) -> int | None:
    """--chats-limit in bytes; None means no limit."""
    return None if text == "off" else Budget.size(text)


def warn_of(limit: int | None, terminal: Terminal) -> None:
    """Warn if all saved chats together take more bytes than `limit`."""
    if limit is not None:
        _warn(sum(_bytes(entry.name) for entry in listing()), limit, terminal)


def _warn(total: int, limit: int | None, terminal: Terminal) -> None:
    if limit is not None and total > limit:
        terminal.warn(
            f"the saved chats take {size(total)}, more than --chats-limit {size(limit)}: `minikv "
            "chats rm --older 30d` removes old ones"
        )


@chats.command()
@command
def show(call: Call, name: Saved, as_json: Json = False) -> None:
    """What was said in a saved chat."""
    terminal = call.terminal
    _exists(name)
    saved = read(name)
    if as_json:
        turns = [record(turn) for turn in saved.turns]
        terminal.data(json.dumps({"name": name, "turns": turns}))
        return
    parts = []
    for turn in saved.turns:
        parts += [f"document {d.name or 'piped text'}" for d in turn.documents]
        parts.append(f"> {turn.question.strip()}")
        parts += [f"({thought_for(turn.report.tokens.thoughts)})"] if turn.thoughts else []
        parts += [turn.answer.strip("\n"), ""]
    parts += [f"document {d.name or 'piped text'}, not read yet" for d in saved.pending]
    terminal.data("\n".join(parts).rstrip("\n"))


@chats.command("rm")
@command
def remove(
    call: Call,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", autocompletion=completion.saved)
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
    """Remove saved chats, with the text that is stored in them: those that are named, or all that
    are --older than so long."""
    terminal = call.terminal
    if bool(names) == (older is not None):
        raise UsageError(
            "rm takes the names of chats, or --older", "minikv chats rm thesis, or --older 30d"
        )
    names = list(dict.fromkeys(names or [])) if older is None else _older(read_age(older))
    if not names:
        terminal.say(f"no chat is older than {older}; nothing was removed")
        return
    for name in names:
        _exists(name)
    with contextlib.ExitStack() as held:
        for name in names[:]:
            try:
                held.enter_context(_held(name))
            except OpenElsewhere as error:
                if older is None:
                    raise
                terminal.note(f"{error}: it stays")
                names.remove(name)
        if not names:
            terminal.say("nothing was removed")
            return
        total = size(sum(_bytes(name) for name in names))
        what = f"chat {names[0]}" if len(names) == 1 else f"{len(names):,} chats"
        if not terminal.confirmed(f"remove {what}, {total}?", yes=yes):
            terminal.say("nothing was removed")
            return
        for name in names:
            shutil.rmtree(chats_folder() / name)
            terminal.note(f"removed {name}")


@contextlib.contextmanager
def _held(name: str) -> Iterator[None]:
    """Keep a chat from being opened, unless it is damaged. Raises OpenElsewhere."""
    folder = chats_folder() / name
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, *DAMAGE):
            lock = locked(folder) if is_old(folder) else closing(ChatFile(name, lock=True))
            stack.enter_context(lock)
        yield


def age(seconds: float) -> str:
    """ "40 s", "5 min", "3 h", "12 d": whole numbers, rounded down."""
    for unit in ("d", "h", "min"):
        if seconds >= _UNITS[unit][0]:
            return f"{int(seconds // _UNITS[unit][0]):,} {unit}"
    return f"{max(0, int(seconds))} s"


def read_age(text: str) -> float:
    """ "30d", "12 h" or "1.5y" in seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z]+)", text.strip().lower())
    for unit, (length, words) in _UNITS.items():
        if found and found[2] in (unit, *words.split()):
            return float(found[1]) * length
    raise UsageError(
        f"cannot read the age {quoted(text)}",
        "give a number with its unit: 90min, 12h, 30d, 8w, 6mo or 1y",
    )


def _older(seconds: float) -> list[str]:
    """The chats that were saved longer ago, the oldest last."""
    return [entry.name for entry in listing() if time.time() - entry.saved > seconds]


def _exists(name: str) -> None:
    """Raise UsageError if the chat does not exist, damaged or not."""
    check_name(name)
    if not (chats_folder() / name).is_dir():
        raise unknown(name)


def _bytes(name: str) -> int:
    """What the files of a chat take."""
    total = 0
    with contextlib.suppress(OSError):
        for path in (chats_folder() / name).rglob("*"):
            total += path.lstat().st_size
    return total

"""`minikv chats`: the saved chats, what was said in one, and their removal. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from minikv.chat.report import size
from minikv.cli.confirm import confirmed
from minikv.cli.paths import chats_folder
from minikv.cli.saved.files import (
    DAMAGE,
    TRANSCRIPT,
    TRANSCRIPT_BYTES,
    check_name,
    lock,
    opened,
)
from minikv.cli.saved.listing import Entry, listing, unknown
from minikv.cli.saved.transcript import read
from minikv.cli.tables import cells, cut, grid, padded
from minikv.cli.terminal import Terminal, clean, columns
from minikv.cli.turn import record

_TITLE = 12
"""Columns that the first question must have at the least to be in the list."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """Beside its `Entry`, what the list says of a chat. `age`: in seconds."""

    documents: tuple[str, ...]
    bytes: int
    age: float


def chats(terminal: Terminal, *, as_json: bool = False) -> None:
    """Print a line per saved chat, the newest first."""
    entries = listing()
    facts = [_facts(entry) for entry in entries]
    if as_json:
        rows = [
            {
                "name": entry.name,
                "saved": entry.saved,
                "turns": entry.turns,
                "documents": list(fact.documents),
                "bytes": fact.bytes,
                "model": entry.model,
                "title": entry.title,
            }
            for entry, fact in zip(entries, facts, strict=True)
        ]
        terminal.data(json.dumps(rows))
        return
    if not entries:
        terminal.say(f"no saved chat in {chats_folder()}")
        return
    lines: list[tuple[str, ...]] = [("NAME", "TURNS", "AGE", "SIZE", "DOCS")]
    lines += [
        (entry.name, f"{entry.turns:,}", age(fact.age), size(fact.bytes), str(len(fact.documents)))
        for entry, fact in zip(entries, facts, strict=True)
    ]
    width = columns(terminal.out) if terminal.out.isatty() else 10_000
    table = grid(lines, "<>>>>").split("\n")
    while max(map(cells, table)) > width and len(lines[0]) > 2:
        lines = [line[:-1] for line in lines]  # the last column does not fit
        table = grid(lines, "<>>>>"[: len(lines[0])]).split("\n")
    wide = max(map(cells, table))
    room = width - wide - 2
    if room >= _TITLE:
        titles = ["FIRST QUESTION", *(clean(entry.title) for entry in entries)]
        table = [
            f"{padded(line, wide)}  {cut(title, room)}".rstrip()
            for line, title in zip(table, titles, strict=True)
        ]
    terminal.data("\n".join(table))


def show(name: str, terminal: Terminal, *, as_json: bool = False) -> None:
    """Print what was said in a chat. Raises UsageError for one that is not there or is damaged."""
    _exists(name)
    saved = read(name)
    if as_json:
        turns = [record(turn) for turn in saved.turns]
        terminal.data(json.dumps({"name": name, "turns": turns}))
        return
    parts = []
    for turn in saved.turns:
        parts += [f"document {d.name or 'piped text'}" for d in turn.documents]
        parts += [f"> {turn.question.strip()}", turn.answer.strip("\n"), ""]
    parts += [f"document {d.name or 'piped text'}, not read yet" for d in saved.pending]
    terminal.data("\n".join(parts).rstrip("\n"))


def remove(names: Sequence[str], terminal: Terminal, *, yes: bool = False) -> None:
    """Remove chats for good; none of them if one is not there or open in another minikv."""
    names = list(dict.fromkeys(names))
    for name in names:
        _exists(name)
    handles = []
    try:
        for name in names:
            handles.append(lock(name))
        total = size(sum(_bytes(name) for name in names))
        what = f"chat {names[0]}" if len(names) == 1 else f"{len(names):,} chats"
        if not confirmed(f"remove {what}, {total}?", terminal, yes=yes):
            terminal.say("nothing was removed")
            return
        for name in names:
            shutil.rmtree(chats_folder() / name)
            terminal.note(f"removed {name}")
    finally:
        for handle in handles:
            if handle is not None:
                os.close(handle)


def age(seconds: float) -> str:
    """ "40 s", "5 min", "3 h", "12 d": whole numbers, rounded down."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length):,} {unit}"
    return f"{max(0, int(seconds))} s"


def _exists(name: str) -> None:
    """Raise UsageError if there is no such chat. A damaged one is there."""
    check_name(name)
    if not (chats_folder() / name).is_dir():
        raise unknown(name)


def _facts(entry: Entry) -> _Facts:
    path = chats_folder() / entry.name / TRANSCRIPT
    names: list[str] = []
    saved = time.time()
    with contextlib.suppress(OSError, *DAMAGE), opened(path) as file:
        saved = os.fstat(file.fileno()).st_mtime
        file.readline(TRANSCRIPT_BYTES)  # the header
        while (line := json.loads(file.readline(1 << 20)))["kind"] == "document":
            names.append(str(line["name"] or "piped text"))
    return _Facts(tuple(names), _bytes(entry.name), time.time() - saved)


def _bytes(name: str) -> int:
    """What the files of a chat take."""
    total = 0
    with contextlib.suppress(OSError):
        for path in (chats_folder() / name).iterdir():
            total += path.lstat().st_size
    return total

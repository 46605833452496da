"""The saved chats that there are. Needs no torch."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import time
from dataclasses import dataclass

from minikv.cli.paths import chats_folder
from minikv.cli.saved.files import TRANSCRIPT, is_name, opened
from minikv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Entry:
    """A saved chat in a list. `saved` is local time, `title` its first question, cut."""

    name: str
    saved: str
    turns: int
    title: str
    model: str


def listing() -> list[Entry]:
    """All saved chats, the newest first. Anything else in the directory is left out."""
    found: list[tuple[float, Entry]] = []
    root = chats_folder()
    try:
        names = sorted(filter(is_name, os.listdir(root)))
    except OSError:
        return []
    for name in names:
        path = root / name / TRANSCRIPT
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with opened(path) as file:
                header = json.loads(file.readline(1 << 20))
            at = path.stat().st_mtime
            entry = Entry(
                name,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(at)),
                int(header["turns"]),
                str(header["title"]),
                str(header["identity"]["model"]),
            )
            found.append((at, entry))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)]


def unknown(name: str) -> UsageError:
    """What is raised for a name that no saved chat has."""
    names = [entry.name for entry in listing()]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        hint = f"did you mean {near[0]}?"
    elif names:
        hint = f"the last ones: {', '.join(names[:3])}; `minikv chats` lists all"
    else:
        hint = f"there is no saved chat in {chats_folder()}"
    return UsageError(f"no saved chat {name!r}", hint)


def newest() -> str:
    """The name of the chat that was saved last. Raises UsageError if there is none."""
    chats = listing()
    if not chats:
        raise UsageError(f"no saved chat in {chats_folder()}", "chats are saved after every turn")
    return chats[0].name

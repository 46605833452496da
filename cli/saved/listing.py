"""The list of saved chats. Needs no torch."""

from __future__ import annotations

import difflib
import json
import os
import time
from dataclasses import dataclass

from minikv.cli.paths import chats_folder
from minikv.cli.saved.files import DAMAGE, TRANSCRIPT, is_name, opened
from minikv.errors import UsageError

_NAMED = 5  # chats that an error names
_HEADER = 16 << 20  # bytes of a transcript's first line
_TITLE = 200  # characters that are shown


@dataclass(frozen=True, slots=True)
class Entry:
    """A saved chat in a list. `saved` is local time, `title` its first question, cut. Of a damaged
    chat only name and time are known; its title says that it is damaged."""

    name: str
    saved: str
    turns: int
    title: str
    model: str
    damaged: bool = False


def listing() -> list[Entry]:
    """All saved chats, the newest first. Anything else in the directory is left out."""
    found: list[tuple[float, Entry]] = []
    root = chats_folder()
    try:
        names = sorted(filter(is_name, os.listdir(root)))
    except OSError:
        return []
    for name in names:
        path, at, saved = root / name / TRANSCRIPT, 0.0, "?"
        try:
            at = path.stat().st_mtime
            saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
            with opened(path) as file:
                header = json.loads(file.readline(_HEADER))
            model, title = str(header["identity"]["model"]), str(header["title"])
            entry = Entry(name, saved, int(header["turns"]), _line(title), _line(model))
        except OSError:
            continue
        except DAMAGE:
            entry = Entry(name, saved, 0, "(damaged: its first line cannot be read)", "", True)
        found.append((at, entry))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _line(text: str) -> str:
    """The text in one line, cut."""
    return " ".join(text[:_TITLE].split())


def unknown(name: str) -> UsageError:
    """The error for a name under which no chat is saved."""
    names = [entry.name for entry in listing()]
    if not names:
        return UsageError(f"no saved chat {name!r}", f"there is none in {chats_folder()}")
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    guess = f"did you mean {near[0]}? " if near else ""
    some = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return UsageError(
        f"no saved chat {name!r}", f"{guess}saved are {some}; `minikv chats` lists all"
    )


def newest() -> str:
    """The name of the chat that was saved last. Raises UsageError if there is none."""
    chats = [entry for entry in listing() if not entry.damaged]
    if not chats:
        raise UsageError(f"no saved chat in {chats_folder()}", "chats are saved after every turn")
    return chats[0].name

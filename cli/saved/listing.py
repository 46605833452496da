"""The list of saved chats. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minikv.checks import guess
from minikv.cli.paths import chats_folder
from minikv.cli.saved import old
from minikv.cli.saved.database import DAMAGE, FILE, Chat, ChatFile
from minikv.cli.saved.files import LAST, is_name
from minikv.errors import UsageError

_NAMED = 5  # chats that an error names
_TITLE = 200  # characters that are shown


@dataclass(frozen=True, slots=True)
class Entry:
    """A saved chat in a list. saved: seconds since 1970. title: its first question, cut. Of a
    damaged chat only name and time are known; its title says that it is damaged."""

    name: str
    saved: float
    turns: int
    title: str
    documents: tuple[str, ...] = ()
    damaged: bool = False


def listing() -> list[Entry]:
    """All saved chats, the newest first. Anything else in the directory is left out."""
    try:
        names = sorted(filter(is_name, os.listdir(chats_folder())))
    except OSError:
        return []
    found = [entry for name in names if (entry := _entry(chats_folder() / name))]
    return sorted(found, key=lambda entry: entry.saved, reverse=True)


def _entry(folder: Path) -> Entry | None:
    name, is_old, saved = folder.name, old.is_old(folder), 0.0
    try:
        saved = (folder / (old.TRANSCRIPT if is_old else FILE)).stat().st_mtime
        with contextlib.closing(old.OldChat(folder) if is_old else ChatFile(name)) as chat:
            facts = facts_of(chat)
        documents = tuple(_line(name or "piped text") for name in facts["documents"])
        return Entry(name, saved, int(facts["turns"]), _line(str(facts["title"])), documents)
    except (OSError, UsageError):
        return None
    except DAMAGE:
        return Entry(name, saved, 0, "(damaged: it cannot be read)", damaged=True)


def facts_of(chat: Chat) -> Mapping[str, Any]:
    """What a chat's file says of it, as JSON. Raises `DAMAGE`."""
    ((facts, _),) = chat.rows("chat")
    return decoded(facts)


def decoded(text: str) -> Mapping[str, Any]:
    """A JSON object of a chat's file. Raises ValueError, and RecursionError."""
    if len(text) > MOST_JSON:
        raise ValueError("its JSON is too large")
    found: Mapping[str, Any] = json.loads(text)
    return found


MOST_JSON = 16 << 20
"""Characters of a JSON object: a list in it takes 64 bytes for two of them."""


def _line(text: str) -> str:
    """The text in one line, cut."""
    return " ".join(text[:_TITLE].split())


def unknown(name: str) -> UsageError:
    """The error for a name under which no chat is saved."""
    if name == LAST:
        return UsageError("there is no ask to continue", "`minikv ask QUESTION FILE` keeps one")
    names = [entry.name for entry in listing()]
    if not names:
        return UsageError(f"no saved chat {name!r}", f"there is none in {chats_folder()}")
    some = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return UsageError(
        f"no saved chat {name!r}", f"{guess(name, names)}saved are {some}; `minikv chats` lists all"
    )


def newest() -> str:
    """The name of the chat that was saved last, no `ask`. Raises UsageError if there is none."""
    chats = [entry for entry in listing() if not entry.damaged and entry.name != LAST]
    if not chats:
        raise UsageError(f"no saved chat in {chats_folder()}", "chats are saved after every turn")
    return chats[0].name

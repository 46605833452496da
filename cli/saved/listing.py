"""The list of saved chats, and the form in which version 0.1.0 saved them: `chat.jsonl` beside
files with the documents and the cache. Needs no torch."""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minikv.checks import guess
from minikv.cli.paths import chats_folder
from minikv.cli.saved.database import DAMAGE, FILE, LAST, ChatFile, is_name, opened, parts
from minikv.errors import UsageError

TRANSCRIPT = "chat.jsonl"
_FACTS = "title turns identity seed system pin_system opened_with pending curve no_cache".split()


def is_old(folder: Path) -> bool:
    """Whether a chat was saved by that version, and not opened since."""
    return os.path.lexists(folder / TRANSCRIPT) and not os.path.lexists(folder / FILE)


class OldChat:
    """Such a chat, with the rows that its new file will have. Raises OSError and `DAMAGE`."""

    def __init__(self, folder: Path) -> None:
        self.name, self._folder = folder.name, folder
        body, newline, end = _bytes_of(folder / TRANSCRIPT).rstrip(b"\n").rpartition(b"\n")
        if json.loads(end)["sha256"] != hashlib.sha256(body + newline).hexdigest():
            raise ValueError(f"the checksum of {TRANSCRIPT} does not fit: it was cut or edited")
        self._top, *lines = [json.loads(line) for line in body.split(b"\n")]
        if self._top["kind"] != "chat" or self._top["identity"]["format"] != 1:
            raise ValueError(f"{TRANSCRIPT} is of another version")
        kinds = ("document", "turn", "tokens")
        self._lines = {kind: [one for one in lines if one["kind"] == kind] for kind in kinds}

    def close(self) -> None:
        """Nothing is open."""

    def rows(self, table: str) -> Iterator[Any]:
        """As `ChatFile.rows`."""
        cache = self._top["cache"]
        if table == "chat":
            facts = {
                **{key: self._top[key] for key in _FACTS},
                "reuse": self._top.get("reuse", "once"),
                "run": {"kv": "auto", "weights": "auto", **self._top["run"]},
                "documents": [line["name"] for line in self._lines["document"]],
                "cache": cache["bytes"] if cache else 0,
            }
            tokens = [id for line in self._lines["tokens"] for id in line["ids"]]
            yield json.dumps(facts), array.array("i", tokens).tobytes()
        elif table == "document":
            for line in self._lines["document"]:
                about = {"name": line["name"], "source": line.get("source")}
                yield json.dumps(about), self._file(line).decode()
        elif table == "turn":
            for line in self._lines["turn"]:
                about = {"documents": line["documents"], "record": line["record"]}
                yield json.dumps(about), line["question"], line["answer"]
        else:
            yield from parts(self._file(cache) if cache else b"")

    def _file(self, line: Mapping[str, Any]) -> bytes:
        """A file that a line names."""
        path = self._folder / os.path.basename(line["file"])
        data = _bytes_of(path)
        if hashlib.sha256(data).hexdigest() != line["sha256"]:
            raise ValueError(f"the checksum of {path.name} does not fit: it was edited or damaged")
        return data

    def remove(self) -> None:
        """Remove its files. The transcript goes last: while it is there, the chat is old."""
        named = [*self._lines["document"], *filter(None, [self._top["cache"]])]
        for name in (*(os.path.basename(line["file"]) for line in named), "lock", TRANSCRIPT):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / name)


def _bytes_of(path: Path) -> bytes:
    with opened(path) as file:
        data: bytes = file.read()
    return data


_NAMED = 5  # chats that an error names
_TITLE = 200  # characters that are shown


Chat = ChatFile | OldChat


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
    name, early, saved = folder.name, is_old(folder), 0.0
    try:
        saved = (folder / (TRANSCRIPT if early else FILE)).stat().st_mtime
        with contextlib.closing(OldChat(folder) if early else ChatFile(name)) as chat:
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

"""Chats as version 0.1.0 saved them: `chat.jsonl` beside files with the documents and the cache."""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minikv.cli.saved.database import FILE, parts
from minikv.cli.saved.files import opened

TRANSCRIPT = "chat.jsonl"
_FACTS = "title turns identity seed system pin_system opened_with pending curve no_cache".split()


def is_old(folder: Path) -> bool:
    """Whether a chat was saved by that version, and not opened since."""
    return os.path.lexists(folder / TRANSCRIPT) and not os.path.lexists(folder / FILE)


class OldChat:
    """Such a chat, with the rows that its new file will have. Raises OSError and `DAMAGE`."""

    def __init__(self, folder: Path) -> None:
        self.name, self._folder = folder.name, folder
        body, newline, end = _read(folder / TRANSCRIPT).rstrip(b"\n").rpartition(b"\n")
        if json.loads(end)["sha256"] != hashlib.sha256(body + newline).hexdigest():
            raise ValueError(f"the checksum of {TRANSCRIPT} does not fit: it was cut or edited")
        self._top, *lines = [json.loads(line) for line in body.split(b"\n")]
        if self._top["kind"] != "chat" or self._top["identity"]["format"] != 1:
            raise ValueError(f"{TRANSCRIPT} is of another version")
        kinds = ("document", "turn", "tokens")
        self._lines = {kind: [one for one in lines if one["kind"] == kind] for kind in kinds}

    def close(self) -> None:
        """Nothing is open."""

    def rows(self, table: str) -> Iterator[Sequence[str | bytes]]:
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
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != line["sha256"]:
            raise ValueError(f"the checksum of {path.name} does not fit: it was edited or damaged")
        return data

    def remove(self) -> None:
        """Remove its files. The transcript goes last: while it is there, the chat is old."""
        named = [*self._lines["document"], *filter(None, [self._top["cache"]])]
        for name in (*(os.path.basename(line["file"]) for line in named), "lock", TRANSCRIPT):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / name)


def _read(path: Path) -> bytes:
    with opened(path) as file:
        data: bytes = file.read()
    return data

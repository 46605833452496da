"""Chats as minikv saved them before: `chat.jsonl` beside files with the documents and the cache.

Such a chat is written anew when it is opened, in the same directory, and then its files go.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minikv.cli.json_limits import refuse_many
from minikv.cli.saved.database import DAMAGE, FILE, ChatFile, OpenElsewhere, parts
from minikv.cli.saved.files import opened

TRANSCRIPT = "chat.jsonl"
_FILE = re.compile(r"(cache-[0-9a-f]{16}\.safetensors|document-[0-9a-f]{16}\.txt)")
_BYTES = {"chat.jsonl": 256 << 20, "document": 64 << 20, "cache": 1 << 30}
_NEW = "chat.db.new"


def is_old(folder: Path) -> bool:
    """Whether a chat was saved by an earlier version, and not opened since."""
    return os.path.lexists(folder / TRANSCRIPT)


def facts(folder: Path) -> Mapping[str, Any]:
    """What the list of chats says of one. Raises `DAMAGE` and OSError."""
    with opened(folder / TRANSCRIPT) as file:
        top = json.loads(file.readline(16 << 20))
        names = []
        while (line := json.loads(file.readline(1 << 20)))["kind"] == "document":
            names.append(line["name"])
    return {**top, "documents": names}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes of an earlier version from the chat. Raises OpenElsewhere, OSError."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system that cannot lock
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OpenElsewhere(folder.name) from None
        yield
    finally:
        os.close(handle)


def convert(folder: Path, check: Callable[[ChatFile], object]) -> None:
    """Write a chat of an earlier version anew. Its files go when the new one is on disk and `check`
    has read it back: what cannot be read does not replace what can. Raises
    OpenElsewhere, UsageError, OSError, and `DAMAGE`; then it is as it was."""
    if not is_old(folder):
        return
    with locked(folder):
        if not os.path.lexists(folder / FILE):
            saved = os.stat(folder / TRANSCRIPT)
            _write(folder)
            with ChatFile(folder.name, file=_NEW) as made:
                check(made)
            os.utime(folder / _NEW, ns=(saved.st_atime_ns, saved.st_mtime_ns))
            os.replace(folder / _NEW, folder / FILE)
        # The transcript goes last: as long as it is there, the next process removes the rest.
        for name in [n for n in os.listdir(folder) if _FILE.fullmatch(n)] + ["lock", TRANSCRIPT]:
            os.unlink(folder / name)


def _write(folder: Path) -> None:
    top, *lines = _lines(folder)
    documents = [line for line in lines if line["kind"] == "document"]
    turns = [line for line in lines if line["kind"] == "turn"]
    ids: list[int] = next((line["ids"] for line in lines if line["kind"] == "tokens"), [])
    cache, why = b"", top["no_cache"]
    if top["cache"]:
        try:
            cache = _part(folder, top["cache"], "cache")
        except (OSError, *DAMAGE) as error:
            why = f"its file was damaged: {error}"
    kept = "title turns identity seed system pin_system opened_with pending curve".split()
    top = {
        **{key: top[key] for key in kept},
        "reuse": top.get("reuse", "once"),
        "run": {"kv": "auto", "weights": "auto", **top["run"]},
        "documents": [line["name"] for line in documents],
        "cache": len(cache),
        "no_cache": why,
    }
    for name in (_NEW, f"{_NEW}-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / name)
    with ChatFile(folder.name, file=_NEW, new=True) as made, made.saving():
        made.put("chat", [(json.dumps(top), array.array("i", ids).tobytes())])
        made.put(
            "document",
            (
                (
                    json.dumps({"name": line["name"], "source": line.get("source")}),
                    _part(folder, line, "document").decode(),
                )
                for line in documents
            ),
        )
        made.put(
            "turn",
            (
                (
                    json.dumps({"documents": line["documents"], "record": line["record"]}),
                    line["question"],
                    line["answer"],
                )
                for line in turns
            ),
        )
        made.put("cache", parts(cache))


def _part(folder: Path, record: Mapping[str, Any], kind: str) -> bytes:
    """A file that a line names."""
    name = record["file"]
    if _FILE.fullmatch(name) is None:
        raise ValueError(f"{name!r:.80} is not a file of a chat")
    data = _read(folder / name, kind)
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError(f"the checksum of {name} does not fit: it was edited or damaged")
    return data


def _read(path: Path, kind: str) -> bytes:
    with opened(path) as file:
        data: bytes = file.read(_BYTES[kind] + 1)
    if len(data) > _BYTES[kind]:
        raise ValueError(f"{path.name} is too large")
    return data


def _lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the transcript, the header first, the checksum checked and left out."""
    data = _read(folder / TRANSCRIPT, TRANSCRIPT)
    body, newline, end = data.removesuffix(b"\n").rpartition(b"\n")
    if json.loads(end)["sha256"] != hashlib.sha256(body + newline).hexdigest():
        raise ValueError(f"the checksum of {TRANSCRIPT} does not fit: it was cut or edited")
    refuse_many(body)
    # Bytes may be taken for UTF-16, in which the limit does not see the lists.
    lines = [json.loads(line.decode("utf-8", "surrogatepass")) for line in body.splitlines()]
    if lines[0]["kind"] != "chat" or lines[0]["identity"]["format"] != 1:
        raise ValueError(f"{TRANSCRIPT} is of another version")
    return lines

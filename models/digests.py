"""Checksums of a model's files, and what they should be.

Of a model in the hub's cache the hub says it: the file that a name links to is called by its own
checksum, the SHA-256 of a large file, or git's for a small one. That needs no network. The bundled
model has its checksums in a file. Nobody states those of a directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minikv.models.errors import CorruptModel
from minikv.models.hub import (
    INDEX,
    ORIGINAL_INDEX,
    open_regular,
    read_json,
    unreadable,
    wanted_files,
    weight_map,
)

STATED = "digests.json"
"""Name and SHA-256 of each file of the bundled model, in its folder."""
_PIECE = 4 << 20  # bytes read at a time
_LENGTHS = {64: "sha256", 40: "git"}  # hexadecimal digits


@dataclass(frozen=True, slots=True)
class Digest:
    """A checksum. `kind`: "sha256", or "git" (the SHA-1 of the size and the contents)."""

    kind: str
    value: str


def names(folder: Path) -> list[str]:
    """The files in `folder` that minikv reads, and shards that an index names and that are not
    there. Raises ModelError where there is no model."""
    try:
        there = [
            path.relative_to(folder).as_posix()
            for parent in (folder, folder / "additional_chat_templates")
            if parent.is_dir()
            for path in parent.iterdir()
        ]
    except OSError as error:
        raise unreadable(folder, error) from None
    found = set(wanted_files(there))
    for index in found & {INDEX, ORIGINAL_INDEX}:
        with contextlib.suppress(CorruptModel):  # its own checksum tells
            found |= set(weight_map(folder / index).values())
    return sorted(found)


def stated(folder: Path, name: str) -> Digest | None:
    """What the hub says of a file; None where it is not a link into the hub's cache."""
    try:
        target = Path(os.readlink(folder / name))
    except OSError:
        return None
    kind = _LENGTHS.get(len(target.name))
    if target.parent.name != "blobs" or kind is None or re.search(r"[^0-9a-f]", target.name):
        return None
    return Digest(kind, target.name)


def shipped(folder: Path) -> dict[str, Digest]:
    """What the bundled model's own list says."""
    return {name: Digest("sha256", str(one)) for name, one in read_json(folder / STATED).items()}


def listed(folder: Path) -> str:
    """The text of such a list, for the files that are there now."""
    found = {name: digest(folder / name, "sha256").value for name in names(folder)}
    return json.dumps(found, indent=2) + "\n"


def digest(path: Path, kind: str, tell: Callable[[int], None] = lambda count: None) -> Digest:
    """The checksum of a file; `tell` gets the bytes of each read. Raises ModelError."""
    with open_regular(path) as file:
        made = hashlib.new("sha1" if kind == "git" else kind, usedforsecurity=False)
        if kind == "git":
            made.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        piece = memoryview(bytearray(_PIECE))
        while True:
            try:
                got = file.readinto(piece)  # type: ignore[attr-defined]
            except OSError as error:
                raise unreadable(path, error) from None
            if not got:
                return Digest(kind, made.hexdigest())
            made.update(piece[:got])
            tell(got)

"""Checksums of a model's files: the actual ones, and the expected ones.

In the hub's cache, a file name links to a file whose own name is its checksum: the SHA-256 of a
large file, or git's hash of a small one. So checking needs no network. The bundled model has its
checksums in a file. For other directories no checksums are known.
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
    model_files,
    open_regular,
    read_json,
    unreadable,
    weight_map,
)

STATED = "digests.json"
"""The file in the bundled model's folder with the name and SHA-256 of each of its files."""
_PIECE = 4 << 20  # bytes read at a time
_LENGTHS = {64: "sha256", 40: "git"}  # hexadecimal digits


@dataclass(frozen=True, slots=True)
class Digest:
    """A checksum in hexadecimal. kind: "sha256", or "git" (the SHA-1 of the size and the
    contents)."""

    kind: str
    value: str


def names(folder: Path) -> list[str]:
    """The names of the files in `folder` that minikv reads, and of shards that an index lists, even
    if they are missing. Raises ModelError if there is no model."""
    found = set(model_files(folder))
    for index in found & {INDEX, ORIGINAL_INDEX}:
        with contextlib.suppress(CorruptModel):  # the check of its own checksum will report it
            found |= set(weight_map(folder / index).values())
    return sorted(found)


def stated(folder: Path, name: str) -> Digest | None:
    """The checksum that the hub states for a file; None if the file is not a link into the hub's
    cache."""
    try:
        target = Path(os.readlink(folder / name))
    except OSError:
        return None
    kind = _LENGTHS.get(len(target.name))
    if target.parent.name != "blobs" or kind is None or re.search(r"[^0-9a-f]", target.name):
        return None
    return Digest(kind, target.name)


def shipped(folder: Path) -> dict[str, Digest]:
    """The expected checksums of the bundled model's files, by name."""
    return {name: Digest("sha256", str(one)) for name, one in read_json(folder / STATED).items()}


def listed(folder: Path) -> str:
    """The content for a `STATED` file, for the files that are in `folder` now."""
    found = {name: digest(folder / name, "sha256").value for name in names(folder)}
    return json.dumps(found, indent=2) + "\n"


def digest(path: Path, kind: str, tell: Callable[[int], None] = lambda count: None) -> Digest:
    """Compute the checksum of a file. tell(count) is called with the bytes of each read. Raises
    ModelError."""
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

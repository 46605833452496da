"""The store: prompts on disk, for later conversations that begin with the same tokens.

An entry is a tier (`minikv.cache.tier_file`) with the rows of one conversation's first prompt. It
never changes. A later conversation uses its rows as far as the tokens agree, and reads only the
rest. If the rest is long, it becomes another entry, which shares the files of the first.

An entry is written under a hidden name and renamed when all of it is on disk. So other processes
see only complete entries. The least recently used ones are removed to make room for new ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minikv.cache.tier_file import FileRows, Header, is_open, remove
from minikv.cache.tier_rows import TierError
from minikv.chat.transcript import shared
from minikv.errors import UsageError

FORMAT = 1
"""Must be increased when the network's numerical results change: earlier rows are then not used."""
LEAST = 2000
"""In tokens. Shorter prompts are quick to read and not worth a file."""
_SHARE = 10  # entries take at most a tenth of the free disk
_DAMAGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
_NAME = re.compile(r"[0-9a-f]{16}")
_WAITING = re.compile(r"\.[0-9a-f]{16}")


def cache_folder() -> Path:
    """The directory of files that may be deleted at any time: cache under $MINIKV_HOME, else minikv
    in the user's cache directory. Raises UsageError if there is no home directory."""
    try:
        if home := os.environ.get("MINIKV_HOME"):
            return Path(home).expanduser() / "cache"
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "minikv"
    except RuntimeError:
        raise UsageError("there is no home directory", "set MINIKV_HOME to a directory") from None


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored prompt. files: bytes by file, shared files included. used: when it was last used, in
    seconds since 1970. model, about: descriptions for people; `about` says so if the entry is
    damaged."""

    path: Path
    files: Mapping[int, int]
    used: float
    tokens: int = 0
    model: str = ""
    about: str = "damaged"

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(self.files.values())


def taken(entries: Iterable[Entry]) -> int:
    """Bytes of the entries' files. Those that several share count once."""
    return sum(dict(file for entry in entries for file in entry.files.items()).values())


class Store:
    """The stored prompts in a folder.

    folder: need not exist. limit: bytes that all entries may take; they never take more than a
    tenth of the disk that would be free without them. identity: of the model, as in the headers of
    its tiers. least: the fewest tokens for which an entry is written or read.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        identity: Mapping[str, object],
        least: int = LEAST,
    ) -> None:
        self.folder, self.limit, self.least = folder, limit, least
        self.identity = {"format": FORMAT, **identity}

    def entries(self) -> list[Entry]:
        """All entries, the last used one first."""
        found = []
        for path in self._paths():
            with contextlib.suppress(OSError):  # removed meanwhile
                found.append(_entry(path))
        return sorted(found, key=lambda one: -one.used)

    def find(self, header: Header, ids: Sequence[int]) -> FileRows | None:
        """The entry that has the most of the first tokens `ids`, open for reading; None if no entry
        has `least` of them."""
        best, most = None, self.least - 1
        for path in self._paths():
            try:
                rows = FileRows.open(path, shared=True)
            except TierError as error:
                why = error.__context__
                if not isinstance(why, OSError) or why.errno in _DAMAGED:
                    remove(path)  # otherwise it may be intact, but cannot be read now
                continue
            has = shared(rows.ids, ids) if rows.header == header else 0
            if has > most:
                best, rows, most = rows, best, has
            if rows is not None:
                rows.close()
        if best is not None:
            with contextlib.suppress(OSError):
                os.utime(best.path)
        return best

    def _paths(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        except OSError:
            return []

    def room(self, size: int) -> str:
        """Make room for `size` bytes by removing entries. Returns "", or why that is not
        possible."""
        try:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            sweep(self.folder, _WAITING)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            return f"{error.strerror} ({self.folder})"
        entries = self.entries()
        most = min(self.limit, (free + taken(entries)) // _SHARE)
        if size > most:
            return f"it takes {size / 2**20:,.0f} MiB, and {most / 2**20:,.0f} MiB may be taken"
        while taken(entries) + size > most:
            self.remove(entries.pop())
        return ""

    def remove(self, entry: Entry) -> None:
        """Remove an entry. Chats that use its rows keep them."""
        remove(entry.path)

    def place(self) -> Path:
        """A new hidden name for an entry that is being written."""
        return self.folder / f".{secrets.token_hex(8)}"

    def name(self) -> Path:
        """A new name for an entry that is on disk."""
        return self.folder / secrets.token_hex(8)


def sweep(folder: Path, unfinished: re.Pattern[str]) -> None:
    """Remove the tiers with such names that killed processes left in a folder. Raises OSError."""
    for path in folder.iterdir():
        if unfinished.fullmatch(path.name):
            with contextlib.suppress(OSError):
                if not is_open(path):
                    remove(path)


def _entry(path: Path) -> Entry:
    """Raises OSError."""
    files = {about.st_ino: about.st_size for about in map(Path.stat, path.iterdir())}
    made = Entry(path, files, path.stat().st_mtime)
    with contextlib.suppress(TierError):
        rows = FileRows.open(path, shared=True)
        header, tokens = rows.header, rows.rows
        rows.close()
        made = replace(
            made, tokens=tokens, model=str(header.identity.get("model", "")), about=header.about
        )
    return made

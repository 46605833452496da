"""The file of a saved chat: an SQLite database that is checked before use.

A file never changes: a save writes a new one beside it, which replaces it when it is complete. An
open chat is locked; other processes can still read what was saved last. Each row ends with a
checksum of its other values, because SQLite does not notice a changed bit in a text.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import sqlite3
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from minikv.cli.paths import chats_folder, opened, private
from minikv.errors import UsageError

LAST = "last-ask"
"""The name of the chat that the last `minikv ask` saved, for `--continue`. The next `ask` replaces
it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_name(name: str) -> bool:
    """Whether a chat can have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, *, own: bool = False) -> None:
    """Raise UsageError if the name is not a plain file name. own: also if it is reserved for
    minikv."""
    if not is_name(name):
        raise UsageError(
            f"{name!r} cannot be the name of a chat",
            "letters, digits, dots, dashes and underscores, at most 64, beginning with a letter or "
            "digit",
        )
    if own and name == LAST:
        raise UsageError(f"{name} is the name of the last `minikv ask`", "choose another name")


def new_folder(name: str) -> str:
    """Make a directory of this name, or of the next free one; returns its name. Raises OSError."""
    root = private(chats_folder())
    for i in itertools.count(1):
        candidate = name if i == 1 else f"{name}-{i}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(root / candidate, 0o700)
            os.chmod(root / candidate, 0o700)  # for any umask
            break
    return candidate


FILE = "chat.db"
NEW = f"{FILE}.new"
"""The file that replaces `FILE` when it is complete. Without `FILE` beside it, a first save was
killed."""
_LOCK = "lock"
REREAD = "--reread resumes the chat without it: the next question reads it again"
DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    sqlite3.Error,
)
"""What reading a damaged file raises. The checks find accidental changes, but not a file that
someone forged with valid checksums."""
TABLES = {
    "chat": ("facts", "tokens"),
    "document": ("facts", "text"),
    "turn": ("facts", "question", "answer"),
    "cache": ("data",),
}
_BINARY = ("tokens", "data")
_SCHEMA = {
    name: f"CREATE TABLE {name} (number INTEGER PRIMARY KEY, {', '.join(columns)}, seal)"
    for name, columns in TABLES.items()
}
_VERSION = 2  # PRAGMA user_version; version 1 was a directory of files
_PRAGMAS = ("trusted_schema = OFF", "cell_size_check = ON")
_MOST = 65 << 20  # bytes of a value
_PART = 4 << 20  # bytes of a part of the cache
_NAMES_A_FILE = bytes.fromhex("d9d505f920a163d7")
"""How a journal ends that names another file. SQLite would delete that file after a rollback."""


class OpenElsewhere(UsageError):
    """Another process has the chat open."""


class ChatFile:
    """An open file of a saved chat. locks: whether its file system can lock files."""

    def __init__(self, name: str, *, lock: bool = False) -> None:
        """lock: keep other processes from saving this chat until this is closed. Raises OSError,
        `DAMAGE`, and UsageError if another process has the lock."""
        self.name, self.locks = name, True
        self._db: sqlite3.Connection | None = None
        self._handle: int | None = None
        self._stat: os.stat_result  # of the file that `_connect` opened
        if not stat.S_ISREG(os.lstat(self._path).st_mode):
            raise OSError(0, "not a regular file")
        try:
            if lock:
                self._lock()
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def _path(self) -> Path:
        return chats_folder() / self.name / FILE

    def close(self) -> None:
        """Close and unlock it."""
        if self._db is not None:
            self._db.close()
        if self._handle is not None:
            os.close(self._handle)
        self._db = self._handle = None

    def refresh(self) -> None:
        """Open the chat's present file, if another process has replaced it. Raises OSError and
        `DAMAGE`; then that process's save is still refused to be overwritten."""
        was = self._stat
        with contextlib.suppress(FileNotFoundError):  # it was removed; the old one can be read
            if not os.path.samestat(os.lstat(self._path), was):
                try:
                    self._connect()
                except BaseException:
                    self._stat = was
                    raise

    def rows(self, table: str) -> list[Any]:
        """The values of each row of one of `TABLES`, in order. Raises `DAMAGE`."""
        kinds = [bytes if column in _BINARY else str for column in TABLES[table]]
        if self._db is None:  # it could not be opened after a save
            self._connect()
        assert self._db is not None
        found = self._db.execute(f"SELECT * FROM {table} ORDER BY number").fetchall()
        for at, (number, *values, seal) in enumerate(found):
            if (number, seal) != (at, _seal(values)) or [*map(type, values)] != kinds:
                raise ValueError(
                    f"a checksum in table {table} does not fit: it was edited or damaged"
                )
        return [row[1:-1] for row in found]

    def write(self, rows: Mapping[str, Iterable[Sequence[str | bytes]]], same: int = 0) -> None:
        """Save these rows. After an error, the chat's file is the old one or the new one, whole.
        same: how many turns at the beginning are taken from the file. Raises OSError, and
        UsageError if another process has saved the chat meanwhile."""
        # The file stays open here, so that no other one can have the same number.
        if not os.path.samestat(os.lstat(self._path), self._stat):
            raise UsageError(
                f"another minikv has saved chat {self.name}",
                "/fork NAME saves this one beside it",
            )
        try:
            earlier = self.rows("turn")[:same] if same else []
            renew(self.name, {**rows, "turn": itertools.chain(earlier, rows["turn"])})
            self._connect()
        except DAMAGE as error:
            raise OSError(errno.EIO, str(error), str(self._path)) from None

    def rename(self, name: str) -> None:
        """Give the chat another name, which is not in use. Raises OSError."""
        os.rename(self._path.parent, chats_folder() / name)
        self.name = name

    def _lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._handle = os.open(self._path.with_name(_LOCK), flags, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OpenElsewhere(
                f"chat {self.name} is open in another minikv",
                "leave it there, or open another chat",
            ) from None
        except OSError:
            self.locks = False

    def _connect(self) -> None:
        """Open the present file. Raises `DAMAGE` unless its tables are those of a chat."""
        self._stat = os.lstat(self._path)
        _roll_back(self._path)
        if self._db is not None:
            self._db.close()
            self._db = None
        self._db = _connected(self._path, "ro&immutable=1")
        # A stranger's file may have views, triggers and expressions: none of them may run.
        found = self._db.execute("SELECT name, sql FROM sqlite_master").fetchmany(9)
        ((version,),) = self._db.execute("PRAGMA user_version")
        if version != _VERSION:
            raise ValueError(f"format {version}, not {_VERSION}")
        if dict(found) != _SCHEMA or len(found) != len(_SCHEMA):
            raise ValueError("its tables are not those of a chat")


def renew(name: str, rows: Mapping[str, Iterable[Sequence[str | bytes]]]) -> None:
    """Replace a chat's file by a new one with these rows. If that fails, the old file is unchanged.
    Waits for other processes that do the same. Raises OSError, and what `rows` raises."""
    folder = chats_folder() / name
    new = folder / NEW
    with contextlib.ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, handle)
        with contextlib.suppress(OSError):  # the file system cannot lock
            fcntl.flock(handle, fcntl.LOCK_EX)
        new.unlink(missing_ok=True)
        try:
            os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            db = stack.enter_context(contextlib.closing(_connected(new, "rw&nolock=1")))
            db.execute("PRAGMA journal_mode = OFF")  # an incomplete file is thrown away anyway
            db.execute("BEGIN")
            for table, columns in TABLES.items():
                db.execute(_SCHEMA[table])
                put = f"INSERT INTO {table} VALUES ({'?, ' * len(columns)}?, ?)"
                for number, values in enumerate(rows[table]):
                    db.execute(put, (number, *values, _seal(values)))
            db.execute(f"PRAGMA user_version = {_VERSION}")
            db.execute("COMMIT")
            db.close()
            with contextlib.suppress(OSError, *DAMAGE):  # or it would be done to the new file
                _roll_back(folder / FILE)
            _journal(folder / FILE).unlink(missing_ok=True)
            made = os.lstat(new)
            try:
                os.replace(new, folder / FILE)
            except OSError:  # a network may report this although the file was replaced
                if not os.path.samestat(made, os.lstat(folder / FILE)):
                    raise
        except BaseException as error:
            new.unlink(missing_ok=True)
            if isinstance(error, sqlite3.Error):
                raise OSError(errno.EIO, str(error), str(new)) from None
            raise


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}-journal")


def _roll_back(path: Path) -> None:
    """Undo a save that was killed: earlier versions changed the file itself. Raises OSError and
    `DAMAGE`."""
    with contextlib.suppress(FileNotFoundError), opened(_journal(path)) as file:
        file.seek(-min(8, os.fstat(file.fileno()).st_size), os.SEEK_END)
        if file.read() == _NAMES_A_FILE:
            raise ValueError("its journal names another file, which no chat's does")
        with contextlib.closing(_connected(path, "rw")) as db:
            db.execute("SELECT * FROM sqlite_master").fetchall()


def _connected(path: Path, how: str) -> sqlite3.Connection:
    """A connection to an existing file. Raises sqlite3.Error."""
    uri = f"file:{quote(os.fsencode(path))}?mode={how}"
    db = sqlite3.connect(uri, isolation_level=None, uri=True)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST)
    db.text_factory = bytes.decode  # its error does not quote the text
    for pragma in _PRAGMAS:
        db.execute(f"PRAGMA {pragma}")
    return db


def parts(data: bytes) -> list[tuple[bytes]]:
    """Bytes as rows of the table `cache`, in parts because SQLite copies a value several times."""
    return [(data[at : at + _PART],) for at in range(0, len(data), _PART)]


def unreadable(error: Exception) -> bool:
    """Whether an error came from the disk, and says nothing about the file's content."""
    name = getattr(error, "sqlite_errorname", "")  # none if it is of the Python module itself
    return name != "" and not name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"))


def _seal(values: Iterable[object]) -> bytes:
    """A checksum of a row."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes | memoryview) else str(value).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()

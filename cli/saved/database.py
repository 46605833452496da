"""The file of a saved chat: an SQLite database that is checked before use.

Each row ends with a checksum of its other values, because SQLite does not notice a changed bit in a
text. An open chat holds a transaction, whose lock keeps other processes from writing; they can
still read what was saved last. A new file is written beside the old one and replaces it when it is
complete.
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
import tempfile
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
_PRAGMAS = ("trusted_schema = OFF", "cell_size_check = ON", "secure_delete = ON")
_WAIT = 5  # seconds to wait while another process reads or writes
_ASK = 0.3  # seconds to wait before a chat counts as open elsewhere
_MOST = 65 << 20  # bytes of a value
_PART = 4 << 20  # bytes of a part of the cache
_NAMES_A_FILE = bytes.fromhex("d9d505f920a163d7")
"""How a journal ends that names another file. SQLite would delete that file after a rollback."""


class OpenElsewhere(UsageError):
    """Another process has the chat open."""


class ChatFile:
    """An open file of a saved chat. locks: whether its file system can lock files. wrong: the
    damage that SQLite finds, or "" (checked only with a lock)."""

    def __init__(self, name: str, *, lock: bool = False) -> None:
        """lock: keep other processes from writing until this file is closed. Raises OSError,
        `DAMAGE`, and UsageError if another process has the lock."""
        self.name, self.path, self.wrong = name, chats_folder() / name / FILE, ""
        self._stat = os.lstat(self.path)
        if not stat.S_ISREG(self._stat.st_mode):
            raise OSError(0, "not a regular file")
        _refuse_journal(self.path)
        self.locks = _can_lock(self.path.parent)
        unlocked = "" if self.locks else "&nolock=1" if lock else "&immutable=1"
        self._db = _connected(self.path, unlocked, _ASK if lock else _WAIT)
        try:
            if lock:
                self._lock()
            else:
                self._db.execute("BEGIN")
            # A stranger's file may have views, triggers and expressions: none of them may run.
            found = self._db.execute("SELECT name, sql FROM sqlite_master").fetchmany(9)
            if (version := self._value("PRAGMA user_version")) != _VERSION:
                raise ValueError(f"format {version}, not {_VERSION}")
            if dict(found) != _SCHEMA or len(found) != len(_SCHEMA):
                raise ValueError("its tables are not those of a chat")
            if lock and (wrong := self._value("PRAGMA quick_check(1)")) != "ok":
                self.wrong = wrong  # nothing may be written to it
            self._own = {self._seal_in_file()}
            if not self.locks:  # no transaction stays open: another process may write meanwhile
                self._db.rollback()
            self._db.execute(f"PRAGMA busy_timeout = {1000 * _WAIT}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close and unlock it."""
        self._db.close()

    def rows(self, table: str) -> list[Any]:
        """The values of each row of one of `TABLES`, in order. Raises `DAMAGE`."""
        kinds = [bytes if column in _BINARY else str for column in TABLES[table]]
        found = self._db.execute(f"SELECT * FROM {table} ORDER BY number").fetchall()
        for at, (number, *values, seal) in enumerate(found):
            if (number, seal) != (at, _seal(values)) or [*map(type, values)] != kinds:
                raise ValueError(
                    f"a checksum in table {table} does not fit: it was edited or damaged"
                )
        return [row[1:-1] for row in found]

    def write(self, rows: Mapping[str, Iterable[Sequence[str | bytes]]], same: int = 0) -> None:
        """Replace the rows of every table; after an error, no row has changed. same: how many turns
        at the beginning are in the file already. Raises OSError, and UsageError if another process
        has opened or saved the chat meanwhile."""
        try:
            self._lock()
            # PRAGMA data_version cannot tell, because it also changes after a failed read or write.
            saved = self._seal_in_file() not in self._own
            if saved or not os.path.samestat(os.lstat(self.path), self._stat):
                raise UsageError(
                    f"another minikv has saved chat {self.name}",
                    "/fork NAME saves this one beside it",
                )
            for table in TABLES:
                _put(self._db, table, rows[table], same if table == "turn" else 0)
            seal = self._seal_in_file()
            self._own.add(seal)  # a COMMIT that raises may have saved the chat all the same
            self._db.execute("COMMIT")
            self._own = {seal}
        except sqlite3.Error as error:
            raise OSError(errno.EIO, str(error), str(self.path)) from None
        finally:
            with contextlib.suppress(sqlite3.Error, UsageError):  # the next save will raise it
                self._db.rollback()
                if self.locks:
                    self._lock()

    def _lock(self) -> None:
        """Keep other processes from writing. Raises UsageError if one of them has the lock."""
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            if not _name(error).startswith("SQLITE_BUSY"):
                raise
            raise OpenElsewhere(
                f"chat {self.name} is open in another minikv",
                "leave it there, or open another chat",
            ) from None

    def _seal_in_file(self) -> Any:
        return self._value("SELECT max(seal) FROM chat")

    def _value(self, query: str) -> Any:
        return self._db.execute(query).fetchone()[0]


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
            db = stack.enter_context(contextlib.closing(_connected(new, "&nolock=1")))
            db.execute("PRAGMA journal_mode = OFF")  # an incomplete file is thrown away anyway
            db.execute("BEGIN")
            for statement in _SCHEMA.values():
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {_VERSION}")
            for table in TABLES:
                _put(db, table, rows[table])
            db.execute("COMMIT")
            db.close()
            # Undo a save that was killed now, or SQLite would undo it in the new file.
            with contextlib.suppress(OSError, UsageError, *DAMAGE):
                ChatFile(name).close()
            (folder / f"{FILE}-journal").unlink(missing_ok=True)
            os.replace(new, folder / FILE)
        except BaseException as error:
            new.unlink(missing_ok=True)
            if isinstance(error, sqlite3.Error):
                raise OSError(errno.EIO, str(error), str(new)) from None
            raise


def _put(
    db: sqlite3.Connection, table: str, rows: Iterable[Sequence[str | bytes]], begin: int = 0
) -> None:
    """Make these the rows of a table from number `begin` on. Writes only rows that have changed."""
    columns = (*TABLES[table], "seal")
    changed = ", ".join(f"excluded.{column}" for column in columns)
    end = begin
    for end, values in enumerate(rows, begin + 1):
        db.execute(
            f"INSERT INTO {table} VALUES ({'?, ' * len(columns)}?) ON CONFLICT (number) DO "
            f"UPDATE SET ({', '.join(columns)}) = ({changed}) WHERE seal != excluded.seal",
            (end - 1, *values, _seal(values)),
        )
    db.execute(f"DELETE FROM {table} WHERE number >= ?", (end,))


def _connected(path: Path, how: str, wait: float = 0) -> sqlite3.Connection:
    """A connection to an existing file. wait: how many seconds to wait for other processes. Raises
    sqlite3.Error."""
    uri = f"file:{quote(os.fsencode(path))}?mode=rw{how}"
    db = sqlite3.connect(uri, timeout=wait, isolation_level=None, uri=True)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST)
    db.text_factory = bytes.decode  # its error does not quote the text
    for pragma in _PRAGMAS:
        db.execute(f"PRAGMA {pragma}")
    return db


def parts(data: bytes) -> list[tuple[bytes]]:
    """Bytes as rows of the table `cache`, in parts because SQLite copies a value several times."""
    return [(data[at : at + _PART],) for at in range(0, len(data), _PART)]


def unreadable(error: Exception) -> bool:
    """Whether an error came from the disk or a lock, and says nothing about the file's content."""
    content = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")
    return _name(error) != "" and not _name(error).startswith(content)


def _name(error: Exception) -> str:
    """SQLite's name for an error; "" for an error of the Python module itself."""
    return str(getattr(error, "sqlite_errorname", ""))


def _seal(values: Iterable[object]) -> bytes:
    """A checksum of a row."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes | memoryview) else str(value).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _can_lock(folder: Path) -> bool:
    """Whether files in this directory can be locked; True if that cannot be tested."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            try:
                fcntl.lockf(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
    except OSError:
        pass
    return True


def _refuse_journal(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), opened(Path(f"{path}-journal")) as file:
        file.seek(-min(8, os.fstat(file.fileno()).st_size), os.SEEK_END)
        if file.read() == _NAMES_A_FILE:
            raise ValueError("its journal names another file, which no chat's does")

"""Faults in the system calls of SQLite, and saved chats that somebody edited."""

from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_FIELDS = (
    "xOpen xDelete xAccess xFullPathname xDlOpen xDlError xDlSym xDlClose xRandomness xSleep "
    "xCurrentTime xGetLastError xCurrentTimeInt64 xSetSystemCall xGetSystemCall"
)
_INT, _AT = ctypes.c_int, ctypes.c_void_p
_CALLS = {
    "pwrite64": (ctypes.c_ssize_t, _INT, _AT, ctypes.c_size_t, ctypes.c_int64),
    "pread64": (ctypes.c_ssize_t, _INT, _AT, ctypes.c_size_t, ctypes.c_int64),
    "ftruncate": (_INT, _INT, ctypes.c_int64),
    "unlink": (_INT, ctypes.c_char_p),
}
WRITES = ("pwrite64", "ftruncate", "unlink")


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs` of sqlite3.h."""

    _fields_ = [
        *((name, _INT) for name in ("iVersion", "szOsFile", "mxPathname")),
        *((name, _AT) for name in ("pNext", "zName", "pAppData", *_FIELDS.split())),
    ]


@contextlib.contextmanager
def before(hit: Callable[[], int], *names: str) -> Iterator[None]:
    """Inside, `hit` is called before each of these system calls of SQLite. Where it returns an
    errno, the call fails with that."""
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
    vfs = library.sqlite3_vfs_find(None)
    put = ctypes.CFUNCTYPE(_INT, _AT, ctypes.c_char_p, _AT)(vfs.contents.xSetSystemCall)
    get = ctypes.CFUNCTYPE(_AT, _AT, ctypes.c_char_p)(vfs.contents.xGetSystemCall)
    at, made = ctypes.cast(vfs, _AT), []

    def failing(kind: Any, real: Any) -> Any:
        def call(*given: Any) -> int:
            number = hit()
            if not number:
                return int(real(*given))
            ctypes.set_errno(number)
            return -1

        return kind(call)

    try:
        for name in names:
            kind = ctypes.CFUNCTYPE(*_CALLS[name], use_errno=True)
            made.append(failing(kind, kind(get(at, name.encode()))))
            assert not put(at, name.encode(), ctypes.cast(made[-1], _AT))
        yield
    finally:
        for name in names:
            put(at, name.encode(), None)


def sealed(values: list[Any]) -> bytes:
    """The checksum of a row: SHA-256 of the length and the bytes of each value."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def edit(path: Path, table: str, change: Callable[[list[Any]], object], number: int = 0) -> None:
    """Edit the values of a row, and give it a checksum that fits. What `change` returns is not
    used."""
    db = sqlite3.connect(path)
    (row,) = db.execute(f"SELECT * FROM {table} WHERE number = ?", (number,))
    values = list(row[1:-1])
    change(values)
    db.execute(f"DELETE FROM {table} WHERE number = ?", (number,))
    marks = ", ".join("?" for _ in row)
    db.execute(f"INSERT INTO {table} VALUES ({marks})", (number, *values, sealed(values)))
    db.commit()
    db.close()


def edit_facts(
    path: Path, table: str, change: Callable[[dict[str, Any]], object], number: int = 0
) -> None:
    """As `edit`, for the JSON object of a row."""

    def changed(values: list[Any]) -> None:
        facts = json.loads(values[0])
        change(facts)
        values[0] = json.dumps(facts)

    edit(path, table, changed, number)

"""One key of a TOML file set or removed: all other lines, and their comments, stay as they are."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from minikv.settings import Plain


def literal(value: Plain) -> str:
    """A value as TOML writes it."""
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()


def edited(text: str, key: str, value: Plain | None, table: str = "") -> str:
    """The file's text with `key` set, or, with None, without it; `table`: the table that has it.
    Raises ValueError where that is not possible without another change."""
    wanted = tomllib.loads(text)
    inner = wanted.setdefault(table, {}) if table else wanted
    if not isinstance(inner, dict):
        raise ValueError(f"{table} is no table")
    known = inner.pop(key, None) is not None
    if value is not None:
        inner[key] = list(value) if isinstance(value, tuple) else value
    lines = text.splitlines(keepends=True)
    default = re.compile(rf"\s*#\s*{re.escape(key)}\s*=")  # as `config init` writes it
    at = next((i for i, line in enumerate(lines) if default.match(line)), None)
    if not (known or table) and value is not None and at is not None:
        found = "".join([*lines[:at], f"{key} = {literal(value)}\n", *lines[at + 1 :]])
        if _says(found, wanted, table):
            return found
    found = _written(text, key, value, table)
    if not _says(found, wanted, table):
        raise ValueError(f"the line of {key} cannot be changed safely")
    return found


def _written(text: str, key: str, value: Plain | None, table: str) -> str:
    try:
        document = tomlkit.parse(text)
        inner: Any = document.setdefault(table, tomlkit.table()) if table else document
        if value is None:
            del inner[key]
        else:
            inner[key] = list(value) if isinstance(value, tuple) else value
        return tomlkit.dumps(document)
    except TOMLKitError as error:
        raise ValueError(str(error)) from None


def _says(text: str, wanted: dict[str, object], table: str) -> bool:
    """Whether the file then says what is wanted."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    if table:  # without its last key, the table may be gone, too
        found.setdefault(table, {})
    return found == wanted

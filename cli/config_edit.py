"""One key of a TOML file set or removed: all other lines, and their comments, stay as they are.

The standard library reads TOML and does not write it. So the one line is edited, and the result is
read again: it must say what the file said before, but for that key.
"""

from __future__ import annotations

import json
import re
import tomllib

from minikv.settings import Plain

_TABLE = re.compile(r"\s*\[")


def literal(value: Plain) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str):
        # A JSON text is a TOML text, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def name_of(key: str) -> str:
    """A key as TOML writes it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else literal(key)


def edited(text: str, key: str, value: Plain | None, table: str = "") -> str:
    """The file's text with `key` set, or, with None, without it; `table`: the table that has it.
    Raises ValueError where that cannot be done safely."""
    before = tomllib.loads(text)
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    made = f"{name_of(key)} = {literal(value)}" if value is not None else ""
    wanted = list(value) if isinstance(value, tuple) else value
    inner = before.get(table, {}) if table else before
    if not isinstance(inner, dict):
        raise ValueError(f"{table} is no table")
    inner = {name: one for name, one in inner.items() if name != key}
    if value is not None:
        inner[key] = wanted
    after = {**before, table: inner} if table else inner
    for candidate in _candidates(lines, key, made, end, table):
        try:
            found = tomllib.loads(candidate)
        except tomllib.TOMLDecodeError:
            continue
        if table:  # without its last key, the table may be gone, too
            found.setdefault(table, {})
        own = found[table] if table else found
        if found == after and type(own.get(key)) is type(wanted):
            return candidate
    raise ValueError(f"the line of {key} cannot be changed safely")


def _candidates(lines: list[str], key: str, made: str, end: str, table: str) -> list[str]:
    """Texts that may be the edited file, the best first."""
    found = []
    spelled = rf"({re.escape(key)}|{re.escape(literal(key))}|'{re.escape(key)}')"
    dotted = rf"({re.escape(table)}\s*\.\s*)?" if table else "()"
    own = re.compile(rf"\s*{dotted}{spelled}\s*=")
    for i, match in ((i, match) for i, line in enumerate(lines) if (match := own.match(line))):
        last = next((n for n in range(i + 1, len(lines) + 1) if _parses(lines[i:n])), i + 1)
        comment = _comment("".join(lines[i:last])) if made else ""
        line = [f"{match[1] or ''}{made}{comment}{end}"] if made else []
        found.append([*lines[:i], *line, *lines[last:]])
    if made and table:
        found += _in_table(lines, made, end, table)
    elif made:
        found += _on_top(lines, key, made, end)
    return ["".join(one) for one in found]


def _on_top(lines: list[str], key: str, made: str, end: str) -> list[list[str]]:
    """A line before all tables: in the place of the one that `config init` wrote, or new."""
    top = next((i for i, line in enumerate(lines) if _TABLE.match(line)), len(lines))
    default = re.compile(rf"\s*#\s*{re.escape(key)}\s*=")
    found = []
    for i in filter(lambda i: default.match(lines[i]), range(top)):
        found.append([*lines[:i], f"{made}{end}", *lines[i + 1 :]])
    # Before the tables, after the last line that is not empty.
    at = next((i for i in range(top, 0, -1) if lines[i - 1].strip()), 0)
    if at < top or top == len(lines):
        found.append([*_ended(lines[:at], end), f"{made}{end}", *lines[at:]])
    return [*found, [*lines[:top], f"{made}{end}", *lines[top:]], [f"{made}{end}", *lines]]


def _in_table(lines: list[str], made: str, end: str, table: str) -> list[list[str]]:
    """A line below the table's header, or with a header of its own at the end of the file."""
    header = re.compile(rf"\s*\[\s*{re.escape(table)}\s*\]")
    found = []
    for i in filter(lambda i: header.match(lines[i]), range(len(lines))):
        found.append([*_ended(lines[: i + 1], end), f"{made}{end}", *lines[i + 1 :]])
    blank = [end] if lines else []
    return [*found, [*_ended(lines, end), *blank, f"[{table}]{end}", f"{made}{end}"]]


def _ended(lines: list[str], end: str) -> list[str]:
    """The lines, the last one with an end."""
    return [*lines[:-1], lines[-1].rstrip("\r\n") + end] if lines else []


def _parses(lines: list[str]) -> bool:
    try:
        return bool(tomllib.loads("".join(lines)))
    except tomllib.TOMLDecodeError:
        return False


def _comment(line: str) -> str:
    """The comment after a value, with the blanks before it."""
    try:
        value = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ""
    for found in re.finditer(r"[ \t]*#", line):
        try:
            if tomllib.loads(line[: found.start()]) == value:
                rest = line[found.start() :].rstrip("\r\n")
                return "" if "\n" in rest else rest
        except tomllib.TOMLDecodeError:
            continue
    return ""

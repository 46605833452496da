"""One key of a TOML file set to a value: all other lines, and their comments, stay as they are.

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


def edited(text: str, key: str, value: Plain) -> str:
    """The file's text with `key` set. Raises ValueError where that cannot be done safely."""
    before = tomllib.loads(text)
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    made = f"{key} = {literal(value)}"
    top = next((i for i, line in enumerate(lines) if _TABLE.match(line)), len(lines))
    for candidate in _candidates(lines, top, key, made, end):
        try:
            after = tomllib.loads(candidate)
        except tomllib.TOMLDecodeError:
            continue
        wanted = list(value) if isinstance(value, tuple) else value
        if after == {**before, key: wanted} and type(after[key]) is type(wanted):
            return candidate
    raise ValueError(f"the line of {key} cannot be changed safely")


def _candidates(lines: list[str], top: int, key: str, made: str, end: str) -> list[str]:
    """Texts that may be the edited file, the best first. top: the number of the first line that is
    in a table."""
    found = []
    own = re.compile(rf"\s*([\"']?){re.escape(key)}\1\s*=")
    default = re.compile(rf"\s*#\s*{re.escape(key)}\s*=")
    for i in filter(lambda i: own.match(lines[i]), range(len(lines))):
        last = next((n for n in range(i + 1, len(lines) + 1) if _parses(lines[i:n])), i + 1)
        comment = _comment("".join(lines[i:last]))
        found.append([*lines[:i], f"{made}{comment}{end}", *lines[last:]])
    for i in filter(lambda i: default.match(lines[i]), range(top)):  # as `config init` writes it
        found.append([*lines[:i], f"{made}{end}", *lines[i + 1 :]])
    # Before the tables, after the last line that is not empty.
    at = next((i for i in range(top, 0, -1) if lines[i - 1].strip()), 0)
    if at < top or top == len(lines):
        ended = [*lines[: at - 1], lines[at - 1].rstrip("\r\n") + end] if at else []
        found.append([*ended, f"{made}{end}", *lines[at:]])
    found += [[*lines[:top], f"{made}{end}", *lines[top:]], [f"{made}{end}", *lines]]
    return ["".join(one) for one in found]


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

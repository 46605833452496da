"""Plain text by the cells that it takes on a terminal: tables, and lines broken between words.

A letter of Chinese takes two cells, an accent of its own takes none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_JOINER = "\u200d"


def cells(text: str) -> int:
    """How many cells a terminal needs for a text without control characters."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # it is slow to import

    return cell_len(text)


def padded(text: str, width: int, side: str = "<") -> str:
    """`text` with blanks behind it, or, for the side ">", before it."""
    blanks = " " * (width - cells(text))
    return blanks + text if side == ">" else text + blanks


def cut(text: str, width: int) -> str:
    """`text`, or as much of it as fits in `width` cells with a "…" behind it."""
    if cells(text) <= width:
        return text
    return "".join(_fitting(_letters(text), width - 1)) + "…"


def cut_middle(text: str, width: int) -> str:
    """`text`, or as much of its begin and its end as fits in `width` cells with a "…" between."""
    if cells(text) <= width:
        return text
    letters = _letters(text)
    begin = _fitting(letters, (width - 1) // 2)
    end = _fitting(reversed(letters), width // 2)
    return f"{''.join(begin)}…{''.join(reversed(end))}"


def grid(lines: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Columns of equal width with two spaces between them; `sides`: < left, > right."""
    widths = [max(cells(line[i]) for line in lines) for i in range(len(sides))]
    return "\n".join("  ".join(map(padded, line, widths, sides)).rstrip() for line in lines)


def wrapped(line: str, width: int, indent: str = "") -> list[str]:
    """`line` in rows of at most `width` cells, all but the first after `indent`.

    It breaks between words. A longer word is broken between letters, unless it is ASCII: paths,
    addresses and flags stay in one piece.
    """
    rows, row, room = [], "", width
    for gap, word in re.findall(r"(\s*)(\S+)", line.expandtabs()):
        splits = not word.isascii() and cells(word) > width - len(indent)
        if cells(gap + word) <= room or (splits and len(gap) + 1 < room) or not row:
            row, room = row + gap, room - len(gap)
        else:
            rows.append(row)
            row, room = indent, width - len(indent)
        for part in _letters(word) if splits else (word,):
            if splits and cells(part) > room:
                rows.append(row)
                row, room = indent, width - len(indent)
            row, room = row + part, room - cells(part)
    return [*rows, row]


def _letters(text: str) -> list[str]:
    """What takes cells of its own, each with the signs that belong to it."""
    found: list[str] = []
    for char in text:
        if found and (not cells(char) or found[-1].endswith(_JOINER)):
            found[-1] += char
        else:
            found.append(char)
    return found


def _fitting(letters: Iterable[str], width: int) -> list[str]:
    """The first letters, as many as fit in `width` cells."""
    found: list[str] = []
    for letter in letters:
        width -= cells(letter)
        if width < 0:
            break
        found.append(letter)
    return found

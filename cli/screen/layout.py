"""Text for a terminal: which characters it can show, and where lines break into rows.

rich measures the characters. It is not used to break lines: its rows do not say which part of the
text they are, and it would split a character that an ASCII terminal shows as \\u4e2d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minikv.cli.screen.terminal import clean

_TAB = "    "
_EMOJI = "\ufe0f"  # makes a narrow sign before it a wide one


def shown(text: str, encoding: str = "utf-8") -> str:
    """`text` as it will stand on a terminal: filtered, tabs as spaces, unknown letters escaped."""
    text = clean(text).replace("\t", _TAB)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def clipped(text: str, cells: int, encoding: str = "utf-8") -> str:
    """A name as one line of at most so many cells."""
    text = " ".join(shown(text, encoding).split())
    return text[slice(*broken(text, cells)[0])].rstrip()


def broken(text: str, width: int, encoding: str = "utf-8") -> list[tuple[int, int]]:
    """Where `text` breaks into rows of at most `width` cells: begin and end of each row.

    It breaks between words where possible. A row keeps its trailing spaces, which do not count.
    Newlines belong to no row.
    """
    from rich.cells import cell_len

    joins = _EMOJI if shown(_EMOJI, encoding) == _EMOJI else ""
    known: dict[str, int] = {joins: 1}

    def cells(char: str) -> int:
        if char not in known:
            known[char] = cell_len(shown(char, encoding))
        return known[char]

    rows = []
    at = 0
    for line in text.split("\n"):
        one_each = line.isascii() and line.isprintable()
        pieces = _letters(line, width) if one_each else _cells(line, width, cells, joins)
        rows += [(at + begin, at + end) for begin, end in pieces]
        at += len(line) + 1
    return rows


def _letters(line: str, width: int) -> Iterator[tuple[int, int]]:
    """The rows of a line whose characters are one cell each."""
    begin = 0
    while len(line) - begin > width:
        cut = line.rfind(" ", begin, begin + width + 1) + 1
        cut = cut if cut > begin else begin + width
        yield begin, cut
        begin = cut
    yield begin, len(line)


def _cells(
    line: str, width: int, cells: Callable[[str], int], joins: str
) -> Iterator[tuple[int, int]]:
    """The rows of any line. No row begins with the character `joins`, which belongs to the one
    before it, unless that is a blank."""
    begin = used = 0
    space = -1
    for i, char in enumerate(line):
        wide = cells(char)
        blank = char in " \t"
        hangs = blank or (char == joins and line[i - 1] not in " \t")
        while used + wide > width and i > begin and wide and not hangs:
            cut = space + 1 if space >= begin else i
            yield begin, cut
            begin, used = cut, sum(cells(c) for c in line[cut:i])
        used += wide
        if blank:
            space = i
    yield begin, len(line)


def folded(text: str, width: int, indent: str = "", encoding: str = "utf-8") -> list[str]:
    """`text` as lines of at most `width` cells, all but the first after `indent`."""
    text = shown(text, encoding)
    rows = broken(text, width, encoding)
    if len(rows) > 1 and indent:
        first = rows[0][1]
        rest = broken(text[first:].lstrip("\n"), width - len(indent), encoding)
        skipped = len(text) - len(text[first:].lstrip("\n"))
        rows = [rows[0], *((skipped + begin, skipped + end) for begin, end in rest)]
    lines = [text[begin:end].rstrip(" ") for begin, end in rows]
    return [lines[0], *(indent + line for line in lines[1:])]

"""Text on a terminal: filters characters, counts their columns, and breaks rows.

Everything is laid out as if all of Unicode could be written; a stream that takes less gets other
signs when it is written to (`encodable`).

rich measures characters. It does not break lines here: its rows do not say which part of the text
they are, and it counts a sign of several characters as the newest terminals show it, where others
show its parts side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby

_DROPPED = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),  # C0, with ESC
    *range(0x7F, 0xA0),  # DEL and C1
    0x2028,  # line and paragraph separators
    0x2029,
    *range(0x202A, 0x202F),  # bidi embeddings and overrides
    *range(0x2066, 0x206A),  # bidi isolates
    *range(0xD800, 0xE000),  # lone surrogates
    *range(0xE0000, 0xE0080),  # tags, invisible
)
# Invisible signs that change the order or the ends of words, or are blank letters: LRM, RLM, ZWSP,
# BOM, the soft hyphen, fillers of Hangul and the like, but not the joiners and variation selectors
# of scripts and of emoji.
_UNSEEN = (
    *(0xAD, 0x34F, 0x61C, 0x17B4, 0x17B5, 0x180E, 0x200B, 0x200E, 0x200F),
    *range(0x2060, 0x2070),
    *(0x2800, 0x3164, 0xFEFF, 0xFFA0, 0xFFF9, 0xFFFA, 0xFFFB),
)
DROPPED: dict[int, str | None] = dict.fromkeys(_DROPPED)
"""A table for `str.translate` that removes control characters and bidi overrides."""
_FILTER = {**{code: f"\\u{code:04x}" for code in _UNSEEN}, **DROPPED}
# minikv's own signs where a stream takes ASCII alone.
_ASCII = str.maketrans(
    {"·": "-", "›": ">", "…": "...", "×": "x", "–": "-", "—": "-", "•": "*", "╸": " "}
    | dict.fromkeys("│┃", "|")
    | dict.fromkeys("─━", "-")
    | dict.fromkeys("┌┐└┘├┤┬┴┼", "+")
    | dict(zip("▁▂▃▄▅▆▇█", ".:-=+*#@", strict=True))
)
_JOINER, _EMOJI = "\u200d", "\ufe0f"
_TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))
_FLAGS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))  # two of these letters are a flag
# The columns in a terminal that cannot join characters, and shows each of them.
_MOST = {_EMOJI: 1} | dict.fromkeys([*_TONES, *_FLAGS], 2)
_WORDS = re.compile(r"[ \t]+|[^ \t]+")


def clean(text: str) -> str:
    """`text` without control characters and bidi overrides. Invisible signs become \\u escapes.

    Removes single characters instead of escape sequences, because a sequence might be split over
    two tokens.
    """
    return text.translate(_FILTER)


def encodable(text: str, encoding: str) -> str:
    """`text` in a form that this encoding supports: minikv's own signs have ASCII forms, other
    characters become \\u escapes."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def shown(text: str) -> str:
    """`text` as a terminal will show it: filtered, tabs as spaces."""
    return clean(text).replace("\t", "    ")


# -- columns --------------------------------------------------------------------------------------


def cells(text: str) -> int:
    """The most columns that a terminal may need for a text. Some terminals show a sign of several
    characters as one, others show its parts side by side."""
    if text.isascii() and text.isprintable():
        return len(text)
    return sum(map(_cells, text))


@lru_cache(4096)
def _cells(sign: str) -> int:
    from rich.cells import cell_len  # it is slow to import

    return _MOST.get(sign) or cell_len(shown(sign))


def letters(text: str) -> list[str]:
    """The characters, each with those that combine with it: accents, skin tones, emoji parts."""
    found: list[str] = []
    for sign in text:
        last = found[-1] if found else ""
        pair = sign in _FLAGS and last in _FLAGS
        joins = sign in _TONES or sign == _EMOJI or not cells(sign)
        if last and (pair or joins or last[-1] == _JOINER):
            found[-1] += sign
        else:
            found.append(sign)
    return found


def padded(text: str, width: int, side: str = "<") -> str:
    """`text` followed by blanks, or, for the side ">", preceded by them."""
    blanks = " " * (width - cells(text))
    return blanks + text if side == ">" else text + blanks


def cut(text: str, width: int) -> str:
    """`text`, or as much of it as fits in `width` columns followed by "…"."""
    return text if cells(text) <= width else "".join([*fitting(letters(text), width - 1), "…"])


def fitting(found: Sequence[str], width: int) -> Sequence[str]:
    """As many of the first letters as fit in `width` columns."""
    used = accumulate(map(cells, found))
    return found[: sum(size <= width for size in used)]


def clipped(text: str, width: int) -> str:
    """`text` on one line, cut to `width` columns."""
    return cut(" ".join(shown(text).split()), width)


def grid(
    lines: Sequence[Sequence[str]], sides: Sequence[str], width: int = 0, lead: int = 1
) -> str:
    """Columns of equal width with two spaces between them; `sides`: < left, > right. Columns that
    do not fit in `width`, if it is given, are in a further table below, after the first `lead`."""
    widths = [max(cells(line[i]) for line in lines) for i in range(len(sides))]
    tables = [[*range(lead)]]
    for column in range(lead, len(sides)):
        used = sum(widths[i] + 2 for i in tables[-1]) + widths[column]
        if width and used > width and len(tables[-1]) > lead:
            tables.append([*range(lead)])
        tables[-1].append(column)
    return "\n\n".join(
        "\n".join(
            "  ".join(padded(line[i], widths[i], sides[i]) for i in columns).rstrip()
            for line in lines
        )
        for columns in tables
    )


# -- rows -----------------------------------------------------------------------------------------


def units(line: str) -> Iterator[str]:
    """The parts of a line between which it may be broken: blanks, words, and every wide letter or
    emoji."""
    for word in _WORDS.findall(line):
        if word.isascii():
            yield word
        else:
            for apart, group in groupby(letters(word), key=_apart):
                found = list(group)
                yield from found if apart else ["".join(found)]


def _apart(letter: str) -> bool:
    return any(_cells(s) == 2 or s in _FLAGS or "\u2600" <= s <= "\u27bf" for s in letter)


def broken(text: str, width: int, *, less: int = 0, whole: bool = False) -> list[tuple[int, int]]:
    """Where `text` breaks into rows of at most `width` columns: begin and end of each row.

    less: how many columns fewer all rows but the first have. whole: a word of ASCII letters is
    never broken, even if it is wider than a row (paths, addresses, flags). A row keeps its trailing
    blanks, which do not count. Newlines belong to no row.
    """
    rows: list[tuple[int, int]] = []
    at = 0
    for line in text.split("\n"):
        begin = end = at
        used = 0
        for unit in _rows_apart(line, width - less, whole):
            size = cells(unit)
            if used + size > width - bool(rows) * less and end > begin and not unit.isspace():
                rows.append((begin, end))
                begin, used = end, 0
            end, used = end + len(unit), used + size
        rows.append((begin, end))
        at += len(line) + 1
    return rows


def _rows_apart(line: str, width: int, whole: bool) -> Iterator[str]:
    """The units of a line, those that are wider than a row letter by letter."""
    for unit in units(line):
        if unit.isspace() or (whole and unit.isascii()) or cells(unit) <= width:
            yield unit
        else:
            yield from letters(unit)


def folded(text: str, width: int, indent: str = "", *, whole: bool = False) -> list[str]:
    """`text` as lines of at most `width` columns, all but the first after `indent`; `whole` as in
    `broken`."""
    text = shown(text)
    rows = broken(text, width, less=len(indent), whole=whole)
    lines = [text[begin:end].rstrip(" ") for begin, end in rows]
    return [lines[0], *(indent + line for line in lines[1:])]

"""Pictures made of characters: strips of blocks, and text laid out in terminal cells.

Every strip names the figure that its tallest block stands for, and only nothing at all is blank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TextIO

from minikv.chat.report import TurnReport, size
from minikv.cli.terminal import clean

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.cli.kept import Kept

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#%@"
MOST_SLICES = 64
MOST_DOCUMENTS = 8
_TAB = "    "
_EMOJI = "\ufe0f"  # makes a narrow sign before it a wide one


# -- signs ----------------------------------------------------------------------------------


def takes_blocks(stream: TextIO) -> bool:
    """Whether block characters can be written to a stream; if not, ASCII ones can."""
    try:
        BLOCKS.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def level(share: float, most: int) -> int:
    """0 to `most` for a share of 0 to 1, rounded up: only nothing is 0."""
    if share <= 0:
        return 0
    # The tiny term undoes binary noise: a share of 0.1 of ten steps is one step.
    return min(most, max(1, math.ceil(share * most - 1e-6)))


def strip(values: Sequence[float], largest: float, signs: str = BLOCKS) -> str:
    """One sign per value, as high as its share of the largest, between two bars."""
    top = len(signs) - 1
    return f"|{''.join(signs[level(v / largest if largest else 0.0, top)] for v in values)}|"


def percent(share: float) -> str:
    """Whole percent, rounded down, so that only all is 100% and only nothing is 0%."""
    whole = math.floor(100 * share + 1e-4)
    return "<1%" if share > 0 and whole < 1 else f"{whole}%"


# -- strips ---------------------------------------------------------------------------------


def strips(
    session: ChatSession,
    width: int,
    *,
    plain: bool = False,
    reports: Sequence[TurnReport] = (),
) -> str:
    """What the cache holds, as strips of at most `width` columns (40 at the least); "" before the
    first turn. `plain` draws in ASCII; `reports` are the turns of the chat, where they are known.
    """
    from minikv.cli import kept

    facts = kept.read(session)
    if not session.fed:
        return ""
    signs = ASCII if plain else BLOCKS
    rows = [[float(n) for n in layer] for layer in facts.rows().tolist()]
    drawn = [
        by_head(rows, width, signs),
        by_layer(session.engine.kv.lost, width, signs),
        along(facts, width, signs),
        over_time(reports, width, signs),
    ]
    return "\n".join(part for part in drawn if part)


def by_head(rows: Sequence[Sequence[float]], width: int, signs: str = BLOCKS) -> str:
    """Rows held per layer and KV head, rows[layer][head]: one strip per head."""
    layers, heads = len(rows), len(rows[0])
    largest = max(max(layer) for layer in rows)
    lines = _title(
        f"kept per layer and KV head: {signs[-1]} is {largest:,.0f} tokens, the most in one", width
    )
    for first, last in _groups(layers, width - len(f"  head {heads - 1} ||")):
        label = "" if layers == 1 else f"  layers {first} to {last - 1}"
        lines += [label] if label else []
        cells = [
            f"  {f'head {head}':<{len(f'head {heads - 1}')}} "
            + strip([rows[layer][head] for layer in range(first, last)], largest, signs)
            for head in range(heads)
        ]
        lines += _beside(cells, width)
    return "\n".join(lines)


def by_layer(lost: Sequence[float | None], width: int, signs: str = BLOCKS) -> str:
    """Attention that each layer lost, "?" where it was not estimated; "" if it was nowhere."""
    known = [share for share in lost if share is not None]
    if not known:
        return ""
    largest = max(known)
    lines = _title(
        f"lost per layer: {signs[-1]} is {100 * largest:.1f}% of the last window's attention, "
        "an estimate",
        width,
    )
    for first, last in _groups(len(lost), width - 4):
        drawn = strip([share or 0.0 for share in lost[first:last]], largest, signs)
        marked = [
            "?" if share is None else sign
            for share, sign in zip(lost[first:last], drawn[1:-1], strict=True)
        ]
        lines.append(f"  |{''.join(marked)}|")
    return "\n".join(lines)


def along(facts: Kept, width: int, signs: str = BLOCKS, encoding: str = "utf-8") -> str:
    """The mean share of heads that hold a token, along each document from start to end."""
    share = facts.share()
    places = [(clipped(p.name, width, encoding), p.first, p.last) for p in facts.parts]
    places = places[:MOST_DOCUMENTS] or [("the chat", 0, len(share))]
    lines = []
    for name, first, last in places:
        count = min(MOST_SLICES, width - 4, last - first)
        ends = [first + (last - first) * i // count for i in range(count + 1)]
        values = [float(share[a:b].mean()) for a, b in pairwise(ends)]
        each = f"{count} slices of about {round((last - first) / count):,} tokens"
        if count == last - first:
            each = "a sign per token"
        top = f"{signs[-1]} is {percent(max(values))} of the heads" if any(values) else "nothing"
        lines += _title(f"kept along {name}, {each}: {top}", width)
        lines.append(f"  {strip(values, max(values), signs)}")
    if len(facts.parts) > MOST_DOCUMENTS:
        lines.append(f"  and {len(facts.parts) - MOST_DOCUMENTS} more documents")
    return "\n".join(lines)


def over_time(reports: Sequence[TurnReport], width: int, signs: str = BLOCKS) -> str:
    """Memory held at the end of each turn, and what a full cache would hold; "" for one turn."""
    shown = reports[-(width - len("  held ||")) :]
    if len(shown) < 2:
        return ""
    held = [float(report.kv_bytes.held) for report in shown]
    full = [float(report.kv_bytes.full) for report in shown]
    largest = max(*held, *full)
    turns = f"turns {shown[0].turn} to {shown[-1].turn}"
    lines = _title(f"KV after each turn, {turns}: {signs[-1]} is {size(int(largest))}", width)
    lines += [f"  held {strip(held, largest, signs)}", f"  full {strip(full, largest, signs)}"]
    return "\n".join(lines)


def _groups(count: int, room: int) -> list[tuple[int, int]]:
    """`count` things in equal runs of at most `room`: first and last + 1 of each."""
    runs = -(-count // max(1, room))
    each = -(-count // runs)
    return [(first, min(first + each, count)) for first in range(0, count, each)]


def _beside(cells: Sequence[str], width: int) -> list[str]:
    """Cells of equal width in as many columns as fit, read downwards."""
    columns = max(1, (width + 2) // (len(cells[0]) + 2))
    rows = -(-len(cells) // columns)
    return ["  ".join(cells[row::rows]) for row in range(rows)]


def _title(text: str, width: int) -> list[str]:
    return folded(text, width, "  ")


# -- text in cells --------------------------------------------------------------------------


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

    Between words where it can. A row keeps its trailing spaces, which do not count; the newlines
    stand in no row.
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
    """The rows of any line; none begins with `joins`, which belongs to the sign before it, but for
    a blank, which belongs to nobody."""
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

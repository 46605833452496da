"""Strips: numbers drawn as a row of blocks.

The title of every strip says which number its tallest block means. Only zero is blank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from minikv.chat.report import UNKNOWN, TurnReport, size
from minikv.cli.screen.terminal import ASCII, BLOCKS
from minikv.cli.screen.text import clipped, folded

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.cli.chat.kept import Kept

MOST_SLICES = 64
MOST_DOCUMENTS = 8


def level(share: float, most: int) -> int:
    """0 to `most` for a share of 0 to 1, rounded up, so that only a share of 0 gives 0."""
    if share <= 0:
        return 0
    # The small term undoes rounding errors: a share of 0.1 of ten steps is one step.
    return min(most, max(1, math.ceil(share * most - 1e-6)))


def strip(values: Sequence[float], largest: float, signs: str = BLOCKS) -> str:
    """One character per value, as high as its share of `largest`, between two bars."""
    top = len(signs) - 1
    return f"|{''.join(signs[level(v / largest if largest else 0.0, top)] for v in values)}|"


def percent(share: float) -> str:
    """Whole percent, rounded down: 100% means all, up to one in a million, and 0% means nothing."""
    whole = math.floor(100 * share + 1e-4)
    return "<1%" if share > 0 and whole < 1 else f"{whole}%"


# -- strips ---------------------------------------------------------------------------------


def strips(
    session: ChatSession, width: int, *, plain: bool = False, reports: Sequence[TurnReport] = ()
) -> str:
    """What the cache holds, as strips of at most `width` columns (40 at the least); "" before the
    first turn. `plain` draws in ASCII; `reports` are the turns of the chat, where they are known.
    """
    from minikv.cli.chat import kept

    facts = kept.read(session)
    if not session.fed:
        return ""
    # The cache knows what was lost after the last prompt, not what was lost before it.
    report = session.report
    lost = () if report is not None and report.loss.method == UNKNOWN else session.engine.kv.lost
    signs = ASCII if plain else BLOCKS
    rows = [[float(n) for n in layer] for layer in facts.rows().tolist()]
    drawn = [
        by_head(rows, width, signs),
        by_layer(lost, width, signs),
        along(facts, width, signs),
        over_time(reports, width, signs),
    ]
    return "\n".join(part for part in drawn if part)


def by_head(rows: Sequence[Sequence[float]], width: int, signs: str = BLOCKS) -> str:
    """One strip per KV head, along the layers. rows[layer][head]: how many tokens are held."""
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
    """The attention that each layer lost, "?" if not estimated; "" if no layer was estimated."""
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
    """The mean share of heads that hold a token, along each document."""
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
    """Memory held at the end of each turn, and what a full cache would hold; "" for fewer than two
    turns."""
    shown = reports[-(width - len("  held ||")) :]
    if len(shown) < 2:
        return ""
    held = [float(report.kv_bytes.taken) for report in shown]
    full = [float(report.kv_bytes.full) for report in shown]
    largest = max(*held, *full)
    turns = f"turns {shown[0].turn} to {shown[-1].turn}"
    lines = _title(f"KV after each turn, {turns}: {signs[-1]} is {size(int(largest))}", width)
    lines += [f"  held {strip(held, largest, signs)}", f"  full {strip(full, largest, signs)}"]
    return "\n".join(lines)


def _groups(count: int, room: int) -> list[tuple[int, int]]:
    """Divide `count` items into runs of about equal length, at most `room`: (first, last + 1)."""
    runs = -(-count // max(1, room))
    each = -(-count // runs)
    return [(first, min(first + each, count)) for first in range(0, count, each)]


def _beside(cells: Sequence[str], width: int) -> list[str]:
    """Cells of equal width, in as many columns as fit. The order goes down each column."""
    columns = max(1, (width + 2) // (len(cells[0]) + 2))
    rows = -(-len(cells) // columns)
    return ["  ".join(cells[row::rows]) for row in range(rows)]


def _title(text: str, width: int) -> list[str]:
    return folded(text, width, "  ")

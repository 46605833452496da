"""Strips: numbers drawn as a row of blocks.

The title of every strip says which number its tallest block means. Only zero is blank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from minikv.cli.screen.terminal import BLOCKS
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


def strips(session: ChatSession, width: int, signs: str) -> str:
    """What the cache holds, as strips of at most `width` columns (40 at the least); "" before the
    first turn. signs: `BLOCKS` or `ASCII`."""
    from minikv.cli.chat import kept

    facts = kept.read(session)
    if not session.fed:
        return ""
    rows = [[float(n) for n in layer] for layer in facts.rows().tolist()]
    return f"{by_head(rows, width, signs)}\n{along(facts, width, signs)}"


def by_head(rows: Sequence[Sequence[float]], width: int, signs: str = BLOCKS) -> str:
    """One strip per KV head, along the layers. rows[layer][head]: how many tokens are held."""
    layers, heads = len(rows), len(rows[0])
    largest = max(max(layer) for layer in rows)
    lines = folded(
        f"kept per layer and KV head: {signs[-1]} is {largest:,.0f} tokens, the most in one",
        width,
        "  ",
    )
    runs = -(-layers // (width - len(f"  head {heads - 1} ||")))
    each = -(-layers // runs)  # so that the runs are of about equal length
    for first in range(0, layers, each):
        last = min(first + each, layers)
        label = "" if layers == 1 else f"  layers {first} to {last - 1}"
        lines += [label] if label else []
        cells = [
            f"  {f'head {head}':<{len(f'head {heads - 1}')}} "
            + strip([rows[layer][head] for layer in range(first, last)], largest, signs)
            for head in range(heads)
        ]
        columns = max(1, (width + 2) // (len(cells[0]) + 2))
        down = -(-heads // columns)  # the order goes down each column
        lines += ["  ".join(cells[row::down]) for row in range(down)]
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
        lines += folded(f"kept along {name}, {each}: {top}", width, "  ")
        lines.append(f"  {strip(values, max(values), signs)}")
    if len(facts.parts) > MOST_DOCUMENTS:
        lines.append(f"  and {len(facts.parts) - MOST_DOCUMENTS} more documents")
    return "\n".join(lines)

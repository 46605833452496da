"""PyramidKV (arXiv 2406.02069, section 4.2): the first layers keep more rows than the last ones.

The budget without the window falls linearly from the first layer to the last, which gets about the
mean divided by `beta`. By default the numbers are rounded so that the layers sum to exactly L times
the budget. `rounding=official` is the arithmetic of Ada-KV's release, which falls by a whole number
of rows per layer and exceeds the total by up to (L - 1) / 2 rows a layer; `line=official` selects
it for the layers alone. `line=factory` is as in KVCache-Factory: the same, but all layers get the
same for prompts shorter than twice the budget. `line=kvpress` counts the window as part of the
line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from minikv.policies import options, snapkv
from minikv.policies.options import Method, option
from minikv.policies.parts import LayerAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidKV(LayerAllocator):
    """Rows per head that fall linearly from the first layer to the last."""

    name = "pyramid"
    summary = "more tokens in the first layers"

    beta: int = option(20, "the last layer keeps about the mean divided by this", (1, 1000))
    line: str = option(
        "exact",
        "exact: totals are exact to the token; otherwise, a release's rounding",
        ("exact", "official", "factory", "kvpress"),
    )
    rounding: str = options.rounding()

    def rows(self, layers: int, budget: int, most: int, least: int, protected: int) -> list[int]:
        """See `LayerAllocator.rows`. The `protected` rows of a head are added to the line in every
        layer."""
        kind, window = self.line, protected
        if kind == "exact" and self.rounding == "official":
            kind = "official"
        if kind == "kvpress":
            return _kvpress(layers, budget, most, self.beta, window)
        mean, room = budget - window, most - window
        even = layers == 1 or room <= mean or mean < 1
        if even or (kind == "factory" and most < 2 * mean):
            return [budget] * layers
        if kind != "exact":
            return [n + window for n in _official(layers, mean, room, self.beta)]
        low = max(Fraction(mean, self.beta), Fraction(max(1, least - window)))
        high = min(2 * mean - low, Fraction(room))
        fall = (2 * high - 2 * mean) / (layers - 1)
        line = [high - i * fall for i in range(layers)]
        return [n + window for n in _rounded(line, layers * mean)]

    differs = (
        "layers sum to the budget to the token; the releases' whole steps exceed it (`line`, "
        "`rounding`)",
        "computed for every prompt; in Ada-KV's release the first prompt decides for all "
        "later ones",
        "short prompts follow the line too; KVCache-Factory gives all layers the same below twice "
        "the budget (line=factory)",
        "the window is not part of the line; in kvpress it is (line=kvpress)",
    )


def _rounded(line: Sequence[Fraction], total: int) -> list[int]:
    """Round `line`, which sums to `total`, to whole numbers with the same sum, by largest
    remainder; of equal remainders the first layer gets the row."""
    counts = [n.numerator // n.denominator for n in line]
    order = sorted(range(len(line)), key=lambda i: (counts[i] - line[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _official(layers: int, mean: int, room: int, beta: int) -> list[int]:
    low = mean // beta
    high = 2 * mean - low
    if high >= room:
        high, low = room, 2 * mean - room
    step = (high - low) // (layers - 1)
    return [high - i * step for i in range(layers)]


def _kvpress(layers: int, budget: float, most: int, beta: int, window: int) -> list[int]:
    """kvpress' arithmetic. The window is part of the line; if the last layer would get less than
    the window, all layers get the same."""
    low = budget / beta
    high = 2 * budget - low
    if high >= most - window:
        high, low = most - window, 2 * budget - (most - window)
    if layers == 1 or not most >= high >= low >= window:
        return [round(budget)] * layers
    return [round(high - i * (high - low) / (layers - 1)) for i in range(layers)]


METHOD = Method(
    "pyramidkv",
    "SnapKV's scores, with more tokens in the first layers than in the last",
    parts=(snapkv.SnapKV, PyramidKV),
    good="a question, short answer",
    paper="2406.02069",
)

"""PyramidKV (arXiv 2406.02069, section 4.2): the first layers keep more rows than the last ones.

The budget without the window falls on a straight line from the first layer to the last, which has
about a `beta`-th of the mean. By default the line is rounded so that the layers sum to L times the
budget to the row. `rounding=official` (`line=official`: for the layers alone) is the arithmetic of
Ada-KV's release, which steps by whole rows and exceeds the total by up to (L - 1) / 2 rows a layer;
`line=factory` that of KVCache-Factory, the same but even for prompts shorter than twice the budget;
`line=kvpress` counts the window on the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from minikv.policies.base import LayerAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidKV(LayerAllocator):
    """A line that falls from the first layer to the last."""

    beta: int
    line: str
    rounding: str

    def rows(self, layers: int, budget: int, most: int, least: int, protected: int) -> list[int]:
        """`protected` rows a head, which stay in any case, lie outside the line."""
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


def _rounded(line: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers near `line`, which sums to `total`, that sum to it exactly: largest remainder,
    ties to the first layer."""
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
    """The window lies on the line; where it does not fit under it, all layers are even."""
    low = budget / beta
    high = 2 * budget - low
    if high >= most - window:
        high, low = most - window, 2 * budget - (most - window)
    if layers == 1 or not most >= high >= low >= window:
        return [round(budget)] * layers
    return [round(high - i * (high - low) / (layers - 1)) for i in range(layers)]

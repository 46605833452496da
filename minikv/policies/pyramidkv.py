"""PyramidKV (arXiv 2406.02069, section 4.2): the first layers keep more rows than the last ones.

The budget without the window falls on a straight line from the first layer to the last, which has
about a `beta`-th of the mean. By default the line is rounded so that the layers sum to L times the
budget to the row. `rounding=official` (`line=official`: for the layers alone) is the arithmetic of
Ada-KV's release, which steps by whole rows and exceeds the total by up to (L - 1) / 2 rows a layer;
`line=factory` that of KVCache-Factory, the same but even for prompts shorter than twice the budget;
`line=kvpress` counts the window on the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from minikv.policies.base import Layers, share


def layers(options: Mapping[str, object], window: int) -> Layers:
    """`window` rows a head, which stay in any case, lie outside the line."""
    beta, kind = options["beta"], options["line"]
    assert isinstance(beta, int)
    if kind == "exact" and options["rounding"] == "official":
        kind = "official"

    def spread(layers: int, budget: int, most: int, least: int) -> list[int]:
        if kind == "kvpress":
            return _kvpress(layers, budget, most, beta, window)
        mean, room = budget - window, most - window
        even = layers == 1 or room <= mean or mean < 1
        if even or (kind == "factory" and most < 2 * mean):
            return [budget] * layers
        if kind != "exact":
            return [n + window for n in _official(layers, mean, room, beta)]
        low = max(Fraction(mean, beta), Fraction(max(1, least - window)))
        high = min(2 * mean - low, Fraction(room))
        fall = (2 * high - 2 * mean) / (layers - 1)
        line = [high - i * fall for i in range(layers)]
        return [n + window for n in share(line, [room] * layers, layers * mean)]

    return spread


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

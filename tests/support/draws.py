"""Draws of a token: random ones, and a slow oracle in exact sums."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

CLOSE = 1e-9
"""Points this close to an edge may fall on its other side: masses are rounded."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a draw is made of; see `kernels.sample.plain.drawn`."""

    logits: Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    point: float = 0.5

    def by(self, drawn: Any) -> int:
        """The token, by some `drawn`."""
        point = torch.tensor(self.point, dtype=torch.float64)
        how = (self.temperature, self.top_k, self.top_p, self.min_p)
        return int(drawn(self.logits, *how, point))


def oracle(draw: Draw) -> tuple[int, float]:
    """The token, and how close the nearest edge is at which a decision was made."""
    best, points = max(draw.logits.tolist()), draw.logits.tolist()
    order = sorted(range(len(points)), key=lambda i: (-points[i], i))
    chance = {i: math.exp((points[i] - best) / draw.temperature) for i in order}
    if draw.top_k:
        order = order[: draw.top_k]
    whole, before = sum(Fraction(chance[i]) for i in order), Fraction(0)
    kept, edges = [], [1.0]
    for i in order:
        share = float(before / whole)
        if kept and (share >= draw.top_p or chance[i] < draw.min_p):
            break
        kept.append(i)
        before += Fraction(chance[i])
    if draw.top_p < 1.0:
        before, shares = Fraction(0), []
        for i in order:
            shares.append(abs(float(before / whole) - draw.top_p))
            before += Fraction(chance[i])
        edges += shares[1:]
    edges += [abs(chance[i] - draw.min_p) for i in order if draw.min_p and chance[i] < 1.0]
    target = Fraction(draw.point) * sum(Fraction(chance[i]) for i in kept)
    end, found = Fraction(0), None
    for i in kept:
        end += Fraction(chance[i])
        edges.append(abs(float((end - target) / whole)))
        if found is None and end > target:
            found = i
    assert found is not None
    return found, min(edges)


def random_draws(count: int, seed: int, sizes: tuple[int, ...]) -> Iterator[Draw]:
    """Any settings, and logits of all kinds: spread, close, of few values, with outliers."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        size = dice.choice(sizes)
        logits = torch.randn(size, generator=generator)
        kind = dice.randrange(7)
        if kind < 3:
            logits *= (0.01, 3.0, 30.0)[kind]
        elif kind == 3:  # many are equal, and 0 has two signs
            logits = (2 * logits).round() * dice.choice((0.5, -0.5))
        elif kind == 4:  # differ in the last bits only
            logits = 7.0 + logits * 1e-6
        elif kind == 5:  # far from each other
            logits = logits.sign() * (10 * logits).exp()
        else:
            logits = (3 * logits).bfloat16().float()
            logits[dice.randrange(size)] = dice.choice((-1e38, 1e38, 20.0))
        yield Draw(
            logits,
            dice.choice((1e-6, 0.05, 0.7, 1.0, 1.0, 2.0, 100.0)),
            dice.choice((0, 0, 0, 1, 2, 40, size, 10**9)),
            dice.choice((1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999, dice.random())),
            dice.choice((0.0, 0.0, 1e-9, 0.05, 0.3, 1.0, dice.random())),
            dice.choice((0.0, 1.0 - 2**-53, *(dice.random() for _ in range(6)))),
        )

"""Random cases of `lowest`, and its specification as a plain loop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from guards import untouched
from torch import Tensor

SHAPES = [(1, 1), (6, 17), (5, 70), (3, 300)]
"""Heads and rows."""


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of `lowest` but free_slot."""

    scores: Tensor
    pos: Tensor
    start: Tensor
    over: Tensor


def draw(shape: tuple[int, int], seed: int) -> Case:
    """Scores with ties, both zeros, infinities and NaN; heads in which no row may leave. Rows that
    may not leave have position -1, as those that a policy does not see."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, rows = shape
    scores = torch.randn(shape, generator=generator)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.5])
    for one in scores:
        some = torch.rand(rows, generator=generator) < pick.choice((0.0, 0.5, 1.0))
        kinds = pick.choice((2, 3, 4, 7))
        one[some] = special[torch.randint(kinds, (rows,), generator=generator)][some]
        if pick.random() < 0.2:
            one[:] = pick.choice((math.nan, math.inf))
    pos = torch.stack([torch.randperm(3 * rows, generator=generator)[:rows] for _ in range(heads)])
    over = torch.rand(heads, generator=generator) < 0.7
    over[0] = True
    start = torch.randint(10**6, (heads,), generator=generator)
    return Case(scores, pos.masked_fill(scores == math.inf, -1), start, over)


def expected(case: Case) -> Tensor:
    """What `free_slot` must be where it was 77 before, int64 [F]."""
    found = torch.full(case.start.shape, 77)
    for head, over in enumerate(case.over.tolist()):
        pairs = zip(case.scores[head].tolist(), case.pos[head].tolist(), strict=True)
        free = [(*pair, j) for j, pair in enumerate(pairs) if pair[0] < math.inf]
        if over:
            found[head] = case.start[head] + (min(free)[2] if free else 0)
    return found


def outcome(
    lowest: Callable[..., None], case: Case, place: Callable[[Tensor], Tensor], **more: int
) -> Tensor:
    """What a form of `lowest` writes, where 77 was before; its arguments as `place` copies them."""
    free_slot = place(torch.full(case.start.shape, 77))
    lowest(*map(place, astuple(case)), free_slot, **more)
    assert untouched(free_slot)
    return free_slot.cpu()

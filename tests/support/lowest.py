"""Random cases of `lowest_step`, and its specification as a plain loop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from guards import absurd
from torch import Tensor

from minikv.kernels import Rows

SHAPES = [
    # L, H, C, longest head
    (1, 1, 1, 1),
    (2, 3, 17, 17),
    (3, 2, 70, 61),
    (1, 5, 300, 257),
    (2, 2, 33, 1),
]


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of `lowest_step` but go and free_slot."""

    scores: Tensor
    allowed: Tensor
    rows: Rows


def draw(shape: tuple[int, int, int, int], seed: int) -> Case:
    """Scores with ties, both zeros, infinities and NaN; heads below, at and over their cap; heads
    in which nothing is allowed, or every score is NaN. What no head has is NaN, absurd, or
    allowed."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layers, heads, wide, most = shape
    length = torch.randint(1, most + 1, (layers, heads), generator=generator)
    length[0, 0] = most
    cap = (length + torch.randint(-2, 2, length.shape, generator=generator)).clamp(min=0)
    cap[0, 0] = most - 1
    start = ((length + 3).flatten().cumsum(0) - length.flatten()).view_as(length)
    pos = torch.full((int((start + length).max()) + 3,), int(absurd(torch.int32)))
    scores = torch.full((layers, heads, wide), math.nan)
    allowed = torch.ones(scores.shape, dtype=torch.bool)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.5])
    for layer in range(layers):
        for head in range(heads):
            a, n = int(start[layer, head]), int(length[layer, head])
            pos[a : a + n] = torch.randperm(3 * most, generator=generator)[:n]
            x = torch.randn(n, generator=generator)
            some = torch.rand(n, generator=generator) < pick.choice((0.0, 0.5, 1.0))
            kinds = pick.choice((2, 3, 4, 7))
            x[some] = special[torch.randint(0, kinds, (n,), generator=generator)][some]
            if pick.random() < 0.2:
                x[:] = pick.choice((math.nan, -math.nan))
            scores[layer, head, :n] = x
            share = pick.choice((0.0, 0.3, 1.0, 1.0))
            allowed[layer, head, :n] = torch.rand(n, generator=generator) < share
    newest = torch.tensor(3 * most)
    rows = Rows(start, length, cap, pos.to(torch.int32), newest, 10**6, 10**6, 10**6)
    return Case(scores, allowed, rows)


def expected(case: Case) -> Tensor:
    """What `free_slot` must be, int64 [L, H]."""
    rows = case.rows
    found = torch.full(rows.length.shape, -1)
    for layer, head in torch.cartesian_prod(*map(torch.arange, rows.length.shape)).tolist():
        begin, count = int(rows.start[layer, head]), int(rows.length[layer, head])
        if count <= int(rows.cap[layer, head]):
            continue
        best: tuple[float, int] | None = None
        victim = begin
        for j in range(count):
            score = float(case.scores[layer, head, j])
            key = (score, int(rows.pos[begin + j]))
            if not case.allowed[layer, head, j] or math.isnan(score):
                continue
            if best is None or key < best:
                best, victim = key, begin + j
        found[layer, head] = victim
    return found


def outcome(
    step: Callable[..., None],
    case: Case,
    place: Callable[[Tensor], Tensor],
    *,
    go: bool,
    **more: int,
) -> Tensor:
    """What a `lowest_step` writes, where 77 was before; its arguments as `place` copies them."""
    r = case.rows
    moved = Rows(
        *(place(t) for t in (r.start, r.length, r.cap, r.pos, r.newest)),
        r.sinks,
        r.recent,
        r.pinned,
    )
    free_slot = place(torch.full(r.length.shape, 77))
    step(place(case.scores), place(case.allowed), moved, place(torch.tensor(go)), free_slot, **more)
    return free_slot

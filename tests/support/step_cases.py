"""The end of a step, drawn at random, for the kernels of `Kernels.evict`: odd sizes, with NaN or
absurd numbers in every row that no head has and around every tensor.

Two ways of drawing make victims comparable. *Exact*: a logit is its log-sum-exp or -inf, so that a
query gives 1 or 0, a row gets k / G, and all forms compute the same numbers bit for bit, with many
ties. *Smooth*: random logits, drawn again until the rule's decisions withstand changes of them by
1e-5, about fifty times the difference of two ways of computing exp.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import step_oracle
import torch
from guards import guarded, untouched
from torch import Tensor

from minikv.kernels import Rows

POLICIES = ["h2o", "roco"]


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of a policy's kernel but free_slot. exact: the way of drawing."""

    rows: Rows
    logits: Tensor
    lse: Tensor
    columns: list[Tensor]
    quota: Tensor
    exact: bool


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))


def placed(rows: Rows, place: Callable[[Tensor], Tensor]) -> Rows:
    """With copies of its tensors."""
    names = "start", "length", "cap", "pos", "newest"
    return replace(rows, **{name: place(getattr(rows, name)) for name in names})


def run(
    step: Callable[..., None], case: Case, place: Callable[[Tensor], Tensor], **more: int
) -> tuple[Tensor, list[Tensor]]:
    """What is in `free_slot`, and in the policy's columns, after a kernel has run. It may overwrite
    logits and lse, and nothing else."""
    rows, columns = placed(case.rows, place), [place(column) for column in case.columns]
    free_slot = place(torch.full(case.quota.shape, 77))
    given = [place(t) for t in (case.logits, case.lse)]
    step(*given, rows, free_slot, columns, place(case.quota), **more)
    assert all(untouched(t) for t in (free_slot, *given, *columns))
    for name in ("start", "length", "cap", "pos", "newest"):
        assert same(getattr(rows, name).cpu(), getattr(case.rows, name))
    return free_slot.cpu(), [column.cpu() for column in columns]


def check(
    policy: str,
    step: Callable[..., None],
    case: Case,
    place: Callable[[Tensor], Tensor],
    **more: int,
) -> None:
    """The kernel chooses the rows that the policy's own rule chooses, and writes what it writes."""
    want, wanted = run(step_oracle.EVICT[policy], case, guarded)
    got, noted = run(step, case, place, **more)
    assert torch.equal(got, want)
    assert torch.equal(got >= 0, case.rows.length > case.rows.cap)
    for mine, theirs in zip(noted, wanted, strict=True):
        if case.exact:
            assert same(mine, theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)


def drawn(
    policy: str,
    seed: int,
    *,
    exact: bool,
    most: int = 300,
    sides: tuple[int, int, int, int] | None = None,
) -> Case:
    """A case: sides L, H, G and the longest head, random if not given; that is `most` at most."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    sizes = [n for n in (1, 2, 5, 16, 17, 33, 64, 70, 257, 300) if n <= most]
    layers, heads, group, longest = sides or (
        pick.randint(1, 3),
        pick.randint(1, 5),
        pick.randint(1, 7),
        pick.choice(sizes),
    )
    wide = longest + pick.choice((0, 1, 13))
    length = whole(1, longest + 1, layers, heads)
    length[0, 0] = longest
    cap = (length + whole(-2, 2, layers, heads)).clamp(min=0)
    if pick.random() < 0.3:
        cap = length - 1
    start = ((length + 3).flatten().cumsum(0) - length.flatten()).view_as(length)
    count = int((start + length).max()) + 3
    used = torch.zeros(count, dtype=torch.bool)
    # Positions close together, loosely, or with one gap before the newest row.
    spread, late = pick.choice((1, 2, 50)), pick.choice((0, 0, 10**6))
    newest = spread * longest + late
    pos = torch.full((count,), torch.iinfo(torch.int32).max // 2)
    logits = torch.full((layers, heads, group, wide), math.nan)
    lse = torch.randn(layers, heads, group, generator=generator)
    level = whole(0, group + 1, count)  # what a row gets of all queries together, times G
    for i, h in torch.cartesian_prod(torch.arange(layers), torch.arange(heads)).tolist():
        a, n = int(start[i, h]), int(length[i, h])
        used[a : a + n] = True
        old = torch.randperm(spread * longest, generator=generator)
        if seed % 7 == 6:
            old = old // 3  # no cache has a position twice, but the order is defined
        held = torch.cat((torch.tensor([newest]), old[: n - 1]))
        pos[a : a + n] = held[torch.randperm(n, generator=generator)]
        if exact:
            given = torch.arange(group)[:, None] < level[a : a + n]
            logits[i, h, :, :n] = torch.where(given, lse[i, h, :, None], -math.inf)
        else:
            x = torch.randn(group, n, generator=generator) * 2
            x[torch.rand(group, n, generator=generator) < 0.1] = -math.inf
            x[:, 0] = 0.0
            logits[i, h, :, :n], lse[i, h] = x, x.logsumexp(-1)
    sinks, recent = pick.choice((0, 2, 999)), pick.choice((0, 1, 3, 50))
    pinned = pick.choice((0, 0, spread * longest // 3))
    rows = Rows(
        start, length, cap, pos.to(torch.int32), torch.tensor(newest), sinks, recent, pinned
    )
    seen = whole(0, 9, count).float()
    mean = whole(0, 5, count) / 4 if exact else torch.rand(count, generator=generator)
    noise = whole(0, 4, count) / 8 if exact else 0.1 * torch.rand(count, generator=generator)
    sums, squares = mean * seen, (mean * mean + noise) * seen
    if exact and seed % 2:  # every row got the same all the time: only rounding tells them apart
        once, sums, squares = level / torch.tensor(float(group)), noise * 0, noise * 0
        for step in range(9):
            sums = torch.where(step < seen, sums + once, sums)
            squares = torch.where(step < seen, squares + once * once, squares)
    for column in (sums, squares, seen):
        column[~used] = math.nan
    columns = [sums] if policy == "h2o" else [sums, squares, seen]
    return Case(rows, logits, lse, columns, whole(0, longest + 2, layers, heads), exact)


def settled(policy: str, case: Case) -> bool:
    """Whether the rule decides the same if logits are a little different."""
    generator = torch.Generator().manual_seed(1)
    step = step_oracle.EVICT[policy]
    want = run(step, case, guarded)[0]
    noise = (2e-5 * torch.rand(case.logits.shape, generator=generator) - 1e-5 for _ in range(3))
    others = (replace(case, logits=case.logits + by) for by in noise)
    return all(torch.equal(want, run(step, other, guarded)[0]) for other in others)


def smooth(policy: str, seed: int, most: int = 300) -> Case:
    """A settled case of random logits."""
    drawings = (drawn(policy, seed + 1000 * i, exact=False, most=most) for i in range(20))
    return next(case for case in drawings if settled(policy, case))

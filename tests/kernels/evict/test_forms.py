"""The end of a decode step in every form, as the policies' own rules in torch end it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import step_oracle
import torch
from forms import Form, forms, needs_c
from tensors import guarded, segments, torch_threads, untouched
from torch import Tensor
from triton_device import close

from minikv.kernels import Rows
from minikv.kernels.evict import cpu as native
from minikv.kernels.evict.cpu import evict

Place = Callable[[Tensor], Tensor]


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


TABLES = "start", "length", "cap", "pos", "newest"


def run(
    step: Callable[..., None], case: Case, place: Place, **more: int
) -> tuple[Tensor, list[Tensor]]:
    """What is in `free_slot`, and in the policy's columns, after a kernel has run. It may overwrite
    logits and lse, and nothing else."""
    rows = replace(case.rows, **{name: place(getattr(case.rows, name)) for name in TABLES})
    columns = [place(column) for column in case.columns]
    free_slot = place(torch.full(case.quota.shape, 77))
    given = [place(t) for t in (case.logits, case.lse)]
    step(*given, rows, free_slot, columns, place(case.quota), **more)
    assert all(untouched(t) for t in (free_slot, *given, *columns))
    for name in TABLES:
        assert same(getattr(rows, name).cpu(), getattr(case.rows, name))
    return free_slot.cpu(), [column.cpu() for column in columns]


def check(policy: str, step: Callable[..., None], case: Case, place: Place, **more: int) -> None:
    """The kernel chooses the rows that the policy's own rule chooses, and writes what it writes."""
    want, wanted = run(step_oracle.EVICT[policy], case, guarded)
    got, noted = run(step, case, place, **more)
    assert torch.equal(got, want)
    assert torch.equal(got >= 0, case.rows.length > case.rows.cap)
    for mine, theirs in zip(noted, wanted, strict=True):
        if case.exact:
            assert same(mine, theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)


def drawn(policy: str, seed: int, *, exact: bool, most: int = 300, sides: Any = None) -> Case:
    """A case of odd sizes, with NaN or absurd numbers in every row that no head has. Sides L, H, G
    and the longest head, random if not given; that is `most` at most.

    Two ways of drawing make victims comparable. exact: a logit is its log-sum-exp or -inf, so that
    a query gives 1 or 0, a row gets k / G, and all forms compute the same numbers bit for bit, with
    many ties. Else logits are random, drawn again by `smooth` until the rule's decisions withstand
    changes of them by 1e-5, about fifty times the difference of two ways of computing exp."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    sizes = [n for n in (1, 2, 5, 16, 17, 33, 64, 70, 257, 300) if n <= most]
    if sides is None:
        sides = (*(pick.randint(1, most) for most in (3, 5, 7)), pick.choice(sizes))
    layers, heads, group, longest = sides
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
    tables = start, length, cap, pos.to(torch.int32), torch.tensor(newest)
    rows = Rows(*tables, sinks, recent, pinned)
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


every = pytest.mark.parametrize("form", forms("evict", torch_too=False))
policies = pytest.mark.parametrize("policy", ["h2o", "roco"])


@every
@policies
def test_statistics_and_victims(form: Form, policy: str) -> None:
    """In Triton in tiles of 16 rows, so that a head has several."""
    step, many = form.find()[policy], form.by == "c"  # type: ignore[index]
    most, more = (300, {}) if many else (70, {"block": 16})
    for seed in range(60 if many else 6):
        check(policy, step, drawn(policy, seed, exact=True, most=most), form.place, **more)
    for seed in range(40 if many else 2):
        check(policy, step, smooth(policy, seed, most), form.place, **more)


@every
@pytest.mark.parametrize(
    ("missing", "lowest", "left"),
    [(99, 6, 6), (99, 7, 3), (8, 7, 3), (8, 6, 3), (8, 5, 5), (1, 7, 3), (1, 6, 6)],
)
def test_the_newest_rows_of_h2o_by_hand(form: Form, missing: int, lowest: int, left: int) -> None:
    """The four newest of rows 0 to 10 stay: 7 to 10, or 6 to 10 without 8; row 3 is the next."""
    held = [i for i in (3, 0, 9, 5, 1, 8, 10, 2, 7, 4, 6) if i != missing]
    given = torch.tensor([0.01 if i == lowest else 0.02 if i == 3 else 0.1 for i in held])
    start, length, count = segments([len(held)])
    pos = torch.zeros(count, dtype=torch.int32)
    begin = int(start)
    pos[begin : begin + len(held)] = torch.tensor(held, dtype=torch.int32)
    tables = (start[None], length[None], length[None] - 1, pos, torch.tensor(10))
    rows = Rows(*map(form.place, tables), 0, 1, 0)
    free_slot, sums = form.place(torch.zeros((1, 1), dtype=torch.int64)), torch.zeros(count)
    sums = form.place(sums)
    logits, lse = form.place(given.log().view(1, 1, 1, -1)), form.place(torch.zeros(1, 1, 1))
    quota = form.place(torch.tensor([[4]]))
    form.find()["h2o"](logits, lse, rows, free_slot, [sums], quota)  # type: ignore[index]
    assert held[int(free_slot) - begin] == left
    close(sums[begin : begin + len(held)], given)


SHAPES = [(1, 1), (6, 17), (5, 70), (3, 300)]
"""Heads and rows."""


class Scored(NamedTuple):
    """Arguments of `lowest` but free_slot."""

    scores: Tensor
    pos: Tensor
    start: Tensor
    over: Tensor


def scored(shape: tuple[int, int], seed: int) -> Scored:
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
    return Scored(scores, pos.masked_fill(scores == math.inf, -1), start, over)


def leaving(case: Scored) -> Tensor:
    """What `free_slot` must be where it was 77 before, int64 [F]."""
    found = torch.full(case.start.shape, 77)
    for head, over in enumerate(case.over.tolist()):
        pairs = zip(case.scores[head].tolist(), case.pos[head].tolist(), strict=True)
        free = [(*pair, j) for j, pair in enumerate(pairs) if pair[0] < math.inf]
        if over:
            found[head] = case.start[head] + (min(free)[2] if free else 0)
    return found


def outcome(lowest: Callable[..., None], case: Scored, place: Place, **more: int) -> Tensor:
    """What a form of `lowest` writes, where 77 was before; its arguments as `place` copies them."""
    free_slot = place(torch.full(case.start.shape, 77))
    lowest(*map(place, case), free_slot, **more)
    assert untouched(free_slot)
    return free_slot.cpu()


@pytest.mark.parametrize("form", forms("lowest"))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_lowest_score_leaves(form: Form, shape: tuple[int, int]) -> None:
    more = {"block": 16} if form.by == "triton" else {}
    for seed in range(4 if form.by == "triton" else 40):
        case = scored(shape, seed)
        assert torch.equal(outcome(form, case, form.place, **more), leaving(case)), seed


@needs_c
def test_variances_next_to_each_other_by_hand() -> None:
    """Of the positions 0 to 2 those vary least that got 1/2; the lowest mean varies by a bit more,
    the last that a number can differ by. Position 3 is the newcomer's."""
    quarter = torch.tensor(0.25)
    half, four = 2 * quarter, torch.tensor([[4]])
    squares = torch.stack([half, torch.nextafter(quarter, half), half, quarter])
    pos = torch.tensor([2, 1, 0, 3], dtype=torch.int32)
    rows = Rows(four - 4, four, four - 1, pos, torch.tensor(3), 0, 1, 0)
    columns = [torch.tensor([0.5, 0.0, 0.5, 0.0]), squares, torch.zeros(4)]
    logits = torch.tensor([-torch.inf, -torch.inf, -torch.inf, 0.0]).view(1, 1, 1, 4)
    case = Case(rows, logits, torch.zeros(1, 1, 1), columns, torch.tensor([[1]]), exact=True)
    check("roco", evict["roco"], case, guarded)
    free_slot = torch.zeros(1, 1, dtype=torch.int64)
    evict["roco"](logits, case.lse, rows, free_slot, columns, case.quota)
    assert int(free_slot) == 2


@needs_c
@policies
def test_many_rows_on_several_threads(policy: str) -> None:
    """Enough of them that more than one thread computes, and in two calls at once."""
    case = drawn(policy, 4, exact=True, sides=(4, 4, 4, 4200))
    full = replace(case, rows=replace(case.rows, cap=case.rows.length - 1))

    def once(_: int) -> None:
        torch.set_num_threads(2)
        check(policy, evict[policy], full, guarded)

    with torch_threads(2), ThreadPoolExecutor(2) as pool:
        list(pool.map(once, range(4)))


@needs_c
def test_other_strides_and_dtypes_are_refused() -> None:
    case = drawn("h2o", 5, exact=True, sides=(2, 3, 2, 33))
    turned = case.logits.transpose(2, 3).contiguous().transpose(2, 3)
    far = replace(case.rows, pos=case.rows.pos.long())
    for logits, rows, why in ((turned, case.rows, "float32 logits"), (case.logits, far, "int32")):
        with pytest.raises(AssertionError, match=f"contiguous CPU tensors: {why}"):
            evict["h2o"](logits, case.lse, rows, case.quota, case.columns, case.quota)
    good = scored(SHAPES[1], 0)
    for wrong, why in (
        (good._replace(scores=good.scores[:, :-1]), "a score for every row"),
        (good._replace(scores=good.scores.double()), "float32 scores"),
        (good._replace(pos=good.pos.int()), "int64 layouts and positions"),
    ):
        with pytest.raises(AssertionError, match=why):
            outcome(native.lowest, wrong, guarded)

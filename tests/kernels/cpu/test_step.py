"""The end of a decode step in C, against torch: many random cases of odd sizes, with NaN or absurd
numbers in every row that no head has and around every tensor.

Two ways of drawing make victims comparable. *Exact*: a logit is its log-sum-exp or -inf, so that a
query gives 1 or 0, a row gets k / G, and torch and C compute the same numbers bit for bit, with
many ties. *Smooth*: random logits, drawn again until torch's decisions withstand changes of them by
1e-5, about fifty times the difference of two ways of computing exp.
"""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import step_oracle as twins
import torch
from guards import absurd, guarded, untouched
from lowest import SHAPES, draw, expected, outcome
from torch import Tensor

from minikv.kernels import Rows
from minikv.kernels.cpu import build
from minikv.kernels.cpu import step as native

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")
HISTORIES = (16, 32, 33, 400)
POLICIES = ["h2o", "tova", "tova-layerwise", "roco", "scissorhands"]


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))


@dataclass(frozen=True, slots=True)
class Case:
    """The end of a step: arguments of a policy's function; `notes` follow `free_slot`."""

    rows: Rows
    used: Tensor  # bool [R]
    logits: Tensor
    lse: Tensor
    notes: tuple[object, ...]


def run(
    module: ModuleType, policy: str, case: Case, go: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """What is in `free_slot`, and in the policy's columns, after the function has run."""
    r = case.rows
    moved = Rows(
        *(guarded(t) for t in (r.start, r.length, r.cap, r.pos, r.newest)),
        r.sinks,
        r.recent,
        r.pinned,
    )
    free_slot = guarded(torch.full(r.length.shape, 77))
    notes = [
        guarded(n)
        if isinstance(n, Tensor)
        else [guarded(w) for w in n]
        if isinstance(n, list)
        else n
        for n in case.notes
    ]
    name = policy.split("-")[0] + "_step"
    named = {"layerwise": policy == "tova-layerwise"} if name == "tova_step" else {}
    given = [guarded(t) for t in (case.logits, case.lse)]
    getattr(module, name)(*given, moved, torch.tensor(go), free_slot, *notes, **named)
    columns = [t for n in notes for t in (n if isinstance(n, list) else [n])]
    kept = [t for t in columns if isinstance(t, Tensor)]
    assert all(untouched(t) for t in (free_slot, *kept))
    for mine, before in zip(
        (moved.start, moved.length, moved.cap, moved.pos, moved.newest, *given),
        (r.start, r.length, r.cap, r.pos, r.newest, case.logits, case.lse),
        strict=True,
    ):
        assert same(mine, before)
    return free_slot, kept


def drawn(
    policy: str, seed: int, *, exact: bool, sides: tuple[int, int, int, int] | None = None
) -> Case:
    """A case: sides L, H, G and the longest head, random if not given."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    layers, heads, group, most = sides or (
        pick.randint(1, 3),
        pick.randint(1, 5),
        pick.randint(1, 7),
        pick.choice((1, 2, 5, 16, 17, 33, 64, 70, 257, 300)),
    )
    alike = pick.random() < 0.4  # the heads of a layer hold the same positions in one order
    wide = most + pick.choice((0, 1, 13))
    length = whole(1, most + 1, layers, heads)
    length[0, 0] = most
    if alike:
        length[:] = most
    cap = (length + whole(-2, 2, layers, heads)).clamp(min=0)
    if pick.random() < 0.3:
        cap = length - 1
    start = ((length + 3).flatten().cumsum(0) - length.flatten()).view_as(length)
    rows = int((start + length).max()) + 3
    used = torch.zeros(rows, dtype=torch.bool)
    # Positions close together, loosely, or with one gap before the newest rows.
    spread, late = pick.choice((1, 2, 50)), pick.choice((0, 0, 10**6))
    newest = spread * most + late
    pos = torch.full((rows,), torch.iinfo(torch.int32).max // 2)
    logits = torch.full((layers, heads, group, wide), math.nan)
    lse = torch.randn(layers, heads, group, generator=generator)
    for i in range(layers):
        shared = torch.randperm(spread * most, generator=generator)
        for h in range(heads):
            a, n = int(start[i, h]), int(length[i, h])
            used[a : a + n] = True
            old = shared if alike else torch.randperm(spread * most, generator=generator)
            if policy != "tova-layerwise" and seed % 7 == 6:
                old = old // 3  # no cache has a position twice, but the order is defined
            held = torch.cat((torch.tensor([newest]), old[: n - 1]))
            pos[a : a + n] = held if alike else held[torch.randperm(n, generator=generator)]
            if not exact:
                x = torch.randn(group, n, generator=generator) * 2
                x[torch.rand(group, n, generator=generator) < 0.1] = -math.inf
                x[:, 0] = 0.0
                logits[i, h, :, :n], lse[i, h] = x, x.logsumexp(-1)
    level = whole(0, group + 1, rows)  # what a row gets of each query together, times G
    if exact:
        for i in range(layers):
            for h in range(heads):
                a, n = int(start[i, h]), int(length[i, h])
                given = torch.arange(group)[:, None] < level[a : a + n]
                logits[i, h, :, :n] = torch.where(given, lse[i, h, :, None], -math.inf)
    sinks, recent = pick.choice((0, 2, 999)), pick.choice((0, 1, 3, 50))
    pinned = pick.choice((0, 0, spread * most // 3))
    at = Rows(start, length, cap, pos.to(torch.int32), torch.tensor(newest), sinks, recent, pinned)
    quota = whole(0, most + 2, layers, heads)
    if policy == "scissorhands":
        history = HISTORIES[seed % len(HISTORIES)]
        words = [whole(0, 1 << 32, rows) for _ in range(-(-history // 32))]
        words[-1] %= 1 << (history - 1) % 32 + 1
        if exact:  # few bits, so that shares are alike
            words = [w & 0x11 for w in words]
        asked = whole(0, history + 1, rows).float()
        window = torch.tensor([6, 10**6, 1, 99])[:layers]
        for column in (*words, asked):
            column[~used] = absurd(column.dtype)  # type: ignore[call-overload]
        return Case(at, used, logits, lse, (words, asked, history, window))
    seen = whole(0, 9, rows).float()
    mean = whole(0, 5, rows) / 4 if exact else torch.rand(rows, generator=generator)
    noise = whole(0, 4, rows) / 8 if exact else 0.1 * torch.rand(rows, generator=generator)
    sums, squares = mean * seen, (mean * mean + noise) * seen
    if exact and seed % 2:  # every row got the same all the time: only rounding tells them apart
        once, sums, squares = level / torch.tensor(float(group)), torch.zeros(rows), noise * 0
        for step in range(9):
            sums = torch.where(step < seen, sums + once, sums)
            squares = torch.where(step < seen, squares + once * once, squares)
    for column in (sums, squares, seen):
        column[~used] = math.nan
    notes = {"h2o": (sums, quota), "roco": (sums, squares, seen, quota)}
    return Case(at, used, logits, lse, notes.get(policy, ()))


def settled(policy: str, case: Case) -> bool:
    """Whether torch decides the same if logits are a little different."""
    free_slot, notes = run(twins, policy, case)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        noise = 2e-5 * torch.rand(case.logits.shape, generator=generator) - 1e-5
        other, changed = run(twins, policy, replace(case, logits=case.logits + noise))
        words = [i for i, t in enumerate(notes) if t.dtype == torch.int64]
        if not (same(free_slot, other) and all(same(notes[i], changed[i]) for i in words)):
            return False
    return True


def draw_settled(policy: str, seed: int) -> Case:
    for again in range(20):
        case = drawn(policy, seed + 1000 * again, exact=False)
        if settled(policy, case):
            return case
    raise AssertionError("no case is settled")


@pytest.mark.parametrize("policy", POLICIES)
def test_exact_numbers_and_ties_as_the_twin(policy: str) -> None:
    for seed in range(60):
        case = drawn(policy, seed, exact=True)
        (want, wanted), (got, noted) = run(twins, policy, case), run(native, policy, case)
        assert same(got, want), seed
        assert all(same(a, b) for a, b in zip(noted, wanted, strict=True)), seed


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_of_random_logits_as_the_twins(policy: str) -> None:
    for seed in range(40):
        case = draw_settled(policy, seed)
        (want, wanted), (got, noted) = run(twins, policy, case), run(native, policy, case)
        assert same(got, want), seed
        for mine, theirs in zip(noted, wanted, strict=True):
            if mine.dtype == torch.float32:
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9, equal_nan=True)
            else:
                assert same(mine, theirs), seed


def test_spreads_next_to_each_other_by_hand() -> None:
    """Of the positions 0 to 2 those vary least that got 1/2; the lowest mean varies by a bit more,
    the last that a number can differ by. Position 3 is the newcomer's."""
    quarter = torch.tensor(0.25)
    squares = torch.stack([2 * quarter, torch.nextafter(quarter, 2 * quarter), 2 * quarter])
    blank, four = torch.zeros(4), torch.tensor([[4]])
    rows = Rows(
        four - 4,
        four,
        four - 1,
        torch.tensor([2, 1, 0, 3], dtype=torch.int32),
        torch.tensor(3),
        0,
        1,
        0,
    )
    sums = torch.tensor([0.5, 0.0, 0.5, 0.0])
    notes = (sums, torch.cat((squares, blank[:1])), blank, torch.tensor([[1]]))
    logits = torch.tensor([-math.inf, -math.inf, -math.inf, 0.0]).view(1, 1, 1, 4)
    case = Case(rows, blank == 0, logits, torch.zeros(1, 1, 1), notes)
    for module in (twins, native):
        assert int(run(module, "roco", case)[0]) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_not_final_writes_nothing(policy: str) -> None:
    case = drawn(policy, 3, exact=False)
    free_slot, kept = run(native, policy, case, go=False)
    assert bool((free_slot == 77).all())
    before = [t for n in case.notes for t in (n if isinstance(n, list) else [n])]
    olds = [t for t in before if isinstance(t, Tensor)]
    assert all(same(a, b) for a, b in zip(kept, olds, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_many_rows_on_several_threads(policy: str) -> None:
    """Enough of them that more than one thread computes, and in two calls at once."""
    case = drawn(policy, 4, exact=True, sides=(4, 4, 4, 4200))
    r = case.rows
    full = replace(case, rows=replace(r, cap=r.length - 1))
    assert int(r.length.sum()) * 4 > 130_000
    want, wanted = run(twins, policy, full)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    def once(_: int) -> tuple[Tensor, list[Tensor]]:
        torch.set_num_threads(2)
        return run(native, policy, full)

    try:
        with ThreadPoolExecutor(2) as pool:
            for got, noted in (once(0), *pool.map(once, range(4))):
                assert same(got, want)
                assert all(same(a, b) for a, b in zip(noted, wanted, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("policy", POLICIES)
def test_other_strides_and_dtypes_are_refused(policy: str) -> None:
    case = drawn(policy, 5, exact=True, sides=(2, 3, 2, 33))
    turned = case.logits.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(AssertionError, match="contiguous CPU tensors: float32 logits"):
        call(native, policy, replace(case, logits=turned))
    with pytest.raises(AssertionError, match="int32 positions"):
        call(native, policy, replace(case, rows=replace(case.rows, pos=case.rows.pos.long())))


def call(module: ModuleType, policy: str, case: Case) -> None:
    """Call a policy's function with the case as it is."""
    named = {"layerwise": policy == "tova-layerwise"} if policy.startswith("tova") else {}
    free_slot = torch.full(case.rows.length.shape, 77)
    function = getattr(module, policy.split("-")[0] + "_step")
    function(case.logits, case.lse, case.rows, torch.tensor(True), free_slot, *case.notes, **named)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lowest_score_leaves(shape: tuple[int, int, int, int]) -> None:
    for seed in range(40):
        case = draw(shape, seed)
        got = outcome(native.lowest_step, case, guarded, go=True)
        assert untouched(got)
        assert torch.equal(got, expected(case)), seed


def test_the_lowest_score_stays_if_the_step_is_not_final() -> None:
    case = draw(SHAPES[1], 0)
    assert bool((outcome(native.lowest_step, case, guarded, go=False) == 77).all())


def test_scores_may_have_other_dtypes_and_strides() -> None:
    case = draw(SHAPES[2], 0)
    wide = torch.cat((case.scores, case.scores), -1)[..., : case.scores.shape[-1]]
    for scores in (case.scores.double(), wide):
        got = outcome(native.lowest_step, replace(case, scores=scores), lambda t: t, go=True)
        assert torch.equal(got, expected(case))


def test_scores_that_do_not_fit_are_refused() -> None:
    case = draw(SHAPES[1], 0)
    for wrong, why in (
        (replace(case, scores=case.scores[..., :-1]), "a score for every column"),
        (replace(case, allowed=case.allowed.long()), "contiguous CPU tensors: bool allowed"),
        (replace(case, rows=replace(case.rows, pos=case.rows.pos.long())), "int32 positions"),
    ):
        with pytest.raises(AssertionError, match=why):
            outcome(native.lowest_step, wrong, lambda t: t, go=True)

"""The end of a decode step in Triton, against torch, on odd sizes, in NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import step_oracle as twins
import torch
from lowest import SHAPES, expected, outcome
from lowest import draw as draw_lowest
from ragged import segments
from torch import Tensor
from triton_device import close, guarded, kernel, on_device, randoms, untouched

from minikv.kernels import Rows

pytest.importorskip("triton", reason="no Triton on this system")


def ended(
    shape: tuple[int, int, int, int],
    *,
    sinks: int,
    recent: int,
    pinned: int,
    equal: bool,
    aligned: bool,
) -> tuple[Rows, Tensor, Tensor]:
    """Heads of all layers at the end of a step, their logits [L, H, G, C] and log-sum-exps.

    equal: logits are 0 or 1, so that many scores are alike. aligned: all heads of a layer hold the
    same positions in the same order.
    """
    layers, heads, group, wide = shape
    length = torch.randint(1, wide + 1, (layers, heads), generator=randoms(1))
    length[0, 0] = wide
    cap = (length - torch.randint(0, 2, length.shape, generator=randoms(2))).clamp(min=1)
    if aligned:
        length[:], cap[:] = wide, wide - 1
    start = ((length + 3).flatten().cumsum(0) - length.flatten()).view_as(length)
    newest = 2 * wide
    pos = torch.full((int((start + length).max()) + 3,), torch.iinfo(torch.int32).max // 2)
    logits = torch.full((layers, heads, group, wide), math.nan)
    lse = torch.zeros(layers, heads, group)
    for i in range(layers):
        for h in range(heads):
            a, n = int(start[i, h]), int(length[i, h])
            seed = i if aligned else i * heads + h
            held = torch.randperm(newest, generator=randoms(10 + seed))[: n - 1]
            order = torch.randperm(n, generator=randoms(20 + seed))
            pos[a : a + n] = torch.cat((held, torch.tensor([newest])))[order]
            x = torch.randn(group, n, generator=randoms(30 + i * heads + h)) * 2
            if equal:
                x = torch.randint(0, 2, (1, n), generator=randoms(40 + seed)).expand(group, n)
            logits[i, h, :, :n], lse[i, h] = x, x.float().logsumexp(-1)
    rows = Rows(
        start, length, cap, pos.to(torch.int32), torch.tensor(newest), sinks, recent, pinned
    )
    return rows, logits, lse


def copied(t: object) -> object:
    """On the device, between guards."""
    if isinstance(t, Tensor):
        return guarded(t)
    return [guarded(word) for word in t] if isinstance(t, list) else t


def statistics(policy: str, rows: Rows, equal: bool) -> list[object]:
    """What a policy's step takes after `free_slot`."""
    count, sides = len(rows.pos), rows.length.shape
    quota = torch.randint(1, int(rows.length.max()) // 2 + 2, sides, generator=randoms(3))
    seen = torch.randint(0, 9, (count,), generator=randoms(4)).float()
    mean, noise = (torch.rand(count, generator=randoms(i)) for i in (5, 6))
    if equal:
        seen, mean, noise = torch.ones(count), torch.full((count,), 0.25), torch.zeros(count)
    if policy == "h2o":
        return [mean * seen, quota]
    if policy == "roco":
        return [mean * seen, (mean * mean + 0.1 * noise) * seen, seen, quota]
    if policy == "scissorhands":
        words = [
            torch.randint(0, 1 << bits, (count,), generator=randoms(7 + bits)) for bits in (32, 8)
        ]
        window = torch.tensor([6, 10**6])[: len(rows.length)]
        return [[w % 2 for w in words] if equal else words, seen, 40, window]
    return []


SCENES = [
    ((2, 3, 2, 21), {"sinks": 2, "recent": 3, "pinned": 0, "equal": False, "aligned": False}),
    ((1, 2, 3, 17), {"sinks": 1, "recent": 1, "pinned": 0, "equal": True, "aligned": False}),
    ((2, 2, 1, 18), {"sinks": 0, "recent": 1, "pinned": 9, "equal": True, "aligned": True}),
    ((1, 5, 4, 16), {"sinks": 999, "recent": 1, "pinned": 3, "equal": False, "aligned": False}),
    ((1, 1, 7, 1), {"sinks": 0, "recent": 1, "pinned": 0, "equal": False, "aligned": False}),
]


POLICIES = ["h2o", "roco", "scissorhands"]


@on_device
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scene", range(len(SCENES)))
def test_statistics_and_victims(policy: str, scene: int) -> None:
    """As the twin's: the same rows leave, of equal scores the oldest, in tiles of 16 rows."""
    shape, how = SCENES[scene]
    rows, logits, lse = ended(shape, **how)
    name = policy + "_step"
    go = torch.tensor(True)
    outcomes = []
    for function, more in (
        (getattr(twins, name), {}),
        (getattr(kernel("triton.step"), name), {"block": 16}),
    ):
        moved = Rows(
            *(guarded(t) for t in (rows.start, rows.length, rows.cap, rows.pos, rows.newest)),
            rows.sinks,
            rows.recent,
            rows.pinned,
        )
        free_slot = guarded(torch.full(rows.length.shape, 77))
        notes = [copied(t) for t in statistics(policy, rows, how["equal"])]
        function(guarded(logits), guarded(lse), moved, guarded(go), free_slot, *notes, **more)
        assert untouched(free_slot)
        outcomes.append((free_slot, notes))
    (want, wanted), (got, noted) = outcomes
    assert torch.equal(got, want)
    over = rows.length > rows.cap
    assert bool(((got.cpu() >= 0) == over).all())
    for mine, theirs in zip(noted, wanted, strict=True):
        if isinstance(mine, list):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        elif isinstance(mine, Tensor):
            close(mine, theirs)
            assert untouched(mine)


def one_layer(
    positions: list[list[int]], weights: list[list[float]]
) -> tuple[Rows, Tensor, Tensor]:
    """Heads of one layer by hand, all one row over their cap; logits [1, H, 1, C] and lse 0."""
    start, length, count = segments([len(p) for p in positions])
    pos = torch.zeros(count, dtype=torch.int32)
    logits = torch.full((1, len(positions), 1, max(map(len, positions))), math.nan)
    for h, (at, given) in enumerate(zip(positions, weights, strict=True)):
        pos[int(start[h]) : int(start[h]) + len(at)] = torch.tensor(at, dtype=torch.int32)
        logits[0, h, 0, : len(at)] = torch.tensor(given).log()
    rows = Rows(
        *(guarded(t) for t in (start[None], length[None], length[None] - 1, pos)),
        guarded(torch.tensor(max(map(max, positions)))),
        0,
        1,
        0,
    )
    return rows, guarded(logits), guarded(torch.zeros(1, len(positions), 1))


@on_device
@pytest.mark.parametrize(
    ("missing", "lowest", "left"),
    [
        (99, 6, 6),
        (99, 7, 3),
        (8, 7, 3),
        (8, 6, 3),
        (8, 5, 5),
        (1, 7, 3),
        (1, 6, 6),
    ],
)
def test_the_newest_rows_of_h2o_by_hand(missing: int, lowest: int, left: int) -> None:
    """The four newest of rows 0 to 10 stay: 7 to 10, or 6 to 10 without 8; row 3 is the next."""
    held = [i for i in (3, 0, 9, 5, 1, 8, 10, 2, 7, 4, 6) if i != missing]
    given = [0.01 if i == lowest else 0.02 if i == 3 else 0.1 for i in held]
    rows, logits, lse = one_layer([held], [given])
    free_slot = guarded(torch.zeros((1, 1), dtype=torch.int64))
    sums = guarded(torch.zeros(len(rows.pos)))
    kernel("triton.step").h2o_step(
        logits,
        lse,
        rows,
        guarded(torch.tensor(True)),
        free_slot,
        sums,
        guarded(torch.tensor([[4]])),
        block=16,
    )
    begin = int(rows.start)
    assert held[int(free_slot) - begin] == left
    close(sums[begin : begin + len(held)], torch.tensor(given))


@on_device
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_not_final_changes_nothing(policy: str) -> None:
    shape, how = SCENES[0]
    rows, logits, lse = ended(shape, **how)
    moved = Rows(
        *(guarded(t) for t in (rows.start, rows.length, rows.cap, rows.pos, rows.newest)),
        rows.sinks,
        rows.recent,
        rows.pinned,
    )
    before = statistics(policy, rows, False)
    notes = [copied(t) for t in before]
    free_slot = guarded(torch.full(rows.length.shape, 77))
    name = policy + "_step"
    getattr(kernel("triton.step"), name)(
        guarded(logits),
        guarded(lse),
        moved,
        guarded(torch.tensor(False)),
        free_slot,
        *notes,
    )
    assert bool((free_slot == 77).all())
    for mine, old in zip(notes, before, strict=True):
        pairs = zip(mine, old, strict=True) if isinstance(mine, list) else [(mine, old)]
        for a, b in pairs:
            assert not isinstance(a, Tensor) or torch.equal(a.cpu(), b)


@on_device
@pytest.mark.parametrize("shape", SHAPES)
def test_the_lowest_score_leaves(shape: tuple[int, int, int, int]) -> None:
    """In tiles of 16 rows, so that a head has several."""
    for seed in range(4):
        case = draw_lowest(shape, seed)
        got = outcome(kernel("triton.step").lowest_step, case, guarded, go=True, block=16)
        assert untouched(got)
        assert torch.equal(got.cpu(), expected(case)), seed


@on_device
def test_the_lowest_score_stays_if_the_step_is_not_final() -> None:
    case = draw_lowest(SHAPES[1], 0)
    got = outcome(kernel("triton.step").lowest_step, case, guarded, go=False)
    assert bool((got == 77).all())


@on_device
@pytest.mark.parametrize("group", ["mean", "sum", "max"])
@pytest.mark.parametrize("go", [True, False])
def test_what_a_step_gave_is_noted_before_what_others_gave(group: str, go: bool) -> None:
    shape, how = SCENES[0]
    rows, logits, lse = ended(shape, **how)
    before = [torch.rand(len(rows.pos), generator=randoms(i)) for i in range(3)]
    outcomes = []
    for shift, more in (
        (twins.shift_step, {}),
        (kernel("triton.step").shift_step, {"block": 16}),
    ):
        moved = Rows(
            *(guarded(t) for t in (rows.start, rows.length, rows.cap, rows.pos, rows.newest)),
            rows.sinks,
            rows.recent,
            rows.pinned,
        )
        seen = [guarded(t) for t in before]
        shift(guarded(logits), guarded(lse), moved, guarded(torch.tensor(go)), seen, group, **more)
        assert all(untouched(t) for t in seen)
        outcomes.append(seen)
    for mine, theirs in zip(*outcomes, strict=True):
        close(mine, theirs)
    begin, count = int(rows.start[1, 1]), int(rows.length[1, 1])
    older = outcomes[1][2][begin : begin + count].cpu()
    assert torch.equal(older, before[1 if go else 2][begin : begin + count])

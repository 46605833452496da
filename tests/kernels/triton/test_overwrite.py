"""Rows that leave before attention in Triton, as torch chooses them, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import step_oracle as twins
import torch
from lowest import SHAPES
from lowest import draw as draw_lowest
from overwriting import HEADS, full_heads
from overwriting import left as left_on
from triton_device import DEVICE, draw, guarded, kernel, on_device, untouched

from minikv.kernels.torch import decode as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


left = partial(left_on, device=DEVICE)


@on_device
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("case", HEADS, ids=str)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("streaming_step", ()),
        ("l2_step", ("norm",)),
        ("random_step", (0,)),
        ("random_step", (123456789012345,)),
    ],
)
def test_the_rows_that_leave(
    name: str, more: tuple[object, ...], case: tuple[Any, ...], hidden: bool
) -> None:
    """Those of the policy's torch form, in tiles of 16 rows; of equal norms the oldest."""
    rows, free_slot, columns = full_heads(case, hidden=hidden)
    want = left(getattr(twins, name), rows, free_slot, columns, *more)
    mine = getattr(kernel("triton.overwrite"), name)
    got = left(mine, rows, free_slot, columns, *more, block=16)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    full = (free_slot < 0) & (rows.length >= rows.cap)
    assert bool((got[0].cpu()[full] >= 0).all())
    assert bool((got[1].cpu()[~full] == 77).all())


@on_device
@pytest.mark.parametrize("shape", SHAPES)
def test_the_lowest_score_leaves(shape: tuple[int, int, int, int]) -> None:
    for seed in range(3):
        case = draw_lowest(shape, seed)
        count = len(case.rows.pos)
        columns = {
            "k": draw(seed, (count, 64), torch.bfloat16),
            "v": draw(seed + 1, (count, 64), torch.bfloat16),
            "pos": case.rows.pos,
            "norm": torch.arange(count).float(),
        }
        free_slot = torch.full(case.rows.length.shape, -1)
        free_slot[0, -1] = 5
        outcomes = []
        for module, block in ((plain_torch, {}), (kernel("triton.overwrite"), {"block": 16})):
            step = partial(module.overwrite_step, guarded(case.scores), guarded(case.allowed))
            outcomes.append(left(step, case.rows, free_slot, columns, **block))
        for got, want in zip(outcomes[1], outcomes[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@on_device
@pytest.mark.parametrize("least", [1, 6, 999])
@pytest.mark.parametrize("pinned", [0, 9])
def test_the_positions_that_a_policy_is_shown(least: int, pinned: int) -> None:
    rows, _, columns = full_heads(HEADS[0], hidden=False)
    rows.length[1, 1] = 0
    count = len(rows.pos)
    used = torch.zeros(count, dtype=torch.bool)
    for begin, held in zip(rows.start.flatten(), rows.length.flatten(), strict=True):
        used[int(begin) : int(begin) + int(held)] = True
    outcomes = []
    for module, more in (
        (plain_torch, {}),
        (kernel("triton.overwrite"), {"block": 16}),
    ):
        out = guarded(torch.full((count,), 5, dtype=torch.int32))
        given = (rows.start, rows.length, rows.pos, columns["leaves_last"])
        module.shown_positions(
            *map(guarded, given), out, width=21, pinned=pinned, least=least, **more
        )
        assert untouched(out)
        outcomes.append(out.cpu()[used])
    assert torch.equal(*outcomes)
    late = columns["leaves_last"][used] & (rows.pos[used] >= pinned)
    if least == 999:
        assert bool((outcomes[1][late] >= 0).all())
    if least == 1:
        assert bool((outcomes[1][late] < 0).any())


@on_device
@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("window", [(1, 1), (30, 10**12), (44, 7)])
def test_rows_that_no_query_sees_any_more(window: tuple[int, int], accepted: bool) -> None:
    rows, _, _ = full_heads(HEADS[0], hidden=False)
    rows.length[1, 1] = 0
    given = (rows.start, rows.length, rows.pos, rows.newest, torch.tensor(window))
    outcomes = []
    for module, more in ((plain_torch, {}), (kernel("triton.overwrite"), {"block": 16})):
        out = guarded(torch.full(rows.length.shape, 5))
        there = map(guarded, (*given, torch.tensor(accepted)))
        module.unseen_rows(*there, out, width=21, **more)
        assert untouched(out)
        outcomes.append(out.cpu())
    assert torch.equal(*outcomes)
    assert bool((outcomes[1][0] >= 0).any()) == (accepted and window[0] < 44)

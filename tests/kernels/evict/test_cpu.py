"""The end of a decode step in C, as the policies' own rules in torch end it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from guards import guarded
from lowest import SHAPES, draw, expected, outcome
from step_cases import POLICIES, Case, check, drawn, smooth

from minikv.kernels import Rows
from minikv.kernels.evict import cpu as native
from minikv.kernels.evict.cpu import evict
from minikv.kernels.native import build

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_and_victims(policy: str) -> None:
    for seed in range(60):
        check(policy, evict[policy], drawn(policy, seed, exact=True), guarded)
    for seed in range(40):
        check(policy, evict[policy], smooth(policy, seed), guarded)


def test_variances_next_to_each_other_by_hand() -> None:
    """Of the positions 0 to 2 those vary least that got 1/2; the lowest mean varies by a bit more,
    the last that a number can differ by. Position 3 is the newcomer's."""
    quarter = torch.tensor(0.25)
    squares = torch.stack(
        [2 * quarter, torch.nextafter(quarter, 2 * quarter), 2 * quarter, quarter]
    )
    four = torch.tensor([[4]])
    pos = torch.tensor([2, 1, 0, 3], dtype=torch.int32)
    rows = Rows(four - 4, four, four - 1, pos, torch.tensor(3), 0, 1, 0)
    columns = [torch.tensor([0.5, 0.0, 0.5, 0.0]), squares, torch.zeros(4)]
    logits = torch.tensor([-torch.inf, -torch.inf, -torch.inf, 0.0]).view(1, 1, 1, 4)
    case = Case(rows, logits, torch.zeros(1, 1, 1), columns, torch.tensor([[1]]), exact=True)
    check("roco", evict["roco"], case, guarded)
    free_slot = torch.zeros(1, 1, dtype=torch.int64)
    evict["roco"](logits, case.lse, rows, free_slot, columns, case.quota)
    assert int(free_slot) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_many_rows_on_several_threads(policy: str) -> None:
    """Enough of them that more than one thread computes, and in two calls at once."""
    case = drawn(policy, 4, exact=True, sides=(4, 4, 4, 4200))
    full = replace(case, rows=replace(case.rows, cap=case.rows.length - 1))
    assert int(case.rows.length.sum()) * 4 > 130_000
    threads = torch.get_num_threads()

    def once(_: int) -> None:
        torch.set_num_threads(2)
        check(policy, evict[policy], full, guarded)

    try:
        once(0)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(once, range(4)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("policy", POLICIES)
def test_other_strides_and_dtypes_are_refused(policy: str) -> None:
    case = drawn(policy, 5, exact=True, sides=(2, 3, 2, 33))
    turned = case.logits.transpose(2, 3).contiguous().transpose(2, 3)
    far = replace(case.rows, pos=case.rows.pos.long())
    for logits, rows, why in (
        (turned, case.rows, "float32 logits"),
        (case.logits, far, "int32 pos"),
    ):
        with pytest.raises(AssertionError, match=f"contiguous CPU tensors: {why}"):
            evict[policy](
                logits, case.lse, rows, torch.zeros_like(case.quota), case.columns, case.quota
            )


def test_scores_may_have_other_strides() -> None:
    case = draw(SHAPES[2], 0)
    wide = torch.cat((case.scores, case.scores), -1)[:, : case.scores.shape[1]]
    free_slot = torch.full(case.start.shape, 77)
    native.lowest(wide, case.pos, case.start, case.over, free_slot)
    assert torch.equal(free_slot, expected(case))


def test_scores_that_do_not_fit_are_refused() -> None:
    case = draw(SHAPES[1], 0)
    for wrong, why in (
        (replace(case, scores=case.scores[:, :-1]), "a score for every row"),
        (replace(case, scores=case.scores.double()), "float32 scores"),
        (replace(case, over=case.over.long()), "contiguous CPU tensors: bool over"),
        (replace(case, pos=case.pos.int()), "int64 layouts and positions"),
    ):
        with pytest.raises(AssertionError, match=why):
            outcome(native.lowest, wrong, guarded)

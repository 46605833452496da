"""The end of a decode step in every form, as the policies' own rules in torch end it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from forms import Form, forms, needs_c
from guards import guarded
from lowest import SHAPES, draw, expected, outcome
from ragged import segments
from step_cases import POLICIES, Case, check, drawn, smooth
from triton_device import close

from minikv.kernels import Rows
from minikv.kernels.evict import cpu as native
from minikv.kernels.evict.cpu import evict

every = pytest.mark.parametrize("form", forms("evict", torch_too=False))
policies = pytest.mark.parametrize("policy", POLICIES)


@every
@policies
def test_statistics_and_victims(form: Form, policy: str) -> None:
    """In Triton in tiles of 16 rows, so that a head has several."""
    step, many = form.find()[policy], form.by == "c"  # type: ignore[index]
    most, more = (300, {}) if many else (70, {"block": 16})
    for seed in range(60 if many else 10):
        check(policy, step, drawn(policy, seed, exact=True, most=most), form.place, **more)
    for seed in range(40 if many else 3):
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


@pytest.mark.parametrize("form", forms("lowest"))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_lowest_score_leaves(form: Form, shape: tuple[int, int]) -> None:
    more = {"block": 16} if form.by == "triton" else {}
    for seed in range(4 if form.by == "triton" else 40):
        case = draw(shape, seed)
        assert torch.equal(outcome(form, case, form.place, **more), expected(case)), seed


@needs_c
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


@needs_c
@policies
def test_many_rows_on_several_threads(policy: str) -> None:
    """Enough of them that more than one thread computes, and in two calls at once."""
    case = drawn(policy, 4, exact=True, sides=(4, 4, 4, 4200))
    full = replace(case, rows=replace(case.rows, cap=case.rows.length - 1))
    threads = torch.get_num_threads()

    def once(_: int) -> None:
        torch.set_num_threads(2)
        check(policy, evict[policy], full, guarded)

    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(once, range(4)))
    finally:
        torch.set_num_threads(threads)


@needs_c
def test_other_strides_and_dtypes_are_refused() -> None:
    case = drawn("h2o", 5, exact=True, sides=(2, 3, 2, 33))
    turned = case.logits.transpose(2, 3).contiguous().transpose(2, 3)
    far = replace(case.rows, pos=case.rows.pos.long())
    for logits, rows, why in ((turned, case.rows, "float32 logits"), (case.logits, far, "int32")):
        with pytest.raises(AssertionError, match=f"contiguous CPU tensors: {why}"):
            evict["h2o"](logits, case.lse, rows, case.quota, case.columns, case.quota)
    scored = draw(SHAPES[1], 0)
    for wrong, why in (
        (replace(scored, scores=scored.scores[:, :-1]), "a score for every row"),
        (replace(scored, scores=scored.scores.double()), "float32 scores"),
        (replace(scored, pos=scored.pos.int()), "int64 layouts and positions"),
    ):
        with pytest.raises(AssertionError, match=why):
            outcome(native.lowest, wrong, guarded)

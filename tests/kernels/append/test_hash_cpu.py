"""HashEvict's rows in C, as its rule in torch chooses them and torch writes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from guards import guarded
from hash_cases import LAYER, check, drawn, run
from pairwise import pairwise, some_by_day

from minikv.kernels.append.cpu import hash_append
from minikv.kernels.native import build

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")

CASES = (
    (torch.float32, torch.bfloat16, torch.float16),
    (1, 8, 15, 16, 31, 32, 63, 64),
    (True, False),
)


@pytest.mark.parametrize(
    ("dtype", "bits", "exact"),
    some_by_day(product(*CASES), {*pairwise(*CASES)}.__contains__),
)
def test_victims_and_new_rows(dtype: torch.dtype, bits: int, exact: bool) -> None:
    for seed in range(10):
        check(hash_append, drawn(seed + 100 * bits, dtype, bits, exact=exact), guarded)


@pytest.mark.parametrize(("more", "turned"), [("columns", False), ("int8", False), ("", True)])
def test_what_c_does_not_take_is_left_alone(more: str, turned: bool) -> None:
    case = drawn(1, torch.float32, 8, exact=True, sizes=(16,), more=more, turned=turned)
    took, found = run(hash_append, case, guarded)
    assert not took
    for name, column in case.new.columns.items():
        torch.testing.assert_close(found[name], column, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found["free_slot"], case.new.free_slot)


def test_other_strides_and_dtypes_are_refused() -> None:
    case = drawn(1, torch.float32, 8, exact=True)
    matrix = case.rule.matrix(LAYER, case.new.key)
    for rule, new, why in (
        (matrix.T.contiguous().T, case.new, "CPU tensors: a float32 matrix"),
        (torch.zeros(len(matrix), 65), case.new, "at most 64 bits"),
        (matrix, replace(case.new, free_slot=case.new.free_slot.int()), "tensors: int64 layouts"),
    ):
        with pytest.raises(AssertionError, match=why):
            hash_append(replace(case.rule, matrices={LAYER: rule}), new)

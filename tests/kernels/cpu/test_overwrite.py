"""Rows that leave before attention in C, as torch chooses them, in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import step_oracle as twins
import torch
from overwriting import HEADS, full_heads, left

from minikv.kernels.cpu import build, overwrite

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")

RULES = [
    ("streaming_step", ()),
    ("l2_step", ("norm",)),
    ("random_step", (0,)),
    ("random_step", (123456789012345,)),
]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("case", [*HEADS, (3, 8, 9001, 4, torch.bfloat16, 4, 3, 2)], ids=str)
@pytest.mark.parametrize(("name", "more"), RULES)
def test_the_rows_that_leave(
    name: str, more: tuple[object, ...], case: tuple[Any, ...], hidden: bool
) -> None:
    """Those of the policy's torch form; of equal norms the oldest; with threads, too."""
    rows, free_slot, columns = full_heads(case, hidden=hidden)
    want = left(getattr(twins, name), rows, free_slot, columns, *more)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got = left(getattr(overwrite, name), rows, free_slot, columns, *more)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)
    full = (free_slot < 0) & (rows.length >= rows.cap)
    assert bool((got[0][full] >= 0).all())
    assert bool((got[1][~full] == 77).all())


def test_without_memory_nothing_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def minikv_overwrite(self, *given: object) -> int:
            return 1

    monkeypatch.setattr(overwrite, "_library", Failing)
    rows, free_slot, columns = full_heads(HEADS[0], hidden=False)
    with pytest.raises(MemoryError, match="a step found no memory"):
        left(overwrite.streaming_step, rows, free_slot, columns)

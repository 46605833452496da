"""The end of a decode step in Triton, as the policies' own rules in torch end it.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from ragged import segments
from step_cases import POLICIES, check, drawn, smooth
from triton_device import close, guarded, kernel, on_device

from minikv.kernels import Rows

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_and_victims(policy: str) -> None:
    """In tiles of 16 rows, so that a head has several."""
    step = kernel("evict.gpu").evict[policy]
    for seed in range(10):
        check(policy, step, drawn(policy, seed, exact=True, most=70), guarded, block=16)
    for seed in range(3):
        check(policy, step, smooth(policy, seed, most=70), guarded, block=16)


@on_device
@pytest.mark.parametrize(
    ("missing", "lowest", "left"),
    [(99, 6, 6), (99, 7, 3), (8, 7, 3), (8, 6, 3), (8, 5, 5), (1, 7, 3), (1, 6, 6)],
)
def test_the_newest_rows_of_h2o_by_hand(missing: int, lowest: int, left: int) -> None:
    """The four newest of rows 0 to 10 stay: 7 to 10, or 6 to 10 without 8; row 3 is the next."""
    held = [i for i in (3, 0, 9, 5, 1, 8, 10, 2, 7, 4, 6) if i != missing]
    given = torch.tensor([0.01 if i == lowest else 0.02 if i == 3 else 0.1 for i in held])
    start, length, count = segments([len(held)])
    pos = torch.zeros(count, dtype=torch.int32)
    begin = int(start)
    pos[begin : begin + len(held)] = torch.tensor(held, dtype=torch.int32)
    tables = (start[None], length[None], length[None] - 1, pos, torch.tensor(10))
    rows = Rows(*map(guarded, tables), 0, 1, 0)
    free_slot = guarded(torch.zeros((1, 1), dtype=torch.int64))
    sums = guarded(torch.zeros(count))
    kernel("evict.gpu").evict["h2o"](
        guarded(given.log().view(1, 1, 1, -1)),
        guarded(torch.zeros(1, 1, 1)),
        rows,
        free_slot,
        [sums],
        guarded(torch.tensor([[4]])),
        block=16,
    )
    assert held[int(free_slot) - begin] == left
    close(sums[begin : begin + len(held)], given)

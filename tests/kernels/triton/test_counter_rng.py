"""Random numbers in Triton, as torch makes them, to the bit, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from triton_device import guarded, kernel, on_device, randoms

from minikv.kernels.torch import counter_rng as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize("seed", [0, 1, (1 << 31) - 1, 123456789012345])
@pytest.mark.parametrize(("heads", "count"), [(1, 1), (3, 40), (2, 1300)])
def test_a_number_for_each_row(heads: int, count: int, seed: int) -> None:
    pos = torch.randint(-1, 1 << 40, (heads, count), generator=randoms(heads))
    made = kernel("triton.counter_rng").row_uniform
    got = made(seed, 5, 4096, guarded(pos))
    assert torch.equal(got.cpu(), plain_torch.row_uniform(seed, 5, 4096, pos))
    line = torch.arange(count).expand(heads, count)  # of a first prompt: all heads alike
    got = made(seed, 5, 4096, guarded(line[0]).expand(heads, count))
    assert torch.equal(got.cpu(), plain_torch.row_uniform(seed, 5, 4096, line))

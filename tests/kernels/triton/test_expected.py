"""Expected Attention in Triton, as torch says, on odd sizes, in NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton_device import close, draw, guarded, kernel, on_device, randoms

from minikv.kernels.torch import expected as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


def turn(size: int) -> Tensor:
    """A mean of rotations: shorter than one."""
    angle = torch.rand((9, size // 2), generator=randoms(8)) * 7
    cos, sin = angle.cos().mean(0).diag(), angle.sin().mean(0).diag()
    return torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))


@on_device
@pytest.mark.parametrize(
    ("heads", "group", "tokens", "size", "dtype"),
    [
        (2, 3, 150, 64, torch.bfloat16),
        (1, 1, 1, 80, torch.float16),
        (3, 2, 70, 24, torch.float32),
        (1, 2, 0, 16, torch.bfloat16),
    ],
    ids=str,
)
def test_moments(heads: int, group: int, tokens: int, size: int, dtype: torch.dtype) -> None:
    """Queries lie in memory as those of a chunk, and come in two pieces."""
    made = kernel("triton.expected")
    q = draw(1, (tokens + 5, heads, group, size), dtype) + 1.0
    angle = torch.rand((tokens + 5, size // 2), generator=randoms(2)).double() * 1e5
    sums = torch.zeros((heads, group, size), dtype=torch.float64)
    outer = torch.zeros((heads, group, size, size), dtype=torch.float64)
    want, got = (sums, outer), (guarded(sums), guarded(outer))
    there, turned = guarded(q), guarded(angle)
    for part in (slice(0, 5), slice(5, tokens + 5)):
        want = plain_torch.added_moments(*want, q[part].permute(1, 2, 0, 3), angle[part])
        got = made.added_moments(*got, there[part].permute(1, 2, 0, 3), turned[part])
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float64
        close(mine, theirs, 1e-11)
    by = turn(size)
    for count in (tokens + 5, 0):
        found = made.turned_moments(*got, count, guarded(by))
        for mine, theirs in zip(found, plain_torch.turned_moments(*want, count, by), strict=True):
            assert mine.dtype == torch.float32
            close(mine, theirs, 1e-4)


@on_device
@pytest.mark.parametrize(
    ("heads", "group", "rows", "size", "dtype"),
    [
        (2, 3, 150, 64, torch.bfloat16),
        (1, 1, 1, 80, torch.float16),
        (3, 2, 70, 24, torch.float32),
        (1, 2, 40, 256, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("spread", "values"), [(True, True), (True, False), (False, True)])
def test_attention_of_expected_queries(
    heads: int, group: int, rows: int, size: int, dtype: torch.dtype, spread: bool, values: bool
) -> None:
    """Rows that are not free hold anything. The last head, if there are several, has none."""
    key, value = draw(1, (rows, heads, size), dtype), draw(2, (heads, rows, size), dtype)
    mean = draw(3, (heads, group, size), torch.float32)
    half = draw(4, (heads, group, size, size), torch.float32) / math.sqrt(size)
    covariance = half @ half.transpose(2, 3)
    free = torch.rand((heads, rows), generator=randoms(5)) < 0.8
    free[:, -1] = True
    free[1:, :] &= torch.arange(heads)[1:, None] < heads - 1
    key[rows // 2] = math.nan
    free[:, rows // 2] &= rows == 1
    key[rows // 2 :][: int(rows == 1)] = 1.0
    rest = covariance if spread else None, value if values else None, 0.5
    want = plain_torch.expected_attention(key.transpose(0, 1), free, mean, *rest, most=99)
    given = [None if t is None else guarded(t) for t in rest[:2]]
    got = kernel("triton.expected").expected_attention(
        guarded(key).transpose(0, 1), guarded(free), guarded(mean), *given, 0.5
    )
    close(got, want, 2e-5)

"""Means over the heads that hold a position in Triton, as torch makes them, to the bit, in guarded
memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from triton_device import draw, guarded, kernel, on_device, randoms

from minikv.kernels.torch import heads_mean as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(
    ("heads", "rows", "left"), [(1, 1, 0), (8, 40, 0), (8, 40, 1 << 30), (3, 700, -1)]
)
def test_means_over_heads(
    heads: int, rows: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads hold different positions in different order, and some rows are none. `left` is in the
    memory before, as any number can be."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(left))
    end = rows + rows // 3 + 1
    values = draw(1, (heads, rows), torch.float32).mul(9).exp()
    made = kernel("triton.heads_mean").heads_mean
    pos = torch.stack([torch.randperm(end, generator=randoms(h))[:rows] for h in range(heads)])
    pos[1:, 3::5] = -1
    got = made(guarded(values), guarded(pos), end).cpu()
    want = plain_torch.heads_mean(values, pos, end)
    assert torch.equal(got[pos >= 0], want[pos >= 0])
    line = torch.arange(rows).expand(heads, rows)  # of a first prompt: all heads alike
    got = made(guarded(values), guarded(line[0]).expand(heads, rows), rows).cpu()
    assert torch.equal(got, plain_torch.heads_mean(values, line, rows))

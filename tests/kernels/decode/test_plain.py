"""What torch on a CPU converts and caches."""

from __future__ import annotations

import math

import pytest
import torch

from minikv import kernels
from minikv.kernels.decode import plain_cpu as decode_cpu
from minikv.kernels.native import choice


@pytest.mark.parametrize("lengths", [(40, 40, 40), (40, 17, 23), (40, 0, 3)])
@pytest.mark.parametrize("most", [1 << 22, 100])
def test_without_products_of_bfloat16_float32_multiplies(
    lengths: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are not rounded to bfloat16, however many rows are converted together."""
    generator = torch.Generator().manual_seed(1)
    length = torch.tensor(lengths)
    start, rows = torch.arange(3) * 41, 3 * 41
    q = torch.randn(3, 2, 64, generator=generator).bfloat16()
    k, v = torch.randn(2, rows, 64, generator=generator).bfloat16().unbind()

    def off(native: bool) -> float:
        """The largest error of a logit, which is float32 whatever multiplied."""
        monkeypatch.setattr(choice, "multiplies_bf16", lambda: native)
        monkeypatch.setattr(decode_cpu, "_CONVERTED", most)
        logits = torch.full((3, 2, 40), math.nan)
        decode_cpu.ragged_attention(q, kernels.Segments(k, v, start, length, 40), logits)
        worst = 0.0
        for h, n in enumerate(lengths):
            want = q[h].double() @ k[start[h] : start[h] + n].double().T / 8
            worst = max(worst, float((logits[h, :, :n] - want).abs().max()) if n else 0.0)
        return worst

    assert off(native=False) < 1e-5
    assert off(native=True) > 1e-4

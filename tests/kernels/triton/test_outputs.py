"""How long values are behind the output projection, in Triton, as torch says, on odd sizes, in
NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from triton_device import close, draw, guarded, kernel, on_device

from minikv.kernels.torch import outputs as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(
    ("heads", "group", "rows", "size", "hidden", "dtype"),
    [
        (3, 2, 37, 64, 100, torch.bfloat16),
        (1, 1, 1, 80, 7, torch.float16),
        (2, 3, 140, 16, 65, torch.float32),
        (1, 2, 5, 256, 40, torch.bfloat16),
    ],
    ids=str,
)
def test_norms_behind_the_projection(
    heads: int,
    group: int,
    rows: int,
    size: int,
    hidden: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = draw(1, (heads, rows, size), dtype)
    weight = draw(2, (hidden, heads * group * size), dtype)

    def output(t: torch.Tensor) -> torch.Tensor:
        """As the network's matrix lies in memory."""
        return t.T.unflatten(0, (heads, group, size))

    got = kernel("triton.outputs").output_norms(guarded(value), output(guarded(weight)))
    close(got, plain_torch.output_norms(value, output(weight)), 1e-4)
    made = kernel("triton.outputs")
    for numbers in (made._WEIGHTS, 1):  # all heads at once, and one after the other
        monkeypatch.setattr(made, "_WEIGHTS", numbers)
        got = made.output_lengths(guarded(value), output(guarded(weight)))
        close(got, plain_torch.output_lengths(value, output(weight), 99), 1e-4)


@on_device
def test_a_projection_in_another_precision() -> None:
    value, output = draw(1, (2, 9, 16), torch.bfloat16), draw(2, (2, 2, 16, 24), torch.float32)
    got = kernel("triton.outputs").output_norms(guarded(value), guarded(output))
    close(got, plain_torch.output_norms(value, output))

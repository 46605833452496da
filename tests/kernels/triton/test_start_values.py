"""The columns of step policies after a prompt, in Triton, as torch makes them, to the bit, in
guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import step_oracle
import torch
from triton_device import draw, guarded, kernel, on_device, randoms

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(
    ("heads", "group", "rows", "early", "observed"),
    [(1, 1, 1, 0, 1), (3, 4, 600, 200, 32), (2, 3, 40, 40, 7), (2, 2, 70, 0, 64)],
)
@pytest.mark.parametrize(
    ("pool", "lead", "causal"), [(1, 1.0, True), (7, 3.3, True), (5, 2.0, False)]
)
def test_rocos_statistics(
    heads: int,
    group: int,
    rows: int,
    early: int,
    observed: int,
    pool: int,
    lead: float,
    causal: bool,
) -> None:
    """Earlier rows lie in any order, with gaps, and the first of the prompt's slid out."""
    position = 2 * early + rows
    pos = 2 * early + torch.arange(rows).repeat(heads, 1)
    for h in range(heads):
        pos[h, :early] = torch.randperm(2 * early, generator=randoms(h))[:early]
    pos[:, early : early + 3] = -1
    pos[:, -1] = position - 1
    pos[:, :early:9] = -1
    order = pos[:, :early].argsort(dim=1, stable=True)
    wide = draw(1, (heads, group + 1, rows + 3), torch.float32).abs()
    mass, squares = wide[:, :group, 3:], wide[:, group, 3:]
    old = draw(2, (3, heads, rows), torch.float32).abs()
    rest = position, observed, position - min(observed, 32), pool, lead
    want = step_oracle.roco_start(mass, squares, pos, order, [*old], *rest, causal=causal)
    there = guarded(wide)
    given = there[:, :group, 3:], there[:, group, 3:], guarded(pos), guarded(order)
    made = kernel("triton.start_values").roco_start
    got = made(*given, [*guarded(old)], *rest, causal=causal)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.cpu(), theirs)

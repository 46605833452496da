"""HashEvict: codes of keys and queries, and their distance."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from minikv import policies
from minikv.policies.hashevict import HashEvict, distances


@pytest.mark.parametrize("bits", [4, 15, 16, 31, 32, 33, 47, 63, 64])
def test_distances_are_added_over_all_probes(bits: int) -> None:
    """Also of 64 bits, where the highest is the sign."""
    made = torch.Generator().manual_seed(bits)
    stored, probes = (
        (torch.rand((2, n, bits), generator=made) < 0.4).to(torch.int64) << torch.arange(bits)
        for n in (9, 5)
    )
    found = distances(stored.sum(2), probes.sum(2), bits)
    differ = (stored[:, :, None] != probes[:, None]).sum((2, 3))
    assert found.tolist() == differ.tolist()


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        *product([torch.int16], [4, 8, 15]),
        *product([torch.int32], [16, 31]),
        *product([torch.int64], [32, 33, 47, 60, 63, 64]),
    ],
)
def test_a_code_has_every_bit_where_it_is_stored(stored: torch.dtype, bits: int) -> None:
    """Bit i is the sign of the i-th product. The column is the smallest integer with a bit to
    spare, of 16, 32 or 64 bits, of which the first one is the sign."""
    step = policies.step_policy("hashevict", {"bits": bits})
    assert isinstance(step, HashEvict)
    assert [*step.columns.values()] == [stored]
    keys = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    matrix = step.matrix(0, keys)
    assert matrix.shape == (16, bits)
    codes = step.of_key(0, keys[None, None])["code"][0, 0].to(torch.int64)
    signs = (keys @ matrix >= 0).tolist()
    assert [[(n >> i) & 1 == 1 for i in range(bits)] for n in codes.tolist()] == signs

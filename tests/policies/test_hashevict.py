"""HashEvict: codes of keys and queries, and their distance."""

from __future__ import annotations

import pytest
import torch
from views import rule

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


@pytest.mark.parametrize("bits", [4, 15, 16, 31, 32, 33, 47, 63, 64])
def test_a_code_has_every_bit_where_it_is_stored(bits: int) -> None:
    """Bit i is the sign of the i-th product, and the column is wide enough for all."""
    step = policies.step_policy("hashevict", {"bits": bits})
    assert isinstance(step, HashEvict)
    keys = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    matrix = step.matrix(0, keys)
    assert matrix.shape == (16, bits)
    stored = step.of_key(0, keys[None, None])["code"][0, 0].to(torch.int64)
    signs = (keys @ matrix >= 0).tolist()
    assert [[(n >> i) & 1 == 1 for i in range(bits)] for n in stored.tolist()] == signs


def test_a_code_is_stored_in_the_smallest_integer_with_a_bit_to_spare() -> None:
    """Of 16, 32 or 64 bits; the first one is the sign."""
    found = {}
    for bits in (8, 15, 16, 31, 32, 60):
        policy = rule("hashevict", {"bits": bits})
        (found[bits],) = policy.columns.values()
    short, wide = torch.int16, torch.int32
    assert found == {8: short, 15: short, 16: wide, 31: wide, 32: torch.int64, 60: torch.int64}

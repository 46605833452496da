"""Attention over disjoint sets of rows, joined in C, against the twin in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minikv.kernels.attention import cpu as native
from minikv.kernels.attention import plain as twin
from minikv.kernels.native.build import library

pytestmark = pytest.mark.skipif(library()[0] is None, reason="no kernels in C here")

Parts = list[tuple[Tensor, Tensor]]


def draw(
    count: int,
    heads: int,
    group: int,
    rows: int,
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Parts:
    """Parts whose outputs lie [T, H, G, D] in memory, and some of which saw nothing."""
    made = torch.Generator().manual_seed(seed)
    parts = []
    for i in range(count):
        out = torch.randn(rows, heads, group, size, generator=made).to(dtype).permute(1, 2, 0, 3)
        lse = torch.randn(heads, group, rows, generator=made) * 20
        if i:
            gone = torch.rand(lse.shape, generator=made) < 0.2
            out = out.masked_fill(gone[..., None], 0.0)
            lse = lse.masked_fill(gone, -math.inf)
        parts.append((out, lse))
    return parts


def check(parts: Parts) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "merge", None)
        out, lse = native.merge(parts)
    want = [(out.double(), lse.double()) for out, lse in parts]
    wanted, sums = twin.merge(want)
    assert (out.dtype, lse.dtype) == (parts[0][0].dtype, torch.float32)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-6, atol=1e-5)
    close = {"rtol": 2**-8, "atol": 1e-5} if out.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out.double(), wanted, **(close or {"rtol": 1e-5, "atol": 1e-5}))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 8),
    heads=st.integers(1, 4),
    group=st.integers(1, 4),
    rows=st.integers(1, 40),
    size=st.integers(1, 80),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_size(
    count: int, heads: int, group: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    check(draw(count, heads, group, rows, size, dtype))


def test_parts_that_lie_otherwise_in_memory() -> None:
    (first, lse), (second, other) = draw(2, 2, 3, 7, 256)
    wide = torch.zeros(2, 3, 7, 300, dtype=first.dtype)
    wide[..., :256] = first
    check([(wide[..., :256], lse.transpose(1, 2).contiguous().transpose(1, 2)), (second, other)])


def test_a_part_that_saw_nothing_is_not_read() -> None:
    (first, lse), (second, _) = draw(2, 1, 2, 5, 16)
    nothing = second.fill_(math.nan), torch.full_like(lse, -math.inf)
    out, whole = native.merge([(first, lse), nothing])
    assert torch.equal(out, first)
    torch.testing.assert_close(whole, lse)
    out, whole = native.merge([nothing, nothing])
    assert bool((out == 0).all())
    assert bool((whole == -math.inf).all())


def test_what_is_not_a_number_stays_so() -> None:
    parts = draw(2, 1, 1, 3, 16, torch.float32)
    parts[1][1][0, 0, 1] = math.nan
    out, lse = native.merge(parts)
    assert lse[0, 0].isnan().tolist() == [False, True, False]
    assert out[0, 0].isnan().all(-1).tolist() == [False, True, False]
    nothing = parts[0][0], torch.full_like(parts[0][1], -math.inf)
    for order in ([parts[1], nothing], [nothing, parts[1]]):
        assert native.merge(order)[1][0, 0].isnan().tolist() == [False, True, False]


def test_one_part_is_what_it_was() -> None:
    parts = draw(1, 2, 2, 3, 16)
    assert native.merge(parts) is parts[0]


@pytest.mark.parametrize("what", ["float16", "mixed", "wide", "many", "float64 sums", "turned"])
def test_the_twin_takes_the_rest(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, count = {"wide": 257}.get(what, 16), {"many": 9}.get(what, 2)
    parts = draw(count, 2, 2, 3, size)
    if what == "float16":
        parts = [(out.half(), lse) for out, lse in parts]
    elif what == "mixed":
        parts[1] = parts[1][0].float(), parts[1][1]
    elif what == "float64 sums":
        parts[1] = parts[1][0], parts[1][1].double()
    elif what == "turned":
        out = parts[1][0].transpose(2, 3).contiguous().transpose(2, 3)
        parts[1] = out, parts[1][1]
    asked = []
    monkeypatch.setattr(twin, "merge", asked.append)
    native.merge(parts)
    assert asked == [parts]

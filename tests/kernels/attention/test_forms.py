"""Attention over disjoint sets of rows, joined in every form, against one softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch
from drawing import randoms
from forms import Form, forms
from torch import Tensor
from triton_device import close

from minikv.kernels.attention import cpu as native
from minikv.kernels.attention import plain as twin
from minikv.kernels.native.build import library

needs_c = pytest.mark.skipif(library()[0] is None, reason="no kernels in C here")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Parts = list[tuple[Tensor, Tensor]]


def draw(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Parts:
    """Parts [H, G, T, D], some of which saw nothing, NaN in their place; every second one is
    [T, H, G, D] in memory, and all queries saw a row of the last part."""
    parts = []
    for i in range(count):
        out, lse = randoms(i, *shape, dtype=dtype), randoms(10 + i, *shape[:3], by=9.0)
        gone = torch.rand(lse.shape, generator=torch.Generator().manual_seed(i)) < 0.3
        if i < count - 1:
            out = out.masked_fill(gone[..., None], 0.0)
            lse = lse.masked_fill(gone, -math.inf)
        turned = out.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        parts.append((turned if i % 2 else out, lse))
    return parts


def joined(parts: Parts) -> tuple[Tensor, Tensor]:
    """In float64."""
    lse = torch.stack([sums.double() for _, sums in parts])
    outs = torch.stack([out.double() for out, _ in parts])
    return (lse.softmax(0)[..., None] * outs).sum(0), lse.logsumexp(0)


@pytest.mark.parametrize("form", forms("merge"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((2, 3, 5, 64), 2),
        ((1, 1, 1, 80), 2),
        ((3, 4, 37, 128), 2),
        ((2, 2, 17, 16), 4),
        ((1, 2, 3, 96), 1),
        ((2, 3, 7, 256), 8),
    ],
)
def test_parts_are_joined(
    form: Form,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if form.by == "c" and dtype != torch.float16:
        monkeypatch.setattr(twin, "merge", None)
    parts = draw(count, shape, dtype)
    given = [
        (form.place(out.permute(2, 0, 1, 3)).permute(1, 2, 0, 3) if i % 2 else form.place(out), lse)
        for i, (out, lse) in enumerate(parts)
    ]
    out, lse = form([(out, form.place(lse)) for out, lse in given])
    want, sums = joined(parts)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    close(out, want, 2**-8 if dtype == torch.bfloat16 and form.by == "c" else form.loose(dtype))
    close(lse, sums)
    if form.by == "triton" and count > 1:
        assert out.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("form", forms("merge"))
def test_a_part_that_saw_nothing_is_not_read(form: Form) -> None:
    if form.by == "torch":
        pytest.skip("in torch it holds zeros")
    shape = (2, 2, 9, 32)
    out, lse = randoms(1, *shape), randoms(2, *shape[:3])
    nothing = torch.full(shape, math.nan), torch.full(shape[:3], -math.inf)
    for parts in ([nothing, nothing, (out, lse)], [(out, lse), nothing]):
        got, sums = form([(form.place(a), form.place(b)) for a, b in parts])
        close(got, out)
        close(sums, lse)


@needs_c
def test_what_c_makes_of_nothing_and_of_what_is_not_a_number() -> None:
    (first, lse), _ = parts = draw(2, (1, 1, 3, 16), torch.float32)
    nothing = torch.full_like(first, math.nan), torch.full_like(lse, -math.inf)
    out, whole = native.merge([nothing, nothing])
    assert bool((out == 0).all())
    assert bool((whole == -math.inf).all())
    parts[1][1][0, 0, 1] = math.nan
    out, whole = native.merge(parts)
    assert whole[0, 0].isnan().tolist() == [False, True, False]
    assert out[0, 0].isnan().all(-1).tolist() == [False, True, False]
    for order in ([parts[1], nothing], [nothing, parts[1]]):
        assert native.merge(order)[1][0, 0].isnan().tolist() == [False, True, False]


@needs_c
def test_parts_that_are_otherwise_in_memory() -> None:
    (first, lse), (second, other) = parts = draw(2, (2, 3, 7, 256))
    wide = torch.zeros(2, 3, 7, 300, dtype=first.dtype)
    wide[..., :256] = first
    turned = lse.transpose(1, 2).contiguous().transpose(1, 2)
    out, whole = native.merge([(wide[..., :256], turned), (second, other)])
    for got, want in zip((out, whole), native.merge(parts), strict=True):
        assert torch.equal(got, want)
    assert native.merge([parts[0]])[0] is first


@pytest.mark.parametrize("what", ["float16", "mixed", "wide", "many", "float64 sums", "turned"])
def test_torch_takes_the_rest(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, count = {"wide": 257}.get(what, 16), {"many": 9}.get(what, 2)
    parts = draw(count, (2, 2, 3, size), torch.float16 if what == "float16" else torch.bfloat16)
    out, lse = parts[1]
    if what == "mixed":
        parts[1] = out.float(), lse
    elif what == "float64 sums":
        parts[1] = out, lse.double()
    elif what == "turned":
        parts[1] = out.transpose(2, 3).contiguous().transpose(2, 3), lse
    asked = []
    monkeypatch.setattr(twin, "merge", asked.append)
    native.merge(parts)
    assert asked == [parts]

"""The small operators of a layer in every form, against float64, on odd sizes, in guarded memory;
and the network that takes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forms import Form, forms
from tensors import angles, randoms, untouched
from triton_device import close

from minikv.models.rope import RopeConfig, Rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("form", forms("add_norm"))
@dtypes
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 48), (3, 129), (17, 576), (2, 16400)])
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(form: Form, dtype: torch.dtype, rows: int, size: int, adds: bool) -> None:
    """16,400 columns are more than one program holds. In C and torch rows may be apart."""
    x, y = (randoms(i, rows, size, dtype=dtype, by=2.0) for i in (1, 2))
    weight = randoms(3, size, dtype=dtype)
    whole = form.place(torch.cat((x, x), 1))
    there = form.place(x) if form.by == "triton" else whole[:, :size]
    got = form(there, form.place(y) if adds else None, form.place(weight), 1e-5)
    total = (x + y if adds else x).double()
    want = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(got, want, form.loose(dtype))
    close(there, total, 1e-6 if dtype == torch.float32 else form.loose(dtype))
    assert untouched(there if form.by == "triton" else whole)
    assert torch.equal(whole[:, size:].cpu(), x)


@pytest.mark.parametrize("form", forms("rotate"))
@dtypes
@pytest.mark.parametrize(
    ("rows", "heads", "more", "size"),
    [(1, 3, 2, 64), (5, 9, 0, 80), (7, 5, 3, 22), (2, 16, 8, 128), (3, 1, 1, 256)],
)
def test_rotate(form: Form, dtype: Any, rows: int, heads: int, more: int, size: int) -> None:
    """Of some heads of a product: rows do not lie close together."""
    qkv = randoms(1, rows, heads + more, size, dtype=dtype)
    cos, sin = angles(2, rows, size, dtype)
    there = form.place(qkv)
    there[:, heads:] = math.nan
    got = form(there[:, :heads], form.place(cos), form.place(sin))
    assert got.is_contiguous()
    one, two = qkv[:, :heads].double().chunk(2, -1)
    c, s = cos.double().chunk(2, -1)[0], sin.double().chunk(2, -1)[1]
    close(got, torch.cat((one * c - two * s, two * c + one * s), -1), form.loose(dtype))


@pytest.mark.parametrize("form", forms("silu_mul"))
@dtypes
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 1025), (200, 64)])
def test_silu_mul(form: Form, dtype: torch.dtype, rows: int, size: int) -> None:
    both = randoms(1, rows, 2 * size, dtype=dtype, by=20.0)
    gate, up = both.double().chunk(2, 1)
    there = form.place(both)
    got = form(there)
    assert got.data_ptr() == there.data_ptr()
    close(got, F.silu(gate) * up, form.loose(dtype))
    assert untouched(there)
    close(there[:, size:], up)


@pytest.mark.parametrize("form", forms("silu_mul"))
def test_silu_at_its_ends(form: Form) -> None:
    for value in (0.0, -1e-3, -20.0, -87.5, -200.0, 80.0, math.inf, math.nan):
        both = form.place(torch.tensor([[value] * 17 + [1.0] * 17]))
        close(form(both)[0], F.silu(torch.tensor(value)).expand(17), 1e-6)


@pytest.mark.parametrize("form", forms("rotary_table"))
@dtypes
@pytest.mark.parametrize(("size", "scale"), [(16, 1.0), (80, 1.25), (256, 1.0)])
@pytest.mark.parametrize("position", [0, 7, 131071])
def test_the_table_of_a_position(
    form: Form, dtype: Any, size: int, scale: float, position: int
) -> None:
    """That of the network, in float32 up to the last cast."""
    rotary = Rotary(RopeConfig(kind="yarn", factor=4.0, original=64, attention_factor=scale), size)
    at = form.place(torch.tensor(position))
    got = form(at, form.place(rotary.inverse), rotary.scale, dtype)
    for mine, want in zip(got, rotary.table(position, 1, dtype), strict=True):
        assert (mine.shape, mine.dtype) == (want.shape, want.dtype)
        close(mine, want, form.loose(dtype))

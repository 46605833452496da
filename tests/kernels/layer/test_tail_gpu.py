"""The part of a layer after attention in four launches, in Triton, against the separate calls, on
odd sizes, in NaN-guarded memory; and the network that takes it."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import tail_twin
import torch
from pairwise import pairwise
from tensors import untouched
from torch import Tensor
from triton_device import draw, guarded, kernel, on_device

from minikv.kernels.product.matrix import Matrix
from minikv.models.linear import Plain, as_stored, kept

pytest.importorskip("triton", reason="no Triton on this system")

FORMS = ("auto", "int8", "int4")
BFLOAT16 = torch.bfloat16
SIZES = [
    (96, 64, 32, 9),  # fewer columns than are read at once; rows left over
    (32, 4224, 32, 20),  # more, and not whole
]
"""Columns of x, of attention's result, of the MLP, and rows of the product that follows."""


def matrix(
    seed: int, outs: int, n: int, form: str, dtype: torch.dtype, biased: bool
) -> tuple[Matrix, Matrix]:
    """Random weights as the kernels read them, in guarded memory; and as they are."""
    bias = draw(seed + 50, (outs,), dtype) if biased else None
    plain = Plain(draw(seed, (outs, n), dtype) / n**0.5, bias)
    made = as_stored(
        kept(plain, form, lambda shape, dtype: torch.empty(*shape, dtype=dtype), packing=None)
    )
    assert made is not None
    assert (made.scales is None) == (form == "auto")
    there = {
        name: None if part is None else guarded(part)
        for name, part in (("scales", made.scales), ("bias", made.bias))
    }
    return replace(made, weights=guarded(made.weights), **there), made


def near(got: Tensor, want: Tensor, form: str) -> None:
    """As a whole: one number of a product may be the small rest of large ones."""
    loose = 2e-2 if got.dtype == BFLOAT16 else 5e-3 if form == "int4" else 2e-3
    got, want = got.cpu().double(), want.cpu().double()
    assert got.shape == want.shape
    assert float((got - want).norm()) <= loose * float(want.norm())


CASES = pairwise(SIZES, FORMS, (BFLOAT16, torch.float16), (False, True), (False, True))


@on_device
@pytest.mark.parametrize(("sizes", "form", "dtype", "biased", "last"), CASES)
def test_a_layer_is_that_of_the_separate_calls(
    sizes: tuple[int, ...], form: str, dtype: torch.dtype, biased: bool, last: bool
) -> None:
    hidden, attended, mlp, rows = sizes
    shapes = ((hidden, attended), (2 * mlp, hidden), (hidden, mlp), (rows, hidden))
    both = [matrix(i, *shape, form, dtype, biased) for i, shape in enumerate(shapes)]
    norms = [draw(i, (hidden,), dtype) for i in (10, 11)]
    x, mixed = draw(12, (1, hidden), dtype, 2.0), draw(13, (1, attended), dtype)
    there, given = guarded(x), guarded(mixed)
    ours, theirs = ([pair[i] for pair in both] for i in (0, 1))
    if last:
        ours[3] = theirs[3] = None  # type: ignore[call-overload]
    made = kernel("layer.tail_gpu").layer_tail(*ours, *map(guarded, norms), 1e-5)
    got = made(there, given)
    want = tail_twin.layer_tail(*theirs, *norms, 1e-5)(x, mixed)
    assert got.dtype == dtype
    near(got, want, form)
    near(there, x, form)
    assert untouched(there)
    assert untouched(given)


@on_device
@pytest.mark.parametrize(("form", "gated", "biased"), pairwise(FORMS, (0, 1), (False, True)))
def test_programs_that_go_through_several_tiles(form: str, gated: int, biased: bool) -> None:
    """One, two, or one for each tile, of which the last has rows left over: the same bits, with
    nothing written beyond the end."""
    tail_gpu = kernel("layer.tail_gpu")
    ours, theirs = matrix(1, 22, 160, form, torch.float16, biased)
    norm, x = draw(2, (160,), torch.float16), draw(3, (1, 160), torch.float16, 3.0)
    then, found = (tail_gpu.GATE if gated else tail_gpu.KEEP), []
    for programs in (0, 1, 2):
        config = tail_gpu.Config(4, 256, 4, programs)
        product = tail_gpu.product_of(ours, torch.float16, config)
        assert tail_gpu.programs_of(config, 22, 160) == (programs or 6)
        out = guarded(torch.full((1, 22 >> gated), torch.nan, dtype=torch.float16))
        found.append(product(guarded(x), out, then, guarded(norm), 1e-6).cpu())
        assert untouched(out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    want = tail_twin.normed_product(theirs, norm, 1e-6)(x)
    near(found[0], tail_twin.layer.silu_mul(want) if gated else want, form)


@on_device
@pytest.mark.parametrize(
    ("form", "dtype", "biased"), pairwise(FORMS, (BFLOAT16, torch.float16), (False, True))
)
def test_the_product_of_a_norm(form: str, dtype: torch.dtype, biased: bool) -> None:
    ours, theirs = matrix(1, 9, 4224, form, dtype, biased)
    norm, x = draw(2, (4224,), dtype), draw(3, (1, 4224), dtype, 3.0)
    there = guarded(x)
    got = kernel("layer.tail_gpu").normed_product(ours, guarded(norm), 1e-6)(there)
    near(got, tail_twin.normed_product(theirs, norm, 1e-6)(x), form)
    assert torch.equal(there.cpu(), x)


@on_device
def test_groups_of_every_size() -> None:
    for columns, group in ((1664, 128), (1600, 64), (1568, 32)):
        ours, theirs = matrix(1, 6, columns, "int4", BFLOAT16, False)
        assert theirs.scales is not None
        assert len(theirs.scales) == columns // group
        x = draw(2, (1, columns), BFLOAT16)
        norm = torch.ones(columns, dtype=BFLOAT16)
        got = kernel("layer.tail_gpu").normed_product(ours, guarded(norm), 1e-6)(guarded(x))
        near(got, tail_twin.normed_product(theirs, norm, 1e-6)(x), "int4")


def test_what_they_do_not_take() -> None:
    """float32; columns or groups that are not whole vectors; rows that lie apart; another layout or
    dtype; a norm that is too long."""
    tail_gpu = importlib.import_module("minikv.kernels.layer.tail_gpu")

    def taken(made: Matrix, norm: Tensor | None = None) -> bool:
        ones = torch.ones(made.n, dtype=BFLOAT16)
        return tail_gpu.normed_product(made, ones if norm is None else norm, 1e-5) is not None

    def zeros(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    plain = Matrix(8, 32, zeros(8, 32))
    four = Matrix(8, 64, zeros(8, 32, dtype=torch.uint8), zeros(2, 8, 2))
    assert taken(plain)
    assert taken(four)
    assert taken(Matrix(8, 32, zeros(8, 32, dtype=torch.int8), zeros(8)))
    for bad in (
        Matrix(8, 32, zeros(8, 32, dtype=torch.float32)),
        Matrix(8, 24, zeros(8, 24)),
        Matrix(8, 32, zeros(8, 64)[:, :32]),
        replace(plain, bias=zeros(16)[::2]),
        replace(four, half=32),
        replace(four, scales=zeros(2, 8, 2, dtype=torch.float32)),
        replace(four, scales=zeros(4, 8, 2)),
        Matrix(8, 192, zeros(8, 96, dtype=torch.uint8), zeros(2, 8, 2)),
        Matrix(8, 16400, zeros(8, 16400)),
    ):
        assert not taken(bad), bad
    assert not taken(plain, torch.ones(32))
    assert not taken(plain, zeros(64)[::2])
    square, wide = Matrix(32, 32, zeros(32, 32)), Matrix(64, 32, zeros(64, 32))
    norm = zeros(32)
    given = square, wide, square
    assert tail_gpu.layer_tail(*given, None, norm, norm, 1e-5) is not None
    assert tail_gpu.layer_tail(*given, square, norm, norm, 1e-5) is not None
    bad = Matrix(32, 32, zeros(32, 32, dtype=torch.float32))
    for i in range(3):
        mixed = [bad if i == j else one for j, one in enumerate(given)]
        assert tail_gpu.layer_tail(*mixed, None, norm, norm, 1e-5) is None
    assert tail_gpu.layer_tail(*given, bad, norm, norm, 1e-5) is None
    assert tail_gpu.layer_tail(*given, square, norm, norm.half(), 1e-5) is None
    assert tail_gpu.layer_tail(*given, square, norm.float(), norm, 1e-5) is None

"""Products of packed weights in C: they equal the specification, on odd sizes, and a row does not
depend on those beside it."""

from __future__ import annotations

import math

import integer_spec as specification
import pytest
import torch
from drawing import randoms
from torch import Tensor

from minikv.kernels.native import build
from minikv.kernels.product import cpu as integer
from minikv.models.linear import Int4, Plain, half_tile

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")

COUNTS = [1, 2, 5, 8, 9, 12, 13, 61]
EIGHT = [(1, 1), (3, 31), (7, 255), (64, 128), (70, 160), (130, 256), (5, 5632), (0, 64), (2, 0)]
FOUR = [(1, 32), (67, 96), (130, 192), (64, 1024), (200, 384)]


def activations(rows: int, columns: int) -> Tensor:
    """Rows that lie apart, with NaN between them; one of zeros, and one with a large number."""
    guarded = torch.full((rows, columns + 3), math.nan, dtype=torch.bfloat16)
    guarded[:, :columns] = randoms(rows, rows, columns, dtype=torch.bfloat16)
    x = guarded[:, :columns]
    x[rows // 2] = 0
    if columns:
        x[rows // 3, columns // 2] = 900.0
    return x


def eight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=numbers)
    return codes, randoms(2, rows, dtype=torch.bfloat16).abs() + 0.1


def near(got: Tensor, want: Tensor) -> None:
    """Both are rounded once, from float32 sums in another order."""
    assert got.shape == want.shape
    off = (got.double() - want.double()).abs()
    assert bool((off <= want.double().abs() / 128 + 1e-5 * want.double().abs().sum(0).mean()).all())
    assert float(off.norm()) <= 1e-3 * float(want.double().norm())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", EIGHT, ids=str)
def test_eight_bits(shape: tuple[int, int], count: int) -> None:
    codes, scale = eight(*shape)
    x = activations(count, shape[1])
    near(integer.int8_product(x, codes, scale), specification.int8_product(x, codes, scale))


@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", FOUR, ids=str)
def test_four_bits(shape: tuple[int, int], count: int, half: int) -> None:
    """Of either layout: what is packed for one is other weights in the other."""
    matrix = Int4(Plain(randoms(2, *shape, dtype=torch.bfloat16)))
    x = activations(count, shape[1])
    parts = (matrix.packed, matrix.scales, half, shape[0])
    near(integer.int4_product(x, *parts), specification.int4_product(x, *parts))


@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize("count", [3, 8, 9, 520])
def test_a_prompt_in_parts_gives_the_same_numbers(count: int, half: int) -> None:
    """Bit for bit, however many rows are multiplied together."""
    x = activations(count, 384)
    codes, scale = eight(130, 384)
    matrix = Int4(Plain(randoms(2, 130, 384, dtype=torch.bfloat16)))
    four = (matrix.packed, matrix.scales, half, 130)
    whole = (integer.int8_product(x, codes, scale), integer.int4_product(x, *four))
    for size in (1, 5, 7, 11, 400):
        parts = x.split(size)
        for made, parted in zip(
            whole,
            (
                [integer.int8_product(part, codes, scale) for part in parts[:60]],
                [integer.int4_product(part, *four) for part in parts[:60]],
            ),
            strict=True,
        ):
            got = torch.cat(parted)
            assert torch.equal(got, made[: len(got)])


@pytest.mark.parametrize("count", [1, 13])
def test_sums_do_not_overflow_and_are_exact(count: int) -> None:
    """The largest codes of both kinds. Steps are powers of two, so nothing is rounded."""
    codes = torch.full((66, 8192), 127, dtype=torch.int8)
    x = torch.full((count, 8192), 127.0, dtype=torch.bfloat16)
    x[:, ::64] = -127.0
    sums = int((codes[0].int() * x[0].int()).sum())
    want = torch.full((count, 66), sums, dtype=torch.float64).bfloat16()
    scale = torch.ones(66, dtype=torch.bfloat16)
    assert torch.equal(integer.int8_product(x, codes, scale), want)
    packed = torch.full((128, 4096), 0xFF, dtype=torch.uint8)
    scales = torch.tensor([1.0, 0.5]).bfloat16().expand(64, 128, 2).contiguous()
    most = int(x[0].int().sum()) * 7.5
    got = integer.int4_product(x, packed, scales, 32, 66)
    assert torch.equal(got, torch.full((count, 66), most, dtype=torch.float64).bfloat16())


@pytest.mark.parametrize("count", [2, 13])
def test_rows_that_are_not_numbers_stay_so(count: int) -> None:
    codes, scale = eight(70, 160)
    matrix = Int4(Plain(randoms(2, 70, 160, dtype=torch.bfloat16)))
    for bad in (math.nan, math.inf, -math.inf):
        x = randoms(1, count, 160, dtype=torch.bfloat16)
        x[1, 150] = bad
        four = integer.int4_product(x, matrix.packed, matrix.scales, half_tile() or 16, 70)
        for made in (integer.int8_product(x, codes, scale), four):
            assert not bool(made[1].isfinite().any())
            assert bool(made[0].isfinite().all())


def test_the_result_is_written_where_it_is_asked_for() -> None:
    """And nothing beside it is."""
    codes, scale = eight(70, 96)
    matrix = Int4(Plain(randoms(2, 70, 96, dtype=torch.bfloat16)))
    for count in (3, 13):
        x = activations(count, 96)
        for made in (
            lambda room, x=x: integer.int8_product(x, codes, scale, room),
            lambda room, x=x: integer.int4_product(x, matrix.packed, matrix.scales, 16, 70, room),
        ):
            room = torch.full((count + 2, 70), 7.0, dtype=torch.bfloat16)
            got = made(room)
            assert got.data_ptr() == room.data_ptr()
            assert torch.equal(got, made(None))
            assert bool((room[count:] == 7).all())


def test_what_does_not_fit_is_refused() -> None:
    """Nothing beside a row is read, and nothing is left unwritten."""
    codes, scale = eight(70, 96)
    x = activations(3, 96)
    small = torch.empty(3, 64, dtype=torch.bfloat16)
    for wrong in (
        (x.float(), codes, scale, None),
        (x[:, :64], codes, scale, None),
        (x, codes.short(), scale, None),
        (x, codes, scale.float(), None),
        (x, codes, scale[:5], None),
        (x, codes, scale, small),
    ):
        with pytest.raises(AssertionError):
            integer.int8_product(*wrong)
    matrix = Int4(Plain(randoms(2, 70, 96, dtype=torch.bfloat16)))
    for packed, half, outs in (
        (matrix.packed[:64], 16, 70),
        (matrix.packed, 8, 70),
        (matrix.packed, 16, 150),
    ):
        with pytest.raises(AssertionError):
            integer.int4_product(x, packed, matrix.scales, half, outs)

"""Products and packing in C, on odd sizes, in memory full of NaN.

Oracles: float64; for activations rounded to eight bits, what the docstring of `int8_product` says,
in torch; for packing, torch's own kernels (models/linear.py), bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product as every
from pathlib import Path

import ggufs
import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from tensors import randoms, torch_threads
from torch import Tensor

from minikv.kernels import dispatch, to_codes
from minikv.kernels.native import build
from minikv.kernels.product import cpu as product
from minikv.models import linear
from minikv.models.blocks import KINDS, Blocks, Kind
from minikv.models.linear import Int4, Int8, Plain, as_stored, half_tile

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")
known = pytest.mark.skipif(half_tile() is None, reason="torch's layout is not known here")
tiles = pytest.mark.skipif(
    build.library()[0] is None or not product.TILES.available(), reason="no tiles"
)
BFLOAT16 = torch.bfloat16


def amid_nan(x: Tensor) -> Tensor:
    """The same numbers with NaN above and below."""
    around = torch.full((len(x) + 2, x.shape[1]), math.nan, dtype=x.dtype)
    around[1:-1] = x
    return around[1:-1]


def activations(rows: int, columns: int) -> Tensor:
    """Rows that lie apart, with NaN between them; one of zeros, and one with a large number."""
    apart = torch.full((rows, columns + 3), math.nan, dtype=BFLOAT16)
    apart[:, :columns] = randoms(rows, rows, columns, dtype=BFLOAT16)
    x = apart[:, :columns]
    x[rows // 2] = 0
    if columns:
        x[rows // 3, columns // 2] = 900.0
    return x


# -- one row, plain weights -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (3, 31), (7, 255), (33, 256), (300, 768), (5, 5632), (0, 64), (2, 0)],
)
def test_products_of_one_row(rows: int, columns: int) -> None:
    """Rounded once, at the end."""
    weight = amid_nan(randoms(1, rows, columns, dtype=BFLOAT16))
    x = randoms(2, 1, columns, dtype=BFLOAT16)
    want = x.double() @ weight.double().T
    size = (x.double().abs() @ weight.double().abs().T).clamp_min(1e-9)
    got = product.row_product(x, weight)
    assert got.shape == (1, rows)
    assert bool(((got.double() - want).abs() <= want.abs() / 256 + 1e-6 * size).all())
    if rows and columns:
        x[0, columns // 2] = math.nan
        assert not bool(product.row_product(x, weight).isfinite().any())


def test_other_rows_are_refused_as_torch_refuses_them_or_computed() -> None:
    x, weight = randoms(1, 1, 64, dtype=BFLOAT16), randoms(2, 4, 64, dtype=BFLOAT16)
    for wrong in (x.float(), x[:, :32], x.expand(2, 64)[:, :63]):
        with pytest.raises(RuntimeError):
            product.row_product(wrong, weight)
    apart = torch.stack((weight, weight), 2)[..., 0]  # every other number
    want = product.row_product(x, weight)
    torch.testing.assert_close(product.row_product(x, apart), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("threads", "torchs", "ours"), [(4, 4, True), (1, 4, False), (1, 1, True)])
def test_products_without_threads_are_left_to_torch(
    threads: int, torchs: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "threads", lambda: threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    chosen, _ = dispatch.choose(torch.device("cpu"), "auto", 64, BFLOAT16)
    assert (chosen.name, chosen.products) == ("native", ours)


# -- packed weights and rounded activations ---------------------------------------------------

Made = Callable[..., Tensor]


def packed(form: str, rows: int, columns: int) -> tuple[Made, Tensor]:
    """A product with weights [rows, columns], and the weights in float64. form: int8, or the half
    tile of four bits: what is packed for one is other weights in the other."""
    numbers = torch.Generator().manual_seed(3)
    if form == "int8":
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=numbers)
        scale = randoms(2, rows, dtype=BFLOAT16).abs() + 0.1
        weights = codes.double() * scale.double()[:, None]
        return lambda x, out=None: product.int8_product(x, codes, scale, out), weights
    half, padded, group = int(form), -(-rows // 64) * 64, linear.group_of(columns) or 0
    bytes_ = torch.randint(0, 256, (padded, columns // 2), generator=numbers).to(torch.uint8)
    scales = randoms(2, columns // group, padded, 2, dtype=BFLOAT16)
    tiled = bytes_.view(-1, columns, half)
    steps = torch.cat((tiled & 15, tiled >> 4), 2).transpose(1, 2).reshape(padded, columns)
    by, middle = scales.double().repeat_interleave(group, 0).unbind(2)
    weights = ((steps.double() - 8) * by.T + middle.T)[:rows]
    return lambda x, out=None: product.int4_product(x, bytes_, scales, half, rows, out), weights


def rounded(x: Tensor) -> Tensor:
    """Each block of 32 columns as eight bits and back, float64."""
    blocks = F.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    codes, scale = to_codes(blocks)
    return (codes.double() * scale.double()[..., None]).view(len(x), -1)[:, : x.shape[1]]


SIZES = [(1, 32), (67, 96), (130, 192), (64, 1024), (200, 384)]
EIGHT = [(1, 1), (3, 31), (7, 255), (70, 160), (5, 5632), (0, 64), (2, 0)]
COUNTS = [1, 2, 5, 8, 9, 12, 13, 61]
FORMS = ("int8", "16", "32")


@pytest.mark.parametrize(
    ("form", "shape", "count"),
    [*pairwise(FORMS, SIZES, COUNTS), *every(("int8",), EIGHT, COUNTS)],
    ids=str,
)
def test_products_of_packed_weights(form: str, shape: tuple[int, int], count: int) -> None:
    """Both are rounded once, from sums in another order. The result is written where it is asked
    for, and nothing beside it is."""
    multiply, weights = packed(form, *shape)
    x = activations(count, shape[1])
    want = (rounded(x) @ weights.T).to(BFLOAT16).double()
    room = torch.full((count + 2, shape[0]), 7.0, dtype=BFLOAT16)
    got = multiply(x, room)
    assert got.data_ptr() == room.data_ptr()
    assert bool((room[count:] == 7).all())
    off = (got.double() - want).abs()
    assert bool((off <= want.abs() / 128 + 1e-5 * want.abs().sum(0).mean()).all())
    assert float(off.norm()) <= 1e-3 * float(want.norm())
    assert torch.equal(multiply(x), got)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [3, 9, 520])
def test_a_prompt_in_parts_gives_the_same_numbers(count: int, form: str) -> None:
    """Bit for bit, however many rows are multiplied together."""
    multiply, _ = packed(form, 130, 384)
    x = activations(count, 384)
    whole = multiply(x)
    for size in (1, 5, 7, 11, 400):
        got = torch.cat([multiply(part) for part in x.split(size)[:60]])
        assert torch.equal(got, whole[: len(got)])


@pytest.mark.parametrize("count", [1, 13])
def test_sums_do_not_overflow_and_are_exact(count: int) -> None:
    """The largest codes of both kinds. Steps are powers of two, so nothing is rounded."""
    codes = torch.full((66, 8192), 127, dtype=torch.int8)
    x = torch.full((count, 8192), 127.0, dtype=BFLOAT16)
    x[:, ::64] = -127.0
    sums = int((codes[0].int() * x[0].int()).sum())
    want = torch.full((count, 66), sums, dtype=torch.float64).bfloat16()
    assert torch.equal(product.int8_product(x, codes, torch.ones(66, dtype=BFLOAT16)), want)
    bytes_ = torch.full((128, 4096), 0xFF, dtype=torch.uint8)
    scales = torch.tensor([1.0, 0.5]).bfloat16().expand(64, 128, 2).contiguous()
    most = int(x[0].int().sum()) * 7.5
    got = product.int4_product(x, bytes_, scales, 32, 66)
    assert torch.equal(got, torch.full((count, 66), most, dtype=torch.float64).bfloat16())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 13])
def test_rows_that_are_not_numbers_stay_so(count: int, form: str) -> None:
    multiply, _ = packed(form, 70, 160)
    for bad in (math.nan, math.inf, -math.inf):
        x = randoms(1, count, 160, dtype=BFLOAT16)
        x[1, 150] = bad
        made = multiply(x)
        assert not bool(made[1].isfinite().any())
        assert bool(made[0].isfinite().all())


def test_what_does_not_fit_is_refused() -> None:
    """Nothing beside a row is read, and nothing is left unwritten."""
    multiply, _ = packed("int8", 70, 96)
    x, small = activations(3, 96), torch.empty(3, 64, dtype=BFLOAT16)
    for wrong in ((x.float(), None), (x[:, :64], None), (x, small)):
        with pytest.raises(AssertionError):
            multiply(*wrong)
    codes, scale = torch.zeros(70, 96, dtype=torch.int8), torch.zeros(70, dtype=BFLOAT16)
    for weights in ((codes.short(), scale), (codes, scale.float()), (codes, scale[:5])):
        with pytest.raises(AssertionError):
            product.int8_product(x, *weights)
    matrix = Int4(Plain(randoms(2, 70, 96, dtype=BFLOAT16)))
    for bytes_, half, outs in ((matrix.weights[:64], 16, 70), (matrix.weights, 8, 70)):
        with pytest.raises(AssertionError):
            product.int4_product(x, bytes_, matrix.scales, half, outs)


# -- many rows, by tiles ----------------------------------------------------------------------


def by_tiles(form: str, outs: int, columns: int) -> tuple[Made, Tensor]:
    """A product by tiles, and its weights in float64: eight bits are scaled at the end, so that the
    weights are not rounded again."""
    made = (Int8 if form == "int8" else Int4)(Plain(randoms(outs, outs, columns, dtype=BFLOAT16)))
    stored = as_stored(made)
    assert stored is not None
    weights = made.dense().double()
    if form == "int8":
        assert stored.scales is not None
        weights = stored.weights.double() * stored.scales.double()[:, None]
    found = product.rows_product(stored)
    assert found is not None
    return found, weights


@tiles
@known
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(
    ("rows", "outs", "columns"),
    [
        (1, 1, 32),
        (16, 16, 32),
        (17, 33, 64),
        (40, 130, 320),
        (5, 257, 1088),
        (257, 129, 256),
        (390, 300, 288),
        (1030, 40, 544),
        (2070, 33, 64),  # converted twice
        (400, 1300, 4096),  # converted in blocks
    ],
)
def test_many_rows_by_tiles(rows: int, outs: int, columns: int, form: str) -> None:
    multiply, weights = by_tiles(form, outs, columns)
    x = randoms(rows, rows, columns, dtype=BFLOAT16)
    exact = x.double() @ weights.t()
    room = torch.full((rows + 2, outs), 7.0, dtype=BFLOAT16)
    got = multiply(x, room)
    assert got.data_ptr() == room.data_ptr()
    assert bool((room[rows:] == 7).all())
    # The result is rounded to eight bits; a sum's error is that of float32.
    scale = x.double().norm(dim=1)[:, None] * exact.abs().max() / (x.double().norm() + 1e-9)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3 * float(scale.max()))
    wide = torch.full((rows, columns + 3), torch.nan, dtype=BFLOAT16)
    wide[:, 1:-2] = x
    assert torch.equal(multiply(wide[:, 1:-2], None), got)
    if rows > 1:  # a row does not depend on the rows beside it
        assert torch.equal(multiply(x[rows // 2 :], None), got[rows // 2 :])


@tiles
@known
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_threads_change_no_number_and_bad_rows_stay_alone(form: str) -> None:
    multiply, _ = by_tiles(form, 700, 640)
    x, found = randoms(1, 600, 640, dtype=BFLOAT16), []
    x[3, 5], x[20, 90] = torch.nan, torch.inf
    for threads in (1, 2, 7):
        with torch_threads(threads):
            found.append(multiply(x, None))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=0, equal_nan=True)
    assert (~found[0].isfinite().all(1)).nonzero().flatten().tolist() == [3, 20]
    assert multiply(x[:0], None).shape == (0, 700)


def test_what_tiles_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are not packed, and any where there are no tiles."""
    plain, eight = (as_stored(kind) for kind in (Plain(torch.ones(16, 32)), Int8(Plain(BLANK))))
    assert plain is not None
    assert eight is not None
    for there in (True, False):
        monkeypatch.setattr(type(product.TILES), "available", lambda _, there=there: there)
        assert product.rows_product(plain) is None
        assert (product.rows_product(eight) is not None) == there


BLANK = torch.ones(16, 32, dtype=BFLOAT16)

# -- packing ----------------------------------------------------------------------------------

SHAPES = [(1, 32), (67, 48), (64, 96), (130, 192), (200, 384), (33, 64), (5, 14336), (300, 1024)]


def drawn(rows: int, columns: int, size: float) -> Tensor:
    """Rows of zeros, of one number, of numbers far apart and of tiny ones, amid NaN."""
    weight = amid_nan((randoms(rows, rows, columns) * size).bfloat16())
    if rows > 3:
        weight[0], weight[1], weight[2, 5] = 0, 3e38, -1e30
        weight[3] = 1e-39
    return weight


@pytest.mark.parametrize("size", [0.02, 1e30, 1e-36])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_is_that_of_torch(shape: tuple[int, int], size: float) -> None:
    """Eight bits; four, where torch has a group for the columns."""
    weight, (rows, columns) = drawn(*shape, size), shape
    made = []
    for pack in (product.pack_int8, linear.pack_int8):
        codes = torch.full(shape, 99, dtype=torch.int8)
        scale = torch.zeros(rows, dtype=BFLOAT16)
        pack(weight, codes, scale)
        made.append((codes, scale))
    group, half, padded = linear.group_of(columns), half_tile(), -(-rows // 64) * 64
    if group is not None and half is not None:
        for pack4 in (product.pack_int4, linear.pack_int4):
            bytes_ = torch.full((padded, columns // 2), 99, dtype=torch.uint8)
            scales = torch.full((columns // group, padded, 2), 7.0, dtype=BFLOAT16)
            pack4(weight, bytes_, scales, half)
            assert (scales[:, rows:] == 7).all()  # whose rows are not there
            made.append((bytes_, scales))
        assert all(map(torch.equal, made[2], made[3]))
    assert all(map(torch.equal, made[0], made[1]))


@known
@pytest.mark.parametrize(
    "kind", [k for k in KINDS.values() if k.form != "plain"], ids=lambda kind: kind.name
)
def test_blocks_of_a_file_are_packed_as_their_numbers(kind: Kind, tmp_path: Path) -> None:
    raw, path = torch.from_numpy(ggufs.blocks(kind.name, 70, 512)), tmp_path / "blocks"
    path.write_bytes(raw.numpy().tobytes())
    stored = Blocks.at("x", path, 0, (70, 512), kind)
    meta = Plain(torch.empty(70, 512, dtype=BFLOAT16, device="meta"))
    for form in dict.fromkeys(("int8", kind.form)):
        make = Int8 if form == "int8" else Int4
        in_c, want = make(meta, packing=lambda: product, group=32), make(meta, group=32)
        assert in_c.takes_blocks(kind.number)
        in_c.pack(0, raw, kind.number)
        if form == "int4":
            want.fill(0, *stored.steps(0, 70))
        else:
            want.pack(0, stored.rows(0, 70))
        for name in ("weights", "scales"):
            assert torch.equal(getattr(in_c, name), getattr(want, name)), (form, name)


@pytest.mark.parametrize("half", [16, 32])
def test_the_layout_is_the_one_that_was_asked_for(half: int) -> None:
    """What `int4_product` reads, which `test_products_of_packed_weights` checks, is near."""
    weight = drawn(70, 64, 0.5)[4:]
    bytes_ = torch.full((128, 32), 99, dtype=torch.uint8)
    scales = torch.zeros(1, 128, 2, dtype=BFLOAT16)
    product.pack_int4(weight, bytes_, scales, half)
    back = product.int4_product(torch.eye(64, dtype=BFLOAT16), bytes_, scales, half, 66).T
    step = scales[0, :66, :1].float()
    assert bool(((back.float() - weight.float()).abs() <= 0.52 * step + 1e-2).all())


def test_weights_that_are_not_numbers_stay_so() -> None:
    """A row with NaN or infinity is not made into numbers that look right."""
    for bad in (math.nan, math.inf):
        weight = drawn(4, 64, 0.02)
        weight[2, 7] = bad
        codes, scale = torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, dtype=BFLOAT16)
        product.pack_int8(weight, codes, scale)
        assert not scale[2].isfinite()
        assert scale[[0, 1, 3]].isfinite().all()

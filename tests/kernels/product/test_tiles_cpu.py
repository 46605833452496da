"""Products of many rows by tiles, in C, against products of the unpacked weights in float64."""

from __future__ import annotations

import pytest
import torch
from drawing import randoms
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.kernels.native import build
from minikv.kernels.product import cpu as product_tiles
from minikv.models.linear import Linear, Plain, as_read, half_tile, kept

there = build.library()[0] is not None and product_tiles.TILES.available()
tiles = pytest.mark.skipif(not there, reason="no tiles, or no C compiler")


def weights(outs: int, columns: int, form: str) -> Linear:
    made = kept(Plain(randoms(outs + columns, outs, columns, dtype=torch.bfloat16)), form)
    assert not isinstance(made, Plain)
    return made


def want(x: torch.Tensor, made: Linear) -> torch.Tensor:
    """Eight bits are scaled at the end, so that the weights are not rounded again."""
    dense = made.dense().double()
    read = as_read(made)
    assert read is not None
    if read.weights.dtype is torch.int8:
        assert read.scales is not None
        dense = read.weights.double() * read.scales.double()[:, None]
    return x.double() @ dense.t()


def check(rows: int, outs: int, columns: int, form: str) -> None:
    made = weights(outs, columns, form)
    read = as_read(made)
    assert read is not None
    product = product_tiles.rows_product(read)
    assert product is not None
    x = randoms(rows, rows, columns, dtype=torch.bfloat16)
    exact = want(x, made)
    room = torch.full((rows + 2, outs), 7.0, dtype=torch.bfloat16)
    got = product(x, room)
    assert got.data_ptr() == room.data_ptr()
    assert bool((room[rows:] == 7).all())
    # The result is rounded to eight bits; a sum's error is that of float32.
    scale = x.double().norm(dim=1)[:, None] * exact.abs().max() / (x.double().norm() + 1e-9)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3 * float(scale.max()))
    wide = torch.full((rows, columns + 3), torch.nan, dtype=torch.bfloat16)
    wide[:, 1:-2] = x
    assert torch.equal(product(wide[:, 1:-2], None), got)
    if rows > 1:  # a row does not depend on the rows beside it
        assert torch.equal(product(x[rows // 2 :], None), got[rows // 2 :])


@tiles
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
def test_odd_sizes(rows: int, outs: int, columns: int, form: str) -> None:
    if form == "int4" and half_tile() is None:
        pytest.skip("the layout of four bits is not known here")
    check(rows, outs, columns, form)


@tiles
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 90),
    outs=st.integers(1, 300),
    steps=st.integers(1, 40),
    form=st.sampled_from(["int8", "int4"]),
)
def test_any_size(rows: int, outs: int, steps: int, form: str) -> None:
    columns = {"int8": 16, "int4": 32}[form] * steps
    if form != "int4" or half_tile() is not None:
        check(rows, outs, columns, form)


@tiles
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_threads_change_no_number(form: str) -> None:
    made = as_read(weights(700, 640, form))
    if made is None:
        pytest.skip("the layout of four bits is not known here")
    product = product_tiles.rows_product(made)
    assert product is not None
    x = randoms(1, 600, 640, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found.append(product(x, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@tiles
def test_infinity_and_nan_stay_in_their_rows() -> None:
    made = as_read(weights(64, 96, "int8"))
    assert made is not None
    product = product_tiles.rows_product(made)
    assert product is not None
    x = randoms(1, 40, 96, dtype=torch.bfloat16)
    x[3, 5], x[20, 90] = torch.nan, torch.inf
    got = product(x, None)
    bad = ~got.isfinite().all(1)
    assert bad.nonzero().flatten().tolist() == [3, 20]
    assert product(x[:0], None).shape == (0, 64)


@tiles
def test_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    made = as_read(weights(16, 32, "int8"))
    assert made is not None

    class Library:
        minikv_rows_product = staticmethod(lambda *_: 2)

    monkeypatch.setattr(product_tiles, "_library", Library)
    product = product_tiles.rows_product(made)
    assert product is not None
    with pytest.raises(MemoryError):
        product(torch.ones(2, 32, dtype=torch.bfloat16), None)


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are not packed, and any where there are no tiles."""
    monkeypatch.setattr(product_tiles, "_library", lambda: True)
    for dtype in (torch.float32, torch.bfloat16):
        plain = as_read(Plain(torch.ones(16, 32, dtype=dtype)))
        assert plain is not None
        assert product_tiles.rows_product(plain) is None
    monkeypatch.setattr(product_tiles, "_library", lambda: None)
    made = as_read(weights(16, 32, "int8"))
    assert made is not None
    assert product_tiles.rows_product(made) is None

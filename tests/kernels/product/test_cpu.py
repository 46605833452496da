"""Matrix products of one row in C, on odd sizes."""

from __future__ import annotations

import math

import pytest
import torch
from drawing import randoms

from minikv.kernels import dispatch
from minikv.kernels.native import build
from minikv.kernels.product import cpu as product

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (3, 31), (7, 255), (33, 256), (300, 768), (5, 5632), (0, 64), (2, 0)],
)
def test_products_of_one_row(rows: int, columns: int) -> None:
    """Rounded once, at the end; what is beside the matrix is not read into it."""
    guarded = torch.full((rows + 2, columns), math.nan, dtype=torch.bfloat16)
    guarded[1:-1] = randoms(1, rows, columns, dtype=torch.bfloat16)
    x, weight = randoms(2, 1, columns, dtype=torch.bfloat16), guarded[1:-1]
    want = x.double() @ weight.double().T
    size = (x.double().abs() @ weight.double().abs().T).clamp_min(1e-9)
    got = product.row_product(x, weight)
    assert got.shape == (1, rows)
    assert bool(((got.double() - want).abs() <= want.abs() / 256 + 1e-6 * size).all())
    for bad in (math.nan, math.inf):
        if rows and columns:
            x[0, columns // 2] = bad
            assert not bool(product.row_product(x, weight).isfinite().any())


def test_products_that_do_not_fit_are_refused_as_torch_refuses_them() -> None:
    """Nothing beside a row is read, and nothing is left unwritten."""
    x, weight = randoms(1, 1, 64, dtype=torch.bfloat16), randoms(2, 4, 64, dtype=torch.bfloat16)
    for wrong in (x.float(), x[:, :32], x.expand(2, 64)[:, :63]):
        with pytest.raises(RuntimeError):
            product.row_product(wrong, weight)
    apart = torch.stack((weight, weight), 2)[..., 0]  # every other number
    want = product.row_product(x, weight)
    torch.testing.assert_close(product.row_product(x, apart), want, rtol=1e-2, atol=1e-2)
    odd = torch.cat((x, x), 1)[:, 1:65]
    shifted = torch.empty(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64).copy_(weight)
    want = (odd.double() @ weight.double().T).bfloat16()
    torch.testing.assert_close(product.row_product(odd, shifted), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("threads", "torchs", "ours"), [(4, 4, True), (1, 4, False), (1, 1, True)])
def test_products_without_threads_are_left_to_torch(
    threads: int, torchs: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "threads", lambda: threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    chosen, _ = dispatch.choose(torch.device("cpu"), "auto", 64, torch.bfloat16)
    assert (chosen.name, chosen.products) == ("native", ours)

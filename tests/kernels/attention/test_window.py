"""Attention under a sliding window in parts without masks, against float64 arithmetic."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from attended import last, make
from small import Dense, engine, ids, network
from torch import Tensor

from minikv import kernels
from minikv.cache.prefill import Prefill

WINDOWS = (1, 2, 3, 7, 16, 40)
AROUND = (1, 2, 3, 6, 7, 8, 15, 16, 17, 33)


def scene(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return make(*sizes, dtype=dtype, seed=sizes[3] + 100 * sizes[2])


def check(window: int, loose: float, *given: Tensor) -> None:
    """Of q, k and v."""
    out, lse = kernels.window_attention(*given, window)
    want, sums = last(*given, window)
    assert out.dtype == given[0].dtype
    assert lse.dtype == torch.float32 or out.dtype != torch.float32
    torch.testing.assert_close(out.double(), want, rtol=loose, atol=loose)
    torch.testing.assert_close(lse.double(), sums, rtol=loose, atol=loose)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("first", [0, *AROUND])
def test_chunks_and_windows(window: int, first: int) -> None:
    """Chunks that begin at row `first`, shorter and longer than the window and all it takes."""
    for rows in AROUND:
        check(window, 1e-5, *scene(2, 3, rows, first + rows, 8))


@pytest.mark.parametrize(
    ("dtype", "loose"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
@pytest.mark.parametrize("sizes", [(1, 1, 64, 300, 80), (3, 1, 70, 131, 16), (1, 9, 129, 129, 32)])
def test_other_dtypes_and_heads(dtype: torch.dtype, loose: float, sizes: Any) -> None:
    for window in (5, 65, 128, 500):
        check(window, loose, *scene(*sizes, dtype=dtype))


@pytest.mark.parametrize("window", WINDOWS)
def test_what_nobody_sees_is_not_read(window: int) -> None:
    """Rows that slid out before the chunk may hold anything."""
    q, k, v = scene(2, 2, 9, 60, 8)
    gone = 60 - 9 - window + 1
    want, sums = kernels.window_attention(q, k, v, window)
    k, v = k.clone(), v.clone()
    k[:, :gone] = v[:, :gone] = math.nan
    out, lse = kernels.window_attention(q, k, v, window)
    assert torch.equal(out, want)
    assert torch.equal(lse, sums)
    k[:, gone] = math.nan  # the next row is seen
    assert not torch.equal(kernels.window_attention(q, k, v, window)[1], sums)


def test_the_parts_are_few_and_hold_each_pair_once() -> None:
    """A causal part is a square; none of them is wider than the window, and together they hold
    the pairs that are seen. Stretches are as few as can be."""
    pairs: list[int] = []
    attention = kernels.rows_attention

    def count(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        rows, keys = q.shape[2], k.shape[1]
        assert keys <= window
        assert not causal or rows == keys
        pairs.append(rows * (rows + 1) // 2 if causal else rows * keys)
        return attention(q, k, v, causal=causal)

    for window, first, rows in product(WINDOWS, (0, 5, 50), (1, 16, 39)):
        pairs.clear()
        kernels.window_attention(*scene(1, 1, rows, first + rows, 8), window, count)
        assert sum(pairs) == sum(min(i + 1, window) for i in range(first, first + rows))
        whole = min(rows, max(0, window - first))
        assert len(pairs) <= 2 * (whole > 0) + 3 * math.ceil((rows - whole) / max(1, window - 1))


@pytest.mark.parametrize("rows", [16, 5, 24])
def test_a_prompt_builds_no_mask(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with windows below, at and above the chunk, one that never slides, and one without."""
    net = network(layers=5, windows=(3, 16, 24, 90, None), rows=rows)
    tokens = ids(83)
    want = Dense(net).prompt(tokens)

    monkeypatch.setattr(kernels, "visible_attention", None)
    got = engine(net, "full", "none", None).prompt(tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_all_queries_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of a row's attention are taken with the log-sum-exp of the parts, rows of an earlier
    turn among them: against that of float64."""
    told: list[list[Tensor]] = []
    finish = Prefill.finish

    def listen(reading: Prefill, layer: int) -> None:
        assert reading._mass is not None
        assert reading._squares is not None
        told[-1] += [reading._mass.clone(), reading._squares.clone()]
        given = reading._mass.sum(-1)  # every query gives 1 in all
        torch.testing.assert_close(given, torch.full_like(given, reading.plan.tokens))
        finish(reading, layer)

    def exact(q: Tensor, k: Tensor, v: Tensor, window: int, _: object) -> tuple[Tensor, Tensor]:
        out, lse = last(q, k, v, window)
        return out.to(q.dtype), lse.float()

    monkeypatch.setattr(Prefill, "finish", listen)
    for attention in (kernels.window_attention, exact):
        monkeypatch.setattr(kernels, "window_attention", attention)
        told.append([])
        run = engine(network(windows=(20, None, 45), rows=11), "h2o", "none", 60)
        run.prompt(ids(100))
        run.prompt(ids(70, seed=1))
    for ours, theirs in zip(*told, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(told[0]) == 2 * 2 * 3

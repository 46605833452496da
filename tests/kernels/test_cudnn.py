"""Attention of long prompts in blocks: that every query sees its rows once, whatever computes a
block, and that cuDNN gets blocks of few shapes. Plain arithmetic stands in for a GPU's libraries;
tests/gpu/smoke.py has the libraries themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attended import Pair, last, truth
from torch import Tensor

from minikv.kernels.attention import cudnn
from minikv.kernels.attention import plain as attention


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes everything, in blocks of 8 and 4."""
    if "elsewhere" not in request.node.name:
        monkeypatch.setattr(cudnn, "BLOCKS", (8, 4))
        monkeypatch.setattr(cudnn, "takes", lambda q: True)


@pytest.mark.parametrize("rows", [4, 5, 8, 9, 12, 23])
@pytest.mark.parametrize("earlier", [0, 3, 4, 16, 29])
def test_every_query_sees_its_rows(monkeypatch: Any, rows: int, earlier: int) -> None:
    """Behind a recall the rows before a chunk may be any number."""

    def block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Pair:
        out, lse = truth(q, k, v, 1 if causal else k.shape[1])
        return out.to(q.dtype), lse.float()

    def flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Pair:
        out, lse = last(q, k, v) if causal else truth(q, k, v, k.shape[1])
        return out.to(q.dtype), lse.float()

    def join(one: Pair, two: Pair, kind: torch.dtype) -> Pair:
        kinds.append(kind)
        out, lse = attention.merge([(part.double(), sums) for part, sums in (one, two)])
        return out.to(kind), lse

    kinds: list[torch.dtype] = []
    monkeypatch.setattr(cudnn, "planned", block)
    monkeypatch.setattr(cudnn, "cuda_attention", flash)
    made = torch.Generator().manual_seed(rows * 100 + earlier)
    q = torch.randn(rows, 2, 3, 16, generator=made, dtype=torch.float64).permute(1, 2, 0, 3)
    k, v = torch.randn(2, 2, rows + earlier, 16, generator=made, dtype=torch.float64)
    found = cudnn.last_rows_attention(q, k, v, join)
    assert found is not None
    for one, want in zip(found, last(q, k, v), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=1e-5, atol=1e-5)
    if rows == 8 and kinds:  # one block of queries: rounded once, at the end
        assert kinds == [torch.float32] * (len(kinds) - 1) + [q.dtype]


def test_every_shape_has_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is made while a prompt is read takes 40 ms. Strides belong to it."""
    planned: list[tuple[object, ...]] = []

    def block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Pair:
        strides = (q.stride(), k.contiguous().stride())
        planned.append((tuple(q.shape), tuple(k.shape), strides, causal))
        return q, q[..., 0].float()

    monkeypatch.setattr(cudnn, "planned", block)
    monkeypatch.setattr(cudnn, "cuda_attention", lambda q, k, v, causal: (q, q[..., 0]))
    heads, group, size = 2, 3, 16
    cudnn.make_plans(torch.zeros(heads, group, 0, size))
    plans, known = set(planned), len(planned)
    assert len(plans) == known
    for rows in range(4, 30):
        for keys in range(rows, 60, 3):
            # As the network makes them: queries beside keys, of which a prompt has a long buffer.
            qk = torch.zeros(rows, heads * (group + 1), size)[:, : heads * group]
            q = qk.view(rows, heads, group, size).permute(1, 2, 0, 3)
            k = torch.zeros(heads, 64, size)[:, :keys]
            cudnn.last_rows_attention(q, k, k, lambda one, two, kind: one)
    assert set(planned) == plans


def test_elsewhere_it_leaves_prompts_to_others() -> None:
    q = torch.zeros(2, 2, cudnn.BLOCKS[-1], 8, dtype=torch.bfloat16)
    assert cudnn.last_rows_attention(q, q[:, 0], q[:, 0], lambda one, two, kind: one) is None
    assert cudnn.prompt_rows(torch.device("cpu"), 128) is None
    cudnn.make_plans(q)

"""The decode step in torch, against float64 arithmetic and a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from guards import guarded, untouched
from lowest import SHAPES, Case, draw, expected, outcome

from minikv import kernels


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("heads", "keys", "size"), [(1, 1, 8), (3, 17, 8), (2, 300, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_query_per_head(
    heads: int, keys: int, size: int, group: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(heads, group, size, generator=generator).to(dtype) * 2
    k, v = (torch.randn(heads, keys, size, generator=generator).to(dtype) for _ in range(2))
    hidden = torch.zeros(k.shape[:2], dtype=torch.bool)
    hidden[:, 1::3] = True
    loose = 1e-5 if dtype == torch.float32 else 3e-2
    for seen in (None, ~hidden):
        out, p = kernels.decode_attention(q, k, v, seen)
        logits = q.double() @ k.double().transpose(1, 2) / math.sqrt(size)
        if seen is not None:
            logits = logits.masked_fill(~seen[:, None], -math.inf)
        want = logits.softmax(-1) @ v.double()
        torch.testing.assert_close(out.double(), want, rtol=loose, atol=loose)
        assert p.dtype == torch.float32
        torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:2]))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lowest_score_leaves(shape: tuple[int, int, int, int]) -> None:
    for seed in range(40):
        case = draw(shape, seed)
        got = outcome(kernels.lowest_step, case, guarded, go=True)
        assert untouched(got)
        assert torch.equal(got, expected(case)), seed


def test_the_lowest_score_stays_if_the_step_is_not_final() -> None:
    case = draw(SHAPES[1], 0)
    assert bool((outcome(kernels.lowest_step, case, guarded, go=False) == 77).all())


def test_the_lowest_score_by_hand() -> None:
    """Two rows have the lowest score; the older of them is the last one."""
    one = torch.tensor([[4]])
    pos = torch.tensor([9, 7, 5, 3], dtype=torch.int32)
    rows = kernels.Rows(one - 4, one, one - 1, pos, torch.tensor(9), 0, 0, 0)
    scores = torch.tensor([[[3.0, -1.0, -2.0, -1.0]]])
    allowed = torch.tensor([[[True, True, False, True]]])
    got = outcome(kernels.lowest_step, Case(scores, allowed, rows), guarded, go=True)
    assert int(got) == 3


def test_scores_may_have_all_heads_in_one_dimension() -> None:
    case = draw(SHAPES[1], 3)
    flat = Case(case.scores.flatten(0, 1), case.allowed.flatten(0, 1), case.rows)
    assert torch.equal(outcome(kernels.lowest_step, flat, guarded, go=True), expected(case))

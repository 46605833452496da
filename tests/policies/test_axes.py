"""The arithmetic of the axes: exact sums, bounds, ties, and RoCo's rule worked by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import victims

from minikv import policies
from minikv.cache.budget import Budget
from minikv.errors import UsageError
from minikv.policies import selection
from minikv.policies.base import Candidates, HeadAllocator, PromptView, StepView
from minikv.policies.snapkv import pool


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_fill_raises_the_lowest(used: list[int], total: int) -> None:
    caps = selection.fill(torch.tensor(used), total).tolist()
    assert sum(caps) == max(total, sum(used))
    raised = [c for c, u in zip(caps, used, strict=True) if c > u]
    assert all(c >= u for c, u in zip(caps, used, strict=True))
    if raised:
        assert max(raised) - min(caps) <= 1


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_share_is_exact(pairs: list[tuple[int, int]]) -> None:
    wish = [Fraction(a, 3) for a, _ in pairs]
    most = [b for _, b in pairs]
    total = int(sum(wish))
    wish[0] += total - sum(wish)
    if wish[0] < 0:
        return
    thirds = torch.tensor([int(3 * w) for w in wish])
    counts = selection.share(thirds, 3, torch.tensor(most), torch.tensor(total)).tolist()
    assert sum(counts) == min(total, sum(most))
    assert all(0 <= c <= m for c, m in zip(counts, most, strict=True))
    if all(w <= m for w, m in zip(wish, most, strict=True)):
        assert all(abs(c - w) < 1 for c, w in zip(counts, wish, strict=True))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_best_keeps_the_higher_then_the_younger(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 30))
    scores = torch.tensor([float(data.draw(st.integers(0, 4))) for _ in range(n)])
    pos = torch.tensor(data.draw(st.permutations(range(n))))
    free = torch.tensor([data.draw(st.booleans()) for _ in range(n)])
    count = data.draw(st.integers(0, n))
    chosen = selection.best(scores[None], pos[None], free[None], torch.tensor([count]), count)[0]
    order = sorted(
        (i for i in range(n) if free[i]), key=lambda i: (-float(scores[i]), -int(pos[i]))
    )
    assert set(chosen.nonzero().flatten().tolist()) == set(order[:count])


def wanted(scores: torch.Tensor, pos: torch.Tensor, free: torch.Tensor, total: int) -> list[int]:
    counts: list[int] = selection.wanted(scores, pos, free, torch.tensor(total), total).tolist()
    return counts


def shared(
    heads: HeadAllocator, scores: torch.Tensor, pos: torch.Tensor, free: torch.Tensor, total: int
) -> list[int]:
    view = PromptView(0, pos.shape[1], pos, 0, None, None, lambda: pos, lambda: pos)
    policy = policies.prompt_policy("snapkv")
    assert policy is not None
    rows = Candidates(view, policy.scorer, scores, free)
    counts: list[int] = heads.share(rows, torch.tensor(total), total).tolist()
    return counts


def ada(alpha: float) -> HeadAllocator:
    policy = policies.prompt_policy("adakv", {"alpha": alpha})
    assert policy is not None
    return policy.heads


def test_adaptive_heads_follow_need() -> None:
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0], [5.0, 1.0, 1.0, 1.0]])
    free = torch.ones_like(scores, dtype=torch.bool)
    pos = torch.arange(4).expand(2, 4)
    assert wanted(scores, pos, free, 4) == [4, 0]
    assert shared(ada(0.0), scores, pos, free, 4) == [4, 0]
    assert shared(ada(1.0), scores, pos, free, 4) == [2, 2]
    assert shared(ada(0.5), scores, pos, free, 4) == [3, 1]
    assert shared(HeadAllocator(), scores, pos, free, 4) == [2, 2]


def test_equal_scores_are_judged_by_age_and_not_by_slot() -> None:
    """An overwritten cache holds its rows in any order; the shares of the heads do not change."""
    scores = torch.tensor([[3.0, 3.0, 1.0, 3.0], [3.0, 0.0, 3.0, 3.0]])
    free = torch.ones_like(scores, dtype=torch.bool)
    pos = torch.arange(4).expand(2, 4)
    assert [wanted(scores, pos, free, n) for n in (1, 2, 3, 4)] == [[1, 0], [1, 1], [1, 2], [2, 2]]
    for seed in range(10):
        order = torch.stack(
            [torch.randperm(4, generator=torch.Generator().manual_seed(seed + h)) for h in (0, 50)]
        )
        moved = scores.gather(1, order), order, free
        assert [wanted(*moved, n) for n in (1, 2, 3, 4)] == [[1, 0], [1, 1], [1, 2], [2, 2]]


def test_adaptive_heads_keep_the_most_mass() -> None:
    """Ada-KV theorem 3.1: without a safeguard no allocation keeps more of the scores."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        scores = torch.rand(4, 60, generator=generator) ** 4
        free = torch.ones_like(scores, dtype=torch.bool)
        pos = torch.arange(60).expand(4, 60)

        def mass(counts: list[int], scores: torch.Tensor = scores) -> float:
            return sum(float(s.topk(n).values.sum()) for s, n in zip(scores, counts, strict=True))

        assert mass(shared(ada(0.0), scores, pos, free, 48)) >= mass([12] * 4)


def test_pooling_is_over_neighbours_in_the_text() -> None:
    """Rows in any order of slots; the window's rows take no part."""
    pos = torch.tensor([[4, 0, 2, 1, 3, 9]])
    scores = torch.tensor([[0.0, 5.0, 1.0, 2.0, 3.0, 99.0]])
    free = pos < 9
    pooled = pool(scores, pos, free, 3, "max")
    assert pooled[0].tolist() == [3.0, 5.0, 3.0, 5.0, 3.0, float("-inf")]
    mean = pool(scores, pos, free, 3, "avg")
    assert mean[0, :5].tolist() == pytest.approx([1.0, 7 / 3, 2.0, 8 / 3, 4 / 3])


def roco_view(mean: list[float], spread: list[float], age: list[int], cap: int) -> StepView:
    count = torch.full((1, len(mean)), 10.0)
    m, s = torch.tensor([mean]), torch.tensor([spread])
    columns = {"sum": m * count, "squares": (s**2 + m**2) * count, "count": count}
    pos = torch.tensor([age])
    zero = torch.zeros(1, dtype=torch.int64)
    return StepView(100, pos, torch.tensor([cap]), zero, zero, columns)


def test_roco_spares_the_unsteady() -> None:
    """Row 0 has the lowest mean but the highest deviation; of the steady ones row 2 is lowest."""
    roco = policies.step_policy("roco", {"sinks": 1, "recent": 1, "scope": 0.25})
    assert roco is not None
    view = roco_view(
        [0.01, 0.30, 0.05, 0.20, 0.00], [0.9, 0.1, 0.1, 0.1, 0.0], [10, 20, 30, 40, 99], cap=4
    )
    assert victims(roco, view).tolist() == [2]
    plain = policies.step_policy("roco", {"sinks": 1, "recent": 1, "scope": 0.0})
    assert plain is not None
    assert victims(plain, view).tolist() == [0]


def test_roco_evicts_the_older_of_equals() -> None:
    roco = policies.step_policy("roco", {"sinks": 0, "recent": 1})
    assert roco is not None
    view = roco_view([0.1, 0.1, 0.1, 0.1], [0.0] * 4, [50, 20, 30, 99], cap=3)
    assert victims(roco, view).tolist() == [1]


def test_roco_takes_a_constant_stream_for_steady() -> None:
    """Rounding makes some of their variances negative; none may pass for steadier than another."""
    roco = policies.step_policy("roco", {"sinks": 0, "recent": 1, "scope": 0.8})
    assert roco is not None
    values = torch.linspace(0.02, 0.018, 40)  # the older, the more attention
    columns = {name: torch.zeros(40) for name in roco.columns}
    for _ in range(30):
        roco.update(columns, values, lambda: torch.ones(40))
    variance = columns["squares"] / 30 - (columns["sum"] / 30).square()
    assert (variance < 0).any()
    pos, zero = torch.arange(40)[None], torch.zeros(1, dtype=torch.int64)
    view = StepView(
        40, pos, torch.tensor([39]), zero, zero, {n: c[None] for n, c in columns.items()}
    )
    in_scope = 39 - int(39 * 0.8)
    steady = variance.clamp(min=0)[:39].sort().values[in_scope - 1]
    lowest = max(i for i in range(39) if variance[i] <= steady)
    assert victims(roco, view).tolist() == [lowest]


@pytest.mark.parametrize(
    ("text", "rows"), [("512", 512), ("20%", 200), ("64KiB", 64), ("0.5MiB", 512), ("100%", 1000)]
)
def test_budget(text: str, rows: int) -> None:
    assert Budget.parse(text).rows(1000, row_bytes=128, heads=8) == rows


@pytest.mark.parametrize("text", ["512", "20%", "12.5%", "100B", "1KiB", "64MiB", "1.5GiB"])
def test_a_budget_is_shown_as_it_was_written(text: str) -> None:
    assert str(Budget.parse(text)) == text


@pytest.mark.parametrize("text", ["", "0", "-3", "12.5", "120%", "0%", "64 apples", "nan", "1e3"])
def test_bad_budget(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the budget"):
        Budget.parse(text)


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UsageError) as refused:
        policies.find("snapvk")
    assert "snapkv" in refused.value.hint
    with pytest.raises(UsageError, match="works only as --decode"):
        policies.find("roco")
    with pytest.raises(UsageError, match="no option 'windw'"):
        policies.prompt_policy("adakv", {"windw": 3})
    for bad in ({"window": "x"}, {"kernel": 4}, {"alpha": 2.0}, {"pooling": "median"}):
        with pytest.raises(UsageError):
            policies.prompt_policy("adakv", bad)


def test_roco_never_evicts_the_newest_row() -> None:
    """Not even in a head whose cap is below sinks + recent, where nothing else protects it."""
    roco = policies.step_policy("roco")
    assert roco is not None
    view = roco_view([0.3, 0.2, 0.4, 0.0], [0.0] * 4, [91, 93, 98, 99], cap=3)
    assert victims(roco, view).tolist() == [1]

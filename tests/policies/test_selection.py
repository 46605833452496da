"""Counting on the device gives what counting on the host gives, ties and remainders included."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minikv import policies
from minikv.policies import adakv, base, kvcrush, selection, tova
from minikv.policies.base import PromptView

few = st.integers(0, 9)


@st.composite
def lists(draw: st.DrawFn, count: int) -> list[list[int]]:
    heads = draw(st.integers(1, 6))
    return [draw(st.lists(few, min_size=heads, max_size=heads)) for _ in range(count)]


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Scores with many ties, positions in any order, rows that are free, and a total."""
    heads, count = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    flat = draw(
        st.lists(
            st.sampled_from([-1.5, -0.0, 0.0, 0.25, 0.25, 3.0, 1e-30]),
            min_size=heads * count,
            max_size=heads * count,
        )
    )
    free = draw(st.lists(st.booleans(), min_size=heads * count, max_size=heads * count))
    pos = [draw(st.permutations(range(count))) for _ in range(heads)]
    total = draw(st.integers(0, heads * count))
    shape = (heads, count)
    return torch.tensor(flat).view(shape), torch.tensor(pos), torch.tensor(free).view(shape), total


@settings(deadline=None, max_examples=80)
@given(lists(3), st.integers(1, 7))
def test_shares(case: list[list[int]], parts: int) -> None:
    wish, most, _ = case
    total = sum(wish)  # wishes are parts x wish / parts
    got = selection.share(
        torch.tensor(wish) * parts, parts, torch.tensor(most), torch.tensor(total)
    )
    assert got.tolist() == base.share([Fraction(w) for w in wish], most, total)
    uneven = [Fraction(w, parts) for w in wish]
    if sum(uneven).denominator == 1:
        total = int(sum(uneven))
        got = selection.share(torch.tensor(wish), parts, torch.tensor(most), torch.tensor(total))
        assert got.tolist() == base.share(uneven, most, total)


@settings(deadline=None, max_examples=80)
@given(lists(1), st.integers(0, 60))
def test_fill(case: list[list[int]], total: int) -> None:
    assert selection.fill(torch.tensor(case[0]), total).tolist() == base.fill(case[0], total)


@settings(deadline=None, max_examples=120)
@given(lists(3), st.integers(1, 2))
def test_spread(case: list[list[int]], least: int) -> None:
    counts, sure, more = case
    free = [n + m for n, m in zip(counts, more, strict=True)]
    host = base.spread(counts, sure, free, least)
    got = selection.spread(*(torch.tensor(x) for x in (counts, sure, free)), least)
    assert got.tolist() == host
    assert sum(host) == sum(counts)
    assert all(0 <= n <= m for n, m in zip(host, free, strict=True))
    have = [n + m for n, m in zip(host, sure, strict=True)]
    can = [min(least, n + m) for n, m in zip(sure, free, strict=True)]
    poor = any(n < m for n, m in zip(have, can, strict=True))
    assert not poor or all(n == 0 or m <= least for n, m in zip(host, have, strict=True))


@settings(deadline=None, max_examples=80)
@given(rows(), st.lists(st.integers(0, 14), min_size=5, max_size=5))
def test_best(case: tuple[Tensor, Tensor, Tensor, int], counts: list[int]) -> None:
    scores, pos, free, _ = case
    counts = counts[: len(free)]
    got = selection.best(scores, pos, free, torch.tensor(counts), max(counts))
    for h, count in enumerate(counts):
        assert torch.equal(got[h], base.best(scores[h], pos[h], free[h], count))


@settings(deadline=None, max_examples=80)
@given(rows(), st.sampled_from([0.0, 0.2, 0.25, 0.333, 1 / 3, 0.123456789, 1.0]), st.integers(0, 9))
def test_heads(case: tuple[Tensor, Tensor, Tensor, int], alpha: float, slack: int) -> None:
    scores, pos, free, total = case
    want = adakv.wanted(scores, pos, free, total)
    some = torch.tensor(total), total + slack
    assert selection.wanted(scores, pos, free, *some).tolist() == want
    for rounding in ("exact", "official"):
        host = adakv.adaptive_heads(alpha, rounding)(scores, pos, free, total)
        device = selection.adaptive_heads(alpha, rounding)
        assert device(scores, pos, free, *some).tolist() == host
    even = selection.even_heads(scores, pos, free, *some)
    assert even.tolist() == base.even_heads(scores, pos, free, total)


@settings(deadline=None, max_examples=100)
@given(rows(), st.sampled_from([0.0, 0.2, 0.25, 0.8, 1.0]), st.integers(0, 9), st.integers(0, 2))
def test_heads_with_other_rules(
    case: tuple[Tensor, Tensor, Tensor, int], alpha: float, slack: int, window: int
) -> None:
    scores, pos, free, total = case
    some = torch.tensor(total), total + slack
    host = adakv.floor_heads(alpha, window)(scores, pos, free, total)
    assert selection.floor_heads(alpha, window)(scores, pos, free, *some).tolist() == host
    scores = scores.abs() * torch.tensor([1.0, 1e4, 1.0, 0.5, 7.0])[: len(scores), None]
    each = torch.tensor(total // len(scores))
    weighed = adakv.normalized(scores, free, int(each))
    assert torch.equal(selection.normalized(scores, free, each, int(each) + slack), weighed)
    for rounding in ("exact", "official"):
        host = adakv.adaptive_heads(alpha, rounding, normalize=True)(scores, pos, free, total)
        device = selection.adaptive_heads(alpha, rounding, normalize=True)
        assert device(scores, pos, free, *some).tolist() == host


@pytest.mark.parametrize("window", [0, 2])
def test_heads_of_unlike_scores_with_a_floor(window: int) -> None:
    for seed in range(60):
        random = torch.Generator().manual_seed(seed)
        scores = torch.randint(0, 5, (3, 10), generator=random).float()
        scores *= torch.tensor([[1.0], [5.0], [9.0]])
        pos = torch.stack([torch.randperm(10, generator=random) for _ in range(3)])
        free, total = torch.rand((3, 10), generator=random) < 0.9, 6 + seed % 18
        host = adakv.floor_heads(0.8, window)(scores, pos, free, total)
        device = selection.floor_heads(0.8, window)
        assert device(scores, pos, free, torch.tensor(total), total + seed % 3).tolist() == host


@pytest.mark.parametrize(
    ("alpha", "found"),
    [
        (0.2, Fraction(1, 5)),
        (1 / 3, Fraction(1, 3)),
        (1.0, Fraction(1)),
        (0.0, Fraction(0)),
        (0.1234567, Fraction(1234567, 10**7)),
    ],
)
def test_the_fraction_of_a_decimal(alpha: float, found: Fraction) -> None:
    assert selection.exact(alpha) == found


def test_a_fraction_has_room_in_64_bits() -> None:
    found = selection.exact(0.12345678912345)
    assert found.denominator <= 10**7
    assert abs(found - Fraction("0.12345678912345")) < Fraction(1, 10**7)


# -- who of a head's rows stays -------------------------------------------------------------------

END = 24  # the tokens that were read


@st.composite
def views(draw: st.DrawFn) -> tuple[PromptView, Tensor, list[int]]:
    """A layer whose heads hold different rows in any order, with many equal values and places
    without a row; rows that are free; and counts, some beyond what is free."""
    heads, group, rows = draw(st.integers(1, 4)), 2, draw(st.integers(1, 14))
    seed = draw(st.integers(0, 1 << 30))
    random = torch.Generator().manual_seed(seed)

    def some(*size: int) -> Tensor:
        return torch.randint(0, draw(levels), size, generator=random) / 8

    levels = st.sampled_from([1, 3, 40])
    among = draw(st.sampled_from([rows, END]))  # all heads hold the same rows, or any
    pos = torch.stack([torch.randperm(among, generator=random)[:rows] for _ in range(heads)])
    pos = pos.masked_fill(some(heads, rows) == 0, -1) if draw(st.booleans()) else pos
    free = (pos >= 0) & (
        torch.rand((heads, rows), generator=random) < draw(st.sampled_from([0.0, 0.6, 1.0, 1.0]))
    )
    free[0] &= draw(st.integers(0, 3)) > 0  # a head with nothing free
    counts = draw(st.lists(st.integers(0, rows + 1), min_size=heads, max_size=heads))
    key, value, matrix = some(heads, rows, 4), some(heads, rows, 4), some(heads, group, 4, 3)
    view = PromptView(
        draw(st.integers(0, 5)),
        END,
        pos,
        1,
        some(heads, group, rows),
        some(heads, rows),
        lambda: key,
        lambda: value,
        output=lambda: matrix,
    )
    return view, free, counts


RATIOS = st.sampled_from([0.0, 0.25, 0.5, 0.35, 0.123456789, 1.0])
SETTINGS = st.fixed_dictionaries(
    {
        "ratio": RATIOS,
        "by_score": RATIOS,
        "random": RATIOS,
        "seed": st.integers(0, 3),
        "anchor": st.sampled_from(
            ["mean"] * 5 + ["inv_mean", "alternate", "random", "zeros", "ones"]
        ),
        "ranks": st.sampled_from(["ends", "step"]),
        "bits": st.sampled_from(["kv", "query"]),
        "draw": st.sampled_from(["score", "softmax"]),
    }
)


@pytest.mark.parametrize(
    "name",
    [
        "tova",
        "nacl",
        "kvcrush(tova)",
        "kvcrush(l2)",
        "tova+critical",
        "l2+critical",
        "nacl+critical",
        "kvcrush(tova)+critical",
        "l2+ada+nacl+critical",
    ],
)
@settings(deadline=None, max_examples=150)
@given(views(), SETTINGS, st.integers(0, 3))
def test_who_stays(
    name: str, case: tuple[PromptView, Tensor, list[int]], setting: dict[str, object], slack: int
) -> None:
    view, free, counts = case
    takes = {option.name for option in policies.find(name).prompt_options}
    options = {key: value for key, value in setting.items() if key in takes}
    if name.endswith("(l2)"):
        options["bits"] = "kv"
    made = policies.prompt_policy(name, options)
    assert made is not None
    assert made.device_select is not None
    scores = made.evidence.scorer(view)
    host = made.select(view, scores, free, counts)
    most = max(counts) + slack
    got = made.device_select(view, scores, free, torch.tensor(counts), most)
    assert torch.equal(got, host)
    assert got.sum(1).tolist() == torch.minimum(torch.tensor(counts), free.sum(1)).tolist()


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    st.sampled_from(["ends", "step"]),
)
def test_which_stand_for_all(pairs: list[tuple[int, int]], how: str) -> None:
    pairs = [(max(pair), min(pair)) for pair in pairs]
    rows, count = (torch.tensor(x) for x in zip(*pairs, strict=True))
    got = kvcrush.device_ranks(rows, count, how, 41)
    for line, (n, m) in zip(got.tolist(), pairs, strict=True):
        assert line[:m] == kvcrush.ranks(n, m, how)


@settings(deadline=None, max_examples=60)
@given(views())
def test_a_mean_over_heads(case: tuple[PromptView, Tensor, list[int]]) -> None:
    view = case[0]
    values = torch.rand(view.pos.shape, generator=torch.Generator().manual_seed(view.layer)) / 7
    want = tova.layer_mean(values, view.pos, torch.zeros(len(values), dtype=torch.int64))
    got = tova.heads_mean(values, view.pos, END)
    assert torch.equal(got[view.live], want[view.live])


@pytest.mark.parametrize("heads", [8, 32])
def test_large_numbers_stay_exact(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    need = torch.randint(0, 300_000, (heads,), generator=generator)
    total = int(need.sum())
    most = need + torch.randint(0, 5_000, (heads,), generator=generator)
    a = Fraction("0.1234567")
    wish = need * ((a.denominator - a.numerator) * heads) + a.numerator * total
    got = selection.share(wish, a.denominator * heads, most, torch.tensor(total))
    even = Fraction(total, heads)
    want = base.share([(1 - a) * int(n) + a * even for n in need], most.tolist(), total)
    assert got.tolist() == want

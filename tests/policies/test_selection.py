"""The tensors of the selection give what the oracle counts, ties and remainders included."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from views import build

from minikv import policies
from minikv.kernels.evict.plain import best, ensure_least, fill, order_key, share, wanted
from minikv.policies import adakv, kvcrush, selection
from minikv.policies.base import Evidence, PromptView
from minikv.policies.counter_rng import gumbel, uniform
from minikv.policies.outputs import output_norms
from minikv.policies.parts import Candidates, HeadAllocator

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


def free_rows(free: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in free]


def candidates(scores: Tensor, pos: Tensor, free: Tensor, window: int = 0) -> Candidates:
    """Of scores that were made elsewhere; nobody asks for keys or values."""
    view = PromptView(0, pos.shape[1], pos, 0, None, None, unasked, unasked)
    scorer: Any = SimpleNamespace(evidence=Evidence(window=window))
    return Candidates(view, scorer, scores, free)


def unasked() -> Tensor:
    raise AssertionError


def ada(
    alpha: float, rounding: str = "exact", normalize: bool = False, alloc: str = "blend"
) -> adakv.AdaKV:
    return adakv.AdaKV(alpha=alpha, rounding=rounding, normalize=normalize, alloc=alloc)


@settings(deadline=None, max_examples=80)
@given(lists(3), st.integers(1, 7))
def test_shares(case: list[list[int]], parts: int) -> None:
    wish, most, _ = case
    total = sum(wish)  # wishes are parts x wish / parts
    need = torch.tensor(wish)
    got = share(need, parts, 0, parts, torch.tensor(most), torch.tensor(total))
    assert got.tolist() == oracle.share([Fraction(w) for w in wish], most, total)
    uneven = [Fraction(w, parts) for w in wish]
    if sum(uneven).denominator == 1:
        total = int(sum(uneven))
        got = share(need, 1, 0, parts, torch.tensor(most), torch.tensor(total))
        assert got.tolist() == oracle.share(uneven, most, total)


@settings(deadline=None, max_examples=80)
@given(lists(1), st.integers(0, 60))
def test_fill(case: list[list[int]], total: int) -> None:
    assert fill(torch.tensor(case[0]), total).tolist() == oracle.fill(case[0], total)


@settings(deadline=None, max_examples=120)
@given(lists(3), st.integers(1, 2))
def test_every_head_gets_the_least(case: list[list[int]], least: int) -> None:
    counts, sure, more = case
    free = [n + m for n, m in zip(counts, more, strict=True)]
    want = oracle.ensure_least(counts, sure, free, least)
    got = ensure_least(*(torch.tensor(x) for x in (counts, sure, free)), least)
    assert got.tolist() == want
    assert sum(want) == sum(counts)
    assert all(0 <= n <= m for n, m in zip(want, free, strict=True))
    have = [n + m for n, m in zip(want, sure, strict=True)]
    can = [min(least, n + m) for n, m in zip(sure, free, strict=True)]
    poor = any(n < m for n, m in zip(have, can, strict=True))
    assert not poor or all(n == 0 or m <= least for n, m in zip(want, have, strict=True))


@settings(deadline=None, max_examples=80)
@given(rows(), st.lists(st.integers(0, 14), min_size=5, max_size=5))
def test_best(case: tuple[Tensor, Tensor, Tensor, int], counts: list[int]) -> None:
    scores, pos, free, _ = case
    counts = counts[: len(free)]
    got = best(order_key(scores, pos, free), torch.tensor(counts), max(counts))
    for h, (count, mine) in enumerate(zip(counts, free_rows(free), strict=True)):
        want = oracle.best(scores[h].tolist(), pos[h].tolist(), mine, count)
        assert {*got[h].nonzero().flatten().tolist()} == want


@settings(deadline=None, max_examples=80)
@given(rows())
def test_ranked(case: tuple[Tensor, Tensor, Tensor, int]) -> None:
    scores, pos, free, _ = case
    got = selection.ranked(scores, pos, free)
    for h, mine in enumerate(free_rows(free)):
        want = oracle.ranked(scores[h].tolist(), pos[h].tolist(), mine)
        assert {i: float(got[h, i]) for i in mine} == pytest.approx(want)


@settings(deadline=None, max_examples=80)
@given(rows(), st.sampled_from([0.0, 0.2, 0.25, 0.333, 1 / 3, 0.123456789, 1.0]), st.integers(0, 9))
def test_heads(case: tuple[Tensor, Tensor, Tensor, int], alpha: float, slack: int) -> None:
    scores, pos, free, total = case
    mine, most = free_rows(free), free.sum(1).tolist()
    need = oracle.wanted(scores.tolist(), pos.tolist(), mine, total)
    some = torch.tensor(total), total + slack
    assert wanted(order_key(scores, pos, free), *some).tolist() == need
    for rounding in ("exact", "official"):
        a = selection.exact(alpha) if rounding == "exact" else alpha
        want = oracle.adaptive(need, most, total, a, rounding)
        assert ada(alpha, rounding).share(candidates(scores, pos, free), *some).tolist() == want
    even = HeadAllocator().share(candidates(scores, pos, free), *some)
    assert even.tolist() == oracle.share([Fraction(total, len(mine))] * len(mine), most, total)


@settings(deadline=None, max_examples=100)
@given(rows(), st.sampled_from([0.0, 0.2, 0.25, 0.8, 1.0]), st.integers(0, 9), st.integers(0, 2))
def test_heads_with_other_rules(
    case: tuple[Tensor, Tensor, Tensor, int], alpha: float, slack: int, window: int
) -> None:
    scores, pos, free, total = case
    mine, some = free_rows(free), (torch.tensor(total), total + slack)
    want = oracle.floored(scores.tolist(), pos.tolist(), mine, total, alpha, window)
    floor = ada(alpha, alloc="floor")
    assert floor.share(candidates(scores, pos, free, window), *some).tolist() == want
    scores = scores.abs() * torch.tensor([1.0, 1e4, 1.0, 0.5, 7.0])[: len(scores), None]
    each = total // len(scores)
    weighed = []
    for h, rows_ in enumerate(mine):
        values = sorted((float(scores[h, i]) for i in rows_), reverse=True)
        weight = torch.tensor(sum(values[:each]) / max(sum(values), 1e-30))  # as float32
        weighed.append((scores[h] * weight).tolist())
    got = adakv.normalized(scores, free, torch.tensor(each), each + slack)
    torch.testing.assert_close(got, torch.tensor(weighed))
    need = oracle.wanted(got.tolist(), pos.tolist(), mine, total)
    want = oracle.adaptive(need, free.sum(1).tolist(), total, selection.exact(alpha), "exact")
    device = ada(alpha, normalize=True)
    assert device.share(candidates(scores, pos, free), *some).tolist() == want


@pytest.mark.parametrize("number", ["0.2", "1/3", "1.0", "0.0", "0.1234567", "0.12345678912345"])
def test_the_fraction_of_a_decimal(number: str) -> None:
    """The same one, as far as it has room in 64 bits."""
    found, want = selection.exact(float(Fraction(number))), Fraction(number)
    assert found.denominator <= 10**7
    assert found == want if want.denominator <= 10**7 else abs(found - want) < Fraction(1, 10**7)


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
        "random": st.sampled_from([0.0, 0.25, 0.5, 0.35, 0.123456789, 1.0, 1.0, 1.0]),
        "temperature": st.sampled_from([1.0, 0.05, 1e6]),
        "seed": st.integers(0, 3),
        "anchor": st.sampled_from(
            ["mean"] * 5 + ["inv_mean", "alternate", "random", "zeros", "ones"]
        ),
        "ranks": st.sampled_from(["ends", "step"]),
        "bits": st.sampled_from(["kv", "query"]),
        "draw": st.sampled_from(["score", "softmax"]),
    }
)


def expected(
    name: str, values: dict[str, policies.Value], rows_: Candidates, counts: list[int]
) -> list[set[int]]:
    """Who stays of each head, by the oracle."""
    view, free, parts = rows_.view, free_rows(rows_.free), small.parts(name)
    pos, seed = view.pos.tolist(), int(values.get("seed", 0))
    evidence = rows_.scorer.evidence

    def weights(scores: Tensor) -> Tensor:
        """Scores, or ranks where they do not add up; of all rows that are free here."""
        return scores if evidence.adds_up else selection.ranked(scores, view.pos, rows_.free)

    def then(head: int, scores: oracle.Rows, some: list[int], count: int) -> set[int]:
        return oracle.best(scores, pos[head], some, count)

    if "draw" in parts:

        def keys(head: int, scores: oracle.Rows, some: list[int]) -> oracle.Rows:
            worth = torch.tensor(scores)[None]
            if not evidence.adds_up:
                here = torch.zeros_like(rows_.free[:1])
                here[0, some] = True
                worth = selection.ranked(worth, view.pos[head : head + 1], here)
            weight = worth if values["draw"] == "softmax" else worth.clamp(min=1e-30).log()
            noise = gumbel(
                uniform(seed, view.layer, torch.tensor(head), view.position, view.pos[head])
            )
            return (weight[0] / values["temperature"] + noise).tolist()  # type: ignore[operator]

        then = oracle.draw(pos, keys, float(values["random"]))
    weighed = rows_.scores
    if "critical" in parts:
        weighed = (weights(rows_.scores) + values["epsilon"]) * output_norms(view)  # type: ignore[operator]

    def goal(major: list[bool]) -> list[bool]:
        return kvcrush.anchor(str(values["anchor"]), torch.tensor(major), seed, view.layer).tolist()

    found = []
    for head, count in enumerate(counts):
        how = then
        first: set[int] = set()
        if "critical" in parts:
            window = evidence.window
            sure = [
                min(n, max(0, int((n + window) * float(values["by_score"])) - window))
                for n in counts
            ]
            firsts = [
                oracle.best(rows_.scores[h].tolist(), pos[h], free[h], n)
                for h, n in enumerate(sure)
            ]
            first, count = firsts[head], count - sure[head]
            left = [
                [i for i in mine if i not in gone] for mine, gone in zip(free, firsts, strict=True)
            ]
        else:
            left = free
        if "kvcrush" in parts:
            worths = [[weighed[h].tolist()] for h in range(len(free))]
            if values["bits"] == "query":
                assert view.mass is not None
                each = [
                    rows_.scorer.score(replace(view, mass=view.mass[:, g : g + 1]))
                    for g in range(view.mass.shape[1])
                ]
                worths = [[worth[h].tolist() for worth in each] for h in range(len(free))]
            distance = oracle.distances(worths, pos, left, goal)
            how = oracle.crush(pos, distance, float(values["ratio"]), str(values["ranks"]))
        found.append(first | how(head, weighed[head].tolist(), left[head], count))
    return found


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
@settings(deadline=None, max_examples=50)
@given(views(), SETTINGS, st.integers(0, 3))
def test_who_stays(
    name: str, case: tuple[PromptView, Tensor, list[int]], setting: dict[str, object], slack: int
) -> None:
    view, free, counts = case
    takes = policies.find(name).prompt_options
    options = {o.name: setting[o.name] for o in takes if o.name in setting}
    if name.endswith("(l2)"):
        options["bits"] = "kv"
    made = build(name, options)
    rows_ = Candidates(view, made.scorer, made.scorer.score(view), free)
    how = torch.tensor(counts), max(counts) + slack
    if made.weigh is None:
        got = made.select.select(rows_, *how)
    else:
        got = made.weigh.select(rows_, *how, made.select)
    want = expected(name, policies.read_options(name, takes, options), rows_, counts)
    assert [{*row.nonzero().flatten().tolist()} for row in got] == want
    assert got.sum(1).tolist() == torch.minimum(torch.tensor(counts), free.sum(1)).tolist()


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    st.sampled_from(["ends", "step"]),
)
def test_which_stand_for_all(pairs: list[tuple[int, int]], how: str) -> None:
    pairs = [(max(pair), min(pair)) for pair in pairs]
    rows_, count = (torch.tensor(x) for x in zip(*pairs, strict=True))
    got = kvcrush.ranks(rows_, count, how, 41)
    for line, (n, m) in zip(got.tolist(), pairs, strict=True):
        assert line[:m] == oracle.ranks(n, m, how)


@pytest.mark.parametrize("heads", [8, 32])
def test_large_numbers_stay_exact(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    need = torch.randint(0, 300_000, (heads,), generator=generator)
    total = int(need.sum())
    most = need + torch.randint(0, 5_000, (heads,), generator=generator)
    a = Fraction("0.1234567")
    times, parts = (a.denominator - a.numerator) * heads, a.denominator * heads
    got = share(need, times, a.numerator, parts, most, torch.tensor(total))
    even = Fraction(total, heads)
    want = oracle.share([(1 - a) * int(n) + a * even for n in need], most.tolist(), total)
    assert got.tolist() == want

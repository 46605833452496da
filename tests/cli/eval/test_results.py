"""Intervals by hand, and results as tables and JSON have them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.eval import results
from minikv.cli.eval.items import Item

TEXTS, ASKED = [Item("", (), ())] * 2, [Item("", ("?",), (("a",),))] * 2
ADAKV = EvictionConfig.read("adakv", "roco", "64")


def cell(task: str, policy: str, decode: str, budget: str = "64", **more: Any) -> results.Cell:
    figures = {"score": 0.5, "low": 0.2, "high": 0.8, "held": 0.3} | more
    return results.Cell(task, policy, decode, budget, n=4, **{"stride": 0, **figures})


def test_an_interval_of_shares_is_over_documents() -> None:
    low, high = results.wilson(0.9, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert results.wilson(0.5, 0) == (0.0, 1.0)
    single = [[1.0]] * 90 + [[0.0]] * 10
    assert results.of_shares(single) == pytest.approx(results.wilson(0.9, 100))
    # Six answers that are always alike say as much as one, and Student's t makes it a little less.
    alike = results.of_shares([row * 6 for row in single])
    assert alike == pytest.approx(results.wilson(0.9, 99 * (1.96 / 1.9842) ** 2), abs=1e-4)
    # Documents that do not differ at all are worth every question; more than that none is.
    even, t = results.of_shares([[1.0, 0.0]] * 50), 2.0096
    assert even == pytest.approx(results.wilson(0.5, 100 * (1.96 / t) ** 2), abs=1e-4)
    # All right: nothing is known of how alike they are, so a document counts once.
    right = results.of_shares([[1.0] * 6] * 50)
    assert right == pytest.approx(results.wilson(1.0, 50 * (1.96 / t) ** 2), abs=1e-4)
    assert results.of_shares([[1.0, 0.0, 1.0]]) == results.of_shares([]) == (None, None)


def test_an_interval_of_means_is_over_documents() -> None:
    """Two sums and counts by hand: 3 + 1 over 2 + 2 tokens; the mean 1, its error (1, -1) / 4."""
    low, high = results.of_means([[2.0, 1.0], [0.0, 1.0]])
    assert (low, high) == pytest.approx((1 - 12.706 * 0.5, 1 + 12.706 * 0.5))
    # A document twice as long weighs twice as much, and does not count as two.
    apart = [20 * (1 - 2), 10 * (2 - 2), 10 * (4 - 2)]
    error = (3 / 2 * sum(x * x for x in apart)) ** 0.5 / 40
    found = results.of_means([[1.0] * 20, [2.0] * 10, [4.0] * 10])
    assert found == pytest.approx((2 - 4.303 * error, 2 + 4.303 * error))
    assert results.of_means([[1.0, 2.0]]) == (None, None)
    # Differences of several questions have bounds, never beyond what a difference can be.
    assert results.of_differences([[-1.0, 0.0], [1.0, 1.0]]) == (-1.0, 1.0)
    assert results.of_differences([[0.5], [0.5]]) == (0.5, 0.5)
    assert results.of_differences([[1.0]]) == (None, None)


@pytest.mark.parametrize(("documents", "quantile"), [(12, 2.201), (31, 2.042), (201, 1.972)])
def test_students_t_beyond_the_table(documents: int, quantile: float) -> None:
    rows = [[float(i % 2)] for i in range(documents)]
    mean = sum(r[0] for r in rows) / documents
    error = (sum((r[0] - mean) ** 2 for r in rows) / documents / (documents - 1)) ** 0.5
    low, _ = results.of_means(rows)
    assert low is not None
    assert (mean - low) / error == pytest.approx(quantile, abs=5e-4)


def test_a_chat_beside_the_full_cache() -> None:
    """Scores by the number of the question and by the items' own groups, in order."""
    one = Item("", ("?", "?"), (("a b",), ("c",)), groups=("A 1,000",))
    items = [one, Item("", ("?", "?"), (("d",), ("e",)), groups=("A 400",))]
    made, full = [["a b", "c"], ["d", "x"]], [["a  b", "c"], ["d", "e"]]
    found = results.cell("followup", ADAKV, "recall", items, made, full, [0.1, 0.3])
    assert (found.n, found.score, found.held, found.reuse) == (4, 0.75, 0.2, "recall")
    assert found.by_group == [("A 400", 0.5, 2), ("A 1,000", 1, 2), ("Q1", 1, 2), ("Q2", 0.5, 2)]
    assert (found.answers, found.scores) == (made, [[1.0, 1.0], [1.0, 0.0]])
    alone = results.cell("followup", ADAKV, "once", items[:1], [["x", "c"]], [["y", "c"]], [0.1])
    assert alone.against == (0.0, None, None), "one document has no interval"
    assert (found.against or ())[0] == 0.0


def test_numbers_by_token() -> None:
    """Perplexity is the exponential of the mean; JSON has no infinity. A perplexity has an interval
    from five documents on, which does not go below 1; its difference from the full cache has one
    from two on."""
    made = [[1.0, 2.0], [3.0]]

    def ppl(made: list[list[float]], full: list[list[float]]) -> results.Cell:
        both = [[[[(x, x / 4, x < 2) for x in row]] for row in of] for of in (made, full)]
        return results.cell("ppl", ADAKV, "once", TEXTS, *both, [1.0] * len(made))

    found = ppl(made, [[0.5, 2.0], [2.0]])
    assert (found.score, found.by_item) == (math.exp(2.0), [1.5, 3.0])
    assert (found.low, found.high) == (None, None)
    more, low, high = found.against or ()
    assert low < 0.5 == more < high
    assert ppl([[800.0], [900.0]], [[1.0], [1.0]]).record()["score"] is None
    few = ppl([[0.0], [0.0], [0.0], [0.0], [4.0]], [[0.0]] * 5)
    assert few.low == 1.0
    tokens = [[[(x, x / 4, x < 2) for x in row]] for row in made]
    kl, same, asked = (
        results.cell(task, ADAKV, "once", items, tokens, tokens, [1.0] * 2)
        for task, items in (("kl", TEXTS), ("agree", TEXTS), ("agree", ASKED))
    )
    assert (kl.score, kl.n, same.score, same.n) == (0.5, 3, 1 / 3, 3)
    assert (asked.score, asked.n, asked.until) == (0.0, 2, 0.5)
    assert same.until is None


@pytest.mark.parametrize(
    ("cell_of", "says"),
    [
        (("facts", "full", "none", "-", 0.4), "The full cache itself has 40.0%"),
        (("facts", "full", "none", "-", 0.6), ""),
        (("kl", "full", "none", "-", 0.0), "nats a token"),
    ],
)
def test_what_cannot_be_compared_is_said(cell_of: tuple[Any, ...], says: str) -> None:
    *names, score = cell_of
    others = [cell(names[0], policy, "h2o") for policy in ("adakv", "snapkv")]
    last = results.table([cell(*names, score=score), *others]).splitlines()[5:]
    assert bool(last) == bool(says)
    assert says in "".join(last)


@pytest.mark.parametrize(("more", "less"), [(0, 0), (1, 0), (3, 1), (30, 18), (82, 2), (200, 0)])
def test_ends_are_where_the_score_test_turns(more: int, less: int) -> None:
    """Tango's interval of 200 documents with one answer each."""
    n = 200
    rows = [[1.0]] * more + [[-1.0]] * less + [[0.0]] * (n - more - less)
    found = results.of_differences(rows)

    def score(d: float) -> float:
        """Tango's statistic, with the likeliest share of `less` under d found by search."""

        def likely(q: float) -> float:
            rest = 1 - 2 * q - d
            parts = ((more, q + d), (less, q), (n - more - less, rest))
            return sum(k * math.log(max(p, 1e-300)) for k, p in parts if k)

        low, high = max(0.0, -d), (1 - d) / 2
        for _ in range(200):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (a, high) if likely(a) < likely(b) else (low, b)
        return (more - less - n * d) / math.sqrt(n * (2 * low + d * (1 - d)))

    low, high = (float(end) for end in found if end is not None)
    assert score(low) == pytest.approx(1.96, abs=1e-3)
    assert high == pytest.approx(1.0) if more == n else abs(score(high) + 1.96) < 1e-3
    turned = results.of_differences([[-row[0]] for row in rows])
    assert turned == pytest.approx((-high, -low))


def test_what_is_shown() -> None:
    """A column where any cell has a value, `reuse` only where one is not `once`, and no -0.0."""
    full = cell("facts", "full", "none", "-", score=1.0, against=(0.0, 0.0, 0.0))
    paired = cell("facts", "h2o", "h2o", against=(-0.25, -0.5, 0.1), by_group=[("Q1", 0.5, 2)])
    head, first, second, _, groups, none, some = results.table([full, paired]).splitlines()[1:]
    assert head.split() == "policy decode budget score (95 %) n held against full (95 %)".split()
    assert first.split()[-3:] == ["4", "30.0%", "-"]
    assert "-25.0% (-50.0% to +10.0%)" in second
    assert groups.split() == ["policy", "decode", "budget", "Q1"]
    assert (none.split()[-1], some.split()[-1]) == ("-", "50.0%")
    mine, other = (cell("agree", "snapkv", "none", until=x) for x in (5.25, None))
    head, first, second = results.table([mine, other]).splitlines()[1:]
    assert head.endswith("  held  tokens before difference")
    assert (first.split()[-1], second.split()[-1]) == ("5.2", "-")
    small = cell("agree", "full", "none", "-", score=-1e-9, low=-2e-9, high=1e-9)
    assert "-0.0" not in results.table([small])
    both = [cell("facts", "tova", "tova", stride=32, reuse=reuse) for reuse in ("recall", "once")]
    head, none, recall, once = results.table([full, *both]).splitlines()[1:5]
    assert head.split()[:4] == ["policy", "decode", "budget", "reuse"]
    assert none.split()[:4] == ["full", "none", "-", "-"]
    assert recall.split()[:5] == ["tova", "/32", "tova", "64", "recall"]
    assert once.split()[4] == "once"

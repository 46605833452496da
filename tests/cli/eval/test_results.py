"""Intervals by hand, and results as tables, JSON and pictures have them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.eval import intervals, pictures, results
from minikv.cli.eval.items import Item
from minikv.policies import default_step

TEXTS, ASKED = [Item("", (), ())] * 2, [Item("", ("?",), (("a",),))] * 2
ADAKV = EvictionConfig.read("adakv", "roco", "64")


def cell(task: str, policy: str, decode: str, budget: str = "64", **more: Any) -> results.Cell:
    figures = {"score": 0.5, "low": 0.2, "high": 0.8, "held": 0.3} | more
    return results.Cell(task, policy, decode, budget, n=4, **{"stride": 0, **figures})


def test_an_interval_of_shares_is_over_documents() -> None:
    low, high = intervals.wilson(0.9, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert intervals.wilson(0.5, 0) == (0.0, 1.0)
    single = [[1.0]] * 90 + [[0.0]] * 10
    assert intervals.of_shares(single) == pytest.approx(intervals.wilson(0.9, 100))
    # Six answers that are always alike say as much as one, and Student's t makes it a little less.
    alike = intervals.of_shares([row * 6 for row in single])
    assert alike == pytest.approx(intervals.wilson(0.9, 99 * (1.96 / 1.9842) ** 2), abs=1e-4)
    # Documents that do not differ at all are worth every question; more than that none is.
    even, t = intervals.of_shares([[1.0, 0.0]] * 50), 2.0096
    assert even == pytest.approx(intervals.wilson(0.5, 100 * (1.96 / t) ** 2), abs=1e-4)
    # All right: nothing is known of how alike they are, so a document counts once.
    right = intervals.of_shares([[1.0] * 6] * 50)
    assert right == pytest.approx(intervals.wilson(1.0, 50 * (1.96 / t) ** 2), abs=1e-4)
    assert intervals.of_shares([[1.0, 0.0, 1.0]]) == intervals.of_shares([]) == (None, None)


def test_an_interval_of_means_is_over_documents() -> None:
    """Two sums and counts by hand: 3 + 1 over 2 + 2 tokens; the mean 1, its error (1, -1) / 4."""
    low, high = intervals.of_means([[2.0, 1.0], [0.0, 1.0]])
    assert (low, high) == pytest.approx((1 - 12.706 * 0.5, 1 + 12.706 * 0.5))
    # A document twice as long weighs twice as much, and does not count as two.
    apart = [20 * (1 - 2), 10 * (2 - 2), 10 * (4 - 2)]
    error = (3 / 2 * sum(x * x for x in apart)) ** 0.5 / 40
    found = intervals.of_means([[1.0] * 20, [2.0] * 10, [4.0] * 10])
    assert found == pytest.approx((2 - 4.303 * error, 2 + 4.303 * error))
    assert intervals.of_means([[1.0, 2.0]]) == (None, None)


@pytest.mark.parametrize(("documents", "quantile"), [(12, 2.201), (31, 2.042), (201, 1.972)])
def test_students_t_beyond_the_table(documents: int, quantile: float) -> None:
    rows = [[float(i % 2)] for i in range(documents)]
    mean = sum(r[0] for r in rows) / documents
    error = (sum((r[0] - mean) ** 2 for r in rows) / documents / (documents - 1)) ** 0.5
    low, _ = intervals.of_means(rows)
    assert low is not None
    assert (mean - low) / error == pytest.approx(quantile, abs=5e-4)


def test_a_chat_beside_the_full_cache() -> None:
    """Answers that are the full cache's word for word, and chats without a wrong answer."""
    items = [Item("", ("?", "?"), (("a b",), ("c",))), Item("", ("?", "?"), (("d",), ("e",)))]
    made, full = [["a b", "c"], ["d", "x"]], [["a  b", "c"], ["d", "e"]]
    found = results.cell("followup", ADAKV, "recall", items, made, full, [0.1, 0.3])
    assert (found.n, found.score, found.held, found.reuse) == (4, 0.75, 0.2, "recall")
    assert (found.more["same"], found.more["all_right"]) == (0.75, 0.5)
    assert found.by_question == found.same_by_question == [1.0, 0.5]
    assert found.more["same_low"] < 0.75 < found.more["same_high"]
    alone = results.cell("followup", ADAKV, "once", items[:1], [["x", "c"]], [["y", "c"]], [0.1])
    assert {*alone.more} == {"against", "same", "all_right"}, "one document has no interval"
    assert (alone.more["same"], found.more["against"]) == (0.5, 0.0)


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
    assert (found.low, found.high, found.more["against"]) == (None, None, 0.5)
    assert found.more["against_low"] < 0.5 < found.more["against_high"]
    assert ppl([[800.0], [900.0]], [[1.0], [1.0]]).record()["score"] is None
    few = ppl([[0.0], [0.0], [0.0], [0.0], [4.0]], [[0.0]] * 5)
    assert few.low == 1.0
    tokens = [[[(x, x / 4, x < 2) for x in row]] for row in made]
    kl = results.cell("kl", ADAKV, "once", TEXTS, tokens, tokens, [1.0] * 2)
    same = results.cell("agree", ADAKV, "once", TEXTS, tokens, tokens, [1.0] * 2)
    asked = results.cell("agree", ADAKV, "once", ASKED, tokens, tokens, [1.0] * 2)
    assert (kl.score, kl.n, same.score, same.n) == (0.5, 3, 1 / 3, 3)
    assert (asked.score, asked.n, asked.more) == (0.0, 2, {"tokens_before_difference": 0.5})


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


def test_differences_of_several_questions_have_bounds() -> None:
    """By Student's t, and never beyond what a difference can be. Tango's interval, of one question
    each, is tested with docs/results.md."""
    assert intervals.of_differences([[-1.0, 0.0], [1.0, 1.0]]) == (-1.0, 1.0)
    assert intervals.of_differences([[0.5], [0.5]]) == (0.5, 0.5)
    assert intervals.of_differences([[1.0]]) == (None, None)


def test_rows_are_told_apart_by_their_decode_policy(tmp_path: Path) -> None:
    """Questions and maps name it where one was chosen, and not where it goes without saying."""
    plain = cell("followup", "full", "none", "-", by_question=[1.0, 1.0])
    chosen = [cell("followup", "snapkv", d, by_question=[1.0, 0.0]) for d in ("roco", "none")]
    called = ["full", "snapkv with roco 64", "snapkv with none 64"]
    assert results.names([plain, *chosen]) == called
    text = results.table([plain, *chosen])
    assert all(f"\n{name}  100.0%    0.0%" in text for name in called[1:])
    auto = [cell("followup", name, default_step(name)) for name in ("snapkv", "streaming")]
    assert results.names([plain, *auto]) == ["full", "snapkv 64", "streaming 64"]
    assert results.names([plain, cell("ppl", "full", "roco")]) == ["full", "full with roco 64"]
    assert results.names([cell("facts", "tova", "tova", stride=32)]) == ["tova /32 64"]
    pytest.importorskip("matplotlib")
    places = [(d, n, d, 1) for d in (0.0, 1.0) for n in (1000, 2000)]
    mapped = [cell("needle", "snapkv", d, by_place=places) for d in ("roco", "none")]
    for name in ("map.svg", "map.png"):
        pictures.needle_map(mapped, tmp_path / name)
    drawn = (tmp_path / "map.svg").read_text()
    assert all(f">{name}<" in drawn for name in (*called[1:], "2,000", "100%", "100"))
    assert (tmp_path / "map.png").stat().st_size > 2000


def test_further_figures_are_shown() -> None:
    """No -0.0."""
    plain = cell("agree", "full", "none", "-", more={"tokens_before_difference": 5.25})
    mine, other = cell("agree", "snapkv", "none"), cell("facts", "snapkv", "none")
    paired = cell("facts", "h2o", "h2o", more={"against": -0.25, "against_low": -0.5})
    head, first, second = results.table([plain, mine]).splitlines()[1:]
    assert head.endswith("  held  tokens before difference")
    assert (first.split()[-1], second.split()[-1]) == ("5.2", "-")
    assert "difference" not in results.table([other])
    full = cell("facts", "full", "none", "-", score=1.0)
    assert "-25.0%" in results.table([full, paired]).splitlines()[-1]
    small = cell("agree", "full", "none", "-", score=-1e-9, low=-2e-9, high=1e-9)
    assert "-0.0" not in results.table([small])


def test_what_later_questions_found_is_shown_where_it_was_chosen() -> None:
    """A column, and a part of the names; nothing where every row is `once`."""
    plain = cell("followup", "full", "none", "-", by_question=[1.0, 1.0])
    shown = {
        "by_question": [1.0, 0.0],
        "same_by_question": [1.0, 0.25],
        "more": {"same": 0.75, "same_low": 0.5, "same_high": 0.9, "all_right": 0.5},
    }
    step = default_step("snapkv")
    both = [cell("followup", "snapkv", step, reuse=reuse, **shown) for reuse in ("recall", "once")]
    assert results.names([plain, *both]) == ["full", "snapkv 64 recall", "snapkv 64 once"]
    text = results.table([plain, *both])
    head, full, recall, once = text.splitlines()[1:5]
    assert head.split()[:4] == ["policy", "decode", "budget", "reuse"]
    assert head.endswith("same as full  all right")
    assert full.split()[:4] == ["full", "none", "-", "-"]
    assert (recall.split()[3], once.split()[3]) == ("recall", "once")
    assert recall.split()[-2:] == ["75.0%", "50.0%"]
    assert "\nsnapkv 64 recall  100.0%  25.0%" in text.partition("same as full  ")[2]
    assert "reuse" not in results.table([plain, both[1]])


# -- quality over budget ----------------------------------------------------------------------


def scored(policy: str, budget: str, score: float, reuse: str = "once") -> results.Cell:
    decode = "none" if policy == "full" else "h2o"
    return cell("facts", policy, decode, budget, score=score, low=None, high=None, reuse=reuse)


CELLS = [
    scored("full", "-", 0.99),
    *(scored("adakv", b, s) for b, s in (("64", 0.8), ("256", 0.9), ("128", 0.85))),
    *(scored("adakv", b, s, "blind") for b, s in (("64", 0.2), ("128", 0.3))),
    *(scored("<keydiff>&", b, s, "blind") for b, s in (("64", 0.7), ("128", 0.9))),
]


def test_a_panel_for_each_thing_that_questions_find() -> None:
    seen, unseen = pictures.panels(CELLS)
    titles = ["facts, the question was seen", "facts, the question was not seen"]
    assert [seen.title, unseen.title] == titles
    assert (seen.level, unseen.level) == (0.99, 0.99)
    assert list(seen.lines) == ["adakv"]
    assert [p[:2] for p in unseen.lines["<keydiff>&"]] == [("64", 0.7), ("128", 0.9)]
    assert [p.title for p in pictures.panels(CELLS[:4])] == ["facts"]
    (ppl,) = pictures.panels([cell("ppl", "full", "none", "-"), cell("ppl", "adakv", "h2o")])
    assert (ppl.title, ppl.shares) == ("ppl, lower is better", False)


@pytest.mark.parametrize(
    ("budgets", "at"),
    [
        (("256", "32", "64"), {"32": 5.0, "64": 6.0, "256": 8.0}),
        (("64", "20%", "1MiB", "5%"), {"1MiB": 0.0, "64": 1.0, "5%": 2.0, "20%": 3.0}),
    ],
)
def test_budgets_go_right(budgets: tuple[str, ...], at: dict[str, float]) -> None:
    """A logarithmic axis of tokens; shares and bytes at equal distances."""
    assert pictures.places(budgets) == at
    assert list(pictures.places(budgets)) == list(at)


def test_the_picture_has_every_policy_and_is_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        pictures.quality(CELLS, path)
    assert first.read_bytes() == second.read_bytes()
    texts = {e.text for e in ElementTree.parse(first).iter("{http://www.w3.org/2000/svg}text")}
    assert {"adakv", "<keydiff>&", "full cache", "tokens per head", "128", "100%"} <= texts

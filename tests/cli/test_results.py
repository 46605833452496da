"""docs/results.md: paired intervals worked by hand, and the page is what its files say."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "docs" / "measurements"
if not (HERE / "results.py").exists():
    pytest.skip("needs the repository's docs", allow_module_level=True)
_SPEC = importlib.util.spec_from_file_location("measured_results", HERE / "results.py")
assert _SPEC is not None
assert _SPEC.loader is not None
results = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = results  # dataclasses look their module up
_SPEC.loader.exec_module(results)


def paired(more: int, less: int, n: int) -> results.Difference:
    """n documents, of which `more` are right for the first alone and `less` for the second."""
    alike = n - more - less
    first = [1.0] * more + [0.0] * less + [1.0] * alike
    second = [0.0] * more + [1.0] * less + [1.0] * alike
    return results.difference(first, second, shares=True)


def test_where_no_document_differs_the_interval_has_a_width() -> None:
    found = paired(0, 0, 200)
    bound = 1.96**2 / (200 + 1.96**2)  # (n d)^2 = z^2 n d (1 - d)
    assert (found.mean, found.low, found.high) == pytest.approx((0.0, -bound, bound))
    assert found.alone == (0, 0)
    within = next(c for c in results.CLAIMS if "within" in c.text)
    assert results.verdict(within, found.low, found.high) == "undecided"
    assert results.verdict(within, -0.009, 0.009) == "agrees"
    assert results.verdict(within, -0.05, -0.02) == "disagrees"


@pytest.mark.parametrize(("more", "less"), [(1, 0), (3, 1), (7, 0), (30, 18), (82, 2), (200, 0)])
def test_ends_are_where_the_score_test_turns(more: int, less: int) -> None:
    n = 200
    found = paired(more, less, n)
    assert found.mean == (more - less) / n

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

    assert score(found.low) == pytest.approx(1.96, abs=1e-3)
    if more < n:
        assert score(found.high) == pytest.approx(-1.96, abs=1e-3)
    else:
        assert found.high == pytest.approx(1.0)
    turned = paired(less, more, n)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))


def test_means_of_few_documents_are_by_student() -> None:
    found = results.difference([0.3, 0.1, 0.2], [0.1, 0.2, 0.1], shares=False)
    mean, error = 0.2 / 3, math.sqrt((0.2**2 + 0.1**2 + 0.1**2 - 3 * (0.2 / 3) ** 2) / 6)
    assert (found.low, found.high) == pytest.approx((mean - 4.303 * error, mean + 4.303 * error))
    assert found.alone is None
    ends = (0.01, 0.02), (-0.02, -0.01), (-0.02, 0.01)
    said = [results.verdict(results.CLAIMS[0], *one) for one in ends]
    assert said == ["agrees", "disagrees", "no difference seen"]


def test_the_first_tables_have_the_figures_of_the_long_ones() -> None:
    """By another road: from the files themselves."""
    page, rows = "\n".join(results.later_tables()), results.unseen(2000)
    cells = [c for c in results.load("followup-reuse") if c["policy"] == "global-span"]
    later = {c["reuse"]: 100 * sum(c["by_question"][1:]) / 5 for c in cells}
    assert f"| global-span | {later['recall']:.1f} | {later['once']:.1f} |" in page
    for policy in ("kvzip", "adakv"):
        (cell,) = (r for r in rows if (r["method"], r["budget"]) == (policy, "128"))
        assert f"| {policy} | {100 * cell['score']:.1f} (" in page


def test_the_page_is_what_the_files_say() -> None:
    assert results.OUT.read_text() == results.page()

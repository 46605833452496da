"""How a budget is written, and what it comes to in rows."""

from __future__ import annotations

import pytest

from minikv.cache.budget import Budget
from minikv.errors import UsageError


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

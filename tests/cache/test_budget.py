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


@pytest.mark.parametrize("text", ["auto", "512", "20%", "12.5%", "100B", "1KiB", "64MiB", "1.5GiB"])
def test_a_budget_is_shown_as_it_was_written(text: str) -> None:
    assert str(Budget.parse(text)) == text


BAD = ["", "0", "-3", "12.5", "120%", "0%", "64 apples", "nan", "1e3"]
BAD += ["9" * 5000, "9" * 400 + "GiB"]


@pytest.mark.parametrize("text", BAD)
def test_bad_budget(text: str) -> None:
    with pytest.raises(UsageError, match="the budget cannot be"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("text", "size"), [("1.5KiB", 1536), ("512", None), ("20%", None), ("auto", None), ("x", None)]
)
def test_a_size_is_a_budget_in_bytes(text: str, size: int | None) -> None:
    assert Budget.size(text) == size


@pytest.mark.parametrize(
    ("share", "tokens", "rows"),
    [
        ("20%", 1003, 201),  # 200.6
        ("20%", 1002, 200),  # 200.4
        ("12.5%", 1001, 125),
        ("50%", 7, 4),  # halves to the even number
        ("50%", 5, 2),
        ("0.1%", 10, 1),  # at least one
        ("10%", 10, 1),  # a float's 10 * (1 - 0.9) is less than 1
    ],
)
def test_a_share_is_rounded_to_the_nearest_row(share: str, tokens: int, rows: int) -> None:
    assert Budget.parse(share).rows(tokens, row_bytes=128, heads=8) == rows

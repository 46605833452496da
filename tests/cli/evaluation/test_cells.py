"""A cell as JSON has it."""

from __future__ import annotations

from minikv.cli.evaluation import cells


def test_json_has_no_infinity() -> None:
    cell = cells.Cell("ppl", "full", "none", "-", 0, 4, 9.0, 0.0, float("inf"), 1.0)
    assert cell.record()["high"] is None
    assert cell.record()["score"] == 9.0

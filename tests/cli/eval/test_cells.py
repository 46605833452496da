"""A cell as JSON has it."""

from __future__ import annotations

from dataclasses import replace

from minikv.cli.eval import cells


def test_json_has_no_infinity() -> None:
    cell = cells.Cell("ppl", "full", "none", "-", 0, 4, 9.0, 0.0, float("inf"), 1.0)
    assert cell.record()["high"] is None
    assert cell.record()["score"] == 9.0


def test_a_chat_beside_the_full_cache() -> None:
    """Answers that are the full cache's word for word, and chats without a wrong answer."""
    cell = replace(
        cells.Cell("codes", "adakv", "roco", "64", 0, 4, 0.75, 0.0, 1.0, 0.1),
        by_item=[1.0, 0.5],
    )
    made = cells.beside(cell, [["a b", "c"], ["d", "x"]], [["a  b", "c"], ["d", "e"]])
    assert made.more["same"] == 0.75
    assert made.more["all_right"] == 0.5
    assert made.same_by_question == [1.0, 0.5]
    assert made.more["same_low"] < 0.75 < made.more["same_high"]
    alone = cells.beside(replace(cell, by_item=[1.0]), [["a"]], [["b"]])
    assert alone.more == {"same": 0.0, "all_right": 1.0}, "one document has no interval"

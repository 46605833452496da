"""Tables, CSV and maps."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from minikv.cli.eval import cells, show
from minikv.policies import default_step


def _cell(task: str, policy: str, decode: str, budget: str = "64", **more: Any) -> cells.Cell:
    return cells.Cell(task, policy, decode, budget, 0, 4, 0.5, 0.2, 0.8, 0.3, **more)


def test_rows_are_told_apart_by_their_decode_policy(tmp_path: Path) -> None:
    """Questions and maps name it where one was chosen, and not where it goes without saying."""
    plain = _cell("followup", "full", "none", "-", by_question=[1.0, 1.0])
    chosen = [_cell("followup", "snapkv", d, by_question=[1.0, 0.0]) for d in ("roco", "none")]
    assert show.names([plain, *chosen]) == ["full", "snapkv with roco 64", "snapkv with none 64"]
    text = show.table([plain, *chosen])
    for name in ("snapkv with roco 64", "snapkv with none 64"):
        assert f"\n{name} 100.0%   0.0%" in text
    auto = [_cell("followup", name, default_step(name)) for name in ("snapkv", "streaming")]
    assert show.names([plain, *auto]) == ["full", "snapkv 64", "streaming 64"]
    assert show.names([plain, _cell("ppl", "full", "roco")]) == ["full", "full with roco 64"]
    strided = cells.Cell("facts", "tova", "tova", "64", 32, 4, 0.5, 0.2, 0.8, 0.3)
    assert show.names([plain, strided]) == ["full", "tova /32 64"]

    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    places = [(0.0, 1000, 0.5, 4)]
    mapped = [_cell("needle", "snapkv", d, by_place=places) for d in ("roco", "none")]
    with pyplot.rc_context({"svg.fonttype": "none"}):
        show.write(mapped, {}, [tmp_path / "map.svg"])
    drawn = (tmp_path / "map.svg").read_text()
    for name in ("snapkv with roco 64", "snapkv with none 64"):
        assert f">{name}<" in drawn


def test_agreement_is_shown_in_full() -> None:
    """Where answers begin to differ and their ROUGE-L, in the table and the CSV."""
    plain = _cell("agree", "full", "none", "-", more={"rouge_l": 1.0})
    mine = _cell(
        "agree", "snapkv", "none", more={"rouge_l": 0.8125, "median_first_difference": 3.0}
    )
    other = _cell("facts", "snapkv", "none")
    head, first, second = show.table([plain, mine]).splitlines()[1:]
    assert head.endswith("  held  ROUGE-L  words before difference")
    assert first.split()[-2:] == ["1.000", "-"]
    assert second.split()[-2:] == ["0.812", "3"]
    assert "ROUGE-L" not in show.table([other])
    rows = list(csv.DictReader(io.StringIO(show.as_csv([plain, mine, other]))))
    assert [(r["rouge_l"], r["median_first_difference"]) for r in rows] == [
        ("1.000000", ""),
        ("0.812500", "3.000000"),
        ("", ""),
    ]


def test_no_zero_has_a_sign() -> None:
    cell = cells.Cell("loss", "full", "none", "-", 0, 4, -1e-9, -2e-9, 1e-9, 1.0)
    assert "-0.0" not in show.table([cell])
    assert "-0.0" not in show.as_csv([cell])
    assert cell.record()["score"] == -1e-9, "what was measured stays"


def test_the_bar_says_how_long() -> None:
    line = show.bar(30, 120, 60.0, "facts")
    assert line == f"facts  [{'=' * 7}{' ' * 23}] 30/120  3:00 left"
    assert show.bar(0, 5, 0.0, "ppl").endswith("0/5")


def test_the_map(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cell = cells.Cell(
        "needle",
        "full",
        "none",
        "-",
        0,
        4,
        0.5,
        0.2,
        0.8,
        1.0,
        by_place=[
            (0.0, 1000, 0.0, 1),
            (0.0, 2000, 1.0, 1),
            (1.0, 1000, 1.0, 1),
            (1.0, 2000, 0.0, 1),
        ],
    )
    for name in ("map.svg", "map.png"):
        show.write([cell], {}, [tmp_path / name])
        assert (tmp_path / name).stat().st_size > 2000


def test_what_later_questions_found_is_shown_where_it_was_chosen() -> None:
    """A column, and a part of the names; nothing where every row is `once`."""
    plain = _cell("followup", "full", "none", "-", by_question=[1.0, 1.0])
    more = {"same": 0.75, "same_low": 0.5, "same_high": 0.9, "all_right": 0.5}
    both = [
        _cell(
            "followup",
            "snapkv",
            default_step("snapkv"),
            by_question=[1.0, 0.0],
            same_by_question=[1.0, 0.25],
            reuse=reuse,
            more=more,
        )
        for reuse in ("recall", "once")
    ]
    assert show.names([plain, *both]) == ["full", "snapkv 64 recall", "snapkv 64 once"]
    text = show.table([plain, *both])
    head, full, recall, once = text.splitlines()[1:5]
    assert head.split()[:4] == ["policy", "decode", "budget", "reuse"]
    assert head.endswith("same as full  all right")
    assert full.split()[:4] == ["full", "none", "-", "-"]
    assert (recall.split()[3], once.split()[3]) == ("recall", "once")
    assert recall.split()[-2:] == ["75.0%", "50.0%"]
    assert "\nsnapkv 64 recall 100.0%  25.0%" in text.partition("same as full   ")[2]
    assert "reuse" not in show.table([plain, both[1]])
    rows = list(csv.DictReader(io.StringIO(show.as_csv([plain, *both]))))
    assert [(r["reuse"], r["same"]) for r in rows] == [
        ("once", ""),
        ("recall", "0.750000"),
        ("once", "0.750000"),
    ]

"""The picture of quality over budget."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from minikv.cli.eval import command, plot
from minikv.cli.eval.cells import Cell
from minikv.cli.eval.plot import Line, Panel, Point
from minikv.cli.main import app

SPACE = "{http://www.w3.org/2000/svg}"


def cell(policy: str, budget: str, score: float, reuse: str = "once", task: str = "facts") -> Cell:
    low, high = max(0.0, score - 0.1), min(1.0, score + 0.1)
    full = policy == "full"
    decode = "none" if full else "h2o"
    return Cell(task, policy, decode, budget, 0, 9, score, low, high, 0.1, reuse=reuse)


CELLS = [
    cell("full", "-", 0.99),
    *(cell("adakv", b, s) for b, s in (("64", 0.8), ("256", 0.9), ("128", 0.85))),
    *(cell("adakv", b, s, "blind") for b, s in (("64", 0.2), ("128", 0.3), ("256", 0.5))),
    *(cell("keydiff", b, s, "blind") for b, s in (("64", 0.7), ("128", 0.9))),
]


def test_a_panel_for_each_thing_that_questions_find() -> None:
    seen, unseen = plot.panels(CELLS)
    assert (seen.title, unseen.title) == (
        "facts, the question was seen",
        "facts, the question was not seen",
    )
    assert (seen.level, unseen.level) == (0.99, 0.99)
    assert [line.name for line in seen.lines] == ["adakv"]
    assert [line.name for line in unseen.lines] == ["adakv", "keydiff"]
    assert [p.budget for p in unseen.lines[1].points] == ["64", "128"]
    alone = plot.panels([c for c in CELLS if c.reuse == "once"])
    assert [panel.title for panel in alone] == ["facts"]


def test_the_picture_is_svg_that_says_every_score() -> None:
    root = ElementTree.fromstring(plot.drawn(plot.panels(CELLS)))
    assert root.tag == f"{SPACE}svg"
    titles = [e.text or "" for e in root.iter(f"{SPACE}title")]
    assert "adakv: 0.8 at 64, 0.9 at 256, 0.85 at 128" in titles
    texts = [e.text for e in root.iter(f"{SPACE}text")]
    assert {"adakv", "keydiff", "full cache", "tokens per head", "64", "128", "256"} <= set(texts)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for text in root.iter(f"{SPACE}text"):
        assert -20 <= float(text.get("x", "")) <= width
        assert -20 <= float(text.get("y", "")) <= height


def test_higher_is_better_and_budgets_go_right() -> None:
    line = Line("a", (Point("32", 0.25), Point("64", 0.5), Point("256", 1.0)))
    picture = plot.drawn([Panel("t", (line,), 1.0)])
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture)
    (x0, y0), (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in found)
    assert 2 * (x1 - x0) == pytest.approx(x2 - x1, abs=0.2), "a logarithmic axis"
    assert (y0 - y1) * 2 == pytest.approx(y1 - y2, abs=0.2)
    assert y2 == 0.0


def test_many_lines_stand_side_by_side_near_their_budget() -> None:
    lines = tuple(Line(f"m{i}", (Point("64", 0.5), Point("128", 0.6))) for i in range(28))
    picture = plot.drawn([Panel("t", lines)])
    (tick,) = re.findall(r'<path d="M([\d.]+) 240 v4"[^\n]*\n[^\n]*>64<', picture)
    xs = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', picture)][::2]
    assert len(set(xs)) == 28
    assert max(abs(x - float(tick)) for x in xs) == pytest.approx(9.0, abs=0.1)
    assert sum(xs) / 28 == pytest.approx(float(tick), abs=0.1)


def test_shares_and_bytes_stand_evenly_and_in_order() -> None:
    points = tuple(Point(b, 0.5) for b in ("20%", "1MiB", "5%", "64"))
    picture = plot.drawn([Panel("t", (Line("a", points),))])
    labels = re.findall(r'text-anchor="middle" fill="#222222">([^<]+)<', picture)
    assert labels[-1] == "budget"
    assert labels.index("5%") < labels.index("20%")
    xs = sorted(float(x) for x in re.findall(r'<circle cx="([\d.]+)"', picture))
    steps = {round(b - a) for a, b in pairwise(xs)}
    assert len(steps) == 1


def test_perplexity_has_an_axis_of_its_own() -> None:
    panel = plot.panels([cell("full", "-", 2.1, task="ppl"), cell("adakv", "64", 2.9, task="ppl")])
    assert not panel[0].shares
    assert panel[0].title == "ppl, lower is better"
    picture = plot.drawn(panel)
    assert " %<" not in picture
    assert ">2.1<" in picture


def test_names_of_other_people_do_no_harm() -> None:
    ElementTree.fromstring(plot.drawn([Panel("<&>", (Line('a"<', (Point("64", 0.5),)),))]))


def test_a_run_draws_its_plot(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    arguments = "eval --policy streaming --budget 32,64 --length 300 -n 1 --reuse once,blind --plot"
    result = CliRunner().invoke(app, [*arguments.split(), str(path)])
    assert result.exit_code == 0, result.stderr
    ElementTree.fromstring(path.read_text())


@pytest.mark.parametrize(
    ("path", "says"), [("x.png", "--plot writes .svg"), ("/nowhere/x.svg", "there is no directory")]
)
def test_a_plot_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, path: str, says: str
) -> None:
    monkeypatch.setattr(command, "build", lambda _: pytest.fail("a model was loaded"))
    result = CliRunner().invoke(app, ["eval", "--plot", path])
    assert result.exit_code == 2
    assert says in result.stderr

"""The scripts of docs/measurements that later sessions go on with: state, tables, pages."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs/measurements"


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, which writes into a folder of the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("unseen")
    monkeypatch.setattr(module, "HERE", tmp_path / "docs/measurements")
    monkeypatch.setattr(module, "FILE", tmp_path / "unseen.json")
    monkeypatch.setattr(module, "PICTURES", tmp_path / "docs/pictures")
    (tmp_path / "docs").mkdir()
    return module


def asked(state: Path, **changes: Any) -> argparse.Namespace:
    plain = {
        "state": state,
        "methods": "keydiff,snapkv[decode=none window=16]",
        "budgets": "16,24",
        "lengths": "500",
        "documents": 2,
        "questions": 2,
        "reuse": "blind,once",
        "minutes": 5.0,
        "part": 0,
        "parts": 1,
        "model": None,
    }
    return argparse.Namespace(**plain | changes)


def lines(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(state.glob("*")) for line in path.open()]


def test_a_method_is_a_policy_with_options(unseen: ModuleType) -> None:
    plain = unseen.Method.read("adakv+critical+turns")
    assert (plain.policy, plain.decode, dict(plain.options)) == ("adakv+critical+turns", "auto", {})
    more = unseen.Method.read("kvcrush(h2o)[decode=none ratio=0.5]")
    assert (more.policy, more.decode, dict(more.options)) == (
        "kvcrush(h2o)",
        "none",
        {"ratio": "0.5"},
    )
    assert unseen.Method.read("snapkv").at("24") is None, "its window alone has 32"
    with pytest.raises(SystemExit):
        unseen.Method.read("snapkv[")


def test_rows_stay_unless_there_are_more_documents(unseen: ModuleType) -> None:
    def row(budget: str, documents: int, score: float) -> dict[str, Any]:
        key = {"length": 500, "reuse": "once", "method": "keydiff", "budget": budget}
        return key | {"documents": documents, "score": score}

    old = [row("16", 9, 0.1), row("24", 9, 0.2), row("32", 9, 0.3)]
    new = [row("24", 5, 0.4), row("32", 9, 0.5), row("48", 1, 0.6)]
    assert unseen.joined(old, new) == [old[0], old[1], new[1], new[2]]


def test_slices_go_on_from_each_other(unseen: ModuleType, tmp_path: Path) -> None:
    """What is in the state is not measured again; a method, a budget, a length can be added."""
    state = tmp_path / "state"
    unseen.measure(asked(state, documents=1))
    first = lines(state)
    keys = [(r["method"], r["budget"], r["reuse"]) for r in first]
    windowed = "snapkv[decode=none window=16]"
    each = [("keydiff", "16"), ("keydiff", "24"), (windowed, "24")]
    assert keys == [
        *((*key, "blind") for key in each),
        ("full", "-", "once"),
        *((*key, "once") for key in each),
    ]
    assert len({len(r["scores"]) for r in first}) == 1
    assert len(first[0]["scores"]) in (1, 2)
    unseen.measure(asked(state))
    second = lines(state)
    assert second[: len(first)] == first
    assert {r["document"] for r in second[len(first) :]} == {1}
    unseen.measure(asked(state, methods="streaming", part=1, parts=2))
    added = lines(state)[len(second) :]
    assert {(r["method"], r["document"]) for r in added} == {("streaming", 1)}
    unseen.measure(asked(state, minutes=0.0, methods="random"))
    assert len(lines(state)) == len(second) + len(added)


def test_the_section_has_every_method_with_its_interval(unseen: ModuleType, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    assert "Not measured yet." in unseen.section()
    with (state / "a.jsonl").open("w") as file:
        for document in range(4):
            for method, budget, reuse, scores in (
                ("full", "-", "once", [1.0, 1.0]),
                ("keydiff", "24", "blind", [1.0, 0.0]),
                ("keydiff", "128", "blind", [1.0, 1.0]),
                ("adakv", "128", "blind", [float(document == 0)] * 2),
                ("adakv", "128", "once", [1.0, 1.0]),
                ("kvzip", "128", "once", []),
            ):
                row = {"length": 2000, "document": document, "questions": 2, "held": 0.1}
                row |= {"method": method, "budget": budget, "reuse": reuse, "scores": scores}
                file.write(json.dumps(row) + "\n")
    unseen.write(argparse.Namespace(state=state))
    page = unseen.section()
    # Of the four documents it is ahead in three: Student's t with a standard error of 0.25.
    assert "| 2,000, not seen | keydiff | +75.0 (-4.5 to +154.6) |" in page
    assert unseen.apart({"0": 1.0, "1": 0.5}, {"0": 0.5, "2": 0.5}) == ""  # one in common

    def figure(rows: list[list[float]], mean: float) -> str:
        low, high = unseen.intervals.of_shares(rows)
        return f"{mean} ({100 * low:.0f}-{100 * high:.0f})"

    half, all_right = figure([[1.0, 0.0]] * 4, 50.0), figure([[1.0, 1.0]] * 4, 100.0)
    assert f"| keydiff | {half} | {all_right} |" in page
    assert any(line.startswith("| adakv |  | 25.0 (") for line in page)
    assert sum(line.startswith("| full cache | 100.0") for line in page) == 2
    assert not any(line.startswith("| kvzip") for line in page)
    assert "A cell: 8 answers of 4 documents, or more." in page
    assert "![Quality over budget, documents of 2,000 tokens](pictures/quality-2000.svg)" in page
    picture = ElementTree.fromstring(unseen.picture(2000).read_text())
    told = [e.text or "" for e in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "2,000 tokens, the question was not seen" in told
    assert "2,000 tokens, the question was seen" in told


def test_a_picture_has_the_best_and_the_default(unseen: ModuleType) -> None:
    def line(name: str, *scores: tuple[str, float]) -> object:
        return unseen.Line(name, tuple(unseen.Point(b, s) for b, s in scores))

    others = [line(f"m{i}", ("24", 1.0 - i), ("48", i / 20)) for i in range(12)]
    lines = [line("adakv", ("48", 0.0)), *others]
    names = [one.name for one in unseen.best(lines)]
    assert names == [f"m{i}" for i in range(11, 3, -1)] + ["adakv"], "24 is not a budget of all"
    lines[0] = line("adakv", ("48", 1.0))
    assert unseen.best(lines)[0].name == "adakv"
    assert len(unseen.best(lines)) == unseen.DRAWN


def test_results_md_is_what_the_files_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page was written from what is beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    results = importlib.import_module("results")
    assert results.OUT.read_text() == results.page()

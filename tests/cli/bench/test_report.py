"""Rows, tables and the file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from minikv.cli.bench import report
from minikv.cli.bench.results import Results, Row
from minikv.cli.terminal import Terminal
from minikv.errors import MemoryShortError, UsageError


def test_a_rows_figures_and_keys() -> None:
    row = Row("prefill", "m", "minikv", 100, [2.0, 4.0, 3.0], floor_s=1.5)
    assert (row.seconds, row.tok_s, row.share_of_floor) == (3.0, 100 / 3, 0.5)
    step = Row("decode", "m", "minikv", 100, [0.5])
    assert (step.tok_s, step.share_of_floor) == (2.0, None)
    keys = (
        "kind model system policy decode budget stride weights kv length seconds tok_s times "
        "floor_s share_of_floor evict_share vs_full vs_transformers step_bytes kv_bytes peak_bytes "
        "captured read_bytes_s"
    )
    assert row.record().keys() == set(keys.split())


def test_the_widest_row_has_eighty_columns() -> None:
    row = Row(
        "prefill",
        "llama-3-8b",
        "minikv",
        131_072,
        [99.9],
        "adakv",
        "scissorhands",
        "1024",
        weights="auto",
        floor_s=4.0,
        evict_share=-0.012,
        vs_full=12.34,
        vs_transformers=12.34,
        kv_bytes={"held": 1023 << 20},
        peak_bytes=1023 << 20,
    )
    assert max(map(len, report.table([row]).splitlines())) <= 80


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "full"),
        ({"weights": "int8"}, "full int8"),
        ({"kv": "int8"}, "full kv int8"),
        ({"policy": "h2o", "decode": "h2o", "stride": 32, "budget": "64"}, "h2o/32 64"),
        ({"policy": "adakv", "decode": "roco", "budget": "64"}, "adakv+roco 64"),
        ({"system": "transformers"}, "transformers"),
    ],
)
def test_names(more: dict[str, object], name: str) -> None:
    given = {"system": "minikv", "policy": "full", "decode": "none"} | more
    assert report.name(Row("decode", "m", length=64, times=[1.0], **given)) == name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (40, "40B"),
        (1000, "1.0K"),
        (900 << 20, "900M"),
        (1023 << 20, "1.0G"),
        (15 << 30, "15G"),
        (2000 << 30, "2000G"),
    ],
)
def test_bytes_in_a_cell(count: int | None, text: str) -> None:
    assert report._short(count) == text


def made(path: Path | None) -> tuple[report.Report, io.StringIO]:
    terminal = Terminal(quiet=True)
    terminal.out = out = io.StringIO()
    return report.Report(["minikv", "bench"], terminal, None if path is None else str(path)), out


def test_what_is_new_is_shown_once_and_written_at_once(tmp_path: Path) -> None:
    path, results = tmp_path / "x.json", Results()
    one, out = made(path)
    results.added = lambda *new: one.update(results)
    results.add([Row("decode", "first", "minikv", 64, [1.0])])
    results.add([Row("decode", "second", "minikv", 64, [1.0])])
    assert json.loads(path.read_text()) == {"command": "minikv bench", "complete": False}
    one.record["rows"] = []
    one.close(complete=True)
    assert json.loads(path.read_text())["complete"] is True
    assert [out.getvalue().count(name) for name in ("first", "second")] == [1, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]  # and nothing half written


def test_a_file_is_replaced_as_a_whole_and_stays_who_may_read_it(tmp_path: Path) -> None:
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with path.open() as held:
        made(link)[0].close(complete=True)
        assert held.read() == "old"  # whoever reads has the old one to its end
    assert json.loads(path.read_text())["complete"] is True
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    gone = tmp_path / "gone"
    gone.mkdir()
    one, _ = made(gone / "b.json")
    gone.rmdir()
    one.update(Results())  # says so, and goes on
    with pytest.raises(UsageError):
        one.close(complete=True)


def test_an_error_is_told_in_a_line_and_ends_the_run() -> None:
    results = Results()
    for error in (AssertionError(), RuntimeError("no such\nkernel"), MemoryShortError("too much")):
        results.fail("x", error)
    assert results.notes == ["x: AssertionError", "x: RuntimeError: no such kernel", "x: too much"]
    assert isinstance(results.failures[0], AssertionError)

"""Kernels against their floors, on inputs of no size."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from minikv.cli.bench import kernels, networks
from minikv.cli.main import app
from minikv.kernels import dispatch

CPU, TINY = torch.device("cpu"), networks.find("tiny")
FLAGS = ("--device", "cpu", "--shape", "tiny", "--length", "64", "--repeat", "1", "--json=-")
NAMES = {
    "sdpa decode",
    "ragged attention",
    "hash append",
    "h2o step",
    "roco step",
    "lowest",
    "observe",
    "column sums",
    "segments attention",
    "gather rows",
    "rest of a layer",
}


def bench(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", "kernels", *args])


def test_every_case_runs_twice_on_the_same_inputs() -> None:
    tables = [dispatch.Kernels(), dispatch.choose(CPU, "auto", 16, torch.bfloat16)[0]]
    cases = list(kernels.cases(TINY, [64]))
    assert {case.name for case in cases} == NAMES
    for case in cases:
        mine = [ops for ops in tables if not case.is_missing(ops)]
        assert mine, case.name
        for ops in mine:
            call = case.make(kernels.Draw(CPU, 0))
            call(ops)
            out = call(ops)
            tensors = [out] if isinstance(out, torch.Tensor) else out or ()
            assert all(bool(t.isfinite().all()) for t in tensors), case  # type: ignore[union-attr]


def test_timings_beside_their_floors() -> None:
    found, reason = dispatch.choose(CPU, "auto", 16, torch.bfloat16)
    if found.name != "native":
        pytest.skip(reason or "no kernels in C here")
    out = bench(*FLAGS)
    assert out.exit_code == 0, out.stderr
    made = json.loads(out.stdout)
    assert made["notes"] == []
    assert {row["kernel"] for row in made["kernels"]} == NAMES
    read, product = made["rates"]["read"], made["rates"]["matmul"]
    for row in made["kernels"]:
        assert row["kernels"] == "native"
        assert row["floor_s"] == max(row["bytes"] / read, row["flops"] / product)
        assert row["share_of_floor"] == pytest.approx(row["floor_s"] / row["seconds"])
    attention = next(row for row in made["kernels"] if row["kernel"] == "ragged attention")
    assert attention["bytes"] == 64 * 2 * 2 * 16 * 2  # tokens, heads, k and v of 16 in bfloat16


def test_without_kernels_of_its_own_a_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_native", lambda *a: (dispatch.Kernels(), None))
    out = bench(*FLAGS)
    assert out.exit_code == 2
    assert "--kernels torch" in out.stderr


def test_one_that_is_missing_or_fails_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*given: object, **more: object) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(dispatch.Kernels, "ragged_prefill", None)
    monkeypatch.setattr(dispatch.Kernels, "gather_rows", staticmethod(fails))
    out = bench(*FLAGS, "--kernels", "torch")
    assert out.exit_code == 1
    made = json.loads(out.stdout)
    assert made["complete"] is False
    assert "segments attention: torch has no ragged_prefill" in made["notes"]
    assert "gather rows, 8 of 64 rows: RuntimeError: does not compile" in made["notes"]
    measured = {row["kernel"] for row in made["kernels"]}
    assert {"lowest", "ragged attention"} <= measured
    assert not {"segments attention", "gather rows"} & measured


def test_uneven_heads_have_the_mean_and_one_has_four_times_it() -> None:
    for heads, mean in ((8, 1024), (8, 100), (32, 333), (5, 64)):
        each = kernels.uneven(heads, mean)
        assert (len(each), sum(each), max(each)) == (heads, heads * mean, 4 * mean)
        assert min(each) > 0
    assert kernels.uneven(1, 64) == [64]
    assert sum(kernels.uneven(2, 64)) == 128

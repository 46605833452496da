"""`minikv bench all`: parts in processes of their own, goals, and runs that end early."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from minikv.cli.bench import decode, everything, flat, goals, long, memory, peer
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.everything import Part
from minikv.cli.bench.floors import Rates
from minikv.cli.bench.goals import Goal
from minikv.cli.bench.results import Results, Row, Timing
from minikv.cli.main import app

CPU = torch.device("cpu")
RATES = Rates(5e9, 1e10, 8e9, 2e11, 1e11, on_gpu=False)
TINY = Arguments(
    shape="tiny", length="64", budget="64", decode="roco", repeat=1, steps=2, peer=False
)
SPEED = goals.row("tok_s", "decode", "tiny", 64, policy="full")
GOOD = Part("good", (("decode.measure", TINY),), (Goal("something", SPEED, "more", 0.0),))
BAD = Part("bad", (("decode.measure", replace(TINY, budget="2")),))


@pytest.mark.parametrize("gpu", [True, False])
def test_every_part_has_a_question_and_figures_that_its_goals_find(gpu: bool) -> None:
    found = everything.parts(Arguments(), gpu=gpu)
    assert len({part.name for part in found}) == len(found)
    seconds = [part.seconds(RATES) for part in found]
    assert max(seconds) > 1
    for part in found:
        for question, arguments in part.work:
            arguments.check()
            module, function = question.split(".")
            assert hasattr(import_module(f"minikv.cli.bench.{module}"), function)
    names = [goal.name for part in found for goal in part.goals]
    assert len(names) == len(set(names)) == (2 + 1 + 8 + 2 + 4 + 2 if gpu else 4 * 4 + 1 + 1 + 2)
    nothing = Results()
    records = [goal.record(nothing, "why") for part in found for goal in part.goals]
    assert {(record["state"], record["note"]) for record in records} == {("not measured", "why")}


@pytest.mark.parametrize(
    ("measured", "better", "state"),
    [
        (0.9, "more", "met"),
        (0.8, "more", "met"),
        (0.7, "more", "milestone"),
        (0.5, "more", "missed"),
        (None, "more", "not measured"),
        (0.5, "less", "met"),
        (0.81, "less", "milestone"),
        (0.85, "less", "missed"),
    ],
)
def test_goals(measured: float | None, better: str, state: str) -> None:
    first = 0.65 if better == "more" else 0.82
    record = Goal("g", lambda results: measured, better, 0.8, first).record(Results(), "why")
    assert record["state"] == state
    assert (record["note"] == "why") == (measured is None)
    assert record.keys() == set("name measured goal first better unit state note".split())


def test_goals_find_their_figures() -> None:
    """Of made-up results, by hand."""
    results = Results()
    results.figures = {
        "flat": {"early_s": [1.0, 2.0, 3.0], "late_s": [2.0, 3.0, 4.0]},
        "ask_first_token_s": [2.0, 1.0, 3.0],
        "peak_resident_8192": {"transformers": 100, "minikv full": 60},
        "peak_32k": {"peak_over_weights": 11, "bound": 10, "reported": 99, "allocator": 100},
    }
    for case, seconds in (("32,768 rows", 2.0), ("32,768 mean, 4x most", 3.0), ("8 rows", 9.0)):
        made = Timing("ragged attention", case, "triton", [seconds], 1, 0, 1.0, True)
        results.kernels.append(made)
    for weights, seconds in (("auto", 1.0), ("int8", 0.5)):
        results.rows.append(
            Row("decode", "s", "minikv", 2048, [seconds], "adakv", weights=weights,
                vs_transformers=2 / seconds, evict_share=0.01)
        )  # fmt: skip
    every = [
        g for gpu in (0, 1) for p in everything.parts(Arguments(), gpu=bool(gpu)) for g in p.goals
    ]
    found = {goal.name: goal.find(results) for goal in every}
    assert {name: value for name, value in found.items() if value is not None} == {
        "decode at 32k over decode at 2k, same budget": 1.5,
        "first token of `minikv ask`, warm": 2.0,
        "peak memory over transformers', s at 8,192, minikv full": 0.6,
        "peak over weights at 32k, over its parts": 1.1,
        "cache reported, off the allocator's figure by": 0.01,
        "decode attention at 32k rows, of copy": 0.5,
        "uneven heads (4x) over even ones": 1.5,
        "decode, s at 2,048, adakv 512": 2.0,
        "decode int8, s at 2,048, adakv 512": 4.0,
        "eviction per step, s at 2,048, adakv 512": 0.01,
    }


def run(monkeypatch: pytest.MonkeyPatch, *parts: Part, flags: tuple[str, ...] = ()) -> Any:
    monkeypatch.setattr(everything, "parts", lambda base, gpu: parts)
    return CliRunner().invoke(app, ["bench", "all", *flags])


def test_a_part_that_fails_or_does_not_fit_is_no_reason_to_leave_out_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "all.json"
    slow = Part("slow", (), slow=True)
    long = Part("long", (("decode.measure", replace(TINY, shape="s", length="900k")),))
    out = run(monkeypatch, BAD, slow, long, GOOD, flags=("--json", str(path)))
    assert out.exit_code == 0, out.output
    made = json.loads(path.read_text())
    assert made["complete"] is True
    parts = [(part["name"], part["state"]) for part in made["parts"]]
    assert parts == [
        ("bad", "failed"),
        ("slow", "left out"),
        ("long", "left out"),
        ("good", "measured"),
    ]
    assert "smallest useful budget" not in made["notes"][0]  # that is the hint
    assert made["notes"][0].startswith("bad: budget 2 is too small")
    assert made["notes"][1] == "slow: only with --full"
    assert "s are left" in made["notes"][2]
    assert [(goal["name"], goal["state"]) for goal in made["goals"]] == [("something", "met")]
    assert [row["policy"] for row in made["rows"]] == ["full", "adakv"]
    keys = "machine versions rates rows kernels goals figures notes parts minutes seconds"
    assert made.keys() == {"command", "complete", *keys.split()}
    assert out.stdout.count("decode, tiny, 64 tokens") == 1
    assert "something" in out.stdout
    assert "bad: budget 2 is too small" in out.stderr


def test_all_fails_only_if_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "none.json"
    out = run(monkeypatch, Part("late", GOOD.work), flags=("--json", str(path), "--minutes=1e-9"))
    assert out.exit_code == 1
    assert "nothing could be measured" in out.stderr
    assert json.loads(path.read_text())["notes"] == ["late: no time left"]


def test_a_part_that_does_not_end_in_time_is_ended() -> None:
    began = time.monotonic()
    state, why = everything._measure(GOOD, RATES, Results(), 0.1)
    assert (state, why) == ("cut short", "the time limit ended it")
    assert time.monotonic() - began < 60


class Pipe:
    """What a part has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def send(self, message: tuple[Any, ...]) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    ("error", "state", "says"),
    [
        (KeyboardInterrupt(), "cut short", "the time limit"),
        (RuntimeError("no such\nkernel"), "failed", "RuntimeError: no such kernel"),
        (None, "measured in part", "AssertionError"),
    ],
)
def test_a_part_sends_what_it_has_however_it_ends(
    error: BaseException | None, state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("decode", "m", "minikv", 64, [1.0])

    def measure(arguments: Arguments, device: Any, rates: Rates, results: Results) -> None:
        results.add([row])
        if error is not None:
            raise error
        results.fail("x", AssertionError())

    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    pipe = Pipe()
    everything._work(pipe, GOOD.work, RATES)  # type: ignore[arg-type]
    assert pipe.sent[0][:2] == ("results", [row])
    assert pipe.sent[1][0] == "results"  # the notes since
    assert pipe.sent[2:] == pipe.sent[-1:]
    assert pipe.sent[-1][:2] == ("end", state)
    assert says in pipe.sent[-1][2]


_STAYS = """
import sys
from dataclasses import replace
from minikv.cli.bench import everything, machine
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.everything import Part
from minikv.cli.main import app

measure = machine.measure
machine.measure = lambda device: measure(device, 1, small=True)
tiny = Arguments(shape="tiny", length="64", policy="full", repeat=1, steps=2, peer=False)
good = Part("good", (("decode.measure", tiny),))
stays = Part("stays", (("decode.measure", replace(tiny, steps=100_000)),))
if __name__ == "__main__":
    everything.parts = lambda base, gpu: (good, stays)
    app(["bench", "all", "--json", sys.argv[1]])
"""
"""A run whose second part works for minutes."""


def test_a_run_that_is_ended_has_written_and_leaves_no_process(tmp_path: Path) -> None:
    path, script = tmp_path / "ended.json", tmp_path / "stays.py"
    script.write_text(_STAYS)
    with subprocess.Popen([sys.executable, str(script), str(path)]) as process:
        while not (path.exists() and json.loads(path.read_text()).get("parts")):
            assert process.poll() is None
            time.sleep(0.2)
        children: list[str] = []
        while not children:  # the second part's process
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    made = json.loads(path.read_text())
    assert made["complete"] is False
    assert [(part["name"], part["state"]) for part in made["parts"]] == [("good", "measured")]
    assert [row["policy"] for row in made["rows"]] == ["full"]
    for _ in range(50):
        if not any(map(_works, children)):
            break
        time.sleep(0.1)
    assert not any(map(_works, children))


def _works(pid: str) -> bool:
    """Whether it is a process of Python that has not ended."""
    try:
        return "python" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


# -- questions that are asked in `all` only -----------------------------------------------------


def figures(question: Any, **flags: Any) -> dict[str, Any]:
    results = Results()
    question(replace(TINY, **flags), CPU, RATES, results)
    assert results.notes == []
    return results.figures


def test_late_and_early_steps_of_a_conversation() -> None:
    found = figures(flat.measure, budget="48")["flat"]
    assert (found["turn"], found["turns"]) == (64, 16)
    assert len(found["early_s"]) == len(found["late_s"]) == 2
    assert found["early_rows"] == found["late_rows"] == 48


def test_memory_of_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    class Box:
        def __init__(self, name: str, make: object, *more: object) -> None:
            self.full = name.endswith("full")

        def read(self, ids: range) -> None:
            assert len(ids) == 64

        def write(self, steps: int) -> None: ...

        def peak(self) -> int:
            return 200 if self.full else 100

        def close(self) -> None: ...

    monkeypatch.setattr(peer, "Process", Box)
    assert figures(memory.measure) == {
        "peak_resident_64": {"minikv full": 200, "minikv adakv 64": 100}
    }


def test_long_prompts() -> None:
    found = figures(long.measure, length="2048")["prompt_2k"]
    assert found["tokens"] == 2048
    assert found["full_would_hold"] == (2048 + 2) * 2 * 2 * (2 * 16 * 2 + 4)
    assert found["held"] < found["full_would_hold"] // 8
    assert found["longest_full_prompt"] is None  # a CPU promises memory that it does not have
    peak = figures(long.measure_peak, length="256")["peak_32k"]
    assert peak["bound"] == sum(peak["parts"].values())
    assert peak["parts"]["one_layer_kv"] == 256 * 2 * 2 * 16 * 2

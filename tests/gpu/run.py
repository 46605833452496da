"""Try and measure minikv on a GPU, with one command.

    python tests/gpu/run.py                          check, then measure: at most 21 minutes
    python tests/gpu/run.py first                    what to know first: at most 8 minutes
    python tests/gpu/run.py check                    is anything broken? facts, smoke, tests
    python tests/gpu/run.py measure                  at most 10 minutes
    python tests/gpu/run.py probe step 128k          slices by name
    python tests/gpu/run.py --dry                    only say what would run
    python tests/gpu/run.py --small --out DIR        the same steps without a GPU, on tiny sizes

Each step is a process of its own with a limit in time; one that fails does not stop the next one.
All output is also in OUT/log.txt. OUT/steps.json says what became of each step, and is written
after each; every measurement writes its own file as it goes. An interrupt loses one step at most.
minikv need not be installed. GPU_TEST_SEED=N repeats the random numbers of the checks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO

from plain_tree import ROOT, linked

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
GROUPS: Mapping[str, Sequence[str]] = {
    "first": ("facts", "smoke", "step", "probe"),
    "check": ("facts", "smoke", "tests"),
    "measure": ("probe", "step", "kernels", "eviction", "scoring", "ncu"),
}
_WHOLE = ("check", "measure")
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_LEAST = 20.0  # seconds in which a step can do something
_METRICS = (
    "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,dram__bytes.sum,"
    "launch__registers_per_thread,launch__occupancy_limit_shared_mem,smsp__issue_active.avg.pct"
)


@dataclass(frozen=True, slots=True)
class Step:
    """A process. seconds: its limit; needs: a program without which it is left out."""

    name: str
    seconds: float
    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    needs: str = ""


def steps(out: Path, *, small: bool) -> Mapping[str, Step]:
    """Every step by name. `small`: as they can be tried without a GPU."""

    def script(name: str, *options: str) -> Sequence[str]:
        return (PYTHON, str(HERE / f"{name}.py"), *options)

    def part(name: str, seconds: int, *parts: str) -> Step:
        options = ["--small"] if small else ["--minutes", f"{seconds / 60:.2f}"]
        for one in () if small else parts:
            options += ["--part", one]
        return Step(
            name, seconds + 25, script("bench", "--json", str(out / f"{name}.json"), *options)
        )

    little = ("--device", "cpu", "--small") if small else ()
    tests = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--maxfail", "40"]
    if small:  # one of the files that have tests for a GPU
        tests += ["-n", "0", str(ROOT / "tests/kernels/triton/test_append.py")]
    interpreted = {"TRITON_INTERPRET": "1"} if small else None
    profiled = script("profiled", *little[:2])
    ncu = ("ncu", "--clock-control", "none", "--csv", "--log-file", str(out / "ncu.csv"))
    kernels = ("--kernel-name-base", "function", "--kernel-name")
    kernels += ("regex:^(split|_roco|_h2o|_hash_append)$", "--launch-count", "30")
    found = [
        Step("facts", 60, script("facts")),
        Step(
            "smoke", 180, script("smoke", *little, "--json", str(out / "smoke.json")), interpreted
        ),
        Step("tests", 400, (*tests, f"--junitxml={out / 'pytest.xml'}")),
        Step(
            "probe", 110, script("probe", *little, "--json", str(out / "probe.json")), interpreted
        ),
        part("step", 85, "decode step", "peak"),
        part("kernels", 100, "kernels"),
        part("eviction", 90, "eviction"),
        part("scoring", 95, "scoring"),
        Step("ncu", 60, profiled)
        if small
        else Step("ncu", 60, (*ncu, "--metrics", _METRICS, *kernels, *profiled), needs="ncu"),
        part("128k", 150, "128k tokens"),
        part("512k", 480, "512k tokens"),
    ]
    return {step.name: step for step in found}


class Runner:
    """Runs steps one after the other and notes what became of them."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.ends = out, perf_counter() + seconds
        self.done: list[dict[str, object]] = []
        out.mkdir(parents=True, exist_ok=True)
        self._log = (out / "log.txt").open("a")

    def run(self, step: Step) -> None:
        left = self.ends - perf_counter()
        if step.needs and shutil.which(step.needs) is None:
            self._note(step, "left out", f"there is no {step.needs}", 0.0)
        elif left < _LEAST:
            self._note(step, "left out", "the time is up", 0.0)
        else:
            self._say(f"== {step.name}: {shlex.join(step.command)[:200]}\n")
            began = perf_counter()
            state, why = self._process(step, min(step.seconds, left))
            self._note(step, state, why, perf_counter() - began)

    def _process(self, step: Step, seconds: float) -> tuple[str, str]:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(step.environment or {})
        try:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except OSError as error:
            return "failed", str(error)
        assert process.stdout is not None
        reader = threading.Thread(target=self._tee, args=(process.stdout,))
        reader.start()
        try:
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return "cut short", f"after {seconds:.0f} s"
        finally:
            _end(process)
            reader.join()
        return ("ok", "") if status == 0 else ("failed", f"status {status}")

    def _tee(self, source: IO[str]) -> None:
        for line in source:
            self._say(line)

    def _say(self, text: str) -> None:
        for sink in (sys.stdout, self._log):
            sink.write(text)
            sink.flush()

    def _note(self, step: Step, state: str, why: str, seconds: float) -> None:
        took = round(seconds, 1)
        self.done.append({"step": step.name, "state": state, "why": why, "seconds": took})
        self._say(f"-- {step.name}: {state} {why} ({took} s)\n")
        (self.out / "steps.json").write_text(json.dumps(self.done, indent=1) + "\n")


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, at which `bench` writes what it has; then SIGKILL."""
    for how in (process.terminate, process.kill):
        stop: Callable[[], None] = how
        if process.poll() is None:
            stop()
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                continue


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="STEP", help="first, check, measure, or steps by name"
    )
    where = Path(os.environ.get("OUT", "gpu-results"))
    parser.add_argument("--out", type=Path, default=where, help="[$OUT, or gpu-results]")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all steps [3600]")
    parser.add_argument("--dry", action="store_true", help="only say what would run")
    parser.add_argument("--small", action="store_true", help="without a GPU, on tiny sizes")
    asked = parser.parse_args()
    known = steps(asked.out.resolve(), small=asked.small)
    names = [n for name in asked.names or _WHOLE for n in GROUPS.get(name, (name,))]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no step is called {unknown[0]!r}; there are {', '.join((*GROUPS, *known))}")
    if asked.dry:
        for name in names:
            print(f"{name:9} {known[name].seconds:4.0f} s  {shlex.join(known[name].command)}")
        print(f"at most {sum(known[name].seconds for name in names) / 60:.0f} minutes")
        if left := [name for name in known if name not in names]:
            print(f"not run unless named: {', '.join(left)}")
        return 0
    os.environ.setdefault("GPU_TEST_SEED", str(int.from_bytes(os.urandom(3))))
    os.environ["MINIKV_HOME"] = tempfile.mkdtemp(prefix="minikv-home-")  # no settings, no chats
    linked()
    runner = Runner(asked.out.resolve(), asked.seconds)
    for name in names:
        runner.run(known[name])
    return 0 if all(one["state"] in ("ok", "left out") for one in runner.done) else 1


if __name__ == "__main__":
    sys.exit(main())

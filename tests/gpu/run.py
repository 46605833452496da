"""Try and measure minikv on a GPU, with one command.

    python tests/gpu/run.py [first]                  facts, checks, the figures: 7 minutes
    python tests/gpu/run.py check                    all tests for a GPU
    python tests/gpu/run.py smoke figures            steps by name
    python tests/gpu/run.py --dry first              only say what would run
    python tests/gpu/run.py --small --out DIR        the same steps without a GPU, on tiny sizes

A step is a process, or several at once, with a limit in time; one that fails does not stop the next
one. All output is also in OUT/log.txt. OUT/steps.json says what became of each step, and is written
after each; every measurement writes its own file as it goes. minikv need not be installed.
GPU_TEST_SEED=N repeats the random numbers of the checks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO, Any

from plain_tree import ROOT, linked

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
GROUPS: Mapping[str, Sequence[str]] = {
    "first": ("facts", "smoke", "figures", "peer"),
    "check": ("facts", "smoke", "tests"),
}
LIMIT = "SECONDS"
_PROCESSES = 14  # of the checks at once, at most
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_PIPE = 2.0  # seconds to wait for the rest of a process's output
_LEAST = 15.0  # seconds in which a step can do something


@dataclass(frozen=True, slots=True)
class Step:
    """Processes that run at once. seconds: their limit, and what is left of it for the process
    replaces LIMIT in the commands; after(): called when they have
    ended, however they did."""

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]
    environment: Mapping[str, str] | None = None
    after: Callable[[], None] | None = None


def steps(out: Path, *, small: bool, scratch: Path) -> Mapping[str, Step]:
    """Every step by name. `small`: as they can be tried without a GPU. scratch: a folder for the
    results of single processes, which are merged."""
    little = ("--device", "cpu", "--small") if small else ()
    interpreted = {"TRITON_INTERPRET": "1"} if small else None

    def script(name: str, *options: str) -> Sequence[str]:
        return (PYTHON, str(HERE / f"{name}.py"), *options)

    def smoke(name: str, seconds: float, *options: str) -> Step:
        count = max(1, min(_PROCESSES, (os.cpu_count() or 1) - 2))
        files = [scratch / f"{name}-{i}.json" for i in range(count)]
        return Step(
            name,
            seconds,
            [
                script(
                    "smoke", *little, "--json", str(file), "--part", f"{i + 1}/{count}", *options
                )
                for i, file in enumerate(files)
            ],
            {"OMP_NUM_THREADS": "1"} | (interpreted or {}),
            after=lambda: merged(files, out / "smoke.json"),
        )

    def figures(name: str, file: str, seconds: float, *options: str) -> Step:
        given = ("--json", str(out / file), "--seconds", LIMIT, *options)
        return Step(name, seconds, [script("figures", *little, *given)], interpreted)

    tests = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail", "40"]
    tests += ["-m", "gpu and not soak"]
    if small:  # one of the files that have tests for a GPU
        tests += ["-n", "0", str(ROOT / "tests/kernels/append/test_forms.py")]
    else:
        tests += map(str, with_gpu_tests())
    found = [
        Step("facts", 20, [script("facts")]),
        smoke("smoke", 80),
        figures("figures", "figures.json", 262, "--profile", str(out / "profile.txt")),
        figures("peer", "peer.json", 75, "--items", "peer"),
        Step("tests", 400, [(*tests, f"--junitxml={out / 'pytest.xml'}")]),
    ]
    return {step.name: step for step in found}


def with_gpu_tests() -> list[Path]:
    """The test files that have tests for a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        file
        for file in files
        if re.search(r"mark\.gpu|triton_device|import Form\b", file.read_text())
    ]


def merged(files: Sequence[Path], into: Path) -> None:
    """One file of the results of all processes of the checks."""
    found: dict[str, Any] = {"seed": None, "checks": []}
    for file in files:
        if file.exists():
            one = json.loads(file.read_text())
            found["seed"] = one["seed"]
            found["checks"] += one["checks"]
    into.write_text(json.dumps(found, indent=1) + "\n")
    bad = [one for one in found["checks"] if one["state"] != "ok"]
    print(f"{len(found['checks'])} checks, {len(bad)} failed", flush=True)
    for one in bad:
        print(f"  {one['check']}: {one['said']}", flush=True)


class Runner:
    """Runs steps one after the other and notes what became of them."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.ends = out, perf_counter() + seconds
        self.done: list[dict[str, object]] = []
        out.mkdir(parents=True, exist_ok=True)
        self._log, self._lock = (out / "log.txt").open("a"), threading.Lock()

    def run(self, step: Step) -> None:
        left = self.ends - perf_counter()
        if left < _LEAST:
            self._note(step, "left out", "the time is up", 0.0)
        else:
            self._say(f"== {step.name}: {shlex.join(step.commands[0])[:200]}\n")
            began = perf_counter()
            state, why = self._processes(step, min(step.seconds, left))
            if step.after is not None:
                step.after()
            self._note(step, state, why, perf_counter() - began)

    def _processes(self, step: Step, seconds: float) -> tuple[str, str]:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(step.environment or {})
        running: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        until, late = perf_counter() + seconds, False
        try:
            for command in step.commands:
                process = subprocess.Popen(
                    [f"{seconds - 10:.0f}" if word == LIMIT else word for word in command],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                running.append(process)
                # A grandchild may keep the pipe open: nobody waits long for the reader.
                readers.append(threading.Thread(target=self._tee, args=(process.stdout,)))
                readers[-1].daemon = True
                readers[-1].start()
            for process in running:
                try:
                    process.wait(max(0.0, until - perf_counter()))
                except subprocess.TimeoutExpired:
                    late = True
        except OSError as error:
            return "failed", str(error)
        finally:
            _end(running)
            for reader in readers:
                reader.join(_PIPE)
        if late:
            return "cut short", f"after {seconds:.0f} s"
        statuses = [process.returncode for process in running if process.returncode]
        return ("failed", f"status {statuses[0]}") if statuses else ("ok", "")

    def _tee(self, source: IO[str]) -> None:
        for line in source:
            self._say(line)

    def _say(self, text: str) -> None:
        with self._lock:
            for sink in (sys.stdout, self._log):
                sink.write(text)
                sink.flush()

    def _note(self, step: Step, state: str, why: str, seconds: float) -> None:
        took = round(seconds, 1)
        self.done.append({"step": step.name, "state": state, "why": why, "seconds": took})
        self._say(f"-- {step.name}: {state} {why} ({took} s)\n")
        (self.out / "steps.json").write_text(json.dumps(self.done, indent=1) + "\n")


def _end(running: Sequence[subprocess.Popen[str]]) -> None:
    """SIGTERM for every process and its children, at which most write what they have; then
    SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None or number == signal.SIGKILL:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
        until = perf_counter() + _GRACE
        for process in running:
            try:
                process.wait(max(0.0, until - perf_counter()))
            except subprocess.TimeoutExpired:
                continue


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="STEP", default=["first"], help="groups or steps [first]"
    )
    where = Path(os.environ.get("OUT", "gpu-results"))
    parser.add_argument("--out", type=Path, default=where, help="[$OUT, or gpu-results]")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all steps [3600]")
    parser.add_argument("--dry", action="store_true", help="only say what would run")
    parser.add_argument("--small", action="store_true", help="without a GPU, on tiny sizes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="minikv-checks-") as scratch:
        known = steps(asked.out.resolve(), small=asked.small, scratch=Path(scratch))
        names: list[str] = []
        for name in asked.names:
            names += GROUPS.get(name, (name,))
        if unknown := [name for name in names if name not in known]:
            there = ", ".join((*GROUPS, *known))
            parser.error(f"no step is called {unknown[0]!r}; there are {there}")
        if asked.dry:
            for name in names:
                step = known[name]
                print(f"{name:9} {step.seconds:4.0f} s  {shlex.join(step.commands[0])}")
            print(f"at most {sum(known[name].seconds for name in names):.0f} s")
            if left := [name for name in known if name not in names]:
                print(f"not run unless named: {', '.join(left)}")
            return 0
        os.environ.setdefault("GPU_TEST_SEED", str(int.from_bytes(os.urandom(3))))
        os.environ["MINIKV_HOME"] = str(Path(scratch) / "home")  # no settings, no chats
        linked()
        runner = Runner(asked.out.resolve(), asked.seconds)
        for name in names:
            runner.run(known[name])
    return 0 if all(one["state"] in ("ok", "left out") for one in runner.done) else 1


if __name__ == "__main__":
    sys.exit(main())

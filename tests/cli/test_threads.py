"""How many threads a computation uses: what the process was given."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import python

from minikv.engine.threads import allowed

THREADS = """
import os, torch
from minikv.engine import threads
counts = []
for asked in (0, 1, 3, None, 0):
    if asked is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        threads.use(asked)
        counts.append(torch.get_num_threads())
print(*counts)
"""


def test_as_many_as_asked_for_or_as_allowed() -> None:
    """torch's threads after `threads.use`, in a process of its own that has OMP_NUM_THREADS at
    first."""
    assert said(THREADS, OMP_NUM_THREADS="2") == f"2 1 3 {allowed()}"


@pytest.mark.parametrize(
    ("text", "most"),
    [("100000 100000", 1), ("150000 100000", 2), ("max 100000", None), ("", None), ("1 0", None)],
)
def test_a_control_groups_limit_and_affinity_count(
    tmp_path: Path, text: str, most: int | None
) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    cores = allowed(tmp_path / "nothing")
    assert allowed(quota) == (cores if most is None else min(cores, most))
    if not hasattr(os, "sched_setaffinity"):
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed(tmp_path / "nothing") == 1
    finally:
        os.sched_setaffinity(0, before)


# -- how they wait ------------------------------------------------------------------------------
LOADED = """
import os, sys
import minikv
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
minikv.load(device="cpu", window=8)
"""


VERSION = """
import contextlib, os, sys
from minikv.cli.main import run
sys.argv = ["minikv", "--version"]
with contextlib.suppress(SystemExit):
    run()
assert "torch" not in sys.modules
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def said(code: str, **env: str) -> str:
    """The last line of a process that has this code."""
    done = python("-c", code, without=("GOMP_", "OMP_WAIT"), **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[-2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU OpenMP")
def test_threads_wait_briefly_unless_the_environment_says_how() -> None:
    """GOMP_SPINCOUNT when `minikv.load` imports torch, and in the program before anything does."""
    assert int(said(LOADED)) < 10_000
    assert said(LOADED, GOMP_SPINCOUNT="77") == "77"
    assert said(LOADED, OMP_WAIT_POLICY="active") == "None"
    assert int(said(VERSION)) < 10_000


FORKED = """
import itertools, multiprocessing, os, signal, sys
import minikv

def anew():
    return minikv.load(budget=64)

def answer():
    print(*anew().ask("Who leads Project Misty Clover?", max_tokens=4), sep="", flush=True)

def twice():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(answer)

if __name__ == "__main__":
    chat = anew()
    # Long enough for parallel loops.
    chat.attach("A tobacco works. " * 200)
    opened = chat.ask("Who leads Project Misty Clover?", max_tokens=4)
    first = next(opened)
    cases = {
        "ask": lambda: list(chat.ask("Who?")),
        "the open answer": lambda: list(opened),
        "attach": lambda: chat.attach("b"),
        "load": anew,
        "pool": twice,
        "close": chat.close,
    }
    for name, act in cases.items():
        sys.stdout.flush()
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(name, code, sep="|", flush=True)
            continue
        signal.alarm(30)
        try:
            act()
        except minikv.errors.UsageError as error:
            os._exit(7 if "fork" in str(error) and "spawn" in error.hint else 8)
        os._exit(0)
    print(first, *opened, sep="", flush=True)
    spawned = multiprocessing.get_context("spawn").Process(target=answer)
    spawned.start()
    spawned.join()
    print(spawned.exitcode)
"""


def test_a_fork_after_load_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    """The threads that compute do not exist in a fork. The parent's chat continues, and a
    newly started process is not refused."""
    (tmp_path / "forked.py").write_text(FORKED)
    run = python(str(tmp_path / "forked.py"), OMP_NUM_THREADS="2")
    assert run.stderr == ""
    *outcomes, answer, spawned, code = run.stdout.splitlines()
    refused = ["ask", "the open answer", "attach", "load", "pool"]
    assert outcomes == [*(f"{name}|7" for name in refused), "close|0"]
    assert (bool(answer.strip()), bool(spawned.strip()), code) == (True, True, "0")

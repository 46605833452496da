"""Every test has a home of its own: no chat, history or setting of the user's is touched. Compiled
kernels are shared with the user.

Tests run in one process per core (pytest-xdist), each with one torch thread; so do the processes
that tests start. A test may therefore use no fixed port, name or path outside `tmp_path`, and may
not ask how long something took.
"""

from __future__ import annotations

import os
import signal

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes
MOST_WORKERS = 8
"""Each needs about a gigabyte."""


def pytest_configure() -> None:
    """A run in the background inherits a Ctrl-C that is ignored, and so would its children."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a process for each core that this run may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST_WORKERS)


@pytest.fixture(params=[0.2, pytest.param(1.0, marks=pytest.mark.soak)], ids=["some", "all"])
def part(request: pytest.FixtureRequest) -> float:
    """The part of many drawn cases that a test takes: a fifth, and all of them every night."""
    found: float = request.param
    return found


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path_factory.mktemp("home")))

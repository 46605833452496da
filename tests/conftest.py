"""Every test has a home of its own: no chat, history or setting of the user's is touched. Compiled
kernels are shared with the user.

Tests run in three processes for every two cores (pytest-xdist), each with one torch thread; so do
the processes that tests start. A test may therefore use no fixed port, name or path outside
`tmp_path`, and may not ask how long something took.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each child compiles every module anew
MOST_WORKERS = 8
"""Each needs about a gigabyte."""


def pytest_configure() -> None:
    """A run in the background inherits a Ctrl-C that is ignored, and so would its children.

    All processes of a run have one seed for the tests on a GPU, which also run in Triton's
    interpreter, there with the same seed every time. GPU_TEST_SEED repeats a run."""
    drawn = 5 if os.environ.get("TRITON_INTERPRET") == "1" else int.from_bytes(os.urandom(3))
    os.environ.setdefault("GPU_TEST_SEED", str(drawn))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    seed = os.environ["GPU_TEST_SEED"]
    return f"random numbers of the tests for a GPU: GPU_TEST_SEED={seed} repeats them"


class _IfImported(pytest.Module):
    """A test file that is skipped where a package is missing that it imports."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and not _ours(missing.name or ""):
                pytest.skip(f"needs {missing.name}", allow_module_level=True)
            raise


def _ours(module: str) -> bool:
    return module.partition(".")[0] == "minikv"


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """`pytest -m gpu` works on a machine that has no more than what runs minikv. Without it a file
    that cannot be imported is an error."""
    if parent.config.option.markexpr != "gpu":
        return None
    made: pytest.Module = _IfImported.from_parent(parent, path=module_path)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay for the whole run. The garbage collector does not look at them:
    neither while they are made nor during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: three processes for every two cores that this run may use. Tests of a terminal
    mostly wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min((cores or 1) * 3 // 2, MOST_WORKERS)


@pytest.fixture(params=[0.025, pytest.param(1.0, marks=pytest.mark.soak)], ids=["some", "all"])
def part(request: pytest.FixtureRequest) -> float:
    """The part of many drawn cases that a test takes: a fortieth, and all of them every night."""
    found: float = request.param
    return found


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena's new memory is full of NaN, so that a test sees any read of an unwritten row."""
    import torch

    from minikv.cache.arena import Arena

    blank = Arena._blank

    def poisoned(arena: Arena, dtype: torch.dtype, *size: int) -> torch.Tensor:
        made = blank(arena, dtype, *size)
        return made.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max // 2)

    monkeypatch.setattr(Arena, "_blank", poisoned)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path_factory.mktemp("home")))

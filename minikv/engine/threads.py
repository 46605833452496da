"""CPU threads: how many the process uses, how they wait for each other, and a check that the
process is no fork, in which they do not exist."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from minikv.errors import UsageError

SPINS = "GOMP_SPINCOUNT"
_SPINS = "2000"  # some tens of microseconds, longer than most gaps between two parallel loops
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def allowed(quota: Path = _QUOTA) -> int:
    """How many cores this process may use: those of its affinity, but at most the limit of its
    control group (e.g. a container), rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        most, period = quota.read_text().split()
        return max(1, min(cores, -(-int(most) // int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or no limit ("max")
        return cores


def wait_briefly() -> None:
    """Make waiting OpenMP threads give up their core after some tens of microseconds, not after
    milliseconds. Otherwise, if another process is busy, a waiting thread can occupy the core that
    the thread it waits for needs.

    Call this before torch is imported, because the OpenMP library reads the setting when it is
    loaded. It has no effect later, or if the environment already says how to wait.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPINS, _SPINS)


def use(threads: int) -> None:
    """Set torch's number of threads. 0: as many as are allowed, unless OMP_NUM_THREADS is set."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(allowed())


@cache
def _computes() -> int:
    """The id of the process whose threads compute, which is the one that loads the first model. A
    fork inherits the cached value."""
    return os.getpid()


def forked() -> bool:
    """Whether this is a fork of a process that had loaded a model. OpenMP's threads do not exist in
    it, and its first parallel loop would wait for them for ever."""
    return _computes() != os.getpid()


def refuse_fork() -> None:
    """Raise UsageError in such a fork."""
    if forked():
        raise UsageError(
            "this process is a fork of one that had loaded a model, and the threads that compute "
            "do not exist in a fork",
            "load the model only after the fork, or start processes with "
            'multiprocessing.get_context("spawn")',
        )

"""How many CPU threads to use: as many as the process may, not as many as the machine has."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def allowed(quota: Path = _QUOTA) -> int:
    """Cores that this process may use: its affinity, and at most its control group's limit (that of
    a container), rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        most, period = quota.read_text().split()
        return max(1, min(cores, -(-int(most) // int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or no limit ("max")
        return cores


def use(threads: int) -> None:
    """Set torch's number of threads. 0: as many as are allowed, unless OMP_NUM_THREADS is set."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(allowed())

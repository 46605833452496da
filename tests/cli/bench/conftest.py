"""Rates from small buffers and kernels on few inputs: figures of no use, in no time."""

from __future__ import annotations

import pytest

from minikv.cli.bench import kernels, machine, speed


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CPU_CACHE", 0)
    monkeypatch.setattr(kernels, "_SECONDS", 1e-5)
    monkeypatch.setattr(speed, "_READ", 1 << 20)
    measure = machine.measure
    monkeypatch.setattr(machine, "measure", lambda device: measure(device, 1, small=True))

"""A bandwidth from small buffers: a figure of no use, in no time."""

from __future__ import annotations

import pytest

from minikv.cli.bench import networks, speed


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_READ", 1 << 20)
    monkeypatch.setattr(networks, "bandwidth", lambda device: networks.read_rate(1 << 20, 1))

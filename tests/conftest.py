"""Every test has a home of its own: no chat, history or setting of the user's is touched. Compiled
kernels are shared with the user."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    """A run in the background inherits a Ctrl-C that is ignored, and so would its children."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path_factory.mktemp("home")))

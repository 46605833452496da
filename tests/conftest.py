"""Every test has a home of its own: no chat, history or setting of the user's is touched."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path_factory.mktemp("home")))

"""What most tests of the command line begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_chat import chat
from talk import Talk, make
from typed import World

import minikv.cli.chat.turn

TEXT = "The mill is run by Ada."


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of saved chats in a home of the test's."""
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "chats"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(monkeypatch)
    monkeypatch.setattr(minikv.cli.chat.turn, "build", made.build)
    return made


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "report.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def real(home: Path, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Over a small random network and a real cache."""
    session = chat()
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    return make(session, capsys)

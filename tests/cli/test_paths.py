"""Where a user's files are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from minikv.cli import paths
from minikv.errors import UsageError

FILES = {
    paths.config_file: ("XDG_CONFIG_HOME", ".config/minikv", "config.toml"),
    paths.chats_folder: ("XDG_DATA_HOME", ".local/share/minikv", "chats"),
    paths.history_file: ("XDG_STATE_HOME", ".local/state/minikv", "history"),
}


@pytest.mark.parametrize("where", FILES)
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_where_a_file_is(
    where: Callable[[], Path], system: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variable, folder, name = FILES[where]
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.delenv("MINIKV_HOME", raising=False)
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert where() == tmp_path / folder / name
    monkeypatch.setenv(variable, "relative")
    assert where() == tmp_path / folder / name
    monkeypatch.setenv(variable, "/xdg")
    assert where() == Path("/xdg/minikv") / name
    monkeypatch.setenv("MINIKV_HOME", "/own")
    assert where() == Path("/own") / name
    monkeypatch.setenv("MINIKV_HOME", "~/own")
    assert where() == tmp_path / "own" / name


@pytest.mark.parametrize("where", FILES)
def test_without_a_home_directory(
    where: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MINIKV_HOME", *(variable for variable, _, _ in FILES.values())):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(UsageError, match="no home directory") as caught:
        where()
    assert "MINIKV_HOME" in caught.value.hint

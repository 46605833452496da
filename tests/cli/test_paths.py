"""Where a user's files are."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused
from typed import invoke

from minikv.cli import paths
from minikv.cli.saved import keeper
from minikv.cli.saved.database import new_folder
from minikv.cli.screen.editor import history_in

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
    caught = refused("no home directory", where)
    assert "MINIKV_HOME" in caught.hint


def test_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_HOME", "~no-such-user/x")
    refused("a user who does not exist: '~no-such-user/x'", paths.chats_folder)


@pytest.mark.parametrize(
    "act",
    [
        lambda: invoke("config", "init"),
        lambda: invoke("config", "set", "seed", "3"),
        lambda: history_in(paths.history_file()),
        lambda: new_folder("chat"),
        lambda: keeper.place({}, saved=False),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_folders_are_the_users_alone_for_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], own: bool
) -> None:
    """Also those above: who may write to one of them may exchange what is in it."""
    home = tmp_path / "above" / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    monkeypatch.setenv(paths.HOME, str(home / "minikv") if own else "")
    before = os.umask(0)
    try:
        act()
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) > 2
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in made} == dict.fromkeys(made, 0o700)


def program(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """minikv in a folder that is removed before it starts."""
    entry = "from minikv.cli.__main__ import run; run()"
    script = (
        "import os, sys; os.rmdir(os.getcwd()); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return subprocess.run(
        [sys.executable, "-c", script, "-c", entry, *arguments],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("arguments", [("config", "show"), ("plan",)])
def test_a_current_directory_that_was_deleted(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """torch's library ended the process there, or it was called a bug."""
    (tmp_path / "gone").mkdir()
    done = program(*arguments, folder=tmp_path / "gone")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: the current directory cannot be read: No such file or directory",
        "  it was deleted or moved; change to another one with cd",
    ]


def test_help_needs_no_current_directory(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    assert program("--help", folder=tmp_path / "gone").returncode == 0


def test_an_empty_home_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries took the root directory for it: models and kernels went to /.cache."""
    from minikv.cli import __main__, main

    monkeypatch.setenv("HOME", "")
    seen: list[str | None] = []
    monkeypatch.setattr(main, "run", lambda: seen.append(os.environ.get("HOME")))
    __main__.run()
    assert seen == [None]


@pytest.mark.parametrize("asked", [False, True])
def test_warnings_of_libraries_are_shown_only_if_python_is_asked_to(asked: bool) -> None:
    """Triton's and torch's appeared in the middle of a chat."""
    code = (
        "import warnings; from minikv.cli import __main__, main; "
        "main.run = lambda: warnings.warn('for developers'); __main__.run()"
    )
    options = ("-W", "default") if asked else ()
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env={name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert ("for developers" in done.stderr) == asked

"""Where a user's files are; JSON with too many parts."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from processes import python
from refusals import refused
from typed import invoke

from minikv.cli import paths
from minikv.cli.eval.items import read_items
from minikv.cli.paths import CONTAINERS, ITEMS, refuse_many
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
    for known, value, found in (
        (variable, "relative", tmp_path / folder),
        (variable, "/xdg", "/xdg/minikv"),
        ("MINIKV_HOME", "/own", "/own"),
        ("MINIKV_HOME", "~/own", tmp_path / "own"),
    ):
        monkeypatch.setenv(known, value)
        assert where() == Path(found) / name
    # Without a home directory.
    monkeypatch.setenv("MINIKV_HOME", "~no-such-user/x")
    refused("a user who does not exist: '~no-such-user/x'", where)
    for name in ("MINIKV_HOME", *(variable for variable, _, _ in FILES.values())):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert "MINIKV_HOME" in refused("no home directory", where).hint


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
@pytest.mark.parametrize(("own", "umask"), [(True, 0), (False, 0), (True, 0o177)])
def test_folders_are_the_users_alone_for_any_umask(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], object],
    own: bool,
    umask: int,
) -> None:
    """Also those above: who may write to one of them may exchange what is in it."""
    home = tmp_path / "above" / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    monkeypatch.setenv(paths.HOME, str(home / "minikv") if own else "")
    before = os.umask(umask)
    try:
        act()
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) > 2
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in made} == dict.fromkeys(made, 0o700)


def test_a_current_directory_that_was_deleted(tmp_path: Path) -> None:
    """torch's library ended the process there, or it was called a bug. Help needs none."""
    told = [
        "error: the current directory cannot be read: No such file or directory",
        "  it was deleted or moved; change to another one with cd",
    ]
    entry = "from minikv.cli.__main__ import run; run()"
    script = (
        "import os, sys; os.rmdir(os.getcwd()); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    for line in ("config show", "plan", "--help"):
        (tmp_path / "gone").mkdir()
        done = python("-c", script, "-c", entry, *line.split(), folder=tmp_path / "gone")
        said = (done.returncode, done.stderr.splitlines())
        assert said == (2, told) if line != "--help" else done.returncode == 0, line


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
    done = python(*options, "-c", code, without=("PYTHONWARNINGS",))
    assert done.returncode == 0
    assert ("for developers" in done.stderr) == asked


# -- JSON that would take far more memory than its file is refused before it is parsed --------
OPEN, ITEM = b"{},", b"1,"


def test_many_parts_are_refused_and_a_file_of_them_in_one_line(tmp_path: Path) -> None:
    for data in (OPEN * (CONTAINERS + 1), b"[" * (CONTAINERS + 1), ITEM * (ITEMS + 1)):
        with pytest.raises(ValueError, match="are too many"):
            refuse_many(data)
    path = tmp_path / "many.json"
    path.write_bytes(b"[" + OPEN * CONTAINERS + b"{}]")
    refused("are too many", list, read_items(path))


@pytest.mark.parametrize(
    ("text", "many"),
    [
        (b'["' + b"{,[" * 9 + b'"]', False),
        (b'["\\"' + b"{,[" * 9 + b'"]', False),  # an escaped quotation mark
        (b'["\\\\",' + b"{,[" * 9 + b'""]', True),  # an escaped backslash ends the text
        (b'["x"' + b"{,[" * 9 + b'"x"]', True),
        (b'"' + b"{" * 99, False),  # a text without end, which no parser takes
    ],
)
def test_only_what_is_outside_of_texts_counts(
    text: bytes, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "CONTAINERS", 5)
    monkeypatch.setattr(paths, "ITEMS", 5)
    with pytest.raises(ValueError, match="are too many") if many else nullcontext():
        refuse_many(text)


def test_a_long_text_costs_little_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CONTAINERS", 5)
    refuse_many(b'"' + b"{\\n" * (1 << 20) + b'"')
    refuse_many(b'"' + b'{\\"' * (1 << 20))  # without end: it took hours
    # Many short ones: 45 bytes for each byte, when what is between all was kept at once.
    monkeypatch.setattr(paths, "ITEMS", 5)
    data = b'["' + b'{", "[' * (1 << 18) + b'"'
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="are too many"):
            refuse_many(data)
        monkeypatch.setattr(paths, "ITEMS", 1 << 18)
        refuse_many(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()

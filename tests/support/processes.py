"""Python as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def python(
    *words: str,
    folder: Path | None = None,
    input: str | None = None,
    without: tuple[str, ...] = (),
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """An interpreter with these arguments, until it ends. without: how the names of variables
    begin that it does not get."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    given = {"cwd": folder, "env": mine | env, "input": input}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, **given
    )


def scripted(script: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """From now on a child of ours runs this shell script instead of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    patch.setattr(sys, "executable", str(path))

"""Python as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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

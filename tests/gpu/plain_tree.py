"""minikv without an installation, for a machine with torch and Triton that has only the sources."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def linked() -> None:
    """Make `minikv` importable in this process and in those that it starts, if it is not."""
    if find_spec("minikv") is None:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
        sys.path.insert(0, str(ROOT))


def quick() -> None:
    """In Triton's interpreter, if this process runs kernels there, a quicker one."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.path.insert(0, str(ROOT / "tests" / "kernels"))
        import quick_interpreter

        quick_interpreter.install()

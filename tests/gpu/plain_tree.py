"""minikv without an installation: the four source directories as one package, by links.

For a machine with torch and Triton to which only the sources were copied.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def linked() -> None:
    """Make `minikv` importable in this process and in those that it starts, if it is not."""
    # In the project's root, `minikv` is found without the other three directories.
    found = find_spec("minikv")
    if found is not None and find_spec("minikv.cli") is not None:
        return
    tree = Path(tempfile.mkdtemp(prefix="minikv-tree-"))
    package = tree / "minikv"
    package.mkdir()
    for path in (*(ROOT / "minikv").iterdir(), *(ROOT / n for n in ("models", "kernels", "cli"))):
        (package / path.name).symlink_to(path)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tree), before)))
    os.environ["PYTHONSAFEPATH"] = "1"  # else ./minikv hides the tree
    sys.path.insert(0, str(tree))
    for name in [n for n in sys.modules if n.partition(".")[0] == "minikv"]:
        del sys.modules[name]

"""On which machine, and with which packages."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import torch

NAMES = "torch triton numpy typer rich safetensors tokenizers transformers pytest hypothesis"
_ASKED = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.used"


def said(*command: str) -> str:
    """The first line that a command prints; "" if there is none."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(found.stdout.splitlines()), "")


def commit() -> str:
    """Of this tree. A copy, whose history may be an older one, has it in .gpu/commit."""
    root = Path(__file__).resolve().parents[2]
    noted = root / ".gpu" / "commit"
    if noted.exists():
        return noted.read_text().strip()
    return said("git", "-C", str(root), "rev-parse", "--short=10", "HEAD") or "unknown"


def main() -> None:
    print(platform.platform(), "python", platform.python_version(), "cores", os.cpu_count())
    print("commit", commit())
    found = {d.metadata["Name"]: d.version for d in distributions()}
    print("; ".join(f"{name} {found.get(name, 'missing')}" for name in NAMES.split()))
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    print(said("gcc", "--version") or "no gcc", "; Python.h", "there" if header.exists() else "-")
    try:
        from triton.runtime.cache import triton_key

        key = hashlib.sha256(triton_key().encode()).hexdigest()[:16]
        cache = Path(os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")).expanduser()
        print("Triton's key", key, "; compiled before:", len([*cache.glob("*")]))
    except ImportError:
        print("no Triton")
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        return
    facts = torch.cuda.get_device_properties(0)
    print(
        f"{facts.name}, {facts.total_memory >> 20} MiB, {facts.multi_processor_count} "
        f"multiprocessors, compute capability {facts.major}.{facts.minor}"
    )
    print(
        f"nvidia-smi {_ASKED}:",
        said("nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"),
    )
    print("cuDNN", torch.backends.cudnn.version(), "CUDA", torch.version.cuda)


if __name__ == "__main__":
    main()

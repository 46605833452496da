"""Where the Triton kernels are tested: in the interpreter, in a process of its own, or on a GPU."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tensors
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SEED = int(os.environ.get("GPU_TEST_SEED", "5"))
"""Of random numbers: another one in each run on a GPU, see tests/conftest.py."""
INTERPRETER = {"TRITON_INTERPRET": "1", "GPU_TEST_SEED": "5"}
"""The environment of a process that runs kernels in Triton's interpreter."""
DAY_AND_NIGHT = [
    pytest.param("not soak", id="day"),
    pytest.param("soak", marks=pytest.mark.soak, id="night"),
]


def apart(*files: Path, mark: str, **env: str) -> None:
    """Run the tests of files, those with this mark, in a process of its own."""
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", "-m", mark]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    env = {**os.environ, "PYTHONWARNINGS": "ignore", **env}
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert " passed" in ran.stdout


def on_device(test: object) -> object:
    """Run in the interpreter, and on a GPU where there is one."""
    if INTERPRETED:
        return test
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))  # type: ignore[arg-type]


def kernel(name: str) -> ModuleType:
    """A module of kernels; what they allocate on a GPU was NaN before."""
    if DEVICE == "cuda":
        memory = torch.full((1 << 24,), math.nan, device=DEVICE)
        del memory
    return importlib.import_module(f"minikv.kernels.{name}")


def randoms(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + seed)


def guarded(t: Tensor) -> Tensor:
    """A copy on the device between absurd numbers, beginning at 16 bytes."""
    return tensors.guarded(t, DEVICE)


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return tensors.randoms(SEED + seed, *shape, dtype=dtype, by=scale)


def close(got: Tensor, want: Tensor, loose: float = 1e-5) -> None:
    torch.testing.assert_close(
        got.cpu().double(), want.cpu().double(), rtol=loose, atol=loose, equal_nan=True
    )

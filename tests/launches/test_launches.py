"""What a step and a prompt launch on a GPU, counted without one; every Triton kernel passes
Triton's own JIT and launcher on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no Triton on this system")

ENV = os.environ | {"PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "0"}

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and its driver"),
    pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang", "cc"))), reason="no C compiler"),
]


@pytest.mark.parametrize(
    "mark", ["not soak", pytest.param("soak", marks=pytest.mark.soak)], ids=["day", "night"]
)
def test_what_is_launched(mark: str) -> None:
    """In one process for all of `checks`: it takes seconds to begin."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", mark]
    command = [sys.executable, "-m", "pytest", *options, Path(__file__).with_name("checks.py")]
    ran = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-6000:]

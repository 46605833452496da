"""What a step and a prompt launch on a GPU, counted without one; every Triton kernel passes
Triton's own JIT and launcher on the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from triton_device import DAY_AND_NIGHT, apart

pytest.importorskip("triton", reason="no Triton on this system")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and its driver"),
    pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang", "cc"))), reason="no C compiler"),
]


@pytest.mark.parametrize("mark", DAY_AND_NIGHT)
def test_what_is_launched(mark: str) -> None:
    """In one process for all of `checks`: it takes seconds to begin."""
    apart(Path(__file__).with_name("checks.py"), mark=mark, TRITON_INTERPRET="0")

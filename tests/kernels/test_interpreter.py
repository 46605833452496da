"""The tests of the Triton kernels in Triton's interpreter. It is chosen when Triton is imported,
so the tests run in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_device import INTERPRETED, interpret

pytest.importorskip("triton", reason="no Triton on this system")


@pytest.mark.parametrize(
    "soak", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["day", "night"]
)
def test_in_the_interpreter(soak: bool) -> None:
    if INTERPRETED:
        pytest.skip("this is the interpreter")
    files = sorted(
        [
            *Path(__file__).parent.glob("*/test_*gpu.py"),
            *Path(__file__).parent.glob("*/test_forms.py"),
            *Path(__file__).parent.glob("test_prompt.py"),
        ]
    )
    interpret(files, soak=soak)

"""The tests of the Triton kernels in Triton's interpreter. It is chosen when Triton is imported,
so the tests run in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_device import DAY_AND_NIGHT, INTERPRETED, INTERPRETER, apart

pytest.importorskip("triton", reason="no Triton on this system")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.parametrize("mark", DAY_AND_NIGHT)
def test_in_the_interpreter(mark: str) -> None:
    here = Path(__file__).parent
    names = ("*/test_*gpu.py", "*/test_forms.py", "test_prompt.py")
    apart(*sorted(file for name in names for file in here.glob(name)), mark=mark, **INTERPRETER)

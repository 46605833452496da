"""In Triton's interpreter, which test_interpreter.py starts, these tests run in a quicker one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.path.insert(0, str(Path(__file__).parent))
    import quick_interpreter

    quick_interpreter.install()

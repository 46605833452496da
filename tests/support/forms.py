"""Every form of an operation, from the table `dispatch.FORMS`: torch, each way in C, and Triton.

Torch and C run in the usual process; Triton in that of test_interpreter.py, or on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import tensors
import torch
from torch import Tensor
from triton_device import DEVICE, INTERPRETED, kernel

from minikv.kernels import dispatch
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.native import build, choice

TRITON = find_spec("triton") is not None
needs_c = pytest.mark.skipif(
    INTERPRETED or build.library()[0] is None, reason="no C compiler here, or this is Triton's test"
)


@dataclass(frozen=True, slots=True)
class Form:
    """How one of them is called, and where its tensors are."""

    by: str
    """torch, c or triton."""
    find: Callable[[], Callable[..., Any]]
    device: str = "cpu"

    def __call__(self, *given: object, **named: object) -> Any:
        return self.find()(*given, **named)

    def place(self, t: Tensor) -> Tensor:
        """A copy on the form's device between absurd numbers."""
        return tensors.guarded(t, self.device)

    def loose(self, dtype: torch.dtype) -> float:
        """What rounding may change, relative and absolute. Torch also rounds between its steps."""
        if self.by == "torch":
            return {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}[dtype]
        bfloat16 = 1e-2 if self.by == "c" else 2e-2
        return {torch.float32: 1e-5, torch.bfloat16: bfloat16, torch.float16: 2e-3}[dtype]


def forms(operation: str, torch_too: bool = True) -> list[Any]:
    """The parameters of a test: each form of the operation. One that this machine lacks is
    skipped."""
    row = next(row for row in dispatch.FORMS if operation in row.names.split())
    found: list[Any] = []
    if not INTERPRETED:
        ways = (dispatch.Kernels, dispatch.TorchOnCPU)
        plain = dict.fromkeys(getattr(way, operation) for way in ways if torch_too)
        for form in plain:
            found.append(pytest.param(Form("torch", lambda f=form: f), id=form.__module__[15:]))
        found += _in_c(operation, row.c) if row.c else []
    module = importlib.import_module(f"minikv.kernels.{row.gpu}") if row.gpu and TRITON else None
    if hasattr(module, operation):
        missing = not (INTERPRETED or torch.cuda.is_available())
        marks = [pytest.mark.skipif(missing, reason="needs Triton and a CUDA device")]
        marks += [] if INTERPRETED else [pytest.mark.gpu]
        made = Form("triton", lambda: getattr(kernel(row.gpu), operation), DEVICE)
        found.append(pytest.param(made, marks=marks, id="triton"))
    return found


def _in_c(operation: str, name: str) -> list[Any]:
    module = importlib.import_module(f"minikv.kernels.{name}")
    ways = dict(vars(module).get("FORMS", {})) or {"C": module}
    found, missing = [], build.library()[0] is None
    if not any(hasattr(place, operation) for place in (module, *ways.values())):
        return found
    for way, where in ways.items():
        where = where if hasattr(where, operation) else module
        needed = where if isinstance(where, prefill.Prefill) else None
        needed = prefill.TILES if way == choice.TILES else needed
        lacks = missing or (needed is not None and not needed.available())
        mark = pytest.mark.skipif(lacks, reason="no C compiler, or no such instructions, here")
        form = Form("c", lambda where=where: getattr(where, operation))
        found.append(pytest.param(form, marks=mark, id=way))
        if where is module:
            break
    return found


def each(forms: list[Any], cases: Sequence[Any], takes: Callable[[Form, Any], bool]) -> list[Any]:
    """Every form with every case that it takes, for the parameters form and case."""
    return [
        pytest.param(form.values[0], case, marks=form.marks, id=f"{form.id}-{case}")
        for form in forms
        for case in cases
        if takes(form.values[0], case)
    ]

"""How C is called: what a struct holds and keeps, and what becomes of a failure."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minikv.kernels.native import binding
from minikv.kernels.native.binding import Struct, function


def test_a_struct_holds_numbers_and_addresses_and_keeps_what_they_lead_to() -> None:
    held, sizes = torch.zeros(3), (ctypes.c_int32 * 2)(4, 8)
    inner = Struct(7)
    made = Struct(-2, True, None, held, inner, sizes)
    found = (ctypes.c_int64 * 6).from_address(made.at(0))
    assert [*found] == [-2, 1, 0, held.data_ptr(), inner.at(0), ctypes.addressof(sizes)]
    assert made.at(3) == made.at(0) + 24
    assert ctypes.c_int64.from_address(found[4]).value == 7
    kept = weakref.ref(held)
    del held
    gc.collect()
    assert kept() is not None


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_function_gets_addresses_and_a_failure_is_an_error(status: int, monkeypatch: Any) -> None:
    given: list[object] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    made = kind(lambda *args: given.append(args) or status)  # type: ignore[func-returns-value]
    monkeypatch.setattr(binding, "loaded", lambda: SimpleNamespace(minikv_work=made))
    x, work = torch.zeros(2), function("work", "pnp", "some work")
    if status:
        with pytest.raises(MemoryError, match="some work found no memory"):
            work(x, 1 << 40, None)
    else:
        work(x, 1 << 40, None)
    assert given == [(x.data_ptr(), 1 << 40, None)]

"""How Python calls the C kernels: functions, structs, and checks of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache
from operator import index
from typing import Any

import torch
from torch import Tensor

from minikv.kernels.native.build import library

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that all C kernels take -> their numbers in `numbers.h`."""
FLOAT16, INT8 = 2, 3


def loaded() -> ctypes.CDLL:
    """The compiled library. It exists if `dispatch.choose` chose the C kernels."""
    found, why = library()
    assert found is not None, why
    return found


class Struct:
    """A struct of int64_t and of pointers, or an array of such structs: one field after the other.

    A field is a number, a tensor, another struct or an array, or None. C receives the addresses of
    all but numbers, and NULL for None. The objects at these addresses are kept alive."""

    def __init__(self, *fields: object) -> None:
        self.fields = fields
        self._as_parameter_ = (c_int64 * len(fields))(*map(_number, fields))

    def at(self, index: int) -> int:
        """The address of the field with this index."""
        return ctypes.addressof(self._as_parameter_) + 8 * index


def _number(field: Any) -> int:
    if type(field) is int:  # most are
        return field
    if isinstance(field, Tensor):
        return field.data_ptr()
    if isinstance(field, Struct):
        return field.at(0)
    if isinstance(field, ctypes.Array):
        return ctypes.addressof(field)
    return 0 if field is None else index(field)


_TYPES = {"i": c_int, "n": c_int64, "d": c_double, "p": c_void_p}


def function(name: str, takes: str, lacking: str = "") -> Callable[..., None]:
    """The function minikv_`name` of the library, which is loaded at the first call.

    takes: a letter for each argument: i int, n int64_t, d double, p the address of a tensor, a
    `Struct` or an array, or None. lacking: the subject of the MemoryError that is raised if the
    function returns anything but 0; "": it returns nothing.
    """

    @cache
    def found() -> Any:
        made = getattr(loaded(), f"minikv_{name}")
        made.argtypes = [_TYPES[letter] for letter in takes]
        made.restype = _enough if lacking else None
        return made

    def _enough(failed: int) -> None:
        if failed:
            raise MemoryError(f"{lacking} found no memory")

    def call(*given: Any) -> None:
        # Not in a `from_param`: ctypes would turn an interrupt there into another error.
        found()(*[one.data_ptr() if isinstance(one, Tensor) else one for one in given])

    return call


def plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether all tensors are contiguous, in main memory, and of this dtype."""
    return all(t.dtype is dtype and t.is_contiguous() and t.is_cpu for t in tensors)

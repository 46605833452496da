"""What the Python modules of the C kernels share: dtypes, addresses, and checks of tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from minikv.kernels.native.build import library

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that all C kernels take -> their numbers in `numbers.h`."""
FLOAT16, INT8 = 2, 3


def loaded() -> ctypes.CDLL:
    """The compiled library. It exists wherever `dispatch.choose` chose the C kernels."""
    found, why = library()
    assert found is not None, why
    return found


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor; None, which ctypes passes as NULL, for None."""
    return None if tensor is None else tensor.data_ptr()


def plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether all tensors are contiguous, in main memory, and of this dtype."""
    return all(t.dtype is dtype and t.is_contiguous() and t.is_cpu for t in tensors)

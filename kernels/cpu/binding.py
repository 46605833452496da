"""What the Python side of the C kernels shares: dtypes, addresses, and the checks of tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from minikv.kernels.cpu.build import library

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes that all C kernels take, by their numbers in `numbers.h`."""
FLOAT16, INT8 = 2, 3


def loaded() -> ctypes.CDLL:
    """The compiled library. There is one wherever C kernels were chosen (`dispatch.choose`)."""
    found, why = library()
    assert found is not None, why
    return found


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor begins; None becomes NULL."""
    return None if tensor is None else tensor.data_ptr()


def plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether these are contiguous tensors of a dtype in main memory."""
    return all(t.dtype is dtype and t.is_contiguous() and t.is_cpu for t in tensors)

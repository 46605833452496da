"""Who computes: the Triton kernels on a CUDA device, the C kernels on a CPU, the torch twins where
those cannot.

Chosen once, for a device and a head size, and handed on; nothing here is remembered.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module

import torch

from minikv.kernels.torch import decode_cpu, reference

_OLDEST = (3, 6)  # the oldest Triton that the kernels were built with
_CAPABILITY = (8, 0)
_SIZES = range(16, 257, 8)  # head sizes: rows that are read 16 bytes at a time
_WIDEST = 128  # of float32 heads, whose halves would not stay in registers


class Kernels:
    """Every operation that has a kernel of its own somewhere, by its torch twin."""

    name = "torch"
    products = False
    """Whether int8_product and row_product are quicker than torch's own."""
    ragged_attention = staticmethod(reference.ragged_attention)
    advance = staticmethod(reference.advance)
    append = staticmethod(reference.append)
    hash_append: Callable[..., None] | None = None
    h2o_step: Callable[..., None] | None = None
    tova_step: Callable[..., None] | None = None
    roco_step: Callable[..., None] | None = None
    scissorhands_step: Callable[..., None] | None = None
    lowest_step = staticmethod(reference.lowest_step)
    rows_attention = staticmethod(reference.rows_attention)
    last_rows_attention = staticmethod(reference.last_rows_attention)
    observe = staticmethod(reference.observe)
    add_columns = staticmethod(reference.add_columns)
    rows_lse = staticmethod(reference.rows_lse)
    segments_attention = staticmethod(reference.segments_attention)
    gather_rows = staticmethod(reference.gather_rows)
    gather_column = staticmethod(reference.gather_column)
    add_norm = staticmethod(reference.add_norm)
    rotate = staticmethod(reference.rotate)
    silu_mul = staticmethod(reference.silu_mul)
    int8_product = staticmethod(reference.int8_product)
    row_product = staticmethod(reference.row_product)


class TorchOnCPU(Kernels):
    """The torch forms, with attention by views where numbers can be read without waiting."""

    ragged_attention = staticmethod(decode_cpu.ragged_attention)


def choose(
    device: torch.device, name: str, head_dim: int, dtype: torch.dtype
) -> tuple[Kernels, str | None]:
    """The kernels for heads of `head_dim` numbers of `dtype`, and a line that says why they are
    not those of the device where these were to be expected.

    name: "auto" takes the device's wherever they can run, "triton" expects Triton's, "torch" takes
    the twins. The first time on a machine this compiles the C kernels, which takes seconds.
    """
    if name == "torch":
        return (TorchOnCPU() if device.type == "cpu" else Kernels()), None
    if name == "auto" and device.type == "cpu":
        return _native(head_dim, dtype)
    reason = unfit(device, head_dim, dtype)
    if reason is not None:
        return Kernels(), f"the Triton kernels are not used: {reason}"
    # By name: a module that imports Triton is loaded only where it is used.
    found = import_module("minikv.kernels.triton.table").Triton()
    assert isinstance(found, Kernels)
    return found, None


def _native(head_dim: int, dtype: torch.dtype) -> tuple[Kernels, str | None]:
    build, step = (import_module(f"minikv.kernels.cpu.{name}") for name in ("build", "step"))
    why = step.unfit(dtype, head_dim)
    if not why:
        found, why = build.library()
        if found is not None:
            made = import_module("minikv.kernels.cpu.table").Native()
            assert isinstance(made, Kernels)
            return made, None
        if build.switched_off():
            return TorchOnCPU(), None
    return TorchOnCPU(), f"the C kernels are not used, and steps are slower: {why}"


def unfit(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot serve such heads on this device, or None."""
    if device.type != "cuda":
        return f"they need a CUDA device, and this is {device.type}"
    if torch.version.hip is not None:
        return "they are made for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return "they need compute capability {}.{}, this GPU has {}.{}".format(
            *_CAPABILITY, *capability
        )
    return _triton() or _rows(head_dim, dtype)


def _triton() -> str | None:
    """What is wrong with the Triton that is here, if anything."""
    try:
        # Not the distribution's: a nightly build is called something else there.
        version = str(import_module("triton").__version__)
        import_module("triton.language")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return "triton is not installed"
        return f"triton cannot be imported (no {error.name})"
    except Exception as error:  # a broken one may raise anything
        return f"triton cannot be imported ({type(error).__name__})"
    number = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if number < _OLDEST:
        return "triton {} is too old, they need {}.{}".format(version, *_OLDEST)
    return None


def _rows(head_dim: int, dtype: torch.dtype) -> str | None:
    """What is wrong with the rows, if anything."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"they take no {str(dtype).removeprefix('torch.')}"
    if head_dim not in _SIZES:
        return f"they take heads of {_SIZES[0]} to {_SIZES[-1]} in steps of 8, not {head_dim}"
    if dtype == torch.float32 and head_dim > _WIDEST:
        return f"they take float32 heads of {_WIDEST} at most, not {head_dim}"
    return None

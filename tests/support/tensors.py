"""Random tensors; segments of an arena with unused rows between them; and tensors between absurd
numbers, so that what is read or written beside them is noticed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

EDGE = 16 * 64  # numbers on each side; tensors begin at 16 bytes


def randoms(seed: int, *shape: int, dtype: torch.dtype = torch.float32, by: float = 1.0) -> Tensor:
    """Normal numbers times `by`."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (made * by).to(dtype)


def angles(seed: int, rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [rows, 1, size] of a random rotation."""
    angle = randoms(seed, rows, 1, size // 2, by=3.0)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    return cos.to(dtype), sin.to(dtype)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def segments(lengths: list[int], gap: int = 3) -> tuple[Tensor, Tensor, int]:
    """start and length [H] of segments with unused rows between them, and R."""
    length = torch.tensor(lengths)
    start = (length + gap).cumsum(0) - length
    return start, length, int(start[-1] + length[-1]) + gap


def in_use(start: Tensor, length: Tensor, rows: int) -> Tensor:
    """Which rows are in use, bool [R]."""
    used = torch.zeros(rows, dtype=torch.bool)
    for a, n in zip(start.flatten().tolist(), length.flatten().tolist(), strict=True):
        used[a : a + n] = True
    return used


def absurd(dtype: torch.dtype) -> float:
    """NaN, or an integer that nothing should meet; True for bool."""
    if dtype == torch.bool:
        return True
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 2


def guarded(t: Tensor, device: str = "cpu") -> Tensor:
    """A contiguous copy on the device between absurd numbers."""
    memory = torch.full((t.numel() + 2 * EDGE,), absurd(t.dtype), dtype=t.dtype, device=device)
    return memory[EDGE : EDGE + t.numel()].view(t.shape).copy_(t)


def untouched(t: Tensor) -> bool:
    """Whether what `guarded` put around a tensor is still there."""
    memory = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
    around = torch.cat((memory[:EDGE], memory[EDGE + t.numel() :]))
    return bool((around != around).all() if t.is_floating_point() else (around == around[0]).all())

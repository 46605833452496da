"""The least time that the hardware allows (the floor), from rates measured in the same run.

A decode step must read every weight and every cached token once. A prompt needs the products with
every matrix, and attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minikv.cli.bench.shapes import Sizes


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's measured rates, in bytes and flops a second; None: not measured.

    read_1: reading with one thread (None on a GPU). read: with all threads. copy: bytes read plus
    bytes written. matmul and matmul_fp32: products of large square matrices, in bfloat16 and
    float32.
    """

    read_1: float | None
    read: float
    copy: float
    matmul: float
    matmul_fp32: float
    on_gpu: bool

    @property
    def stream(self) -> float:
        """Bytes a second that a decode step could read; a GPU's is what it copies with."""
        return self.copy if self.on_gpu else self.read

    def product(self, dtype: str) -> float:
        """Flops a second of a large product in a dtype."""
        return self.matmul_fp32 if dtype == "float32" else self.matmul


def decode_floor(weights: int, kv: float, stream: float) -> float:
    """Seconds of a step that reads so many bytes of weights and of cache at `stream` bytes/s."""
    return (weights + kv) / stream


def prefill_floor(sizes: Sizes, tokens: int, product: float, attention: float) -> float:
    """Seconds of a prompt: flops of its matrices and of its attention, each at its rate."""
    return sizes.linear_flops(tokens) / product + sizes.attention_flops(tokens) / attention


def overhead(ours: Sequence[float], base: Sequence[float]) -> float:
    """How much longer than the base, as a share: the median over the rounds that both have, each
    compared with the base of the same round. So what slows down a whole round does not count."""
    return median([a / b - 1.0 for a, b in zip(ours, base, strict=False)])


def ratio(base: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast as the base: the quotient of the medians."""
    return median(base) / median(ours)

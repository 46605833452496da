"""The least time that the hardware allows, from rates that were measured in the same run.

A decode step must read every weight and every cached row once; a prompt must be multiplied and
attended to. No claim is made about what is above the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minikv.cli.bench.shapes import Sizes


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does, measured. Bytes and flops a second; None: not measured.

    read_1: reading with one thread (None on a GPU). read: with all. copy: bytes read plus bytes
    written. matmul and matmul_fp32: products of large square matrices, in bfloat16 and float32.
    """

    read_1: float | None
    read: float
    copy: float
    matmul: float
    matmul_fp32: float
    on_gpu: bool

    @property
    def stream(self) -> float:
        """Bytes a second that a decode step could have: a GPU's is what it copies with."""
        return self.copy if self.on_gpu else self.read

    def product(self, dtype: str) -> float:
        """Flops a second of a large product in a dtype."""
        return self.matmul_fp32 if dtype == "float32" else self.matmul


def decode_floor(weights: int, kv: float, stream: float) -> float:
    """Seconds of a step that reads so many bytes of weights and of cache at `stream` bytes/s."""
    return (weights + kv) / stream


def prefill_floor(linear: int, product: float, attention: int, attending: float) -> float:
    """Seconds of a prompt: flops of its matrices and of its attention, each at its rate."""
    return linear / product + attention / attending


def read_bound(sizes: Sizes, tokens: int, rates: Rates, dtype: str = "bfloat16") -> float:
    """Seconds of a prompt at the rate of large products: less than anything takes."""
    product = rates.product(dtype)
    return prefill_floor(
        sizes.linear_flops(tokens), product, sizes.attention_flops(tokens), product
    )


def middle(values: Sequence[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def overhead(ours: Sequence[float], base: Sequence[float]) -> float:
    """How much longer than the base, as a share: the median over rounds, each with its own base.

    Pairs of the same round saw the same machine, so what slows both down drops out.
    """
    return middle([a / b - 1.0 for a, b in zip(ours, base, strict=True)])


def ratio(base: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast as the base: the quotient of the medians."""
    return middle(base) / middle(ours)


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure beside what it should be. `first` is the first milestone; None: there is none.

    at_least: larger is better. `measured` None: there is no figure, and `note` says why.
    """

    name: str
    measured: float | None
    goal: float
    first: float | None = None
    at_least: bool = True
    unit: str = "x"
    note: str = ""

    @property
    def state(self) -> str:
        """met, milestone (the first one), missed, or not measured."""
        if self.measured is None:
            return "not measured"
        if self._reaches(self.goal):
            return "met"
        return "milestone" if self.first is not None and self._reaches(self.first) else "missed"

    def _reaches(self, bound: float) -> bool:
        assert self.measured is not None
        return self.measured >= bound if self.at_least else self.measured <= bound

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "name": self.name,
            "measured": self.measured,
            "goal": self.goal,
            "first": self.first,
            "better": "more" if self.at_least else "less",
            "unit": self.unit,
            "state": self.state,
            "note": self.note,
        }

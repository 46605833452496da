"""What the compiler must know to build a kernel without a GPU, for the test that compiles all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WIDE = 16
"""Bytes of the widest load of a thread."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One build of one kernel.

    fn: the `triton.jit` function; signature: the type of every argument in order, as Triton writes
    types ("*bf16", "i64", "constexpr"; a tuple of types for a tuple); constants: the value of every
    "constexpr"; warps and stages: those of the launch; mma: whether the build must use matrix
    instructions; reads: the name of a pointer -> how many bytes each load through it must have. A
    launch does not specialize integers.
    """

    name: str
    fn: object
    signature: Mapping[str, str | tuple[str, ...]]
    constants: Mapping[str, object] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    mma: bool = False
    reads: Mapping[str, int] = field(default_factory=dict)

    @property
    def aligned(self) -> tuple[int, ...]:
        """Indices of the pointers that a launch knows to be aligned to 16 bytes."""
        free = [p.do_not_specialize_on_alignment for p in self.fn.params]  # type: ignore[attr-defined]
        kinds = enumerate(self.signature.values())
        return tuple(
            i for i, kind in kinds if isinstance(kind, str) and kind.startswith("*") and not free[i]
        )

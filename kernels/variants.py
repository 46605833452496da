"""What a compiler must be told to build a kernel without a GPU: the compile gate walks these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Variant:
    """One build of one kernel.

    fn: the `triton.jit` function; signature: the type of every argument in order, as Triton writes
    types ("*bf16", "i64", "constexpr"); constants: the value of every "constexpr"; warps and
    stages: how it is launched; mma: it must use matrix instructions; vector: it must read rows 16
    bytes at a time. At a launch every pointer is 16-byte aligned; integers are not specialised.
    """

    name: str
    fn: object
    signature: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    mma: bool = False
    vector: bool = True

    @property
    def aligned(self) -> tuple[int, ...]:
        """Places of the arguments that are pointers."""
        return tuple(i for i, kind in enumerate(self.signature.values()) if kind.startswith("*"))

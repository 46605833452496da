"""The arena of a decode step in the form that `layers` takes in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from minikv import kernels


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's part: each head's rows and its new row, and what attention writes.

    start, length and slot int64 [H]; oldest int64 [], None without a window; logits [H, G, N] and
    lse [H, G], or None.
    """

    start: Tensor
    length: Tensor
    slot: Tensor
    oldest: Tensor | None
    logits: Tensor | None
    lse: Tensor | None


@dataclass(frozen=True, slots=True)
class StepArena:
    """k, v, pos, blank and position: as in `rotate_append`; arrived: as in `ragged_attention`;
    layers: each layer's part."""

    k: Tensor
    v: Tensor
    pos: Tensor
    blank: tuple[Tensor, ...]
    position: Tensor
    arrived: Tensor
    layers: tuple[Heads, ...]


def step_arena(
    columns: Mapping[str, Tensor],
    blank: Sequence[Tensor],
    position: Tensor,
    start: Tensor,
    length: Tensor,
    slot: Tensor,
    windows: Sequence[int | None],
    oldest: Tensor,
    logits: Tensor | None,
    lse: Tensor | None,
    arrived: Tensor,
    hashing: kernels.Hashing | None = None,
) -> StepArena | None:
    """The arena of a decode step in the form that `layers` takes; launches nothing. None for int8
    rows, whose scale needs all numbers of a row, and for HashEvict, which needs the whole query.

    The arguments are those of cpu/step_arena.py.
    """
    if hashing is not None or "k_scale" in columns:
        return None
    each = tuple(
        Heads(
            start[layer],
            length[layer],
            slot[layer],
            None if window is None else oldest[layer],
            None if logits is None else logits[layer],
            None if lse is None else lse[layer],
        )
        for layer, window in enumerate(windows)
    )
    k, v, pos = columns["k"], columns["v"], columns["pos"]
    return StepArena(k, v, pos, tuple(blank), position, arrived, each)

"""Attention of a prompt's queries, in C, in three ways: with bfloat16 tiles (prefill_tiles.c),
bfloat16 vectors (prefill.c), or floats (prefill_float.c). Not every processor has the first two.
`choice` says which way is fastest.

They handle bfloat16 and float32 (always multiplied as floats), and head sizes that are multiples of
16 up to 256. Everything else goes to plain.py.

C also joins results over up to 8 disjoint sets of rows (`merge.c`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.attention import plain as plain_torch
from minikv.kernels.decode.plain import Segments
from minikv.kernels.native import choice
from minikv.kernels.native.binding import KINDS, Struct, function
from minikv.kernels.native.build import library

_MULTIPLE = 16
_MAX_HEAD_DIM = 256
_float32 = function("rows_attention_float32", "pppppp", "attention")


@dataclass(frozen=True, slots=True)
class Prefill:
    """One of the three ways, by the name of its function in the library."""

    name: str
    """The name of the function for bfloat16, which takes addresses of q, k, v, the output and the
    log-sum-exps, and a `Shape` of prefill.h."""
    attend: Callable[..., None]

    def available(self) -> bool:
        """Whether there is a library, and the processor has the instructions."""
        return _available(self.name)

    def rows_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `plain.rows_attention`. In memory the output is [T, H, G, D]."""
        found = self._attend(q, k, v, 1 if causal else k.shape[1])
        return plain_torch.rows_attention(q, k, v, causal=causal) if found is None else found

    def last_rows_attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `plain.last_rows_attention`. Computed at once, without `merge`."""
        found = self._attend(q, k, v, k.shape[1] - q.shape[2] + 1)
        return plain_torch.last_rows_attention(q, k, v) if found is None else found

    def ragged_prefill(
        self,
        q: Tensor,
        rows: Segments,
        free_slot: Tensor,
        q_pos: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `plain.ragged_prefill`. Without a window, head by head in C."""
        return plain_torch.ragged_prefill(q, rows, free_slot, q_pos, window, self.rows_attention)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor] | None:
        """Query i over rows 0 .. first + i - 1; None if C does not handle these tensors."""
        heads, group, rows, size = q.shape
        keys = k.shape[1]
        alike = q.dtype == k.dtype == v.dtype and all(x.is_cpu for x in (q, k, v))
        dense = q.stride(3) == k.stride(2) == v.stride(2) == 1
        if not (alike and dense and q.numel() and keys and first > 0):
            return None
        attend = {torch.bfloat16: self.attend, torch.float32: _float32}.get(q.dtype)
        if attend is None or size % _MULTIPLE or size > _MAX_HEAD_DIM:
            return None
        if not (self if q.dtype is torch.bfloat16 else FLOAT).available():
            return None
        out = torch.empty((rows, heads, group, size), dtype=q.dtype, device=q.device)
        out = out.permute(1, 2, 0, 3)
        lse = torch.empty((heads, group, rows), dtype=torch.float32, device=q.device)
        strides = *q.stride()[:3], *k.stride()[:2], *v.stride()[:2], *out.stride()[:3]
        attend(q, k, v, out, lse, Struct(heads, group, rows, keys, size, first, *strides))
        return out, lse


def _way(name: str) -> Prefill:
    return Prefill(name, function(name, "pppppp", "attention"))


TILES = _way("rows_attention_tiles")
BF16 = _way("rows_attention")
FLOAT = _way("rows_attention_float")
FORMS = {choice.C: BF16, choice.TILES: TILES, choice.FLOATS: FLOAT}
"""By the names in `choice`."""


@cache
def _available(name: str) -> bool:
    found, _ = library()
    asked = getattr(found, f"minikv_{name}_available", None)  # floats need no special instructions
    return found is not None and (asked is None or bool(asked()))


_PARTS = 8
_merge = function("merge", "ppppp")


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See `plain.merge`."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    heads, group, rows, size = outs[0].shape
    kind = outs[0].dtype
    fits = kind in KINDS and size <= _MAX_HEAD_DIM and len(parts) <= _PARTS
    fits = fits and all(x.dtype is kind and x.stride(3) == 1 and x.is_cpu for x in outs)
    if not fits or any(x.dtype is not torch.float32 for x in lses):
        return plain_torch.merge(parts)
    joined = torch.empty_like(outs[0])
    whole = torch.empty((heads, group, rows))
    none = [0] * 3 * (_PARTS - len(parts))
    strides = [step for x in (joined, *outs) for step in x.stride()[:3]]
    sums = [step for x in lses for step in x.stride()]
    shape = Struct(*joined.shape, len(parts), KINDS[kind], *strides, *none, *sums)
    _merge(Struct(*outs), Struct(*lses), joined, whole, shape)
    return joined, whole

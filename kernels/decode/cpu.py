"""Attention of a decode step, in C (`decode.c`), with vectors or, for the logits, with bfloat16
tiles (AMX). `plain.py` handles other dtypes and strides, and head sizes above 256."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.attention import cpu as prefill
from minikv.kernels.decode import plain as plain_torch
from minikv.kernels.decode.plain import Segments
from minikv.kernels.native import choice
from minikv.kernels.native.binding import INT8, KINDS, function

_MAX_HEAD_DIM = 256
_ragged_attention = function("ragged_attention", "iiiiii" + "p" * 10 + "npp", "attention")


def unfit(dtype: torch.dtype, head_dim: int) -> str:
    """Why the C kernels cannot compute heads of this dtype and size; "" if they can."""
    if dtype not in KINDS:
        return f"they do not support {str(dtype).removeprefix('torch.')}"
    if head_dim > _MAX_HEAD_DIM:
        return f"they take heads of at most {_MAX_HEAD_DIM}, not {head_dim}"
    return ""


@dataclass(frozen=True, slots=True)
class Decode:
    """Attention of a step. tiles: compute the logits of bfloat16 with tiles, if the head size fits
    and this process may use tiles."""

    tiles: bool

    def ragged_attention(
        self,
        q: Tensor,
        rows: Segments,
        logits: Tensor | None = None,
        lse: Tensor | None = None,
        arrived: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `plain.ragged_attention`."""
        k, v, start, length, _, pos, oldest, k_scale, v_scale = rows
        heads, group, size = q.shape
        stored = INT8 if k_scale is not None else KINDS.get(k.dtype, -1)
        kind = KINDS.get(q.dtype, -1)
        fits = kind >= 0 and stored in (kind, INT8) and size <= _MAX_HEAD_DIM and q.is_contiguous()
        if not (fits and _exact(logits) and _exact(lse)):
            return plain_torch.ragged_attention(q, rows, logits, lse)
        seen = None if pos is None or oldest is None else pos
        out = torch.empty_like(q)
        sums = lse
        if sums is None:
            sums = torch.empty((heads, group), dtype=torch.float32, device=q.device)
        tiles, pitch = self.tiles and prefill.TILES.available(), 0
        if logits is not None:
            pitch = logits.shape[-1]
        rest = k_scale, v_scale, logits, pitch, sums, out
        where = start, length, seen, None if seen is None else oldest
        _ragged_attention(kind, stored, tiles, *q.shape, q, k, v, *where, *rest)
        return out, sums


VECTORS, TILES = Decode(False), Decode(True)
FORMS = {choice.C: VECTORS, choice.TILES: TILES}
"""What `choice` calls them."""


def _exact(tensor: Tensor | None) -> bool:
    """Whether C can write float32 to the tensor, or there is no tensor."""
    return tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())

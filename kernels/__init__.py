"""Attention and eviction primitives. The torch versions in `reference` are their specification.

Every function takes plain tensors and knows nothing of caches or policies.
"""

from __future__ import annotations

from minikv.kernels.torch.reference import (
    Part,
    Rows,
    add_columns,
    advance,
    append,
    below_uniform,
    decode_attention,
    from_codes,
    gather_column,
    gather_rows,
    h2o_step,
    hash_append,
    joint_attention,
    last_rows_attention,
    merge,
    observe,
    ragged_attention,
    roco_step,
    rows_attention,
    scissorhands_step,
    segments_attention,
    survivors,
    to_codes,
    total,
    tova_step,
    visible_attention,
)
from minikv.kernels.torch.window import window_attention

__all__ = [
    "Part",
    "Rows",
    "add_columns",
    "advance",
    "append",
    "below_uniform",
    "decode_attention",
    "from_codes",
    "gather_column",
    "gather_rows",
    "h2o_step",
    "hash_append",
    "joint_attention",
    "last_rows_attention",
    "merge",
    "observe",
    "ragged_attention",
    "roco_step",
    "rows_attention",
    "scissorhands_step",
    "segments_attention",
    "survivors",
    "to_codes",
    "total",
    "tova_step",
    "visible_attention",
    "window_attention",
]

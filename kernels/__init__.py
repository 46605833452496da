"""Attention and eviction primitives. The torch versions in `reference` are their specification.

Every function takes plain tensors and knows nothing of caches or policies.
"""

from __future__ import annotations

from minikv.kernels.reference import (
    add_columns,
    below_uniform,
    decode_attention,
    joint_attention,
    merge,
    observe,
    rows_attention,
    total,
    visible_attention,
)

__all__ = [
    "add_columns",
    "below_uniform",
    "decode_attention",
    "joint_attention",
    "merge",
    "observe",
    "rows_attention",
    "total",
    "visible_attention",
]

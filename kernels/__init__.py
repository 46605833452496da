"""Attention and eviction primitives. The torch versions in `reference` are their specification.

Every function takes plain tensors and knows nothing of caches or policies.
"""

from __future__ import annotations

from minikv.kernels.reference import (
    decode_attention,
    merge,
    observe,
    rows_attention,
    visible_attention,
)

__all__ = ["decode_attention", "merge", "observe", "rows_attention", "visible_attention"]

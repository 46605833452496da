"""Attention and eviction as functions of plain tensors, independent of caches and policies.

One folder per operation: `plain.py` defines it in torch, `gpu.py` implements it in Triton, `cpu.py`
and the C files implement it for a CPU. `dispatch` chooses.
"""

from __future__ import annotations

from minikv.kernels.append.plain import Advancing, Slots, append
from minikv.kernels.attention.plain import (
    merge,
    rows_attention,
    total,
    visible_attention,
    window_attention,
)
from minikv.kernels.decode.plain import NewRow, Rows, Segments, lowest, ragged_attention
from minikv.kernels.evict.plain import NOT_FREE, fill, order_key
from minikv.kernels.int8 import from_codes, to_codes
from minikv.kernels.mass.plain import Part, Queries, rows_lse

__all__ = ["Advancing", "NewRow", "Part", "Queries", "Rows", "Segments", "Slots"]
__all__ += ["append", "lowest", "ragged_attention"]
__all__ += ["merge", "rows_attention", "total", "visible_attention", "window_attention"]
__all__ += ["NOT_FREE", "fill", "from_codes", "order_key", "rows_lse", "to_codes"]

"""Attention and eviction as functions of plain tensors. They know nothing of caches or policies.

A folder for each operation: `plain.py` is its definition in torch, `gpu.py` has it in Triton,
`cpu.py` and the C files have it for a CPU. `dispatch` chooses.
"""

from __future__ import annotations

from minikv.kernels.append.plain import Slots, advance, append
from minikv.kernels.attention.plain import (
    last_rows_attention,
    merge,
    ragged_prefill,
    rows_attention,
    total,
    visible_attention,
    window_attention,
)
from minikv.kernels.decode.plain import HashRule, NewRow, Rows, Segments, lowest, ragged_attention
from minikv.kernels.evict.plain import NOT_FREE, fill, gather_columns, gather_rows, order_key
from minikv.kernels.int8 import from_codes, to_codes
from minikv.kernels.mass.plain import (
    Part,
    add_attention_mass,
    each_attention,
    peak_attention,
    rows_lse,
)

__all__ = ["HashRule", "NewRow", "Part", "Rows", "Segments", "Slots"]
__all__ += ["advance", "append", "lowest", "ragged_attention"]
__all__ += ["last_rows_attention", "merge", "ragged_prefill", "rows_attention", "total"]
__all__ += ["visible_attention", "window_attention"]
__all__ += ["add_attention_mass", "each_attention", "peak_attention", "rows_lse"]
__all__ += ["NOT_FREE", "fill", "gather_columns", "gather_rows", "order_key"]
__all__ += ["from_codes", "to_codes"]

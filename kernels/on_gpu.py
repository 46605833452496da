"""The Triton kernels in the places of their twins. Importing this imports Triton."""

from __future__ import annotations

from minikv.kernels import columns, decode, evict, gather, layer, newcomer, segments
from minikv.kernels.dispatch import Kernels


class Triton(Kernels):
    """Every operation of `Kernels` by its Triton kernel."""

    name = "triton"
    ragged_attention = staticmethod(decode.ragged_attention)
    advance = staticmethod(newcomer.advance)
    append = staticmethod(newcomer.append)
    hash_append = staticmethod(newcomer.hash_append)
    h2o_step = staticmethod(evict.h2o_step)
    tova_step = staticmethod(evict.tova_step)
    roco_step = staticmethod(evict.roco_step)
    scissorhands_step = staticmethod(evict.scissorhands_step)
    observe = staticmethod(columns.observe)
    add_columns = staticmethod(columns.add_columns)
    rows_lse = staticmethod(columns.rows_lse)
    segments_attention = staticmethod(segments.segments_attention)
    gather_rows = staticmethod(gather.gather_rows)
    gather_column = staticmethod(gather.gather_column)
    add_norm = staticmethod(layer.add_norm)
    rotate = staticmethod(layer.rotate)
    silu_mul = staticmethod(layer.silu_mul)

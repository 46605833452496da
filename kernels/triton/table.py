"""The Triton kernels in the places of their twins. Importing this imports Triton."""

from __future__ import annotations

from minikv.kernels.dispatch import Kernels
from minikv.kernels.triton import (
    append as append_row,
)
from minikv.kernels.triton import (
    attention_mass,
    decode,
    gather,
    layer,
    ragged_prefill,
    step,
)


class Triton(Kernels):
    """Every operation of `Kernels` by its Triton kernel."""

    name = "triton"
    ragged_attention = staticmethod(decode.ragged_attention)
    advance = staticmethod(append_row.advance)
    append = staticmethod(append_row.append)
    hash_append = staticmethod(append_row.hash_append)
    h2o_step = staticmethod(step.h2o_step)
    tova_step = staticmethod(step.tova_step)
    roco_step = staticmethod(step.roco_step)
    scissorhands_step = staticmethod(step.scissorhands_step)
    observe = staticmethod(attention_mass.observe)
    add_columns = staticmethod(attention_mass.add_columns)
    rows_lse = staticmethod(attention_mass.rows_lse)
    segments_attention = staticmethod(ragged_prefill.segments_attention)
    gather_rows = staticmethod(gather.gather_rows)
    gather_column = staticmethod(gather.gather_column)
    add_norm = staticmethod(layer.add_norm)
    rotate = staticmethod(layer.rotate)
    silu_mul = staticmethod(layer.silu_mul)

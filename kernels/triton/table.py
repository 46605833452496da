"""The operations that Triton computes on a GPU. Importing this imports Triton."""

from __future__ import annotations

from minikv.kernels.dispatch import Kernels
from minikv.kernels.triton import append as append_row
from minikv.kernels.triton import (
    attention_mass,
    compaction,
    decode,
    hash_append,
    layer,
    packed_product,
    step,
)
from minikv.kernels.triton import ragged_prefill as ragged


class Triton(Kernels):
    """Operations of `Kernels` in Triton."""

    name = "triton"
    ragged_attention = staticmethod(decode.ragged_attention)
    advance = staticmethod(append_row.advance)
    append = staticmethod(append_row.append)
    hash_append = staticmethod(hash_append.hash_append)
    lowest_step = staticmethod(step.lowest_step)
    h2o_step = staticmethod(step.h2o_step)
    tova_step = staticmethod(step.tova_step)
    roco_step = staticmethod(step.roco_step)
    scissorhands_step = staticmethod(step.scissorhands_step)
    ragged_prefill = staticmethod(ragged.ragged_prefill)
    observe = staticmethod(attention_mass.observe)
    add_attention_mass = staticmethod(attention_mass.add_attention_mass)
    rows_lse = staticmethod(attention_mass.rows_lse)
    gather_rows = staticmethod(compaction.gather_rows)
    gather_column = staticmethod(compaction.gather_column)
    add_norm = staticmethod(layer.add_norm)
    rotate = staticmethod(layer.rotate)
    silu_mul = staticmethod(layer.silu_mul)
    w8a16_product = staticmethod(packed_product.w8a16_product)
    w4a16_product = staticmethod(packed_product.w4a16_product)
    unpack_int4_rows = staticmethod(packed_product.unpack_int4_rows)

"""The operations that Triton computes on a GPU. Importing this imports Triton."""

from __future__ import annotations

from minikv.kernels.dispatch import Kernels
from minikv.kernels.triton import append as append_row
from minikv.kernels.triton import (
    attention,
    attention_mass,
    blocks,
    choose,
    decode,
    gather,
    hash_append,
    history,
    layer,
    overwrite,
    packed_product,
    sampling,
    step,
)
from minikv.kernels.triton import hash_codes as hashes
from minikv.kernels.triton import ragged_prefill as ragged
from minikv.kernels.triton import rest as rest_of_layer


class Triton(Kernels):
    """Operations of `Kernels` in Triton."""

    name = "triton"
    products = True
    block = 1 << 22  # enough to occupy the device
    ragged_attention = staticmethod(decode.ragged_attention)
    advance = staticmethod(append_row.advance)
    rotate_append = staticmethod(append_row.rotate_append)
    key_norms = staticmethod(append_row.key_norms)
    appends_any = True
    hash_append = staticmethod(hash_append.hash_append)
    lowest_step = staticmethod(step.lowest_step)
    overwrite_step = staticmethod(overwrite.overwrite_step)
    shown_positions = staticmethod(overwrite.shown_positions)
    unseen_rows = staticmethod(overwrite.unseen_rows)
    streaming_step = staticmethod(overwrite.streaming_step)
    l2_step = staticmethod(overwrite.l2_step)
    random_step = staticmethod(overwrite.random_step)
    h2o_step = staticmethod(step.h2o_step)
    roco_step = staticmethod(step.roco_step)
    scissorhands_step = staticmethod(step.scissorhands_step)
    shift_step = staticmethod(step.shift_step)
    lowest_block = staticmethod(blocks.lowest_block)
    unprotected_block = staticmethod(blocks.unprotected_block)
    h2o_block = staticmethod(blocks.h2o_block)
    roco_block = staticmethod(blocks.roco_block)
    compacted = staticmethod(blocks.compacted)
    last_rows_attention = staticmethod(attention.last_rows_attention)
    visible_attention = staticmethod(attention.visible_attention)
    merge = staticmethod(attention.merge)
    ragged_prefill = staticmethod(ragged.ragged_prefill)
    add_attention_mass = staticmethod(attention_mass.add_attention_mass)
    each_attention = staticmethod(attention_mass.each_attention)
    mean_attention = staticmethod(attention_mass.mean_attention)
    add_queries = staticmethod(attention_mass.add_queries)
    peak_attention = staticmethod(attention_mass.peak_attention)
    rows_seen = staticmethod(history.rows_seen)
    low_bits = staticmethod(history.low_bits)
    prompt_history = staticmethod(history.prompt_history)
    block_history = staticmethod(history.block_history)
    low_share = staticmethod(history.low_share)
    hash_codes = staticmethod(hashes.hash_codes)
    code_distances = staticmethod(hashes.code_distances)
    order_key = staticmethod(choose.order_key)
    best = staticmethod(choose.best)
    wanted = staticmethod(choose.wanted)
    gather_rows = staticmethod(gather.gather_rows)
    gather_columns = staticmethod(gather.gather_columns)
    add_norm = staticmethod(layer.add_norm)
    rotate = staticmethod(layer.rotate)
    rotary_table = staticmethod(layer.rotary_table)
    silu_mul = staticmethod(layer.silu_mul)
    rest = staticmethod(rest_of_layer.rest)
    normed_product = staticmethod(rest_of_layer.normed_product)
    w8a16_product = staticmethod(packed_product.w8a16_product)
    w4a16_product = staticmethod(packed_product.w4a16_product)
    unpack_int4_rows = staticmethod(packed_product.unpack_int4_rows)
    greedy = staticmethod(sampling.greedy)
    sample = staticmethod(sampling.sample)

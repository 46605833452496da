"""The operations that Triton computes on a GPU. Importing this imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minikv.kernels.dispatch import Kernels
from minikv.kernels.triton import append as append_row
from minikv.kernels.triton import (
    attention,
    attention_mass,
    columns,
    compaction,
    counter_rng,
    crush,
    decode,
    distances,
    expected,
    hash_append,
    int8,
    layer,
    outputs,
    packed_product,
    selection,
    step,
)
from minikv.kernels.triton import heads_mean as heads
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
    lowest = staticmethod(step.lowest)
    evict: Mapping[str, Callable[..., None]] = {"h2o": step.h2o_step, "roco": step.roco_step}
    append_evict: Mapping[str, Callable[..., bool]] = {"hashevict": hash_append.hash_append}
    last_rows_attention = staticmethod(attention.last_rows_attention)
    visible_attention = staticmethod(attention.visible_attention)
    merge = staticmethod(attention.merge)
    ragged_prefill = staticmethod(ragged.ragged_prefill)
    add_attention_mass = staticmethod(attention_mass.add_attention_mass)
    each_attention = staticmethod(attention_mass.each_attention)
    largest_attention = staticmethod(attention_mass.largest_attention)
    peak_attention = staticmethod(attention_mass.peak_attention)
    rows_lse = staticmethod(attention_mass.rows_lse)
    output_lengths = staticmethod(outputs.output_lengths)
    output_norms = staticmethod(outputs.output_norms)
    added_moments = staticmethod(expected.added_moments)
    turned_moments = staticmethod(expected.turned_moments)
    expected_attention = staticmethod(expected.expected_attention)
    key_distances = staticmethod(distances.key_distances)
    divide = staticmethod(selection.divide)
    remaining = staticmethod(selection.remaining)
    order_key = staticmethod(selection.order_key)
    best = staticmethod(selection.best)
    wanted = staticmethod(selection.wanted)
    pool = staticmethod(selection.pool)
    pool_mass = staticmethod(selection.pool_mass)
    stayed = staticmethod(selection.stayed)
    share = staticmethod(selection.share)
    ensure_least = staticmethod(selection.ensure_least)
    row_uniform = staticmethod(counter_rng.row_uniform)
    heads_mean = staticmethod(heads.heads_mean)
    crush_keys = staticmethod(crush.crush_keys)
    represent = staticmethod(crush.represent)
    held_rows = staticmethod(compaction.held_rows)
    survivors = staticmethod(compaction.survivors)
    lay_out = staticmethod(compaction.lay_out)
    gather_rows = staticmethod(compaction.gather_rows)
    gather_columns = staticmethod(compaction.gather_columns)
    carried_columns = staticmethod(columns.carried_columns)
    to_codes = staticmethod(int8.to_codes)
    codes_at = staticmethod(int8.codes_at)
    add_norm = staticmethod(layer.add_norm)
    rotate = staticmethod(layer.rotate)
    rotary_table = staticmethod(layer.rotary_table)
    silu_mul = staticmethod(layer.silu_mul)
    rest = staticmethod(rest_of_layer.rest)
    normed_product = staticmethod(rest_of_layer.normed_product)
    w8a16_product = staticmethod(packed_product.w8a16_product)
    w4a16_product = staticmethod(packed_product.w4a16_product)
    unpack_int4_rows = staticmethod(packed_product.unpack_int4_rows)

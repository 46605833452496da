"""The operations that Triton computes on a GPU. Importing this imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minikv.kernels.append import gpu as append_row
from minikv.kernels.append import hash_gpu as hash_append
from minikv.kernels.attention import gpu as attention
from minikv.kernels.attention import ragged_gpu as ragged
from minikv.kernels.decode import gpu as decode
from minikv.kernels.dispatch import Kernels
from minikv.kernels.evict import choose_gpu as choose
from minikv.kernels.evict import gather_gpu as gather
from minikv.kernels.evict import gpu as step
from minikv.kernels.layer import gpu as layer
from minikv.kernels.layer import rest_gpu as rest_of_layer
from minikv.kernels.mass import gpu as attention_mass
from minikv.kernels.product import gpu as product


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
    peak_attention = staticmethod(attention_mass.peak_attention)
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
    packed_row = staticmethod(rest_of_layer.packed_row)
    unpack_int4_rows = staticmethod(product.unpack_int4_rows)

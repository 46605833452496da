"""The operations that C computes on a CPU. Importing this compiles nothing; `choose` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from minikv.kernels.append import cpu as append_row
from minikv.kernels.append import hash_cpu as hash_append
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.attention import merge_cpu as merge
from minikv.kernels.decode import cpu as decode
from minikv.kernels.dispatch import Kernels
from minikv.kernels.evict import cpu as step
from minikv.kernels.layer import arena_cpu as step_arena
from minikv.kernels.layer import cpu as layer
from minikv.kernels.layer import layers_cpu as layers
from minikv.kernels.layer import rest_cpu as rest
from minikv.kernels.mass import cpu as attention_mass
from minikv.kernels.native import choice
from minikv.kernels.product import cpu as product
from minikv.kernels.product import integer_cpu as integer
from minikv.kernels.product import packing
from minikv.kernels.product import tiles_cpu as product_tiles
from minikv.kernels.sample import cpu as sampling

_SOURCES: dict[str, tuple[object, ...]] = {
    choice.TORCH: (Kernels,),
    choice.FLOATS: (prefill.FLOAT,),
    choice.TILES: (prefill.TILES, decode.TILES),
}
"""Where `Native` takes an operation that is not computed by its own C function."""


class Native(Kernels):
    """Operations of `Kernels` in C, except those that `choice` leaves to torch on this class of
    processor. processor: a key of `choice.CHOICES`; "" is the class of this machine."""

    name = "native"

    def __init__(self, processor: str = "") -> None:
        kind = processor or choice.processor()
        # Compiled without threads, products and tiles would use only one core.
        self.products = product.threads() > 1 or torch.get_num_threads() == 1
        # A compiler may not support tiles; torch does.
        tiled = prefill.TILES.available()
        choices = dict(choice.CHOICES[kind])
        if not (self.products and (bool(processor) or tiled)):
            tiles = [name for name, who in choices.items() if who == choice.TILES]
            choices |= {name: choice.WITHOUT_TILES[name] for name in tiles}
        self.choices = choice.describe(kind, choices)
        if not processor and choice.tiles_refused():
            self.choices += "; Linux refuses this process the tiles (AMX) of the processor"
        prompts = choices.pop("prompts with packed weights")
        self.integer_prompts = prompts == choice.C
        if prompts != choice.TILES:
            self.rows_product = None
        if choices["step attention"] == choice.TILES and tiled:
            self.step_arena = partial(step_arena.step_arena, tiles=True)
        for operation, who in choices.items():
            if who != choice.C:
                for name in choice.OPERATIONS[operation]:
                    source = next(one for one in _SOURCES[who] if hasattr(one, name))
                    setattr(self, name, getattr(source, name))
        self.prompt_rows = choice.PROMPT_ROWS.get(kind)
        self.float_rows = choice.FLOAT_ROWS.get(kind)

    ragged_attention = staticmethod(decode.VECTORS.ragged_attention)
    advance = staticmethod(append_row.advance)
    append = staticmethod(append_row.append)
    rotate_append = staticmethod(append_row.rotate_append)
    lowest = staticmethod(step.lowest)
    evict: Mapping[str, Callable[..., None]] = {"h2o": step.h2o_step, "roco": step.roco_step}
    append_evict: Mapping[str, Callable[..., bool]] = {"hashevict": hash_append.hash_append}
    rows_attention = staticmethod(prefill.BF16.rows_attention)
    ragged_prefill = staticmethod(prefill.BF16.ragged_prefill)
    last_rows_attention = staticmethod(prefill.BF16.last_rows_attention)
    merge = staticmethod(merge.merge)
    add_attention_mass = staticmethod(attention_mass.add_attention_mass)
    each_attention = staticmethod(attention_mass.each_attention)
    peak_attention = staticmethod(attention_mass.peak_attention)
    add_norm = staticmethod(layer.add_norm)
    rotate = staticmethod(layer.rotate)
    silu_mul = staticmethod(layer.silu_mul)
    rows_product: Callable[..., Callable[..., Tensor] | None] | None = staticmethod(
        product_tiles.rows_product
    )
    int8_product = staticmethod(integer.int8_product)
    int4_product = staticmethod(integer.int4_product)
    drawn = staticmethod(sampling.drawn)
    row_product = staticmethod(product.row_product)
    rest = staticmethod(rest.rest)
    layers = staticmethod(layers.layers)
    step_arena: Callable[..., object | None] | None = staticmethod(step_arena.step_arena)
    pack_int8 = staticmethod(packing.pack_int8)
    pack_int4 = staticmethod(packing.pack_int4)
    unpack_int4 = staticmethod(packing.unpack_int4)

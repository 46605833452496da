"""Chooses what computes each operation: Triton on a CUDA device, C on a CPU, plain torch for the
rest.

`Kernels` has the torch form of every operation, which defines it; `FORMS` lists the faster forms.
`choose` is called once for a device and a head size, and its `Kernels` object is passed on; this
module keeps no state. On a CPU the choice also depends on the processor: native/choice.py says
which operations are left to torch.

The torch forms of `evict` and `append_evict` are in the policies' own files in minikv/policies; the
torch forms of other operations that are None here are in models/linear.py and llama.py. Without C,
models/linear.py does not quantize activations, and `TorchOnCPU` uses ragged_attention of
decode/plain_cpu.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minikv.kernels.append import plain as append_row
from minikv.kernels.attention import cudnn
from minikv.kernels.attention import plain as attention
from minikv.kernels.decode import plain as decode
from minikv.kernels.decode import plain_cpu as decode_cpu
from minikv.kernels.evict import plain as evict_rows
from minikv.kernels.layer import plain as layer
from minikv.kernels.mass import plain as attention_mass
from minikv.kernels.native import choice
from minikv.kernels.product import plain as product
from minikv.kernels.sample import plain as sampling

_OLDEST_TRITON = (3, 6)  # the oldest Triton that the kernels were built with
_CAPABILITY = (8, 0)
_HEAD_DIMS = range(16, 257, 8)  # head sizes whose rows can be read 16 bytes at a time
GPU_BLOCK = 1 << 22
"""`Kernels.block` on a GPU: enough to occupy the device."""
_LARGEST_FLOAT32 = 128  # head size; larger float32 heads do not fit the registers


class Kernels:
    """Every operation in torch; `choose` replaces those that have a faster form."""

    name = "torch"
    choices = ""
    """On a CPU with C: the class of the processor and what computes each operation, as text for
    users."""
    products = False
    """Whether layer_tail, layers, normed_product, row_product, rows_product, int8_product and
    int4_product replace torch's own products."""
    integer_prompts = False
    """Whether int8_product and int4_product are also faster for the many rows of a prompt."""
    float_rows: int | None = None
    """From this many rows of bfloat16 on, torch's products are faster in float32. None: no such
    number was measured, or torch has no products of bfloat16."""
    prompt_rows: int | None = None
    """How many rows of a prompt in bfloat16 should pass through a layer together, if more than the
    network's own number are faster; otherwise None."""
    block = 1 << 16
    """How many numbers to compute at once where any number would do. The default fits a CPU's
    cache."""
    ragged_attention = staticmethod(decode.ragged_attention)
    advance = staticmethod(append_row.advance)
    append = staticmethod(append_row.append)
    rotate_append = staticmethod(append_row.rotate_append)
    evict: Mapping[str, Callable[..., None]] = evict_rows.evict
    append_evict: Mapping[str, Callable[..., bool]] = {}
    """For step policies that choose by the query, by name: choose the victims and write the new
    rows of one layer. It takes the policy and `NewRow`, and returns False if it cannot do that."""
    lowest = staticmethod(decode.lowest)
    rows_attention = staticmethod(attention.rows_attention)
    last_rows_attention = staticmethod(attention.last_rows_attention)
    merge = staticmethod(attention.merge)
    ragged_prefill = staticmethod(attention.ragged_prefill)
    add_attention_mass = staticmethod(attention_mass.add_attention_mass)
    each_attention = staticmethod(attention_mass.each_attention)
    peak_attention = staticmethod(attention_mass.peak_attention)
    quadratic_forms = staticmethod(attention_mass.quadratic_forms)
    order_key = staticmethod(evict_rows.order_key)
    best = staticmethod(evict_rows.best)
    wanted = staticmethod(evict_rows.wanted)
    divide = staticmethod(evict_rows.divide)
    share = staticmethod(evict_rows.share)
    ensure_least = staticmethod(evict_rows.ensure_least)
    survivors = staticmethod(evict_rows.survivors)
    lay_out = staticmethod(evict_rows.lay_out)
    gather_rows = staticmethod(evict_rows.gather_rows)
    gather_columns = staticmethod(evict_rows.gather_columns)
    add_norm = staticmethod(layer.add_norm)
    rotate = staticmethod(layer.rotate)
    rotary_table = staticmethod(layer.rotary_table)
    silu_mul = staticmethod(layer.silu_mul)
    drawn = staticmethod(sampling.drawn)
    row_product = staticmethod(product.row_product)
    layer_tail: Callable[..., Callable[[Tensor, Tensor], Tensor] | None] | None = None
    normed_product: Callable[..., Callable[[Tensor], Tensor] | None] | None = None
    packed_row: Callable[..., Callable[[Tensor], Tensor] | None] | None = None
    layers: Callable[..., Callable[..., Tensor] | None] | None = None
    step_arena: Callable[..., object | None] | None = None
    int8_product: Callable[..., Tensor] | None = None
    int4_product: Callable[..., Tensor] | None = None
    pack_int8: Callable[..., None] | None = None
    pack_int4: Callable[..., None] | None = None
    rows_product: Callable[..., Callable[..., Tensor] | None] | None = None
    unpack_int4_rows: Callable[..., None] | None = None


class Row(NamedTuple):
    """Operations that belong together, by their names in `Kernels`, and the modules of
    minikv.kernels that have them in Triton and in C; "": none. Operations that a module lacks are
    torch's. chosen: which of `choice.OPERATIONS` decides what computes them on a CPU."""

    names: str
    gpu: str = ""
    c: str = ""
    chosen: str = ""


_PROMPTS = "rows_attention last_rows_attention ragged_prefill"
_ONE_ROW = "layer_tail normed_product packed_row"
_STATISTICS = "add_attention_mass each_attention peak_attention quadratic_forms"
FORMS = (
    Row("ragged_attention", "decode.gpu", "decode.cpu", "step attention"),
    Row("advance append rotate_append", "append.gpu", "append.cpu", "eviction"),
    Row("append_evict", "append.hash_gpu", "append.cpu", "eviction"),
    Row("evict lowest", "evict.gpu", "evict.cpu", "eviction"),
    Row("order_key best wanted", "evict.choose_gpu"),
    Row("divide share ensure_least survivors lay_out", "evict.heads_gpu"),
    Row("gather_rows gather_columns", "evict.gather_gpu"),
    Row(_PROMPTS, "attention.gpu", "attention.cpu", "prompt attention"),
    Row("merge", "attention.gpu", "attention.cpu", "joined attention"),
    Row(_STATISTICS, "mass.gpu", "mass.cpu", "prompt statistics"),
    Row("add_norm rotate rotary_table silu_mul", "layer.gpu", "layer.cpu", "norms and rotation"),
    Row("drawn", "", "sample.cpu", "sampling"),
    Row(_ONE_ROW, "layer.tail_gpu", "layer.cpu", "products of one row"),
    Row("layers step_arena", "", "layer.cpu", "products of one row"),
    Row("row_product", "", "product.cpu", "products of one row"),
    Row("int8_product", "", "product.cpu", "int8 products"),
    Row("int4_product", "", "product.cpu", "int4 products"),
    Row("pack_int8 pack_int4", "", "product.cpu", "packing"),
    Row("rows_product", "", "product.cpu", "prompts with packed weights"),
    Row("unpack_int4_rows", "product.gpu"),
)
"""rows_product exists only with tiles (AMX). step_arena prepares what `layers` takes."""


class TorchOnCPU(Kernels):
    """Every operation in torch on a CPU, where reading a number of a tensor does not wait."""

    ragged_attention = staticmethod(decode_cpu.ragged_attention)

    def __init__(self, processor: str = "") -> None:
        self.float_rows = choice.FLOAT_ROWS.get(processor or choice.processor())
        self.prompt_rows = choice.PROMPT_ROWS.get(processor or choice.processor())


def choose(
    device: torch.device, name: str, head_dim: int, dtype: torch.dtype, processor: str = ""
) -> tuple[Kernels, str | None]:
    """The kernels for heads of `head_dim` numbers of `dtype`; and None, or a line for the user that
    says why the device's fast kernels are not used.

    name: "auto" takes the device's fast kernels if they can run, "triton" asks for Triton's,
    "torch" for plain torch. The first call on a machine compiles the C kernels, which takes
    seconds. processor: a class of `native.choice` to choose for; "" is that of this machine.
    """
    if name == "torch":
        return (TorchOnCPU(processor) if device.type == "cpu" else Kernels()), None
    if name == "auto" and device.type == "cpu":
        return _native(head_dim, dtype, processor)
    reason = unfit(device, head_dim, dtype)
    if reason is not None:
        return Kernels(), f"the Triton kernels are not used: {reason}"
    found = on_gpu()
    found.prompt_rows = cudnn.prompt_rows(device, head_dim)
    return found, None


def on_gpu() -> Kernels:
    """The operations of a CUDA device. This imports Triton."""
    found = Kernels()
    found.name, found.products = "triton", True
    found.block = GPU_BLOCK
    for row in FORMS:
        _take(found, row.names, _module(row.gpu) if row.gpu else None)
    return found


def in_c(processor: str = "") -> Kernels:
    """The operations in C, except those that `choice` leaves to torch on this class of processor.
    processor: a key of `choice.CHOICES`; "" is the class of this machine."""
    found, kind = Kernels(), processor or choice.processor()
    found.name = "native"
    threads = _module("product.cpu").threads()
    # Compiled without threads, products and tiles would use only one core.
    found.products = threads > 1 or torch.get_num_threads() == 1
    # A compiler may not support tiles; torch does.
    tiled = _module("attention.cpu").TILES.available()
    choices = dict(choice.CHOICES[kind])
    if not (found.products and (bool(processor) or tiled)):
        tiles = [name for name, who in choices.items() if who == choice.TILES]
        choices |= {name: choice.WITHOUT_TILES[name] for name in tiles}
    found.choices = choice.describe(kind, choices)
    if not processor and choice.tiles_refused():
        found.choices += "; Linux refuses this process the tiles (AMX) of the processor"
    for row in FORMS:
        who = choices.get(row.chosen, choice.TORCH)
        if who != choice.TORCH:
            module = _module(row.c)
            _take(found, row.names, getattr(module, "FORMS", {}).get(who), module)
    prompts = choices["prompts with packed weights"]
    found.integer_prompts = prompts == choice.C
    if prompts != choice.TILES:
        found.rows_product = None
    if choices["step attention"] == choice.TILES and tiled:
        found.step_arena = partial(_module("layer.cpu").step_arena, tiles=True)
    found.prompt_rows = choice.PROMPT_ROWS.get(kind)
    found.float_rows = choice.FLOAT_ROWS.get(kind)
    return found


def _take(found: Kernels, names: str, *places: object) -> None:
    """Set the operations to those of the first of `places` that has them."""
    for name in names.split():
        form = next(filter(None, (getattr(place, name, None) for place in places)), None)
        if form is not None:
            setattr(found, name, form)


def _module(name: str) -> Any:
    """A module of minikv.kernels, imported only when used, because some import Triton."""
    return import_module(f"minikv.kernels.{name}")


def _native(head_dim: int, dtype: torch.dtype, processor: str) -> tuple[Kernels, str | None]:
    """`choose` for a CPU."""
    build, why = _module("native.build"), _module("decode.cpu").unfit(dtype, head_dim)
    if not why:
        found, why = build.library()
        if found is not None:
            return in_c(processor), None
        if build.switched_off():
            return TorchOnCPU(processor), None
    return TorchOnCPU(processor), f"the C kernels are not used, and steps are slower: {why}"


def unfit(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot serve such heads on this device; None if they can."""
    if device.type != "cuda":
        return f"they need a CUDA device, and this is {device.type}"
    if torch.version.hip is not None:
        return "they are only for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return "they need compute capability {}.{}, this GPU has {}.{}".format(
            *_CAPABILITY, *capability
        )
    return _unfit_triton() or _unfit_heads(head_dim, dtype)


def _unfit_triton() -> str | None:
    """What is wrong with the installed Triton, or None."""
    try:
        # The module's version, not the distribution's, whose name differs for nightly builds.
        version = str(import_module("triton").__version__)
        import_module("triton.language")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return "triton is not installed"
        return f"triton cannot be imported (no {error.name})"
    except Exception as error:  # a broken installation may raise anything
        return f"triton cannot be imported ({type(error).__name__})"
    number = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if number < _OLDEST_TRITON:
        return "triton {} is too old, they need {}.{}".format(version, *_OLDEST_TRITON)
    return None


def _unfit_heads(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot compute such heads, or None."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"they do not support {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        return (
            f"they take heads of {_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]} in steps of 8, not {head_dim}"
        )
    if dtype == torch.float32 and head_dim > _LARGEST_FLOAT32:
        return f"they take float32 heads of {_LARGEST_FLOAT32} at most, not {head_dim}"
    return None

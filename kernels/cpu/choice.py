"""Who computes what on a CPU, by the instructions that it has: one table, from measurements.

Nothing is timed when minikv runs, so the same machine always chooses the same. The measurements are
in docs/measurements/cpu.md.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

C, TILES, FLOATS, TORCH = "C", "C with tiles", "C in float32", "torch"

OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "prompt attention": ("rows_attention", "last_rows_attention", "ragged_prefill"),
    "joined attention": ("merge",),
    "prompt statistics": ("add_attention_mass", "each_attention", "peak_attention"),
    "step attention": ("ragged_attention",),
    "eviction": (
        "advance",
        "append",
        "rotate_append",
        "hash_append",
        "lowest_step",
        "h2o_step",
        "tova_step",
        "roco_step",
        "scissorhands_step",
    ),
    "norms and rotation": ("add_norm", "rotate", "silu_mul"),
    "sampling": ("drawn",),
    "products of one row": ("row_product", "rest"),
    "int8 products": ("int8_product",),
    "int4 products": ("int4_product",),
    "prompts with packed weights": ("rows_product",),
    "packing": ("pack_int8", "pack_int4", "unpack_int4"),
}
"""The operations of `dispatch.Kernels`, by what a user reads. Prompt statistics are what a prompt's
queries give each row. With packed weights, C rounds the activations of a prompt and multiplies
integers (`Kernels.integer_prompts`); with tiles it unpacks the weights (`Kernels.rows_product`), as
torch does."""

_NOT_MEASURED = dict.fromkeys(OPERATIONS, C) | {
    "prompt attention": TORCH,
    "prompt statistics": TORCH,
}
_C_IN_FLOATS = dict.fromkeys(OPERATIONS, C) | {"prompt attention": FLOATS}

# Joined attention and prompt statistics were measured on avx512-bf16-intel alone; the instructions
# that they use are those of every AVX-512 and AVX2.
CHOICES: Mapping[str, Mapping[str, str]] = {
    # Tiles of bfloat16 make attention two to three times as fast as torch does, and four as C's
    # floats. Prompts with packed weights take about the time of bfloat16, whose products stay
    # torch's.
    "amx": dict.fromkeys(OPERATIONS, C)
    | {"prompt attention": TILES, "prompts with packed weights": TILES},
    # C is two and a half to four times as fast as torch, whose kernel converts.
    "avx512-bf16": dict.fromkeys(OPERATIONS, C),
    # Intel's, where tiles are missing or hidden: a product of bfloat16 takes twice the time of one
    # of floats with as many bytes, so that floats are the faster ones.
    "avx512-bf16-intel": _C_IN_FLOATS,
    "avx512": _C_IN_FLOATS,
    "avx2": _C_IN_FLOATS,
    "arm": _NOT_MEASURED,
    "other": _NOT_MEASURED,
}
"""Class of instructions -> operation -> who computes it. Products of many rows are torch's
everywhere, unless weights are packed."""

FLOAT_ROWS: Mapping[str, int] = {"avx512-bf16-intel": 128}
"""Class -> rows from which torch multiplies bfloat16 faster in float32, a block of the weights at a
time. Others: never, or, without products of bfloat16, always (`linear.bf16_products`)."""

PROMPT_ROWS: Mapping[str, int] = {"amx": 2048}
"""Class -> rows of a prompt in bfloat16 that pass through a layer together: torch multiplies 1,024
rows by narrow matrices at half its speed there."""


@cache
def processor() -> str:
    """The class of this processor, a key of `CHOICES`: by what torch may use of it."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return "arm"
    if machine not in ("x86_64", "amd64"):
        return "other"
    level = torch.backends.cpu.get_cpu_capability()
    if not level.startswith("AVX512"):
        return "avx2" if level == "AVX2" else "other"
    if torch.cpu._is_amx_tile_supported() and not tiles_refused():
        return "amx"
    if not torch.cpu._is_avx512_bf16_supported():
        return "avx512"
    return "avx512-bf16-intel" if vendor() == "GenuineIntel" else "avx512-bf16"


@cache
def multiplies_bf16() -> bool:
    """Whether the processor has products of bfloat16. If not, torch converts every number first."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return processor() in ("amx", "avx512-bf16", "avx512-bf16-intel")


def tiles_refused() -> bool:
    """Whether the processor has tiles, and Linux does not let this process use them: it has to be
    asked, and says no where a signal's stack is too small for them, or a filter forbids to ask."""
    return torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx()


def vendor() -> str:
    """Who made this processor, by its own name; "" where Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")


def describe(kind: str, choices: Mapping[str, str] | None = None) -> str:
    """A class and its choices in words: who computes what. choices: if not those of `CHOICES`."""
    choices, parts = choices or CHOICES[kind], []
    for who in (C, TILES, FLOATS, TORCH):
        named = [name for name, chosen in choices.items() if chosen == who]
        if named:
            parts.append(f"{who} for {', '.join(named)}")
    return f"{kind}: {'; '.join(parts)}"

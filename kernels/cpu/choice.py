"""Who computes what on a CPU, by the instructions that it has: one table, from measurements.

Nothing is timed when minikv runs, so the same machine always chooses the same. The measurements are
in docs/measurements/cpu.md.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache

import torch

C, TORCH = "C", "torch"

OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "prompt attention": ("rows_attention", "last_rows_attention", "ragged_prefill"),
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
    "prompts with packed weights": (),
    "packing": ("pack_int8", "pack_int4", "unpack_int4"),
}
"""The operations of `dispatch.Kernels`, by what a user reads. With packed weights, C rounds the
activations of a prompt and multiplies integers (`Kernels.integer_prompts`); torch unpacks the
weights."""

_C_BUT_PROMPTS = dict.fromkeys(OPERATIONS, C) | {"prompt attention": TORCH}

CHOICES: Mapping[str, Mapping[str, str]] = {
    # torch multiplies tiles of bfloat16, three times as fast as C with vectors of it. C has no
    # tiles of integers, and was not measured beside them.
    "amx": _C_BUT_PROMPTS | {"prompts with packed weights": TORCH},
    # C is two and a half to four times as fast as torch, whose kernel converts.
    "avx512-bf16": dict.fromkeys(OPERATIONS, C),
    # C has no prompt attention without products of bfloat16.
    "avx512": _C_BUT_PROMPTS,
    "avx2": _C_BUT_PROMPTS,
    "arm": _C_BUT_PROMPTS,
    "other": _C_BUT_PROMPTS,
}
"""Class of instructions -> operation -> who computes it. Products of many rows are torch's
everywhere, unless weights are packed."""


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
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    return "avx512-bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"


def describe(kind: str) -> str:
    """A class and its choices in words: who computes what."""
    parts = []
    for who in (C, TORCH):
        named = [name for name, chosen in CHOICES[kind].items() if chosen == who]
        if named:
            parts.append(f"{who} for {', '.join(named)}")
    return f"{kind}: {'; '.join(parts)}"

"""A measured table of what computes each operation on a CPU, by the processor's instructions.

Nothing is timed at run time, so a machine always makes the same choice. The measurements are
in docs/measurements/cpu.md.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

C, TILES, FLOATS, TORCH = "C", "C with tiles", "C in float32", "torch"

OPERATIONS = (
    "prompt attention",
    "joined attention",
    "prompt statistics",
    "step attention",
    "eviction",
    "norms and rotation",
    "sampling",
    "products of one row",
    "int8 products",
    "int4 products",
    "prompts with packed weights",
    "packing",
)
"""The names that a user reads; `dispatch.FORMS` says which operations belong to each. Prompt
statistics are the attention that a prompt's queries give each row. With packed weights, C quantizes
the activations of a prompt and multiplies integers (`Kernels.integer_prompts`); with tiles it
unpacks the weights (`Kernels.rows_product`), as torch does."""

_NOT_MEASURED = dict.fromkeys(OPERATIONS, C) | {
    "prompt attention": TORCH,
    "prompt statistics": TORCH,
}
_C_IN_FLOATS = dict.fromkeys(OPERATIONS, C) | {"prompt attention": FLOATS}

# Joined attention and prompt statistics were measured on amx and avx512-bf16-intel; they use only
# instructions of every AVX-512 and AVX2.
CHOICES: Mapping[str, Mapping[str, str]] = {
    # With tiles of bfloat16, attention of prompts is two to three times as fast as torch's, and
    # four times as fast as with C's floats. That of a step is 1.1 to 1.3 times as fast as with
    # vectors. Prompts with packed weights take about as long as with bfloat16 weights, whose
    # products are torch's.
    "amx": dict.fromkeys(OPERATIONS, C)
    | {"prompt attention": TILES, "step attention": TILES, "prompts with packed weights": TILES},
    # C is two and a half to four times as fast as torch, whose kernel converts to float32.
    "avx512-bf16": dict.fromkeys(OPERATIONS, C),
    # Intel without tiles, or with hidden ones: a bfloat16 product takes twice as long as a float
    # product of as many bytes, so floats are faster.
    "avx512-bf16-intel": _C_IN_FLOATS,
    "avx512": _C_IN_FLOATS,
    "avx2": _C_IN_FLOATS,
    "arm": _NOT_MEASURED,
    "other": _NOT_MEASURED,
}
"""Class of processor -> operation -> what computes it. Products of many rows are always torch's,
unless the weights are packed."""

WITHOUT_TILES: Mapping[str, str] = {
    "prompt attention": TORCH,
    "step attention": C,
    "prompts with packed weights": TORCH,
}
"""What computes an operation of `TILES` if the compiler does not support tiles, or the library has
no threads."""

FLOAT_ROWS: Mapping[str, int] = {"avx512-bf16-intel": 128}
"""Class -> the number of rows from which torch multiplies bfloat16 faster in float32, a block of
weights at a time. Other classes: never, or, without bfloat16 products, always
(`linear.bf16_products`)."""

PROMPT_ROWS: Mapping[str, int] = {"amx": 2048}
"""Class -> how many rows of a prompt in bfloat16 pass through a layer together. On these, torch
multiplies 1,024 rows by narrow matrices at half its speed."""


@cache
def processor() -> str:
    """The class of this processor, a key of `CHOICES`, by the instructions that torch may use."""
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
    """Whether the processor has tiles, but Linux does not let this process use them. Linux refuses
    a process's request if the stack for signals is too small, or if a filter forbids it."""
    return torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx()


def vendor() -> str:
    """The vendor of this processor, such as "GenuineIntel"; "" where /proc/cpuinfo has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")


def describe(kind: str, choices: Mapping[str, str] | None = None) -> str:
    """A class and what computes each operation, in words. choices: in place of `CHOICES[kind]`."""
    choices, parts = choices or CHOICES[kind], []
    for who in (C, TILES, FLOATS, TORCH):
        named = [name for name, chosen in choices.items() if chosen == who]
        if named:
            parts.append(f"{who} for {', '.join(named)}")
    return f"{kind}: {'; '.join(parts)}"

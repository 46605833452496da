"""Who computes what on a CPU is a table of instructions: every class of it, imitated."""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import Shape
from minikv.kernels import dispatch
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.attention import plain as attention
from minikv.kernels.decode import cpu as decode
from minikv.kernels.native import build, choice
from minikv.kernels.product import cpu as product
from minikv.models.linear import bf16_products, has_tiles

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")


def chosen(processor: str) -> dispatch.Kernels:
    ops, why = dispatch.choose(CPU, "auto", 64, torch.bfloat16, processor)
    assert why is None
    return ops


def test_every_class_says_of_every_operation_who_computes_it() -> None:
    assert {row.chosen for row in dispatch.FORMS if row.c} == {*choice.OPERATIONS}
    for row in choice.CHOICES.values():
        assert {*row} == {*choice.OPERATIONS}
        assert set(row.values()) <= {choice.C, choice.TILES, choice.FLOATS, choice.TORCH}
        special = {name for name, who in row.items() if who in (choice.TILES, choice.FLOATS)}
        assert special <= {*choice.WITHOUT_TILES}
    assert choice.processor() in choice.CHOICES
    assert choice.FLOAT_ROWS.keys() <= choice.CHOICES.keys()
    assert choice.PROMPT_ROWS.keys() <= choice.CHOICES.keys()


@needs_compiler
@pytest.mark.parametrize("processor", choice.CHOICES)
def test_the_table_is_what_runs(processor: str) -> None:
    ops = chosen(processor)
    assert ops.choices.startswith(f"{processor}: C for ")
    assert all(operation in ops.choices for operation in choice.OPERATIONS)
    for row in dispatch.FORMS:
        who = choice.CHOICES[processor].get(row.chosen, choice.TORCH)
        module = importlib.import_module(f"minikv.kernels.{row.c}") if row.c else None
        places = [dispatch.Kernels]
        if who != choice.TORCH:
            places = [module, vars(module).get("FORMS", {}).get(who), *places]
        for name in row.names.split():
            if name in ("step_arena", "rows_product"):  # of which tiles decide
                continue
            place = next(place for place in places if hasattr(place, name))
            assert getattr(ops, name) == getattr(place, name), name
    packed = choice.CHOICES[processor]["prompts with packed weights"]
    assert (ops.rows_product is not None) == (packed == choice.TILES)
    assert ops.integer_prompts == (packed == choice.C)


@needs_compiler
def test_a_cache_takes_the_class_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for processor in choice.CHOICES:
        monkeypatch.setattr(choice, "processor", lambda processor=processor: processor)
        made = KVCache(Shape(1, 1, 1, 64, (None,), 64), dtype=torch.bfloat16, device="cpu")
        if processor != "amx" or prefill.TILES.available():
            assert made.ops.choices == choice.describe(processor)


@needs_compiler
def test_a_compiler_that_knows_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "processor", lambda: "amx")
    monkeypatch.setattr(choice, "tiles_refused", lambda: False)
    monkeypatch.setattr(prefill.Prefill, "available", lambda _: False)
    without = dispatch.in_c()
    assert without.rows_attention is attention.rows_attention
    assert without.rows_product is None
    assert without.ragged_attention == decode.VECTORS.ragged_attention
    assert "torch for prompt attention, prompts with packed weights" in without.choices
    monkeypatch.setattr(prefill.Prefill, "available", lambda _: True)
    assert dispatch.in_c().choices == choice.describe("amx")
    monkeypatch.setattr(choice, "tiles_refused", lambda: True)
    assert dispatch.in_c().choices.endswith("; " + REFUSED)
    assert REFUSED not in chosen("amx").choices


REFUSED = "Linux refuses this process the tiles (AMX) of the processor"


@needs_compiler
def test_without_threads_torch_reads_prompts_in_place_of_tiles(monkeypatch: Any) -> None:
    monkeypatch.setattr(product, "threads", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    ops = dispatch.in_c("amx")
    assert ops.rows_attention is attention.rows_attention
    assert ops.rows_product is None
    assert not ops.integer_prompts
    assert "torch for prompt attention, prompts with packed weights" in ops.choices
    others = dispatch.in_c("avx512-bf16")
    assert others.rows_attention == prefill.BF16.rows_attention


def imitate(
    monkeypatch: pytest.MonkeyPatch,
    *how: Any,
    granted: bool = True,
) -> None:
    """torch says that it runs on another machine. how: the columns of the table below."""
    machine, level, tiles, bf16, vendor = how
    for where, name, said in (
        (choice, "vendor", vendor),
        (platform, "machine", machine),
        (torch.backends.cpu, "get_cpu_capability", level),
        (torch.cpu, "_is_avx512_bf16_supported", bf16),
        (torch.cpu, "_is_amx_tile_supported", tiles),
        (torch.cpu, "_init_amx", granted),
    ):
        monkeypatch.setattr(where, name, lambda said=said: said)


@pytest.mark.parametrize(
    ("machine", "level", "tiles", "bf16", "vendor", "found"),
    [
        ("x86_64", "AVX512", True, True, "GenuineIntel", "amx"),
        ("x86_64", "AVX512", False, True, "AuthenticAMD", "avx512-bf16"),
        ("x86_64", "AVX512", False, True, "GenuineIntel", "avx512-bf16-intel"),
        ("x86_64", "AVX512", False, True, "", "avx512-bf16"),
        ("AMD64", "AVX512", False, False, "GenuineIntel", "avx512"),
        ("x86_64", "AVX2", True, True, "GenuineIntel", "avx2"),  # torch was told to use no more
        ("x86_64", "DEFAULT", False, False, "GenuineIntel", "other"),
        ("aarch64", "DEFAULT", False, False, "", "arm"),
        ("riscv64", "DEFAULT", False, False, "", "other"),
    ],
)
def test_the_class_is_what_torch_may_use(
    machine: str, level: str, tiles: bool, bf16: bool, vendor: str, found: str, monkeypatch: Any
) -> None:
    imitate(monkeypatch, machine, level, tiles, bf16, vendor)
    assert choice.processor.__wrapped__() == found
    monkeypatch.setattr(choice, "processor", lambda: found)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bf16)
    native = found in ("amx", "avx512-bf16", "avx512-bf16-intel")
    assert choice.multiplies_bf16.__wrapped__() == native
    assert bf16_products.__wrapped__() == native  # models may not import kernels
    assert has_tiles.__wrapped__() == (found == "amx")


def test_tiles_that_are_refused_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, granted in ((True, True), (True, False), (False, False)):
        imitate(monkeypatch, "x86_64", "AVX512", there, True, "GenuineIntel", granted=granted)
        assert choice.tiles_refused() == (there and not granted)
        assert (choice.processor.__wrapped__() == "amx") == (there and granted)
        assert has_tiles.__wrapped__() == (there and granted)


SMALL_STACK = """
import ctypes, torch

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(4096)
given = Stack(ctypes.addressof(room), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(given), None) == 0
from minikv.kernels.native import choice
from minikv.kernels.attention import cpu as prefill

q, k = torch.randn(1, 1, 40, 64).bfloat16(), torch.randn(1, 40, 64).bfloat16()
out, _ = prefill.TILES.rows_attention(q, k, k)
assert out.isfinite().all()
print(choice.tiles_refused(), choice.processor(), prefill.TILES.available())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no tiles")
def test_linux_refuses_tiles_and_attention_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, timeout=300
    )
    refused, found, available = done.stdout.split() or [done.stderr, "", ""]
    assert (refused, available) == ("True", "False")
    assert found == "avx512-bf16-intel" or choice.processor() != "amx"

"""Sizes, floors and ratios, by hand."""

from __future__ import annotations

import pytest

from minikv.cli.bench import floors, models, shapes

RATES = floors.Rates(5e9, 1e10, 8e9, 2e11, 1e11, on_gpu=False)
GPU_RATES = floors.Rates(None, 4e12, 4e12, 8e14, 5e13, on_gpu=True)


def test_sizes_are_those_of_the_network() -> None:
    for name in ("tiny", "s", "llama-3.2-1b"):
        sizes = shapes.find(name)
        config = models.config_of(sizes)
        assert sizes.parameters == config.parameters
        assert models.sizes_of(config) == sizes
    # 4,096 x (2 x 4,096 + 2 x 1,024) of attention and 3 x 4,096 x 14,336 of MLP, 32 times.
    assert shapes.find("LLAMA-3-8B").matrices == 32 * (4096 * 10_240 + 3 * 4096 * 14_336)
    assert round(shapes.SHAPES["llama-3-8b"].parameters / 1e9, 2) == 8.03


def test_flops_and_floor_of_a_prompt() -> None:
    one = shapes.Sizes(1, 8, 2, 1, 4, 16, 32)
    assert one.matrices == 8 * (2 * 8 + 2 * 4 + 3 * 16)
    # Three tokens: every matrix thrice, the head once.
    assert one.linear_flops(3) == 2 * (3 * 576 + 32 * 8) == 3968
    # Query 0 sees one token, 1 two, 2 three: six pairs, two products of size 4 each, two heads.
    assert one.attention_flops(3) == 6 * 2 * 2 * (4 + 4) == 192
    assert floors.prefill_floor(one, 3, 3968 / 2, 192 / 3) == 2.0 + 3.0


def test_a_steps_floor_is_its_bytes_over_what_the_machine_reads() -> None:
    assert (RATES.stream, GPU_RATES.stream) == (1e10, 4e12)
    assert (RATES.product("bfloat16"), RATES.product("float32")) == (2e11, 1e11)
    assert floors.decode_floor(8 * 10**9, 2e9, RATES.stream) == 1.0
    # Llama-3-8B at 1k on 4.3 TB/s, as the reference has it: 15.01 GB of weights, 128 KiB a token.
    sizes = shapes.SHAPES["llama-3-8b"]
    weights = 2 * (sizes.parameters - sizes.head)
    assert floors.decode_floor(weights, 1024 * 131_072, 4.3e12) == pytest.approx(3.52e-3, rel=2e-3)


def test_ratios_are_of_medians_and_overhead_of_rounds() -> None:
    assert floors.ratio([4.0, 8.0, 6.0], [2.0, 3.0, 9.0]) == 2.0
    # A machine that grew slower in the second round slowed both down: the share stays 10 %. A
    # round that only one of them has had does not count.
    assert floors.overhead([1.1, 2.2, 1.1, 9.0], [1.0, 2.0, 1.0]) == pytest.approx(0.1)

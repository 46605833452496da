"""Logits equal transformers' on random models, however the prompt is cut.

Two hundred small configurations: families, head shapes, rotary types, biases, tied heads, windows,
file layouts and spellings of config.json. The figure is the largest difference of any logit of any
token, relative to the largest logit.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import ROPES, Spec, write
from loaded import network_of
from pairwise import covering, some_by_day
from torch import Tensor

from minikv.cache.attend import DenseAttend
from minikv.models.llama import Llama

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 40
LIMIT = 1e-5
SHAPES = [
    {"heads": 4, "kv_heads": 4, "head_dim": None, "hidden": 48},
    {"heads": 4, "kv_heads": 2, "head_dim": None, "hidden": 48},
    {"heads": 4, "kv_heads": 1, "head_dim": None, "hidden": 48},
    {"heads": 9, "kv_heads": 3, "head_dim": None, "hidden": 72},
    {"heads": 3, "kv_heads": 1, "head_dim": 8, "hidden": 36},
    {"heads": 6, "kv_heads": 2, "head_dim": 20, "hidden": 48},  # as in Mistral Nemo, 6 * 20 != 48
]
SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 7.0}
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3", {"rope": "theta", "tied": True}),
    ("qwen3", {"rope": "yarn", "bias": True, "window": 9, "spelling": "v4"}),
    ("granite", {"extra": SCALES | {"attention_multiplier": 0.21}, "tied": True}),
    ("granite", {"extra": SCALES, "bias": True, "mlp_bias": True, "rope": "linear"}),
    ("smollm3", {"tied": True, "extra": {"no_rope_layers": [1, 0, 1]}}),
    ("smollm3", {"bias": True, "extra": {"no_rope_layer_interval": 2}, "spelling": "v4"}),
    ("phi3", {"window": 9}),
    ("phi3", {"rope": "theta", "tied": True}),
    ("olmo2", {"rope": "theta", "bias": True}),
    ("olmo2", {"rope": "llama3", "tied": True, "spelling": "v4"}),
    ("olmo3", {"rope": "olmo3", "window": 9, "extra": {"layer_types": None}}),
    ("ministral3", {"rope": "ministral3", "tied": True}),
    ("ministral3", {"rope": "ministral3", "window": 9}),
    ("mistral3", {"rope": "theta", "extra": {"model_type": "mistral"}}),
    ("mistral3", {"rope": "ministral3", "tied": True, "extra": {"model_type": "ministral3"}}),
)
"""Families and their settings."""


def _matrix() -> list[Spec]:
    specs: list[Spec] = []

    def add(**settings: object) -> None:
        # Layout and spelling take turns, so that each meets every family and rotary type.
        number = len(specs)
        layout = ("hf", "sharded")[number % 2]
        spelling = ("v5", "v4")[number // 2 % 2]
        specs.append(
            Spec(**{"layout": layout, "spelling": spelling, "seed": number} | settings)  # type: ignore[arg-type]
        )

    for shape, rope, tied in product(SHAPES, ROPES, (False, True)):
        add(**shape, rope=rope, tied=tied)  # 84
    for shape, window in product(SHAPES, (None, 1, 7, 39, 64)):
        add(**shape, family="mistral", window=window, rope="theta")  # 30
    for rope, bias, mlp in product(ROPES, (True, False), (True, False)):
        add(rope=rope, bias=bias, mlp_bias=mlp, heads=6, kv_heads=2, hidden=48)  # 28
    for shape, tied, window in product(SHAPES, (False, True), (None, 9)):
        if shape["hidden"] % shape["heads"] == 0:
            add(**shape | {"head_dim": None}, family="qwen2", tied=tied, window=window)  # 24
    for shape, rope, window in product(SHAPES, ("default", "theta", "llama3"), (None, 11)):
        family = "mistral" if window else "llama"
        add(**shape, family=family, window=window, rope=rope, layout="original", spelling="v5")
    for tied, family in product((False, True), ("llama", "qwen2")):
        add(tied=tied, small=True, family=family)
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    for heads, kv in ((4, 2), (9, 3)):
        shape = {"heads": heads, "kv_heads": kv, "hidden": 72, "head_dim": 8}
        add(**shape, family="ministral", window=8, extra=types)
    for shape, (family, settings) in product(SHAPES, OTHERS):
        if family in ("granite", "phi3", "smollm3", "olmo2", "olmo3") and shape["head_dim"]:
            continue  # their configurations in transformers have no head_dim
        add(**shape, family=family, layers=3, **{"spelling": "v5"} | settings)
    return specs


SPECS = _matrix()


def tokens(vocab: int, count: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def oracle_logits(oracle: PreTrainedModel, ids: Tensor) -> Tensor:
    return oracle(ids[None], use_cache=False).logits[0].float()


@torch.inference_mode()
def our_logits(network: Llama, ids: Tensor, cuts: list[int], rows: int = 512) -> Tensor:
    """Every token's logits, the prompt fed in forwards of `cuts` tokens, chunks of `rows` rows."""
    network.rows = rows
    kv = DenseAttend(network.config.windows)
    parts = [network.logits(network.hidden(part, kv)) for part in ids.split(cuts)]
    assert kv.position == len(ids)
    return torch.cat(parts)


def difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _settings(spec: Spec) -> tuple[str, ...]:
    return tuple(repr(getattr(spec, one.name)) for one in fields(spec) if one.name != "seed")


BY_DAY = {*covering(map(_settings, SPECS))}
"""Of some in which any two settings that meet do meet."""


@pytest.mark.parametrize(
    "spec", some_by_day(SPECS, lambda spec: _settings(spec) in BY_DAY), ids=lambda spec: spec.name
)
def test_logits_equal_transformers(spec: Spec, tmp_path: Path) -> None:
    oracle = write(spec, tmp_path)
    network = network_of(tmp_path)
    ids = tokens(spec.vocab, seed=spec.seed)
    theirs = oracle_logits(oracle, ids)
    assert difference(our_logits(network, ids, [TOKENS]), theirs) <= LIMIT
    assert difference(our_logits(network, ids, [17, 1, 22], rows=7), theirs) <= LIMIT
    assert difference(our_logits(network, ids, [TOKENS - 9, *[1] * 9]), theirs) <= LIMIT
    kv = DenseAttend(network.config.windows)
    network.rows = 16
    assert difference(network.forward(ids, kv), theirs[-1]) <= LIMIT


PLAIN = [(family, {}) for family in ("llama", "mistral", "qwen2")]


@pytest.mark.parametrize(
    ("family", "settings"),
    [*PLAIN, *(pytest.param(*one, marks=pytest.mark.soak) for one in OTHERS)],
)
def test_bfloat16_agrees_where_the_choice_is_clear(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    spec = Spec(family=family, seed=5, **settings)
    oracle = write(spec, tmp_path).bfloat16()
    network = network_of(tmp_path, torch.bfloat16)
    agree = clear = 0
    for seed in range(10):
        ids = tokens(spec.vocab, seed=seed)
        theirs = oracle_logits(oracle, ids)
        ours = our_logits(network, ids, [TOKENS])
        gap = theirs.topk(2, -1).values
        # bfloat16 keeps 8 bits: two logits closer than this are a coin toss in either program.
        sure = gap[:, 0] - gap[:, 1] > 2**-6 * theirs.abs().max()
        clear += int(sure.sum())
        agree += int((ours.argmax(-1) == theirs.argmax(-1))[sure].sum())
    assert clear >= 200
    assert agree >= 0.99 * clear


def test_forward_leaves_the_last_layers_unneeded_rows_alone(tmp_path: Path) -> None:
    """The last layer's MLP runs on one row, however long the prompt is."""
    write(Spec(), tmp_path)
    network = network_of(tmp_path)
    network.rows = 8
    seen: list[int] = []
    for layer in network.layers:
        down = layer.down
        layer.down = lambda x, out=None, down=down: (seen.append(len(x)), down(x, out))[1]
    network.forward(tokens(67, 20), DenseAttend((None, None)))
    assert seen == [8, 8, 4, 1]

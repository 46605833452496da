"""Mistakes that real loaders have made, each made on purpose: the parity check must see it.

A mutant either raises or changes the logits by at least a hundred times the parity limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoints import Spec, edit_json, write
from dense import DenseCache
from test_parity import LIMIT, SCALES, TOKENS, difference, oracle_logits, our_logits, tokens
from torch import Tensor

import minikv.models.checkpoint as checkpoint
import minikv.models.weights as weights
from minikv.kernels.dispatch import Kernels
from minikv.models.checkpoint import Checkpoint
from minikv.models.config import ModelConfig
from minikv.models.errors import ModelError
from minikv.models.linear import Plain
from minikv.models.llama import Llama
from minikv.models.rope import Rotary
from minikv.models.weights import load_network

CUTS = [17, 1, 22]


def run(folder: Path, config: ModelConfig | None = None) -> Tensor:
    network = load_network(Checkpoint.open(folder), config or ModelConfig.from_folder(folder))
    return feed(network)


def feed(network: Llama) -> Tensor:
    return our_logits(network, tokens(network.config.vocab), CUTS, rows=7)


Act = Callable[[Path, pytest.MonkeyPatch], Tensor]


def config(**changes: object) -> Act:
    """The file is right, one fact is read wrongly."""

    def act(folder: Path, patch: pytest.MonkeyPatch) -> Tensor:
        read = ModelConfig.from_folder(folder)
        return run(folder, replace(read, **changes))  # type: ignore[arg-type]

    return act


def rope(**changes: object) -> Act:
    def act(folder: Path, patch: pytest.MonkeyPatch) -> Tensor:
        read = ModelConfig.from_folder(folder)
        return run(folder, replace(read, rope=replace(read.rope, **changes)))  # type: ignore[arg-type]

    return act


def network(change: Callable[[Llama], None]) -> Act:
    """Loaded right, then one tensor is put where it does not belong."""

    def act(folder: Path, patch: pytest.MonkeyPatch) -> Tensor:
        made = load_network(Checkpoint.open(folder), ModelConfig.from_folder(folder))
        change(made)
        return feed(made)

    return act


def code(module: object, name: str, value: object) -> Act:
    """One function of the loader or the network is wrong."""

    def act(folder: Path, patch: pytest.MonkeyPatch) -> Tensor:
        patch.setattr(module, name, value)
        return run(folder)

    return act


def _swap_gate_up(net: Llama) -> None:
    for layer in net.layers:
        both = layer.gate_up.dense()
        both.copy_(torch.cat(both.chunk(2)[::-1]))


def _swap_norms(net: Llama) -> None:
    for layer in net.layers:
        layer.attention_norm, layer.mlp_norm = layer.mlp_norm, layer.attention_norm


def _swap_kv(net: Llama) -> None:
    c = net.config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for layer in net.layers:
        qkv = layer.qkv.dense()
        qkv.copy_(torch.cat((qkv[:q], qkv[q + kv :], qkv[q : q + kv])))


def _repeat_order(net: Llama) -> None:
    """Query head g*H + h reads KV head h, instead of h*G + g."""
    c = net.config
    q, group = c.heads * c.head_dim, c.heads // c.kv_heads
    for layer in net.layers:
        query, out = layer.qkv.dense()[:q], layer.out.dense()
        heads = query.view(c.kv_heads, group, c.head_dim, c.hidden)
        query.copy_(heads.transpose(0, 1).reshape(q, c.hidden))
        heads = out.view(c.hidden, c.kv_heads, group, c.head_dim)
        out.copy_(heads.transpose(1, 2).reshape(c.hidden, q))


def _no_bias(name: str, part: slice = slice(None)) -> Callable[[Llama], None]:
    def change(net: Llama) -> None:
        for layer in net.layers:
            getattr(layer, name).bias[part] = 0

    return change


def _ones(name: str) -> Callable[[Llama], None]:
    def change(net: Llama) -> None:
        for layer in net.layers:
            getattr(layer, name).fill_(1)

    return change


def _no_final_norm(net: Llama) -> None:
    net.norm.fill_(1)


def _tie(net: Llama) -> None:
    net.head = Plain(net.embedding)


def _drop_shard(folder: Path, patch: pytest.MonkeyPatch) -> Tensor:
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    patch.setattr(
        checkpoint,
        "weight_map",
        lambda path, real=checkpoint.weight_map: {
            name: shard for name, shard in real(path).items() if shard != victim.name
        },
    )
    return run(folder)


def _drop_layer(folder: Path, patch: pytest.MonkeyPatch) -> Tensor:
    read = ModelConfig.from_folder(folder)
    return run(folder, replace(read, layers=1, windows=read.windows[:1]))


def _no_head_dim(folder: Path, patch: pytest.MonkeyPatch) -> Tensor:
    edit_json(folder / "config.json", lambda raw: {k: v for k, v in raw.items() if k != "head_dim"})
    return run(folder)


def _stale_copy(folder: Path, patch: pytest.MonkeyPatch) -> Tensor:
    """A left-over single file beside the shards must not win over the index."""
    first = sorted(folder.glob("model-*.safetensors"))[0]
    (folder / "model.safetensors").write_bytes(first.read_bytes())
    patch.setattr(checkpoint, "INDEX", "absent.json")
    return run(folder)


_TABLE, _ROTATE = Rotary.table, Kernels.rotate
Table = tuple[Tensor, Tensor]


def _from_zero(self: Rotary, start: int, count: int, dtype: torch.dtype) -> Table:
    return _TABLE(self, 0, count, dtype)


def _later_off_by_one(self: Rotary, start: int, count: int, dtype: torch.dtype) -> Table:
    return _TABLE(self, start + (start > 0), count, dtype)


def _negative_sine(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _ROTATE(x, cos, -sin)


def _paired(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbours, as the original layout means it, on half-split rows."""
    half = x.shape[-1] // 2
    split = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    turned = _ROTATE(split, cos, sin)
    return torch.stack((turned[..., :half], turned[..., half:]), -1).flatten(-2)


def _norm_after_weight(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    assert y is None or x.add_(y) is x
    return x * weight / (x * weight).pow(2).mean(-1, keepdim=True).add(eps).sqrt()


@dataclass(frozen=True)
class Mutant:
    name: str
    spec: Spec
    act: Act


LLAMA3 = Spec(rope="llama3", heads=4, kv_heads=2, head_dim=16)
YARN = Spec(rope="yarn", head_dim=16)
GQA = Spec(heads=6, kv_heads=2)
ODD = Spec(heads=9, kv_heads=3, hidden=72)
WINDOW = Spec(family="mistral", window=9, heads=4, kv_heads=2)
LARGE_WINDOW = Spec(family="mistral", window=TOKENS - 1)
QWEN = Spec(family="qwen2")
BIAS = Spec(bias=True, mlp_bias=True)
ORIGINAL = Spec(layout="original", heads=6, kv_heads=2, head_dim=20)
SHARDED = Spec(layout="sharded")
PATTERN = Spec(
    family="ministral",
    window=8,
    head_dim=8,
    extra={"layer_types": ["sliding_attention", "full_attention"]},
)

QWEN3 = Spec(family="qwen3", head_dim=20)
GRANITE = Spec(family="granite", extra=SCALES | {"attention_multiplier": 0.6})
SMOLLM3 = Spec(family="smollm3", extra={"no_rope_layers": [1, 0]})
OLMO3 = Spec(
    family="olmo3",
    rope="olmo3",
    window=9,
    extra={"layer_types": ["sliding_attention", "full_attention"]},
)

MUTANTS = [
    Mutant("norm of queries ignored", QWEN3, network(_ones("q_norm"))),
    Mutant("norm of keys ignored", QWEN3, network(_ones("k_norm"))),
    Mutant("embedding multiplier ignored", GRANITE, config(embedding_scale=1.0)),
    Mutant("attention multiplier ignored", GRANITE, config(query_scale=1.0)),
    Mutant("residual multiplier ignored", GRANITE, config(residual_scale=1.0)),
    Mutant("logits not scaled", GRANITE, config(logits_scale=1.0)),
    Mutant("a layer without rotation is rotated", SMOLLM3, config(layer_ropes=())),
    Mutant("positions scaled in layers with a window", OLMO3, config(layer_ropes=())),
    Mutant("norms before the blocks", OLMO3, config(norm_after=False)),
    Mutant("norms of each head", OLMO3, config(qk_norm="head")),
    Mutant("fused gate and up swapped", Spec(family="phi3"), network(_swap_gate_up)),
    Mutant(
        "queries not scaled by position",
        Spec(family="ministral3", rope="ministral3"),
        rope(query_beta=0.0),
    ),
    Mutant("theta ignored", Spec(rope="theta"), rope(theta=10_000.0)),
    Mutant("llama3 scaling ignored", LLAMA3, rope(kind="default")),
    Mutant("llama3 factor", LLAMA3, rope(factor=32.0)),
    Mutant("llama3 low_freq_factor", LLAMA3, rope(low_freq_factor=2.0)),
    Mutant("llama3 high_freq_factor", LLAMA3, rope(high_freq_factor=2.0)),
    Mutant("llama3 original length", LLAMA3, rope(original=256)),
    Mutant("linear scaling ignored", Spec(rope="linear"), rope(kind="default")),
    Mutant("dynamic read as linear", Spec(rope="dynamic"), rope(kind="linear")),
    Mutant("yarn read as linear", YARN, rope(kind="linear")),
    Mutant("yarn attention factor dropped", YARN, rope(attention_factor=1.0)),
    Mutant("yarn truncation", Spec(rope="yarn_full", head_dim=16), rope(truncate=True)),
    Mutant("yarn betas", Spec(rope="yarn_full", head_dim=16), rope(beta_fast=32.0, beta_slow=1.0)),
    Mutant("window one too large", WINDOW, config(windows=(10, 10))),
    Mutant("window one too small", WINDOW, config(windows=(8, 8))),
    Mutant("window off", WINDOW, config(windows=(None, None))),
    Mutant("window just under the prompt, off", LARGE_WINDOW, config(windows=(None, None))),
    Mutant("window pattern shifted", PATTERN, config(windows=(None, 8))),
    Mutant("eps", Spec(small=True), config(norm_eps=1e-6)),
    Mutant("head_dim not read", Spec(head_dim=20), _no_head_dim),
    Mutant("pairs kept", ORIGINAL, code(weights, "_pairs", lambda name, config: 0)),
    Mutant(
        "pairs taken out of queries only",
        ORIGINAL,
        code(weights, "_pairs", lambda name, c: c.heads if ".q_proj." in name else 0),
    ),
    Mutant(
        "pairs taken out across heads",
        ORIGINAL,
        code(weights, "_pairs", lambda name, c: int(".q_proj." in name or ".k_proj." in name)),
    ),
    Mutant("query bias dropped", QWEN, network(_no_bias("qkv", slice(0, 48)))),
    Mutant("value bias dropped", QWEN, network(_no_bias("qkv", slice(72, None)))),
    Mutant("output bias dropped", BIAS, network(_no_bias("out"))),
    Mutant("mlp bias dropped", BIAS, network(_no_bias("gate_up"))),
    Mutant("down bias dropped", BIAS, network(_no_bias("down"))),
    Mutant("attention norm weight ignored", GQA, network(_ones("attention_norm"))),
    Mutant("mlp norm weight ignored", GQA, network(_ones("mlp_norm"))),
    Mutant("final norm weight ignored", GQA, network(_no_final_norm)),
    Mutant("norms swapped", GQA, network(_swap_norms)),
    Mutant(
        "norm weight inside the mean",
        GQA,
        code(Kernels, "add_norm", staticmethod(_norm_after_weight)),
    ),
    Mutant("gate and up swapped", GQA, network(_swap_gate_up)),
    Mutant("keys and values swapped", GQA, network(_swap_kv)),
    Mutant("KV heads repeated in the wrong order", GQA, network(_repeat_order)),
    Mutant("KV heads repeated in the wrong order, 9 on 3", ODD, network(_repeat_order)),
    Mutant("tied by default", GQA, network(_tie)),
    Mutant("shard dropped", SHARDED, _drop_shard),
    Mutant("index ignored", SHARDED, _stale_copy),
    Mutant("last layer dropped", GQA, _drop_layer),
    Mutant("layers reversed", GQA, network(lambda net: net.layers.reverse())),
    Mutant("every chunk starts at position 0", GQA, code(Rotary, "table", _from_zero)),
    Mutant("later chunks off by one", GQA, code(Rotary, "table", _later_off_by_one)),
    Mutant("rotation backwards", YARN, code(Kernels, "rotate", staticmethod(_negative_sine))),
    Mutant("rotation of neighbours", GQA, code(Kernels, "rotate", staticmethod(_paired))),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = oracle_logits(write(mutant.spec, tmp_path), tokens(mutant.spec.vocab))
    assert difference(run(tmp_path), theirs) <= LIMIT, "the unmutated loader must pass"
    try:
        ours = mutant.act(tmp_path, monkeypatch)
    except ModelError:
        return
    assert difference(ours, theirs) > 100 * LIMIT


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 15
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_oracle_of_attention_sees_a_window_by_position() -> None:
    """The dense cache itself, by hand: three keys, a window of two."""
    cache = DenseCache(1, [2])
    one = torch.ones(3, 1, 4)
    values = torch.tensor([1.0, 2.0, 4.0])[:, None, None].expand(3, 1, 4)
    mixed = cache.attend(0, one, one, values)
    assert mixed[:, 0, 0].tolist() == [1.0, 1.5, 3.0]

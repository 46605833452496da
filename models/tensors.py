"""Where each tensor of a checkpoint belongs in a network, by its Hugging Face name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.models.linear import Plain
from minikv.models.llama import Layer, Llama


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's tensor belongs: rows `rows` of the attribute `slot` of `owner`, which is
    the network or a layer. bias: it is the bias of a matrix."""

    owner: Llama | Layer
    slot: str
    rows: slice
    bias: bool = False

    def tensor(self) -> Tensor:
        """The part itself, a contiguous view."""
        part: object = getattr(self.owner, self.slot)
        if isinstance(part, Plain):
            part = part.bias if self.bias else part.weight
        assert isinstance(part, Tensor), "packed weights cannot be indexed by row"
        return part[self.rows]


def places_of(network: Llama) -> Iterator[tuple[str, Place]]:
    """Where each tensor of a Hugging Face checkpoint belongs, by name. A tied lm_head is not
    listed. Only for a network whose matrices are plain.
    """
    c = network.config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    whole = slice(None)
    names = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    first, second = names[1:] if c.norm_after else names[:2]
    parts: tuple[tuple[str, str, slice], ...] = (
        (first, "attention_norm", whole),
        ("self_attn.q_proj", "qkv", slice(0, q)),
        ("self_attn.k_proj", "qkv", slice(q, q + kv)),
        ("self_attn.v_proj", "qkv", slice(q + kv, None)),
        ("self_attn.o_proj", "out", whole),
        (second, "mlp_norm", whole),
        ("mlp.gate_proj", "gate_up", slice(0, c.mlp)),
        ("mlp.up_proj", "gate_up", slice(c.mlp, None)),
        ("mlp.down_proj", "down", whole),
    )
    if c.fused:
        joined = ("self_attn.qkv_proj", "qkv", whole), ("mlp.gate_up_proj", "gate_up", whole)
        parts = (*joined, *(part for part in parts if part[1] not in ("qkv", "gate_up")))
    if c.qk_norm:
        norms = (f"{one}_norm" for one in "qk")
        parts = (*parts, *((f"self_attn.{name}", name, whole) for name in norms))
    yield "model.embed_tokens.weight", Place(network, "embedding", whole)
    for i, layer in enumerate(network.layers):
        for name, slot, rows in parts:
            part, at = getattr(layer, slot), f"model.layers.{i}.{name}"
            yield f"{at}.weight", Place(layer, slot, rows)
            if not isinstance(part, Tensor) and part.bias is not None:
                yield f"{at}.bias", Place(layer, slot, rows, bias=True)
    yield "model.norm.weight", Place(network, "norm", whole)
    if not c.tied:
        yield "lm_head.weight", Place(network, "head", whole)


def tensors_of(network: Llama) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in a Hugging Face checkpoint, as a contiguous view, e.g. for
    saving. See `places`."""
    yield from ((name, place.tensor()) for name, place in places_of(network))


@torch.no_grad()
def randomise(network: Llama, seed: int = 0, std: float = 0.02) -> Llama:
    """Fill the weights with seeded normal numbers, and the norms with one. For tests,
    benchmarks and training."""
    generator = torch.Generator(network.device).manual_seed(seed)
    for name, tensor in tensors_of(network):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, std, generator=generator)
    return network

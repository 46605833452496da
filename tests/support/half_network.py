"""A random network in bfloat16, its matrices perhaps packed: what a decode step in C takes."""

from __future__ import annotations

from typing import Any

import torch
from small import config

from minikv.models.linear import Plain, kept
from minikv.models.llama import Llama


def made(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    *,
    vocab: int = 50,
    window: int | None = None,
    biased: bool = False,
    **given: Any,
) -> Llama:
    """The network with plain matrices. window: that of all layers but the first. given: further
    fields of its configuration."""
    made = config(
        (None, *(window,) * (layers - 1)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        mlp=mlp,
        vocab=vocab,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        **given,
    )
    return Llama(made, dtype=torch.bfloat16).randomise(1, 0.2)


def packed(net: Llama, form: str) -> Llama:
    """The network with the matrices of its layers in this form; "auto": as they are."""
    for layer in net.layers if form != "auto" else ():
        for slot in ("qkv", "out", "gate_up", "down"):
            plain = getattr(layer, slot)
            assert isinstance(plain, Plain)
            setattr(layer, slot, kept(plain, form))
    return net

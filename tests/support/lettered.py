"""A chat over a small random network that answers in small letters, so that its text says which
tokens it was. Each letter depends on what the cache held."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from fakes import END, PADDED, ByteTokenizer, ChatML
from small import shape
from small_chat import chat_over

from minikv.cache.kv_cache import KVCache
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.engine.engine import Engine
from minikv.models.config import ModelConfig
from minikv.models.linear import Plain
from minikv.models.llama import Llama
from minikv.models.rope import RopeConfig


@cache
def network(windows: tuple[int | None, ...] = (None, None), rows: int = 32) -> Llama:
    """Its chunks are of `rows` tokens. Now and then it ends an answer."""
    config = ModelConfig(
        family="llama",
        layers=len(windows),
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=32,
        mlp=48,
        vocab=PADDED,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        max_context=1024,
        windows=windows,
    )
    net = Llama(config, rows=rows).randomise(3, std=0.3)
    head: Any = net.head
    bias = torch.full((PADDED,), -1000.0)  # as good as never
    bias[ord("a") : ord("z") + 1] = 0.0
    bias[END] = -1.0
    net.head = Plain(head.weight, bias)
    return net


def lettered(
    eviction: EvictionConfig,
    *,
    windows: tuple[int | None, ...] = (None, None),
    rows: int = 32,
    **given: Any,
) -> ChatSession:
    """A session over such a network; see `over`."""
    return over(network(windows, rows), eviction, **given)


def over(
    net: Llama,
    eviction: EvictionConfig,
    *,
    tier: str = "none",
    tier_dtype: str = "same",
    kv: torch.dtype | None = None,
    capture: Any = None,
    **given: Any,
) -> ChatSession:
    """A session over a network of bytes; its memory is born full of NaN."""
    c = net.config
    cache = KVCache(
        shape(net),
        eviction.rules(),
        kv=kv,
        output=lambda i: net.layers[i].out.dense().T.unflatten(0, (c.kv_heads, -1, c.head_dim)),
        rotary=net.rotary.inverse,
        poison=True,
    )
    tokenizer = ByteTokenizer()
    return chat_over(
        Engine(net, cache, capture),
        tokenizer,
        ChatML(tokenizer),
        max_context=c.max_context,
        eviction=eviction,
        recall=Recall(cache, tier, tier_dtype),
        **given,
    )

"""A chat over a small random network that answers in small letters, so that its text says which
tokens it was. Each letter depends on what the cache held."""

from __future__ import annotations

from functools import cache
from typing import Any

import small
import torch
from fakes import END, PADDED
from small_chat import chat_over

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.engine.engine import Engine
from minikv.models.linear import Plain
from minikv.models.llama import Llama


@cache
def network(windows: tuple[int | None, ...] = (None, None), rows: int = 32) -> Llama:
    """Its chunks are of `rows` tokens. Now and then it ends an answer."""
    net = small.network(rows, 3, windows=windows, max_context=1024, vocab=PADDED, **small.SPOKEN)
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
    cache = small.over(net, eviction.rules(), kv=kv)
    given |= {"max_context": net.config.max_context, "recall": Recall(cache, tier, tier_dtype)}
    return chat_over(Engine(net, cache, capture), eviction=eviction, **given)

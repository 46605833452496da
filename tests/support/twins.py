"""What the tests of caches and chats share: all that an arena holds, calls that fail once, and the
same network on a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

from layouts import segment

from minikv.cache.arena import Arena, Layout
from minikv.models.llama import Llama
from minikv.models.tensors import tensors_of


def contents(arena: Arena) -> list[object]:
    """Every table, and every column of the rows in use."""
    heads = itertools.product(range(arena.layers), range(arena.heads))
    tables = [getattr(arena.layout(), n).tolist() for n in Layout.__slots__]
    return [tables, [[segment(arena, n, *at).tolist() for n in arena.columns] for at in heads]]


class Nth:
    """`real`, but the n-th call fails."""

    def __init__(self, real: Callable[..., Any], number: Iterator[int], n: int, code: int) -> None:
        self.real, self.number, self.n, self.code = real, number, n, code

    def __call__(self, *given: Any, **named: Any) -> Any:
        if next(self.number) == self.n:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*given, **named)


def on_cuda(net: Llama) -> Llama:
    """The same weights there."""
    moved = Llama(net.config, rows=net.rows, device="cuda")
    for (_, mine), (_, theirs) in zip(tensors_of(moved), tensors_of(net), strict=True):
        mine.copy_(theirs)
    return moved

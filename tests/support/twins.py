"""What the tests of caches and chats share: calls that fail once, and copies of a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from minikv.models.llama import Llama
from minikv.models.tensors import tensors_of


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

"""Engines and chats with a tier, and the prompt policies that can choose from one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import small
from small_chat import chat

from minikv import policies
from minikv.cache.tier import Tier
from minikv.cache.tier_file import FileRows
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.engine.engine import Engine

MILL = "A mill stands by the river and grinds. " * 8
RIVER = "The river is slow and brown. " * 8


def served() -> list[str]:
    """The prompt policies that can choose from a tier."""
    net = small.network(layers=1)
    names = (name for name in policies.prompt_names() if name != "full")
    made = ((name, small.engine(net, name, "none", 60).kv.rules) for name in names)
    return [name for name, rules in made if rules.cannot_recall is None]


def tiered(
    run: Engine, *, coded: bool = False, staged: bool = False, rows: FileRows | None = None
) -> Engine:
    """The engine with a tier; `staged`: as on a GPU, where the tier is not the staging buffer."""
    kv = run.kv
    kv.tier = Tier(kv.shape, kv.dtype, kv.device, coded=coded, rows=rows)
    if staged:
        kv.tier._direct = False
    return run


def recalling(kind: str = "ram", free: int | None = None, **given: Any) -> ChatSession:
    """A chat with a tier; free: bytes of RAM that it is told are free."""
    session = chat(reuse=given.pop("reuse", "auto"), **given)
    session.recall = Recall(session.engine.kv, kind, "same", lambda: free)
    return session


class Runtime:
    """CUDA's, for memory that is registered with it. most: bytes that it accepts at once."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, most: int) -> None:
        self.most, self.held = most, dict[int, int]()

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
        assert begin not in self.held, "twice"
        assert begin % 4096 == 0, "a page of another tensor's"
        if sum(self.held.values()) + size > self.most:
            return 2
        self.held[begin] = size
        return 0

    def cudaHostUnregister(self, begin: int) -> None:
        del self.held[begin]

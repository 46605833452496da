"""Small stand-ins for engine, tokenizer and template, so that a chat can be tested exactly.

The fake network's next token is a digest of every token fed so far: one token too many, too few or
out of order changes every answer after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minikv.cache.arena import Layout
from minikv.cache.rules import Rules
from minikv.cache.snapshot import CacheSnapshot, Outcome, State
from minikv.engine.sampling import Sampling, pick
from minikv.errors import NumericsError, UsageError
from minikv.kernels.dispatch import Kernels
from minikv.models.stream import TextStream

BOS, END, USER, ASSISTANT, SYSTEM = range(256, 261)
VOCAB = 261
PADDED = 272  # rows of the logits, the last ones without a token
ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}


class ByteStream(TextStream):
    """A token per byte."""

    def __init__(self) -> None:
        super().__init__([bytes([byte]) for byte in range(256)])


class ByteTokenizer:
    vocab = VOCAB
    stop_ids = frozenset({END})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(id for id in ids if id < 256).decode("utf-8", "replace")

    def sentence_ends(self, ids: Sequence[int]) -> list[bool]:
        return [id >= 256 or (one, id) == (b"."[0], b" "[0]) for one, id in pairwise([0, *ids])]

    def stream(self) -> ByteStream:
        return ByteStream()


class ChatML:
    """<bos> then <role> content <end> per message, <assistant> where the answer begins."""

    name = "fake"
    tags: Any = None

    def __init__(self, tokenizer: ByteTokenizer, notes: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.notes = notes

    def render(self, messages: Sequence[Any]) -> list[int]:
        """Without the generation prompt; every message closed."""
        ids = [BOS]
        for message in messages:
            ids += [ROLES[message.role], *self.tokenizer.encode(message.content), END]
        return ids

    def opening(self, messages: Sequence[Any]) -> list[int]:
        assert messages[-1].role == "user"
        return [*self.render(messages), ASSISTANT]

    def following(self, messages: Sequence[Any]) -> list[int]:
        assert [m.role for m in messages[-2:]] == ["assistant", "user"]
        return [END, USER, *self.tokenizer.encode(messages[-1].content), END, ASSISTANT]

    def lookalikes(self, text: str) -> int:
        return text.count("<end>")

    def markers(self, text: str) -> int:
        return text.count("[USER]")

    def lost(self, text: str) -> int:
        return text.count("\u2620")


@dataclass(frozen=True)
class FakeTags:
    """Tags that are plain text."""

    forgets: bool = True
    begin: str = "<think>"
    end: str = "</think>"
    ending: tuple[int, ...] = tuple(b"\n</think>\n\n")
    unseen: dict[int, str] = field(default_factory=dict)

    def opened(self, ids: Sequence[int]) -> bool:
        return bytes(id for id in ids[-12:] if id < 256).rstrip().endswith(b"<think>")


class ThinkML(ChatML):
    """With thoughts as R1's template has them, which opens them in the prompt and leaves those of
    earlier turns out, or as SmolLM3's has them, which does neither."""

    def __init__(self, tokenizer: ByteTokenizer, *, forgets: bool = True, opens: bool = True):
        super().__init__(tokenizer)
        self.tags, self.opens = FakeTags(forgets), list(b"<think>\n") if opens else []

    def render(self, messages: Sequence[Any]) -> list[int]:
        def whole(m: Any) -> str:
            kept = m.thoughts and not self.tags.forgets
            return f"<think>\n{m.thoughts}\n</think>\n\n{m.content}" if kept else m.content

        return super().render([SimpleNamespace(role=m.role, content=whole(m)) for m in messages])

    def opening(self, messages: Sequence[Any]) -> list[int]:
        return [*super().opening(messages), *self.opens]

    def following(self, messages: Sequence[Any]) -> list[int]:
        return [*super().following(messages), *self.opens]


@dataclass
class FakeKv:
    """A cache that keeps everything; `configured` records what the chat asked for."""

    position: int = 0
    configured: list[Rules] = field(default_factory=list)
    shaped: bool = False
    fed: list[int] = field(default_factory=list)
    shape = SimpleNamespace(layers=1, kv_heads=1, windows=(None,))
    rules = Rules()
    ops = Kernels()
    tier = scoring_tier = None
    scoring = False
    peak = 1 << 21

    @property
    def arena(self) -> SimpleNamespace:
        count, one = self.position, lambda number: torch.tensor([[number]])
        tables = SimpleNamespace(length=one(count), start=one(0), free_slot=one(-1))
        pos, cpu = torch.arange(count, dtype=torch.int32), torch.device("cpu")
        return SimpleNamespace(layout=lambda: tables, device=cpu, columns={"pos": pos})

    def accepts(self, held: object, *eviction: object) -> bool:
        return True

    def stats(self) -> SimpleNamespace:
        rows = dict.fromkeys(("seen", "kept_min", "kept_max"), self.position)
        sizes = dict.fromkeys(("full_bytes", "held_bytes"), self.position * 256)
        sizes |= {"row_bytes": 64, "allocated_bytes": 1 << 20, "peak_bytes": 1 << 21}
        flags = {"state_bytes": 0, "evicted": 0, "shaped": self.shaped, "gaps": False}
        return SimpleNamespace(kept_mean=float(self.position), **rows, **sizes, **flags)

    @property
    def state(self) -> State:
        return State(outcome=Outcome(shaped=self.shaped))

    def share(self) -> SimpleNamespace:
        none = SimpleNamespace(nbytes=0)
        return SimpleNamespace(arena=none, position=self.position, fed=list(self.fed))

    def holds(self, position: int) -> int:
        return position

    def cut(self, position: int) -> None:
        self.position = position
        del self.fed[position:]

    def discard(self) -> None:
        self.position = 0
        self.fed.clear()

    def abandon(self) -> None: ...

    def settle(self) -> None: ...

    def kept(self, layer: int, head: int) -> Tensor:
        return torch.arange(self.position)

    def check(self, rules: Rules) -> None:
        budget = rules.budget
        if budget is not None and budget.unit == "rows" and budget.value < 37:
            raise UsageError("--budget is below the smallest useful one here: 37")

    def configure(self, rules: Rules) -> None:
        self.check(rules)
        self.configured.append(rules)

    def snapshot(self) -> CacheSnapshot:
        none, rows = torch.zeros((1, 1), dtype=torch.int64), len(self.fed)
        some, ids = none + rows, torch.tensor(self.fed, dtype=torch.int64)
        tables = Layout(none, some, some, some, none - 1)
        return CacheSnapshot(State(self.position), (0, rows), tables, {"ids": ids})

    def forget(self, position: int) -> None:
        self.discard()

    def reset(self, rules: Rules) -> None:
        self.configure(rules)
        self.discard()

    def restore(self, held: Any, rules: Rules | None = None, under: Rules | None = None) -> None:
        if rules is None:
            self.position = held.position
            self.fed[:] = held.fed
            return
        self.check(rules)
        self.fed, self.position = held.columns["ids"].tolist(), held.state.position


class FakeEngine:
    """`hook(fed)` may raise in place of a step; `nan_at` is the position whose logits are NaN."""

    def __init__(self, length: int = 12) -> None:
        self.kv = FakeKv()
        self.length = length
        self.nan_at: int | None = None
        self.script: list[int] | None = None
        self.notices: list[str] = []
        self.hook: Callable[[list[int]], None] = lambda fed: None

    @property
    def fed(self) -> list[int]:
        """Every token that was fed; the cache has them, so that it can be set aside."""
        return self.kv.fed

    @fed.setter
    def fed(self, ids: list[int]) -> None:
        self.kv.fed = ids

    def prompt(
        self,
        ids: list[int],
        progress: Any = None,
        room: int = 256,
        asks: bool = False,
        turn_tokens: int | None = None,
    ) -> Tensor:
        before = list(self.fed)
        try:
            for start in range(0, len(ids), 4):
                if progress is not None:
                    progress(start, len(ids))
                self.fed += ids[start : start + 4]
                self.hook(self.fed)
            logits = self._logits()
        except BaseException:
            self.fed = before
            raise
        self.kv.position = len(self.fed)
        return logits

    def step(self, token: int) -> Tensor:
        """As the real engine: on an error the token is not in the cache."""
        self.fed.append(token)
        try:
            self.hook(self.fed)
            logits = self._logits()
        except BaseException:
            self.fed.pop()
            raise
        self.kv.position = len(self.fed)
        return logits

    def next(
        self,
        token: int,
        vocab: int,
        sampling: Sampling,
        seed: int,
        *,
        ahead: bool = True,
        recent: Sequence[int] = (),
    ) -> int:
        logits = self.step(token)
        return pick(logits, vocab, sampling, seed, self.kv.position, self.kv.ops, recent)

    def reset(self) -> None:
        self.fed = []
        self.kv.position = 0

    def _logits(self) -> Tensor:
        if self.nan_at is not None and len(self.fed) >= self.nan_at:
            raise NumericsError("the network produced NaN logits")
        logits = torch.zeros(PADDED)
        logits[VOCAB:] = 99.0  # padding rows must never win
        since = len(self.fed) - 1 - max(i for i, id in enumerate(self.fed) if id == ASSISTANT)
        if since >= self.length:
            logits[END] = 9.0
        elif self.script is not None:
            logits[self.script[since]] = 9.0
        else:
            digest = hashlib.sha256(repr(self.fed).encode()).digest()
            logits[97 + digest[0] % 26] = 9.0
        return logits

"""The engine: token ids in, logits or the next token out. It knows no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from minikv.cache.fidelity import compared
from minikv.cache.kv_cache import KVCache
from minikv.cache.second_pass import SecondPass
from minikv.cache.stats import Fidelity
from minikv.engine.capture import CudaGraphs, Eager
from minikv.engine.decode_loop import DecodeLoop, Network
from minikv.engine.sampling import Sampling, finite, pick
from minikv.errors import ContextError, NumericsError


class Engine:
    """Feeds tokens to a network with a cache. The cache has seen exactly the tokens that were fed.

    notices: messages for the user, e.g. about what runs slower than it could.
    """

    def __init__(
        self, network: Network, kv: KVCache, capture: Eager | Literal["auto"] | None = "auto"
    ) -> None:
        """capture: how `next` launches a step before the host has read the token of the previous
        step (see `DecodeLoop`); None: one step at a time. "auto": CUDA graphs on CUDA, otherwise
        None."""
        self.network, self.kv = network, kv
        self.notices: list[str] = [kv.notice] if kv.notice else []
        if capture == "auto":
            capture = CudaGraphs(kv.device) if kv.device.type == "cuda" else None
        self._loop = None if capture is None else DecodeLoop(network, kv, capture, self.notices)

    @property
    def captured(self) -> bool:
        """Whether the last step was one CUDA graph."""
        return self._loop is not None and self._loop.captured

    def prompt(
        self,
        ids: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        room: int = 256,
        asks: bool = False,
        turn_tokens: int | None = None,
    ) -> Tensor:
        """Feed a prompt; return the logits of its last token, float32 [V].

        `progress(done, total)` is called between chunks, in tokens, and may raise; a second pass
        counts too. After any error, the cache is as it was before. room: expected tokens of the
        answer. asks: the prompt only asks about earlier text. turn_tokens: how many of the
        last tokens belong to the last turn, if earlier turns are read again with it. Raises
        ContextError if too few positions are left, NumericsError if the logits are not finite,
        UsageError if the budget is too small.
        """
        kv = self.kv
        left = self._fitting(len(ids), kv.position)
        with self._whole(progress):
            space = min(room, max(1, left - len(ids)))
            kv.begin(len(ids), space, asks=asks, turn_tokens=turn_tokens)
            logits = self.network.forward(self._tensor(ids), kv)
            _check(logits, "reading the prompt")
            if isinstance(kv.reading, SecondPass):
                for repeat, text in kv.reading.texts(ids, progress):
                    self.network.forward(self._tensor(repeat.ids), text)
                    del text  # before the next one is made
            kv.end(len(ids))
        return logits

    def recall(
        self,
        ids: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        room: int = 256,
        begins: int | None = None,
    ) -> Tensor:
        """Like `prompt`, for the token ids of the whole conversation. Tokens whose rows the tier
        has are not fed again; the others attend to these rows exactly (see `KVCache.recall`, also
        for `begins`). Logits and errors as for `prompt`."""
        kv = self.kv
        left = self._fitting(len(ids), 0)
        with self._whole(progress):
            given = kv.recall(len(ids), min(room, max(1, left - len(ids))), begins)
            logits = self.network.forward(self._tensor(ids[given:]), kv)
            _check(logits, "reading the prompt")
            kv.end(len(ids) - given)
        return logits

    def fidelity(self, token: int, logits: Tensor, vocab: int) -> Fidelity:
        """Measure what eviction lost from the prompt that `recall` has just read. token: the
        prompt's last one. logits: those that `recall` returned; the first `vocab` count. Costs one
        step and changes nothing. Raises torch's error if memory runs out."""
        found = self.kv.last_token()
        if found is None:  # nothing was lost
            return Fidelity() if self.kv.evicted else Fidelity(0.0, 0.0, 0.0)
        last, errors = found
        hot = self.network.forward(self._tensor([token]), last)
        return compared(logits[:vocab], hot[:vocab], errors)

    def _fitting(self, tokens: int, position: int) -> int:
        """How many positions are left from `position` on. Raises ContextError if `tokens` do not
        fit, ValueError if there are none."""
        most = self.kv.shape.max_context
        left = most - position
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        if tokens > left:
            raise ContextError(
                f"{tokens:,} tokens do not fit: {left:,} of {most:,} positions are left",
                "eviction frees memory, not positions; shorten the text or start over with "
                "`chat.reset()`",
            )
        return left

    @contextmanager
    def _whole(self, progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
        """A context for a prompt or a step: after any error, restore the cache to its state before
        the prompt, or drop it after a step."""
        kv = self.kv
        kv.progress = progress
        try:
            yield
        except BaseException:
            kv.progress = None
            kv.abandon()
            kv.settle()
            raise
        kv.progress = None

    def step(self, token: int) -> Tensor:
        """Feed one token of an answer; return the next logits, float32 [V].

        After an error inside the step the cache is empty. Raises ContextError, which changes
        nothing, and NumericsError.
        """
        self._refuse_full()
        with self._whole():
            logits = self.network.forward(self._tensor([token]), self.kv)
            _check(logits, "writing the answer")
            self.kv.end(1)
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
        """`step` and `sampling.pick`: feed a token of an answer and return the next. recent: see
        `pick`; the last of them is `token`.

        On CUDA, unless `ahead` is False, the next step is already launched when this returns. It
        counts only if the returned token is fed next. Raises as `step`.
        """
        self._refuse_full()
        if self._loop is not None:
            return self._loop.feed(token, vocab, sampling, seed, ahead=ahead, recent=recent)
        kv = self.kv
        with self._whole():
            logits = self.network.forward(self._tensor([token]), kv)
            # This also checks the logits: the token counts only after that.
            found = pick(logits, vocab, sampling, seed, kv.position + 1, kv.ops, recent)
            kv.end(1)
        return found

    def _refuse_full(self) -> None:
        most = self.kv.shape.max_context
        if self.kv.position >= most:
            raise ContextError(
                f"all {most:,} positions are used",
                "eviction frees memory, not positions; start over with `chat.reset()`",
            )

    def reset(self) -> None:
        """Forget the conversation."""
        self.kv.reset()

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.kv.device)


def _check(logits: Tensor, doing: str) -> None:
    if not finite(logits):
        raise NumericsError(
            f"the network produced NaN or infinite logits while {doing}",
            'the weights may be damaged, or too large for this dtype; try `dtype="float32"`',
        )

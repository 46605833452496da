"""Decoding on a GPU without waiting for it.

A step is one CUDA graph. The token that it draws is the input of the next step, and the host reads
that token while the next step already runs. So a step is launched before the host knows whether its
token belongs to the answer. Such a step is ended only when its token is fed, and until then it has
changed nothing (`DecodeStep`). A policy that evicts before attention changes rows at once, so no
step is launched ahead under it. The cache holds exactly the tokens that the caller fed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.cache.decode_step import DecodeStep
from minikv.cache.kv_cache import KVCache
from minikv.engine.capture import CudaGraphs, Eager
from minikv.engine.sampling import WINDOW, Sampling, draw, penalized
from minikv.errors import NumericsError
from minikv.kernels.sample.plain import greedy, sample

_WARM = 2  # how many steps run uncaptured before one is captured
_DRAWS = 256  # how many random numbers are sent to the device at once


class Network(Protocol):
    """What the engine needs from a model."""

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """ids int64 [T] -> logits of the last token, float32 [V]."""
        ...


class DecodeLoop:
    """The steps of an answer, each launched before the host has read the token of the previous
    step.

    One launch is [end the last step, run a step, draw the next token]. The drawn token is the input
    of the next launch. The draws are those of `sampling.pick`.
    """

    def __init__(self, network: Network, kv: KVCache, capture: Eager, notices: list[str]) -> None:
        """notices: gets a message if steps cannot be captured and run uncaptured."""
        self._network, self._kv, self._capture = network, kv, capture
        self._notices = notices
        with torch.inference_mode(False):
            self._token = torch.zeros(1, dtype=torch.int64, device=kv.device)
            # The next token, and whether all logits are finite.
            self._found = torch.zeros(2, dtype=torch.int64, device=kv.device)
            # The last tokens before the next one, the newest last, for the repeat penalty.
            self._recent = torch.zeros(WINDOW, dtype=torch.int64, device=kv.device)
            self._draws = torch.zeros(_DRAWS, dtype=torch.float64, device=kv.device)
            self._first_draw = torch.zeros((), dtype=torch.int64, device=kv.device)
        self._how: tuple[int, Sampling, int] | None = None  # vocabulary, sampling, seed
        self._drawn = range(0)  # positions whose random numbers are on the device
        self._at = 0  # position of the token of the next launch
        self._unended = False  # the step of the last launch has not been ended
        self._early: Callable[[], list[int]] | None = None  # the step that was launched ahead
        self._guess = -1  # the token that it was given
        # The last steps' `DecodeStep.compiled` and `DecodeStep.key`, with vocabulary and sampling.
        self._compiled: tuple[object, ...] = ()
        self._key: tuple[object, ...] = ()
        self._captures = True
        # By `Eviction.due`: the number of uncaptured runs so far, and the captured step.
        self._warmed = {False: 0, True: 0}
        self._replays: dict[bool, Callable[[], None]] = {}

    def feed(
        self,
        token: int,
        vocab: int,
        sampling: Sampling,
        seed: int,
        *,
        ahead: bool,
        recent: Sequence[int] = (),
    ) -> int:
        """Feed one token and return the next, whose id is below `vocab`. recent: see `pick`; the
        last of them is `token`.

        With `ahead`, the next step is launched too, as if the returned token were fed next. Raises
        NumericsError if a logit is NaN or infinite, and errors of the network and the device. After
        an error the cache is empty.
        """
        kv, how = self._kv, (vocab, sampling, seed)
        kv.before_settling = self._finish
        with self._whole():
            decode = kv.begin_step(captured=True)
            wait, self._early = self._early, None
            if wait is None or (token, how) != (self._guess, self._how):
                if wait is not None:
                    self._unended = False  # a step of another token is not ended
                self._prepare(decode, *how)
                self._token.fill_(token)
                if sampling.penalizes:
                    # If there are fewer, the first one is repeated, which has no effect.
                    shown = [*[(recent or [token])[0]] * WINDOW, *recent][-WINDOW:]
                    self._recent.copy_(torch.tensor(shown, dtype=torch.int64))
                wait = self._launch()
            step = kv.rules.step
            ahead = ahead and not (step is not None and step.evict_first)
            if ahead and self._at < min(kv.full_at, kv.shape.max_context):
                self._early = self._launch()
            following, finite = wait()
            if not finite:
                raise NumericsError(
                    f"the network produced NaN or infinite logits at position {kv.position + 1:,}",
                    'the turn was stopped; try `dtype="float32"`',
                )
            self._guess = following
            kv.count_step()
        return following

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A context for changing the cache: after any error, drop it."""
        try:
            yield
        except BaseException:
            self._early, self._unended, self._drawn = None, False, range(0)
            self._kv.discard()
            raise

    @property
    def captured(self) -> bool:
        """Whether steps already run as a CUDA graph."""
        return bool(self._replays) and isinstance(self._capture, CudaGraphs)

    def _finish(self) -> None:
        """End the step of the last token that was fed. Called before the cache is read. If that
        fails, the cache is dropped."""
        kv, decode = self._kv, self._kv.decode
        with self._whole():
            if self._unended and self._at <= kv.position and decode.is_open:
                decode.eviction.due = decode.eviction.is_due(kv.position)
                decode.end()
            self._early, self._unended = None, False

    def _prepare(self, decode: DecodeStep, vocab: int, sampling: Sampling, seed: int) -> None:
        """Prepare for the steps of an answer, and forget the captured step if it no longer fits."""
        if self._how is None or seed != self._how[2]:
            self._drawn = range(0)
        self._how = vocab, sampling, seed
        self._at = self._kv.position
        compiled, key = (vocab, sampling, *decode.compiled), (vocab, sampling, *decode.key)
        if compiled != self._compiled:
            self._warmed = {False: 0, True: 0}
        if key != self._key:
            self._replays = {}
        self._compiled, self._key = compiled, key

    def _launch(self) -> Callable[[], list[int]]:
        """Launch the step of the token on the device. Returns a function that waits for its
        results."""
        assert self._how is not None
        vocab, sampling, seed = self._how
        self._draw(sampling, seed)
        step, ends = self._kv.decode.eviction, self._unended
        step.due = due = ends and step.is_due(self._at)  # of the last step
        me = ref(self)  # the captured body must not keep this object and its cache alive

        def body() -> None:
            loop = me()
            assert loop is not None
            loop._step(vocab, sampling, ends=ends)

        self._run(body, due=due, ends=ends)
        self._unended = True
        self._at += 1
        return self._capture.post(self._found)

    def _run(self, body: Callable[[], None], *, due: bool, ends: bool) -> None:
        """Run the body: captured, if it was captured before or was run often enough."""
        if ends and self._captures and self._warmed[due] >= _WARM and due not in self._replays:
            try:
                self._replays[due] = self._capture.record(body)
            except Exception as error:  # nothing ran
                self._captures = False
                why = str(error).strip().partition("\n")[0] or type(error).__name__
                self._notices.append(f"steps are slower, as no CUDA graph captures them: {why}")
        if ends and due in self._replays:
            self._replays[due]()
        else:  # the first step of an answer ends no other one
            self._capture.warm(body)
            self._warmed[due] += ends

    @torch.inference_mode()
    def _step(self, vocab: int, sampling: Sampling, *, ends: bool) -> None:
        """The captured body: end the last step, run one token, draw the next."""
        decode = self._kv.decode
        if ends:
            decode.end()
        logits = self._network.forward(self._token, decode)[:vocab]
        written = self._token, self._found
        if sampling.penalizes:
            logits = penalized(logits, self._recent, sampling.repeat_penalty)
        if sampling.temperature == 0.0:
            greedy(logits, *written)
        else:
            drawn = self._draws, self._first_draw, decode.eviction.position
            sample(logits, *sampling.filters, *drawn, *written)
        if sampling.penalizes:
            self._recent.copy_(torch.cat((self._recent[1:], self._token)))

    def _draw(self, sampling: Sampling, seed: int) -> None:
        """Send random numbers to the device, unless the next one is already there."""
        if sampling.temperature == 0.0 or self._at + 1 in self._drawn:
            return
        drawn, self._drawn = range(self._at + 1, self._at + 1 + _DRAWS), range(0)
        numbers = [draw(seed, position) for position in drawn]
        # Pinned memory: the copy is asynchronous, and torch keeps the memory until it is done.
        pinned = self._kv.device.type == "cuda"
        made = torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned)
        self._draws.copy_(made, non_blocking=True)
        self._first_draw.fill_(drawn.start)
        self._drawn = drawn  # last: after an error, the numbers are sent again

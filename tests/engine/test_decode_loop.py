"""An answer written ahead of what the host has read: the tokens and the cache of one that is not,
whatever ends it."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from faults import AtLine
from small import VOCAB, engine, ids, network, shape
from stepping import GREEDY, STEPS, Pair, pair
from tape import Tape
from twins import on_cuda

from minikv import policies
from minikv.cache import eviction
from minikv.cache.attend import Attend
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.engine import decode_loop
from minikv.engine.capture import CudaGraphs, Eager, captured
from minikv.engine.engine import Engine
from minikv.engine.sampling import WINDOW, Sampling
from minikv.errors import ContextError, NumericsError
from minikv.models.llama import Llama

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_MULTIPLE", 16)


def begun(step: str, prompt: int, budget: int | None = 24, **given: Any) -> Pair:
    """A pair just after a prompt. budget: where there is a step policy."""
    run = pair(Eager(), "full", step, None if step == "none" else budget, **given)
    run.prompt(ids(prompt))
    return run


WARM = [Sampling(0.8), Sampling(1.5, top_k=5), Sampling(1.0, top_p=0.7, min_p=0.02)]
PENALIZED = [Sampling(repeat_penalty=1.6), Sampling(0.8, top_k=9, repeat_penalty=1.3)]


@pytest.mark.parametrize("sampling", [*WARM, *PENALIZED])
def test_draws_are_those_of_pick(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_loop, "_DRAWS", 4)  # so that numbers run out on the way
    tape = Tape()
    run = pair(tape, "full", "h2o", 24, sampling=sampling)
    run.prompt(ids(30))
    run.write(11)
    run.agree()
    assert tape.replayed > 6
    assert len(set(run.drawn)) > 2
    run.seed += 1
    run.write(3)
    assert tape.recorded == 1  # the settling in between and another seed change no address
    run.write(3, forced=5)  # each of these drops the step ahead, whose token was penalized already
    run.write(WINDOW, ahead=False)
    run.agree()


@pytest.mark.parametrize("fails", ["", "body", "end"])
def test_a_capture_that_fails_leaves_torch_able_to_go_on(fails: str, monkeypatch: Any) -> None:
    """Without a device: what torch is asked for, in which order; the first error is told."""
    asked: list[str] = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            asked.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self) -> None:
            asked.append("end")
            if fails:
                raise RuntimeError("the capture was invalidated")

        def replay(self) -> None: ...

    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        asked.append("stream")
        yield
        asked.append("left")

    def body() -> None:
        asked.append("body")
        if fails == "body":
            raise ValueError("not here")

    def told(name: str) -> Callable[..., None]:
        return lambda *given: asked.append(f"{name} {given}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "stream", on)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, told(name), raising=False)
    stream = SimpleNamespace(device=torch.device("cuda", 2))
    begun = ["stream", "begin (0, 7) thread_local", "body"]
    if not fails:
        assert captured(body, stream)  # type: ignore[arg-type]
        assert asked == [*begun, "end", "left"]
        return
    with pytest.raises(ValueError if fails == "body" else RuntimeError):
        captured(body, stream)  # type: ignore[arg-type]
    released = ["_cuda_endAllocateToPool (2, (0, 7))", "_cuda_releasePool (2, (0, 7))"]
    assert asked == [*begun, *["end"] * (2 if fails == "end" else 1), *released]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_turn_is_recorded_anew_only_where_addresses_are(keeps: bool, monkeypatch: Any) -> None:
    """A prompt is written to an arena of its own, and until then a chat can go back to the old one.
    On a GPU the first step then moves its rows to the place of the old ones, so that a graph holds
    for the whole chat; elsewhere nobody holds addresses."""
    monkeypatch.setattr(eviction, "_MULTIPLE", 64)  # the caps change from turn to turn
    tape = Tape()
    run = pair(tape, "adakv", "roco", 44)
    run.there.kv.keeps_addresses = keeps
    for turn in range(3):
        before = run.there.kv.share()
        run.prompt(ids(50 if turn == 0 else 6, turn))
        if turn == 1:  # a turn that an error ends, and that is asked again
            run.there.kv.restore(before)
            run.there.prompt(ids(6, turn))
        run.write(6)
        run.agree()
    recorded = 1 if keeps else 3
    assert (tape.warmed, tape.recorded) == (2 + 3, recorded)  # the first step of a turn ends none
    run.sampling = Sampling(0.7)
    run.write(5)
    run.agree()
    assert (tape.warmed, tape.recorded) == (4 + 4, recorded + 1)


@pytest.mark.parametrize("step", ["none", "h2o", "roco", "hashevict"])
@pytest.mark.parametrize("ahead", [False, True])
def test_single_steps_and_steps_ahead_may_alternate(step: str, ahead: bool) -> None:
    run = pair(Tape(), "full", step, 24)
    run.prompt(ids(22))
    for _ in range(3):
        run.write(3, ahead=ahead)
        logits = [each.step(run.token) for each in (run.here, run.there)]
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
        run.token = int(logits[0][:VOCAB].argmax())
        run.agree()


def test_an_equal_policy_is_configured_and_nothing_is_recorded_anew() -> None:
    tape = Tape()
    run = pair(tape, "full", "hashevict", 24)
    run.prompt(ids(40))
    run.write(5)
    for _ in range(2):
        for each in (run.here.kv, run.there.kv):
            each.configure(Rules(None, policies.step_policy("hashevict"), each.rules.budget))
        run.write(3)
        run.agree()
    assert run.there.notices == []
    assert (tape.warmed, tape.recorded) == (2 + 3, 1)


@pytest.mark.parametrize("step", ["none", *STEPS])
def test_a_stop_leaves_the_cache_as_if_nothing_had_been_begun(step: str) -> None:
    """The step after the last one is under way when the answer ends: it must not count. A policy
    that evicts before attention has none under way."""
    run = begun(step, 40)
    for turn in range(2):
        run.write(3 + turn)
        policy = run.there.kv.rules.step
        first = policy is not None and policy.evict_first
        assert (run.there._loop._early is None) == first  # type: ignore[union-attr]
        run.agree()
        run.prompt(ids(4, turn))  # it would differ if a row were missing
    run.write(3)
    run.there.kv.reset()
    assert run.there.kv.position == 0
    assert int(run.there.kv.arena.length.sum()) == 0


def test_nothing_is_launched_beyond_the_context() -> None:
    run = begun("roco", 36, net=network(layers=2, max_context=40))
    run.write(4)
    assert run.there._loop._early is None  # type: ignore[union-attr]
    run.agree()
    assert run.there.kv.position == 40
    with pytest.raises(ContextError):
        run.there.next(1, VOCAB, GREEDY, 0)
    run.agree()


def test_a_chat_is_set_aside_and_taken_up_with_a_step_under_way() -> None:
    run = begun("scissorhands", 30)
    run.write(3)
    kv = run.there.kv
    token, drawn = run.token, list(run.drawn)
    held = kv.snapshot()
    run.write(4)
    kv.restore(held, kv.rules)
    one = run.there.next(token, VOCAB, GREEDY, run.seed)
    assert [one] == run.drawn[len(drawn) :][:1]
    kv.configure(Rules(None, None, None))
    assert run.there.next(one, VOCAB, GREEDY, run.seed) >= 0


@pytest.mark.parametrize("step", ["roco", "hashevict", "none"])
@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize(
    ("fault", "error", "sampling"),
    [
        (None, NumericsError, GREEDY),
        (Mock(side_effect=KeyboardInterrupt), KeyboardInterrupt, GREEDY),
        (Mock(side_effect=RuntimeError("no such\nthing")), RuntimeError, GREEDY),
        (Mock(side_effect=RuntimeError), RuntimeError, Sampling(1.5)),
    ],
)
def test_a_step_that_fails_drops_the_cache(
    step: str, call: int, fault: Any, error: Any, sampling: Sampling
) -> None:
    """Also one that was launched ahead. The tokens before it are those of single steps, and the
    cache serves the next prompt as a new one does, whatever the error left in the device's
    memory."""
    run = begun(step, 30, sampling=sampling)
    loop: Any = run.there._loop
    net, calls = loop._network, itertools.count()

    def forward(tokens: torch.Tensor, kv: Attend) -> torch.Tensor:
        logits = net.forward(tokens, kv)
        if next(calls) != call:
            return logits
        if fault is not None:
            fault()
        return torch.full_like(logits, float("nan"))

    loop._network = SimpleNamespace(forward=forward)
    drawn, how = [run.token], (VOCAB, sampling, run.seed)
    with pytest.raises(error):
        drawn.extend(run.there.next(drawn[-1], *how) for _ in range(5))
    loop._network = net
    loop._draws.fill_(0.999)
    del drawn[0]
    assert call - 1 <= len(drawn) <= call
    for want in drawn:
        run.token = run.here.next(run.token, *how)
        assert run.token == want
    assert run.there.kv.position == 0
    assert int(run.there.kv.arena.length.sum()) == 0
    run.here.reset()
    run.prompt(ids(30))
    run.write(3)
    run.agree()


@pytest.mark.parametrize("step", ["none", "h2o", "hashevict", "rkv"])
def test_an_interrupt_at_any_line_counts_tokens_or_drops_the_cache(step: str, part: float) -> None:
    """Of two steps that are launched ahead, and of finishing them: the cache then has the rows of
    the tokens that it counts, or none."""
    net, dropped = network(layers=2), 0

    def written() -> Pair:
        run = begun(step, 30, net=net)
        run.write(2)
        return run

    def go(run: Pair) -> None:
        token = run.token
        for _ in range(2):
            token = run.there.next(token, VOCAB, GREEDY, run.seed)
        run.there.kv.settle()

    counted = AtLine(0, KeyboardInterrupt())
    whole = written()
    with counted:
        go(whole)
    lines = range(1, counted.count + 1)
    for at in random.Random(0).sample(lines, math.ceil(part * len(lines))):
        run = written()
        with contextlib.suppress(KeyboardInterrupt), AtLine(at, KeyboardInterrupt()):
            go(run)
        run.there.kv.abandon()
        run.there.kv.settle()
        counts = run.there.kv.position
        if counts == 0:
            assert int(run.there.kv.arena.length.sum()) == 0
            dropped += 1
            continue
        while run.here.kv.position < counts:
            run.token = run.here.next(run.token, VOCAB, GREEDY, run.seed)
        run.agree()
    assert dropped


def test_an_error_while_random_numbers_are_sent_leaves_none(monkeypatch: Any) -> None:
    """What is drawn after the conversation was read again is what a new one draws."""
    run, other = (begun("h2o", 30, sampling=Sampling(1.0)) for _ in "ab")
    made = torch.tensor

    def fail(values: object, **how: object) -> torch.Tensor:
        if how.get("dtype") == torch.float64:
            raise MemoryError
        return made(values, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_loop.torch, "tensor", fail)
    with pytest.raises(MemoryError):
        run.there.next(run.token, VOCAB, run.sampling, run.seed)
    monkeypatch.undo()
    monkeypatch.setattr(eviction, "_MULTIPLE", 16)
    run.here.reset()
    run.prompt(ids(30))
    for each in (run, other):
        each.write(5)
    assert run.drawn == other.drawn


def test_a_capture_that_fails_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    unable, error = Eager(), RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(unable, "record", Mock(side_effect=error))
    run = pair(unable, "adakv", "roco", 44)
    run.prompt(ids(50))
    run.write(2, ahead=False)  # warm
    for _ in range(3):
        how = (run.token, VOCAB, GREEDY, run.seed)
        run.token = run.here.next(*how)
        assert run.there.next(*how) == run.token
    (notice,) = run.there.notices
    assert "\n" not in notice
    run.agree()


def test_on_a_cpu_steps_are_single() -> None:
    """With any kernels; and what steps work with is freed when the cache is looked at."""
    net = network(layers=2)
    for kernels in ("torch", "auto"):
        cache = KVCache(shape(net), kernels=kernels)
        assert not Engine(net, cache).captured
        assert Engine(net, cache)._loop is None
    made = engine(net, "full", "roco", 24)
    made.prompt(ids(20))
    before = made.kv.stats().allocated_bytes
    token = made.next(5, VOCAB, GREEDY, 0)
    assert made.kv.decode.nbytes > 0
    assert made.kv.stats().allocated_bytes == before
    assert made.kv.position == 21
    made.next(token, VOCAB, GREEDY, 0)
    made.network = Mock(forward=Mock(side_effect=RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        made.next(1, VOCAB, GREEDY, 0)
    assert made.kv.position == 22  # no layer was computed


# -- on a GPU -------------------------------------------------------------------------------------


def _there(net: Llama, kernels: str, prompt: str = "full", step: str = "none") -> KVCache:
    """A cache beside those weights."""
    kv = engine(net, prompt, step, 44).kv
    own = {"output": kv.output, "rotary": net.rotation, "kernels": kernels}
    return KVCache(kv.shape, kv.rules, device="cuda", **own)  # type: ignore[arg-type]


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("step", ["none", *STEPS])
def test_a_captured_step_writes_what_the_host_writes(step: str, kernels: str) -> None:
    net = on_cuda(network(layers=2, head_dim=16))
    one = Engine(net, _there(net, kernels, "adakv", step), None)
    two = Engine(net, _there(net, kernels, "adakv", step))
    run = Pair(one, two)
    for turn in range(3):
        run.prompt(ids(60 if turn == 0 else 7, turn))
        run.write(12)
        run.agree()
        run.write(4, forced=turn)
        run.agree()
    writer = two._loop
    assert isinstance(writer._capture, CudaGraphs)
    assert writer.captured


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("step", ["none", "roco", "hashevict"])
def test_a_replay_waits_for_nothing(step: str) -> None:
    net = on_cuda(network(layers=2, head_dim=16))
    made = Engine(net, _there(net, "auto", step=step))
    made.prompt(ids(20))
    token = 1
    for _ in range(5):
        token = made.next(token, VOCAB, GREEDY, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            token = made.next(token, VOCAB, GREEDY, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.notices == []

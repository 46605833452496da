"""R-KV: what a row is worth, which rows leave, and how much memory it takes to find out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused
from small import VOCAB, Walk, engine, ids, network
from stepping import GREEDY, pair
from tape import Tape
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from views import asked, kept, read, write

from minikv import kernels, policies
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels
from minikv.policies import rkv, some_heads
from minikv.policies.base import StepView
from minikv.policies.rkv import RKV, redundancy, sums


def made(**options: object) -> RKV:
    policy = policies.step_policy("rkv", options)
    assert isinstance(policy, RKV)
    return policy


def test_a_buffer_is_not_smaller_than_the_window() -> None:
    made(window=16, buffer=16)
    says = "rkv: a buffer of 15 is smaller than the window of 16"
    refused(says, made, window=16, buffer=15)


# -- whole answers --------------------------------------------------------------------------------


def rows(
    seed: int, tokens: int, layers: int, heads: int, group: int, apart: float = 0.4
) -> tuple[Tensor, Tensor]:
    """Queries [L, N, H * G, D] and keys [L, N, H, D]; many keys are alike but for `apart`."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 8, generator=g)
    key = base[torch.randint(6, (layers, tokens, heads), generator=g)]
    key = key + apart * torch.randn(layers, tokens, heads, 8, generator=g)
    return 2 * torch.randn(layers, tokens, heads * group, 8, generator=g), key


class Slow:
    """One head, in plain Python: what `RKV` says in its docstring, row by row."""

    def __init__(self, policy: RKV, cap: int, window: int | None, held: list[int]) -> None:
        self.policy, self.cap, self.window, self.held = policy, cap, window, held
        self.seen: list[dict[int, float]] = []

    def step(self, at: int, query: Tensor, key: Tensor) -> None:
        """query [G, D]; key [N, D], of all positions."""
        self.held.append(at)
        if self.window is not None:
            self.held = [p for p in self.held if p > at - self.window]
        logits = query.double() @ key[self.held].double().T / math.sqrt(key.shape[1])
        p = logits.amax(0).softmax(0) if self.policy.group == "max" else logits.softmax(1).mean(0)
        if self.policy.group == "sum":
            p = p * len(query)
        self.seen = [dict(zip(self.held, p.tolist(), strict=True)), *self.seen]
        self.seen = self.seen[: self.policy.window]
        if len(self.held) == self.cap + self.policy.buffer:
            worth = self._worth(key.double())
            past = [p for p in self.held[: -self.policy.window] if p >= self.policy.sinks]
            gone = sorted(past, key=lambda p: worth[p])[: self.policy.buffer]
            self.held = [p for p in self.held if p not in gone]

    def _worth(self, key: Tensor) -> dict[int, float]:
        policy, held = self.policy, self.held
        red = dict.fromkeys(held, 0.0)
        for i in held:
            cosines = {j: float(key[i] @ key[j] / key[i].norm() / key[j].norm()) for j in held}
            del cosines[i]
            alike = [j for j, cosine in cosines.items() if cosine > policy.threshold]
            for j, cosine in cosines.items():
                if not alike or j != max(alike):
                    red[j] += cosine / len(held)
        total = sum(math.exp(r) for r in red.values())
        past = held[: -policy.window]
        attention = dict.fromkeys(past, 0.0)
        for seen in self.seen:
            mass = sum(seen.get(p, 0.0) for p in past) if policy.softmax == "past" else 1.0
            for p in past:
                attention[p] += seen.get(p, 0.0) / mass / policy.window
        half = policy.kernel // 2
        pooled = {
            p: max(attention[q] for q in past[max(0, i - half) : i + half + 1])
            for i, p in enumerate(past)
        }
        return {
            p: policy.mix * pooled[p] - (1 - policy.mix) * math.exp(red[p]) / total for p in past
        }


@pytest.mark.parametrize(
    ("options", "windows", "kv"),
    [
        ({}, (None, None), None),
        ({"group": "max", "softmax": "past"}, (None, None), None),
        ({"group": "sum", "sinks": 3, "kernel": 3, "threshold": 0.9}, (None, None), None),
        ({"mix": 0.9}, (None, 12), None),  # a layer whose rows slide out of sight
        ({"mix": 0.9}, (None, None), torch.int8),
    ],
)
def test_the_rows_that_stay_are_those_of_plain_python(
    options: dict[str, object], windows: tuple[int | None, ...], kv: torch.dtype | None
) -> None:
    """Heads at their cap give up a buffer at once and grow again, for two query heads a head."""
    policy, budget, first, tokens = made(**{"window": 4, "buffer": 6, **options}), 16, 14, 60
    query, key = rows(1, tokens, len(windows), 3, 2)
    form = Shape(len(windows), 3, 6, 8, windows, 1 << 20)
    cache = KVCache(form, Rules(None, policy, Budget.parse(budget)), kv=kv)
    stored = key if kv is None else kernels.from_codes(*kernels.to_codes(key), torch.float32)
    read(cache, query, key, 0, first)
    slow = [[Slow(policy, budget, window, [*range(first)]) for _ in range(3)] for window in windows]
    evictions = 0
    for at in range(first, tokens):
        write(cache, query, key, at, at + 1)
        for layer, window in enumerate(windows):
            for head in range(3):
                twin = slow[layer][head]
                groups = query[layer, at].view(3, 2, 8)
                twin.step(at, groups[head], stored[layer, :, head])
                seen = at + 1 - window if window is not None else -1
                mine = cache.kept(layer, head).tolist()
                assert [p for p in mine if p > seen] == [p for p in twin.held if p > seen]
                evictions += len(mine) == budget
    assert evictions >= 12


RELEASE = {
    0: [
        [0, 2, 3, 4, 5, 9, 10, 11, 13, 16, 17, 19, 25, 26, 27, 28, 30, 31, 32, 33],
        [1, 3, 5, 8, 11, 12, 13, 14, 15, 16, 17, 18, 20, 23, 25, 29, 30, 32, 34, 35],
    ],
    1: [
        [0, 1, 2, 3, 4, 6, 11, 12, 14, 15, 17, 18, 25, 29, 30, 31, 32, 33, 34, 35],
        [0, 3, 4, 7, 9, 10, 11, 12, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35],
    ],
}
"""What the release keeps before the window of 4, of 40 rows with a budget of 24, by seed and head:
its arithmetic, run outside of the project. Every key has one like it."""


@pytest.mark.parametrize("seed", RELEASE)
def test_the_release_keeps_the_same_rows(seed: int) -> None:
    query, key = rows(seed, 40, 1, 2, 2, apart=0.25)
    policy = made(window=4, buffer=16, group="max", softmax="past")
    cache = KVCache(Shape(1, 2, 4, 8, (None,), 1 << 20), Rules(None, policy, Budget.parse(24)))
    read(cache, query, key, 0, 24)
    for at in range(24, 40):
        assert len(cache.kept(0, 0)) == at
        write(cache, query, key, at, at + 1)
    assert kept(cache) == [[*early, 36, 37, 38, 39] for early in RELEASE[seed]]


# -- what it costs --------------------------------------------------------------------------------


def test_steps_that_evict_nothing_compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of two phases: every five steps one of them is full, from the 29th or the 31st token
    on."""
    called: list[int] = []
    compare = redundancy

    def listen(view: StepView, threshold: float) -> Tensor:
        called.append(int(view.position))
        return compare(view, threshold)

    monkeypatch.setattr(rkv, "redundancy", listen)
    run = engine(network(layers=1), "full", "rkv", 24, step_options={"window": 3, "buffer": 5})
    run.prompt(ids(24))
    run.kv.arena.cap[:, 1] = 26
    for token in ids(20):
        run.step(token)
    assert called == [29, 31, 34, 36, 39, 41, 44]


def test_steps_that_are_launched_ahead_are_recorded_with_an_eviction_and_without() -> None:
    """Both ways agree on every row, whenever the heads are full."""
    tape = Tape()
    run = pair(tape, "full", "rkv", 24, options={"window": 3, "buffer": 5})
    run.prompt(ids(24))
    for made in (run.here, run.there):
        made.kv.arena.cap[:, 1] = 26
    for _ in range(5):
        run.write(6)
        run.agree()
    assert (tape.warmed, tape.recorded) == (4 + 5, 2)  # the first step of an answer ends none
    assert tape.replayed > 15
    for _ in range(11):  # a step that nothing was launched behind evicts when it is settled
        run.write(1, ahead=False)
        run.agree()
        most = run.there.kv.arena.cap + 4
        assert bool((run.there.kv.arena.held <= most).all())


def test_beside_windows_a_step_looks_for_a_full_head_where_there_can_be_one() -> None:
    """Rows that slide out of a window, which no host foresees, only leave a head less full: there
    are steps that look and steps that do not, each recorded once."""
    tape = Tape()
    net = network(layers=2, windows=(None, 40))
    run = pair(tape, "full", "rkv", 24, options={"window": 3, "buffer": 12}, net=net)
    run.prompt(ids(44))
    for _ in range(8):
        run.write(5)
        run.agree()
    assert tape.recorded == 2
    assert tape.replayed > 15


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [one.numel() for one in tree_leaves(out) if isinstance(one, Tensor)]
        self.most = max([self.most, *made])
        return out


@pytest.mark.parametrize(
    ("heads", "wide", "size", "block"),
    [(2, 300, 8, 4000), (7, 40, 8, 4000), (1, 9, 8, 10), (40, 8, 64, 2000)],
)
def test_no_temporary_outgrows_the_block(
    heads: int, wide: int, size: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cosines of a head, or of all heads, are more, or all keys; and blocks change nothing."""
    g = torch.Generator().manual_seed(0)
    keys = torch.randn(heads, wide, size, generator=g)
    pos = torch.stack([torch.randperm(wide, generator=g) for _ in range(heads)])
    seen = asked(made(), wide, pos, {}, count=2, keys=lambda heads: keys[heads])
    want = redundancy(seen, 0.3)
    monkeypatch.setattr(some_heads, "AT_ONCE", block)
    assert heads * wide * max(wide, size) > block
    with Largest() as largest:
        got = redundancy(seen, 0.3)
    torch.testing.assert_close(got, want)
    assert largest.most <= max(block, wide * size, heads * wide)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_head_of_less_than_the_window_keeps_its_newest_rows(ahead: bool) -> None:
    """An adaptive budget leaves some heads one row: they still give up a whole buffer, the window's
    rows last, so that no head outgrows its memory."""
    config = EvictionConfig.read("l2+ada", "rkv", 8, {"alpha": 0.0, "sinks": 0, "recent": 0})
    config = replace(config, decode_options={**config.decode_options, "window": 5, "buffer": 6})
    walk = Walk(config)
    walk.prompt(ids(90))
    caps = walk.kv.arena.cap
    assert int(caps.min()) < 5
    if ahead:
        walk.engine = Engine(walk.net, walk.kv, Tape())
        walk.kv.use(Kernels())
    token, evicted = 1, 0
    for at in range(1, 21):
        if ahead:
            token = walk.engine.next(token, VOCAB, GREEDY, 0)
        else:
            walk.step(token)
        for rows_, cap in zip(kept(walk.kv), caps.flatten().tolist(), strict=True):
            assert len(rows_) < cap + 6
            if at >= 6 and len(rows_) == cap:
                newest = range(walk.kv.position - min(cap, 5), walk.kv.position)
                assert rows_[-len(newest) :] == [*newest]
                evicted += 1
    assert evicted == 18


def test_the_very_first_row_may_be_the_newest_that_is_alike() -> None:
    """Two keys alike, the older at position 0: each excuses the other. Nothing is left of them but
    what the third key, which is like none, has in common with them."""
    unit = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]]])
    for pos in ([0, 7, 9], [7, 0, 9], [3, 7, 9]):
        got = sums(unit, torch.tensor([pos], dtype=torch.int32), 0.9)
        torch.testing.assert_close(got, torch.tensor([[0.5, 0.5, 1.0]]), atol=1e-6, rtol=0)

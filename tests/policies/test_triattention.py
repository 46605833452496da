"""TriAttention: its formula, number by number, and what it learns of the queries of a chat."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measured import Watch
from small import engine, ids, network, over
from torch import Tensor
from views import asked, rule

from minikv.cache.budget import Budget
from minikv.cache.eviction import leaving
from minikv.cache.plan import Setup
from minikv.cache.rules import Rules
from minikv.cache.snapshot import CacheSnapshot
from minikv.engine.engine import Engine
from minikv.policies.moments import unrotated


def turning(inverse: Tensor) -> Any:
    """The rotation of one layer."""
    layers = [SimpleNamespace(inverse=inverse)]
    return SimpleNamespace(layers=layers, query_scale=lambda start, count: None)


def rotated(x: Tensor, pos: Tensor, inverse: Tensor) -> Tensor:
    """x [..., N, D], each row rotated by its position [N]."""
    return unrotated(x, -pos[:, None].double() * inverse.double(), None)


def by_hand(
    queries: Tensor, key: Tensor, pos: Tensor, now: int, inverse: Tensor, future: int, *, norm: bool
) -> list[list[float]]:
    """The paper's scores of one KV head, by query head and row: queries [G, T, D] and keys [N, D]
    before rotation."""
    pairs, found = key.shape[1] // 2, []
    for each in queries.tolist():
        worths = []
        for row, at in zip(key.tolist(), pos.tolist(), strict=True):
            worth = 0.0
            for f in range(pairs):
                q = [complex(one[f], one[f + pairs]) for one in each]
                k = complex(row[f], row[f + pairs])
                centre = sum(q) / len(q)
                length = sum(map(abs, q)) / len(q)
                phase = cmath.phase(centre) - cmath.phase(k)
                ahead = [1 << i for i in range(future.bit_length())]
                waves = [math.cos(float(inverse[f]) * (now + i - at) + phase) for i in ahead]
                worth += abs(centre) * abs(k) * sum(waves) / len(waves)
                concentration = abs(centre) / length
                worth += (1 - concentration) * length * abs(k) if norm else 0.0
            worths.append(worth)
        mean = sum(worths) / len(worths)
        spread = math.sqrt(sum((x - mean) ** 2 for x in worths) / len(worths))
        found.append([(x - mean) / spread for x in worths])
    return found


@pytest.mark.parametrize(("norm", "group"), [(True, 2), (False, 3), (True, 1)])
def test_the_formula_of_the_paper(norm: bool, group: int) -> None:
    draw = torch.Generator().manual_seed(group)
    heads, rows, size, now, future = 2, 9, 6, 40, 100
    inverse = torch.tensor([1.0, 0.1, 0.0])  # the last pair is not rotated
    queries = torch.randn(heads, group, 12, size, generator=draw) + 1.0
    key = torch.randn(heads, rows, size, generator=draw)
    pos = torch.stack([torch.randperm(30, generator=draw)[:rows] for _ in range(heads)])
    policy = rule("triattention", {"sinks": 0, "future": future, "norm": norm, "buffer": 1})
    learnt = torch.zeros(heads, policy.learnt_size(group, size))
    policy.learn(learnt, queries[:, :, :5])  # a prompt in two parts
    policy.learn(learnt, queries[:, :, 5:])
    stored = torch.stack([rotated(key[h], pos[h], inverse) for h in range(heads)])
    known = {"keys": lambda some: stored[some], "learnt": learnt, "rotary": turning(inverse)}
    seen = asked(policy, now + 1, pos, {}, **known)  # tokens counted: the last one is at `now`
    for h, found in enumerate(policy.score(seen)):
        want = by_hand(queries[h], key[h], pos[h], now, inverse, future, norm=norm)
        torch.testing.assert_close(
            found, torch.tensor(want).amax(0), rtol=1e-4, atol=1e-4, check_dtype=False
        )


def test_rows_that_may_not_leave_count_for_nothing() -> None:
    """Whatever their keys are, also where there is no row."""
    policy = rule("triattention", {"sinks": 1, "recent": 1, "buffer": 1})
    learnt = torch.zeros(1, policy.learnt_size(1, 2))
    policy.learn(learnt, torch.tensor([[[[1.0, 0.0]]]]))
    pos = torch.tensor([[0, 1, 2, 3, -1]])
    worths = []
    for other in (1.0, math.nan):
        key = torch.tensor([[[other, 0], [1, 0], [3, 0], [other, 0], [other, 0]]])
        known = {"keys": lambda some, key=key: key[some], "learnt": learnt}
        seen = asked(policy, 4, pos, {}, **known, rotary=turning(torch.zeros(1)))
        worths.append(policy.worth(seen))
        assert leaving(worths[-1], pos, torch.tensor([1])).tolist() == [[False, True] + [False] * 3]
    torch.testing.assert_close(*worths)


def test_it_learns_from_every_prompt_and_answer() -> None:
    """A snapshot has it, and what is learnt after it does not change it."""
    run = engine(network(), "h2o", "triattention", 12)
    run.prompt(ids(40))

    def queries() -> set[float]:
        learnt = run.kv.snapshot().state.outcome.learnt
        assert learnt is not None
        return set(learnt[..., 0].flatten().tolist())

    assert queries() == {40}
    for token in ids(3, 1):
        run.step(token)
    assert queries() == {43}
    held = run.kv.snapshot()
    run.prompt(ids(10, 2))
    for token in ids(2, 3):
        run.step(token)
    assert queries() == {55}
    again = CacheSnapshot.read(held.record(), held.columns)
    run.kv.restore(again)
    assert queries() == {43}
    assert torch.equal(again.state.outcome.learnt, held.state.outcome.learnt)
    rules = run.kv.rules
    run.kv.configure(replace(rules, step=rule("h2o", {})))  # which cannot use what is known
    assert run.kv.snapshot().state.outcome.learnt is None
    run.kv.restore(held, rules)
    assert queries() == {43}
    short = held.record() | {"learnt": [[[1.0]]]}
    with pytest.raises(ValueError, match="another network or policy"):
        run.kv.restore(CacheSnapshot.read(short, held.columns))
    for number in (math.nan, math.inf, 1e39):
        learnt = held.record()["learnt"]
        assert isinstance(learnt, list)
        learnt[0][0][0] = number
        with pytest.raises(ValueError, match="numbers that no queries have"):
            CacheSnapshot.read(held.record() | {"learnt": learnt}, held.columns)
    run.kv.cut(50)  # a part of what was learnt cannot be taken back
    assert (run.kv.position, run.kv.snapshot().state.outcome.learnt) == (0, None)


def test_as_many_rows_leave_whatever_their_scores_are() -> None:
    scores = torch.tensor([[math.nan] * 4 + [math.inf], [2.0, math.nan, 1.0, 3.0, -math.inf]])
    pos = torch.arange(5).expand(2, 5)
    gone = leaving(scores, pos, torch.tensor([2, 2]))
    assert gone.tolist() == [[True, True, False, False, False], [False, True, False, False, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_takes_as_much_memory_as_is_planned(dtype: torch.dtype) -> None:
    """Whatever a chunk's length: 16 bytes for each of the `block` numbers that are read at once."""
    net = network(heads=8, kv_heads=2, head_dim=64)
    kv = over(net, Rules(None, rule("triattention", {}), Budget.parse(24)))
    setup = Setup(kv.shape, kv.rules, dtype, dtype, kv.ops, rotary=net.rotation)
    learnt, q = setup.to_learn(kv.device), torch.zeros(4000, 8, 64, dtype=dtype)
    assert learnt is not None
    with torch.inference_mode(), Watch(learnt, q) as watch:
        setup.learn(learnt, 0, q, 0)
    assert 8 * kv.ops.block < watch.peak <= 17 * kv.ops.block
    assert learnt[0, :, 0].tolist() == [4000, 4000]


@pytest.mark.parametrize("stride", [0, 8])
def test_queries_are_learnt_before_rotation(stride: int) -> None:
    """Of one token at position 0, and of the same token at later ones, in the first layer."""
    net, means = network(), []
    for count in (1, 24):
        rules = Rules(None, rule("triattention", {"buffer": 2}), Budget.parse(24), stride)
        run = Engine(net, over(net, rules))
        run.prompt([7] * count)
        for _ in range(2):
            run.step(7)
        found = run.kv.snapshot().state.outcome.learnt
        assert found is not None
        assert set(found[..., 0].flatten().tolist()) == {count + 2}
        means.append(found[0] / found[0, :, :1])
    torch.testing.assert_close(means[0][:, 1:], means[1][:, 1:], rtol=1e-4, atol=1e-4)

"""What is true of every policy, and of some for any prompt, as properties.

What is not here is tested beside the code that it is about.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import some_by_day
from small import (
    COMPOSITIONS,
    FAMILIES,
    PAIRS,
    Dense,
    by_day,
    engine,
    ids,
    least,
    network,
    over,
    spell,
)
from torch import Tensor
from views import asked, build, kept, read, rule, view, write

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.engine import Engine
from minikv.models.rope import frequencies
from minikv.policies.base import PromptView, StepPolicy
from minikv.policies.moments import Moments
from minikv.policies.parts import PromptPolicy
from minikv.policies.selection import blocks

BRIEF = settings(max_examples=20, deadline=None, derandomize=True, database=None)
SEEDS = st.integers(0, 1 << 30)


Rows = tuple[Tensor, Tensor]
"""Queries [L, N, H * G, D] and keys [L, N, H, D]."""


def rows(seed: int, tokens: int, *, layers: int = 1, heads: int = 2, group: int = 2) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(layers, tokens, heads * group, 8, generator=generator)
    return query, torch.randn(layers, tokens, heads, 8, generator=generator)


def cache(
    made: Rows, prompt: PromptPolicy | None, step: StepPolicy | None, budget: int, stride: int = 0
) -> KVCache:
    layers, _, heads, size = made[1].shape
    form = Shape(layers, heads, made[0].shape[2], size, (None,) * layers, 1 << 20)
    return KVCache(form, Rules(prompt, step, Budget.parse(budget), stride))


@given(st.sampled_from(COMPOSITIONS), st.integers(0, 4), st.sampled_from(policies.step_names()))
@BRIEF
def test_any_composition_on_a_large_budget_changes_no_bit(
    words: tuple[str, ...], outside: int, decode: str
) -> None:
    """Nothing is evicted, so nothing is computed differently."""
    eviction = EvictionConfig.read(spell(words, outside), decode, 200)
    assert least(eviction) <= 200
    net = network(layers=2)
    run, dense = Engine(net, over(net, eviction.rules())), Dense(net)
    for turn in range(2):
        tokens = ids(40 - 9 * turn, seed=turn)
        assert torch.equal(run.prompt(tokens), dense.prompt(tokens))
        for token in range(3):
            assert torch.equal(run.step(token), dense.step(token))
    assert run.kv.stats().evicted == 0


@pytest.mark.parametrize("stride", [0, 4])
@given(SEEDS, st.integers(1, 32))
@BRIEF
def test_rocos_counters_are_ages(stride: int, seed: int, first: int) -> None:
    """Of every survivor, the queries since its own, that one included. A prompt of
    more tokens than are observed is the only place where less is counted."""
    made = rows(seed, first + 60, group=1)
    policy = rule("roco")
    assert policy.observe >= first
    kv = cache(made, None, policy, 24, stride)
    read(kv, *made, 0, first)
    write(kv, *made, first, first + 45)
    read(kv, *made, first + 45, first + 60)
    index, live = kv.arena.index(0)
    pos, count = (kv.arena.columns[name][index][live] for name in ("pos", "count"))
    assert torch.equal(count, (kv.position - pos).float())
    assert len(count) < 2 * kv.position


@pytest.mark.parametrize("examples", some_by_day([8, 20], lambda count: count == 8))
def test_streaming_is_the_same_however_rows_come(examples: int) -> None:
    """As one prompt, in several, in blocks, token by token, and for any network."""
    drawn = given(SEEDS, st.integers(0, 6), st.integers(16, 40), st.integers(1, 80), st.data())
    settings(BRIEF, max_examples=examples)(drawn(streamed))()


def streamed(seed: int, sinks: int, budget: int, tokens: int, data: st.DataObject) -> None:
    given = {"sinks": sinks}
    prompt, decode = build("streaming", given), rule("streaming", given)
    first, newest = min(sinks, tokens), min(tokens, budget)
    want = [*range(first), *range(max(first, tokens - (newest - first)), tokens)]
    cut = data.draw(st.integers(1, tokens))
    kinds = [  # (prompt policy, stride, ends of the prompts, the rest is an answer)
        (prompt, 0, [tokens]),
        (prompt, 0, [cut, tokens]),
        (prompt, 0, [cut]),
        (None, 0, [1]),
        (None, 1, [tokens]),
        (None, 8, [cut, tokens]),
        (None, 8, [cut]),
    ]
    for i, (policy, stride, ends) in enumerate(kinds):
        made = rows(seed + i, tokens)
        kv = cache(made, policy, decode, budget, stride)
        for lo, hi in itertools.pairwise([0, *dict.fromkeys(ends)]):
            read(kv, *made, lo, hi)
        write(kv, *made, ends[-1], tokens)
        assert kept(kv) == [want] * 2, (i, ends)


@pytest.mark.parametrize(("prompt", "decode"), by_day(PAIRS))
def test_the_same_seed_keeps_the_same_rows(prompt: str, decode: str) -> None:
    """On one device: nothing is left to a global generator or to an order."""
    found = []
    for noise in range(2):
        torch.manual_seed(noise)
        net = network(layers=2)
        run = engine(net, prompt, decode, 48)
        run.prompt(ids(90))
        for token in range(4):
            run.step(token)
        run.prompt(ids(30, seed=1))
        found.append(kept(run.kv))
    assert found[0] == found[1]


def test_the_newest_row_never_leaves_even_where_all_are_protected() -> None:
    """Of a head with sinks alone the others may, so that a cap can be held."""
    policy = rule("tova", {"sinks": 4})
    pos = torch.tensor([[0, 1, 9, -1], [0, 7, 8, 9]])
    free = [[True, True, False, False], [False, True, True, False]]
    assert policy.free(pos, 10, 1).tolist() == free
    assert policy.free(pos, 10, torch.tensor([[1], [2]])).tolist() == free
    few = policy.free(pos, 10, torch.tensor([[0], [3]]))
    assert few.tolist() == [[False] * 4, [True, True, True, False]]
    streaming = rule("streaming", {"sinks": 4})  # where two leave, sinks may; row 4 is none
    two = asked(streaming, 6, torch.arange(5)[None], {}, count=2)
    assert streaming.worth(two).tolist() == [[0.0, -1.0, -2.0, -3.0, 4.0]]


def test_moments_are_the_mean_and_covariance_of_all_queries() -> None:
    """Of queries that come in pieces, after their rotation is undone."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(2, 3, 50, 8, generator=generator, dtype=torch.float64) + 1.0
    inverse, at = torch.rand(4, generator=generator, dtype=torch.float64), torch.arange(50)
    rotation: Any = SimpleNamespace(
        layers=[SimpleNamespace(inverse=inverse)], query_scale=lambda start, count: None
    )
    angle = at[:, None] * inverse
    one, two = plain.chunk(2, -1)
    turned = torch.cat(
        (one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), -1
    )
    found = Moments(2, 3, 8, torch.device("cpu"))
    for lo, hi in ((0, 7), (7, 7), (7, 50)):
        found.add(turned[:, :, lo:hi], rotation, 0, at[lo:hi])
    mean, covariance = found.normal(torch.eye(8))
    torch.testing.assert_close(mean, plain.mean(2).float())
    want = [torch.cov(q.T, correction=0) for head in plain for q in head]
    torch.testing.assert_close(covariance.flatten(0, 1), torch.stack(want).float())


@pytest.mark.parametrize("family", ["", *FAMILIES])
def test_future_queries_are_the_networks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their mean is that of the prompt's queries before position changed them, and is then changed
    as the network changes a query at each future position: with its rotation, if the layer has
    one, and its factor."""
    net, tokens, future = network(rows=64, **FAMILIES.get(family, {})), ids(60), 40
    policy = policies.prompt_policy(
        "expected", {"future": future, "covariance": False, "value_norm": False, "recent": 0}
    )
    kv, c = over(net, Rules(policy, None, Budget.parse(20))), net.config
    seen: list[Tensor] = []
    rotate, scorer = net.ops.rotate, policies.find("expected").parts[0]

    def listen(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        seen.append(x.clone())
        return rotate(x, cos, sin)

    def check(self: Any, view: PromptView) -> Tensor:
        found: Tensor = score(self, view)
        beta, original = c.rope.query_beta, c.rope.original or 1

        def factor(at: Tensor) -> Tensor:
            return c.query_scale * (1 + beta * (1 + at // original).log())[:, None, None]

        query = seen[view.layer][:, : c.heads] / factor(torch.arange(60.0))
        mean, rope = query[4:].mean(0), c.ropes[view.layer]
        (inverse, more), at = frequencies(rope, c.head_dim), torch.arange(60.0, 60 + future)
        angle = at[:, None, None] * inverse
        cos, sin = (angle.cos(), angle.sin()) if rope.kind != "none" else (1.0, 0.0)
        one, two = mean.chunk(2, -1)
        turned = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
        later = (turned * factor(at) * more).mean(0)
        logits = torch.einsum("hgd,hnd->hgn", later.unflatten(0, (c.kv_heads, -1)), view.key())
        free = (view.pos >= 4)[:, None]
        want = (logits / c.head_dim**0.5).masked_fill(~free, -torch.inf).softmax(-1).mean(1)
        torch.testing.assert_close(found, want, rtol=2e-4, atol=1e-6)
        return found

    score = scorer.score
    monkeypatch.setattr(net.ops, "rotate", listen)
    monkeypatch.setattr(scorer, "score", check)
    Engine(net, kv).prompt(tokens)
    assert len(seen) == c.layers


@pytest.mark.parametrize("kv", [None, torch.int8], ids=["", "int8"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("keydiff", {}),
        ("keydiff", {"block": 7}),
        ("expected", {}),
        ("snapkv+critical", {}),
        ("global-span+uniform", {}),
        ("dropkv", {}),
        ("defensive", {}),
    ],
)
def test_heads_that_are_computed_at_once_keep_what_each_keeps_alone(
    name: str, options: dict[str, object], kv: torch.dtype | None
) -> None:
    """Of two prompts, in blocks of one head and of all heads."""
    net, found = network(), []
    for most in (1, 1 << 22):
        rules = Rules(policies.prompt_policy(name, options), None, Budget.parse(40))
        run = Engine(net, over(net, rules, kv=kv))
        run.kv.ops.block = most
        for turn, count in enumerate((90, 30)):
            run.prompt(ids(count, turn))
            found.append(kept(run.kv))
    assert found[:2] == found[2:]


def test_heads_are_divided_by_how_many_numbers_they_have() -> None:
    def cut(*given: int) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in blocks(*given)]

    assert cut(5, 10, 20) == [(0, 2), (2, 4), (4, 5)]
    assert cut(5, 10, 29) == [(0, 2), (2, 4), (4, 5)]
    assert cut(3, 10, 9) == [(0, 1), (1, 2), (2, 3)]  # at least one
    assert cut(3, 0, 3) == [(0, 3)]
    assert cut(0, 10, 20) == []


def test_a_window_as_long_as_the_prompt_protects_its_first_row_too() -> None:
    seen = view(torch.ones(1, 1, 4))
    assert seen.divide(0, 4)[0].tolist() == seen.divide(0, 9)[0].tolist() == [[True] * 4]
    assert seen.divide(0, 3)[0].tolist() == [[False, True, True, True]]
    assert seen.divide(1, 2)[0].tolist() == [[True, False, True, True]]
    assert seen.divide(0, 0)[0].tolist() == [[False] * 4]

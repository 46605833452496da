"""A policy that asks for a second pass over the text before anything leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from small import ids, network, over
from test_global_pool import Global
from torch import Tensor

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.engine.engine import Engine
from minikv.errors import ContextError
from minikv.models.llama import Llama
from minikv.policies.base import ALL, Evidence, LayerAllocator, PromptPolicy, PromptView, Scorer


class Mass(Scorer):
    """What the observed queries gave each row; what was seen is written down."""

    def __init__(self, passes: bool) -> None:
        self.passes = passes
        self.seen: dict[int, PromptView] = {}

    @property
    def evidence(self) -> Evidence:
        return Evidence(observe=ALL, sinks=2, second_pass=self.passes)

    def second_pass(self, ids: Sequence[int]) -> Sequence[Sequence[int]]:
        return repeat(ids)

    def score(self, view: PromptView) -> Tensor:
        assert view.mass is not None
        self.seen[view.layer] = replace(view, mass=view.mass.clone())
        return view.mass.mean(1)


def repeat(text: Sequence[int]) -> list[list[int]]:
    """The text in two parts, each after a word that asks for it."""
    return [[7, *text[:25]], [7, 8, *text[25:]]]


def made(
    net: Llama,
    budget: int,
    step: str = "none",
    *,
    kv: torch.dtype | None = None,
    layers: object = None,
    passes: bool = True,
) -> tuple[Engine, Mass]:
    scorer = Mass(passes)
    policy = PromptPolicy(
        name="repeat",
        scorer=scorer,
        layers=layers or LayerAllocator(),  # type: ignore[arg-type]
    )
    cache = over(net, policy, policies.step_policy(step), Budget.parse(budget), kv=kv)
    return Engine(net, cache), scorer


def kept(kv: KVCache) -> list[list[int]]:
    return [kv.kept(i, h).tolist() for i in range(3) for h in range(3)]


@pytest.mark.parametrize("kv", [None, torch.int8])
@pytest.mark.parametrize("windows", [None, (20, None, 60)])
def test_the_rows_are_scored_by_the_passes(
    windows: tuple[int | None, ...] | None, kv: torch.dtype | None
) -> None:
    """Of a first prompt and of a second: the mass is that of each text, read as a next prompt of a
    cache that has lost nothing; the rows of most mass stay, and nothing of the texts."""
    net = network(windows=windows)
    run, scorer = made(net, 15, "roco", kv=kv)
    run.prompt(ids(60))
    for layer in range(3):
        view = scorer.seen[layer]
        total = torch.zeros(())
        for text in repeat(ids(60)):
            other, theirs = made(net, 1000, kv=kv, passes=False)
            other.prompt(ids(60))
            other.kv.configure(other.kv.prompt_policy, None, Budget.parse(15))
            other.prompt(text)
            at = theirs.seen[layer]
            rows = at.pos.shape[1] - len(text)
            mass = torch.zeros(3, 2, 60)
            assert at.mass is not None
            place = torch.arange(60 - rows, 60).expand(3, 2, -1)
            mass.scatter_(2, place, at.mass[..., :rows])
            total = total + mass
        assert view.mass is not None
        assert view.observed == 63
        found = torch.zeros(3, 2, 60).scatter_(2, view.pos[:, None].expand(-1, 2, -1), view.mass)
        torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-5)
        for h in range(3):
            live = view.pos[h].tolist()
            best = sorted(live, key=lambda p: (p >= 2, -float(found[h, :, p].mean()), -p))
            assert run.kv.kept(layer, h).tolist() == sorted(best[:15])
    assert run.kv.position == 60
    assert (run.kv.arena.cap == 15).all()
    for token in ids(5):
        assert bool(torch.isfinite(run.step(token)).all())
    run.prompt(ids(50, seed=1))
    assert all(len(rows) == 15 and rows[-1] < 115 for rows in kept(run.kv))


def test_no_text_is_fed_where_nothing_leaves() -> None:
    net = network()
    run, scorer = made(net, 100)
    run.prompt(ids(60))
    assert scorer.seen == {}
    assert run.kv.stats().kept_min == 60


def test_columns_come_from_the_prompt_itself() -> None:
    """RoCo's sums are those of the prompt's last queries, whatever the passes looked at."""
    net = network()
    run, _ = made(net, 15, "roco")
    run.prompt(ids(60))
    full = Engine(net, over(net, None, policies.step_policy("roco"), Budget.parse(100)))
    full.prompt(ids(60))
    for layer in range(3):
        for h in range(3):
            at = run.kv.arena.segment("pos", layer, h).long()
            for name in ("k", "v", "sum", "squares", "count"):
                mine = run.kv.arena.segment(name, layer, h)
                assert torch.equal(mine, full.kv.arena.segment(name, layer, h)[at]), name


def test_one_budget_for_all_layers_after_a_second_pass() -> None:
    """Both seams at once, as KVzip needs them."""
    net = network()
    run, scorer = made(net, 15, "roco", layers=Global())
    run.prompt(ids(60))
    rows = []
    for layer, view in scorer.seen.items():
        assert view.mass is not None
        worth = view.mass.mean(1) * (1 + 0.1 * layer)
        rows += [(p >= 2, -float(worth[h, p]), -p, layer, h) for h in range(3) for p in range(60)]
    rows.sort()
    want: list[list[int]] = [[] for _ in range(9)]
    for _, _, p, layer, h in rows[: 15 * 9]:
        want[3 * layer + h].append(-p)
    assert kept(run.kv) == [sorted(some) for some in want]
    assert len({*map(len, want)}) > 1


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_pass_that_fails_leaves_the_cache_as_it_was(call: int) -> None:
    """Stopped in the prompt, in the first pass and in the second."""
    net = network()
    run, _ = made(net, 15, "roco")
    twin, _ = made(net, 15, "roco")
    for each in (run, twin):
        each.prompt(ids(60))
        each.step(3)
    before, forward, calls = kept(run.kv), net.forward, []

    def fail(tokens: Tensor, kv: object) -> Tensor:
        calls.append(len(tokens))
        out = forward(tokens, kv)  # type: ignore[arg-type]
        if len(calls) == call:
            raise KeyboardInterrupt
        return out

    net.forward = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.prompt(ids(50, seed=1))
    net.forward = forward  # type: ignore[method-assign]
    assert calls == [50, 26, 27][:call]
    assert kept(run.kv) == before
    assert run.kv.position == 61
    assert torch.equal(run.prompt(ids(50, seed=1)), twin.prompt(ids(50, seed=1)))
    assert kept(run.kv) == kept(twin.kv)


def test_texts_must_fit_the_context() -> None:
    run, _ = made(network(max_context=80), 15)
    with pytest.raises(ContextError, match="takes 26 positions more, and 20 are left"):
        run.prompt(ids(60))
    assert run.kv.position == 0

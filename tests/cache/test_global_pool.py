"""One budget for all layers and heads: against all rows of all layers, sorted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import segment
from small import ids, network, over
from spy import Spy
from torch import Tensor
from views import build, kept

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.rules import Rules
from minikv.engine.engine import Engine
from minikv.policies.base import PromptView
from minikv.policies.parts import GlobalBudget, PromptPolicy

Seen = dict[int, tuple[Tensor, Tensor, Tensor]]  # by layer: scores, positions, what is protected


def policy(name: str, options: dict[str, object] | None = None) -> tuple[PromptPolicy, Seen]:
    made, seen = build(name, options), Seen()

    def note(view: PromptView, scores: Tensor) -> None:
        seen[view.layer] = scores, view.pos, view.divide(*made.scorer.protected(view))[0]

    return replace(made, scorer=Spy(made.scorer, note), layers=GlobalBudget()), seen


def expected(
    seen: Seen, total: int, pinned: int, least: int, edge: int, turns: Any
) -> list[list[int]]:
    """The positions that stay: protected rows, each head's best, the ends of turns, the best."""
    rows = []
    for layer, (scores, pos, protected) in seen.items():
        for h in range(len(pos)):
            live = [i for i in range(pos.shape[1]) if int(pos[h, i]) >= 0]
            at = {i: int(pos[h, i]) for i in live}
            worth = {i: float(scores[h, i]) for i in live}
            sure = {i for i in live if protected[h, i] or at[i] < pinned}
            own = sum(at[i] >= pinned for i in sure)
            order = sorted((i for i in live if i not in sure), key=lambda i: (-worth[i], -at[i]))
            sure |= set(order[: max(0, least - own)])
            for i in live:
                ends = any(
                    a <= at[i] < b and (at[i] < a + edge or at[i] >= b - edge) for a, b in turns
                )
                rows.append((i not in sure, not ends, -worth[i], -at[i], layer, h))
    rows.sort()
    stay: list[list[int]] = [[] for _ in range(3 * len(seen))]
    for *_, at_, layer, h in rows[:total]:
        stay[3 * layer + h].append(-at_)
    return [sorted(head) for head in stay]


@pytest.mark.parametrize("kv", [None, torch.int8])
@pytest.mark.parametrize("windows", [None, (24, None, 60)])
@pytest.mark.parametrize(
    ("name", "step", "options"),
    [
        ("snapkv", "roco", {"window": 4, "kernel": 1}),
        ("tova", "none", {}),
        ("h2o+turns", "hashevict", {"edge": 3}),
        ("l2", "streaming", {}),
    ],
)
def test_the_best_rows_of_all_layers_stay(
    name: str,
    step: str,
    options: dict[str, object],
    windows: tuple[int | None, ...] | None,
    kv: torch.dtype | None,
) -> None:
    """Three prompts and answers between them; the second time under the budget of many rows."""
    net = network(windows=windows)
    prompt, seen = policy(name, options)
    stepper = policies.step_policy(step)
    cache = over(net, Rules(prompt, stepper, Budget.parse(30)), kv=kv)
    cache.pin(2)
    run = Engine(net, cache)
    least = 2 if stepper is not None and stepper.evict_first and stepper.recent else 1
    turns, spread_out = [], False
    for turn in range(3):
        turns.append((cache.position, cache.position + 50))
        run.prompt(ids(50, seed=turn))
        edge = int(str(options.get("edge", 0)))
        want = expected(seen, 9 * 30, 2, least, edge, turns)
        found = kept(cache)
        assert found == want
        sizes = [sum(map(len, found[layer : layer + 3])) for layer in (0, 3, 6)]
        spread_out |= len({*sizes}) > 1
        assert sum(sizes) <= 270
        arena = cache.arena
        assert int(arena.cap.sum()) == 270
        for layer in range(3):
            for h in range(3):
                pos = segment(arena, "pos", layer, h).tolist()
                assert pos == sorted(pos) == found[3 * layer + h]
                for column in arena.extra:
                    assert bool(torch.isfinite(segment(arena, column, layer, h).float()).all())
        measured = any(lost is not None for lost in cache.state.outcome.lost)
        assert measured == (sum(sizes) == 270 and name != "l2")
        for token in ids(6, seed=turn):
            assert bool(torch.isfinite(run.step(token)).all())
    assert spread_out


def test_the_tables_say_where_the_rows_lie() -> None:
    """Segments follow each other without a gap; each has its rows, its cap and the room above it;
    without a step policy the heads own all but the pool's last row."""
    net = network()
    for step, spare in (("roco", 1), ("streaming", 0), (None, None)):
        prompt, _ = policy("snapkv")
        made = policies.step_policy(step) if step else None
        run = Engine(net, over(net, Rules(prompt, made, Budget.parse(40))))
        for tokens in (30, 80):
            run.prompt(ids(tokens), room=7)
            arena = run.kv.arena
            start, capacity = arena.start.flatten(), arena.capacity.flatten()
            assert start.tolist() == (capacity.cumsum(0) - capacity).tolist()
            assert arena.region[:3] == arena.start[:, 0].tolist()
            assert int(arena.cap.sum()) == 9 * 40
            assert bool((arena.length <= arena.cap).all())
            if spare is None:
                assert int(capacity.sum()) == arena.rows - 1
                assert bool((arena.capacity >= arena.cap + 7).all())
            else:
                assert torch.equal(arena.capacity, arena.cap + spare)
            assert bool((arena.free_slot == -1).all())

"""`+global`: one budget over all layers and heads, for every scorer."""

from __future__ import annotations

import pytest
import torch
from small import engine, ids, network
from views import build

from minikv import policies
from minikv.errors import UsageError
from minikv.policies.global_budget import GlobalBudget

SCORERS = [name for name in policies.prompt_names() if len(policies.find(name).parts) == 1]


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_takes_it(name: str) -> None:
    """The cache holds the budget to the row, over all layers together, prompt after prompt."""
    net = network(layers=2)
    run = engine(net, f"{name}+global", "none", 50)
    for turn in range(2):
        run.prompt(ids(90, seed=turn))
        assert int(run.kv.arena.held.sum()) == 50 * 2 * 3
        run.step(turn)


def test_the_best_rows_of_the_whole_cache_stay() -> None:
    """Against all scores of all layers, sorted: tova's, under which only the newest row is sure."""
    net = network()
    scores = {}
    run = engine(net, "tova+global", "none", 20, prompt_options={"per_head": True})
    policy = run.kv.rules.prompt
    assert policy is not None
    score = type(policy.scorer).score

    def listen(scorer: object, view: policies.base.PromptView) -> torch.Tensor:
        scores[view.layer] = score(scorer, view)  # type: ignore[arg-type]
        return scores[view.layer]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(policy.scorer), "score", listen)
        run.prompt(ids(90))
    rows = [
        (-float(scores[layer][h, p]), -p, layer, h)
        for layer in range(3)
        for h in range(3)
        for p in range(89)
    ]
    best = sorted(rows)[: 20 * 9 - 9]
    for layer in range(3):
        for h in range(3):
            want = sorted(-p for _, p, *at in best if at == [layer, h])
            assert run.kv.kept(layer, h).tolist() == [*want, 89]
    assert len({int(n) for n in run.kv.arena.held.flatten()}) > 1


def test_a_prompt_below_the_budget_keeps_everything_whatever_is_observed() -> None:
    run = engine(network(), "defensive+global", "none", 100)
    run.prompt(ids(40))
    assert run.kv.stats().kept_min == 40


@pytest.mark.parametrize("part", ["ada", "kvcrush", "draw", "critical"])
def test_nothing_shares_among_heads_beside_it(part: str) -> None:
    with pytest.raises(UsageError, match=f"leaves {part} nothing to share") as refused:
        policies.find(f"snapkv+global+{part}")
    assert refused.value.exit_code == 2
    with pytest.raises(UsageError, match="global and pyramid answer the same question"):
        policies.find("snapkv+global+pyramid")


def test_it_is_named_and_described() -> None:
    info = policies.find("l2+global+turns")
    assert info.shape == "one for all layers and heads"
    assert isinstance(build(info.name).layers, GlobalBudget)
    with pytest.raises(UsageError, match="leaves no layer whole"):
        build("l2+global", {"skip": 2})


def test_the_ends_of_turns_leave_after_all_others() -> None:
    run = engine(network(), "tova+global+turns", "none", 30, prompt_options={"edge": 4})
    run.prompt(ids(90))
    edges = {*range(4), *range(86, 90)}
    for layer in range(3):
        for head in range(3):
            assert edges <= set(run.kv.kept(layer, head).tolist())
    assert int(run.kv.arena.held.sum()) == 30 * 9

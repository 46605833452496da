"""`+global`: one budget over all layers and heads, for every scorer."""

from __future__ import annotations

import pytest
from small import engine, ids, network
from views import build, kept

from minikv import policies
from minikv.errors import UsageError
from minikv.policies.parts import GlobalBudget


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
    assert all(edges <= {*rows} for rows in kept(run.kv))
    assert int(run.kv.arena.held.sum()) == 30 * 9

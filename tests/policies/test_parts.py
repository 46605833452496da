"""`+global`: one budget over all layers and heads, for every scorer. `+turns`: the ends of turns
are preferred."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from small import engine, ids, network
from views import build, kept, view

from minikv import policies
from minikv.policies.parts import GlobalBudget


def test_a_prompt_below_the_budget_keeps_everything_whatever_is_observed() -> None:
    run = engine(network(), "defensive+global", "none", 100)
    run.prompt(ids(40))
    assert run.kv.stats().kept_min == 40


@pytest.mark.parametrize("part", ["ada", "kvcrush", "draw", "critical"])
def test_nothing_shares_among_heads_beside_it(part: str) -> None:
    error = refused(f"leaves {part} nothing to share", policies.find, f"snapkv+global+{part}")
    assert error.exit_code == 2
    same = "global and pyramid answer the same question"
    refused(same, policies.find, "snapkv+global+pyramid")


def test_it_is_named_and_described() -> None:
    info = policies.find("l2+global+turns")
    assert info.shape == "one for all layers and heads"
    assert isinstance(build(info.name).layers, GlobalBudget)
    refused("leaves no layer whole", build, "l2+global", {"skip": 2})


@pytest.mark.parametrize("step", ["none", "roco", "tova", "hashevict", "streaming"])
def test_the_ends_of_turns_stay_ahead_of_better_rows(step: str) -> None:
    """Of every prompt, within the budget, and while an answer is written."""
    run = engine(network(), "snapkv+turns", step, 60, prompt_options={"edge": 5, "window": 8})
    edges: set[int] = set()
    for turn in range(3):
        begin = run.kv.position
        edges |= {at + i for at in (begin, begin + 85) for i in range(5)}
        run.prompt(ids(90, seed=turn))
        for token in range(1 if step == "none" else 30):
            run.step(token)
        assert all(edges <= {*rows} for rows in kept(run.kv))
    assert {*map(len, kept(run.kv))} <= ({61} if step == "none" else {60, 61})


def test_the_ends_of_turns_leave_after_all_others() -> None:
    run = engine(network(), "tova+global+turns", "none", 30, prompt_options={"edge": 4})
    run.prompt(ids(90))
    edges = {*range(4), *range(86, 90)}
    assert all(edges <= {*rows} for rows in kept(run.kv))
    assert int(run.kv.arena.held.sum()) == 30 * 9


def test_the_ends_of_turns_give_way_where_nothing_else_is_left() -> None:
    run = engine(network(), "snapkv+turns", "roco", 40, prompt_options={"edge": 200, "window": 8})
    run.prompt(ids(300))
    for token in range(60):
        run.step(token)
    assert {*map(len, kept(run.kv))} <= {40, 41}


def test_preferred_rows_do_not_break_a_small_budget() -> None:
    run = engine(network(), "adakv+turns", "none", 20, prompt_options={"edge": 30, "window": 8})
    run.prompt(ids(200))
    sizes = torch.tensor([*map(len, kept(run.kv))]).view(3, 3)
    assert sizes.sum(1).tolist() == [60] * 3


@pytest.mark.parametrize("pinned", [0, 2])
def test_no_head_is_left_nothing_beside_what_is_preferred(pinned: int) -> None:
    """One head has all of the mass: the other still gets a row, pinned ones not counted."""
    mass = torch.zeros(2, 1, 12)
    mass[0] = 1.0
    made = build("tova+ada+turns", {"alpha": 0.0, "protect_newest": False, "per_head": True})
    stays = made.keep(view(mass), 4 + 2 * pinned, pinned, 1)
    assert stays.sum(1).tolist() == [3 + pinned, 1 + pinned]

"""The ends of turns are preferred."""

from __future__ import annotations

import pytest
from small import engine, ids, network


def test_the_ends_of_turns_are_preferred() -> None:
    """Both ends of every prompt stay, ahead of better rows, within the budget."""
    net = network()
    run = engine(net, "snapkv+turns", "none", 80, prompt_options={"edge": 5, "window": 8})
    begins = []
    for turn in range(3):
        begins.append(run.kv.position)
        run.prompt(ids(90, seed=turn))
        run.step(1)
    ends = [b + 90 for b in begins]
    for layer in range(3):
        for head in range(3):
            held = set(run.kv.kept(layer, head).tolist())
            assert len(held) == 81
            for begin, end in zip(begins, ends, strict=True):
                assert set(range(begin, begin + 5)) <= held
                assert set(range(end - 5, end)) <= held


@pytest.mark.parametrize("step", ["roco", "tova", "hashevict", "streaming"])
def test_the_ends_of_turns_stay_while_an_answer_is_written(step: str) -> None:
    net = network()
    run = engine(net, "snapkv+turns", step, 60, prompt_options={"edge": 5, "window": 8})
    for turn in range(2):
        run.prompt(ids(90, seed=turn))
        for token in range(30):
            run.step(token)
    edges = {*range(5), *range(85, 90), *range(120, 125), *range(205, 210)}
    for layer in range(3):
        for head in range(3):
            assert edges <= set(run.kv.kept(layer, head).tolist())

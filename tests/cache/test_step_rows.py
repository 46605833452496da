"""What a step's policy and its kernels are told of the rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from small import ids, network
from stepping import engine

from minikv.cache.step_rows import StepRows


def rows(budget: int = 24) -> tuple[StepRows, torch.Tensor]:
    """Those of an answer under tova, and how many each head has."""
    made = engine(network(layers=2), None, "full", "tova", budget)
    made.prompt(ids(22))
    decode = made.kv.open_steps()
    return decode.rows, decode.count


def test_padding_repeats_the_last_row_of_a_head() -> None:
    made, _ = rows()
    start, length = torch.tensor([3, 40]), torch.tensor([4, 0])
    index, live = made.index(start, length)
    assert index.shape == live.shape == (2, made.width)
    assert index[0, :6].tolist() == [3, 4, 5, 6, 6, 6]
    assert live[0].tolist() == [True] * 4 + [False] * (made.width - 4)
    assert not bool(live[1].any())
    assert bool((index < made.count).all())


def test_a_policy_sees_neither_padding_nor_pinned_rows() -> None:
    made, count = rows()
    made = replace(made, pinned=5)
    policy = engine(network(), None, "full", "tova", 24).kv.rules.step
    assert policy is not None
    arena = made.arena
    index, live = made.index(arena.start.flatten(), count.flatten() - 1)
    some = slice(2, 5)
    view = made.view(policy, made.position, index[some], live[some], arena.cap.flatten(), some)
    assert view.layer.tolist() == [0, 1, 1]
    assert view.head.tolist() == [2, 0, 1]
    assert view.pos[0, :22].tolist() == [-1] * 5 + list(range(5, 22))
    assert bool((view.pos[:, 22:] == -1).all())
    assert view.keys is not None
    assert torch.equal(view.keys(torch.tensor([1])), arena.read(made.ops, "k", index[some][[1]]))
    assert made.for_kernel(policy, count).pinned == 5


def test_rows_that_leave_last_are_not_shown_while_there_are_others() -> None:
    made, count = rows()
    assert made.positions is made.arena.columns["pos"]
    assert made.written is made.arena.columns
    policy = engine(network(), None, "full", "tova", 24).kv.rules.step
    assert policy is not None
    pos = made.arena.columns["pos"]
    last = pos == 7
    marked = replace(made, leaves_last=last, shown=torch.zeros_like(pos))
    marked.show(policy, count - 1)
    index, live = marked.index(made.arena.start.flatten(), count.flatten() - 1)
    shown = marked.positions[index[0][live[0]]].tolist()
    assert {*pos[index[0][live[0]]].tolist()} - {*shown} == {7}
    assert [*marked.written][-1] == "leaves_last"

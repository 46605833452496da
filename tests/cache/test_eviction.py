"""Policies that evict several rows of a head at once: which rows leave, when that is known, and
that the others stay side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from layouts import segment
from small import ids
from stepping import pair
from tape import Tape
from torch import Tensor

from minikv.cache.eviction import close_gaps, leaving
from minikv.cache.rules import Rules
from minikv.policies.base import PromptView, StepPolicy, StepView


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundant(StepPolicy):
    """Evicts `block` rows at once: those whose keys are most like the head's other keys. What a
    method such as R-KV needs: old keys, and several rows of a head at a time."""

    block: int = 4
    sinks: int = 2
    name: str = "redundant"

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"seen": torch.float32}

    def init(self, view: PromptView) -> dict[str, Tensor]:
        return dict(view.carried)

    def update(
        self, columns: Mapping[str, Tensor], attention: Tensor, visible: Callable[[], Tensor]
    ) -> None:
        columns["seen"].add_(1.0)

    def score(self, view: StepView) -> Tensor:
        keys = view.keys(torch.arange(len(view.pos))).float()
        keys = (keys / keys.norm(dim=-1, keepdim=True)).masked_fill(view.pos[..., None] < 0, 0.0)
        return -(keys @ keys.sum(1)[..., None])[..., 0]


@pytest.mark.parametrize("kv", [None, torch.int8])
def test_several_rows_of_a_head_leave_at_once(kv: torch.dtype | None) -> None:
    """Heads grow to cap + block - 1 rows, then are at their cap; the rows that stay are those of
    the highest score, in every column, and steps launched ahead agree."""
    budget, policy = 24, Redundant()
    run = pair(Tape(), "full", "tova", budget, kv=kv)
    for made in (run.here, run.there):
        made.kv.configure(Rules(None, policy, made.kv.rules.budget))
    run.prompt(ids(22))
    lengths = []
    for _ in range(14):
        before = set(run.here.kv.kept(1, 0).tolist())
        run.write(1)
        run.agree()
        after = set(run.here.kv.kept(1, 0).tolist())
        lengths.append(len(after))
        gone = before - after
        assert len(gone) in (0, 4)
        assert not gone & {0, 1}  # sinks
        assert run.here.kv.position - 1 in after
    assert lengths == [23, 24, 25, 26, 27, 24, 25, 26, 27, 24, 25, 26, 27, 24]
    arena = run.here.kv.arena
    for layer in range(len(arena.start)):
        for head in range(arena.heads):
            at = segment(arena, "pos", layer, head)
            seen = segment(arena, "seen", layer, head)
            # A row counts the steps since it came, so the columns moved with their rows.
            want = (run.here.kv.position - at).clamp(max=14).to(torch.float32)
            assert torch.equal(seen, want)


def test_gaps_are_closed_in_every_column() -> None:
    """Head 0 loses rows 1 and 4 of 5, head 1 none of 3; what stays is side by side."""
    values = torch.arange(20.0).view(10, 2)
    columns = [torch.arange(10), values.clone()]
    index = torch.tensor([[0, 1, 2, 3, 4], [6, 7, 8, 8, 8]])
    gone = torch.zeros(2, 5, dtype=torch.bool)
    gone[0, [0, 2]] = True
    close_gaps(columns, index, gone, torch.tensor([5, 3]), torch.tensor([4, 8]), 2)
    assert sorted(columns[0][:3].tolist()) == [1, 3, 4]
    assert columns[0][5:].tolist() == [*range(5, 10)]
    assert torch.equal(columns[1], values[columns[0]])  # of the same rows


def test_the_lowest_scores_leave_of_equal_ones_the_oldest() -> None:
    inf = torch.inf
    scores = torch.tensor([[0.5, 0.2, 0.2, inf, 0.1], [inf, inf, 3.0, inf, inf]])
    pos = torch.tensor([[4, 9, 2, 0, 7], [1, 2, 3, 4, 5]])
    gone = leaving(scores, pos, torch.tensor([2, 3]))
    assert gone.tolist() == [[False, False, True, False, True], [False, False, True, False, False]]

"""KeyDiff: in the paper's blocks, against the paper's loop. All at once: see `test_fixtures`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from views import build, choose, view

from minikv.policies.base import PromptView


def loop(key: Tensor, keeps: int, block: int, sinks: int) -> list[int]:
    """The rows of one head that are left, block after block; key [N, D]."""
    left = [*range(keeps)]
    for lo in range(keeps, len(key), block):
        rows = [*left, *range(lo, min(lo + block, len(key)))]
        unit = torch.nn.functional.normalize(key[rows], dim=-1)
        near = torch.nn.functional.cosine_similarity(unit, unit.mean(0, keepdim=True), dim=-1)
        worth = {row: (row >= sinks, float(n), -row) for row, n in zip(rows, near, strict=True)}
        left = sorted(sorted(rows, key=worth.__getitem__)[:keeps])
    return left


def prompt(seed: int, rows: int, budget: int) -> PromptView:
    """Three heads with random keys."""
    key = torch.randn(3, rows, 8, generator=torch.Generator().manual_seed(seed)) + 1.0
    return replace(view(torch.zeros(3, 1, rows)), key=lambda: key, budget=budget)


@pytest.mark.parametrize(
    ("rows", "keeps", "block", "sinks"),
    [
        (90, 20, 1, 0),
        (90, 20, 7, 0),
        (90, 20, 7, 3),
        (90, 20, 1000, 2),
        (29, 1, 4, 0),
        (29, 2, 4, 0),
    ],
)
def test_blocks_are_the_papers_loop(rows: int, keeps: int, block: int, sinks: int) -> None:
    """Also of the fewest rows that a budget can have: no block ends with two rows alone, which
    would be as near to their mean."""
    seen = prompt(block, rows, keeps)
    options = {"sinks": sinks, "recent": 0, "block": block}
    kept = choose(build("keydiff", options), seen, 3 * keeps)
    for h in range(3):
        assert kept[h].nonzero().flatten().tolist() == loop(seen.key()[h], keeps, block, sinks)
    if block == 7:
        once = choose(build("keydiff", options | {"block": 0}), seen, 3 * keeps)
        assert not torch.equal(kept, once)


def test_blocks_follow_positions_and_pass_over_padding() -> None:
    """Rows of earlier turns lie in any order, and one of them is none."""
    generator = torch.Generator().manual_seed(5)
    key = torch.randn(1, 41, 8, generator=generator) + 1.0
    order = torch.randperm(40, generator=generator)
    mixed = torch.cat((key[:, order], torch.full((1, 1, 8), torch.nan)), 1)
    pos = torch.cat((order, torch.tensor([-1])))[None]
    seen = replace(view(torch.zeros(1, 1, 41)), key=lambda: mixed, budget=10, pos=pos, position=40)
    made = build("keydiff", {"sinks": 0, "recent": 0, "block": 6})
    kept = choose(made, seen, 10)
    assert sorted(pos[kept].tolist()) == loop(key[0, :40], 10, 6, 0)


@pytest.mark.parametrize("budget", [90, 89, 200])
def test_rows_that_fit_the_budget_are_one_block(budget: int) -> None:
    """All of them, or all and the block that follows: scores as of all rows at once."""
    seen = prompt(4, 90, budget)
    blocks, once = (
        build("keydiff", {"sinks": 0, "recent": 0, "block": block}).scorer.score(seen)
        for block in (7, 0)
    )
    stays = blocks > -2  # a row that left with a block is below all others
    assert stays.sum(1).tolist() == [min(budget, 90)] * 3
    torch.testing.assert_close(blocks[stays], once[stays])

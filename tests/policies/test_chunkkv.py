"""ChunkKV: whole chunks stay."""

from __future__ import annotations

from dataclasses import replace

import torch
from views import build, choose, random_mass, view

from minikv.policies.chunkkv import chunk_means


def test_chunks_by_hand() -> None:
    """Chunks of 2 of two heads: the means are (1.5, 3.5, 6) and (0, 1, 0); rows that are not free
    do not count, and a head without free rows in a chunk adds nothing."""
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0, 6.0, 99.0], [0.0, 0.0, 1.0, 1.0, 50.0, 50.0]])
    free = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()
    found = chunk_means(scores, torch.arange(6).expand(2, 6), free, 2, 6)
    assert found.tolist() == [[1.5, 1.5, 4.5, 4.5, 6.0, 6.0]] * 2
    # Of earlier turns only some rows are left, in any order: chunks are counted by position.
    pos = torch.tensor([[13, 1, 12, -1, 0]])
    found = chunk_means(torch.tensor([[5.0, 1.0, 7.0, 99.0, 3.0]]), pos, pos >= 0, 4, 14)
    assert found[0, [0, 1, 2, 4]].tolist() == [6.0, 2.0, 6.0, 2.0]


def test_all_heads_keep_the_same_chunks_and_the_youngest_of_one_more() -> None:
    mass = random_mass(heads=3, rows=118)
    policy = build("chunkkv", {"window": 8, "chunk": 10})
    kept = choose(policy, view(mass, 8), 3 * (8 + 25))
    assert bool((kept == kept[0]).all())
    chunks = kept[0, :110].view(11, 10).sum(1)  # the window is the rest, and a part of the last
    assert sorted(chunks.tolist())[-3:] == [5, 10, 10]
    part = kept[0, :110].view(11, 10)[int((chunks == 5).nonzero())]
    assert part.tolist() == [False] * 5 + [True] * 5


def test_a_head_that_has_lost_a_chunk_takes_what_it_has() -> None:
    mass = random_mass(heads=2, rows=40)
    seen = view(mass, 4)
    pos = seen.pos.clone()
    pos[1, 10:20] = -1
    kept = choose(build("chunkkv", {"window": 4}), replace(seen, pos=pos), 2 * 20)
    assert kept.sum(1).tolist() == [20, 20]
    assert not bool(kept[1, 10:20].any())

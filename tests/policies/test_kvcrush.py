"""KVCrush: representatives beside the best rows."""

from __future__ import annotations

import pytest
import torch
from views import build, choose, random_mass, view

from minikv.errors import UsageError
from minikv.policies.kvcrush import anchor


@pytest.mark.parametrize("kind", ["mean", "inv_mean", "alternate", "random", "zeros", "ones"])
@pytest.mark.parametrize("total", [3 * 37, 3 * 44, 3 * 119])
def test_kvcrush_keeps_its_sizes(kind: str, total: int) -> None:
    mass = random_mass()
    kept = choose(build("kvcrush", {"anchor": kind}), view(mass, 32), total)
    assert kept.sum(1).tolist() == [total // 3] * 3
    assert bool(kept[:, -32:].all())
    assert bool(kept[:, :4].all())


def test_kvcrush_anchors() -> None:
    marks = torch.tensor([True, False])  # what most rows have
    assert anchor("mean", marks, 0, 0).tolist() == [True, False]
    assert anchor("inv_mean", marks, 0, 0).tolist() == [False, True]
    assert anchor("zeros", marks, 0, 0).tolist() == [False, False]
    assert anchor("ones", marks, 0, 0).tolist() == [True, True]
    assert anchor("alternate", marks, 0, 0).tolist() == [False, True]
    drawn = torch.stack([anchor("random", marks, 0, layer) for layer in range(400)])
    assert 0.4 < float(drawn.float().mean()) < 0.6


def test_kvcrush_takes_the_nearest_and_the_farthest() -> None:
    """Of the rows that go, sorted by marks and then by position, the first and the last stay."""
    heads, rows = 2, 40
    mass = random_mass(heads, 1, rows)
    policy = build("kvcrush(tova)", {"anchor": "zeros", "ratio": 0.5, "per_head": True})
    seen = view(mass)
    kept = choose(policy, seen, heads * 9)
    scores = mass.mean(1)
    marks = torch.zeros(heads, rows, dtype=torch.int64)
    for h in range(heads):
        marks[h, scores[h, : rows - 1].topk((rows - 1) // 2).indices] = 1
    distance = marks.sum(0)
    for h in range(heads):
        best = set(scores[h, : rows - 1].topk(4).indices.tolist())
        rest = sorted(set(range(rows - 1)) - best, key=lambda j: (int(distance[j]), j))
        picks = {rest[round(i * (len(rest) - 1) / 3)] for i in range(4)}
        assert set(kept[h].nonzero().flatten().tolist()) == best | picks | {rows - 1}


@pytest.mark.parametrize("kind", ["zeros", "ones", "mean"])
def test_kvcrush_with_a_bit_per_query_head(kind: str) -> None:
    """H * G bits, each the better half of one query head's own attention."""
    heads, group, rows = 2, 3, 40
    mass = random_mass(heads, group, rows)
    options = {"anchor": kind, "ratio": 0.5, "per_head": True, "bits": "query"}
    kept = choose(build("kvcrush(tova)", options), view(mass), heads * 9)
    bits = torch.zeros(heads * group, rows, dtype=torch.bool)
    for h in range(heads):
        for g in range(group):
            half = mass[h, g, : rows - 1].topk((rows - 1) // 2).indices
            bits[h * group + g, half] = True
    goal = bits[:, : rows - 1].float().mean(1) > 0.5 if kind == "mean" else kind == "ones"
    goal = torch.as_tensor(goal).expand(heads * group)
    distance = (bits != goal[:, None]).sum(0)
    scores = mass.mean(1)
    for h in range(heads):
        sure = set(scores[h, : rows - 1].topk(4).indices.tolist())
        rest = sorted(set(range(rows - 1)) - sure, key=lambda j: (int(distance[j]), j))
        picks = {rest[round(i * (len(rest) - 1) / 3)] for i in range(4)}
        assert set(kept[h].nonzero().flatten().tolist()) == sure | picks | {rows - 1}
    alone = choose(build("kvcrush(tova)", options | {"bits": "kv"}), view(mass), heads * 9)
    assert not torch.equal(kept, alone)


def test_a_bit_per_query_head_needs_attention() -> None:
    with pytest.raises(UsageError, match="bits=query needs a score of attention"):
        build("kvcrush(l2)", {"bits": "query"})
    build("kvcrush(snapkv)", {"bits": "query"})

"""VaSE: which rows stay for their values, how the others are drawn, and what a chat keeps."""

from __future__ import annotations

import pytest
import torch
from small import engine, ids, network
from torch import Tensor
from views import asked, kept, rule

from minikv.cache.eviction import leaving


def gone(
    fading: Tensor, value: Tensor, pos: Tensor, count: int, **options: object
) -> list[list[int]]:
    """The positions that leave heads with these columns, values [F, N, D] and positions [F, N]."""
    vase = rule("vase", {"window": 2, "kernel": 1, "sinks": 1, **options})
    seen = asked(
        vase,
        int(pos.max()) + 1,
        pos,
        {"fading": fading},
        count=count,
        cap=torch.full((len(pos),), 8),
        values=lambda heads: value[heads],
    )
    out = leaving(vase.worth(seen), pos, torch.full((len(pos),), count))
    return [sorted(pos[h][out[h]].tolist()) for h in range(len(pos))]


def test_rows_with_the_widest_values_stay() -> None:
    """Of a cap of 8, a share of 0.4 is 3 tokens: the sink, and the two of the widest range. Lengths
    do not count: the row at 4 is the longest. Row 7 and 8 are the newest. The rest leaves, however
    much attention it gets."""
    value = torch.zeros(1, 9, 2)
    value[0, :, 0] = torch.tensor([9.0, 1.0, -3.0, 0.5, 50.0, 2.0, 0.1, 0.0, 0.0])
    value[0, 4, 1] = 50.0
    pos = torch.arange(9)[None]
    attention = torch.tensor([[0.1, 0.9, 1e-9, 0.9, 0.9, 1e-9, 0.9, 0.0, 0.0]])
    assert gone(attention, value, pos, 4, large=0.4) == [[1, 3, 4, 6]]
    shuffled = torch.tensor([8, 3, 0, 5, 1, 7, 2, 6, 4])
    found = gone(attention[:, shuffled], value[:, shuffled], pos[:, shuffled], 4, large=0.4)
    assert found == [[1, 3, 4, 6]]


def test_the_others_are_drawn_in_proportion_to_their_attention() -> None:
    """Four heads in five lose the row with a quarter of the other's attention; which, is a matter
    of seed and head."""
    heads = 4000
    attention = torch.tensor([[0.0, 0.8, 0.2, 0.0, 0.0]]).expand(heads, -1)
    pos, value = torch.arange(5).expand(heads, -1), torch.zeros(heads, 5, 2)
    lost = [gone(attention, value, pos, 1, large=0.0, seed=seed) for seed in (0, 1)]
    assert lost[0] != lost[1]
    for one in lost:
        assert sum(rows == [2] for rows in one) / heads == pytest.approx(0.8, abs=0.03)
        assert sum(rows == [1] for rows in one) / heads == pytest.approx(0.2, abs=0.03)


def test_attention_fades() -> None:
    """With a window of 4 a query counts three quarters as much as the one after it."""
    vase = rule("vase", {"window": 4})
    columns = {"fading": torch.tensor([0.0, 1.0])}
    for given in ([1.0, 0.0], [0.0, 0.5]):
        vase.update(columns, torch.tensor(given), lambda: torch.ones(2))
    torch.testing.assert_close(columns["fading"], torch.tensor([0.75, 0.5625 + 0.5]))


def test_a_head_grows_by_the_buffer_and_evicts_as_many() -> None:
    run = engine(network(), "h2o", "vase", 12)
    run.prompt(ids(40))
    sizes = []
    for token in ids(12, 1):
        run.step(token)
        sizes.append([*map(len, kept(run.kv))])
    assert sizes == [[12 + n % 4] * 9 for n in range(1, 13)]

"""The history of each row in Triton, as torch keeps it, to the bit, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import draw, guarded, kernel, on_device, randoms

from minikv.kernels.torch import history as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


def register(heads: int, wide: int, history: int) -> tuple[list[Tensor], Tensor]:
    """Words in which bits are set up to the last one, and counts up to `history`."""
    words = []
    for i in range(-(-history // 32)):
        used = min(32, history - 32 * i)
        words.append(torch.randint(1 << used, (heads, wide), generator=randoms(i)))
        words[i][:, ::5] = (1 << used) - 1
    counts = torch.randint(history + 1, (heads, wide), generator=randoms(99)).float()
    return words, counts


def positions(heads: int, rows: int, last: int) -> Tensor:
    """With holes; the last ones follow each other up to `last`."""
    pos = torch.arange(last - rows + 1, last + 1).clamp(min=-1).repeat(heads, 1)
    gone = torch.rand(pos.shape, generator=randoms(7)) < 0.2
    gone[:, -1] = False
    return pos.masked_fill(gone, -1)


@on_device
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("heads", "group", "rows", "queries"),
    [(1, 1, 1, 1), (3, 4, 70, 32), (2, 3, 150, 31), (2, 2, 5, 9), (2, 4, 64, 6)],
)
def test_queries_that_give_little(
    heads: int, group: int, rows: int, queries: int, window: int | None
) -> None:
    """Many probabilities are an even share to the bit, or just below. One query sees no row."""
    last = rows + 3
    k_pos, q_pos = positions(heads, rows, last), torch.arange(last - queries + 1, last + 1)
    if queries > 5:
        q_pos[0] = -1
    seen = plain_torch.rows_seen(q_pos, k_pos, window)
    made = kernel("triton.history")
    given = guarded(q_pos), guarded(k_pos), window
    for block in (16, 2048):
        assert torch.equal(made.rows_seen(*given, block=block).cpu(), seen)
    shared = made.rows_seen(given[0], guarded(k_pos[:1]).expand(heads, rows), window)
    assert torch.equal(shared.cpu(), seen[:1].expand(heads, queries))
    p = (1.0 / seen)[:, None, :, None].expand(heads, group, queries, rows).clone()
    p.masked_fill_(torch.rand(p.shape, generator=randoms(1)) < 0.1, 0.0)
    low = torch.rand((heads, 1, queries, rows), generator=randoms(2))
    p = torch.where(low < 0.3, p * (1.0 - plain_torch.EVEN), p)
    p = torch.where((low > 0.3) & (low < 0.5), p * (1.0 - 2 * plain_torch.EVEN), p)
    want = plain_torch.low_bits(p, q_pos, k_pos, window)
    assert torch.equal(made.low_bits(guarded(p), *given).cpu(), want)
    assert rows == 1 or bool(want.any())


@on_device
@pytest.mark.parametrize("history", [5, 32, 64, 70, 400])
@pytest.mark.parametrize(
    ("heads", "rows", "observed"), [(1, 1, 1), (3, 300, 32), (2, 70, 7), (2, 20, 32)]
)
def test_a_prompts_queries_come_in(heads: int, rows: int, observed: int, history: int) -> None:
    """Rows of the prompt, of earlier turns, and none; columns and bits are parts of wider ones."""
    end, observed = rows + 40, min(observed, history)
    pos = positions(heads, rows, end - 1)
    words, queries = register(heads, rows + 3, history)
    bits = torch.randint(1 << 32, (heads, rows + 1), generator=randoms(3))
    rest = end, observed, history

    def parts(move: object) -> tuple[object, ...]:
        assert callable(move)
        moved = [move(word)[:, :rows] for word in words]
        return moved, move(queries)[:, :rows], move(bits)[:, 1:], move(pos)

    want = plain_torch.prompt_history(*parts(torch.clone), *rest)  # type: ignore[arg-type]
    got = kernel("triton.history").prompt_history(*parts(guarded), *rest)
    for mine, theirs in zip((*got[0], got[1]), (*want[0], want[1]), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)


@on_device
@pytest.mark.parametrize("history", [5, 32, 64, 70, 400])
@pytest.mark.parametrize(
    ("heads", "rows", "queries"),
    [(1, 1, 1), (3, 150, 16), (2, 70, 32), (2, 70, 45), (2, 101, 101), (1, 9, 12)],
)
def test_a_blocks_queries_come_in(heads: int, rows: int, queries: int, history: int) -> None:
    """Columns are parts of wider ones, whose other rows stay as they are."""
    words, counts = register(heads, rows + 3, history)
    for t in (*words, counts):
        t[:, max(0, rows - queries) : rows] = 0
    seen = torch.randint(1, 60, (heads, queries), generator=randoms(4)).float()
    p = (1.0 / seen)[..., None].repeat(1, 1, rows)
    p[..., ::3] = draw(5, (heads, queries, rows), torch.float32).abs()[..., ::3] / 30
    p = p.tril(rows - queries)
    there = [guarded(t) for t in (*words, counts)]
    kernel("triton.history").block_history(
        [t[:, :rows] for t in there[:-1]], there[-1][:, :rows], guarded(p), guarded(seen), history
    )
    plain_torch.block_history(
        [word[:, :rows] for word in words], counts[:, :rows], p, seen, history
    )
    for mine, theirs in zip(there, (*words, counts), strict=True):
        assert torch.equal(mine.cpu(), theirs)


@on_device
@pytest.mark.parametrize("history", [5, 64, 70, 400])
@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (3, 300)])
def test_the_share_of_bits_that_are_set(heads: int, rows: int, history: int) -> None:
    words, queries = register(heads, rows + 3, history)
    want = plain_torch.low_share([word[:, :rows] for word in words], queries[:, :rows])
    there = [guarded(word)[:, :rows] for word in words]
    got = kernel("triton.history").low_share(there, guarded(queries)[:, :rows])
    assert torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))

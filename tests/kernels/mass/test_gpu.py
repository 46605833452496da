"""The attention that queries give each row, in Triton, against float64 arithmetic, on odd sizes, in
NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from pairwise import some_by_day
from prompts import observed, weights
from torch import Tensor
from triton_device import close, draw, guarded, kernel, on_device, randoms

pytest.importorskip("triton", reason="no Triton on this system")


ODD = [
    # H, G, D, queries, rows of the first and second part, window, dtype, first part by a list
    (1, 1, 64, 1, 0, 1, None, torch.float32, False),
    (3, 4, 80, 7, 63, 111, None, torch.bfloat16, True),
    (5, 3, 96, 33, 1, 63, 20, torch.float16, False),
    (1, 3, 128, 17, 111, 40, 9, torch.bfloat16, True),
    (3, 1, 256, 5, 63, 9, None, torch.float32, True),
    (2, 5, 16, 3, 30, 11, 1, torch.float32, False),
]


def scene(
    case: tuple[int, ...],
) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]], int | None, Tensor, Tensor]:
    """q [H, G, T, D], q_pos, parts for the kernels, window, all k [H, N, D] and their k_pos."""
    heads, group, size, rows, old, new, window, dtype, listed = case
    q = draw(1, (heads, group, rows, size), dtype, 2.0)
    k = draw(2, (heads, old + new, size), dtype)
    # Earlier rows in any order, some gone, NaN where they were; then new ones up to the queries.
    pos = torch.stack([torch.randperm(old + 3, generator=randoms(h))[:old] for h in range(heads)])
    gone = torch.rand(pos.shape, generator=randoms(9)) < 0.2
    pos = torch.cat(
        (pos.masked_fill(gone, -1), torch.arange(old + 3, old + 3 + new).expand(heads, new)), 1
    )
    k[pos < 0] = math.nan
    q_pos = torch.arange(old + 3 + new - rows, old + 3 + new)
    own = (guarded(k[:, old:]), guarded(pos[:1, old:]))
    if not listed:
        return q, q_pos, [(guarded(k[:, :old]), guarded(pos[:, :old])), own], window, k, pos
    shuffled = torch.randperm(heads * old + 5, generator=randoms(3))
    memory = torch.full((heads * old + 5, size), math.nan, dtype=dtype)
    index = shuffled[: heads * old].view(heads, old)
    memory[index] = k[:, :old]
    first = guarded(memory), guarded(pos[:, :old]), guarded(index)
    return q, q_pos, [first, own], window, k, pos


@on_device
@pytest.mark.parametrize("case", ODD, ids=str)
def test_what_the_last_queries_look_at(case: tuple[int, ...]) -> None:
    q, q_pos, parts, window, k, pos = scene(case)
    asked = guarded(q.permute(2, 0, 1, 3).contiguous()).permute(1, 2, 0, 3)
    p, lse = weights(q, k, q_pos, pos, window)
    add = kernel("mass.gpu").add_attention_mass
    given = guarded(lse.float())
    mass, squares = observed(add, asked, guarded(q_pos), parts, window, given, guarded)
    close(mass, p.sum(2))
    close(squares, p.mean(1).square().sum(1))


@on_device
@pytest.mark.parametrize("listed", [False, True])
def test_queries_at_one_position(listed: bool) -> None:
    """That of the last one, repeated without a copy: what lies behind it in memory is not read."""
    case = (3, 2, 64, 5, 33, 17, None, torch.float32, listed)
    q, q_pos, parts, window, k, pos = scene(case)
    place = guarded(torch.tensor([int(q_pos[-1]), *[-1] * 15]))
    one = place[:1].expand(len(q_pos))
    asked = guarded(q.permute(2, 0, 1, 3).contiguous()).permute(1, 2, 0, 3)
    p, lse = weights(q, k, one.cpu(), pos, window)
    add = kernel("mass.gpu").add_attention_mass
    mass, squares = observed(add, asked, one, parts, window, guarded(lse.float()), guarded)
    close(mass, p.sum(2))
    close(squares, p.mean(1).square().sum(1))


@on_device
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(
    ("heads", "group", "size", "dtype"),
    [(2, 3, 64, torch.bfloat16), (1, 1, 96, torch.float32)],
    ids=str,
)
def test_all_columns_chunk_by_chunk(
    heads: int, group: int, size: int, dtype: torch.dtype, window: int | None
) -> None:
    """Every query of a prompt, in chunks of uneven length, added to what is there."""
    rows, first = 150, 1000
    q, k = draw(1, (heads, group, rows, size), dtype, 2.0), draw(2, (heads, rows, size), dtype)
    at = torch.arange(first, first + rows)
    p, lse = weights(q, k, at, at.expand(heads, -1), window)
    mass, squares = (guarded(torch.ones(heads, *n, rows)) for n in ((group,), ()))
    # As in a network: queries [t, H * G, D] behind one another, seen as [H, G, t, D].
    flat = q.permute(2, 0, 1, 3).reshape(rows, -1, size)
    for lo, hi in ((0, 1), (1, 112), (112, rows)):
        chunk = guarded(flat[lo:hi]).view(hi - lo, heads, group, size).permute(1, 2, 0, 3)
        key, where = guarded(k)[:, :hi], guarded(at[None])[:, :hi]
        kernel("mass.gpu").add_attention_mass(
            mass[:, :, :hi],
            squares[:, :hi],
            chunk,
            guarded(lse[:, :, lo:hi].float()),
            guarded(at[lo:hi]),
            key,
            where,
            window,
        )
    close(mass, 1 + p.sum(2))
    close(squares, 1 + p.mean(1).square().sum(1))


@on_device
@pytest.mark.parametrize("case", some_by_day(range(len(ODD)), lambda i: ODD[i][2] < 256))
def test_what_each_of_the_last_queries_looks_at(case: int) -> None:
    q, q_pos, parts, window, k, pos = scene(ODD[case])
    made = kernel("mass.gpu")
    asked = guarded(q.permute(2, 0, 1, 3).contiguous()).permute(1, 2, 0, 3)
    p, lse = weights(q, k, q_pos, pos, window)
    for heads in (slice(0, len(q)), slice(len(q) - 1, len(q))):
        known = guarded(lse.float())
        got = made.each_attention(asked, guarded(q_pos), parts, window, known, heads)
        close(got, p[heads])


@on_device
@pytest.mark.parametrize(
    ("case", "scaled"),
    [
        pytest.param(case, scaled, id=f"{i}-{scaled}", marks=[] if day else [pytest.mark.soak])
        for i, case in enumerate(ODD)
        for scaled, day in ((False, i % 2 == 0), (True, i % 2 == 1))
    ],
)
def test_the_most_that_a_query_gives(case: tuple[int, ...], scaled: bool) -> None:
    q, q_pos, parts, window, k, pos = scene(case)
    old = case[4]
    scale = torch.rand(len(q_pos), generator=randoms(4)) + 0.1 if scaled else None
    p, lse = weights(q, k, q_pos, pos, window)
    want = p * scale.double()[:, None] if scale is not None else p
    given = None if scale is None else guarded(scale)
    for known in (None, guarded(lse.float())):
        for scored, columns in ((0, slice(0, old)), (1, slice(old, None))):
            got = kernel("mass.gpu").peak_attention(
                guarded(q), guarded(q_pos), parts, scored, window, given, known
            )
            close(got, want[..., columns].amax(2))

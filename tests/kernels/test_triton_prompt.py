"""The prompt's Triton kernels against float64 arithmetic, on odd sizes, in NaN-guarded memory.

Triton's interpreter is chosen when the kernels are imported, so the file runs itself in a process
of its own; where there is a CUDA device, the same tests also run on it (marker `gpu`).
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import small
import torch
from torch import Tensor
from triton_device import INTERPRETED, close, draw, guarded, interpret, kernel, on_device, randoms

from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels
from minikv.kernels.torch import reference

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton on this system", allow_module_level=True)


def test_in_the_interpreter() -> None:
    if INTERPRETED:
        pytest.skip("this is the interpreter")
    interpret(__file__)


def weights(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """float64 probabilities [H, G, T, N] and log-sum-exps [H, G, T] of q [H, G, T, D]."""
    logits = torch.einsum("hgtd,hnd->hgtn", q.double(), k.double().nan_to_num(0.0))
    distance = q_pos[None, :, None] - k_pos[:, None]
    seen = (distance >= 0) & (k_pos >= 0)[:, None]
    if window is not None:
        seen &= distance < window
    logits = (logits / math.sqrt(q.shape[-1])).masked_fill(~seen[:, None], -math.inf)
    return logits.softmax(-1).nan_to_num(0.0), logits.logsumexp(-1)


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
    asked = guarded(q.permute(2, 0, 1, 3).contiguous())
    mass, squares = kernel("triton.attention_mass").observe(asked, guarded(q_pos), parts, window)
    p, _ = weights(q, k, q_pos, pos, window)
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
    asked = guarded(q.permute(2, 0, 1, 3).contiguous())
    mass, squares = kernel("triton.attention_mass").observe(asked, one, parts, window)
    p, lse = weights(q, k, one.cpu(), pos, window)
    close(mass, p.sum(2))
    close(squares, p.mean(1).square().sum(1))
    close(kernel("triton.attention_mass").rows_lse(guarded(q), one, parts, window), lse)
    if not listed:
        into = guarded(torch.zeros(3, 2, 33)), guarded(torch.zeros(3, 33))
        kernel("triton.attention_mass").add_columns(
            *into, guarded(q), guarded(lse.float()), one, *parts[0], None
        )
        close(into[0], p.sum(2)[..., :33])


@on_device
@pytest.mark.parametrize("case", ODD, ids=str)
def test_log_sums_of_queries(case: tuple[int, ...]) -> None:
    """Of queries that see nothing, too: one is earlier than all rows."""
    q, q_pos, parts, window, k, pos = scene(case)
    q_pos = q_pos.clone()
    q_pos[0] = 0
    pos = pos.masked_fill(pos == 0, -1)
    for part in parts:
        part[1].masked_fill_(part[1] == 0, -1)
    got = kernel("triton.attention_mass").rows_lse(guarded(q), guarded(q_pos), parts, window)
    want = weights(q, k, q_pos, pos, window)[1]
    assert bool((got[:, :, 0] == -math.inf).all())
    close(got[:, :, 1:], want[:, :, 1:])


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
        kernel("triton.attention_mass").add_columns(
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
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    ("group", "size", "rows", "dtype"),
    [
        (3, 64, 5, torch.float32),
        (1, 80, 1, torch.bfloat16),
        (4, 128, 40, torch.float16),
        (1, 256, 3, torch.bfloat16),
        (2, 96, 9, torch.float32),
    ],
    ids=str,
)
def test_segments_of_uneven_heads(
    group: int, size: int, rows: int, dtype: torch.dtype, window: int | None
) -> None:
    lengths, holes = [63, 0, 1, 111, 2], [5, -1, -1, 110, 0]
    heads, first = len(lengths), 200
    starts = [3, 70, 70, 75, 190]
    q = draw(1, (heads, group, rows, size), dtype, 2.0)
    k, v = (draw(n, (200, size), dtype) for n in (2, 3))
    pos = torch.randperm(200, generator=randoms(4)).to(torch.int32)
    mine = [
        [s + j for j in range(n) if j != gone]
        for s, n, gone in zip(starts, lengths, holes, strict=True)
    ]
    for row in set(range(200)) - {row for rows_ in mine for row in rows_}:
        k[row] = v[row] = math.nan
    hole = [s + j if j >= 0 else -1 for s, j in zip(starts, holes, strict=True)]
    at = torch.arange(first, first + rows)
    layout = [guarded(torch.tensor(x)) for x in (starts, lengths, hole)]
    got, lse = kernel("triton.ragged_prefill").segments_attention(
        guarded(q),
        guarded(k),
        guarded(v),
        *layout,
        120,
        pos=guarded(pos),
        q_pos=guarded(at),
        window=window,
    )
    loose = 2e-5 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 3e-3
    for h, rows_ in enumerate(mine):
        where = pos[rows_].long()[None]
        p, whole = weights(q[h : h + 1], k[None, rows_], at, where, window)
        close(got[h : h + 1], torch.einsum("hgtn,hnd->hgtd", p, v[None, rows_].double()), loose)
        close(lse[h : h + 1], whole, 2e-5)
    twin = reference.segments_attention(
        q.float(),
        k.float(),
        v.float(),
        *(x.cpu() for x in layout),
        120,
        pos=pos,
        q_pos=at,
        window=window,
    )
    close(got, twin[0], loose)
    close(lse, twin[1], 2e-5)


@on_device
@pytest.mark.parametrize("size", [80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("before", [0, 37])
def test_survivors_move_into_segments(size: int, dtype: torch.dtype, before: int) -> None:
    """Every row to its place; whatever lies between the segments stays as it is."""
    heads, tokens = 4, 63
    fresh = draw(1, (heads, tokens, size), dtype), draw(2, (heads, tokens, size), dtype)
    old = draw(3, (heads * before + 2, size), dtype), draw(4, (heads * before + 2, size), dtype)
    at = torch.randperm(heads * before + 2, generator=randoms(5))[: heads * before]
    at = at.view(heads, before)
    keep = torch.rand((heads, before + tokens), generator=randoms(6)) < 0.6
    keep[1], keep[2] = False, True
    pos = torch.stack(
        [
            torch.cat((torch.randperm(before, generator=randoms(h)), before + torch.arange(tokens)))
            for h in range(heads)
        ]
    )
    index, count = reference.survivors(keep, pos)
    for h in range(heads):
        assert pos[h, index[h, : count[h]]].tolist() == sorted(pos[h, keep[h]].tolist())
    start = torch.cumsum(count + 2, 0) - count
    total = int(start[-1] + count[-1]) + 3
    into = [guarded(torch.full((total, size), 7.0, dtype=dtype)) for _ in range(2)]
    column = guarded(torch.full((total,), 7, dtype=torch.int32))
    want = [t.clone().cpu() for t in (*into, column)]
    lists = [guarded(t) for t in (index, count, start)]
    source = None if not before else (guarded(old[0]), guarded(old[1]), guarded(at))
    gather = kernel("triton.gather")
    staged = guarded(fresh[0]), guarded(fresh[1])
    gather.gather_rows(*lists, staged, source, tuple(into), before + tokens)
    gather.gather_column(*lists, guarded(pos), column, before + tokens)
    reference.gather_rows(
        index, count, start, fresh, (*old, at) if before else None, (want[0], want[1]), 100
    )
    reference.gather_column(index, count, start, pos, want[2], 100)
    for got, expected in zip((*into, column), want, strict=True):
        assert torch.equal(got.cpu(), expected)
    # The twin itself, written out.
    for h in range(heads):
        rows = [
            old[0][at[h, r]] if r < before else fresh[0][h, r - before]
            for r in index[h, : count[h]].tolist()
        ]
        begin = int(start[h])
        for r, row in enumerate(rows):
            assert torch.equal(want[0][begin + r], row)
    assert bool((want[0][: int(start[0])] == 7).all())


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
def test_prompts_read_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts and an answer between them: uneven heads, a sliding window, columns of a step
    policy. The same rows stay as with the twins."""
    from minikv.kernels.triton.table import Triton

    net = small.network(layers=2, heads=4, kv_heads=2, head_dim=16, windows=(None, 60))
    logits, kept = {}, {}
    for triton in (False, True):
        kv = small.scheduler(net, "h2o+ada", "roco", 40)
        engine, found, rows = Engine(net, kv), [], []
        for turn, count in enumerate((50, 30)):
            ops = Triton() if triton else Kernels()
            with monkeypatch.context() as patch:
                patch.setattr(kv, "ops", ops)
                found.append(engine.prompt(small.ids(count, turn)))
            rows.append([kv.kept(layer, h).tolist() for layer in (0, 1) for h in (0, 1)])
            found += [engine.step(token) for token in small.ids(2, 7)]
        logits[triton], kept[triton] = torch.stack(found), rows
    assert kept[True] == kept[False]
    close(logits[True], logits[False], 1e-4)

"""Attention of a decode step in Triton, against float64 arithmetic, on odd sizes, in NaN-guarded
memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from ragged import in_use, segments
from torch import Tensor
from triton_device import (
    DEVICE,
    INTERPRETED,
    close,
    draw,
    guarded,
    kernel,
    on_device,
    randoms,
    untouched,
)

from minikv.kernels import to_codes

pytest.importorskip("triton", reason="no Triton on this system")


def attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """In float64: output [H, G, D], log-sum-exp [H, G], logits of each head [G, n]; seen [R]."""
    mixed = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    logits = []
    for h in range(len(q)):
        rows = slice(int(start[h]), int(start[h] + length[h]))
        x = q[h].double() @ k[rows].double().T / math.sqrt(q.shape[2])
        x = x.masked_fill(~seen[rows], -math.inf)
        if x.shape[1]:
            lse[h] = x.logsumexp(-1)
            mixed[h] = x.softmax(-1).nan_to_num(0.0) @ v[rows].double()
        logits.append(x)
    return mixed, lse, logits


SEGMENTS = [
    # G, D, rows of each head, dtype, programs (None: as configured), of how many rows a tile
    (1, 64, [1], torch.float32, None, None),
    (3, 80, [0, 37, 1], torch.bfloat16, 7, 16),
    (4, 96, [16, 0, 130, 1, 5], torch.float32, 3, 32),
    (7, 128, [3, 0, 0, 200, 17, 64, 1, 16, 9], torch.bfloat16, 12, 64),
    (4, 128, [300, 2], torch.float16, None, None),
    (1, 256, [40, 33, 0], torch.bfloat16, 3, 16),
    (16, 64, [20, 50], torch.float32, 11, 16),
    (2, 64, [0, 0], torch.float32, 3, 16),
]
USES = ("all", "window", "logits")
IN_THE_INTERPRETER = {
    *((0, "all"), (3, "all"), (4, "all")),
    *((1, "window"), (2, "window"), (6, "window"), (7, "window")),
    *((1, "logits"), (2, "logits"), (4, "logits"), (5, "logits"), (7, "logits")),
}
"""Every case, and every use with every kind of case; a GPU takes them all."""


@on_device
@pytest.mark.parametrize(
    ("case", "sees"),
    [
        pytest.param(i, use, marks=[] if (i, use) in IN_THE_INTERPRETER else [pytest.mark.soak])
        for i in range(len(SEGMENTS))
        for use in USES
    ],
)
def test_attention_over_segments(case: int, sees: str) -> None:
    group, size, lengths, dtype, programs, block = SEGMENTS[case]
    decode = kernel("decode.gpu")
    start, length, rows = segments(lengths)  # type: ignore[arg-type]
    used = in_use(start, length, rows)
    q = draw(1, (len(length), group, size), dtype, 2.0)  # type: ignore[arg-type]
    k, v = (draw(i, (rows, size), dtype) for i in (2, 3))  # type: ignore[arg-type]
    k[~used] = v[~used] = math.nan
    pos = torch.randperm(rows, generator=randoms(4)).to(torch.int32)
    oldest = torch.tensor(rows // 3)
    for a, n in zip(start.tolist(), length.tolist(), strict=True):
        if n:
            pos[a + n // 2] = rows  # a head that has rows sees one
    seen = pos >= oldest if sees != "all" else torch.ones(rows, dtype=torch.bool)
    wide = max(lengths) + 5  # type: ignore[call-overload]
    logits = guarded(torch.full((*q.shape[:2], wide), 7.0)) if sees == "logits" else None
    lse = guarded(torch.zeros(q.shape[:2])) if sees == "logits" else None
    config = decode.configure(size, dtype, torch.device(DEVICE))
    if programs is not None:
        # Small pieces, whose parts are joined in several rounds.
        config = decode.Config(block, config.warps, config.stages, programs, least=1, joined=1)
    space = decode.workspace(len(q), group, size, config, torch.device(DEVICE))
    space.part.fill_(math.nan)
    space.lse.fill_(math.nan)
    arrived = guarded(torch.zeros(len(q), dtype=torch.int32))
    given = [guarded(t) for t in (q, k, v, start, length)]
    windowed = {} if sees == "all" else {"pos": guarded(pos), "oldest": oldest.to(DEVICE)}
    mixed, sums = decode.ragged_attention(
        *given,
        width=wide,
        **windowed,
        logits=logits,
        lse=lse,
        arrived=arrived,
        config=config,
        space=space,
    )
    assert not bool(arrived.any())
    assert untouched(arrived)
    want, want_lse, want_logits = attention(q, k, v, start, length, seen)
    loose = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]  # type: ignore[index]
    close(mixed, want, loose)
    close(sums, want_lse)
    assert mixed.dtype == dtype
    if logits is not None and lse is not None:
        assert sums is lse
        assert untouched(logits)
        assert untouched(lse)
        for h, x in enumerate(want_logits):
            close(logits[h, :, : x.shape[1]], x)
            assert bool((logits[h, :, x.shape[1] :] == 7.0).all())


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_rows_in_int8(dtype: torch.dtype) -> None:
    decode = kernel("decode.gpu")
    start, length, rows = segments([30, 0, 1, 70])
    q = draw(1, (4, 3, 96), dtype, 2.0)
    k, k_scale = to_codes(draw(2, (rows, 96), dtype))
    v, v_scale = to_codes(draw(3, (rows, 96), dtype))
    k_scale[~in_use(start, length, rows)] = math.nan
    given = [guarded(t) for t in (q, k, v, start, length)]
    mixed, lse = decode.ragged_attention(
        *given, width=70, k_scale=guarded(k_scale), v_scale=guarded(v_scale)
    )
    plain = k.double() * k_scale.double()[:, None], v.double() * v_scale.double()[:, None]
    want, want_lse, _ = attention(q, *plain, start, length, torch.ones(rows, dtype=torch.bool))
    close(mixed, want, 1e-5 if dtype == torch.float32 else 2e-2)
    close(lse, want_lse)


@on_device
def test_the_order_in_which_programs_arrive_changes_nothing() -> None:
    """The same counter serves launch after launch, and the results are the same to the last bit."""
    decode = kernel("decode.gpu")
    start, length, rows = segments([130, 0, 17, 64])
    q = draw(1, (4, 4, 64), torch.float16, 2.0)
    k, v = (draw(i, (rows, 64), torch.float16) for i in (2, 3))
    given = [guarded(t) for t in (q, k, v, start, length)]
    arrived = guarded(torch.zeros(4, dtype=torch.int32))
    config = decode.Config(16, 4, 2, 7, least=16, joined=1)
    first, *others = (
        decode.ragged_attention(*given, width=130, arrived=arrived, config=config)
        for _ in range(2 if INTERPRETED else 50)
    )
    want, _, _ = attention(q, k, v, start, length, torch.ones(rows, dtype=torch.bool))
    close(first[0], want, 2e-3)
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])

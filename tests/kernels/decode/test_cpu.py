"""Attention of a decode step in C, against float64 arithmetic and torch, on odd sizes, with NaN in
every row that no head has."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from drawing import close, randoms
from ragged import in_use, segments

from minikv.kernels import to_codes
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.decode import cpu as decode
from minikv.kernels.decode import plain as plain_torch
from minikv.kernels.native import build

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")
DTYPES = [torch.float32, torch.bfloat16]
WAYS = [
    pytest.param(decode.VECTORS, id="vectors"),
    pytest.param(
        decode.TILES,
        id="tiles",
        marks=pytest.mark.skipif(not prefill.TILES.available(), reason="there are no tiles"),
    ),
]
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


CASES = [
    (1, 64, [1]),
    (3, 80, [0, 37, 1]),
    (4, 96, [16, 0, 130, 1, 5]),
    (7, 128, [3, 0, 200, 17, 64]),
    (1, 256, [40, 33, 0]),
    (5, 8, [9, 30]),
    (2, 20, [31, 2]),
    (4, 64, [700, 900, 513]),
    (9, 32, [15, 16, 17, 0, 48]),
    (3, 128, [33, 160]),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size", "lengths"), CASES)
@pytest.mark.parametrize("sees", ["all", "window", "logits"])
def test_attention_over_segments(
    group: int, size: int, lengths: list[int], dtype: torch.dtype, sees: str, way: decode.Decode
) -> None:
    start, length, rows = segments(lengths)
    used = in_use(start, length, rows)
    q = randoms(1, len(lengths), group, size, dtype=dtype, by=2.0)
    k, v = (randoms(i, len(used), size, dtype=dtype) for i in (2, 3))
    k[~used] = v[~used] = math.nan
    pos = torch.randperm(len(used), generator=torch.Generator().manual_seed(4)).to(torch.int32)
    for a, n in zip(start.tolist(), lengths, strict=True):
        if n:
            pos[a + n // 2] = len(used)  # a head that has rows sees one
    oldest = torch.tensor(len(used) // 3)
    wide = max(lengths) + 5
    logits = torch.full((len(lengths), group, wide), 7.0) if sees == "logits" else None
    lse = torch.empty(len(lengths), group) if sees == "logits" else None
    windowed = {} if sees == "all" else {"pos": pos, "oldest": oldest}
    mixed, sums = way.ragged_attention(
        q, k, v, start, length, width=wide, logits=logits, lse=lse, **windowed
    )
    assert mixed.dtype == dtype
    for h, (a, n) in enumerate(zip(start.tolist(), lengths, strict=True)):
        x = q[h].double() @ k[a : a + n].double().T / math.sqrt(size)
        if sees != "all":
            x = x.masked_fill(pos[a : a + n] < oldest, -math.inf)
        want = x.softmax(-1) @ v[a : a + n].double() if n else torch.zeros(group, size)
        close(mixed[h], want, LOOSE[dtype])
        close(sums[h], x.logsumexp(-1) if n else torch.full((group,), -math.inf))
        if logits is not None:
            close(logits[h, :, :n], x)
            assert bool((logits[h, :, n:] == 7.0).all())
    if lse is not None:
        assert sums is lse


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 64, 96])
def test_attention_over_codes(dtype: torch.dtype, size: int, way: decode.Decode) -> None:
    start, length, rows = segments([30, 0, 1, 70])
    used = in_use(start, length, rows)
    q = randoms(1, 4, 3, size, dtype=dtype, by=2.0)
    (k, ks), (v, vs) = (to_codes(randoms(i, len(used), size)) for i in (2, 3))
    got, lse = way.ragged_attention(q, k, v, start, length, width=70, k_scale=ks, v_scale=vs)
    want, other = plain_torch.ragged_attention(
        q.double(), k.double() * ks[:, None], v.double() * vs[:, None], start, length, width=70
    )
    close(got, want, LOOSE[dtype])
    close(lse, other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_not_hidden(dtype: torch.dtype, way: decode.Decode) -> None:
    """A NaN in a row that is seen comes out, so that the turn is stopped."""
    q = randoms(1, 1, 2, 64, dtype=dtype)
    k, v = (randoms(i, 19, 64, dtype=dtype) for i in (2, 3))
    start, length = torch.tensor([0]), torch.tensor([19])
    for bad, row in product((math.nan, math.inf), (4, 17)):
        broken = k.clone()
        broken[row, 3] = bad
        mixed, _ = way.ragged_attention(q.abs(), broken, v, start, length, width=19)
        assert bool(mixed.isnan().any())


def test_without_positions_there_is_no_window() -> None:
    q, k = randoms(1, 1, 2, 64), randoms(2, 9, 64)
    given = q, k, k, torch.tensor([0]), torch.tensor([9])
    want, _ = decode.VECTORS.ragged_attention(*given, width=9)
    found, _ = decode.VECTORS.ragged_attention(*given, width=9, oldest=torch.tensor(4))
    assert torch.equal(found, want)


def test_torchs_defaults_do_not_matter() -> None:
    """The C writes float32, whatever torch would make."""
    q, k = randoms(1, 1, 2, 64, dtype=torch.bfloat16), randoms(2, 9, 64, dtype=torch.bfloat16)
    start, length = torch.tensor([0]), torch.tensor([9])
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, lse = decode.VECTORS.ragged_attention(q, k, k, start, length, width=9)
        logits = torch.zeros(1, 2, 9)
        decode.VECTORS.ragged_attention(q, k, k, start, length, width=9, logits=logits)
    finally:
        torch.set_default_dtype(torch.float32)
    assert lse.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    want = (q[0].float() @ k.float().T / 8).logsumexp(-1)
    close(lse[0], want, 1e-2)
    close(logits[0].logsumexp(-1), want, 5e-2)

"""A decode step's attention in every form, against float64 arithmetic, on odd sizes, in memory full
of NaN."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from forms import Form, each, forms, needs_c
from tensors import in_use, randoms, segments, untouched
from triton_device import INTERPRETED, close, guarded, kernel, on_device

from minikv.kernels import Segments, to_codes
from minikv.kernels.decode import cpu as decode
from minikv.kernels.decode import plain_cpu
from minikv.kernels.native import choice

SEGMENTS = [
    # G, D, rows of each head, dtype in Triton, its programs (None: as configured), rows of a tile
    (1, 64, [1], torch.float32, None, None),
    (3, 80, [0, 37, 1], torch.bfloat16, 7, 16),
    (4, 96, [16, 0, 130, 1, 5], torch.float32, 3, 32),
    (7, 128, [3, 0, 0, 200, 17, 64, 1, 16, 9], torch.bfloat16, 12, 64),
    (4, 128, [300, 2], torch.float16, None, None),
    (1, 256, [40, 33, 0], torch.bfloat16, 3, 16),
    (16, 64, [20, 50], torch.float32, 11, 16),
    (2, 64, [0, 0], torch.float32, 3, 16),
    (3, 8, [17, 17, 17], None, None, None),
    (5, 8, [9, 30], None, None, None),
    (2, 20, [31, 2], None, None, None),
    (4, 64, [700, 900, 513], None, None, None),
    (9, 32, [15, 16, 17, 0, 48], None, None, None),
    (3, 128, [33, 160], None, None, None),
]
USES = ("all", "window", "logits")
BY_DAY = {
    *((0, "all"), (3, "all"), (4, "all")),
    *((1, "window"), (2, "window"), (6, "window"), (7, "window")),
    *((1, "logits"), (2, "logits"), (4, "logits"), (5, "logits"), (7, "logits")),
}
"""In Triton's interpreter every case, and every use with every kind of case; a GPU takes them all.
"""


def takes(form: Form, case: tuple[int, str, torch.dtype]) -> bool:
    """A case has one dtype in Triton, and those of C's elsewhere."""
    i, sees, dtype = case
    if form.by == "triton":
        return dtype == SEGMENTS[i][3] and (not INTERPRETED or (i, sees) in BY_DAY)
    return dtype != torch.float16


CASES = [*product(range(len(SEGMENTS)), USES, (torch.float32, torch.bfloat16, torch.float16))]


def tiled(form: Form, size: int, dtype: torch.dtype, heads: int, group: int, tiles: Any) -> Any:
    """For Triton: small pieces, whose parts are joined in several rounds, in memory full of NaN."""
    programs, block = tiles
    if form.by != "triton":
        return {}
    from minikv.kernels.decode import gpu

    device = torch.device(form.device)
    config = gpu.configure(size, dtype, device)
    if programs is not None:
        config = gpu.Config(block, config.warps, config.stages, programs, least=1, joined=1)
    space = gpu.workspace(heads, group, size, config, device)
    for parts in space:
        parts.fill_(math.nan)
    arrived = form.place(torch.zeros(heads, dtype=torch.int32))
    return {"arrived": arrived, "config": config, "space": space}


@pytest.mark.parametrize(("form", "case"), each(forms("ragged_attention"), CASES, takes))
def test_attention_over_segments(form: Form, case: tuple[int, str, torch.dtype]) -> None:
    i, sees, dtype = case
    group, size, lengths, _, *tiles = SEGMENTS[i]
    heads = len(lengths)
    start, length, rows = segments(lengths, gap=5)
    used = in_use(start, length, rows)
    q = randoms(1, heads, group, size, dtype=dtype, by=2.0)
    k, v = (randoms(i, rows, size, dtype=dtype) for i in (2, 3))
    k[~used] = v[~used] = math.nan
    pos = torch.randperm(rows, generator=torch.Generator().manual_seed(4)).to(torch.int32)
    oldest = torch.tensor(rows // 3)
    for a, n in zip(start.tolist(), lengths, strict=True):
        if n:
            pos[a] = oldest  # the last row that is seen
            pos[a + n // 2] = rows  # a head that has rows sees one
    wide = max(lengths) + 5
    logits = lse = None
    if sees == "logits":
        logits = form.place(torch.full((heads, group, wide), 7.0))
        lse = form.place(torch.zeros(heads, group))
    windowed = {} if sees == "all" else {"pos": form.place(pos), "oldest": form.place(oldest)}
    more = tiled(form, size, dtype, heads, group, tiles)
    query, *given = map(form.place, (q, k, v, start, length))
    mixed, sums = form(query, Segments(*given, wide, **windowed), logits, lse, **more)
    assert mixed.dtype == dtype
    loose, exact = form.loose(dtype), form.loose(dtype if form.by == "torch" else torch.float32)
    for h, (a, n) in enumerate(zip(start.tolist(), lengths, strict=True)):
        x = q[h].double() @ k[a : a + n].double().T / math.sqrt(size)
        if sees != "all":
            x = x.masked_fill(pos[a : a + n] < oldest, -math.inf)
        want = x.softmax(-1) @ v[a : a + n].double() if n else torch.zeros(group, size)
        close(mixed[h], want, loose)
        close(sums[h], x.logsumexp(-1) if n else torch.full((group,), -math.inf), exact)
        if logits is not None:
            close(logits[h, :, :n], x, exact)
            assert form.by == "torch" or bool((logits[h, :, n:] == 7.0).all())
    if logits is not None and lse is not None:
        assert sums is lse
        assert untouched(logits)
        assert untouched(lse)
    if more:
        assert not bool(more["arrived"].any())
        assert untouched(more["arrived"])


@pytest.mark.parametrize("form", forms("ragged_attention"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [20, 64, 96])
def test_attention_over_rows_in_int8(form: Form, dtype: torch.dtype, size: int) -> None:
    if form.by == "triton" and size != 96:
        pytest.skip("by day one size, and none of 20")
    start, length, rows = segments([30, 0, 1, 70])
    q = randoms(1, 4, 3, size, dtype=dtype, by=2.0)
    (k, ks), (v, vs) = (to_codes(randoms(i, rows, size, dtype=dtype)) for i in (2, 3))
    ks[~in_use(start, length, rows)] = math.nan
    query, *given = map(form.place, (q, k, v, start, length))
    scales = {"k_scale": form.place(ks), "v_scale": form.place(vs)}
    got, lse = form(query, Segments(*given, 70, **scales))
    for h, (a, n) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        keys, values = (
            x[a : a + n].double() * by[a : a + n].double()[:, None] for x, by in ((k, ks), (v, vs))
        )
        x = q[h].double() @ keys.T / math.sqrt(size)
        close(got[h], x.softmax(-1) @ values if n else torch.zeros(3, size), form.loose(dtype))
        close(lse[h], x.logsumexp(-1), form.loose(dtype if form.by == "torch" else torch.float32))


@pytest.mark.parametrize("form", forms("ragged_attention", torch_too=False))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(form: Form, dtype: torch.dtype, bad: float) -> None:
    """A NaN in a row that is seen comes out, so that the turn is stopped."""
    q = randoms(1, 1, 2, 64, dtype=dtype).abs()
    k, v = (randoms(i, 19, 64, dtype=dtype) for i in (2, 3))
    for row in (4, 17):
        broken = k.clone()
        broken[row, 3] = bad
        query, *given = map(form.place, (q, broken, v, torch.tensor([0]), torch.tensor([19])))
        assert bool(form(query, Segments(*given, 19))[0].isnan().any())


@on_device
def test_the_order_in_which_programs_arrive_changes_nothing() -> None:
    """The same counter serves launch after launch, and the results are the same to the last bit."""
    gpu = kernel("decode.gpu")
    start, length, rows = segments([130, 0, 17, 64])
    q = randoms(1, 4, 4, 64, dtype=torch.float16, by=2.0)
    k, v = (randoms(i, rows, 64, dtype=torch.float16) for i in (2, 3))
    query, *given = [guarded(t) for t in (q, k, v, start, length)]
    arrived = guarded(torch.zeros(4, dtype=torch.int32))
    config = gpu.Config(16, 4, 2, 7, least=16, joined=1)
    first, *others = (
        gpu.ragged_attention(query, Segments(*given, 130), arrived=arrived, config=config)
        for _ in range(2 if INTERPRETED else 50)
    )
    for h, (a, n) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        p = (q[h].double() @ k[a : a + n].double().T / 8).softmax(-1)
        close(first[0][h], p @ v[a : a + n].double(), 2e-3)
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


@needs_c
def test_without_positions_there_is_no_window() -> None:
    q, k = randoms(1, 1, 2, 64), randoms(2, 9, 64)
    rows = Segments(k, k, torch.tensor([0]), torch.tensor([9]), 9)
    want, _ = decode.VECTORS.ragged_attention(q, rows)
    found, _ = decode.VECTORS.ragged_attention(q, rows._replace(oldest=torch.tensor(4)))
    assert torch.equal(found, want)


@pytest.mark.skipif(INTERPRETED, reason="torch on a CPU")
@pytest.mark.parametrize("lengths", [(40, 40, 40), (40, 17, 23), (40, 0, 3)])
@pytest.mark.parametrize("most", [1 << 22, 100])
def test_without_products_of_bfloat16_float32_multiplies(
    lengths: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are not rounded to bfloat16, however many rows are converted together."""
    start, length = torch.arange(3) * 41, torch.tensor(lengths)
    q = randoms(1, 3, 2, 64, dtype=torch.bfloat16)
    k, v = randoms(2, 2, 3 * 41, 64, dtype=torch.bfloat16)

    def off(native: bool) -> float:
        """The largest error of a logit, which is float32 whatever multiplied."""
        monkeypatch.setattr(choice, "multiplies_bf16", lambda: native)
        monkeypatch.setattr(plain_cpu, "_CONVERTED", most)
        logits = torch.full((3, 2, 40), math.nan)
        plain_cpu.ragged_attention(q, Segments(k, v, start, length, 40), logits)
        worst = 0.0
        for h, n in enumerate(lengths):
            want = q[h].double() @ k[start[h] : start[h] + n].double().T / 8
            worst = max(worst, float((logits[h, :, :n] - want).abs().max()) if n else 0.0)
        return worst

    assert off(native=False) < 1e-5
    assert off(native=True) > 1e-4

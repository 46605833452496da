"""Expected Attention, in Triton: moments of queries, and the attention that queries with these
moments give. Specification: `torch/expected.py`.

A first launch computes the logits of a tile of rows, with the largest one and the sum of the
exponentials of the tile; a second one joins these of all tiles, in a fixed order. The products of
keys and covariances are not stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.quadratic import PART, quadratic, quadratic_tile
from minikv.kernels.triton.tiles import head_stride, in_rows, lines, power, row_stride, typed, width
from minikv.kernels.triton.variants import WIDE, Variant

_TOKENS, _COLUMNS = 64, 16  # queries, and numbers of each half of them, that a program has at once
_LINES = 16  # rows of a covariance in a program
_TOGETHER = 128  # tiles whose sums are joined at once
_NUMBERS = 4096  # of values in a program


@triton.jit(
    do_not_specialize=["q_head", "q_group", "q_row", "group", "tokens"],
    do_not_specialize_on_alignment=["cos", "sin"],
)
def _unrotated(
    q,
    cos,
    sin,
    sums,
    out,
    new_sums,
    q_head,
    q_group,
    q_row,
    group,
    tokens,
    HALF: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    first = head // group * q_head + head % group * q_group
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    inside = d < HALF
    top = tl.zeros((BD,), tl.float64)
    bottom = tl.zeros((BD,), tl.float64)
    for s in tl.range(0, tokens, BT):
        t = s + tl.arange(0, BT)
        ok = (t < tokens)[:, None] & inside[None, :]
        line = (first + t.to(tl.int64) * q_row)[:, None] * (2 * HALF) + d[None, :]
        one = tl.load(q + line, mask=ok, other=0.0).to(tl.float64)
        two = tl.load(q + line + HALF, mask=ok, other=0.0).to(tl.float64)
        angle = t.to(tl.int64)[:, None] * HALF + d[None, :]
        cosine = tl.load(cos + angle, mask=ok, other=0.0)
        sine = tl.load(sin + angle, mask=ok, other=0.0)
        left = one * cosine + two * sine
        right = two * cosine - one * sine
        target = (head * tokens + t.to(tl.int64))[:, None] * (2 * HALF) + d[None, :]
        tl.store(out + target, left, mask=ok)
        tl.store(out + target + HALF, right, mask=ok)
        top += tl.sum(left, 0)
        bottom += tl.sum(right, 0)
    at = head * (2 * HALF) + d
    tl.store(new_sums + at, tl.load(sums + at, mask=inside, other=0.0) + top, mask=inside)
    at += HALF
    tl.store(new_sums + at, tl.load(sums + at, mask=inside, other=0.0) + bottom, mask=inside)


@triton.jit
def _half(sums, outer, one, i, j, ok, count, D: tl.constexpr):
    """The covariances of numbers i and j of a head's queries, float32 [i, j]."""
    there = outer + (one + i[:, None]) * D + j[None, :]
    found = tl.load(there, mask=ok, other=0.0) / count
    mine = tl.load(sums + one + i, mask=i < D, other=0.0) / count
    other = tl.load(sums + one + j, mask=j < D, other=0.0) / count
    return (found - mine[:, None] * other[None, :]).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _turned(
    sums,
    outer,
    turn,
    mean,
    covariance,
    count,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BI: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    one = tl.program_id(1).to(tl.int64) * D
    many = count.to(tl.float64)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    j = tl.arange(0, HP)
    ok = (i < HALF)[:, None] & (j < HALF)[None, :]
    ci = tl.load(turn + i * (D + 1), mask=i < HALF, other=0.0)
    si = tl.load(turn + (i + HALF) * D + i, mask=i < HALF, other=0.0)
    cj = tl.load(turn + j * (D + 1), mask=j < HALF, other=0.0)[None, :]
    sj = tl.load(turn + (j + HALF) * D + j, mask=j < HALF, other=0.0)[None, :]
    top = (tl.load(sums + one + i, mask=i < HALF, other=0.0) / many).to(tl.float32)
    bottom = (tl.load(sums + one + HALF + i, mask=i < HALF, other=0.0) / many).to(tl.float32)
    tl.store(mean + one + i, ci * top - si * bottom, mask=i < HALF)
    tl.store(mean + one + HALF + i, si * top + ci * bottom, mask=i < HALF)
    ci = ci[:, None]
    si = si[:, None]
    a = _half(sums, outer, one, i, j, ok, many, D)
    b = _half(sums, outer, one, i, j + HALF, ok, many, D)
    c = _half(sums, outer, one, i + HALF, j, ok, many, D)
    d = _half(sums, outer, one, i + HALF, j + HALF, ok, many, D)
    upper = ci * a - si * c
    beside = ci * b - si * d
    lower = si * a + ci * c
    across = si * b + ci * d
    here = covariance + (one + i[:, None]) * D + j[None, :]
    tl.store(here, upper * cj - beside * sj, mask=ok)
    tl.store(here + HALF, upper * sj + beside * cj, mask=ok)
    here += HALF * D
    tl.store(here, lower * cj - across * sj, mask=ok)
    tl.store(here + HALF, lower * sj + across * cj, mask=ok)


@triton.jit(
    do_not_specialize=["k_head", "k_row", "free_head", "rows"],
    do_not_specialize_on_alignment=["free"],
)
def _expected_logits(
    key,
    free,
    mean,
    covariance,
    logits,
    tops,
    totals,
    k_head,
    k_row,
    free_head,
    rows,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    COVARIANCE: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    inside = d < D
    real = i < rows
    line = (h * k_head + i.to(tl.int64) * k_row)[:, None] * D
    mine = tl.load(key + line + d[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    mine = mine.to(tl.float32)
    may = tl.load(free + h * free_head + i, mask=real, other=0) != 0
    for g in tl.range(0, G):
        head = h * G + g
        middle = tl.load(mean + head * D + d, mask=inside, other=0.0)
        x = tl.sum(mine * middle[None, :], 1) * scale
        if COVARIANCE:
            matrix = covariance + head * (D * D)
            x += quadratic(mine, key, line, real, matrix, D, DP, BM, BK) / (2.0 * D)
        x = tl.where(may, x, -float("inf"))
        tl.store(logits + head * rows + i, x, mask=real)
        top = tl.max(x, 0)
        base = tl.where(top == -float("inf"), 0.0, top)
        at = head * tl.num_programs(0) + tl.program_id(0)
        tl.store(tops + at, top)
        tl.store(totals + at, tl.sum(tl.exp(x - base), 0))


@triton.jit(do_not_specialize=["v_head", "v_row", "rows", "tiles"])
def _expected_worth(
    logits,
    tops,
    totals,
    value,
    out,
    v_head,
    v_row,
    rows,
    tiles,
    epsilon,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    VALUE: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    real = i < rows
    worth = tl.zeros((BM,), tl.float32)
    for g in tl.range(0, G):
        head = h * G + g
        best = tl.full((BT,), -float("inf"), tl.float32)
        for s in tl.range(0, tiles, BT):
            t = s + tl.arange(0, BT)
            here = tl.load(tops + head * tiles + t, mask=t < tiles, other=-float("inf"))
            best = tl.maximum(best, here)
        top = tl.max(best, 0)
        top = tl.where(top == -float("inf"), 0.0, top)
        total = tl.zeros((BT,), tl.float32)
        for s in tl.range(0, tiles, BT):
            t = s + tl.arange(0, BT)
            here = tl.load(tops + head * tiles + t, mask=t < tiles, other=-float("inf"))
            part = tl.load(totals + head * tiles + t, mask=t < tiles, other=0.0)
            total += part * tl.exp(here - top)
        x = tl.load(logits + head * rows + i, mask=real, other=-float("inf"))
        worth += tl.exp(x - top) / tl.sum(total, 0)
    worth = worth / G
    if VALUE:
        d = tl.arange(0, DP)
        line = (h * v_head + i.to(tl.int64) * v_row)[:, None] * D + d[None, :]
        v = tl.load(value + line, mask=real[:, None] & (d < D)[None, :], other=0.0)
        v = v.to(tl.float32)
        worth = (worth + epsilon) * tl.sqrt_rn(tl.sum(v * v, 1))
    tl.store(out + h * rows + i, worth, mask=real)


def added_moments(sums: Tensor, outer: Tensor, q: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """See `torch.expected.added_moments`."""
    heads, group, tokens, size = q.shape
    if tokens == 0:
        return sums, outer
    q, half = in_rows(q), size // 2
    cos, sin = angle.cos(), angle.sin()
    sums = sums.contiguous()
    plain = torch.empty((heads * group, tokens, size), dtype=torch.float64, device=q.device)
    new_sums = torch.empty_like(sums)
    _unrotated[(-(-half // _COLUMNS), heads * group)](
        q,
        cos,
        sin,
        sums,
        plain,
        new_sums,
        *(row_stride(q, dim) for dim in (0, 1, 2)),
        group,
        tokens,
        HALF=half,
        BT=_TOKENS,
        BD=_COLUMNS,
    )
    added = torch.baddbmm(outer.flatten(0, 1), plain.transpose(1, 2), plain)
    return new_sums, added.view(outer.shape)


def turned_moments(sums: Tensor, outer: Tensor, count: int, turn: Tensor) -> tuple[Tensor, Tensor]:
    """See `torch.expected.turned_moments`."""
    sums, outer, turn = sums.contiguous(), outer.contiguous(), turn.contiguous()
    heads, group, size = sums.shape
    mean = torch.empty_like(sums, dtype=torch.float32)
    covariance = torch.empty_like(outer, dtype=torch.float32)
    half = size // 2
    _turned[(-(-half // _LINES), heads * group)](
        sums,
        outer,
        turn,
        mean,
        covariance,
        max(1, count),
        HALF=half,
        HP=power(half),
        BI=_LINES,
    )
    return mean, covariance


def expected_attention(
    key: Tensor,
    free: Tensor,
    mean: Tensor,
    covariance: Tensor | None = None,
    value: Tensor | None = None,
    epsilon: float = 0.0,
    most: int = 0,
) -> Tensor:
    """See `torch.expected.expected_attention`. `most` is not needed."""
    key, free, mean = in_rows(key), lines(free), mean.contiguous()
    heads, rows, size = key.shape
    group, tile, block = mean.shape[1], quadratic_tile(size), _NUMBERS // power(size)
    tiles = max(1, -(-rows // tile.left))
    logits = torch.empty((heads, group, rows), dtype=torch.float32, device=key.device)
    out = torch.empty((heads, rows), dtype=torch.float32, device=key.device)
    # Apart, so that both begin at a multiple of 16 bytes.
    tops, totals = (
        torch.empty((heads, group, tiles), dtype=torch.float32, device=key.device) for _ in range(2)
    )
    _expected_logits[(tiles, heads)](
        key,
        free,
        mean,
        mean if covariance is None else covariance.contiguous(),
        logits,
        tops,
        totals,
        *(row_stride(key, dim) for dim in (0, 1)),
        head_stride(free),
        rows,
        size**-0.5,
        G=group,
        D=size,
        DP=width(size),
        BM=tile.left,
        BK=tile.right,
        COVARIANCE=covariance is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    given = key if value is None else in_rows(value)
    _expected_worth[(max(1, -(-rows // block)), heads)](
        logits,
        tops,
        totals,
        given,
        out,
        *(row_stride(given, dim) for dim in (0, 1)),
        rows,
        tiles,
        float(epsilon),
        G=group,
        D=size,
        DP=power(size),
        BM=block,
        BT=_TOGETHER,
        VALUE=value is not None,
    )
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    found = []
    for size, kind, group in (
        (128, "bf16", 4),
        (80, "fp16", 1),
        (256, "bf16", 2),
        (128, "fp32", 4),
    ):
        tile, half = quadratic_tile(size), size // 2
        doubles = dict.fromkeys(("cos", "sin", "sums", "outer", "new_sums"), "*fp64")
        floats = ("turn", "mean", "covariance", "logits", "tops", "totals", "out")
        kinds = dict.fromkeys(floats, "*fp32") | doubles | {"epsilon": "fp32", "free": "*i1"}
        kinds |= dict.fromkeys(("q", "key", "value"), f"*{kind}")
        wide: dict[str, object] = {"G": group, "D": size}
        for fn, constants, more, warps, stages in (
            (_unrotated, {"HALF": half, "BT": _TOKENS, "BD": _COLUMNS}, {"out": "*fp64"}, 4, 2),
            (_turned, {"HALF": half, "HP": power(half), "BI": _LINES}, {}, 4, 2),
            (
                _expected_logits,
                wide | {"DP": width(size), "BM": tile.left, "BK": tile.right, "COVARIANCE": True},
                {},
                tile.warps,
                tile.stages,
            ),
            (
                _expected_worth,
                wide
                | {
                    "DP": power(size),
                    "BM": _NUMBERS // power(size),
                    "BT": _TOGETHER,
                    "VALUE": True,
                },
                {},
                4,
                2,
            ),
        ):
            if fn is _turned and kind != "bf16":
                continue
            name = f"{fn.__name__.strip('_').replace('_', '-')}-{kind}-d{size}"
            signature = typed(fn, kinds | more, constants)
            reads = dict.fromkeys({"q", "value"} & set(signature), WIDE)
            if fn is _expected_logits:
                reads["key"] = PART
            found.append(Variant(name, fn, signature, constants, warps, stages, reads=reads))
    return found

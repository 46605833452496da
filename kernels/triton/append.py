"""The newcomer's row in every column of the arena, in one launch for a layer, in Triton.

`append` writes to a row that is known, `advance` says for all layers where that is. `hash_append`
is HashEvict's whole step before attention: it hashes the queries and the new key, finds the row
least like the queries by the Hamming distance of packed codes, sets that row aside and writes the
newcomer over it. Specifications: the functions of these names in `reference`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.step import NONE, free_rows, lower, lowest, ones
from minikv.kernels.triton.tiles import power, typed
from minikv.kernels.triton.variants import Variant

_BLOCK, _WARPS = 1024, 8  # of `hash_append`


@triton.jit
def _coded(x):
    """A row as int8, and its scale: `reference.to_codes`."""
    x = x.to(tl.float32)
    most = tl.max(tl.abs(x), 0)
    scale = tl.where(most == 0, 1.0, tl.div_rn(most, 127.0))
    scale = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), scale)
    code = tl.div_rn(x, scale) + 12582912.0  # 1.5 * 2^23: rounds to a whole number, half to even
    return tl.minimum(tl.maximum(code - 12582912.0, -127.0), 127.0), scale


@triton.jit(
    do_not_specialize=["key_row", "value_row"],
    do_not_specialize_on_alignment=["key", "value", "slot", "position"],
)
def _append(
    key,
    value,
    slot,
    position,
    k,
    v,
    pos,
    blank,
    k_scale,
    v_scale,
    key_row,
    value_row,
    D: tl.constexpr,
    DP: tl.constexpr,
    CODED: tl.constexpr,
):
    head = tl.program_id(0)
    d = tl.arange(0, DP)
    at = tl.load(slot + head)
    new_key = tl.load(key + head * key_row + d, mask=d < D, other=0.0)
    new_value = tl.load(value + head * value_row + d, mask=d < D, other=0.0)
    if CODED:
        new_key, scale = _coded(new_key)
        tl.store(k_scale + at, scale)
        new_value, scale = _coded(new_value)
        tl.store(v_scale + at, scale)
        new_key = new_key.to(tl.int8)
        new_value = new_value.to(tl.int8)
    tl.store(k + at * D + d, new_key, mask=d < D)
    tl.store(v + at * D + d, new_value, mask=d < D)
    tl.store(pos + at, tl.load(position).to(tl.int32))
    for i in tl.static_range(len(blank)):
        tl.store(blank[i] + at, tl.zeros((), tl.int32).to(blank[i].dtype.element_ty))


@triton.jit
def _code(x, matrix, d, B: tl.constexpr, BP: tl.constexpr, D: tl.constexpr):
    """int64: the signs of x [DP] @ matrix [D, B], bit b for column b; zero is positive."""
    b = tl.arange(0, BP)
    inside = (d < D)[:, None] & (b < B)[None, :]
    columns = tl.load(matrix + d[:, None] * B + b[None, :], mask=inside, other=0.0)
    along = tl.sum(columns * x.to(tl.float32)[:, None], 0)
    return tl.sum(((along >= 0) & (b < B)).to(tl.int64) << b, 0)


@triton.jit(
    do_not_specialize=[
        "key_row",
        "value_row",
        "probe_head",
        "probe_row",
        "sinks",
        "recent",
        "pinned",
    ],
    do_not_specialize_on_alignment=[
        "probe",
        "key",
        "value",
        "matrix",
        "start",
        "length",
        "cap",
        "hole",
        "position",
        "spare_k",
        "spare_v",
        "spare_pos",
        "spare_code",
    ],
)
def _hash_append(
    probe,
    key,
    value,
    matrix,
    start,
    length,
    cap,
    hole,
    position,
    k,
    v,
    pos,
    code,
    spare_k,
    spare_v,
    spare_pos,
    spare_code,
    probe_head,
    probe_row,
    key_row,
    value_row,
    sinks,
    recent,
    pinned,
    P: tl.constexpr,
    PP: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0)
    d = tl.arange(0, DP)
    count = tl.load(length + head).to(tl.int32)
    begin = tl.load(start + head)
    now = tl.load(position)
    slot = tl.load(hole + head)
    new_key = tl.load(key + head * key_row + d, mask=d < D, other=0.0)
    if slot < 0:
        slot = begin + count
        if count >= tl.load(cap + head):
            probes = tl.arange(0, PP)
            codes = tl.zeros((PP,), tl.int64)
            for p in tl.static_range(P):
                x = tl.load(probe + head * probe_head + p * probe_row + d, mask=d < D, other=0.0)
                codes = tl.where(probes == p, _code(x, matrix, d, B, BP, D), codes)
            n = tl.arange(0, BN)
            best = tl.full((BN,), NONE, tl.int64)
            row = tl.zeros((BN,), tl.int32)
            rest = best
            other = row
            for s in tl.range(0, count, BN):
                j = s + n
                ok = j < count
                stored = tl.load(code + begin + j, mask=ok, other=0).to(tl.int64)
                apart = tl.zeros((BN,), tl.int32)
                for p in tl.static_range(P):
                    differ = tl.sum(tl.where(probes == p, codes, 0), 0) ^ stored
                    apart += ones(differ.to(tl.uint32)).to(tl.int32)
                    if B > 32:
                        apart += ones((differ >> 32).to(tl.uint32)).to(tl.int32)
                at = tl.load(pos + begin + j, mask=ok, other=-1)
                shown = ok & (at >= pinned)
                # The largest distance leaves, of equal ones the oldest row.
                rank = ((P * B - apart).to(tl.int64) << 32) | at.to(tl.int64)
                best, row = lower(
                    best, row, rank, j, free_rows(at, shown, now - 1, sinks, recent, True)
                )
                rest, other = lower(
                    rest, other, rank, j, free_rows(at, shown, now - 1, sinks, recent, False)
                )
            least, found = lowest(best, row)
            if least == NONE:
                least, found = lowest(rest, other)
            slot = begin + found
            old_k = tl.load(k + slot * D + d, mask=d < D)
            old_v = tl.load(v + slot * D + d, mask=d < D)
            tl.store(spare_k + head * D + d, old_k, mask=d < D)
            tl.store(spare_v + head * D + d, old_v, mask=d < D)
            tl.store(spare_pos + head, tl.load(pos + slot))
            tl.store(spare_code + head, tl.load(code + slot))
            tl.store(hole + head, slot)
            tl.debug_barrier()  # the row is read before any thread overwrites it
    tl.store(k + slot * D + d, new_key, mask=d < D)
    tl.store(v + slot * D + d, tl.load(value + head * value_row + d, mask=d < D), mask=d < D)
    tl.store(pos + slot, now.to(tl.int32))
    mine = _code(new_key, matrix, d, B, BP, D)
    tl.store(code + slot, mine.to(code.dtype.element_ty))


@triton.jit
def _advance(
    go,
    start,
    length,
    cap,
    hole,
    position,
    count,
    slot,
    taken,
    N: tl.constexpr,
    NP: tl.constexpr,
    BEFORE: tl.constexpr,
):
    i = tl.arange(0, NP)
    ok = i < N
    final = tl.load(go)
    rows = tl.where(
        final, tl.load(count + i, mask=ok, other=0), tl.load(length + i, mask=ok, other=0)
    )
    tl.store(length + i, rows, mask=ok)
    gap = tl.load(hole + i, mask=ok, other=-1)
    still = gap >= 0
    tl.store(slot + i, tl.where(still, gap, tl.load(start + i, mask=ok, other=0) + rows), mask=ok)
    left = (tl.load(taken + i, mask=ok, other=0) != 0) & (final == 0)
    if BEFORE:
        asked = (gap < 0) & (rows >= tl.load(cap + i, mask=ok, other=0))
        left = left | asked
        still = still | asked
    tl.store(taken + i, left, mask=ok)
    tl.store(count + i, tl.where(still, rows, rows + 1), mask=ok)
    told = tl.load(position)
    tl.debug_barrier()  # every thread has read them
    tl.store(position, told + final.to(tl.int64))
    tl.store(go, final & (final == 0))


def append(
    key: Tensor,
    value: Tensor,
    slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    blank: Sequence[Tensor],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`reference.append` on the device."""
    assert key.stride(1) == value.stride(1) == 1
    size = key.shape[1]
    _append[(len(key),)](
        key,
        value,
        slot,
        position,
        k,
        v,
        pos,
        tuple(blank),
        k_scale,
        v_scale,
        key.stride(0),
        value.stride(0),
        D=size,
        DP=power(size),
        CODED=k_scale is not None,
        num_warps=1,
    )


def advance(
    go: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    hole: Tensor,
    position: Tensor,
    count: Tensor,
    slot: Tensor,
    taken: Tensor,
    *,
    before: bool,
) -> None:
    """`reference.advance` on the device."""
    given = (start, length, cap, hole, count, slot, taken)
    assert all(t.is_contiguous() for t in given)
    heads = length.numel()
    _advance[(1,)](
        go,
        start,
        length,
        cap,
        hole,
        position,
        count,
        slot,
        taken,
        N=heads,
        NP=power(heads),
        BEFORE=before,
        num_warps=4,
    )


def hash_append(
    probe: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    hole: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    code: Tensor,
    spare: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    width: int,
    sinks: int,
    recent: int,
    pinned: int,
    block: int = _BLOCK,
) -> None:
    """`reference.hash_append` on the device; `width` is not needed, `block` rows at once."""
    heads, probes, size = probe.shape
    bits = matrix.shape[1]
    assert probe.stride(2) == key.stride(1) == value.stride(1) == 1
    assert all(t.is_contiguous() for t in (matrix, start, length, cap, hole, k, v, *spare))
    _hash_append[(heads,)](
        probe,
        key,
        value,
        matrix,
        start,
        length,
        cap,
        hole,
        position,
        k,
        v,
        pos,
        code,
        *spare,
        probe.stride(0),
        probe.stride(1),
        key.stride(0),
        value.stride(0),
        sinks,
        recent,
        pinned,
        P=probes,
        PP=power(probes),
        B=bits,
        BP=power(bits),
        D=size,
        DP=power(size),
        BN=block,
        num_warps=_WARPS,
    )


def variants() -> list[Variant]:
    """Builds for the compile gate, columns as policies declare them."""
    found = []
    kinds: dict[str, str | tuple[str, ...]] = {
        "key": "*bf16",
        "value": "*bf16",
        "slot": "*i64",
        "position": "*i64",
        "k": "*bf16",
        "v": "*bf16",
        "pos": "*i32",
        "probe": "*bf16",
        "matrix": "*fp32",
        "start": "*i64",
        "length": "*i64",
        "cap": "*i64",
        "hole": "*i64",
        "spare_k": "*bf16",
        "spare_v": "*bf16",
        "spare_pos": "*i32",
    }
    blanks: dict[str, tuple[str, ...]] = {
        "none": (),
        "int8": (),
        "h2o": ("*fp32",),
        "roco": ("*fp32",) * 3,
        "scissorhands": (*("*i64",) * 13, "*fp32"),
    }
    sides = dict.fromkeys(("start", "length", "cap", "hole", "position", "count", "slot"), "*i64")
    for before in (False, True):
        fixed: dict[str, object] = {"N": 256, "NP": 256, "BEFORE": before}
        signature = typed(_advance, sides | {"go": "*i1", "taken": "*i1"}, fixed)
        name = "advance" + "-before" * before
        found.append(Variant(name, _advance, signature, fixed, vector=False))
    for size, names, count, probes in _BUILDS:
        constants: dict[str, object] = {"D": size, "DP": power(size)}
        for name in names:
            coded = name == "int8"
            more = constants | {"CODED": coded}
            scales: dict[str, str | tuple[str, ...]] = {"k_scale": "*fp32", "v_scale": "*fp32"}
            if coded:
                scales |= {"k": "*i8", "v": "*i8"}
            else:
                more |= dict.fromkeys(scales)
            own = {n: t for n, t in scales.items() if n not in more} | {"blank": blanks[name]}
            signature = typed(_append, kinds | own, more)
            found.append(
                Variant(f"append-{name}-{size}", _append, signature, more, 1, vector=False)
            )
        kind = "*i16" if count < 16 else "*i32" if count < 32 else "*i64"
        more = constants | {
            "P": probes,
            "PP": power(probes),
            "B": count,
            "BP": power(count),
            "BN": _BLOCK,
        }
        signature = typed(_hash_append, kinds | {"code": kind, "spare_code": kind}, more)
        found.append(
            Variant(
                f"hash-append-{size}-{count}x{probes}",
                _hash_append,
                signature,
                more,
                _WARPS,
                vector=False,
            )
        )
    return found


_BUILDS = [
    (80, ("none",), 8, 4),
    (128, ("int8", "h2o", "scissorhands"), 24, 1),
    (256, ("int8", "roco"), 64, 4),
]
"""Head size, what `append` blanks or how it stores, bits of a code, probes."""

"""HashEvict before attention, in Triton, in one launch for a layer.

The tiles of a full head's rows are divided among several programs. Each hashes the queries and
finds, among its rows, the one least similar to them by the Hamming distance of hash codes. The last
program to finish takes the least similar of these rows, and overwrites it with the new row. Source:
arXiv 2412.16187, section 3.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minikv.kernels.append.gpu import turned_rows
from minikv.kernels.decode.plain import HashRule, NewRow
from minikv.kernels.evict.gpu import NONE, lower, lowest_of, may_leave, popcount
from minikv.kernels.gpu import power, quantized

_OWN = ("k", "v", "pos", "code", "k_scale", "v_scale")
_BLOCK, _WARPS = 1024, 8
_PARTS = 16  # at most, per head
_AT_ONCE = 8192  # how many products of probes and the matrix fit the registers
_AFTER = tl.constexpr(1 << 60)  # added to the key of a row that leaves only if no other row may


@triton.jit
def _codes(x, matrix, d, B: tl.constexpr, BP: tl.constexpr, D: tl.constexpr):
    """The hash codes of rows x [n, DP], int64 [n]: bit b is the sign of column b of x @ matrix
    [D, B]; 1 for >= 0."""
    b = tl.arange(0, BP)
    inside = (d < D)[:, None] & (b < B)[None, :]
    columns = tl.load(matrix + d[:, None] * B + b[None, :], mask=inside, other=0.0)
    along = tl.sum(x.to(tl.float32)[:, :, None] * columns[None, :, :], 1)
    return tl.sum(((along >= 0) & (b < B)[None, :]).to(tl.int64) << b[None, :], 1)


@triton.jit
def _code(x, matrix, d, B: tl.constexpr, BP: tl.constexpr, D: tl.constexpr):
    """`_codes` of one row x [DP], int64 []."""
    return tl.sum(_codes(x[None, :], matrix, d, B, BP, D), 0)


@triton.jit(
    do_not_specialize="key_row value_row probe_head probe_row sinks recent pinned".split(),
    do_not_specialize_on_alignment=(
        "probe key value matrix start length cap free_slot position".split()
    ),
)
def _hash_append(
    probe,
    key,
    value,
    matrix,
    start,
    length,
    cap,
    free_slot,
    position,
    k,
    v,
    pos,
    code,
    shown,
    k_scale,
    v_scale,
    others,
    cos,
    sin,
    turned,
    notes,
    arrived,
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
    CODED: tl.constexpr,
    G: tl.constexpr,
    KEYED: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid (H, parts). G > 0: `probe` has the G queries of a head; they and its key are rotated
    first. notes int64 [H, 2, parts]; arrived int32 [H], zeros before and after."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    d = tl.arange(0, DP)
    count = tl.load(length + head).to(tl.int32)
    begin = tl.load(start + head)
    now = tl.load(position)
    slot = tl.load(free_slot + head)
    if G > 0:
        new_key = turned_rows(key, cos, sin, head * key_row, d, D, d < D)
        if part == 0:
            for g in tl.static_range(G):
                x = turned_rows(probe, cos, sin, head * probe_head + g * probe_row, d, D, d < D)
                tl.store(turned + (head * G + g) * D + d, x, mask=d < D)
    else:
        new_key = tl.load(key + head * key_row + d, mask=d < D, other=0.0)
    writes = part == 0
    if slot < 0:
        slot = begin + count
        if count >= tl.load(cap + head):
            probes = tl.arange(0, PP)
            if KEYED:
                codes = _codes(new_key[None, :], matrix, d, B, BP, D)
            elif PP * DP * BP <= AT_ONCE:  # a single sum: each makes all threads wait
                here = head * probe_head + probes[:, None] * probe_row
                real = (probes < P)[:, None] & (d < D)[None, :]
                if G > 0:
                    x = turned_rows(probe, cos, sin, here, d[None, :], D, real)
                else:
                    x = tl.load(probe + here + d[None, :], mask=real, other=0.0)
                codes = _codes(x, matrix, d, B, BP, D)
            else:
                codes = tl.zeros((PP,), tl.int64)
                for p in tl.static_range(P):
                    here = head * probe_head + p * probe_row
                    if G > 0:
                        x = turned_rows(probe, cos, sin, here, d, D, d < D)
                    else:
                        x = tl.load(probe + here + d, mask=d < D, other=0.0)
                    codes = tl.where(probes == p, _code(x, matrix, d, B, BP, D), codes)
            n = tl.arange(0, BN)
            best = tl.full((BN,), NONE, tl.int64)
            row = tl.zeros((BN,), tl.int32)
            for s in tl.range(part * BN, count, parts * BN):
                j = s + n
                ok = j < count
                stored = tl.load(code + begin + j, mask=ok, other=0).to(tl.int64)
                distance = tl.zeros((BN,), tl.int32)
                for p in tl.static_range(P):
                    differ = tl.sum(tl.where(probes == p, codes, 0), 0) ^ stored
                    distance += popcount(differ.to(tl.uint32)).to(tl.int32)
                    if B > 32:
                        distance += popcount((differ >> 32).to(tl.uint32)).to(tl.int32)
                at = tl.load(shown + begin + j, mask=ok, other=-1)
                unpinned = ok & (at >= pinned)
                first = may_leave(at, unpinned, now - 1, sinks, recent, True)
                after = may_leave(at, unpinned, now - 1, sinks, recent, False)
                # The row with the largest distance leaves, of equal ones the oldest.
                rank = ((P * B - distance).to(tl.int64) << 32) | at.to(tl.int64)
                rank += tl.where(first, 0, _AFTER)
                best, row = lower(best, row, rank, j, first | after)
            least, found = lowest_of(best, row)
            if parts > 1:
                note = notes + head * parts * 2
                tl.store(note + part, least)
                tl.store(note + parts + part, found.to(tl.int64))
                tl.debug_barrier()  # see `decode.split`
                writes = tl.atomic_add(arrived + head, 1, sem="acq_rel", scope="gpu") == parts - 1
                if writes:
                    tl.store(arrived + head, 0)  # for the next launch
                    # Bypass the L1 cache: other multiprocessors wrote the notes.
                    i = tl.arange(0, PARTS)
                    key_of = tl.load(note + i, mask=i < parts, other=NONE, cache_modifier=".cg")
                    other = note + parts + i
                    row_of = tl.load(other, mask=i < parts, other=0, cache_modifier=".cg")
                    found = lowest_of(key_of, row_of.to(tl.int32))[1]
            if writes:
                slot = begin + found
                tl.debug_barrier()  # every thread has read that the head is full
                tl.store(free_slot + head, slot)
    if writes:
        new_code = _code(new_key, matrix, d, B, BP, D)
        tl.store(code + slot, new_code.to(code.dtype.element_ty))
        new_value = tl.load(value + head * value_row + d, mask=d < D, other=0.0)
        for i in tl.static_range(len(others)):
            tl.store(others[i] + slot, tl.zeros((), tl.int32).to(others[i].dtype.element_ty))
        if CODED:
            key_codes, scale = quantized(new_key)
            tl.store(k_scale + slot, scale)
            value_codes, scale = quantized(new_value)
            tl.store(v_scale + slot, scale)
            tl.store(k + slot * D + d, key_codes.to(tl.int8), mask=d < D)
            tl.store(v + slot * D + d, value_codes.to(tl.int8), mask=d < D)
        else:
            tl.store(k + slot * D + d, new_key, mask=d < D)
            tl.store(v + slot * D + d, new_value, mask=d < D)
        tl.store(pos + slot, now.to(tl.int32))


def hash_append(rule: HashRule, new: NewRow, *, block: int = _BLOCK) -> bool:
    """Write each head's new row; in a full head, over the row whose code is least like the probes.
    Returns True. `block`: rows that a program reads at once.

    Keys and values may be int8 (`int8.to_codes`). Further columns become 0 in the new row.
    """
    columns, query, key, value = new.columns, new.query, new.key, new.value
    scales = [columns[name] for name in ("k_scale", "v_scale") if name in columns]
    others = [column for name, column in columns.items() if name not in _OWN]
    keyed, matrix = rule.hash_with == "key", rule.matrix(new.layer, key)
    probe = key[:, None] if keyed and new.rotation is None else query
    heads, group, size = probe.shape
    probes = 1 if keyed else group
    cos, sin, turned = new.rotation or (None, None, None)
    bits = matrix.shape[1]
    k, v, pos, code = (columns[name] for name in ("k", "v", "pos", "code"))
    tables = new.start, new.length, new.cap, new.free_slot
    assert probe.stride(2) == key.stride(1) == value.stride(1) == 1
    assert all(t.is_contiguous() for t in (matrix, *tables, k, v, *others))
    parts = max(1, min(_PARTS, -(-new.width // block)))
    arrived = new.arrived
    if arrived is None:
        arrived = torch.zeros(heads, dtype=torch.int32, device=key.device)
    notes = torch.empty((heads, 2, parts), dtype=torch.int64, device=key.device)
    sizes = {"P": probes, "B": bits, "D": size, "G": 0 if new.rotation is None else group}
    padded = {"PP": power(probes), "BP": power(bits), "DP": power(size)}
    _hash_append[(heads, parts)](
        *(probe, key, value, matrix, *tables, new.position, k, v, pos, code, new.shown),
        *(*(scales or (None, None)), tuple(others), cos, sin, turned, notes, arrived),
        *(*probe.stride()[:2], key.stride(0), value.stride(0)),
        *(rule.sinks, rule.recent, new.pinned),
        **sizes,
        **padded,
        BN=block,
        CODED=bool(scales),
        KEYED=keyed,
        PARTS=_PARTS,
        AT_ONCE=_AT_ONCE,
        num_warps=_WARPS,
    )
    return True


append_evict = {"hashevict": hash_append}

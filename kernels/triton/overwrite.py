"""Eviction before attention, in Triton, for all layers in one launch; also which rows a policy is
not shown, and which rows no query sees any more.

A program has one KV head. In a full head it finds the victim, makes its slot the slot of the new
row, and copies the victim to `undo_rows`. The victim is the row with the lowest of the given scores
(specification: `torch/decode.py`), or the one that StreamingLLM, L2 or Random evicts
(specification: the files of these policies). Keys are ordered as at the end of a step.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.torch.decode import Rows
from minikv.kernels.triton.counter_rng import chained, drawn
from minikv.kernels.triton.step import NONE, lower, lowest, may_leave, signed_key
from minikv.kernels.triton.tiles import power, typed
from minikv.kernels.triton.variants import Variant

_BLOCK, _WARPS = 1024, 4
FAR = tl.constexpr((1 << 31) - 1)
_ROWS = ("k", "v")  # the columns with more than one number per row


@triton.jit(
    do_not_specialize=["width", "sinks", "recent", "pinned", "seed"],
    do_not_specialize_on_alignment=[
        "scores",
        "allowed",
        "start",
        "length",
        "cap",
        "free_slot",
        "slot",
        "undo_k",
        "undo_v",
    ],
)
def _overwrite(
    scores,
    allowed,
    start,
    length,
    cap,
    pos,
    newest,
    free_slot,
    slot,
    k,
    v,
    undo_k,
    undo_v,
    columns,
    undo,
    width,
    sinks,
    recent,
    pinned,
    seed,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    RULE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    count = tl.load(length + head).to(tl.int32)
    if (tl.load(free_slot + head) < 0) & (count >= tl.load(cap + head)):
        begin = tl.load(start + head)
        now = tl.load(newest)
        if RULE == "random":
            state = chained(seed, head // H, head % H, now)
        n = tl.arange(0, BN)
        best = tl.full((BN,), NONE, tl.int64)
        row = tl.zeros((BN,), tl.int32)
        rest = best
        other = row
        for s in tl.range(0, count, BN):
            j = s + n
            ok = j < count
            at = tl.load(pos + begin + j, mask=ok, other=-1)
            if RULE == "scores":
                here = head * width + j
                may = ok & (tl.load(allowed + here, mask=ok, other=0) != 0)
                score = tl.load(scores + here, mask=ok, other=0.0)
                best, row = lower(best, row, signed_key(score, at), j, may)
            else:
                if RULE == "streaming":
                    score = tl.where(at >= sinks, at, -at).to(tl.float32)
                elif RULE == "l2":
                    score = -tl.load(scores + begin + j, mask=ok, other=0.0)
                else:
                    score = drawn(state, at)
                key = signed_key(score, at)
                unpinned = ok & (at >= pinned)
                best, row = lower(
                    best, row, key, j, may_leave(at, unpinned, now - 1, sinks, recent, True)
                )
                rest, other = lower(
                    rest, other, key, j, may_leave(at, unpinned, now - 1, sinks, recent, False)
                )
        least, found = lowest(best, row)
        if least == NONE:
            least, found = lowest(rest, other)
        victim = begin + found
        d = tl.arange(0, DP)
        tl.store(undo_k + head * D + d, tl.load(k + victim * D + d, mask=d < D), mask=d < D)
        tl.store(undo_v + head * D + d, tl.load(v + victim * D + d, mask=d < D), mask=d < D)
        for i in tl.static_range(len(columns)):
            tl.store(undo[i] + head, tl.load(columns[i] + victim))
        tl.store(slot + head, victim)
        tl.debug_barrier()  # every thread has read that the head is full
        tl.store(free_slot + head, victim)


def _launch(
    rule: str,
    scores: Tensor | None,
    allowed: Tensor | None,
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
    *,
    block: int,
    seed: int = 0,
) -> None:
    """Launch `_overwrite` once. Only a launch with a `seed` draws random numbers."""
    others = [name for name in undo_rows if name not in _ROWS]
    tables = (rows.start, rows.length, rows.cap, rows.pos, rows.newest, free_slot, slot)
    wide = [held[name] for held in (columns, undo_rows) for name in _ROWS]
    narrow = [tuple(held[name] for name in others) for held in (columns, undo_rows)]
    assert all(t.is_contiguous() for t in (*tables, *wide, *narrow[0], *narrow[1]))
    size = wide[0].shape[1]
    _overwrite[(free_slot.numel(),)](
        scores,
        allowed,
        *tables,
        *wide,
        *narrow,
        0 if allowed is None or scores is None else scores.shape[-1],
        rows.sinks,
        rows.recent,
        rows.pinned,
        seed,
        H=free_slot.shape[-1] if rule == "random" else 1,
        D=size,
        DP=power(size),
        BN=block,
        RULE=rule,
        num_warps=_WARPS,
    )


def overwrite_step(
    scores: Tensor,
    allowed: Tensor,
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
    *,
    block: int = _BLOCK,
) -> None:
    """See `torch.decode.overwrite_step`. `block`: rows that a program reads at once."""
    assert scores.is_contiguous()
    assert allowed.is_contiguous()
    assert scores.shape == allowed.shape, "there is a score for every column"
    _launch("scores", scores, allowed, rows, free_slot, slot, columns, undo_rows, block=block)


def streaming_step(
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
    *,
    block: int = _BLOCK,
) -> None:
    """`overwrite_step` of StreamingLLM (arXiv 2309.17453): the oldest row but the sinks leaves."""
    _launch("streaming", None, None, rows, free_slot, slot, columns, undo_rows, block=block)


def l2_step(
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
    norm: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """`overwrite_step` of L2 (arXiv 2406.11430): the row with the largest norm leaves. norm float32
    [R]: the length of each key."""
    assert norm.is_contiguous()
    _launch("l2", norm, None, rows, free_slot, slot, columns, undo_rows, block=block)


def random_step(
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
    seed: int,
    *,
    block: int = _BLOCK,
) -> None:
    """`overwrite_step` of Random: the row with the smallest random number leaves. The tensors of
    heads are [L, H], for all layers."""
    _launch("random", None, None, rows, free_slot, slot, columns, undo_rows, block=block, seed=seed)


@triton.jit(do_not_specialize=["pinned", "least"])
def _shown(start, length, pos, leaves_last, out, pinned, least, BN: tl.constexpr):
    head = tl.program_id(0)
    count = tl.load(length + head).to(tl.int32)
    begin = tl.load(start + head)
    n = tl.arange(0, BN)
    others = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, count, BN):
        ok = s + n < count
        where = begin + s + n
        at = tl.load(pos + where, mask=ok, other=-1)
        late = tl.load(leaves_last + where, mask=ok, other=1) != 0
        others += (ok & (at >= pinned) & (late == 0)).to(tl.int32)
    enough = tl.sum(others, 0) >= least
    for s in tl.range(0, count, BN):
        ok = s + n < count
        where = begin + s + n
        at = tl.load(pos + where, mask=ok, other=-1)
        late = tl.load(leaves_last + where, mask=ok, other=1) != 0
        hidden = (at < pinned) | (late & enough)
        tl.store(out + where, tl.where(hidden, -1, at), mask=ok)


def shown_positions(
    start: Tensor,
    length: Tensor,
    pos: Tensor,
    leaves_last: Tensor,
    out: Tensor,
    *,
    width: int,
    pinned: int,
    least: int,
    block: int = _BLOCK,
) -> None:
    """See `torch.decode.shown_positions`. `width` is not needed; `block`: rows that a program reads
    at once."""
    given = (start, length, pos, leaves_last, out)
    assert all(t.is_contiguous() for t in given)
    _shown[(length.numel(),)](*given, pinned, least, BN=block, num_warps=_WARPS)


@triton.jit
def _unseen(start, length, pos, newest, window, accepted, out, H: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(0)
    count = tl.load(length + head).to(tl.int32)
    begin = tl.load(start + head)
    n = tl.arange(0, BN)
    oldest = tl.full((BN,), FAR, tl.int32)
    row = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, count, BN):
        j = s + n
        at = tl.load(pos + begin + j, mask=j < count, other=FAR)
        row = tl.where(at < oldest, j, row)
        oldest = tl.minimum(at, oldest)
    least = tl.min(oldest, 0)
    first = tl.min(tl.where(oldest == least, row, FAR), 0)
    edge = tl.load(newest) + 1 - tl.load(window + head // H)
    unseen = tl.load(accepted) & (count > 0) & (least <= edge)
    tl.store(out + head, tl.where(unseen, begin + first, -1))


def unseen_rows(
    start: Tensor,
    length: Tensor,
    pos: Tensor,
    newest: Tensor,
    window: Tensor,
    accepted: Tensor,
    out: Tensor,
    *,
    width: int,
    block: int = _BLOCK,
) -> None:
    """See `torch.decode.unseen_rows`. `width` is not needed; `block`: rows that a program reads at
    once."""
    given = (start, length, pos, newest, window, accepted, out)
    assert all(t.is_contiguous() for t in given)
    _unseen[(length.numel(),)](*given, H=length.shape[1], BN=block, num_warps=_WARPS)


def variants() -> list[Variant]:
    """Builds for the compile gate: each rule, with the columns of policies, and in int8."""
    found = []
    kinds: dict[str, str | tuple[str, ...]] = dict.fromkeys(
        ("start", "length", "cap", "newest", "free_slot", "slot"), "*i64"
    )
    kinds |= {"scores": "*fp32", "allowed": "*i1", "pos": "*i32"}
    kinds |= {"leaves_last": "*i1", "out": "*i32"}
    for rule, size, number, columns in (
        ("scores", 80, "bf16", ("*i32",)),
        ("streaming", 128, "i8", ("*i32", "*fp32", "*fp32")),
        ("l2", 128, "bf16", ("*i32", "*fp32")),
        ("random", 256, "bf16", ("*i32", "*i1")),
    ):
        constants: dict[str, object] = {
            "H": 8,
            "D": size,
            "DP": power(size),
            "BN": _BLOCK,
            "RULE": rule,
        }
        if rule != "scores":
            constants |= {"allowed": None} if rule == "l2" else {"scores": None, "allowed": None}
        wide = dict.fromkeys(("k", "v", "undo_k", "undo_v"), f"*{number}")
        own = {name: kind for name, kind in kinds.items() if name not in constants}
        signature = typed(_overwrite, own | wide | {"columns": columns, "undo": columns}, constants)
        found.append(Variant(f"overwrite-{rule}", _overwrite, signature, constants, _WARPS))
    fixed: dict[str, object] = {"BN": _BLOCK}
    slid: dict[str, object] = {"BN": _BLOCK, "H": 8}
    signature = typed(_unseen, kinds | {"window": "*i64", "accepted": "*i1", "out": "*i64"}, slid)
    found.append(Variant("unseen", _unseen, signature, slid, _WARPS))
    found.append(Variant("shown", _shown, typed(_shown, kinds, fixed), fixed, _WARPS))
    return found

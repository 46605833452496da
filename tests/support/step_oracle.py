"""The torch form of every step policy behind the signatures of the kernels that compute the same.

Each function has the arguments of the kernel of its name (see `minikv.kernels.cpu` and `.triton`)
and runs the policy's own `update` and `score` through `DecodeStep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minikv.cache.decode_step import DecodeStep
from minikv.cache.stats import Shape
from minikv.cache.step_rows import StepRows
from minikv.kernels import Rows
from minikv.kernels.torch.blocks import lowest_block
from minikv.kernels.torch.layer import rotate
from minikv.policies.base import StepView
from minikv.policies.h2o import H2O
from minikv.policies.hashevict import HashEvict
from minikv.policies.l2 import L2
from minikv.policies.random import Random
from minikv.policies.rkv import RKV
from minikv.policies.roco import RoCo
from minikv.policies.scissorhands import ScissorHands
from minikv.policies.streaming import Streaming
from minikv.policies.tova import Tova

_ENDLESS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenH2O(H2O):
    """`young` newest rows of each head [L, H], whatever the cap."""

    recent: int
    young: Tensor = field(compare=False)

    def quota(self, cap: Tensor) -> Tensor:
        return self.young.view(cap.shape).clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTova(Tova):
    """Any number of protected newest rows."""

    recent: int  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRoCo(RoCo):
    """`keep` rows of each head [L, H] in scope, whatever the cap."""

    keep: Tensor = field(compare=False)

    def quota(self, cap: Tensor) -> Tensor:
        return self.keep.view(cap.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenHashEvict(HashEvict):
    """Codes in the column's own dtype."""

    code: torch.dtype

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"code": self.code}


def _open(step: DecodeStep, arena: SimpleNamespace, pinned: int) -> None:
    """Have it step over this arena, as `DecodeStep.open` does."""
    step._open = StepRows(
        arena,  # type: ignore[arg-type]
        step.ops,
        step.position,
        step.width,
        pinned,
        None,
        step.shown,
        step._layer,
        step._head,
        readable=False,
    )


def end_of_step(
    policy: Any,
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    free_slot: Tensor,
    columns: dict[str, Tensor],
    window: Tensor | None = None,
    *,
    due: bool = True,
) -> None:
    """Statistics and victims by the policy's torch form, in place."""
    layers, heads, group, width = logits.shape
    shape = Shape(layers, heads, heads * group, 1, (None,) * layers, _ENDLESS)
    step = DecodeStep(shape, logits.device)
    arena = SimpleNamespace(
        columns={**columns, "pos": rows.pos},
        extra=list(columns),
        start=rows.start,
        length=rows.length,
        cap=rows.cap,
        free_slot=free_slot,
        coded=False,
    )
    step.logits, step.lse, step.width = logits, lse, width
    step.count, step.position, step.accepted = rows.length, rows.newest, go
    step.speculative, step.due = True, due
    _open(step, arena, rows.pinned)
    if window is not None:
        step.window = window
    step._update_and_evict(policy, arena.free_slot.clone(), [])


def _make_room(
    policy: Any,
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
) -> None:
    """The rows that leave before attention by the policy's torch form, in place."""
    layers, heads = free_slot.shape
    shape = Shape(layers, heads, heads, 1, (None,) * layers, _ENDLESS)
    step = DecodeStep(shape, free_slot.device)
    arena = SimpleNamespace(
        columns=columns,
        start=rows.start,
        length=rows.length,
        cap=rows.cap,
        free_slot=free_slot,
    )
    step.policy, step.position, step.slot = policy, rows.newest, slot
    step.shown = rows.pos
    step.speculative, step.undo_rows = True, dict(undo_rows)
    step.width = max(1, int(rows.length.max()))
    _open(step, arena, rows.pinned)
    step._make_room()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStreaming(Streaming):
    """Any number of protected newest rows."""

    recent: int


def streaming_step(rows: Rows, *given: Any) -> None:
    _make_room(GivenStreaming(sinks=rows.sinks, recent=rows.recent), rows, *given)


def l2_step(rows: Rows, *given: Any) -> None:
    *room, norm = given
    assert norm is room[2]["norm"]
    _make_room(L2(sinks=rows.sinks, recent=rows.recent), rows, *room)


def random_step(rows: Rows, *given: Any) -> None:
    *room, seed = given
    _make_room(Random(sinks=rows.sinks, recent=rows.recent, seed=seed), rows, *room)


def h2o_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    free_slot: Tensor,
    sums: Tensor,
    young: Tensor,
) -> None:
    policy = GivenH2O(recent_share=0.5, sinks=rows.sinks, recent=rows.recent, young=young)
    end_of_step(policy, logits, lse, rows, go, free_slot, {"sum": sums})


def tova_step(
    logits: Tensor, lse: Tensor, rows: Rows, go: Tensor, free_slot: Tensor, *, layerwise: bool
) -> None:
    policy = GivenTova(
        per_head=not layerwise, protect_newest=True, sinks=rows.sinks, recent=rows.recent
    )
    end_of_step(policy, logits, lse, rows, go, free_slot, {})


def roco_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    free_slot: Tensor,
    sums: Tensor,
    squares: Tensor,
    count: Tensor,
    keep: Tensor,
) -> None:
    policy = GivenRoCo(
        sinks=rows.sinks,
        recent=rows.recent,
        scope=0.3,
        scope_prompt=0.1,
        pool=1,
        lead=1.0,
        keep=keep,
    )
    columns = {"sum": sums, "squares": squares, "count": count}
    end_of_step(policy, logits, lse, rows, go, free_slot, columns)


def scissorhands_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    free_slot: Tensor,
    words: Sequence[Tensor],
    queries: Tensor,
    history: int,
    window: Tensor,
) -> None:
    policy = ScissorHands(sinks=rows.sinks, recent=rows.recent, history=history)
    columns = {f"below{i}": word for i, word in enumerate(words)} | {"queries": queries}
    end_of_step(policy, logits, lse, rows, go, free_slot, columns, window)


def shift_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    seen: Sequence[Tensor],
    group: str,
) -> None:
    policy = RKV(
        sinks=0,
        window=len(seen),
        buffer=10**6,  # nobody leaves
        kernel=1,
        mix=0.1,
        threshold=0.5,
        softmax="all",
        group=group,
    )
    columns = {f"seen{i}": column for i, column in enumerate(seen)}
    end_of_step(policy, logits, lse, rows, go, torch.zeros_like(rows.length), columns, due=False)


def hash_append(
    probe: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    free_slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    code: Tensor,
    undo_rows: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    width: int,
    sinks: int,
    recent: int,
    pinned: int,
    shown: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    others: Sequence[Tensor] = (),
    undo_others: Sequence[Tensor] = (),
    turn: tuple[Tensor, Tensor, Tensor] | None = None,
    keyed: bool = False,
    arrived: Tensor | None = None,
) -> None:
    if turn is not None:
        cos, sin, turned = turn
        turned.copy_(rotate(probe.flatten(0, 1)[None], cos, sin)[0].view_as(probe))
        probe, key = turned, rotate(key[None], cos, sin)[0]
    heads, _, size = probe.shape
    policy = GivenHashEvict(
        code=code.dtype,
        sinks=sinks,
        recent=recent,
        bits=matrix.shape[1],
        hash_with="key" if keyed else "query",
        seed=0,
        matrices={0: matrix},
    )
    step = DecodeStep(Shape(1, heads, heads, size, (None,), _ENDLESS), key.device)
    columns = {"k": k, "v": v, "pos": pos, "code": code}
    names = ["k_scale", "v_scale"] * (k_scale is not None)
    names += [f"other{i}" for i in range(len(others) - len(names))]
    columns |= dict(zip(names, others, strict=True))
    arena = SimpleNamespace(
        columns=columns,
        extra=["code", *(name for name in names if name.startswith("other"))],
        start=start[None],
        length=length[None],
        cap=cap[None],
        free_slot=free_slot[None],
        coded=False,
    )
    step.policy, step.position = policy, position
    step.width, step.speculative = width, True
    step.undo_rows = dict(zip(columns, (*undo_rows, *undo_others), strict=True))
    if shown is not None:
        step.shown = shown
    step.slot = torch.where(free_slot >= 0, free_slot, start + length)[None]
    _open(step, arena, pinned)
    step._append(0, probe, key, value)


def _block(
    policy: Any,
    columns: dict[str, Tensor],
    pos: Tensor,
    live: Tensor,
    limit: int,
    position: int,
    pinned: int,
    attention: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows that stay after a block of a prompt, by the policy's torch form."""
    heads = torch.arange(len(pos), device=pos.device)
    most = (live - limit).clamp(min=0).max()
    shown = pos.masked_fill(pos < pinned, -1)
    view = StepView(position, shown, heads, heads, heads, columns, attention)
    scores, free = policy.score(view, most)
    return lowest_block(scores, free, pos, live, limit)


def unprotected_block(
    scores: Tensor,
    pos: Tensor,
    live: Tensor,
    limit: int,
    position: int,
    sinks: int,
    recent: int,
    pinned: int,
) -> tuple[Tensor, Tensor]:
    policy = GivenTova(per_head=True, protect_newest=True, sinks=sinks, recent=recent)
    return _block(policy, {}, pos, live, limit, position, pinned, scores)


def h2o_block(
    sums: Tensor,
    newest_rows: Tensor,
    pos: Tensor,
    live: Tensor,
    limit: int,
    position: int,
    sinks: int,
    recent: int,
    pinned: int,
) -> tuple[Tensor, Tensor]:
    policy = GivenH2O(sinks=sinks, recent=recent, recent_share=0.0, young=newest_rows)
    return _block(policy, {"sum": sums}, pos, live, limit, position, pinned)


def roco_block(
    sums: Tensor,
    squares: Tensor,
    counts: Tensor,
    steady_rows: Tensor,
    pos: Tensor,
    live: Tensor,
    limit: int,
    position: int,
    sinks: int,
    recent: int,
    pinned: int,
) -> tuple[Tensor, Tensor]:
    policy = GivenRoCo(
        sinks=sinks,
        recent=recent,
        scope=0.0,
        scope_prompt=0.0,
        pool=1,
        lead=1.0,
        keep=steady_rows,
    )
    columns = {"sum": sums, "squares": squares, "count": counts}
    return _block(policy, columns, pos, live, limit, position, pinned)

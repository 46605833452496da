"""The torch form of every step policy that has a kernel, behind that kernel's signature: the
policy's own `update` and `score`, and `kernels.lowest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minikv.kernels import NewRow, Rows, Slots, append, lowest
from minikv.kernels.decode.plain import HashRule, in_use
from minikv.kernels.layer.plain import rotate
from minikv.policies.base import StepPolicy, StepView
from minikv.policies.h2o import H2O
from minikv.policies.hashevict import HashEvict, codes
from minikv.policies.roco import RoCo

_OWN = ("k", "v", "pos", "code", "k_scale", "v_scale")


def _view(
    policy: StepPolicy,
    rows: Rows,
    index: Tensor,
    live: Tensor,
    over: Tensor,
    columns: Mapping[str, Tensor],
    layer: int = 0,
    **more: Any,
) -> StepView:
    """Of heads [F], of which only those that are `over` give up a row. index, live: as `in_use`."""
    pos = rows.pos[index].to(torch.int64)
    pos = pos.masked_fill(~live | (pos < rows.pinned) | ~over[:, None], -1)
    end, heads, read = rows.newest + 1, len(pos), lambda name: columns[name][index]
    free, cap = policy.free(pos, end, 1), rows.cap.flatten()
    return StepView(end, pos, free, cap, 1, layer, heads, read, **more)


def end_of_step(
    policy: StepPolicy,
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    free_slot: Tensor,
    columns: Sequence[Tensor],
) -> None:
    """Update the policy's columns and choose the victims, in place: see `Kernels.evict`."""
    start, length, cap = (t.flatten() for t in (rows.start, rows.length, rows.cap))
    index, live = in_use(start, length, logits.shape[-1], len(rows.pos))
    p = policy.attention(logits.flatten(0, 1), lse.flatten(0, 1), live)
    named = dict(zip(policy.columns, columns, strict=True))
    held = index[live]
    own = {name: column[held] for name, column in named.items()}
    policy.update(own, p[live], lambda: live.sum(1, keepdim=True).expand_as(p)[live])
    for name, column in named.items():
        column[held] = own[name]
    over, free = length > cap, free_slot.view(-1).fill_(-1)
    view = _view(policy, rows, index, live, over, named, attention=p)
    lowest(policy.worth(view), view.pos, start, over, free)


def _step(kind: type[StepPolicy], **options: Any) -> Callable[..., None]:
    """The end of a step under this policy, with any number of protected rows, and with `quota` in
    place of the one for the cap: h2o's newest rows of each head, roco's that may leave."""

    def step(
        logits: Tensor,
        lse: Tensor,
        rows: Rows,
        free: Tensor,
        columns: Sequence[Tensor],
        quota: Tensor,
    ) -> None:
        given = type("Given", (kind,), {"quota": lambda self, cap: quota.flatten()})
        policy = given(sinks=rows.sinks, **options)
        object.__setattr__(policy, "recent", rows.recent)
        end_of_step(policy, logits, lse, rows, free, columns)

    return step


def hash_append(rule: HashRule, new: NewRow) -> bool:
    """Write the new rows of one layer, over the victims of `rule`, a HashEvict."""
    assert isinstance(rule, HashEvict)
    query, key, columns = new.query, new.key, new.columns
    if new.rotation is not None:
        cos, sin, turned = new.rotation
        query = turned.copy_(rotate(query.flatten(0, 1)[None], cos, sin)[0].view_as(query))
        key = rotate(key[None], cos, sin)[0]
    full = (new.free_slot < 0) & (new.length >= new.cap)
    index, live = in_use(new.start, new.length, new.width, len(new.shown))
    tables = new.start, new.length, new.cap, new.shown, new.position - 1
    rows = Rows(*tables, rule.sinks, rule.recent, new.pinned)
    code = columns["code"]
    probes = {"query": query, "key": key[:, None]}
    view = _view(rule, rows, index, live, full, {"code": code}, new.layer, **probes)
    lowest(rule.worth(view), view.pos, new.start, full, new.free_slot)
    slot = torch.where(new.free_slot >= 0, new.free_slot, new.start + new.length)
    blank = [column for name, column in columns.items() if name not in _OWN]
    scales = (columns.get("k_scale"), columns.get("v_scale"))
    stored = (columns[name] for name in ("k", "v", "pos"))
    append(key, new.value, Slots(slot, new.position, *stored, blank, *scales))
    code.index_copy_(0, slot, codes(key, rule.matrix(new.layer, key)).to(code.dtype))
    return True


EVICT: Mapping[str, Callable[..., None]] = {
    "h2o": _step(H2O, recent_share=0.5),
    "roco": _step(RoCo, scope=0.3, scope_prompt=0.1, pool=1, lead=1.0),
}
APPEND_EVICT: Mapping[str, Callable[..., bool]] = {"hashevict": hash_append}

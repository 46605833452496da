"""Reads a prompt: layer by layer, new rows are staged, attended to exactly, scored and compacted.

Peak memory is one layer's keys and values in addition to the cache: the next layer uses the same
buffers. The rows that stay are written to another arena, the target. The arena from before the
prompt is never changed, so a prompt is undone by dropping its target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.compaction import Room, append_rows, gather_survivors
from minikv.cache.earlier import EarlierRows
from minikv.cache.global_pool import GlobalPool
from minikv.cache.plan import Plan, Setup
from minikv.cache.snapshot import Outcome
from minikv.cache.tier import Tier
from minikv.kernels import fill
from minikv.policies.base import ALL, PromptView
from minikv.policies.moments import Moments
from minikv.policies.parts import policy_columns
from minikv.policies.scissorhands import below_uniform
from minikv.policies.selection import stayed


class Prefill:
    """Reads a prompt layer by layer. Chunks of a layer come in order; see `Attend`."""

    def __init__(
        self, setup: Setup, plan: Plan, arena: Arena, target: Arena, tier: Tier | None = None
    ) -> None:
        """arena: the rows before the prompt. target: receives the rows that stay; if `plan.shares`,
        it shares its memory with `arena`. tier: stores every row that is read, and provides those
        of the first `plan.given` tokens; it must be open for this prompt."""
        self.setup, self.plan, self.arena, self.target = setup, plan, arena, target
        self.shape, self._ops = setup.shape, setup.ops
        self.prompt, self.step = setup.rules.prompt, setup.rules.step
        self._carry = None if self.prompt is None else self.prompt.carry
        evidence, step = setup.rules.evidence, self.step
        self._evidence, self.tier = evidence, tier
        self._all = setup.rules.observe == ALL  # sums are taken chunk by chunk
        assert not plan.given or not self._all, "queries of tokens that are not read are not known"
        self._observed, last = plan.observed(setup.rules)
        self._moments: Moments | None = None
        self._shared: dict[object, Any] = {}
        self._mass: Tensor | None = None
        self._squares: Tensor | None = None
        self._peak: Tensor | None = None  # see `PromptView.peak`
        wide = (self.shape.kv_heads, plan.tokens, self.shape.head_dim)
        tail = (last, self.shape.heads, self.shape.head_dim)
        dtype, device = setup.dtype, arena.device
        if tier is not None:
            self._key, self._value = tier.stage(0, plan.tokens)
        else:
            self._key = torch.empty(wide, dtype=dtype, device=device)
            self._value = torch.empty(wide, dtype=dtype, device=device)
        self._tail = torch.empty(tail, dtype=dtype, device=device)
        sums = (self.shape.kv_heads, self.shape.heads // self.shape.kv_heads, last)
        self._tail_lse = torch.empty(sums, device=device)  # [H, G, t]
        self._positions = torch.arange(plan.position, plan.end, device=device)
        self._lengths = torch.ones(last, device=device) if evidence.lengths else None
        self._coming: Tensor | None = None  # see `_on_layer_input`; for the next chunk
        self._old: EarlierRows | None = None
        # For each layer: the last token's query and its attention output, [H * G, D] each.
        self.exact: list[tuple[Tensor, Tensor]] = []
        self._done = plan.tokens
        # By layer: the share of attention mass on rows that stayed, float32 [H]; of a pool, [].
        self._stayed: dict[int, Tensor] = {}
        # Each head needs a row that a decode step may evict. A policy that evicts before attention
        # and protects the newest rows needs a second one.
        self._least = 2 if step is not None and step.evict_first and step.recent else 1
        self._shaped = False
        self._pool = None if plan.pool is None else GlobalPool(target, plan.pool)
        self.learnt = setup.to_learn(arena.device)

    def complete(self) -> Outcome:
        """Every layer has been finished: check the target and report what was lost. This is the
        only time that a prompt waits for the device."""
        lost: list[float | None] = [None] * self.shape.layers
        if self._pool is not None:  # it has every layer: lay out the target
            assert self.prompt is not None
            stayed = self._pool.place(self.plan.spare, grows=self.step is None)
            if self.plan.evicts(0) and self.prompt.evidence.observe:
                self._stayed = dict(enumerate(stayed))
            region = self.target.capacity.sum(1).cumsum(0).tolist()
            self.target.region = [0, *region[:-1], self.target.rows]
        shares = [*self._stayed.values()]
        if shares and shares[0].dim():
            shares = [*torch.stack(shares).mean(1)]
        for layer, share in zip(self._stayed, check_places(self.target, shares), strict=True):
            lost[layer] = 1.0 - share
        return Outcome(tuple(lost), self._shaped, self.learnt)

    @property
    def on_layer_input(self) -> Callable[[Tensor], None] | None:
        """See `Attend`."""
        return None if self._lengths is None else self._on_layer_input

    def _on_layer_input(self, states: Tensor) -> None:
        """The layer's input [t, hidden], after its norm, of the chunk that is staged next. Only the
        norms of rows that are observed are computed."""
        tokens, done = self.plan.tokens, self._done
        end = (self.plan.given if done == tokens else done) + len(states)
        observed = min(len(states), end - tokens + len(self._tail))
        if observed > 0:
            last = states[len(states) - observed :]
            self._coming = torch.linalg.vector_norm(last, dim=-1, dtype=torch.float32)

    def stage(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add a chunk of rows and attend: shapes as in `Attend.attend`."""
        tokens = self.plan.tokens
        if self._done == tokens:
            self._done, self._old = self.plan.given, None
            if self.tier is not None:
                self._key, self._value = self.tier.stage(layer, tokens)
            self._mass = self._squares = None
            self._old = self._earlier(layer)
            if self._all:
                self._make_sums(torch.zeros)
            if self._evidence.queries_from is not None:
                heads, group = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
                size = self.shape.head_dim
                self._moments = Moments(heads, group, size, q.device, self._ops.block)
        lo, hi = self._done, self._done + len(q)
        if self.learnt is not None:
            self.setup.learn(self.learnt, layer, q, self.plan.position + lo)
        # Rows that the tier has are not written again, so a prompt that fails changes nothing.
        new = lo if self.tier is None else min(hi, max(lo, self.tier.length))
        self._key[:, new:hi] = k[new - lo :].transpose(0, 1)
        self._value[:, new:hi] = v[new - lo :].transpose(0, 1)
        first = tokens - len(self._tail)
        if hi > first:
            begin = max(lo, first)
            self._tail[begin - first : hi - first] = q[begin - lo :]
            if self._lengths is not None and self._coming is not None:
                self._lengths[begin - first : hi - first] = self._coming[begin - hi :]
        self._done = hi
        return self._mix(layer, q, lo, hi)

    @property
    def layer_complete(self) -> bool:
        """Whether every row of the layer has been staged and attended to."""
        return self._done == self.plan.tokens

    def done(self, layer: int) -> int:
        """Progress over all layers, as a number of the prompt's tokens."""
        return (layer * self.plan.read + self._done - self.plan.given) // self.shape.layers

    def _mix(self, layer: int, q: Tensor, lo: int, hi: int) -> Tensor:
        """Exact attention of the prompt's tokens lo to hi to the rows of earlier turns and to the
        prompt's own rows below hi, causally. Returns [hi - lo, H * G, D]."""
        shape, base = self.shape, self.plan.position
        window = shape.windows[layer]
        if window is not None and base + hi <= window:
            window = None  # nothing has slid out yet
        query = q.view(len(q), shape.kv_heads, -1, shape.head_dim).permute(1, 2, 0, 3)
        at = self._positions[lo:hi]
        if self._moments is not None:
            self._add_moments(layer, query, at, base + lo)
        parts = []
        if self._old is not None:
            parts.append(self._old.attention(self._ops, query, at, window))
        new = self._key[:, :hi], self._value[:, :hi]
        if window is None:
            parts.append(self._ops.last_rows_attention(query, *new))
        else:
            parts.append(kernels.window_attention(query, *new, window, self._ops.rows_attention))
        mixed, lse = self._ops.merge(parts)
        first = self.plan.tokens - len(self._tail)
        if lo <= first and hi == self.plan.tokens:
            if len(self._tail):
                self._tail_lse = lse[..., first - lo :]  # a view: nothing is copied
        elif hi > first:
            if lo <= first:
                self._tail_lse = torch.empty_like(self._tail_lse)
            begin = max(lo, first)
            self._tail_lse[..., begin - first : hi - first] = lse[..., begin - lo :]
        if self._all:
            self._add_sums(kernels.Queries(query, at, window, lse), self._sources(hi))
        out = mixed.permute(2, 0, 1, 3).reshape(hi - lo, shape.heads, -1)
        if self.tier is not None and self.layer_complete:
            self.exact.append((q[-1].clone(), out[-1].clone()))
        return out

    def _make_sums(self, make: Callable[..., Tensor]) -> None:
        """Allocate the sums of attention of all rows of the layer."""
        heads, group = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        rows = self.plan.tokens + (0 if self._old is None else self._old.pos.shape[1])
        both = make(heads * (group + 1) * rows, dtype=torch.float32, device=self._key.device)
        mass, squares = both[: heads * group * rows], both[heads * group * rows :]
        self._mass, self._squares = mass.view(heads, group, rows), squares.view(heads, rows)

    def _add_moments(self, layer: int, query: Tensor, at: Tensor, begin: int) -> None:
        """Add the chunk's queries, from position `begin` on, to the moments. Queries below
        `Evidence.queries_from` are left out, unless the conversation has no others."""
        assert self._moments is not None
        counted, rotary = self._evidence.queries_from, self.setup.rotary
        assert counted is not None
        assert rotary is not None, "the network's rotary frequencies are not known"
        first = counted if self.plan.end > counted else 0
        skipped = min(len(at), max(0, first - begin))
        self._moments.add(query[:, :, skipped:], rotary, layer, at[skipped:])

    def _sources(self, hi: int) -> list[kernels.Part]:
        """The keys of rows of earlier turns, if any, and of the prompt's rows below `hi`."""
        own: kernels.Part = self._key[:, :hi], self._positions[None, :hi]
        return [own] if self._old is None else [self._old.part, own]

    def _add_sums(
        self, queries: kernels.Queries, sources: Sequence[kernels.Part], *, fresh: bool = False
    ) -> None:
        """Add the attention that the queries give to each row that they see. fresh: nothing was
        added before, and the sums are uninitialised."""
        assert self._mass is not None
        assert self._squares is not None
        begin = 0
        for part in sources:
            end = begin + part[1].shape[1]
            mass, squares = self._mass[:, :, begin:end], self._squares[:, begin:end]
            self._ops.add_attention_mass(mass, squares, queries, part, fresh=fresh)
            begin = end

    def finish(self, layer: int) -> None:
        """The layer is complete: choose which rows stay and write them to the target."""
        if self.tier is not None:
            self.tier.store(layer, self._key, self._value)
        self._choose(layer)

    def choose(self, layer: int, peak: Tensor, noted: dict[str, Tensor]) -> None:
        """Choose which rows of a layer stay, and write them to the target. The tier has all of the
        layer's rows. peak [H, T]: the scores of the prompt's rows. noted: the step policy's
        columns [H, N] after the prompt."""
        assert self.tier is not None
        self._key, self._value = self.tier.stage(layer, self.plan.tokens)
        self._old = self._earlier(layer)
        earlier = 0 if self._old is None else self._old.pos.shape[1]
        self._peak = torch.cat((peak.new_zeros((len(peak), earlier)), peak), 1)
        self._choose(layer, noted)

    def _choose(self, layer: int, noted: dict[str, Tensor] | None = None) -> None:
        """noted: the step policy's columns; None: not taken yet."""
        plan, prompt = self.plan, self.prompt
        view = self._judged(layer)
        pos, extra = view.pos, dict(view.carried)
        extra |= self._noted(view) if noted is None else noted
        if prompt is not None:
            extra |= prompt.scorer.state(view)
        evicts, order, ranks = plan.evicts(layer), None, None
        if self._pool is not None:
            ranks = self._ranked(view, evicts=evicts)
        else:
            if evicts:
                assert prompt is not None
                assert plan.totals is not None
                keep = prompt.keep(view, plan.totals[layer], plan.pinned, self._least)
                if prompt.evidence.observe and view.mass is not None:
                    # Rows that slid out of a window do not count as evicted.
                    self._stayed[layer] = stayed(view.mass, keep, view.pos)
            else:
                keep = view.live
            order = None if plan.shares else view.order
        self._shaped = self._shaped or (evicts and self._evidence.asks)
        del view
        if not self._all:  # those sums are needed until the next layer begins
            self._mass = self._squares = None
        staged = self.target.stored(self._ops, self._key, self._value)
        old = None if self._old is None else (self.arena, self._old.index)
        if self._pool is not None and ranks is not None:
            key, share = ranks
            self._pool.add(layer, key, pos, staged, extra, share, old)
        else:
            self._store(layer, keep, pos, staged, extra, old, order)

    def _noted(self, view: PromptView) -> dict[str, Tensor]:
        """The step policy's columns [H, N] after the prompt."""
        if self.step is None:
            return {}
        if self._carry is not None:
            view = self._carry.noted(view, squares="squares" in self.step.columns)
        return self.step.init(view)

    def _ranked(self, view: PromptView, *, evicts: bool) -> tuple[Tensor, Tensor | None]:
        """The layer's rows compete with those of all layers before it: their keys int64 [H, N], see
        `PromptPolicy.global_key`, and shares of the attention mass, float32 [H, N], if known."""
        assert self.prompt is not None
        if not evicts:  # all rows stay, and perhaps nothing was observed
            zeros = torch.zeros_like(view.pos, dtype=torch.float32)
            return kernels.order_key(zeros, view.pos, view.live), None
        key, share = self.prompt.global_key(view, self.plan.pinned, self._least), None
        if self.prompt.evidence.observe and view.mass is not None:
            mass = view.mass.mean(1) * view.live
            share = mass / mass.sum(1, keepdim=True) / len(mass)
        return key, share

    def _store(
        self,
        layer: int,
        keep: Tensor,
        pos: Tensor,
        staged: dict[str, Tensor],
        extra: dict[str, Tensor],
        old: tuple[Arena, Tensor] | None,
        order: Tensor | None,
    ) -> None:
        """Write the rows to keep to the target, and the cap and capacity of each head. Arguments as
        for `gather_survivors`; order: None if the rows of earlier turns stay where they are."""
        plan, target = self.plan, self.target
        total = -1  # each cap is what its head holds, or, if nothing was evicted, the budget
        if plan.totals is not None and not plan.evicts(layer):
            total = plan.totals[layer]
        floor = plan.floor if plan.totals is None else 0
        if plan.shares:
            kept = keep.sum(1)
            caps = fill(kept, total) if total >= 0 else kept.clamp(min=floor)
            append_rows(self._ops, target, layer, pos, caps, staged, extra)
            return
        # Without a step policy the heads own the whole region, so that the answer has room.
        room = Room(floor, total, plan.spare, plan.needed[layer] if self.step is None else -1)
        gather_survivors(self._ops, target, layer, keep, pos, room, staged, extra, old, order=order)

    def _earlier(self, layer: int) -> EarlierRows | None:
        return EarlierRows.of(self._ops, self.arena, self.plan.before.held, layer)

    def _judged(self, layer: int) -> PromptView:
        """The policies' view of the layer that was just completed."""
        plan, old, ops, new = self.plan, self._old, self._ops, self._positions
        heads, window, evicts = self.shape.kv_heads, self.shape.windows[layer], plan.evicts(layer)
        pos = new.expand(heads, plan.tokens)
        if old is not None:
            pos = torch.cat((old.pos, pos), 1)
        if window is not None:  # the next token no longer sees these rows
            pos = pos.masked_fill(pos <= plan.end - window, -1)
        carried, sources = self._carried(pos), self._sources(plan.tokens)
        group = self.shape.heads // heads
        tail = self._tail.view(-1, heads, group, self.shape.head_dim)

        def last(count: int) -> kernels.Queries:
            begin = len(tail) - count
            query, at = tail[begin:].permute(1, 2, 0, 3), new[len(new) - count :]
            return kernels.Queries(query, at, window, self._tail_lse[..., begin:])

        observed, causal = self._observed, self._evidence.causal
        queries = last(observed)
        if self._all:
            observed = plan.tokens
        elif observed and (evicts or (self.step is not None and self.step.observe > 0)):
            if not causal:
                queries = queries._replace(at=new[-1:].expand(observed))
                queries = queries._replace(lse=kernels.rows_lse(queries, sources))
            self._make_sums(torch.empty)
            self._add_sums(queries, sources, fresh=True)

        def below() -> Tensor:
            assert self.step is not None
            return below_uniform(last(min(len(tail), self.step.prompt_history)), sources, ops)

        def attention(some: slice) -> Tensor:
            return ops.each_attention(queries, sources, some)

        def largest(scale: Tensor | None) -> Tensor:
            found = [ops.peak_attention(queries, sources, i, scale) for i in range(len(sources))]
            return found[0] if len(found) == 1 else torch.cat(found, 2)

        def key() -> Tensor:
            return self._key if old is None else torch.cat((old.keys(), self._key), 1)

        def value() -> Tensor:
            return self._value if old is None else torch.cat((old.values(), self._value), 1)

        each_query = self._evidence.each_query and observed and not self._all
        known, each = self.setup.output, 0
        if evicts and plan.pool is not None:
            each = plan.pool // (self.shape.layers * heads)
        elif evicts and plan.totals is not None:
            each = plan.totals[layer] // heads
        return PromptView(
            layer,
            plan.end,
            pos,
            observed,
            self._mass,
            self._squares,
            key,
            value,
            carried,
            None if known is None else lambda: known(layer),
            plan.turns,
            self._moments,
            self.setup.rotary,
            max(0, each - plan.pinned),
            causal,
            below,
            attention if each_query else None,
            largest,
            None if self._lengths is None else self._lengths[len(self._lengths) - observed :],
            self.setup.sentences,
            peak=self._peak,
            asks=plan.asks,
            ops=ops,
            earlier=pos.shape[1] - plan.tokens,
            shared=self._shared,
        )

    def _carried(self, pos: Tensor) -> dict[str, Tensor]:
        """The policies' columns [H, N] from before the prompt; zero for new rows."""
        kinds = policy_columns(self.prompt, self.step)
        if self._old is not None:
            columns, new = self.arena.columns, self.plan.tokens
            return {name: self._old.carried(columns[name], new) for name in kinds}
        carried: dict[str, Tensor] = {}
        for kind in dict.fromkeys(kinds.values()):  # one launch for all columns of a dtype
            names = [name for name in kinds if kinds[name] == kind]
            zeros = torch.zeros((len(names), *pos.shape), dtype=kind, device=pos.device)
            carried |= dict(zip(names, zeros, strict=True))
        return {name: carried[name] for name in kinds}


def check_places(target: Arena, shares: Sequence[Tensor]) -> list[float]:
    """Check that every head of a complete target has room for its rows. Returns the values of the
    tensors `shares` ([] each), which come to the host in the same transfer as the tables."""
    tables = torch.stack((target.length, target.capacity)).to(torch.float64)
    numbers = torch.cat((tables.flatten(), *(share[None] for share in shares))).cpu()
    size = tables.numel()  # float64 is exact: counts are far below 2^53
    length, capacity = numbers[:size].view(tables.shape)
    room = [b - a for a, b in pairwise(target.region)]
    assert bool((length <= capacity).all()), "more rows were kept than fit"
    assert all(n <= m for n, m in zip(capacity.sum(1).tolist(), room, strict=True))
    return numbers[size:].tolist()

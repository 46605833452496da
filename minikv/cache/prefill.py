"""A prompt under way: one layer's new rows are staged, mixed exactly, judged and moved.

Peak memory is one layer's keys and values beside the arena: the next layer uses the same buffer.
A later prompt also keeps a copy of the old rows that it rewrites, so that it can be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.compaction import Compaction, choose, far
from minikv.cache.stats import Shape
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import ALL, Moments, PromptPolicy, PromptView, StepPolicy, fill, spread
from minikv.policies.selection import fill as fill_there


@dataclass(frozen=True, slots=True)
class Plan:
    """What a prompt of `tokens` tokens that starts at `position` is read under.

    totals[i]: rows that layer i may keep over all its heads (None: all). floor: rows that every
    head's cap has at least when only the step policy evicts. spare: rows a head needs above its
    cap while an answer is written. needed[i]: rows of layer i's region; shrinks: the arena will be
    cut down to them after the prompt; turns, output(layer) and rotary: as `PromptView` has them;
    pinned: positions below it never leave.
    """

    position: int
    tokens: int
    totals: list[int] | None
    floor: int
    spare: int
    needed: list[int]
    shrinks: bool
    turns: Sequence[tuple[int, int]] = ()
    output: Callable[[int], Tensor] | None = None
    rotary: Tensor | None = None
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What a layer of a first prompt told, whatever the policy: all that `finish` judges by.

    key and value [H, T, D]; tail [t, H * G, D]: the last queries; mass, squares and moments as in
    `PromptView`, where every query was asked for.
    """

    key: Tensor
    value: Tensor
    tail: Tensor
    mass: Tensor | None
    squares: Tensor | None
    moments: Moments | None


class Prefill:
    """Stages a prompt layer by layer. Chunks of a layer come in order; see `Attend`."""

    def __init__(
        self,
        shape: Shape,
        arena: Arena,
        prompt: PromptPolicy | None,
        step: StepPolicy | None,
        plan: Plan,
        dtype: torch.dtype,
        ops: Kernels | None = None,
    ) -> None:
        """`ops`: who computes; the torch twins by default."""
        self._ops = ops or Kernels()
        self.shape, self.arena, self.prompt, self.step = shape, arena, prompt, step
        self.plan = plan
        evidence = prompt.evidence if prompt else None
        observe = evidence.observe if evidence and evidence.observe else 0
        if step and not observe:
            observe = step.observe
        self._causal = evidence is None or evidence.causal
        self._all = observe == ALL
        if self._all:
            observe = 0  # summed as chunks are mixed, not from a copy of the last queries
        self._observed = min(plan.tokens, observe)
        last = min(plan.tokens, max(observe, step.prompt_history if step else 0))
        self._from = evidence.queries_from if evidence else None
        self._moments: Moments | None = None
        self._mass: Tensor | None = None
        self._squares: Tensor | None = None
        wide = (shape.kv_heads, plan.tokens, shape.head_dim)
        tail = (last, shape.heads, shape.head_dim)
        self._key = torch.empty(wide, dtype=dtype, device=arena.device)
        self._value = torch.empty(wide, dtype=dtype, device=arena.device)
        self._tail = torch.empty(tail, dtype=dtype, device=arena.device)
        self._old: tuple[Tensor, Tensor, Tensor] | None = None
        self._listed: Tensor | None = None  # its rows [H, N], where k and v are all of the arena
        self._copied: tuple[Tensor, ...] = ()  # what of it is not a view of the arena
        self._done = plan.tokens
        self._layout = arena.layout()
        self._saved: dict[int, dict[str, Tensor]] = {}
        self._landing = Compaction(arena, self._ops) if far(arena.device) else None
        self._lost: list[float | None] = [None] * shape.layers
        # A head needs a row that an answer may overwrite; before attention a second one, if the
        # newest is protected.
        self._least = 2 if step is not None and step.evict_first and step.recent else 1
        self._visible = self._count_visible()
        self.shaped = False
        self.peak = 0
        self._note_peak()

    def rollback(self) -> None:
        """The arena is as it was before the prompt."""
        self.arena.restore(self._layout, self._saved)

    def release(self) -> None:
        """The prompt is done: give the staging buffers and the backup back, keep what was told."""
        self._key = self._value = self._tail = self._key.new_empty(0)
        self._mass = self._squares = None
        self._settle()
        self._old, self._listed, self._copied = None, None, ()
        self._saved = {}

    @property
    def lost(self) -> list[float | None]:
        """Per layer, the share of the observed attention that was evicted; None: not known."""
        self._settle()
        return self._lost

    def _settle(self) -> None:
        if self._landing is not None:
            for layer, share in self._landing.settle().items():
                self._lost[layer] = share

    def _count_visible(self) -> list[int]:
        """Rows of each layer, over its heads, that exist after the prompt and can still be seen."""
        arena, plan, heads = self.arena, self.plan, self.shape.kv_heads
        counts = []
        for layer, window in enumerate(self.shape.windows):
            before, new = int(arena.held[layer].sum()), plan.tokens
            end = plan.position + plan.tokens
            if window is not None and end > window:
                new = min(new, window)
                if before:  # before the layers begin: it may ask the device
                    index, live = arena.index(layer)
                    pos = arena.columns["pos"][index]
                    before = int((live & (pos > end - window)).sum())
            counts.append(before + heads * new)
        return counts

    @property
    def needs(self) -> tuple[bool, int, int | None]:
        """What is taken note of: readings of the same tokens and needs are told the same."""
        return self._all, len(self._tail), self._from

    def told(self) -> LayerTrace:
        """What the layer that was just completed told. Of a first prompt only."""
        assert self._old is None
        key, value, tail = (t.clone() for t in (self._key, self._value, self._tail))
        return LayerTrace(key, value, tail, self._mass, self._squares, self._moments)

    def replay(self, told: LayerTrace) -> None:
        """In place of staging a layer of a first prompt: a reading of equal needs was told this."""
        assert not self.plan.position
        self._key, self._value, self._tail = told.key, told.value, told.tail
        self._mass, self._squares, self._moments = told.mass, told.squares, told.moments

    def stage(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take in a chunk of rows and mix it: shapes as in `Attend.attend`."""
        tokens = self.plan.tokens
        if self._done == tokens:
            self._done, self._old, self._listed, self._copied = 0, None, None, ()
            self._old = self._old_rows(layer)
            if self._all:
                self._clear_sums()
            if self._from is not None:
                heads, group = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
                self._moments = Moments(heads, group, self.shape.head_dim, q.device)
        lo, hi = self._done, self._done + len(q)
        self._key[:, lo:hi] = k.transpose(0, 1)
        self._value[:, lo:hi] = v.transpose(0, 1)
        first = tokens - len(self._tail)
        if hi > first:
            begin = max(lo, first)
            self._tail[begin - first : hi - first] = q[begin - lo :]
        self._done = hi
        return self._mix(layer, q, lo, hi)

    @property
    def layer_complete(self) -> bool:
        """Every row of the layer has been staged and mixed."""
        return self._done == self.plan.tokens

    def done(self, layer: int) -> int:
        """Tokens read so far, in whole-prompt terms."""
        return (layer * self.plan.tokens + self._done) // self.shape.layers

    def _old_rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """k, v [H, N, D] and pos [H, N] of earlier turns: a view if the heads are alike, else one
        padded copy (pos -1 is padding)."""
        arena = self.arena
        if not bool((arena.held[layer] > 0).any()):
            return None
        k, v, pos = (arena.whole(layer, name) for name in ("k", "v", "pos"))
        if k is not None and v is not None and pos is not None and not arena.coded:
            return k, v, pos.to(torch.int64)
        if self._landing is not None:
            index, live = self._landing.index(layer)
            pos = arena.columns["pos"][index].to(torch.int64).masked_fill(~live, -1)
            if not arena.coded:
                self._listed = index
                return arena.columns["k"], arena.columns["v"], pos
        else:
            index, live = arena.index(layer)
        pos = arena.columns["pos"][index].to(torch.int64).masked_fill(~live, -1)
        self._copied = old = (arena.read("k", index), arena.read("v", index), pos)
        self._note_peak()
        return old

    def _mix(self, layer: int, q: Tensor, lo: int, hi: int) -> Tensor:
        """Exact attention of staged rows lo..hi over old rows, earlier new rows and themselves."""
        shape, base = self.shape, self.plan.position
        window = shape.windows[layer]
        if window is not None and base + hi <= window:
            window = None  # nothing has slid out yet
        query = q.view(len(q), shape.kv_heads, -1, shape.head_dim).permute(1, 2, 0, 3)
        at = torch.arange(base + lo, base + hi, device=q.device)
        if self._moments is not None:
            self._add_moments(query, at, base + lo)
        parts = []
        if self._old is not None and self._listed is not None:
            assert self._landing is not None
            k, v, _ = self._old
            there = self._landing
            parts.append(
                self._ops.segments_attention(
                    query,
                    k,
                    v,
                    there.start[layer],
                    there.length[layer],
                    there.free_slot[layer],
                    there.most(layer),
                    pos=self.arena.columns["pos"],
                    q_pos=at,
                    window=window,
                )
            )
        elif self._old is not None:
            k, v, pos = self._old
            counts = self.arena.held[layer].tolist()
            if window is None and min(counts) == k.shape[1]:
                parts.append(self._ops.rows_attention(query, k, v))
            elif window is None and min(counts) > 0 and self._landing is None:
                each = [
                    self._ops.rows_attention(query[h : h + 1], k[h : h + 1, :n], v[h : h + 1, :n])
                    for h, n in enumerate(counts)  # a head's padding comes last
                ]
                parts.append((torch.cat([o for o, _ in each]), torch.cat([s for _, s in each])))
            else:
                parts.append(kernels.visible_attention(query, k, v, at, pos, window))
        new = self._key[:, :hi], self._value[:, :hi]
        if window is None:
            parts.append(self._ops.last_rows_attention(query, *new))
        else:
            parts.append(kernels.window_attention(query, *new, window, self._ops.rows_attention))
        if self._all:
            self._add_sums(query, kernels.total(parts), at, hi, window)
        return kernels.merge(parts).permute(2, 0, 1, 3).reshape(hi - lo, shape.heads, -1)

    def _clear_sums(self) -> None:
        """A layer begins: nothing was observed of its rows."""
        heads, group = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        rows = self.plan.tokens + (self._old[2].shape[-1] if self._old is not None else 0)
        self._mass = torch.zeros((heads, group, rows), device=self._key.device)
        self._squares = torch.zeros((heads, rows), device=self._key.device)
        self._note_peak()

    def _add_moments(self, query: Tensor, at: Tensor, begin: int) -> None:
        """Count the chunk's queries, from position `begin` on, those of the very first rows aside
        if there are others."""
        assert self._moments is not None
        assert self._from is not None
        assert self.plan.rotary is not None, "the network's rotary frequencies are not known"
        first = self._from if self.plan.position + self.plan.tokens > self._from else 0
        skipped = min(len(at), max(0, first - begin))
        angle = at[skipped:, None].to(torch.float64) * self.plan.rotary.to(torch.float64)
        self._moments.add(query[:, :, skipped:], angle)

    def _add_sums(
        self, query: Tensor, lse: Tensor, at: Tensor, hi: int, window: int | None
    ) -> None:
        """Add what the queries at positions `at`, the prompt's up to row `hi`, gave every row that
        they saw."""
        assert self._mass is not None
        assert self._squares is not None
        begin = 0
        own = torch.arange(self.plan.position, self.plan.position + hi, device=at.device)[None]
        sources: list[tuple[Tensor, Tensor, Tensor | None]] = [(self._key[:, :hi], own, None)]
        if self._old is not None:
            sources.insert(0, (self._old[0], self._old[2], self._listed))
        for key, pos, index in sources:
            end = begin + pos.shape[1]
            self._ops.add_columns(
                self._mass[:, :, begin:end],
                self._squares[:, begin:end],
                query,
                lse,
                at,
                key,
                pos,
                window,
                index,
            )
            begin = end

    def finish(self, layer: int) -> None:
        """The layer is complete: choose who stays and move the survivors into the arena."""
        plan, prompt = self.plan, self.prompt
        heads, end = self.shape.kv_heads, plan.position + plan.tokens
        window = self.shape.windows[layer]
        new = torch.arange(plan.position, end, device=self._key.device)
        pos = new.expand(heads, plan.tokens)
        if self._old is not None:
            pos = torch.cat((self._old[2], pos), 1)
        if window is not None:  # what the next token will no longer see is dead
            pos = pos.masked_fill(pos <= end - window, -1)
        live = pos >= 0
        total = plan.totals[layer] if plan.totals is not None else None
        evicts = total is not None and self._visible[layer] > total
        view = self._view(layer, pos, new, total if evicts else None, self._carried(layer, pos))
        keep = live
        if evicts:
            assert prompt is not None
            assert total is not None
            keep = self._choose(prompt, view, total)
            self.shaped = self.shaped or prompt.evidence.asks
        extra = self.step.prompt(view, view.carried) if self.step is not None else {}
        if self._landing is not None:
            self._store_there(self._landing, layer, pos, keep, extra, total, evicts)
            return
        kept = [int(n) for n in keep.sum(1)]
        if total is None:
            caps = [max(n, plan.floor) for n in kept]
        elif evicts:
            caps = kept
        else:
            caps = fill(kept, total)
        self._store(layer, pos, keep, extra, caps)

    def _view(
        self, layer: int, pos: Tensor, new: Tensor, total: int | None, carried: dict[str, Tensor]
    ) -> PromptView:
        mass, squares = self._mass, self._squares
        observed, old = self._observed, self._old
        window = self.shape.windows[layer]
        sources: list[kernels.Part] = [(self._key, new[None])]
        if old is not None:
            listed = self._listed
            early = (old[0], old[2]) if listed is None else (old[0], old[2], listed)
            sources.insert(0, early)
        group = self.shape.heads // self.shape.kv_heads
        tail = self._tail.view(-1, self.shape.kv_heads, group, self.shape.head_dim)
        if self._all:
            observed = len(new)
        elif observed and (total is not None or (self.step is not None and self.step.observe > 0)):
            mass, squares = self._ops.observe(
                tail[len(tail) - observed :],
                new[-observed:] if self._causal else new[-1:].expand(observed),
                sources,
                window,
            )
            self._note_peak(mass, squares, *carried.values())

        def below() -> Tensor:
            assert self.step is not None
            last = min(len(tail), self.step.prompt_history)
            queries, at = tail[len(tail) - last :], new[len(new) - last :]
            return kernels.below_uniform(queries, at, sources, window)

        def fetch(which: int, staged: Tensor) -> Callable[[], Tensor]:
            if old is None:
                return lambda: staged
            if listed is None:
                return lambda: torch.cat((old[which], staged), 1)
            return lambda: torch.cat((old[which][listed], staged), 1)

        end = self.plan.position + self.plan.tokens
        each = 0 if total is None else total // self.shape.kv_heads
        budget = max(0, each - self.plan.pinned)
        key, value = fetch(0, self._key), fetch(1, self._value)
        known = self.plan.output
        return PromptView(
            layer,
            end,
            pos,
            observed,
            mass,
            squares,
            key,
            value,
            carried,
            None if known is None else lambda: known(layer),
            self.plan.turns,
            self._moments,
            self.plan.rotary,
            budget,
            self._causal,
            below,
        )

    def _choose(self, prompt: PromptPolicy, view: PromptView, total: int) -> Tensor:
        """bool [H, N]: the rows that stay, `total` over the layer's heads."""
        pinned = (prompt.evidence.scope(view) | (view.pos < self.plan.pinned)) & view.live
        if self._landing is not None:
            keep = choose(prompt, view, pinned, total, self.plan.pinned, self._least)
            if prompt.evidence.observe and view.mass is not None:
                mass = view.mass.mean(1) * view.live
                self._landing.note_lost(view.layer, ((mass * keep).sum(1) / mass.sum(1)).mean())
            return keep
        free = view.live & ~pinned
        scores = prompt.evidence.scorer(view)
        left = max(0, total - int(pinned.sum()))
        if prompt.prefer is not None:
            preferred = prompt.prefer(view.pos, view.turns) & free
            if int(preferred.sum()) <= left:
                pinned, free = pinned | preferred, free & ~preferred
                left -= int(preferred.sum())
            else:  # there is room for some of them, and for nothing else
                free = preferred
        counts = prompt.heads(scores, view.pos, free, left)
        own = pinned & (view.pos >= self.plan.pinned)
        counts = spread(counts, own.sum(1).tolist(), free.sum(1).tolist(), self._least)
        keep = pinned | prompt.select(view, scores, free, counts)
        if prompt.evidence.observe and view.mass is not None:
            mass = view.mass.mean(1) * view.live  # what slid out of the window was not evicted
            self._lost[view.layer] = 1.0 - float(((mass * keep).sum(1) / mass.sum(1)).mean())
        return keep

    def _carried(self, layer: int, pos: Tensor) -> dict[str, Tensor]:
        """The step policy's columns [H, N] from before the prompt, zero for new rows."""
        if self.step is None:
            return {}
        before = pos.shape[1] - self.plan.tokens
        old: dict[str, Tensor] = {}
        source = self.arena if self._landing is None else self._landing
        index, live = source.index(layer) if before else (pos, pos)
        for name, dtype in self.step.columns.items():
            old[name] = torch.zeros(pos.shape, dtype=dtype, device=pos.device)
            if before:
                rows = self.arena.columns[name][index]
                old[name][:, :before] = rows.masked_fill(~live, 0)
        return old

    def _store(
        self, layer: int, pos: Tensor, keep: Tensor, extra: Mapping[str, Tensor], caps: list[int]
    ) -> None:
        """Move the rows to keep, ascending by position, into the layer's segments."""
        arena, plan = self.arena, self.plan
        before = pos.shape[1] - plan.tokens
        sizes = [cap + plan.spare for cap in caps]
        room = min(plan.needed[layer], arena.region[layer + 1] - arena.region[layer])
        if self.step is None and sum(sizes) < room:
            sizes = fill(sizes, room)  # an answer may grow into all of it
        owned = [int(n) for n in arena.capacity[layer]]
        stays = (
            before > 0
            and not plan.shrinks  # segments as wide as before may reach beyond the new end
            and bool(keep.all())
            and not bool((arena.free_slot[layer] >= 0).any())
            and all(a >= b for a, b in zip(owned, sizes, strict=True))
        )
        index = arena.index(layer)[0] if before and not stays else None
        if before and (extra or not stays):
            self._saved[layer] = arena.save(layer, extra if stays else arena.columns)
            self._note_peak()
        if before == 0:
            arena.lay(layer, sizes)
        moved = []
        for h in range(arena.heads):
            rows = keep[h].nonzero().squeeze(1)
            if stays:
                rows = rows[before:]
                for name, values in extra.items():
                    arena.segment(name, layer, h)[:] = values[h, :before]
            elif before:
                rows = rows[torch.argsort(pos[h, rows], stable=True)]
            taken = self._take(h, rows, before, index)
            taken["pos"] = pos[h, rows].to(torch.int32)
            taken |= {name: values[h, rows] for name, values in extra.items()}
            if index is None:
                arena.append(layer, h, taken)
            else:  # old rows may lie where others go, so all are taken out first
                moved.append(taken)
        if moved:
            self._note_peak(*(t for taken in moved for t in taken.values()))
            arena.lay(layer, sizes)
            for h, taken in enumerate(moved):
                arena.append(layer, h, taken)
        arena.cap[layer] = torch.tensor(caps)

    def _store_there(
        self,
        landing: Compaction,
        layer: int,
        pos: Tensor,
        keep: Tensor,
        extra: Mapping[str, Tensor],
        total: int | None,
        evicts: bool,
    ) -> None:
        """`_store` without asking the device who stays."""
        arena, plan = self.arena, self.plan
        before = pos.shape[1] - plan.tokens
        caps = self._untouched(layer, before, total, evicts)
        if caps is not None:
            self._store_behind(layer, pos, extra, caps)
            return
        kept = keep.sum(1)
        if total is None:
            counts = kept.clamp(min=plan.floor)
        else:
            counts = kept if evicts else fill_there(kept, total)
        sizes = counts + plan.spare
        if self.step is None:  # an answer may grow into all of it
            room = min(plan.needed[layer], arena.region[layer + 1] - arena.region[layer])
            sizes = fill_there(sizes, room)
        old = None
        if before:
            saved = self._saved[layer] = arena.save(layer, arena.columns)
            rows = landing.index(layer)[0] - arena.region[layer]
            old = saved, rows.clamp(0, len(saved["pos"]) - 1)
        fresh = arena.stored(self._key, self._value)
        self._note_peak(*(fresh.values() if arena.coded else ()))
        landing.land(layer, keep, pos, counts, sizes, fresh, old, extra)

    def _untouched(
        self, layer: int, before: int, total: int | None, evicts: bool
    ) -> list[int] | None:
        """The heads' caps, if all rows stay and the new ones fit behind the old; else None."""
        arena, plan, window = self.arena, self.plan, self.shape.windows[layer]
        held = arena.held[layer].tolist()
        hides = window is not None and plan.position + plan.tokens > window
        alike = min(held) == max(held) and not bool((arena.free_slot[layer] >= 0).any())
        if not before or evicts or hides or not alike or plan.shrinks:
            return None
        kept = [n + plan.tokens for n in held]
        caps = [max(n, plan.floor) for n in kept] if total is None else fill(kept, total)
        sizes = [cap + plan.spare for cap in caps]
        room = min(plan.needed[layer], arena.region[layer + 1] - arena.region[layer])
        if self.step is None:
            sizes = fill(sizes, room)
        owned = arena.capacity[layer].tolist()
        return caps if all(a >= b for a, b in zip(owned, sizes, strict=True)) else None

    def _store_behind(
        self, layer: int, pos: Tensor, extra: Mapping[str, Tensor], caps: list[int]
    ) -> None:
        """The new rows go behind the old ones, which stay where they are."""
        arena = self.arena
        before = pos.shape[1] - self.plan.tokens
        if extra:
            self._saved[layer] = arena.save(layer, extra)
            self._note_peak()
        for h in range(arena.heads):
            for name, values in extra.items():
                arena.segment(name, layer, h)[:] = values[h, :before]
            taken = arena.stored(self._key[h], self._value[h])
            taken["pos"] = pos[h, before:].to(torch.int32)
            arena.append(
                layer, h, taken | {name: values[h, before:] for name, values in extra.items()}
            )
        arena.cap[layer] = torch.tensor(caps)

    def _take(
        self, head: int, rows: Tensor, before: int, index: Tensor | None
    ) -> dict[str, Tensor]:
        """One head's k and v at `rows` of the view, as they are stored; copied unless they are all
        of the prompt."""
        old = rows < before
        new = rows[~old] - before
        key, value = self._key[head], self._value[head]
        whole = len(new) == len(key)
        taken = self.arena.stored(key if whole else key[new], value if whole else value[new])
        if index is None or len(new) == len(rows):
            return taken
        for name, fresh in taken.items():
            taken[name] = fresh.new_empty((len(rows), *fresh.shape[1:]))
            taken[name][old] = self.arena.columns[name][index[head, rows[old]]]
            taken[name][~old] = fresh
        return taken

    def _note_peak(self, *scratch: Tensor) -> None:
        held = self.arena.nbytes + sum(t.nbytes for t in (self._key, self._value, self._tail))
        held += sum(t.nbytes for t in (*self._copied, self._mass, self._squares) if t is not None)
        held += sum(t.nbytes for saved in self._saved.values() for t in saved.values())
        self.peak = max(self.peak, held + sum(t.nbytes for t in scratch))

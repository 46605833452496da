"""The KV cache under eviction: the `Attend` that a network runs on.

At the end of a prompt the prompt policy chooses which rows stay (see `Prefill`); while an answer is
written, a newcomer overwrites the row that the step policy gave up. No head ever holds more rows
than its cap between two steps.

A prompt is a transaction: `begin` allocates another arena, the target, to which the rows that stay
are written, and `advance` puts it in the place of the old one, which until then is never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena, Layout
from minikv.cache.block_prefill import BlockPrefill
from minikv.cache.budget import Budget
from minikv.cache.prefill import Plan, Prefill
from minikv.cache.snapshot import CacheSnapshot, Outcome
from minikv.cache.stats import CacheStats, Shape
from minikv.cache.stopwatch import Stopwatch
from minikv.errors import UsageError
from minikv.kernels.dispatch import choose
from minikv.policies.base import PromptPolicy, StepPolicy, StepView, smallest_budget
from minikv.policies.selection import fill

_ROOM = 256  # rows that a head gains when it is full and nothing may leave
_JOINT = 1 << 19  # logits up to which one product for all heads beats a loop over uneven ones


class KVCache:
    """`Attend` over an arena under a prompt policy and a step policy. One conversation.

    None for a policy means that it evicts nothing; a budget is needed if either evicts. Raises
    UsageError for a budget too small for the pair. `progress(done, total)` is called while a
    prompt is read; it may raise, after which `rollback` restores the cache.
    """

    def __init__(
        self,
        shape: Shape,
        prompt: PromptPolicy | None,
        step: StepPolicy | None,
        budget: Budget | None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        stride: int = 0,
        kv: torch.dtype | None = None,
        output: Callable[[int], Tensor] | None = None,
        rotary: Tensor | None = None,
        kernels: str = "auto",
        poison: bool = False,
    ) -> None:
        """`kv` is what keys and values are kept in: the network's dtype (None), or int8 with a
        float32 scale per row. With a `stride` the step policy also reads prompts, in blocks of so
        many rows (see `BlockPrefill`). `output`(layer) is the network's output projection
        [H, G, D, hidden], for policies that weigh values by what becomes of them; `rotary` [D / 2]
        its angles per position, for policies that look at queries before rotation. `kernels`, as
        `dispatch.choose` takes it, decides who computes: `ops`; `notice` says why not the device's
        own."""
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.kv = kv or dtype
        self.ops, self.notice = choose(self.device, kernels, shape.head_dim, dtype)
        self.prompt_policy: PromptPolicy | None
        self.step_policy: StepPolicy | None
        self.budget: Budget | None
        self._rows: int | None
        self._open: bool
        self._arena: Arena
        self._back: Callable[[], None] | None = None  # ends a loan, see `lend`
        self.beside = 0  # bytes of what the borrower works with
        self.progress: Callable[[int, int], None] | None = None
        self.output, self.rotary = output, rotary
        self._poison = poison
        self.stride: int
        self._set(prompt, step, budget, stride)
        self.reset()

    def configure(
        self,
        prompt: PromptPolicy | None,
        step: StepPolicy | None,
        budget: Budget | None,
        stride: int = 0,
    ) -> None:
        """Other policies or another budget from the next prompt on. Between turns only.

        Rows already evicted do not come back; a smaller budget evicts at the end of the next
        prompt. Raises UsageError, and changes nothing, if they do not go together.
        """
        assert self._reading is None
        self.check(prompt, step, budget, stride)
        before = self.step_policy
        self._set(prompt, step, budget, stride)
        if (
            before is None
            or step is None
            or (before.name, before.columns) != (step.name, step.columns)
        ):
            self.arena.declare({})  # what one policy noted means something else to another
        self.arena.declare(step.columns if step else {})
        self._relaid()

    def check(
        self,
        prompt: PromptPolicy | None,
        step: StepPolicy | None,
        budget: Budget | None,
        stride: int = 0,
    ) -> None:
        """Raise the UsageError that `configure` would raise; change nothing."""
        names = ("prompt_policy", "step_policy", "budget", "_rows", "_open", "stride")
        before = {name: getattr(self, name) for name in names}
        try:
            self._set(prompt, step, budget, stride)
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def _set(
        self,
        prompt: PromptPolicy | None,
        step: StepPolicy | None,
        budget: Budget | None,
        stride: int,
    ) -> None:
        assert not stride or (step is not None and prompt is None)
        self.stride = stride
        if (prompt or step) and budget is None:
            raise UsageError("a policy needs a budget", "give --budget, e.g. 512, 20% or 64MiB")
        self.prompt_policy, self.step_policy, self.budget = prompt, step, budget
        # A share is of all that was read when the next prompt ends; until then it is open.
        self._open = budget is not None and budget.unit == "share"
        self._rows = self._count(budget, 0) if budget and not self._open else None

    def _count(self, budget: Budget, tokens: int) -> int:
        """Rows per head; UsageError when the policies need more."""
        prompt, step = self.prompt_policy, self.step_policy
        state = sum(dtype.itemsize for dtype in step.columns.values()) if step else 0
        row = 2 * self.shape.head_dim * self.kv.itemsize + torch.int32.itemsize + state
        row += 2 * torch.float32.itemsize if self.kv == torch.int8 else 0
        rows = budget.rows(tokens, row, self.shape.layers * self.shape.kv_heads)
        least = self._least(0)
        if (prompt or step) and rows < least:
            names = " with ".join(p.name for p in (prompt, step) if p)
            meant = "" if budget.unit == "rows" else f", which is {rows} rows per head here,"
            raise UsageError(
                f"budget {budget}{meant} is too small for {names}",
                f"the smallest useful budget here is {least} rows per head",
            )
        return rows

    def reset(self) -> None:
        """Forget the conversation and give its memory back."""
        self._end_loan()
        self.position = 0
        self._turns: list[tuple[int, int]] = []
        self._pinned = 0
        self._arena = self._empty(self.step_policy)
        if self.budget and self.budget.unit == "share":
            self._open, self._rows = True, None
        self._reading: Prefill | BlockPrefill | None = None
        self._last = Outcome()
        self._peak = 0
        self._evict_s = 0.0
        self._relaid()

    def pin(self, rows: int) -> None:
        """The first `rows` positions of the conversation never leave. Before the first prompt.

        Raises UsageError if the budget leaves no room beside them.
        """
        assert self.position == 0
        if self.budget is not None and self.budget.unit == "rows":
            self._refuse_pins(rows, int(self.budget.value))
        self._pinned = rows

    def _least(self, pinned: int | None = None) -> int:
        """Rows per head that the policies and the pinned rows need."""
        prompt, step = self.prompt_policy, self.step_policy
        sinks = max(prompt.evidence.sinks if prompt else 0, step.sinks if step else 0)
        least = smallest_budget(prompt, step, self.stride)
        return least + max(0, (self._pinned if pinned is None else pinned) - sinks)

    def _refuse_pins(self, rows: int, each: int) -> None:
        least = self._least(rows)
        if rows and each < least:
            raise UsageError(
                f"a budget of {each} rows is too small beside {rows} pinned ones",
                f"the smallest useful budget here is {least} rows per head",
            )

    # -- a prompt ---------------------------------------------------------------------------

    def begin(self, tokens: int, room: int = _ROOM) -> None:
        """The next forward is a prompt of `tokens` tokens (a single token may be a prompt, too).

        `room`: answer rows to make place for when no step policy keeps the answer in bounds. Waits
        for the device. Raises UsageError for a budget that is too small; then, as when there is no
        memory, nothing has changed.
        """
        assert tokens > 0
        assert self._reading is None, "a prompt is under way"
        arena, step, rows = self.arena, self.step_policy, self._rows
        if self._open and self.budget is not None:
            rows = self._count(self.budget, self.position + tokens)
        # More rows than positions can never be used.
        each = min(rows, self.shape.max_context) if rows is not None else None
        if each is not None:
            self._refuse_pins(self._pinned, each)
        held, visible = self._read_tables(tokens)
        plan = self._plan(tokens, room, each, held, visible)
        columns = step.columns if step is not None else {}
        target = arena.sharing(columns) if plan.shares else arena.fresh(plan.needed, columns)
        reading: Prefill | BlockPrefill
        if self.stride and step is not None and each is not None:
            reading = BlockPrefill(
                self.shape, arena, held, target, step, plan, each, self.stride, self.dtype, self.ops
            )
        else:
            reading = Prefill(
                self.shape,
                arena,
                held,
                target,
                self.prompt_policy,
                step,
                plan,
                self.dtype,
                self.ops,
            )
        self._evicting = Stopwatch(self.device)
        self._rows, self._reading = rows, reading

    def _read_tables(self, tokens: int) -> tuple[Layout, list[int]]:
        """The arena's tables on the host, and how many rows of each layer, over its heads, will
        exist after a prompt of so many tokens and can still be seen. One transfer."""
        arena, shape, end = self.arena, self.shape, self.position + tokens
        tables = arena.start, arena.length, arena.capacity, arena.cap, arena.free_slot
        if not self.position:  # nothing to ask for, and a device without memory can be planned for
            empty = torch.zeros((shape.layers, shape.kv_heads), dtype=torch.int64)
            held, before = Layout(empty, empty, empty, empty, empty - 1), [0] * shape.layers
        else:
            seen = [
                arena.held[layer].sum()
                if window is None or end <= window
                else arena.count_from(layer, end - window + 1)
                for layer, window in enumerate(shape.windows)
            ]
            numbers = torch.cat((torch.stack(tables).flatten(), torch.stack(seen))).cpu()
            before = numbers[-shape.layers :].tolist()
            held = Layout(*numbers[: -shape.layers].view(5, *arena.start.shape).unbind())
        new = [tokens if window is None else min(tokens, window) for window in shape.windows]
        return held, [b + shape.kv_heads * n for b, n in zip(before, new, strict=True)]

    def _plan(
        self, tokens: int, room: int, each: int | None, held: Layout, visible: list[int]
    ) -> Plan:
        """What the prompt is read under; each: the budget in rows per head."""
        shape, step, arena = self.shape, self.step_policy, self.arena
        spare = room if step is None else 0 if step.before else 1
        totals = self._totals(each, int(held.held.max()) + tokens)
        blocks = self.stride and each is not None
        limits = [shape.kv_heads * each] * shape.layers if blocks and each is not None else totals
        drift = self.prompt_policy.heads.drift if self.prompt_policy is not None else 0
        needed = []
        for layer, window in enumerate(shape.windows):
            rows = held.length[layer] + tokens
            if window is not None:
                rows = rows.clamp(max=window)
            if step is not None and each is not None:
                rows = rows.clamp(min=each)
            most = int(rows.sum())
            if limits is not None:
                most = limits[layer] + shape.kv_heads * drift
            needed.append(most + shape.kv_heads * spare)
        plan = Plan(
            self.position,
            tokens,
            totals,
            each if each is not None and step is not None else 0,
            spare,
            needed,
            visible,
            False,
            [*self._turns, (self.position, self.position + tokens)],
            self.output,
            self.rotary,
            self._pinned,
        )
        # A smaller budget gives its memory back.
        shares = not blocks and self.position > 0 and 2 * sum(needed) > arena.rows
        return replace(plan, shares=shares and self._fits(plan, held))

    def _fits(self, plan: Plan, held: Layout) -> bool:
        """Every row stays, and every head has room for the new ones behind its old ones."""
        for layer, window in enumerate(self.shape.windows):
            count = held.held[layer]
            uneven = bool((count != count[0]).any()) or bool((held.free_slot[layer] >= 0).any())
            slides = window is not None and plan.position + plan.tokens > window
            if uneven or slides or not int(count[0]) or plan.evicts(layer):
                return False
            kept = count + plan.tokens
            if plan.totals is None:
                sizes = kept.clamp(min=plan.floor) + plan.spare
            else:
                sizes = fill(kept, plan.totals[layer]) + plan.spare
            if self.step_policy is None:
                sizes = fill(sizes, plan.needed[layer])
            if bool((held.capacity[layer] < sizes).any()):
                return False
        return True

    def _totals(self, each: int | None, most: int) -> list[int] | None:
        """Rows that each layer may keep over all its heads, if the prompt policy evicts.

        each: the budget in rows per head; most: rows that a head could hold at all.
        """
        if self.prompt_policy is None:
            return None
        assert each is not None
        least = self._least()
        rows = self.prompt_policy.layer_rows(self.shape.layers, each, most, least)
        if min(rows) < least:
            raise UsageError(
                f"{self.prompt_policy.name} leaves a layer {min(rows)} rows per head, of which "
                f"{least - 1} are protected",
                "a larger --budget or a smaller beta gives every layer enough",
            )
        return [
            self.shape.kv_heads * (n if window is None else min(n, window))
            for n, window in zip(rows, self.shape.windows, strict=True)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`. After `begin` the rows are the prompt's; otherwise it is a step, t = 1."""
        reading = self._reading
        if reading is None:
            return self._step(layer, q, k, v)
        out = reading.stage(layer, q, k, v)
        if reading.layer_complete:
            with self._evicting.running():
                reading.finish(layer)
        if self.progress is not None:
            self.progress(reading.done(layer), reading.plan.tokens)
        return out

    def advance(self, tokens: int) -> None:
        """See `Attend`: every layer has seen the forward's tokens."""
        if self._reading is None:
            assert tokens == 1
            self._end_step()
            return
        assert tokens == self._reading.plan.tokens
        reading = self._reading
        outcome, evict_s = reading.complete(), self._evicting.total()
        turns = [*self._turns, (self.position, self.position + tokens)]
        # From here on nothing fails.
        self._arena, self._reading = reading.target, None
        self._last, self._evict_s, self._turns = outcome, evict_s, turns
        self._open = False
        self.position += tokens
        self._relaid()
        self._peak = reading.peak + self._mean.nbytes

    def rollback(self) -> None:
        """Undo an unfinished prompt or step: rows exist for exactly the tokens fed before it."""
        if self._open:
            self._rows = None
        if self._reading is not None:
            self._reading = None
        elif self._slot is not None:
            # A row that gave way to the unfinished step's newcomer is gone for good.
            free_slot = torch.where(self._taken, self._slot, self.arena.free_slot)
            self.arena.free_slot = free_slot
        self._relaid()

    # -- steps elsewhere ----------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """The rows. If they are lent, this ends the loan."""
        self._end_loan()
        return self._arena

    def lend(self, back: Callable[[], None]) -> Arena:
        """Let someone else make the steps. Between steps only.

        `back` is called before anyone looks at the arena again: it brings length and hole up to
        date. The borrower keeps `position` itself. Without a step policy every head has room for
        a row at least.
        """
        assert self._reading is None
        assert self._slot is None, "a step is under way"
        arena = self.arena
        if self.step_policy is None and bool(
            ((arena.length >= arena.capacity) & (arena.free_slot < 0)).any()
        ):
            self._grow()
            arena = self._arena
        self._relaid()  # what was derived from the rows will not hold
        self._back = back
        return arena

    def _end_loan(self) -> None:
        if self._back is not None:
            self._back()
            self._back = None

    @property
    def pinned(self) -> int:
        """Positions below it never leave."""
        return self._pinned

    def lasting(self) -> Tensor | None:
        """bool [R]: rows that leave after all others; None if the prompt policy prefers none."""
        prefers = self.prompt_policy.preference if self.prompt_policy is not None else None
        if prefers is None:
            return None
        return prefers.prefers(self.arena.columns["pos"].to(torch.int64), self._turns)

    # -- set aside ----------------------------------------------------------------------------

    def snapshot(self) -> CacheSnapshot:
        """A copy of everything but the policies. Between turns only."""
        assert self._reading is None
        assert self._slot is None, "a step is under way"
        return CacheSnapshot(
            self.position,
            tuple(self._turns),
            self._pinned,
            self._rows,
            self._open,
            self._peak,
            self._evict_s,
            self._last,
            tuple(self.arena.region),
            self.arena.layout(),
            self.arena.pack(),
        )

    def restore(
        self,
        held: CacheSnapshot,
        prompt: PromptPolicy | None,
        step: StepPolicy | None,
        budget: Budget | None,
        stride: int = 0,
    ) -> None:
        """Be again as `held` was taken, under these policies: what follows is bit-identical if they
        are the ones of then. Between turns only.

        Raises UsageError as `configure`, ValueError if the rows are not those of such a network
        and step policy; then, as when there is no memory, nothing changes.
        """
        assert self._reading is None
        self.check(prompt, step, budget, stride)
        arena = self._empty(step)
        kinds = [
            {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
            for columns in (arena.columns, held.columns)
        ]
        if kinds[0] != kinds[1] or held.layout.start.shape != arena.start.shape:
            raise ValueError("the cache is not one of this network and policy")
        arena = arena.unpack(held.layout, held.region, held.columns)
        self._set(prompt, step, budget, stride)
        self._end_loan()
        self._arena, self.position, self._turns = arena, held.position, list(held.turns)
        self._pinned, self._rows, self._open = held.pinned, held.rows, held.open
        self._peak, self._evict_s, self._last = held.peak, held.evict_s, held.outcome
        self._relaid()

    def _empty(self, step: StepPolicy | None) -> Arena:
        """An arena without rows, with the columns that `step` needs."""
        shape = self.shape
        return Arena(
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            self.dtype,
            self.device,
            step.columns if step else {},
            kv=self.kv,
            poison=self._poison,
        )

    # -- a step -----------------------------------------------------------------------------

    def _relaid(self) -> None:
        """Rows moved, came or went other than by a step: forget what was derived from them."""
        step = self.step_policy
        self._slot: Tensor | None = None  # [L, H], where the step's newcomer goes
        self._taken = torch.zeros_like(self.arena.free_slot, dtype=torch.bool)
        rows = self.arena.rows if step is not None and not step.before else 0
        self._mean = torch.zeros(rows, device=self.device)  # this step's attention per row
        self._padded: tuple[Tensor, Tensor, Tensor] | None = None
        self._seen: dict[int, Tensor] = {}  # layers with uneven heads: see `_joint`

    def _start_step(self) -> None:
        """Decide where the newcomer goes in every head, and what each head then holds."""
        arena, step = self.arena, self.step_policy
        open_ = arena.free_slot >= 0
        full = arena.length >= arena.capacity
        if step is not None:
            full |= arena.length >= arena.cap + (0 if step.before else 1)
        elif bool((full & ~open_).any()):
            self._grow()
            arena = self._arena
            open_, full = arena.free_slot >= 0, torch.zeros_like(full)
        slot = torch.where(open_, arena.free_slot, arena.start + arena.length)
        self._taken = full & ~open_
        self._grows = ~open_ & ~full
        self._slot = slot.masked_fill(self._taken, -1)
        # The host's integers for the whole step: first row, rows in use, rows owned.
        self._starts = arena.start.tolist()
        self._counts = (arena.length + self._grows).tolist()
        self._owned = arena.capacity.tolist()
        self._asked = self._taken.any(1).tolist()
        self._growing = self._grows.any(1).tolist()
        known = slot[~self._taken].to(self.device)
        arena.columns["pos"].index_fill_(0, known, self.position)
        for name in arena.extra:
            arena.columns[name].index_fill_(0, known, 0)

    def _step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert len(q) == 1, "a prompt must be announced with begin()"
        if layer == 0:
            self._start_step()
        assert self._slot is not None
        arena, heads = self.arena, self.shape.kv_heads
        query = q[0].view(heads, -1, self.shape.head_dim)
        if self._asked[layer]:
            self._make_room(layer, query, k[0])
        slots = self._slot[layer].to(self.device)
        for name, rows in arena.stored(k[0], v[0]).items():
            arena.columns[name].index_copy_(0, slots, rows)
        if self.step_policy is not None:
            for name, values in self.step_policy.admit(layer, k[0]).items():
                arena.columns[name][slots] = values
        starts, counts, owned = self._starts[layer], self._counts[layer], self._owned[layer]
        even = min(counts) == max(counts) and min(owned) == max(owned)
        if not even and self.shape.heads * sum(owned) <= _JOINT and self.device.type == "cpu":
            return self._joint(layer, query)
        if even:
            self._seen.pop(layer, None)  # heads that grow together are not noted there
            spans = [(0, heads, starts[0], counts[0], owned[0])]
        else:
            spans = [(h, h + 1, starts[h], counts[h], counts[h]) for h in range(heads)]
        window = self.shape.windows[layer]
        mixed = []
        for low, high, begin, count, stride in spans:
            end = begin + (high - low) * stride
            wide = (high - low, stride, self.shape.head_dim)
            keys = arena.columns["k"][begin:end].view(wide)[:, :count]
            values = arena.columns["v"][begin:end].view(wide)[:, :count]
            seen = None
            if window is not None and self.position >= window:
                at = arena.columns["pos"][begin:end].view(wide[:2])[:, :count]
                seen = at > self.position - window
            scales = None
            if arena.coded:
                one, two = (
                    arena.columns[name][begin:end].view(wide[:2])[:, :count]
                    for name in arena.scales
                )
                scales = one, two
            out, p = kernels.decode_attention(query[low:high], keys, values, seen, scales)
            mixed.append(out)
            if len(self._mean):
                into = self._mean[begin:end].view(wide[:2])[:, :count]
                torch.mean(p, 1, out=into) if into.is_contiguous() else into.copy_(p.mean(1))
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return whole.reshape(1, self.shape.heads, -1)

    def _joint(self, layer: int, query: Tensor) -> Tensor:
        """Attention of a step over the layer's rows as they lie, of all heads at once."""
        arena, heads = self.arena, self.shape.kv_heads
        assert self._slot is not None
        starts, counts, owned = self._starts[layer], self._counts[layer], self._owned[layer]
        begin, end = starts[0], starts[-1] + owned[-1]
        keys, values = arena.columns["k"][begin:end], arena.columns["v"][begin:end]
        seen = self._seen.get(layer)
        if seen is None:
            seen = torch.zeros((heads, end - begin), dtype=torch.bool, device=self.device)
            for h, (start, count, rows) in enumerate(zip(starts, counts, owned, strict=True)):
                seen[h, start - begin : start - begin + count] = True
                # What nobody has written yet is weighed with 0, and 0 x NaN is not 0.
                for name in ("k", "v", *arena.scales):
                    arena.columns[name][start + count : start + rows] = 0
            seen = seen.repeat_interleave(query.shape[1], 0)
            self._seen[layer] = seen
        elif self._growing[layer]:
            each = seen.view(heads, -1, end - begin)
            each[torch.arange(heads), :, self._slot[layer] - begin] = True
        window = self.shape.windows[layer]
        if window is not None and self.position >= window:
            seen = seen & (arena.columns["pos"][begin:end] > self.position - window)
        scales = None
        if arena.coded:
            one, two = (arena.columns[name][begin:end] for name in arena.scales)
            scales = one, two
        mixed, mean = kernels.joint_attention(query, keys, values, seen, scales)
        if len(self._mean):
            self._mean[begin:end] = mean
        return mixed.reshape(1, self.shape.heads, -1)

    def _make_room(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Ask the policy for victims that leave before attention, in the heads that are full."""
        assert self._slot is not None
        asked = self._taken[layer]
        where = torch.zeros_like(self._taken)
        where[layer] = asked
        full = asked.to(query.device)
        slots = self._victims(where, query[full], key[full][:, None])
        self._slot[layer, asked] = slots.cpu()
        self.arena.columns["pos"][slots] = self.position
        for name in self.arena.extra:
            self.arena.columns[name][slots] = 0

    def _end_step(self) -> None:
        """The newcomer is in every layer: count it, learn from the step, and evict."""
        arena, step = self.arena, self.step_policy
        arena.length += self._grows
        if bool(self._grows.any()):
            self._padded = None
        arena.free_slot = torch.full_like(arena.free_slot, -1)
        entered, self._slot = self._slot, None
        self.position += 1
        full = torch.zeros_like(self._taken)
        if step is not None and not step.before:
            columns = {name: arena.columns[name] for name in arena.extra}
            step.step(columns, self._mean, self._visible)
            full = arena.length > arena.cap
        slid = self._slid_out()
        full = full & (slid < 0)
        arena.free_slot = torch.where(slid >= 0, slid, arena.free_slot)
        if bool(full.any()):
            arena.free_slot[full] = self._victims(full, entered=entered).cpu()
        else:
            self._padded = None

    def _visible(self) -> Tensor:
        """float32 [R]: rows that the step's query saw in each row's head, 0 in unused rows."""
        arena = self.arena
        seen = torch.zeros(arena.rows)
        for layer, window in enumerate(self.shape.windows):
            for h in range(self.shape.kv_heads):
                begin, count = int(arena.start[layer, h]), int(arena.length[layer, h])
                seen[begin : begin + count] = min(count, window or count)
        return seen.to(self.device)

    def _slid_out(self) -> Tensor:
        """[L, H]: the oldest row that the layer's window no longer shows, or -1."""
        arena = self.arena
        slid = torch.full_like(arena.free_slot, -1)
        for layer, window in enumerate(self.shape.windows):
            if window is None or self.position < window:
                continue
            for h in range(self.shape.kv_heads):
                pos = arena.segment("pos", layer, h)
                oldest = int(pos.argmin())
                if int(pos[oldest]) <= self.position - window:
                    slid[layer, h] = arena.start[layer, h] + oldest
        return slid

    def _victims(
        self,
        heads: Tensor,
        query: Tensor | None = None,
        key: Tensor | None = None,
        entered: Tensor | None = None,
    ) -> Tensor:
        """Indices into the columns [F] of the rows that the F marked heads [L, H] give up.

        entered [L, H]: where the newcomer of the step went, if it is over.
        """
        arena, step = self.arena, self.step_policy
        assert step is not None
        known = False
        if entered is not None and self._padded is not None:
            known = torch.equal(self._padded[0], heads)
        if not known:
            count = arena.length[heads]
            reach = torch.arange(int(count.max()))
            index = arena.start[heads][:, None] + torch.minimum(reach, count[:, None] - 1)
            index, live = index.to(self.device), (reach < count[:, None]).to(self.device)
            pos = arena.columns["pos"][index].to(torch.int64)
            pos = pos.masked_fill(~live | (pos < self._pinned), -1)  # pinned rows are not shown
            self._padded = (heads.clone(), index, pos)
        assert self._padded is not None
        _, index, pos = self._padded
        if known:  # since then a row entered each head, and no other
            assert entered is not None
            where = (entered[heads] - arena.start[heads]).to(self.device)
            pos.scatter_(1, where[:, None], self.position - 1)
        rows = index.view(-1)

        def at_rows(column: Tensor) -> Tensor:
            return column.index_select(0, rows).view(index.shape)

        if self.prompt_policy is not None and self.prompt_policy.preference is not None:
            shown = pos.masked_fill(self.prompt_policy.preference.prefers(pos, self._turns), -1)
            enough = (shown >= 0).sum(1, keepdim=True) > step.sinks + step.recent
            pos = torch.where(enough, shown, pos)
        where = heads.nonzero().to(self.device)
        view = StepView(
            self.position,
            pos,
            arena.cap[heads].to(self.device),
            where[:, 0],
            where[:, 1],
            {name: at_rows(arena.columns[name]) for name in arena.extra},
            at_rows(self._mean) if step.looks else None,
            query,
            key,
        )
        return index.gather(1, step.victims(view)[:, None])[:, 0]

    def _grow(self) -> None:
        """Nothing may leave and a head is full: give every head more rows."""
        self._arena = self._arena.grown(self._arena.capacity + _ROOM)
        self._relaid()

    # -- what it tells ----------------------------------------------------------------------

    def kept(self, layer: int, head: int) -> Tensor:
        """Positions that a KV head holds, ascending, int64."""
        index, live = self.arena.index(layer)
        return self.arena.columns["pos"][index[head, live[head]]].to(torch.int64).sort().values

    @property
    def lost(self) -> tuple[float | None, ...]:
        """Per layer, the share of the last window's attention that was evicted; None: not known."""
        return self._last.lost

    @property
    def reading(self) -> bool:
        """A prompt is under way."""
        return self._reading is not None

    @property
    def first(self) -> Prefill | None:
        """The prompt under way, if it is a conversation's first and is read exactly."""
        reading = self._reading
        return reading if isinstance(reading, Prefill) and not self.position else None

    @property
    def target(self) -> Arena | None:
        """What the prompt under way is written to."""
        return self._reading.target if self._reading is not None else None

    @property
    def budget_rows(self) -> int | None:
        """The budget in rows per head; None where there is none or it is not known yet."""
        return self._rows

    def attended(self, layer: int, head: int) -> Tensor:
        """Positions that the query of the step under way sees in a layer it has been through."""
        begin = self._starts[layer][head]
        pos = self.arena.columns["pos"][begin : begin + self._counts[layer][head]]
        return pos.to(torch.int64)

    @property
    def _allocated(self) -> int:
        """Bytes of the arena and of what the steps work with."""
        return self.arena.nbytes + self._mean.nbytes + self.derived + self.beside

    @property
    def derived(self) -> int:
        """Bytes that steps keep between them beside the rows: which rows a head's queries see, and
        where the rows are that are judged."""
        seen = sum(mask.nbytes for mask in self._seen.values())
        return seen + sum(t.nbytes for t in self._padded or ())

    def stats(self) -> CacheStats:
        """Counted from the tensors; see `CacheStats`."""
        arena, shape, last = self.arena, self.shape, self._last
        held = arena.layout().held
        rows = int(held.sum())
        row_bytes = 2 * shape.head_dim * self.dtype.itemsize  # as a full cache would hold them
        lost = [(s, i) for i, s in enumerate(last.lost) if s is not None]
        seen = sum(min(self.position, w) if w else self.position for w in shape.windows)
        mean = rows / held.numel()
        return CacheStats(
            seen=self.position,
            row_bytes=row_bytes,
            kept_mean=mean,
            kept_min=int(held.min()),
            kept_max=int(held.max()),
            full_bytes=seen * shape.kv_heads * row_bytes,
            held_bytes=rows * arena.row_nbytes(),
            allocated_bytes=self._allocated,
            peak_bytes=max(self._peak, self._allocated - self.derived),
            state_bytes=rows * arena.row_nbytes(arena.extra),
            evicted=round(self.position - mean),
            lost_mean=sum(s for s, _ in lost) / len(lost) if lost else None,
            lost_max=max(lost)[0] if lost else None,
            lost_layer=max(lost)[1] if lost else None,
            evict_s=self._evict_s,
            budget_rows=self.budget_rows,
            shaped=last.shaped,
        )

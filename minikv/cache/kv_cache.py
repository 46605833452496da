"""The eviction scheduler: the `Attend` that a network runs on.

At the end of a prompt the prompt policy chooses who stays (see `Prefill`); while an answer is
written, a newcomer overwrites the row that the step policy gave up. No head ever holds more rows
than its cap between two steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from minikv.cache.arena import Arena
from minikv.cache.block_prefill import BlockPrefill
from minikv.cache.budget import Budget
from minikv.cache.decode_step import DecodeStep
from minikv.cache.prefill import Plan, Prefill
from minikv.cache.snapshot import CacheSnapshot, Outcome
from minikv.cache.stats import CacheStats, Shape
from minikv.cache.stopwatch import Stopwatch
from minikv.errors import UsageError
from minikv.kernels.dispatch import Kernels, choose
from minikv.policies.base import PromptPolicy, StepPolicy, smallest_budget

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
        self.decode = DecodeStep(shape, self.device, self.ops)
        self.before_settling: Callable[[], None] | None = (
            None  # who makes steps ahead finishes them
        )
        self._full = 0  # see `full_at`
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
            meant = "" if budget.unit == "rows" else f", which is {rows} tokens per head here,"
            raise UsageError(
                f"budget {budget}{meant} is too small for {names}",
                f"the smallest useful budget here is {least} tokens per head",
            )
        return rows

    def reset(self) -> None:
        """Forget the conversation and give its memory back."""
        self.settle()
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

    def use(self, ops: Kernels) -> None:
        """Compute with these kernels from now on. Between turns only."""
        self.settle()
        self.ops = ops
        self.decode = DecodeStep(self.shape, self.device, ops)

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
                f"the smallest useful budget here is {least} tokens per head",
            )

    # -- a prompt ---------------------------------------------------------------------------

    def begin(self, tokens: int, room: int = _ROOM) -> None:
        """The next forward is a prompt of `tokens` tokens (a single token may be a prompt, too).

        `room`: answer rows to make place for when no step policy keeps the answer in bounds.
        """
        assert tokens > 0
        assert self._reading is None, "a prompt is under way"
        if self._open and self.budget is not None:
            self._rows = self._count(self.budget, self.position + tokens)
        arena, step = self.arena, self.step_policy
        spare = room if step is None else 0 if step.evict_first else step.block
        # More rows than positions can never be used.
        each = min(self._rows, self.shape.max_context) if self._rows is not None else None
        if each is not None:
            self._refuse_pins(self._pinned, each)
        totals = self._totals(each, tokens)
        if self.stride and each is not None:
            totals = [self.shape.kv_heads * each] * self.shape.layers
        needed, wide = [], []
        for layer, window in enumerate(self.shape.windows):
            rows = arena.length[layer] + tokens
            if window is not None:
                rows = rows.clamp(max=window)
            if step is not None and each is not None:
                rows = rows.clamp(min=each)
            most = int(rows.sum())
            if totals is not None:
                drift = self.prompt_policy.drift if self.prompt_policy is not None else 0
                most = totals[layer] + self.shape.kv_heads * drift
            needed.append(most + self.shape.kv_heads * spare)
            wide.append(rows + spare)
        shrinks = 2 * sum(needed) <= arena.rows  # a smaller budget gives its memory back
        capacity = arena.capacity
        if totals is None and self.position and not shrinks:
            # Every row stays: in segments that are wide enough now, none is copied later.
            capacity = torch.maximum(capacity, torch.stack(wide))
        have = [b - a for a, b in zip(arena.region[:-1], arena.region[1:], strict=True)]
        sums = capacity.sum(1).tolist()
        region = [max(three) for three in zip(needed, have, sums, strict=True)]
        moving = arena.resize(region, capacity)
        floor = each if each is not None and step is not None else 0
        turns = [*self._turns, (self.position, self.position + tokens)]
        plan = Plan(
            self.position,
            tokens,
            totals,
            floor,
            spare,
            needed,
            shrinks,
            turns,
            self.output,
            self.rotary,
            self._pinned,
        )
        self._evicting = Stopwatch(self.device)
        if self.stride and step is not None and each is not None:
            self._reading = BlockPrefill(
                self.shape, arena, step, plan, each, self.stride, self.dtype
            )
        else:
            self._reading = Prefill(
                self.shape, arena, self.prompt_policy, step, plan, self.dtype, self.ops
            )
        self._reading.peak = max(self._reading.peak, moving)

    def _totals(self, each: int | None, tokens: int) -> list[int] | None:
        """Rows that each layer may keep over all its heads, if the prompt policy evicts.

        each: the budget in tokens per head; tokens: the prompt's.
        """
        if self.prompt_policy is None:
            return None
        assert each is not None
        most = int(self.arena.held.max()) + tokens
        least = self._least()
        rows = self.prompt_policy.layers(self.shape.layers, each, most, least)
        if min(rows) < least:
            raise UsageError(
                f"{self.prompt_policy.name} leaves a layer {min(rows)} tokens per head, of which "
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
            if layer == 0:
                self.open_steps()
            return self.decode.attend(layer, q, k, v)
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
            self.decode.end()
            self.position += 1
            return
        assert tokens == self._reading.plan.tokens
        reading, self._reading = self._reading, None
        self._last = Outcome(tuple(reading.lost), reading.shaped)
        self._open = False
        self._turns.append((self.position, self.position + tokens))
        self.position += tokens
        reading.release()
        self._evict_s = self._evicting.total()
        self._peak = reading.peak
        if reading.plan.shrinks:
            # The prompt is in: memory that cannot be given back now does not undo it.
            with contextlib.suppress(MemoryError, RuntimeError):
                self._arena.resize(reading.plan.needed)

    def rollback(self) -> None:
        """Undo an unfinished prompt or step: rows exist for exactly the tokens fed before it."""
        if self._open:
            self._rows = None
        if self._reading is not None:
            self._reading.rollback()
            self._reading = None
        elif self.decode.is_open:
            self.decode.drop()

    # -- steps ----------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """The rows, as of the last token that counts."""
        self.settle()
        return self._arena

    def open_steps(self, *, speculative: bool = False) -> DecodeStep:
        """The decode step, ready for the next token: every head has room for its row.

        See `DecodeStep.open`. May raise what torch raises; then nothing has changed. `settle` ends
        it.
        """
        assert self._reading is None, "a prompt is under way"
        step, decode = self.step_policy, self.decode
        if decode.is_open and (step is not None or self.position < self._full):
            return decode
        self.settle()
        with torch.inference_mode(False):  # what is made here is written outside of a forward, too
            arena = self._with_room()
            decode.open(
                arena,
                step,
                self.position,
                pinned=self._pinned,
                leaves_last=self._leaves_last(arena),
                speculative=speculative,
            )
        self._arena = arena
        self._full = self.position + int((arena.capacity - arena.held).min())
        return decode

    def _with_room(self) -> Arena:
        """The arena, or a copy of it, in which every head can take a row and none is over its
        cap."""
        arena, step = self._arena, self.step_policy
        if step is not None:
            block = 0 if step.evict_first else step.block
            if bool(
                (arena.held > arena.cap).any()
            ):  # another policy was in force when these rows came
                arena = arena.trimmed(step.sinks, self._pinned)
            wanted = arena.cap + block
        else:
            wanted = arena.capacity
            if bool((arena.held >= arena.capacity).any()):
                wanted = arena.capacity + _ROOM
        if bool((wanted > arena.capacity).any()):
            arena = arena.grown(torch.maximum(wanted, arena.capacity))
        return arena

    def settle(self) -> None:
        """Finish what steps have begun, and free what they work with. Between steps only."""
        if self.before_settling is not None:
            self.before_settling()
        if self.decode.is_open:
            self.decode.close()

    @property
    def full_at(self) -> int:
        """The position at which a head may be without room, where no step policy makes some."""
        return self._full if self.step_policy is None else self.shape.max_context

    @property
    def pinned(self) -> int:
        """Positions below it never leave."""
        return self._pinned

    def _leaves_last(self, arena: Arena) -> Tensor | None:
        """bool [R]: rows that leave after all others; None if the prompt policy prefers none."""
        if self.prompt_policy is None or self.prompt_policy.prefer is None:
            return None
        return self.prompt_policy.prefer(arena.columns["pos"].to(torch.int64), self._turns)

    # -- set aside ----------------------------------------------------------------------------

    def snapshot(self) -> CacheSnapshot:
        """A copy of everything but the policies. Between turns only."""
        assert self._reading is None
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
        arena.unpack(held.layout, held.region, held.columns)
        self._set(prompt, step, budget, stride)
        self.settle()
        self._arena, self.position, self._turns = arena, held.position, list(held.turns)
        self._pinned, self._rows, self._open = held.pinned, held.rows, held.open
        self._peak, self._evict_s, self._last = held.peak, held.evict_s, held.outcome

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
        """The reading under way, if it is an exact one of a conversation's first prompt."""
        reading = self._reading
        return reading if isinstance(reading, Prefill) and not self.position else None

    def attended(self, layer: int, head: int) -> Tensor:
        """Positions that the query of the step under way sees in a layer it has been through."""
        begin, count = int(self._arena.start[layer, head]), int(self.decode.count[layer, head])
        pos = self._arena.columns["pos"][begin : begin + count]
        return pos.to(torch.int64)

    @property
    def _allocated(self) -> int:
        """Bytes of the arena and of what the steps work with."""
        return self._arena.nbytes + self.decode.nbytes

    def stats(self) -> CacheStats:
        """Counted from the tensors; see `CacheStats`."""
        arena, shape, last = self.arena, self.shape, self._last
        held = arena.held
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
            peak_bytes=max(self._peak, self._allocated),
            state_bytes=rows * arena.row_nbytes(arena.extra),
            evicted=round(self.position - mean),
            lost_mean=sum(s for s, _ in lost) / len(lost) if lost else None,
            lost_max=max(lost)[0] if lost else None,
            lost_layer=max(lost)[1] if lost else None,
            evict_s=self._evict_s,
            budget_rows=self._rows,
            shaped=last.shaped,
        )

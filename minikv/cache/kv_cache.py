"""The KV cache under eviction: the `Attend` that a network runs on.

At the end of a prompt the prompt policy chooses which rows stay (`Prefill`). While an answer is
written, a new token's row overwrites the row that the step policy evicted (`DecodeStep`). Between
two steps no head holds more rows than its cap.

A prompt is a transaction: `begin` allocates another arena, the target, to which the rows that stay
are written, and `advance` puts it in the place of the old one, which until then is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.cache.arena import Arena, Layout
from minikv.cache.block_prefill import BlockPrefill
from minikv.cache.budget import Budget
from minikv.cache.decode_step import DecodeStep
from minikv.cache.fidelity import LastToken
from minikv.cache.prefill import Plan, Prefill
from minikv.cache.second_pass import PassCost, SecondPassPrefill
from minikv.cache.snapshot import CacheSnapshot, Outcome
from minikv.cache.stats import (
    CacheStats,
    PromptFigures,
    Shape,
    full_cache_bytes,
    full_cache_rows,
)
from minikv.cache.stopwatch import Stopwatch
from minikv.cache.tier import Tier
from minikv.errors import ContextError, UsageError
from minikv.kernels.dispatch import Kernels, choose
from minikv.policies.base import (
    ALL,
    GlobalAllocator,
    PromptPolicy,
    Repeat,
    StepPolicy,
    Wording,
    policy_columns,
    smallest_budget,
)
from minikv.policies.selection import fill

Policies = tuple[PromptPolicy | None, StepPolicy | None, Budget | None, int]
"""What `KVCache.configure` takes: prompt policy, step policy, budget, stride."""
_ROOM = 256  # rows that a head gains when it is full and nothing may leave


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A cache between two turns, see `KVCache.mark`. The fields are the cache's own."""

    arena: Arena
    position: int
    turns: tuple[tuple[int, int], ...]
    pinned: int
    rows: int | None
    open: bool
    peak: int
    evict_s: float
    outcome: Outcome
    tier: int  # rows of the tier


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
        self._marked = False  # somebody may go back to the arena as it is
        self.keeps_addresses = self.device.type == "cuda"
        self.progress: Callable[[int, int], None] | None = None
        self.output, self.rotary = output, rotary
        self._poison = poison
        self.tier: Tier | None = None
        # Where a prompt that is read twice is until it is scored; None: in the host's memory.
        self.scoring_tier: Tier | None = None
        self.words = Wording()  # for policies that read everything twice
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
        _declare(self.arena, self.step_policy, prompt, step)
        self._set(prompt, step, budget, stride)  # cannot fail: it was checked

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
            raise UsageError("a policy needs a budget", "give a `budget`, e.g. 512, 20% or 64MiB")
        self.prompt_policy, self.step_policy, self.budget = prompt, step, budget
        # A share is of all that was read when the next prompt ends; until then it is open.
        self._open = budget is not None and budget.unit == "share"
        self._rows = self._count(budget, 0) if budget and not self._open else None

    def _count(self, budget: Budget, tokens: int) -> int:
        """Rows per head; UsageError when the policies need more."""
        prompt, step = self.prompt_policy, self.step_policy
        state = sum(dtype.itemsize for dtype in policy_columns(prompt, step).values())
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
        empty = self._empty(self.prompt_policy, self.step_policy)
        self.settle()
        self._restart(empty)

    def restart(
        self,
        prompt: PromptPolicy | None,
        step: StepPolicy | None,
        budget: Budget | None,
        stride: int = 0,
    ) -> None:
        """`reset`, and be under these policies. Raises UsageError as `configure`; then, as when
        there is no memory, nothing changes."""
        self.check(prompt, step, budget, stride)
        arena = self._empty(prompt, step)
        self.settle()
        # From here on nothing fails.
        self._set(prompt, step, budget, stride)
        self._restart(arena)

    def _restart(self, empty: Arena) -> None:
        self._arena = empty
        self.position = 0
        self._turns: list[tuple[int, int]] = []
        self._pinned = 0
        if self.budget and self.budget.unit == "share":
            self._open, self._rows = True, None
        self._reading: Prefill | BlockPrefill | SecondPassPrefill | None = None
        self._last = Outcome()
        # By the position of its first token, how likely the network found the tokens of a prompt.
        self._predicted: list[tuple[int, Tensor]] = []
        self._exact: list[tuple[Tensor, Tensor]] = []  # see `Prefill.exact`; until the first step
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
                f"a budget of {each} tokens is too small beside {rows} pinned ones",
                f"the smallest useful budget here is {least} tokens per head",
            )

    # -- a prompt ---------------------------------------------------------------------------

    def recall(
        self,
        tokens: int,
        room: int = _ROOM,
        rows: int | None = None,
        begins: int | None = None,
    ) -> int:
        """As `begin`, for the whole conversation of `tokens` tokens, of which the tier gives what
        it has. Returns the position from which on they must be fed: that is what the tier does not
        have, and at least the queries that the policies observe: of the last turn only.

        The rows that stay are chosen from all of it, as if the conversation were read anew. `rows`:
        under a smaller budget this once, in rows per head (see `budgets`). `begins`: the position
        at which the last turn begins; by default where the turn before ended.
        """
        assert self.tier is not None
        assert self.recalls is None, self.recalls
        prompt, step = self.prompt_policy, self.step_policy
        if begins is None:
            begins = max((end for _, end in self._turns if end < tokens), default=0)
        observe = max(prompt.evidence.observe if prompt else 0, step.observe if step else 0)
        observe = max(min(observe, tokens - begins), step.prompt_history if step else 0, 1)
        given = min(self.tier.length, max(0, tokens - observe))
        self._begin(tokens, room, given, rows, begins)
        return given

    def budgets(self, tokens: int) -> list[int]:
        """Budgets in rows per head for a recall of so many tokens: from the smallest one that is
        of use, each twice the one before, up to the user's."""
        assert self.budget is not None
        share = self.budget.unit == "share"
        most = self._count(self.budget, tokens) if share or self._rows is None else self._rows
        most = min(most, self.shape.max_context)
        least, found = self._least(), []
        rows = least
        while rows < most:
            if self._serves(rows, tokens, least):
                found.append(rows)
            rows *= 2
        return [*found, most]

    def _serves(self, rows: int, tokens: int, least: int) -> bool:
        """Whether a budget leaves every layer what the policies need."""
        policy = self.prompt_policy
        if policy is None or isinstance(policy.layers, GlobalAllocator):
            return True
        return min(policy.layer_rows(self.shape.layers, rows, tokens, least)) >= least

    @property
    def recalls(self) -> str | None:
        """Why these policies cannot choose from a tier; None if they can."""
        prompt = self.prompt_policy
        if self.stride:
            return "with a stride rows are evicted while it reads"
        if prompt is not None:
            evidence, name = prompt.evidence, prompt.name
            if evidence.observe == ALL or evidence.queries_from is not None:
                return f"{name} needs the queries of all tokens"
            if evidence.second_pass:
                return f"{name} reads everything twice"
            if evidence.predicted:
                return f"{name} needs the probabilities of all tokens"
        return None

    def begin(
        self,
        tokens: int,
        room: int = _ROOM,
        *,
        asks: bool = False,
        turn_tokens: int | None = None,
    ) -> None:
        """The next forward is a prompt of `tokens` tokens (a single token may be a prompt, too).

        `room`: answer rows to make place for when no step policy keeps the answer in bounds. asks:
        the prompt only asks about what was read before. turn_tokens: how many of the last tokens
        are the last turn's; by default all are. Waits for the device. Raises UsageError for a
        budget that is too small, ContextError where no position is left for a second pass; then,
        as when there is no memory, nothing has changed.
        """
        self._begin(tokens, room, None, asks=asks, turn_tokens=turn_tokens)

    def _begin(
        self,
        tokens: int,
        room: int,
        given: int | None,
        smaller: int | None = None,
        begins: int | None = None,
        *,
        asks: bool = False,
        turn_tokens: int | None = None,
    ) -> None:
        """`begin`; or `recall`, where the tier gives so many of the tokens, under a smaller budget
        if one is given, of a turn that begins where it says."""
        assert tokens > 0
        assert self._reading is None, "a prompt is under way"
        arena, step, rows = self.arena, self.step_policy, self._rows
        position = self.position if given is None else 0
        # Others are of turns that were taken back.
        self._predicted = [one for one in self._predicted if one[0] < position]
        share = self.budget is not None and self.budget.unit == "share"
        if self.budget is not None and (self._open or (share and given is not None)):
            rows = self._count(self.budget, position + tokens)
        # More rows than positions can never be used.
        each = min(rows, self.shape.max_context) if rows is not None else None
        if each is not None and smaller is not None:
            each = min(each, smaller)
        if each is not None:
            self._refuse_pins(self._pinned, each)
        held, visible = self._read_tables(position, tokens)
        begins = position if begins is None else begins
        if given is not None:
            turn_tokens = max(1, tokens - begins)
        repeats = self._repeats(range(tokens), position, each, asks=asks)
        asks = asks and not repeats
        plan = self._plan(position, tokens, room, each, held, visible, given or 0, begins)
        plan = replace(plan, asks=asks, turn_tokens=turn_tokens)
        columns = policy_columns(self.prompt_policy, step)
        target = arena.sharing(columns) if plan.shares else arena.fresh(plan.needed, columns)
        reading: Prefill | BlockPrefill | SecondPassPrefill
        prompt = self.prompt_policy
        tier = None
        if given is not None:
            assert self.tier is not None
            self.tier.open(tokens)
            tier = self.tier
        if self.stride and step is not None and each is not None:
            reading = BlockPrefill(
                self.shape, arena, held, target, step, plan, each, self.stride, self.dtype, self.ops
            )
        elif prompt is not None and repeats:
            if self.scoring_tier is not None:
                self.scoring_tier.truncate(0)
                self.scoring_tier.open(tokens)
            reading = SecondPassPrefill(
                self.shape,
                arena,
                held,
                target,
                prompt,
                step,
                plan,
                repeats,
                self._first_rows,
                self.dtype,
                self.ops,
                self.scoring_tier,
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
                tier,
            )
        self._evicting = Stopwatch(self.device)
        self._rows, self._reading = rows, reading

    @property
    def _first_rows(self) -> int:
        """Positions below it never leave."""
        prompt = self.prompt_policy
        return max(self._pinned, prompt.evidence.sinks if prompt is not None else 0)

    def _repeats(
        self, ids: Sequence[int], position: int, each: int | None, *, asks: bool
    ) -> Sequence[Repeat]:
        """The texts of the second pass over a prompt of these ids at this position, under a budget
        of so many rows per head. None where the policy makes none, for a question, unless it takes
        more than half of the budget, and for a text that takes less with all before it: rows that
        always have room need no score. Raises ContextError where no position is left for them."""
        prompt, tokens = self.prompt_policy, len(ids)
        if prompt is None or each is None or not prompt.evidence.second_pass:
            return ()
        first = max(0, self._first_rows - position)
        if 2 * (tokens if asks else position + tokens) <= each or tokens <= first:
            return ()
        left = self.shape.max_context - position - tokens
        repeats = prompt.scorer.second_pass(ids, first, self.words, left)
        if not repeats:
            raise ContextError(
                f"{prompt.name} has the model repeat what it has read, and {left:,} of "
                f"{self.shape.max_context:,} positions are left for that",
                "take another policy, or shorten the text",
            )
        return repeats

    def second_pass(self, ids: Sequence[int]) -> Sequence[Repeat]:
        """Texts to feed when the prompt of these ids has been through the network, before
        `advance`: each between `begin_pass` and `end_pass`."""
        reading = self._reading
        if not isinstance(reading, SecondPassPrefill):
            return ()
        first = max(0, self._first_rows - reading.plan.position)
        left = self.shape.max_context - reading.end
        return reading.prompt.scorer.second_pass(ids, first, self.words, left)

    def scoring_cost(self, tokens: int, position: int, *, asks: bool) -> PassCost | None:
        """What a second pass over a prompt of so many tokens at this position takes; None if there
        is none. Raises as `begin`."""
        rows = self._rows
        if self.budget is not None and self.budget.unit == "share":
            rows = self._count(self.budget, position + tokens)
        each = None if rows is None else min(rows, self.shape.max_context)
        repeats = self._repeats(range(tokens), position, each, asks=asks)
        if not repeats:
            return None
        gpu = self.device.type == "cuda"
        return PassCost.of(self.shape, tokens, repeats, self.dtype, gpu=gpu)

    @property
    def scoring(self) -> bool:
        """What was read is being scored by a second pass."""
        return isinstance(self._reading, SecondPassPrefill) and self._reading.scoring

    def begin_pass(self, repeat: Repeat) -> int:
        """The next forward is one of those texts; the position at which it begins."""
        assert isinstance(self._reading, SecondPassPrefill)
        self._reading.begin_pass(repeat)
        return self._reading.end

    def end_pass(self) -> None:
        """The text has been through the network."""
        assert isinstance(self._reading, SecondPassPrefill)
        self._reading.end_pass()

    @property
    def foresees(self) -> bool:
        """The prompt that has begun is to be read once before, only to learn how likely the network
        finds each of its tokens: between `begin_glance` and `end_glance`."""
        return isinstance(self._reading, Prefill) and self._reading.foresees

    def begin_glance(self) -> None:
        """The next forward is that; it has no `advance`."""
        assert isinstance(self._reading, Prefill)
        self._reading.glancing = True

    def end_glance(self, predicted: Tensor) -> None:
        """The probabilities of the prompt's tokens, float32 [T]."""
        assert isinstance(self._reading, Prefill)
        begin = self._reading.plan.position
        self._predicted.append((begin, predicted))
        known = torch.zeros(begin + len(predicted), device=predicted.device)
        for first, some in self._predicted:
            known[first : first + len(some)] = some
        self._reading.predict(known)

    @property
    def watch(self) -> Callable[[Tensor], None] | None:
        """See `Attend`."""
        reading = self._reading
        if not isinstance(reading, Prefill | SecondPassPrefill) or not reading.watches:
            return None
        return reading.watch

    def _read_tables(self, position: int, tokens: int) -> tuple[Layout, list[int]]:
        """The tables of the arena's rows below `position` on the host, and how many rows of each
        layer, over its heads, will exist after a prompt of so many tokens and can still be seen.
        One transfer."""
        arena, shape, end = self.arena, self.shape, position + tokens
        tables = arena.start, arena.length, arena.capacity, arena.cap, arena.free_slot
        if not position:  # nothing to ask for, and a device without memory can be planned for
            empty = torch.zeros((shape.layers, shape.kv_heads), dtype=torch.int64)
            held, before = Layout(empty, empty, empty, empty, empty - 1), [0] * shape.layers
        else:
            slid = [i for i, w in enumerate(shape.windows) if w is not None and end > w]
            firsts = [end - (shape.windows[i] or 0) + 1 for i in slid]
            seen = [arena.count_from(i, first) for i, first in zip(slid, firsts, strict=True)]
            numbers = torch.cat([*map(torch.flatten, tables), *(n[None] for n in seen)]).cpu()
            size = arena.start.numel()
            held = Layout(*numbers[: 5 * size].view(5, *arena.start.shape).unbind())
            before = held.held.sum(1).tolist()
            for layer, count in zip(slid, numbers[5 * size :].tolist(), strict=True):
                before[layer] = count
        new = [tokens if window is None else min(tokens, window) for window in shape.windows]
        return held, [b + shape.kv_heads * n for b, n in zip(before, new, strict=True)]

    def _plan(
        self,
        position: int,
        tokens: int,
        room: int,
        each: int | None,
        held: Layout,
        visible: list[int],
        given: int,
        begins: int,
    ) -> Plan:
        """What the prompt is read under; each: the budget in rows per head."""
        shape, step, arena = self.shape, self.step_policy, self.arena
        spare = room if step is None else 0 if step.evict_first else step.block
        shared = self.prompt_policy is not None and isinstance(
            self.prompt_policy.layers, GlobalAllocator
        )
        totals = None if shared else self._totals(each, int(held.held.max()) + tokens)
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
        pool = None
        if shared and each is not None:
            heads = shape.layers * shape.kv_heads
            pool = each * heads
            needed = [0] * (shape.layers - 1) + [pool + spare * heads + 1]
        plan = Plan(
            position,
            tokens,
            totals,
            each if each is not None and step is not None else 0,
            spare,
            needed,
            visible,
            False,
            [
                *(turn for turn in self._turns if turn[1] <= begins),
                (begins, position + tokens),
            ],
            self.output,
            self.rotary,
            self._pinned,
            pool,
            given,
        )
        # A smaller budget gives its memory back.
        shares = not blocks and pool is None and position > 0 and 2 * sum(needed) > arena.rows
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
                f"{self.prompt_policy.name} leaves a layer {min(rows)} tokens per head, of which "
                f"{least - 1} are protected",
                "a larger `budget` or a smaller beta gives every layer enough",
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
            twice = self.scored_twice
            work = reading.plan.read if twice is None else twice.work
            self.progress(reading.done(layer), work)
        return out

    def advance(self, tokens: int) -> None:
        """See `Attend`: every layer has seen the forward's tokens."""
        if self._reading is None:
            assert tokens == 1
            try:
                self.decode.end()
            finally:
                # Also after an interrupt: the decode step knows whether its token counts. What is
                # half done is done before the next step.
                self.position = int(self.decode.position) + self.decode.half_ended
            return
        reading, plan = self._reading, self._reading.plan
        assert tokens == plan.read
        with self._evicting.running():
            outcome = reading.complete()
        evict_s = self._evicting.total()
        recalled = isinstance(reading, Prefill) and reading.tier is not None
        if recalled and self.tier is not None:
            self.tier.commit(plan.tokens)
        if self.scoring_tier is not None:
            self.scoring_tier.drop()
        turns = list(plan.turns)
        # From here on nothing fails.
        self._reading = None
        # A graph holds addresses: where no mark needs the old rows, the new ones take their place.
        if not (self.keeps_addresses and not self._marked and self._arena.take(reading.target)):
            self._arena = reading.target
        self._last, self._evict_s, self._turns = outcome, evict_s, turns
        self._exact = reading.exact if isinstance(reading, Prefill) else []
        self._open = False
        self.position = plan.position + plan.tokens
        self._peak = reading.peak

    def rollback(self) -> None:
        """Undo an unfinished prompt or step: rows exist for exactly the tokens fed before it."""
        if self._open:
            self._rows = None
        for tier in (self.tier, self.scoring_tier):
            if tier is not None:
                tier.drop()
        if self._reading is not None:
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
        if decode.half_ended:
            decode.end_if_accepted()
        ready = decode.is_open and decode.speculative == speculative
        if ready and (step is not None or self.position < self._full):
            return decode
        self.settle()
        self._exact = []
        with torch.inference_mode(False):  # what is made here is written outside of a forward, too
            self._arena = arena = self._with_room()  # the same rows
            decode.open(
                arena,
                step,
                self.position,
                pinned=self._pinned,
                leaves_last=self._leaves_last(arena),
                speculative=speculative,
            )
        self._full = self.position + int((arena.capacity - arena.held).min())
        return decode

    def _with_room(self) -> Arena:
        """The arena, or a copy of it, in which every head can take a row and none is over its
        cap."""
        arena, step = self._arena, self.step_policy
        if step is not None:
            block = 0 if step.evict_first else step.block
            # Between two evictions a head may be some rows over its cap; more came when another
            # policy was in force.
            most = arena.cap + (step.block - 1)
            if bool((arena.held > most).any()):
                arena = arena.trimmed(step.sinks, self._pinned, most)
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
        if self.decode.half_ended:
            self.decode.end_if_accepted()
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

    @property
    def last_turn(self) -> int:
        """The position at which the last prompt's turn begins."""
        return self._turns[-1][0] if self._turns else 0

    def _leaves_last(self, arena: Arena) -> Tensor | None:
        """bool [R]: rows that leave after all others; None if the prompt policy prefers none."""
        prefers = self.prompt_policy.preference if self.prompt_policy is not None else None
        if prefers is None:
            return None
        return prefers.prefers(arena.columns["pos"].to(torch.int64), self._turns)

    # -- the way back ---------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The cache as it is, to go back to. Holds its memory, copies nothing. Between turns."""
        self.settle()
        assert self._reading is None
        self._marked = True
        return Mark(
            self._arena,
            self.position,
            tuple(self._turns),
            self._pinned,
            self._rows,
            self._open,
            self._peak,
            self._evict_s,
            self._last,
            0 if self.tier is None else self.tier.length,
        )

    def forget_mark(self) -> None:
        """Nobody will go back."""
        self._marked = False

    def go_back(self, mark: Mark) -> None:
        """Be as at `mark`, if only prompts came after it: steps write to the arena they find.

        Allocates nothing and cannot fail.
        """
        self._reading, self._marked = None, False
        if self.tier is not None:
            self.tier.drop()
            self.tier.truncate(mark.tier)  # of several prompts, some may have been read
        self.decode.close()
        self._arena, self.position, self._turns = mark.arena, mark.position, list(mark.turns)
        self._pinned, self._rows, self._open = mark.pinned, mark.rows, mark.open
        self._peak, self._evict_s, self._last = mark.peak, mark.evict_s, mark.outcome

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
        under: Policies | None = None,
    ) -> None:
        """Be again as `held` was taken, under these policies: what follows is bit-identical if they
        are the ones of then. Between turns only. under: other ones, to be under from then on, as
        `configure` would do after it.

        Raises UsageError as `configure`, ValueError if the rows are not those of such a network
        and step policy; then, as when there is no memory, nothing changes.
        """
        assert self._reading is None
        self.check(prompt, step, budget, stride)
        if under is not None:
            self.check(*under)
        if not self.accepts(held, prompt, step):
            raise ValueError("the cache is not one of this network and policy")
        arena = self._empty(prompt, step).unpack(held.layout, held.region, held.columns)
        if under is not None:
            _declare(arena, step, *under[:2])
        self.settle()
        # From here on nothing fails.
        self._set(prompt, step, budget, stride)
        self._arena, self.position, self._turns = arena, held.position, list(held.turns)
        self._pinned, self._rows, self._open = held.pinned, held.rows, held.open
        self._peak, self._evict_s, self._last = held.peak, held.evict_s, held.outcome
        self._predicted = []
        if under is not None:
            self._set(*under)

    def accepts(
        self, held: CacheSnapshot, prompt: PromptPolicy | None, step: StepPolicy | None
    ) -> bool:
        """Whether `held` has what such a network and these policies store of every row."""
        arena = self._empty(prompt, step)
        kinds = [
            {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
            for columns in (arena.columns, held.columns)
        ]
        return kinds[0] == kinds[1] and held.layout.start.shape == arena.start.shape

    def _empty(self, prompt: PromptPolicy | None, step: StepPolicy | None) -> Arena:
        """An arena without rows, with the columns that these policies need."""
        shape = self.shape
        return Arena(
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            self.dtype,
            self.device,
            policy_columns(prompt, step),
            kv=self.kv,
            poison=self._poison,
        )

    # -- what it tells ----------------------------------------------------------------------

    def kept(self, layer: int, head: int) -> Tensor:
        """Positions that a KV head holds, ascending, int64."""
        index, live = self.arena.index(layer)
        return self.arena.columns["pos"][index[head, live[head]]].to(torch.int64).sort().values

    @property
    def last_prompt(self) -> PromptFigures:
        """What the last prompt cost. Computed from numbers that are there: it cannot fail."""
        lost = [(s, i) for i, s in enumerate(self._last.lost) if s is not None]
        return PromptFigures(
            self._evict_s,
            max(self._peak, self._allocated),
            self._last.shaped,
            sum(s for s, _ in lost) / len(lost) if lost else None,
            max(lost)[0] if lost else None,
            max(lost)[1] if lost else None,
        )

    @property
    def lost(self) -> tuple[float | None, ...]:
        """Per layer, the share of the last window's attention that was evicted; None: not known."""
        return self._last.lost

    def last_token(self) -> tuple[LastToken, Tensor] | None:
        """The last token of the prompt that was just recalled, to be fed once more over the rows
        that stayed, and the error of each layer's output [L] (see `minikv.cache.fidelity`). None if
        no prompt was, or nothing left. Changes nothing."""
        if len(self._exact) != self.shape.layers or not self.evicted:
            return None
        last = LastToken(self.shape, self.arena, self.position - 1, self.ops)
        return last, last.output_errors(self._exact)

    @property
    def evicted(self) -> bool:
        """Whether the rows are not just those of a cache without eviction."""
        rows = int(self.arena.held.sum())
        return self.arena.coded or rows < full_cache_rows(self.shape, self.position)

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
    def scored_twice(self) -> SecondPassPrefill | None:
        """The prompt under way, if it is read twice."""
        reading = self._reading
        return reading if isinstance(reading, SecondPassPrefill) else None

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
        begin, count = int(self._arena.start[layer, head]), int(self.decode.count[layer, head])
        pos = self._arena.columns["pos"][begin : begin + count]
        return pos.to(torch.int64)

    @property
    def _allocated(self) -> int:
        """Bytes of the arena and of what the steps work with."""
        return self._arena.nbytes + self.decode.nbytes

    def stats(self) -> CacheStats:
        """Counted from the tensors; see `CacheStats`."""
        arena, shape, last = self.arena, self.shape, self.last_prompt
        held = arena.layout().held
        rows = int(held.sum())
        mean = rows / held.numel()
        return CacheStats(
            seen=self.position,
            row_bytes=2 * shape.head_dim * self.dtype.itemsize,
            kept_mean=mean,
            kept_min=int(held.min()),
            kept_max=int(held.max()),
            full_bytes=full_cache_bytes(shape, self.position, self.dtype.itemsize),
            held_bytes=rows * arena.row_nbytes(),
            allocated_bytes=self._allocated,
            peak_bytes=last.peak_bytes,
            state_bytes=rows * arena.row_nbytes(arena.extra),
            evicted=round(self.position - mean),
            lost_mean=last.lost_mean,
            lost_max=last.lost_max,
            lost_layer=last.lost_layer,
            evict_s=last.evict_s,
            budget_rows=self.budget_rows,
            shaped=last.shaped,
            gaps=rows < full_cache_rows(shape, self.position),
        )


def _declare(
    arena: Arena, before: StepPolicy | None, prompt: PromptPolicy | None, step: StepPolicy | None
) -> None:
    """Have the columns of these policies in the arena, in which those of the step policy `before`
    are. Where there is no memory for one, nothing changes."""
    columns = step.columns if step else {}
    # What one policy noted means something else to another.
    same = before is not None and step is not None and before.name == step.name
    anew = not same or (before is not None and before.columns != columns)
    mine = {} if prompt is None else prompt.scorer.columns
    arena.declare({**mine, **columns}, anew=columns if anew else ())

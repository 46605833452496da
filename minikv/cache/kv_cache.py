"""The KV cache with eviction: the `Attend` that a network uses.

At the end of a prompt the prompt policy chooses which rows stay (`Prefill`). While an answer is
written, a new token's row overwrites the row that the step policy evicted (`DecodeStep`). Between
two steps no head holds more rows than its cap.

A prompt is a transaction. `begin` allocates another arena, the target, and the rows that stay are
written there. `end` then replaces the old arena with the target. Until then the old one is
never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from minikv.cache.arena import Arena
from minikv.cache.block_prefill import BlockPrefill
from minikv.cache.decode_step import DecodeStep
from minikv.cache.fidelity import LastToken
from minikv.cache.plan import PassCost, Prompt, RowsBefore, Setup, peak, plan_prompt, repeats
from minikv.cache.prefill import Prefill
from minikv.cache.rules import Rules, unlearnt
from minikv.cache.second_pass import SecondPass
from minikv.cache.snapshot import CacheSnapshot, SharedSnapshot, State
from minikv.cache.stats import CacheStats, Shape, Stopwatch, full_cache_bytes, full_cache_rows
from minikv.cache.tier import Tier
from minikv.kernels.dispatch import Kernels, choose
from minikv.policies.base import StepPolicy
from minikv.policies.moments import Rotation
from minikv.policies.parts import policy_columns
from minikv.policies.repeats import Wording

_ROOM = 256  # rows that a full head gains when there is no step policy
_MUCH = 64 << 20  # bytes


class KVCache:
    """`Attend` over an arena, for one conversation. By default the rules evict nothing.

    Raises UsageError if the budget is too small for the policies. `progress(done, total)` is called
    while a prompt is read, with tokens. It may raise; then `abandon` restores the cache.

    `abandon` undoes a prompt before `end`, and `restore` returns to a snapshot. A step cannot be
    undone: after an error inside one, the cache is dropped. It is then empty, and the conversation
    must be read or recalled again.

    reading: the prompt under way. state: the cache's state between two turns, without its rows.
    keeps_addresses: if possible, put the rows after a prompt at the addresses that earlier steps
    used, so that a CUDA graph stays valid.
    """

    def __init__(
        self,
        shape: Shape,
        rules: Rules | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv: torch.dtype | None = None,
        output: Callable[[int], Tensor] | None = None,
        rotary: Rotation | None = None,
        kernels: str = "auto",
    ) -> None:
        """dtype: the network's. kv: the dtype of stored keys and values: `dtype` (None), or int8
        with a float32 scale per row. output(layer): the network's output projection [H, G, D,
        hidden], for policies that use what attention makes of a value. rotary: how the network
        rotates, for policies that need queries before rotation. kernels: as `dispatch.choose` takes
        it. `ops` is its result, and `notice` says why these are not the device's own
        kernels."""
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.kv = kv or dtype
        self.ops, self.notice = choose(self.device, kernels, shape.head_dim, dtype)
        self.rules: Rules
        self.state: State
        self._arena: Arena
        self._spare: Arena  # without rows, so that `discard` need not allocate one
        self.decode = DecodeStep(shape, self.device, self.ops, rotary)
        # Called by `settle`, so that whoever has launched steps ahead can finish them.
        self.before_settling: Callable[[], None] | None = None
        self._stepping = False  # a step was begun, and its token is not counted yet
        self._stepped = False  # steps were opened since the last prompt
        self._full = 0  # see `full_at`
        self.keeps_addresses = self.device.type == "cuda"
        self.progress: Callable[[int, int], None] | None = None
        self.output, self.rotary = output, rotary
        self.tier: Tier | None = None
        # Holds the rows of a prompt with a second pass until they are scored; None: host memory.
        self.scoring_tier: Tier | None = None
        self.words = Wording()  # for policies with a second pass
        # Of the conversation including the next prompt, for policies that need it: see
        # `PromptView`.
        self.sentences: Tensor | None = None
        self.rules = rules or Rules()
        self.reset()

    def configure(self, rules: Rules) -> None:
        """Use other policies or another budget from the next prompt on. Between turns only.

        Rows already evicted do not come back; a smaller budget evicts at the end of the next
        prompt. Raises UsageError, and changes nothing, if the budget is too small for the policies.
        """
        assert self.reading is None
        rows, spare = self.check(rules), self._empty(rules)
        _declare(self.arena, self.rules.step, rules)
        self.rules, self._spare = rules, spare
        self.state = replace(self.state, rows=rows)

    def check(self, rules: Rules) -> int | None:
        """The budget in rows per head; None if there is none or it depends on the prompt. Raises
        UsageError if it is too small for the policies."""
        if rules.budget is None or rules.takes_share:
            return None
        return rules.budget_rows(0, self.shape, self.kv)

    def reset(self, rules: Rules | None = None) -> None:
        """Forget the conversation and free its memory. rules: those to use from then on; by default
        the present ones. Raises UsageError as `configure` does. After an error, also for lack of
        memory, nothing has changed."""
        rules = rules or self.rules
        rows, empty = self.check(rules), self._empty(rules)
        self.settle()
        # From here on nothing fails.
        self.rules, self._spare = rules, empty
        self._restart(rows)

    def forget(self, position: int) -> None:
        """Forget the rows, but not the turns up to `position`: `recall` tells the policies of
        them."""
        turns = tuple(turn for turn in self.state.turns if turn[1] <= position)
        self.reset()
        self.state = replace(self.state, turns=turns)

    def discard(self) -> None:
        """Forget the rows: a step failed, and may have changed some. Cannot fail."""
        self.decode.close()
        self._restart(None if self.rules.takes_share else self.state.rows)

    def _restart(self, rows: int | None) -> None:
        self.state = State(rows=rows)  # first: after an interrupt here, the cache is empty
        self._arena = self._spare
        self._before: Arena | None = None  # the arena of the steps before the last prompt
        self.reading: Prefill | BlockPrefill | None = None
        self._exact: list[tuple[Tensor, Tensor]] = []  # see `Prefill.exact`; until the first step
        self._stepping = False

    @property
    def position(self) -> int:
        """See `Attend`. While a prompt is read, the position of the first token that is fed."""
        plan = None if self.reading is None else self.reading.plan
        return self.state.position if plan is None else plan.position + plan.given

    @property
    def pinned(self) -> int:
        """Positions below it are never evicted."""
        return self.state.pinned

    def use(self, ops: Kernels) -> None:
        """Compute with these kernels from now on. Between turns only."""
        self.settle()
        self.ops = ops
        self.decode = DecodeStep(self.shape, self.device, ops, self.rotary)

    def pin(self, rows: int) -> None:
        """Pin the first `rows` positions of the conversation: they are never evicted. Before the
        first prompt only.

        Raises UsageError if the budget leaves no rows for other tokens.
        """
        assert self.position == 0
        if self.rules.budget is not None and self.rules.budget.unit == "rows":
            self.rules.refuse_pins(rows, int(self.rules.budget.value))
        self.state = replace(self.state, pinned=rows)

    # -- a prompt ---------------------------------------------------------------------------

    def recall(self, tokens: int, room: int = _ROOM, begins: int | None = None) -> int:
        """Like `begin`, for the whole conversation of `tokens` tokens; the rows that the tier has
        come from it. Returns the position from which tokens must be fed: those that the tier does
        not have, and at least the tokens of the last turn whose queries the policies observe.

        The rows that stay are chosen from the whole conversation, as if all of it were read again.
        begins: the position at which the last turn begins; by default where the turn before ended.
        """
        assert self.tier is not None
        assert self.rules.cannot_recall is None, self.rules.cannot_recall
        if begins is None:
            begins = max((end for _, end in self.state.turns if end < tokens), default=0)
        given = min(self.tier.length, max(0, tokens - self.observed(tokens, begins)))
        prompt = self._prompt(0, tokens, begins)
        self._begin(
            replace(prompt, room=room, given=given, turn_tokens=max(1, tokens - begins)), self.tier
        )
        return given

    def observed(self, tokens: int, begins: int) -> int:
        """How many of the last tokens `recall` always feeds: those whose queries the policies
        observe. Arguments as for `recall`."""
        step, observe = self.rules.step, self.rules.evidence.observe
        observe = max(observe, step.observe if step else 0)
        return max(min(observe, tokens - begins), step.prompt_history if step else 0, 1)

    def begin(
        self, tokens: int, room: int = _ROOM, *, asks: bool = False, turn_tokens: int | None = None
    ) -> None:
        """Announce that the next forward is a prompt of `tokens` tokens (a single token may be a
        prompt, too).

        room: rows per head to allocate for the answer if there is no step policy. asks: the prompt
        only asks about earlier text. turn_tokens: how many of the last tokens belong to the
        last turn; by default all. Waits for the device. Raises UsageError for a budget that is too
        small, and ContextError where no position is left for a second pass. After an error, also
        for lack of memory, nothing has changed.
        """
        prompt = self._prompt(self.position, tokens, self.position)
        self._begin(replace(prompt, room=room, asks=asks, turn_tokens=turn_tokens))

    def _prompt(self, position: int, tokens: int, begins: int) -> Prompt:
        """A prompt at `position`, whose last turn begins at `begins`."""
        end, rows = position + tokens, self._rows_after(position, tokens)
        return Prompt(
            position=position,
            tokens=tokens,
            rows=None if rows is None else min(rows, self.shape.max_context),
            turns=[*(turn for turn in self.state.turns if turn[1] <= begins), (begins, end)],
            pinned=self.pinned,
        )

    def _rows_after(self, position: int, tokens: int) -> int | None:
        """The budget in rows per head for a prompt of `tokens` tokens at `position`. A share
        becomes a number of rows at the first prompt under it, and again at a prompt at position
        0."""
        known, rules = self.state.rows, self.rules
        if rules.budget is None or (known is not None and (position or not rules.takes_share)):
            return known
        return rules.budget_rows(position + tokens, self.shape, self.kv)

    def _setup(self) -> Setup:
        return Setup(
            self.shape,
            self.rules,
            self.dtype,
            self.kv,
            self.ops,
            self.output,
            self.rotary,
            self.words,
            self.sentences,
            self.device.type == "cuda",
            self._learnt,
        )

    def _begin(self, prompt: Prompt, tier: Tier | None = None) -> None:
        """tier: stores the rows, and provides the first ones."""
        assert prompt.tokens > 0
        assert self.reading is None, "a prompt is under way"
        arena, setup, scoring = self.arena, self._setup(), self.scoring_tier
        self._before = None  # otherwise there would be three arenas while the prompt is read
        before = RowsBefore.read(self.shape, arena, prompt.position, prompt.tokens)
        plan = plan_prompt(prompt, setup, before)
        columns = policy_columns(self.rules.prompt, self.rules.step)
        if plan.shares:
            target = arena.sharing(columns)
        else:
            target = arena.fresh(plan.needed, columns, filled=plan.kept)
        reading: Prefill | BlockPrefill
        if self.rules.stride and plan.rows is not None:
            reading = BlockPrefill(setup, plan, arena, target)
        elif plan.repeats:
            if scoring is not None:
                scoring.truncate(0)
                scoring.open(plan.tokens)
            reading = SecondPass(setup, plan, arena, target, scoring)
        else:
            if tier is not None:
                tier.open(plan.tokens)
            reading = Prefill(setup, plan, arena, target, tier)
        staged = None if tier is None else tier.staging(plan.tokens)
        in_file = scoring is not None and scoring.rows.kind == "file"
        rows = self._rows_after(prompt.position, prompt.tokens)
        most = peak(plan, setup, staged=staged, in_file=in_file).reading
        self._coming = State(plan.end, tuple(plan.turns), plan.pinned, rows, most)
        self._evicting, self.reading = Stopwatch(self.device), reading

    def scoring_cost(self, tokens: int, position: int, *, asks: bool) -> PassCost:
        """What the second pass costs for a prompt of `tokens` tokens at this position; all 0 if
        there is none. Raises as `begin`."""
        setup = self._setup()
        prompt = replace(self._prompt(position, tokens, position), asks=asks)
        return PassCost.of(prompt, setup, repeats(prompt, setup))

    @property
    def scoring(self) -> bool:
        """Whether a second pass is scoring the prompt that was read."""
        return isinstance(self.reading, SecondPass) and self.reading.scoring

    @property
    def on_layer_input(self) -> Callable[[Tensor], None] | None:
        """See `Attend`."""
        reading = self.reading
        return reading.on_layer_input if isinstance(reading, Prefill) else None

    @property
    def attend_unrotated(self) -> Callable[[int, Tensor, Tensor, Tensor], Tensor] | None:
        """See `Attend`; None for a prompt."""
        return None if self.reading is not None else self._step_unrotated

    def step_arena(self) -> object | None:
        """See `Attend`; None for a prompt."""
        if self.reading is not None:
            return None
        found = self.begin_step().step_arena()
        self._stepping = found is not None  # else `attend` begins the step
        return found

    def _step_unrotated(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if layer == 0:
            self.begin_step()
        return self.decode.attend_unrotated(layer, qkv, cos, sin)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`. After `begin` the rows belong to the prompt; otherwise this is a decode
        step, t = 1."""
        reading = self.reading
        if reading is None:
            if layer == 0:
                self.begin_step()
            return self.decode.attend(layer, q, k, v)
        out = reading.stage(layer, q, k, v)
        if reading.layer_complete:
            with self._evicting.running():
                reading.finish(layer)
        if self.progress is not None:
            work = reading.work if isinstance(reading, SecondPass) else reading.plan.read
            self.progress(reading.done(layer), work)
        return out

    def advance(self, tokens: int) -> None:
        """See `Attend`. Does nothing: the tokens count with `end`, after their logits were
        checked."""

    def end(self, tokens: int) -> None:
        """The prompt or the step of `tokens` tokens counts."""
        if self.reading is None:
            assert tokens == 1
            self.decode.end()
            self.count_step()
            return
        reading, plan = self.reading, self.reading.plan
        assert tokens in (plan.read, plan.tokens)
        with self._evicting.running():
            outcome = reading.complete()
        evict_s = self._evicting.total()
        if self.tier is not None and isinstance(reading, Prefill) and reading.tier is self.tier:
            self.tier.commit(plan.tokens)
        if self.scoring_tier is not None:
            self.scoring_tier.drop()
        state = replace(self._coming, evict_s=evict_s, outcome=outcome)
        # From here on nothing fails.
        self.state = state  # first: an interrupt from here on leaves another position
        self._arena, old = reading.target, self._arena
        self._exact = reading.exact if isinstance(reading, Prefill) else []
        self.reading = None
        if self.keeps_addresses and self._stepped:
            self._before, self._stepped = old, False
        size = old.nbytes
        del old, reading  # both hold the old arena
        self._give_back(size)

    def _give_back(self, size: int) -> None:
        """On a GPU, return the memory of an old arena of `size` bytes to the system. torch would
        keep it, although the next arena, which is a little larger, does not fit in it."""
        if size > _MUCH and self.device.type == "cuda":  # pragma: no cover - CUDA only
            torch.cuda.empty_cache()

    def abandon(self) -> None:
        """Undo a prompt under way: rows then exist for exactly the tokens fed before it."""
        for tier in (self.tier, self.scoring_tier):
            if tier is not None:
                tier.drop()
        self.reading = None

    # -- steps ----------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """The arena, up to date with the last token that counts. Settles the steps."""
        self.settle()
        return self._arena

    def begin_step(self, *, captured: bool = False) -> DecodeStep:
        """The decode step, ready for the next token: every head has room for its row. `count_step`
        must follow. Raises RuntimeError if the last step was not ended.

        captured: see `DecodeStep.open`. `settle` closes the steps.
        """
        assert self.reading is None, "a prompt is under way"
        step, decode = self.rules.step, self.decode
        if self._stepping:  # an interrupt left the last one unfinished
            self.discard()
            raise RuntimeError("a step was interrupted, and nothing is cached")
        ready = decode.is_open and decode.eviction.captured == captured
        if not ready or (step is None and self.position >= self._full):
            self.settle()
            self._open_steps(captured=captured)
        self._stepping = True
        return decode

    def _open_steps(self, *, captured: bool) -> None:
        self._exact, self._stepped = [], True
        with torch.inference_mode(False):  # these tensors are also written outside of a forward
            arena, kept, self._before = self._arena, self._before, None
            size, frees = arena.nbytes, kept is not None
            if kept is not None and kept.take(arena):
                arena = kept
            del kept
            arena = self._with_room(arena)
            frees = frees or arena is not self._arena
            self._arena = arena  # the same rows
            if frees:
                self._give_back(size)
            self.decode.open(
                arena,
                self.rules.step,
                self.position,
                pinned=self.pinned,
                leaves_last=self._leaves_last(arena),
                learnt=self._learnt,
                captured=captured,
            )
        self._full = self.position + int((arena.capacity - arena.held).min())

    def count_step(self) -> None:
        """The token of the step counts."""
        self.state = replace(self.state, position=self.state.position + 1)
        self._stepping = False

    def _with_room(self, arena: Arena) -> Arena:
        """The arena, or a copy of it, in which every head has room for a row."""
        step = self.rules.step
        if step is not None:
            block = 0 if step.evict_first else step.block
            # Between two evictions a head may be up to block - 1 rows over its cap. Rows from
            # before a change of policy leave at the next prompt (`configure`).
            assert bool((arena.held < arena.cap + step.block).all()), "no prompt was read since"
            capacity = (arena.cap + block).clamp(min=1)
        else:
            capacity = arena.capacity
            if bool((arena.held >= arena.capacity).any()):
                capacity = arena.capacity + _ROOM
        if bool((capacity > arena.capacity).any()):
            arena = arena.grown(torch.maximum(capacity, arena.capacity))
            arena.cap.clamp_(min=1)  # of an empty cache it is 0
        return arena

    def settle(self) -> None:
        """Finish steps that were begun, and free their working memory. Between steps only."""
        if self.before_settling is not None:
            self.before_settling()
        if self._stepping:
            self.discard()
        self.decode.close()

    @property
    def _learnt(self) -> Tensor | None:
        """What the step policy learnt so far; None if it does not learn, or another one did."""
        own, found = unlearnt(self.rules.step, self.shape, self.device), self.state.outcome.learnt
        return found if own is not None and found is not None and own.shape == found.shape else None

    @property
    def full_at(self) -> int:
        """The position at which a head may have no room left. With a step policy: the end of the
        context."""
        return self._full if self.rules.step is None else self.shape.max_context

    def _leaves_last(self, arena: Arena) -> Tensor | None:
        """bool [R]: rows that leave after all others; None if the prompt policy prefers none."""
        prefers = self.rules.prompt.prefer if self.rules.prompt is not None else None
        if prefers is None:
            return None
        return prefers.prefers(arena.columns["pos"].to(torch.int64), self.state.turns)

    # -- snapshots ----------------------------------------------------------------------------

    def holds(self, position: int) -> int:
        """How many tokens stay if the cache is cut at `position`: none if a layer's window may have
        dropped rows before it, or if the step policy learnt from the tokens after it."""
        if self.rules.step is not None and self.rules.step.learns:
            return 0
        fits = all(w is None or self.position <= w for w in self.shape.windows)
        return position if fits else 0

    def cut(self, position: int) -> None:
        """Forget the tokens from `position` on. The rows before them stay, as far as they were not
        evicted, or everything is forgotten (see `holds`). Between turns only. After an error, also
        for lack of memory, the cache is empty."""
        if position == self.position:
            return
        arena, state, done = self.arena, self.state, False
        try:
            if self.holds(position):
                arena.cut(position)
                turns = ((begin, min(end, position)) for begin, end in state.turns)
                some = tuple(turn for turn in turns if turn[0] < turn[1])
                self._return(replace(state, position=position, turns=some), arena)
                done = True
        finally:
            if not done:
                self.discard()

    def share(self) -> SharedSnapshot:
        """The present state, without a copy; it keeps the memory of the rows alive. Between turns
        only. No step may come before it is restored, because steps change rows in place."""
        arena = self.arena
        assert self.reading is None
        return SharedSnapshot(self.state, arena, 0 if self.tier is None else self.tier.length)

    def snapshot(self) -> CacheSnapshot:
        """A copy of the cache, without its policies. Between turns only."""
        arena = self.arena
        assert self.reading is None
        state, learnt = self.state, self._learnt
        if state.outcome.learnt is not None:
            copy = None if learnt is None else learnt.to("cpu", copy=True)
            state = replace(state, outcome=replace(state.outcome, learnt=copy))
        return CacheSnapshot(state, tuple(arena.region), arena.layout(), arena.pack())

    def restore(
        self,
        held: CacheSnapshot | SharedSnapshot,
        rules: Rules | None = None,
        under: Rules | None = None,
    ) -> None:
        """Return to the snapshot `held`, under `rules` (by default the present ones). If it was
        taken under the same rules, later results are bit-identical. under: rules to use from then
        on, as if `configure` were called afterwards.

        A shared snapshot takes no rules. Restoring it allocates nothing and cannot fail; it also
        abandons a prompt under way. A copy is restored between turns only. That raises UsageError
        as `configure` does, and ValueError if it does not fit this network and `rules`. After an
        error, also for lack of memory, nothing has changed.
        """
        if isinstance(held, SharedSnapshot):
            self.reading = None
            if self.tier is not None:
                self.tier.drop()
                self.tier.truncate(held.tier)  # prompts after it may have been committed
            self.decode.close()
            self._return(held.state, held.arena)
            return
        assert self.reading is None
        rules, state = rules or self.rules, held.state
        self.check(rules)
        learnt = state.outcome.learnt
        if learnt is not None:
            learnt = learnt.to(self.device, copy=True)
            state = replace(state, outcome=replace(state.outcome, learnt=learnt))
        if under is not None:
            state = replace(state, rows=self.check(under))
        if not self.accepts(held, rules):
            raise ValueError("the cache belongs to another network or policy")
        arena = self._empty(rules).unpack(held.layout, held.region, held.columns)
        spare = self._empty(under or rules)
        if under is not None:
            _declare(arena, rules.step, under)
        self.settle()
        # From here on nothing fails.
        self.rules, self._spare = under or rules, spare
        self._return(state, arena)

    def _return(self, state: State, arena: Arena) -> None:
        self.state, self._arena, self._before = state, arena, None
        self._exact = []  # of the prompt that is undone
        self._stepped = True  # there may have been steps over these rows

    def accepts(self, held: CacheSnapshot, rules: Rules) -> bool:
        """Whether `held` has the columns of this network and these policies, and no more rows than
        a real cache could have: at most 4 * (context + position) per head."""
        arena, shape = self._empty(rules), self.shape
        if held.region[-1] > 4 * shape.layers * shape.kv_heads * (
            shape.max_context + held.state.position
        ):
            return False
        kinds = [
            {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
            for columns in (arena.columns, held.columns)
        ]
        learnt, own = held.state.outcome.learnt, unlearnt(rules.step, shape, self.device)
        if learnt is not None and (own is None or own.shape != learnt.shape):
            return False
        return kinds[0] == kinds[1] and held.layout.start.shape == arena.start.shape

    def _empty(self, rules: Rules) -> Arena:
        """An arena without rows, with the columns that these policies need."""
        shape = self.shape
        return Arena(
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            self.dtype,
            self.device,
            policy_columns(rules.prompt, rules.step),
            kv=self.kv,
        )

    # -- what the cache reports -------------------------------------------------------------

    def kept(self, layer: int, head: int) -> Tensor:
        """Positions that a KV head holds, ascending, int64."""
        index, live = self.arena.index(layer)
        return self.arena.columns["pos"][index[head, live[head]]].to(torch.int64).sort().values

    @property
    def peak(self) -> int:
        """The most bytes that were allocated at once, from the last prompt on."""
        return max(self.state.peak, self._allocated)

    def last_token(self) -> tuple[LastToken, Tensor] | None:
        """For measuring what a recall lost (see `minikv.cache.fidelity`): an `Attend` that feeds
        the prompt's last token once more over the rows that stayed, and the error of each layer's
        output, float32 [L]. None if no prompt was just recalled, or no row was evicted. Changes
        nothing."""
        if len(self._exact) != self.shape.layers or not self.evicted:
            return None
        last = LastToken(self.shape, self.arena, self.position - 1, self.ops)
        return last, last.output_errors(self._exact)

    @property
    def evicted(self) -> bool:
        """Whether the rows differ from those of a cache without eviction: fewer, or int8."""
        rows = int(self.arena.held.sum())
        return self.arena.coded or rows < full_cache_rows(self.shape, self.position)

    @property
    def _allocated(self) -> int:
        """Bytes of the arenas and of the steps' working memory."""
        before = 0 if self._before is None else self._before.nbytes
        return self._arena.nbytes + before + self.decode.nbytes

    def stats(self) -> CacheStats:
        """The present figures, counted from the tensors; see `CacheStats`."""
        arena, shape = self.arena, self.shape
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
            peak_bytes=self.peak,
            state_bytes=rows * arena.row_nbytes(arena.extra),
            evicted=round(self.position - mean),
            shaped=self.state.outcome.shaped,
            gaps=rows < full_cache_rows(shape, self.position),
        )


def _declare(arena: Arena, before: StepPolicy | None, rules: Rules) -> None:
    """Replace the columns of the step policy `before` in the arena by those of these rules'
    policies. If memory runs out, nothing changes."""
    step, prompt = rules.step, rules.prompt
    columns = step.columns if step else {}
    # Another policy's values mean nothing to this one.
    same = before is not None and step is not None and before.name == step.name
    reset = not same or (before is not None and before.columns != columns)
    prompt_columns = {} if prompt is None else prompt.scorer.columns
    arena.declare({**prompt_columns, **columns}, clear=columns if reset else ())

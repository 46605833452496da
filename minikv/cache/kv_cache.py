"""The KV cache under eviction: the `Attend` that a network runs on.

At the end of a prompt the prompt policy chooses which rows stay (`Prefill`). While an answer is
written, a new token's row overwrites the row that the step policy evicted (`DecodeStep`). Between
two steps no head holds more rows than its cap.

A prompt is a transaction. `begin` allocates another arena, the target, and the rows that stay are
written there. `advance` then replaces the old arena with the target. Until then the old one is
never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.arena import Arena, Layout
from minikv.cache.block_prefill import BlockPrefill
from minikv.cache.decode_step import DecodeStep
from minikv.cache.fidelity import LastToken
from minikv.cache.plan import Plan, RowsBefore, plan_prompt
from minikv.cache.prefill import Prefill
from minikv.cache.rules import Rules
from minikv.cache.second_pass import PassCost, SecondPass, TextPass
from minikv.cache.snapshot import CacheSnapshot, Outcome
from minikv.cache.stats import (
    CacheStats,
    PromptFigures,
    Shape,
    Stopwatch,
    full_cache_bytes,
    full_cache_rows,
)
from minikv.cache.tier import Tier
from minikv.kernels.dispatch import Kernels, choose
from minikv.policies.base import (
    Repeat,
    StepPolicy,
    Wording,
    policy_columns,
)

_ROOM = 256  # rows that a full head gains when there is no step policy
_MUCH = 64 << 20  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The state of a cache between two turns, see `KVCache.mark`. The tensors are not copied."""

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
    """`Attend` over an arena, for one conversation. By default the rules evict nothing.

    Raises UsageError if the budget is too small for the policies. `progress(done, total)` is called
    while a prompt is read, with tokens. It may raise; then `rollback` restores the cache. After an
    error inside of a step `rollback` drops the cache: it is then empty, and the conversation must
    be read or recalled again.
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
        rotary: Tensor | None = None,
        kernels: str = "auto",
        poison: bool = False,
    ) -> None:
        """dtype: the network's. kv: the dtype of stored keys and values: `dtype` (None), or int8
        with a float32 scale per row. output(layer): the network's output projection [H, G, D,
        hidden], for policies that use what attention makes of a value. rotary [D / 2]: the
        network's rotary angles per position, in radians, for policies that need queries before
        rotation. kernels: as `dispatch.choose` takes it; `ops` is the choice, and `notice` says why
        it is not the device's own kernels. poison: see `Arena`."""
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.kv = kv or dtype
        self.ops, self.notice = choose(self.device, kernels, shape.head_dim, dtype)
        self.rules: Rules
        self._rows: int | None
        self._open: bool
        self._arena: Arena
        self.decode = DecodeStep(shape, self.device, self.ops)
        # Called by `settle`, so that whoever has launched steps ahead can finish them.
        self.before_settling: Callable[[], None] | None = None
        self._stepping = False  # a step was begun, and its token is not counted yet
        self._full = 0  # see `full_at`
        self._mark: Mark | None = None  # `go_back` may need the arena as it is
        self.keeps_addresses = self.device.type == "cuda"
        self.progress: Callable[[int, int], None] | None = None
        self.output, self.rotary = output, rotary
        self._poison = poison
        self.tier: Tier | None = None
        # Keeps the rows of a prompt with a second pass until they are scored; None: host memory.
        self.scoring_tier: Tier | None = None
        self.words = Wording()  # for policies with a second pass
        rules = rules or Rules()
        self._set(rules, self._known_rows(rules))
        self.reset()

    def configure(self, rules: Rules) -> None:
        """Use other policies or another budget from the next prompt on. Between turns only.

        Rows already evicted do not come back; a smaller budget evicts at the end of the next
        prompt. Raises UsageError, and changes nothing, if the budget is too small for the policies.
        """
        assert self._reading is None
        rows = self._known_rows(rules)
        _declare(self.arena, self.rules.step, rules)
        self._set(rules, rows)

    def check(self, rules: Rules) -> None:
        """Raise the UsageError that `configure` would raise; change nothing."""
        self._known_rows(rules)

    def _known_rows(self, rules: Rules) -> int | None:
        """The budget in rows per head; None if there is none or it depends on the prompt. Raises
        UsageError if it is too small for the policies."""
        if rules.budget is None or rules.takes_share:
            return None
        return rules.budget_rows(0, self.shape, self.kv)

    def _set(self, rules: Rules, rows: int | None) -> None:
        self.rules, self._rows = rules, rows
        # A share counts all tokens read when the next prompt ends. Until then it is not known.
        self._open = rules.takes_share

    def reset(self) -> None:
        """Forget the conversation and free its memory."""
        empty = self._empty(self.rules)
        self.settle()
        self._restart(empty)

    def restart(self, rules: Rules) -> None:
        """`reset`, and use these rules. Raises UsageError as `configure` does. After an error, also
        for lack of memory, nothing has changed."""
        rows = self._known_rows(rules)
        arena = self._empty(rules)
        self.settle()
        # From here on nothing fails.
        self._set(rules, rows)
        self._restart(arena)

    def _restart(self, empty: Arena) -> None:
        self.position = 0  # first: whoever is interrupted here sees that the cache is empty
        self._arena = empty
        self._turns: list[tuple[int, int]] = []
        self._pinned = 0
        if self.rules.takes_share:
            self._open, self._rows = True, None
        self._reading: Prefill | BlockPrefill | SecondPass | None = None
        self._last = Outcome()
        self._exact: list[tuple[Tensor, Tensor]] = []  # see `Prefill.exact`; until the first step
        self._stepping = False
        self._peak = 0
        self._evict_s = 0.0

    def use(self, ops: Kernels) -> None:
        """Compute with these kernels from now on. Between turns only."""
        self.settle()
        self.ops = ops
        self.decode = DecodeStep(self.shape, self.device, ops)

    def pin(self, rows: int) -> None:
        """Pin the first `rows` positions of the conversation: they are never evicted. Before the
        first prompt only.

        Raises UsageError if the budget leaves no room beside them.
        """
        assert self.position == 0
        if self.rules.budget is not None and self.rules.budget.unit == "rows":
            self.rules.refuse_pins(rows, int(self.rules.budget.value))
        self._pinned = rows

    # -- a prompt ---------------------------------------------------------------------------

    def recall(
        self,
        tokens: int,
        room: int = _ROOM,
        rows: int | None = None,
        begins: int | None = None,
    ) -> int:
        """As `begin`, for the whole conversation of `tokens` tokens; the tier gives the rows that
        it has. Returns the position from which on tokens must be fed: those that the tier does not
        have, and at least the tokens of the last turn whose queries the policies observe.

        The rows that stay are chosen from the whole conversation, as if it were read anew. rows: a
        smaller budget for this prompt only, in rows per head (see `budgets`). begins: the position
        at which the last turn begins; by default where the turn before ended.
        """
        assert self.tier is not None
        assert self.rules.cannot_recall is None, self.rules.cannot_recall
        if begins is None:
            begins = max((end for _, end in self._turns if end < tokens), default=0)
        given = min(self.tier.length, max(0, tokens - self.observed(tokens, begins)))
        self._begin(tokens, room, given, rows, begins)
        return given

    def observed(self, tokens: int, begins: int) -> int:
        """How many of the last tokens `recall` feeds in any case: those whose queries the policies
        observe. Arguments as for `recall`."""
        prompt, step = self.rules.prompt, self.rules.step
        observe = max(prompt.evidence.observe if prompt else 0, step.observe if step else 0)
        return max(min(observe, tokens - begins), step.prompt_history if step else 0, 1)

    def budgets(self, tokens: int) -> list[int]:
        """Budgets in rows per head for a recall of `tokens` tokens: from the smallest that the
        policies can work with, each twice the one before, up to the user's budget."""
        most = self._usable(self._rows_after(tokens, anew=True))
        assert most is not None
        rows, found = self.rules.least(self._pinned), []
        while rows < most:
            if self.rules.serves(rows, tokens, self.shape.layers, self._pinned):
                found.append(rows)
            rows *= 2
        return [*found, most]

    def begin(
        self,
        tokens: int,
        room: int = _ROOM,
        *,
        asks: bool = False,
        turn_tokens: int | None = None,
    ) -> None:
        """Announce that the next forward is a prompt of `tokens` tokens (a single token may be a
        prompt, too).

        room: rows per head to allocate for the answer if there is no step policy. asks: the prompt
        only asks about what was read before. turn_tokens: how many of the last tokens belong to the
        last turn; by default all. Waits for the device. Raises UsageError for a budget that is too
        small, and ContextError where no position is left for a second pass. After an error, also
        for lack of memory, nothing has changed.
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
        """`begin`, or `recall` if `given` is not None: the tier then gives so many of the first
        tokens. smaller and begins: `rows` and `begins` of `recall`."""
        assert tokens > 0
        assert self._reading is None, "a prompt is under way"
        arena, rules = self.arena, self.rules
        position = self.position if given is None else 0
        rows = self._rows_after(position + tokens, anew=given is not None)
        each = self._usable(rows)
        if each is not None and smaller is not None:
            each = min(each, smaller)
        if each is not None:
            rules.refuse_pins(self._pinned, each)
        before = RowsBefore.read(self.shape, arena, position, tokens)
        begins = position if begins is None else begins
        repeats = self._repeats(range(tokens), position, each, asks=asks)
        plan = plan_prompt(
            self.shape,
            rules,
            arena.rows,
            before,
            each,
            room,
            position=position,
            tokens=tokens,
            turns=[*(t for t in self._turns if t[1] <= begins), (begins, position + tokens)],
            pinned=self._pinned,
            given=given or 0,
            asks=asks and not repeats,
            turn_tokens=turn_tokens if given is None else max(1, tokens - begins),
            output=self.output,
            rotary=self.rotary,
        )
        reading = self._reader(plan, arena, before.held, repeats, each, recalls=given is not None)
        self._evicting = Stopwatch(self.device)
        self._rows, self._reading = rows, reading

    def _reader(
        self,
        plan: Plan,
        arena: Arena,
        held: Layout,
        repeats: Sequence[Repeat],
        each: int | None,
        *,
        recalls: bool,
    ) -> Prefill | BlockPrefill | SecondPass:
        """The object that reads the prompt, with its own target arena."""
        shape, rules = self.shape, self.rules
        prompt, step = rules.prompt, rules.step
        columns = policy_columns(prompt, step)
        if plan.shares:
            target = arena.sharing(columns)
        else:
            target = arena.fresh(plan.needed, columns, filled=plan.kept)
        tier = self.tier if recalls else None
        if tier is not None:
            tier.open(plan.tokens)
        if rules.stride and step is not None and each is not None:
            return BlockPrefill(
                shape, arena, held, target, step, plan, each, rules.stride, self.dtype, self.ops
            )
        if prompt is not None and repeats:
            if self.scoring_tier is not None:
                self.scoring_tier.truncate(0)
                self.scoring_tier.open(plan.tokens)
            return SecondPass(
                shape,
                arena,
                held,
                target,
                prompt,
                step,
                plan,
                repeats,
                rules.first_rows(self._pinned),
                self.dtype,
                self.ops,
                self.scoring_tier,
            )
        return Prefill(shape, arena, held, target, prompt, step, plan, self.dtype, self.ops, tier)

    def _repeats(
        self, ids: Sequence[int], position: int, each: int | None, *, asks: bool
    ) -> Sequence[Repeat]:
        """See `Rules.repeats`."""
        return self.rules.repeats(
            ids,
            position,
            each,
            self.words,
            most=self.shape.max_context,
            pinned=self._pinned,
            asks=asks,
        )

    def _rows_after(self, tokens: int, *, anew: bool) -> int | None:
        """The budget in rows per head for a prompt after which `tokens` tokens have been read. A
        share becomes a number of rows once, with the first prompt under it; `anew` counts it
        again."""
        counted = self._rows is not None and not self._open
        if self.rules.budget is None or (counted and not (anew and self.rules.takes_share)):
            return self._rows
        return self.rules.budget_rows(tokens, self.shape, self.kv)

    def _usable(self, rows: int | None) -> int | None:
        """`rows`, but at most one per position of the context."""
        return None if rows is None else min(rows, self.shape.max_context)

    def second_pass(self, ids: Sequence[int]) -> Sequence[Repeat]:
        """Texts to feed after the prompt of these ids went through the network and before
        `advance`: each to its own `text`. Empty if there is no second pass."""
        reading = self._reading
        if not isinstance(reading, SecondPass) or reading.scored:
            return ()
        first = max(0, self.rules.first_rows(self._pinned) - reading.plan.position)
        left = self.shape.max_context - reading.end
        return reading.prompt.scorer.second_pass(ids, first, self.words, left)

    def text(self, repeat: Repeat) -> TextPass:
        """`Attend` for a text of `second_pass`. Raises TierError if the prompt's rows could not be
        kept."""
        reading = self._reading
        assert isinstance(reading, SecondPass)
        work, progress = reading.work, self.progress
        return reading.text(repeat, lambda done: progress(done, work) if progress else None)

    def scoring_cost(self, tokens: int, position: int, *, asks: bool) -> PassCost | None:
        """What the second pass costs for a prompt of `tokens` tokens at this position; None if
        there is none. Raises as `begin`."""
        each = self._usable(self._rows_after(position + tokens, anew=False))
        repeats = self._repeats(range(tokens), position, each, asks=asks)
        if not repeats:
            return None
        gpu = self.device.type == "cuda"
        later = position > 0
        return PassCost.of(self.shape, tokens, repeats, self.dtype, gpu=gpu, later=later)

    @property
    def scoring(self) -> bool:
        """Whether a second pass is scoring the prompt that was read."""
        return isinstance(self._reading, SecondPass) and self._reading.scoring

    @property
    def foresees(self) -> bool:
        """Whether the prompt that was begun must first be fed once between `begin_glance` and
        `end_glance`, only to get the network's probability of each of its tokens."""
        return isinstance(self._reading, Prefill) and self._reading.foresees

    def begin_glance(self) -> None:
        """The next forward only yields probabilities, and is not ended by `advance`."""
        assert isinstance(self._reading, Prefill)
        self._reading.glancing = True

    def end_glance(self, predicted: Tensor) -> None:
        """predicted: the probabilities of the prompt's tokens, float32 [T]."""
        assert isinstance(self._reading, Prefill)
        self._reading.predict(predicted)

    @property
    def watch(self) -> Callable[[Tensor], None] | None:
        """See `Attend`."""
        reading = self._reading
        return reading.watch if isinstance(reading, Prefill) and reading.watches else None

    @property
    def attend_unrotated(self) -> Callable[[int, Tensor, Tensor, Tensor], Tensor] | None:
        """See `Attend`; None for a prompt."""
        return None if self._reading is not None else self._step_unrotated

    @property
    def step_arena(self) -> Callable[[], object | None] | None:
        """See `Attend`; None for a prompt."""
        return None if self._reading is not None else self._step_arena

    def _step_arena(self) -> object | None:
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
        reading = self._reading
        if reading is None:
            if layer == 0:
                self.begin_step()
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
        """See `Attend`. Ends a prompt or a decode step."""
        if self._reading is None:
            assert tokens == 1
            self.decode.end()
            self.count_step()
            return
        reading, plan = self._reading, self._reading.plan
        assert tokens in (plan.read, plan.tokens)
        with self._evicting.running():
            outcome = reading.complete()
        evict_s = self._evicting.total()
        if self.tier is not None and isinstance(reading, Prefill) and reading.tier is self.tier:
            self.tier.commit(plan.tokens)
        if self.scoring_tier is not None:
            self.scoring_tier.drop()
        turns = list(plan.turns)
        # From here on nothing fails.
        self._reading = None
        old = self._arena
        # A CUDA graph holds addresses: if no mark needs the old rows, overwrite them in place.
        if not (self.keeps_addresses and self._mark is None and old.take(reading.target)):
            self._arena = reading.target
        self._last, self._evict_s, self._turns = outcome, evict_s, turns
        self._exact = reading.exact if isinstance(reading, Prefill) else []
        self._open = False
        self.position = plan.position + plan.tokens
        self._peak = reading.peak
        much = old is not self._arena and old.nbytes > _MUCH
        del old, reading  # both hold the old arena
        if much:
            self._give_back()

    def _give_back(self) -> None:
        """On a GPU, return the memory of an arena that is not used any more to the system. torch
        would keep it, and the next arena, which is a little larger, does not fit in it."""
        if self.device.type == "cuda":  # pragma: no cover - CUDA only
            torch.cuda.empty_cache()

    def rollback(self) -> None:
        """Undo an unfinished prompt: rows then exist for exactly the tokens fed before it. After an
        unfinished step the cache is empty."""
        if self._open:
            self._rows = None
        for tier in (self.tier, self.scoring_tier):
            if tier is not None:
                tier.drop()
        if self._reading is not None:
            self._reading = None
        elif self._stepping:
            self.drop()

    def drop(self) -> None:
        """Forget the rows: a step failed, and may have changed some."""
        empty = self._empty(self.rules)
        self.decode.close()
        self._restart(empty)

    # -- steps ----------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """The arena, up to date with the last token that counts. Settles the steps."""
        self.settle()
        return self._arena

    def begin_step(self, *, captured: bool = False) -> DecodeStep:
        """The decode step, ready for the next token: every head has room for its row. `count_step`
        ends what begins here. Raises RuntimeError if the last one was not ended.

        captured: see `DecodeStep.open`. `settle` closes the steps.
        """
        assert self._reading is None, "a prompt is under way"
        step, decode = self.rules.step, self.decode
        if self._stepping:  # an interrupt has left the last one unfinished
            self.drop()
            raise RuntimeError("a step was interrupted, and nothing is cached")
        ready = decode.is_open and decode.captured == captured
        if not ready or (step is None and self.position >= self._full):
            self.settle()
            self._open_steps(captured=captured)
        self._stepping = True
        return decode

    def _open_steps(self, *, captured: bool) -> None:
        self._exact = []
        with torch.inference_mode(False):  # these tensors are also written outside of a forward
            before = self._arena.nbytes
            grown = self._with_room()
            if grown is not self._arena:
                self._arena = grown  # the same rows
                if before > _MUCH:
                    self._give_back()
            arena = self._arena
            self.decode.open(
                arena,
                self.rules.step,
                self.position,
                pinned=self._pinned,
                leaves_last=self._leaves_last(arena),
                captured=captured,
            )
        self._full = self.position + int((arena.capacity - arena.held).min())

    def count_step(self) -> None:
        """The token of the step counts."""
        self.position += 1
        self._stepping = False

    def _with_room(self) -> Arena:
        """The arena, or a copy of it, in which every head has room for a row and holds no more rows
        than its policy allows."""
        arena, step = self._arena, self.rules.step
        if step is not None:
            block = 0 if step.evict_first else step.block
            # Between two evictions a head may be up to block - 1 rows over its cap. It holds more
            # only if they came when another policy was in force.
            most = arena.cap + (step.block - 1)
            if bool((arena.held > most).any()):
                arena = arena.trimmed(step.sinks, self._pinned, most)
            capacity = arena.cap + block
        else:
            capacity = arena.capacity
            if bool((arena.held >= arena.capacity).any()):
                capacity = arena.capacity + _ROOM
        if bool((capacity > arena.capacity).any()):
            arena = arena.grown(torch.maximum(capacity, arena.capacity))
        return arena

    def settle(self) -> None:
        """Finish steps that were begun, and free their working memory. Between steps only."""
        if self.before_settling is not None:
            self.before_settling()
        if self._stepping:
            self.drop()
        self.decode.close()

    def put_right(self) -> int:
        """Undo what an interrupt left of a prompt, and drop the cache if it left a step. Between
        turns only. Returns the position."""
        self.rollback()
        self.settle()
        return self.position

    @property
    def full_at(self) -> int:
        """The position at which a head may have no room left. With a step policy: the end of the
        context."""
        return self._full if self.rules.step is None else self.shape.max_context

    @property
    def pinned(self) -> int:
        """Positions below it are never evicted."""
        return self._pinned

    @property
    def last_turn(self) -> int:
        """The position at which the last prompt's turn begins."""
        return self._turns[-1][0] if self._turns else 0

    def _leaves_last(self, arena: Arena) -> Tensor | None:
        """bool [R]: rows that leave after all others; None if the prompt policy prefers none."""
        prefers = self.rules.prompt.preference if self.rules.prompt is not None else None
        if prefers is None:
            return None
        return prefers.prefers(arena.columns["pos"].to(torch.int64), self._turns)

    # -- going back to an earlier state ---------------------------------------------------------

    def mark(self) -> Mark:
        """The present state, for `go_back`. It keeps the memory alive and copies nothing. Between
        turns only."""
        self.settle()
        assert self._reading is None
        self._mark = Mark(
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
        return self._mark

    def go_back_to_mark(self) -> bool:
        """`go_back` to the last mark, if it was not forgotten. Returns whether there was one."""
        mark = self._mark
        if mark is not None:
            self.go_back(mark)
        return mark is not None

    def forget_mark(self) -> None:
        """`go_back` will not be called for the last mark: prompts may overwrite the arena."""
        self._mark = None

    def go_back(self, mark: Mark) -> None:
        """Return to the state of `mark`. Only prompts may have come after it, because decode steps
        write to the arena in place.

        Allocates nothing and cannot fail.
        """
        self._reading = None
        if self.tier is not None:
            self.tier.drop()
            self.tier.truncate(mark.tier)  # prompts after the mark may have been committed
        self.decode.close()
        self._arena, self.position, self._turns = mark.arena, mark.position, list(mark.turns)
        self._pinned, self._rows, self._open = mark.pinned, mark.rows, mark.open
        self._peak, self._evict_s, self._last = mark.peak, mark.evict_s, mark.outcome
        self._mark = None

    # -- snapshots ----------------------------------------------------------------------------

    def snapshot(self) -> CacheSnapshot:
        """A copy of the cache, without its policies. Between turns only."""
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
        rules: Rules,
        under: Rules | None = None,
    ) -> None:
        """Return to the snapshot `held`, under the rules `rules`. What follows is bit-identical if
        these are the rules under which it was taken. Between turns only. under: rules to use from
        then on, as if `configure` were called afterwards.

        Raises UsageError as `configure`, and ValueError if the snapshot does not fit this network
        and `rules`. After an error, also for lack of memory, nothing has changed.
        """
        assert self._reading is None
        rows, later = self._known_rows(rules), None if under is None else self._known_rows(under)
        if not self.accepts(held, rules):
            raise ValueError("the cache is not one of this network and policy")
        arena = self._empty(rules).unpack(held.layout, held.region, held.columns)
        if under is not None:
            _declare(arena, rules.step, under)
        self.settle()
        # From here on nothing fails.
        self._set(rules, rows)
        self._arena, self.position, self._turns = arena, held.position, list(held.turns)
        self._pinned, self._rows, self._open = held.pinned, held.rows, held.open
        self._peak, self._evict_s, self._last = held.peak, held.evict_s, held.outcome
        if under is not None:
            self._set(under, later)

    def accepts(self, held: CacheSnapshot, rules: Rules) -> bool:
        """Whether `held` has the columns of this network and these policies, and no more rows than
        a real cache could have: at most 4 * (context + position) per head."""
        arena, shape = self._empty(rules), self.shape
        if held.region[-1] > 4 * shape.layers * shape.kv_heads * (
            shape.max_context + held.position
        ):
            return False
        kinds = [
            {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
            for columns in (arena.columns, held.columns)
        ]
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
            poison=self._poison,
        )

    # -- what the cache reports -------------------------------------------------------------

    def kept(self, layer: int, head: int) -> Tensor:
        """Positions that a KV head holds, ascending, int64."""
        index, live = self.arena.index(layer)
        return self.arena.columns["pos"][index[head, live[head]]].to(torch.int64).sort().values

    @property
    def last_prompt(self) -> PromptFigures:
        """What the last prompt cost. Uses only numbers that are already on the host: it cannot
        fail."""
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
        """Per layer, the share of the attention mass of the last observed queries that fell on
        evicted rows; None: not measured."""
        return self._last.lost

    def last_token(self) -> tuple[LastToken, Tensor] | None:
        """For measuring what a recall lost (see `minikv.cache.fidelity`): an `Attend` for feeding
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
    def reading(self) -> bool:
        """Whether a prompt is under way."""
        return self._reading is not None

    @property
    def first(self) -> Prefill | None:
        """The prompt under way, if it is a conversation's first and is read exactly."""
        reading = self._reading
        return reading if isinstance(reading, Prefill) and not self.position else None

    @property
    def scored_twice(self) -> SecondPass | None:
        """The prompt under way, if it is read twice."""
        reading = self._reading
        return reading if isinstance(reading, SecondPass) else None

    @property
    def target(self) -> Arena | None:
        """The arena that the prompt under way is written to."""
        return self._reading.target if self._reading is not None else None

    @property
    def budget_rows(self) -> int | None:
        """The budget in rows per head; None where there is none or it is not known yet."""
        return self._rows

    def attended(self, layer: int, head: int) -> Tensor:
        """Positions, int64 [n], of the rows that the head's query attends to in the step under way.
        Only for a layer that the step has been through."""
        begin, count = int(self._arena.start[layer, head]), int(self.decode.count[layer, head])
        pos = self._arena.columns["pos"][begin : begin + count]
        return pos.to(torch.int64)

    @property
    def _allocated(self) -> int:
        """Bytes of the arena and of the steps' working memory."""
        return self._arena.nbytes + self.decode.nbytes

    def stats(self) -> CacheStats:
        """The present figures, counted from the tensors; see `CacheStats`."""
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


def _declare(arena: Arena, before: StepPolicy | None, rules: Rules) -> None:
    """Give the arena, which has the columns of the step policy `before`, the columns of these
    rules' policies. If memory runs out, nothing changes."""
    step, prompt = rules.step, rules.prompt
    columns = step.columns if step else {}
    # Another policy's values mean nothing to this one.
    same = before is not None and step is not None and before.name == step.name
    anew = not same or (before is not None and before.columns != columns)
    scorer_columns = {} if prompt is None else prompt.scorer.columns
    arena.declare({**scorer_columns, **columns}, anew=columns if anew else ())

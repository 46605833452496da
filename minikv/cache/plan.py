"""The plan for a prompt: how many rows there are, how many may stay, where they go, and how much
memory that takes.

Everything is decided on the host, before the prompt is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minikv.cache.arena import TABLES, Arena, Layout
from minikv.cache.earlier import is_listed
from minikv.cache.global_pool import AT_ONCE
from minikv.cache.rules import Rules, unlearnt
from minikv.cache.stats import Shape
from minikv.errors import ContextError
from minikv.kernels import fill
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import ALL, StepPolicy
from minikv.policies.moments import Rotation, before_rotation
from minikv.policies.outputs import WEIGHTS
from minikv.policies.parts import policy_columns
from minikv.policies.repeats import Repeat, Wording
from minikv.policies.selection import largest_block


@dataclass(frozen=True, slots=True)
class Setup:
    """What a cache computes with, the same for every prompt.

    dtype: the network's. kv: the dtype of stored keys and values. ops: the kernels. output(layer)
    and rotary: as in `PromptView`. words: for policies with a second pass. sentences: as in
    `PromptView`, at least up to the end of the prompt. gpu: the rows are in a GPU's memory. learnt:
    see `Outcome`; from before the prompt.
    """

    shape: Shape
    rules: Rules
    dtype: torch.dtype
    kv: torch.dtype
    ops: Kernels = field(default_factory=Kernels)
    output: Callable[[int], Tensor] | None = None
    rotary: Rotation | None = None
    words: Wording = field(default_factory=Wording)
    sentences: Tensor | None = None
    gpu: bool = False
    learnt: Tensor | None = None

    def to_learn(self, device: torch.device) -> Tensor | None:
        """A copy of what the step policy learnt before the prompt, or zeros; None if it does not
        learn."""
        made = unlearnt(self.rules.step, self.shape, device)
        return made if made is None or self.learnt is None else self.learnt.clone()

    def learn(self, learnt: Tensor, layer: int, q: Tensor, first: int) -> None:
        """Have the step policy learn from a layer's queries q [t, heads, D], at the positions from
        `first` on."""
        step, rotary = self.rules.step, self.rotary
        assert step is not None
        assert rotary is not None, "the network's rotary frequencies are not known"
        for part in torch.split(q, max(1, self.ops.block // q[0].numel())):
            at = torch.arange(first, first + len(part), device=q.device)
            each = part.view(len(part), self.shape.kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
            step.learn(learnt[layer], before_rotation(each.float(), rotary, layer, at))
            first += len(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt of `tokens` tokens that starts at `position`.

    rows: the budget in rows per head (None: nothing is evicted).
    room: rows per head for the answer if there is no step policy.
    turns: as in `PromptView`.
    pinned: positions below it are never evicted.
    given: how many tokens at the beginning of the prompt are not read, because the tier has (or
        would have) their rows. These rows compete with the others.
    asks: the prompt only asks about earlier text.
    turn_tokens: how many of the last tokens belong to the last turn (None: all). Earlier queries
        are not observed: the last answer's queries would keep the rows that this answer needed.
    """

    position: int
    tokens: int
    rows: int | None = None
    room: int = 0
    turns: Sequence[tuple[int, int]] = ()
    pinned: int = 0
    given: int = 0
    asks: bool = False
    turn_tokens: int | None = None

    @property
    def read(self) -> int:
        """How many tokens go through the network."""
        return self.tokens - self.given

    @property
    def end(self) -> int:
        """The position after the prompt."""
        return self.position + self.tokens

    def observed(self, rules: Rules) -> tuple[int, int]:
        """How many of the last queries are observed, and how many must be stored. The first is 0 if
        every query is observed, chunk by chunk."""
        step, wanted = rules.step, 0 if rules.observe == ALL else rules.observe
        last = min(self.read, max(wanted, step.prompt_history if step is not None else 0))
        of_turn = self.tokens if self.turn_tokens is None else self.turn_tokens
        return min(self.read, wanted, of_turn), last


@dataclass(frozen=True, slots=True)
class RowsBefore:
    """The rows that exist before a prompt; all numbers are on the host.

    held: the arena's tables. seen[i]: rows of layer i, over all heads, that the first token after
    the prompt can still see. rows and nbytes: of the arena.
    """

    held: Layout
    seen: list[int]
    rows: int = 0
    nbytes: int = 0

    @staticmethod
    def none(shape: Shape) -> RowsBefore:
        """The rows before a first prompt: none."""
        none = torch.zeros((shape.layers, shape.kv_heads), dtype=torch.int64)
        return RowsBefore(Layout(none, none, none, none, none - 1), [0] * shape.layers)

    @staticmethod
    def read(shape: Shape, arena: Arena, position: int, tokens: int) -> RowsBefore:
        """Read the arena's tables before a prompt of `tokens` tokens at `position`. One transfer
        from the device."""
        if not position:
            return replace(RowsBefore.none(shape), rows=arena.rows, nbytes=arena.nbytes)
        end = position + tokens
        slid = [i for i, w in enumerate(shape.windows) if w is not None and end >= w]
        firsts = [end - (shape.windows[i] or 0) + 1 for i in slid]
        counts = [arena.count_from(i, first) for i, first in zip(slid, firsts, strict=True)]
        numbers = torch.cat(
            [*(getattr(arena, name).flatten() for name in TABLES), *(n[None] for n in counts)]
        ).cpu()
        size = arena.start.numel()
        held = Layout(*numbers[: 5 * size].view(5, *arena.start.shape).unbind())
        seen = held.held.sum(1).tolist()
        for layer, count in zip(slid, numbers[5 * size :].tolist(), strict=True):
            seen[layer] = count
        return RowsBefore(held, seen, arena.rows, arena.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Prompt):
    """How a prompt is read.

    before: the rows that exist before it.
    totals[i]: rows that layer i may keep over all its heads (None: all).
    floor: the least cap of a head when only the step policy evicts.
    spare: rows that a head needs above its cap while an answer is written.
    needed[i]: rows of layer i's region in a new target.
    visible[i]: rows over all heads that exist after the prompt and that the next token can still
        see.
    shares: all rows stay where they are, and the new ones fit after them.
    pool: rows that all layers and heads may keep together, if they share one budget.
    repeats: the texts of a second pass. Empty if there is none.
    """

    before: RowsBefore
    totals: list[int] | None = None
    floor: int = 0
    spare: int = 0
    needed: list[int]
    visible: list[int]
    shares: bool = False
    pool: int | None = None
    repeats: Sequence[Repeat] = ()

    @property
    def kept(self) -> int:
        """How many rows exist after the prompt, over all layers and heads, at most."""
        if self.pool is not None:
            return min(self.pool, sum(self.visible))
        most = self.visible if self.totals is None else map(min, self.visible, self.totals)
        return sum(most)

    def evicts(self, layer: int) -> bool:
        """Whether the prompt policy may evict rows of the layer."""
        if self.pool is not None:
            return sum(self.visible) > self.pool
        return self.totals is not None and self.visible[layer] > self.totals[layer]


def plan_prompt(prompt: Prompt, setup: Setup, before: RowsBefore | None = None) -> Plan:
    """The plan for a prompt. before: None before a first prompt.

    Raises UsageError if the policies need more rows, in total or in a layer, and ContextError if no
    position is left for a second pass.
    """
    shape, rules, each, tokens = setup.shape, setup.rules, prompt.rows, prompt.tokens
    before = RowsBefore.none(shape) if before is None else before
    if each is not None:
        rules.refuse_pins(prompt.pinned, each)
    texts = repeats(prompt, setup)
    step, held = rules.step, before.held
    spare = prompt.room if step is None else 0 if step.evict_first else step.block
    floor = each if each is not None and step is not None else 0
    totals = rules.layer_totals(each, int(held.held.max()) + tokens, shape, prompt.pinned)
    blocks = each if rules.stride else None  # rows per head of a prompt that is read in blocks
    pool = None
    if rules.shares_layers and each is not None:
        heads = shape.layers * shape.kv_heads
        pool = each * heads
        needed = [0] * (shape.layers - 1) + [pool + spare * heads + 1]
    else:
        if blocks is not None:
            most = [shape.kv_heads * blocks] * shape.layers
        elif totals is not None:
            assert rules.prompt is not None
            most = [total + shape.kv_heads * rules.prompt.heads.drift for total in totals]
        else:
            # A layer loses rows only when they slide out of its window.
            rows = [
                count + tokens if window is None else (count + tokens).clamp(max=window)
                for count, window in zip(held.length, shape.windows, strict=True)
            ]
            most = [int(count.clamp(min=floor).sum()) for count in rows]
        needed = [count + shape.kv_heads * spare for count in most]
    new = [tokens if window is None else min(tokens, window) for window in shape.windows]
    plan = Plan(
        **{name: getattr(prompt, name) for name in Prompt.__slots__ if name != "asks"},
        asks=prompt.asks and not texts,
        before=before,
        totals=totals,
        floor=floor,
        spare=spare,
        needed=needed,
        visible=[b + shape.kv_heads * n for b, n in zip(before.seen, new, strict=True)],
        pool=pool,
        repeats=texts,
    )
    # If the arena is more than twice as large as needed, a new target frees memory.
    shares = blocks is None and pool is None and prompt.position > 0
    shares = shares and 2 * sum(needed) > before.rows
    return replace(plan, shares=shares and _fits(plan, shape, grows=step is None))


def repeats(prompt: Prompt, setup: Setup) -> Sequence[Repeat]:
    """The texts of a second pass over the prompt, of which only the lengths are right.

    Empty if the policy has no second pass. Also empty if the prompt (unless it `asks`, with all
    tokens before it) takes at most half of the budget: rows that always fit need no score. Raises
    ContextError if no position is left for the texts.
    """
    rules, tokens, most = setup.rules, prompt.tokens, setup.shape.max_context
    if rules.prompt is None or prompt.rows is None or not rules.evidence.second_pass:
        return ()
    first = max(0, rules.first_rows(prompt.pinned) - prompt.position)
    if 2 * (tokens if prompt.asks else prompt.end) <= prompt.rows or tokens <= first:
        return ()
    left = most - prompt.end
    texts = rules.prompt.scorer.second_pass(range(tokens), first, setup.words, left)
    if not texts:
        raise ContextError(
            f"{rules.prompt.name} has the model repeat what it has read, and {left:,} of "
            f"{most:,} positions are left for that",
            "take another policy, or shorten the text",
        )
    return texts


def _fits(plan: Plan, shape: Shape, *, grows: bool) -> bool:
    """Whether every row stays and every head has room for its new rows after its old ones. grows:
    there is no step policy, so the answer's rows need room too."""
    held = plan.before.held
    for layer, window in enumerate(shape.windows):
        count = held.held[layer]
        uneven = bool((count != count[0]).any()) or bool((held.free_slot[layer] >= 0).any())
        slides = window is not None and plan.end >= window
        if uneven or slides or not int(count[0]) or plan.evicts(layer):
            return False
        kept = count + plan.tokens
        if plan.totals is None:
            sizes = kept.clamp(min=plan.floor) + plan.spare
        else:
            sizes = fill(kept, plan.totals[layer]) + plan.spare
        if grows:
            sizes = fill(sizes, plan.needed[layer])
        if bool((held.capacity[layer] < sizes).any()):
            return False
    return True


# -- memory -------------------------------------------------------------------------------------

_POSITIONS = 25  # bytes per earlier row: its index, its position, and both in one list
_CHOOSING = 55  # bytes per competing row: its score, its rank, whether it stays
_PROJECTING = 24  # bytes per competing row while values are projected
_MOVING = 48  # bytes per row that is moved: the order of rows, and their indices
_PROJECTED = 4096  # values that are projected at once


def seen(tokens: int, window: int | None) -> int:
    """How many of the rows of `tokens` tokens the next token sees; at least one."""
    return tokens if window is None else max(min(tokens, 1), min(tokens, window - 1))


@dataclass(frozen=True, slots=True)
class PassCost:
    """What the second pass over a prompt costs in addition to reading the prompt.

    tokens: of all further texts. reads: how often each layer's rows are read. ram: bytes of host
    memory if the rows are in memory. file: bytes of the file if they are in a file. file_ram: bytes
    of host memory in that case. device: bytes of a GPU's memory; without a GPU, ram and file_ram
    include them. text: the part of these for the rows of a text.
    """

    tokens: int = 0
    reads: int = 0
    ram: int = 0
    file: int = 0
    file_ram: int = 0
    device: int = 0
    text: int = 0

    @classmethod
    def of(cls, prompt: Prompt, setup: Setup, repeats: Sequence[Repeat]) -> PassCost:
        """The cost of these texts; all 0 if there are none."""
        if not repeats:
            return cls()
        shape, tokens = setup.shape, prompt.tokens
        texts = [len(repeat.ids) for repeat in repeats]
        row = 2 * shape.kv_heads * shape.head_dim * setup.dtype.itemsize
        layer, whole = row * tokens, row * tokens * shape.layers
        two = min(2, shape.layers) * layer
        # In a layer with a window, the rows of the text and the prompt's rows that it sees are also
        # copied.
        copied = [seen(tokens, window) for window in shape.windows if window]
        text = row * (max(texts) + (max(texts) + max(copied) if copied else 0))
        gpu = setup.gpu
        return cls(
            sum(texts),
            len(texts) + 1,
            whole if gpu else whole + text,
            whole,
            two if gpu else two + text,
            layer + text if gpu else 0,
            text,
        )


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes of KV cache that exist at once. reading: while the prompt is read, earlier
    rows included. writing: while the answer is written. rows: the part of it that remains when the
    steps end."""

    reading: int
    writing: int
    rows: int


def peak(
    plan: Plan, setup: Setup, *, staged: tuple[int, int] | None = None, in_file: bool = False
) -> Peak:
    """The memory that a prompt and the steps after it will take.

    staged: the result of `Tier.staging`; None if there is no tier. in_file: the rows of a prompt
    with a second pass are in a file. The memory for a chunk and its attention belongs to the
    network's work space and is not counted.
    """
    rules, before = setup.rules, plan.before
    columns = policy_columns(rules.prompt, rules.step).values()
    state = sum(dtype.itemsize for dtype in columns)
    row = rules.row_nbytes(setup.shape, setup.kv)
    rows = before.rows if plan.shares else sum(plan.needed)
    held = before.nbytes + rows * (state if plan.shares else row)
    if rules.stride:
        reading = _in_blocks(plan, setup, state)
    elif plan.repeats:
        reading = _twice(plan, setup, state, in_file=in_file)
    else:
        buffers, coding = staged or (None, 0)
        reading = _fixed(plan, setup, buffers) + max(_most_of_a_layer(plan, setup, state), coding)
    return Peak(held + reading, rows * row + _steps(plan, setup), rows * row)


def _fixed(plan: Plan, setup: Setup, staged: int | None) -> int:
    """Bytes that are in use while any layer of a prompt is read."""
    shape, item, evidence = setup.shape, setup.dtype.itemsize, setup.rules.evidence
    found = _keys(plan.tokens, setup) * 2 if staged is None else staged
    if staged is not None:  # the last token's query and output, of every layer
        found += 2 * shape.layers * shape.heads * shape.head_dim * item
    found += 8 * plan.tokens + _pool(plan)
    if setup.rules.prompt is not None and setup.rules.prompt.carry is not None:
        found += 8 * plan.end  # by how much worth falls up to each position
    found += 16 * plan.end * evidence.sentences  # their table, as two kinds of numbers
    found += plan.observed(setup.rules)[1] * shape.heads * (shape.head_dim * item + 4)
    if evidence.queries_from is not None:
        found += 8 * shape.heads * shape.head_dim**2  # moments of the queries
    return found


def _sets_columns(step: StepPolicy) -> bool:
    """Whether the policy sets columns at the end of a prompt."""
    return type(step).init is not StepPolicy.init or step.has_key_columns


def _keys(rows: int, setup: Setup) -> int:
    """Bytes of the keys of `rows` rows of every head, in the network's dtype."""
    return setup.shape.kv_heads * rows * setup.shape.head_dim * setup.dtype.itemsize


def _pool(plan: Plan) -> int:
    """Bytes of the tables of a pool."""
    return 0 if plan.pool is None else 20 * sum(plan.needed)


def _most_of_a_layer(plan: Plan, setup: Setup, state: int) -> int:
    return max(_layer(plan, setup, layer, state) for layer in range(setup.shape.layers))


def _layer(plan: Plan, setup: Setup, layer: int, state: int) -> int:
    """The most bytes that a layer takes in addition to the keys and values that are read."""
    shape, rules, held = setup.shape, setup.rules, plan.before.held
    heads, group, size = shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
    evidence, step, item = rules.evidence, rules.step, setup.dtype.itemsize
    early = int(held.held[layer].max())
    even = int(held.held[layer].min()) == early
    rows, coded = early + plan.tokens, setup.kv == torch.int8
    every = heads * rows

    def block(each: int) -> int:
        """Bytes of the heads that are computed at once, with `each` numbers per head."""
        return 4 * largest_block(heads, each, setup.ops.block)

    always = _POSITIONS * heads * early
    if early or shape.windows[layer] is not None:
        always += 8 * every
    if early and coded:
        always += heads * early * (2 * size * item + 4)
    evicts, observed = plan.evicts(layer), plan.observed(rules)[0]
    sums = 4 * (group + 1) * every
    if rules.observe != ALL and not (observed and (evicts or (step and step.observe))):
        sums = 0
    if evidence.lengths:
        always += 8 * observed * (shape.heads + 1)  # of the queries: lengths, and log-sum-exps
    if step is not None and step.learns:  # four copies in float32 of the queries at once
        always += 16 * max(shape.heads * size, min(setup.ops.block, shape.heads * size * rows))
    copies = _keys(rows, setup) if early else 0
    # One after the other: the columns of a step policy, what the scorer reads, values that are
    # projected, the choice. Throughout, there are the columns from before, and sums of attention.
    before = columns = state * every
    noting = scoring = 0
    if early and not even and sums:  # keys of the head whose attention is added
        scoring = early * size * item
    if step is not None:
        if not _sets_columns(step):
            before = 0  # they stay as they are
        before += 4 * every if step.observe else 0
        noting = (step.scratch + state) * every
        if step.observe and rules.prompt is not None and rules.prompt.carry is not None:
            noting += 4 * every  # the attention that spans raise, beside what it was
        if step.has_key_columns:
            made = step.scratch
            if made and item < 4:  # keys in float32, and their product
                made = max(made, 4 * size + made // 4)
            noting = copies + (made + state + 8) * every
        if step.prompt_history:  # the attention of these queries, and a bit for each
            queries = block(group * step.prompt_history * rows)
            noting = max(noting, queries * (4 * group + 11) // (4 * group))
    if evicts:
        wide = shape.heads * size  # about as wide as the network
        some = largest_block(heads, group * size * wide, setup.ops.block) // (group * size * wide)
        queries = block(group * observed * rows) if evidence.each_query else 0
        copied = early if not coded and is_listed(held, layer) else 0
        vectors = max(_keys(copied, setup), _vectors(setup, rows, copied, later=early > 0))
        scored = len(evidence.copies) * copies + vectors if evidence.copies else 0
        if evidence.queries_from is not None:  # covariances, or what they are made of
            scored = max(scored, 24 * shape.heads * size**2)
        projected = 0
        if evidence.projects:
            values = min(_PROJECTED, some * rows)
            projected = copies + 4 * wide * values + _PROJECTING * every
            if item < 4:
                projected += 4 * (some * group * size * wide + values * size)
        scoring = max(scoring, scored, projected, 2 * queries + _CHOOSING * every)
    codes = coding = 0
    if coded:
        codes = 2 * heads * plan.tokens * (size + 4)
        coding = 5 * block(plan.tokens * size) // 4 + (12 if plan.pool is None else 30) * every
    storing = codes + max(coding, _MOVING * every)
    if plan.pool is not None:
        entering, placing = (
            min(rows * size, max(rows, AT_ONCE))
            for rows in (min(plan.pool, every), sum(plan.needed))
        )
        entering = entering * setup.kv.itemsize * (2 if early else 1) + 44 * (plan.pool + every)
        placing = placing * setup.kv.itemsize + 40 * plan.pool
        storing = max(codes + max(coding, entering), placing)
    storing += sums if rules.observe == ALL else 0
    judging = always + before + sums + max(noting, columns + scoring)
    return max(judging, always + columns + storing)


def _vectors(setup: Setup, rows: int, copies: int = 0, *, later: bool = False) -> int:
    """Bytes for a scorer that computes with keys or values of `rows` rows of every head. copies:
    how many of them are copied before all are read. later: some are of earlier prompts."""
    shape, evidence, most = setup.shape, setup.rules.evidence, setup.ops.block
    heads, group, each = shape.kv_heads, shape.heads // shape.kv_heads, rows * shape.head_dim
    found = evidence.vectors * largest_block(heads, each, most)
    if evidence.products:
        some = largest_block(heads, group * each, most) // (group * each)
        block = largest_block(group, some * each, most)
        learnt = evidence.queries_from is not None  # one query head after the other
        found += min(evidence.products, group if learnt else evidence.products) * block
        found += shape.heads * shape.head_dim * evidence.observe  # the queries, head by head
        if evidence.each_query:  # the attention of these queries, and two maps of some of it
            found += largest_block(heads, group * evidence.observe * rows, most)
            found += 2 * evidence.observe * block // shape.head_dim
        found += (2 * shape.heads + 3 * heads) * rows
        if learnt:
            found += some * each if setup.dtype.itemsize < 4 else 0
            found += shape.heads * shape.head_dim**2  # covariances
    elif evidence.norms:
        one, square = evidence.norms == "one", shape.head_dim**2
        matrix = group * shape.head_dim * (shape.heads * shape.head_dim)  # a head's part of W_O
        weights, count = largest_block(heads, matrix, WEIGHTS), heads if one else shape.heads
        copied, product = (weights if setup.dtype.itemsize < 4 else 0), 0
        grams = count * square * (1 if weights == heads * matrix else 2)
        if setup.ops.quadratic_forms is Kernels.quadratic_forms:  # C makes no products
            share = 1 if one else group
            product = largest_block(heads, share * each, most) // share
            product *= 2 if setup.dtype.itemsize < 4 else 1
        if one:  # one after the other: attention, values, what norms are made of, norms
            largest = heads * rows  # the largest attention of a query head
            attended = shape.heads * rows * (2 if later else 1)
            copy = heads * copies * shape.head_dim * setup.dtype.itemsize // 4
            made = copied + weights // matrix * group * square + grams
            norms = grams + product + (4 * heads + 2) * rows
            found += largest + max(attended, copy, made, norms)
        else:
            found += grams + max(copied, product + (2 * shape.heads + 3 * heads + 2) * rows)
    elif found:
        found += 3 * heads * rows
    return 4 * found


def _in_blocks(plan: Plan, setup: Setup, state: int) -> int:
    """Bytes that reading in blocks takes in addition to both caches."""
    shape, rules, size = setup.shape, setup.rules, setup.shape.head_dim
    assert plan.rows is not None
    early = int(plan.before.held.length.max())
    rows = shape.kv_heads * (max(plan.rows, early) + rules.stride)
    each = 2 * size * setup.dtype.itemsize + 8 + state
    # The attention in float32 and its mask, or the work space of a rule that evicts first.
    seeing = 8 * size + 8 * min(rules.stride, plan.tokens) + 40
    scratch = 0 if rules.step is None else 3 * rules.step.scratch + 80
    return 8 * plan.tokens + rows * (each + max(each, seeing, scratch))


def _twice(plan: Plan, setup: Setup, state: int, *, in_file: bool) -> int:
    """Bytes that a prompt with a second pass takes in addition to both caches."""
    shape, rules = setup.shape, setup.rules
    cost, heads = PassCost.of(plan, setup, plan.repeats), shape.kv_heads
    kept = cost.device if setup.gpu else cost.file_ram if in_file else cost.ram
    early = plan.before.held.held.max(1).values.sum()
    rows = heads * (int(early) + shape.layers * plan.tokens)
    noted = 0
    if rules.step is not None and _sets_columns(rules.step):
        noted = rows * sum(dtype.itemsize for dtype in rules.step.columns.values())
    scores = 4 * shape.layers * heads * plan.tokens
    chosen = replace(plan, given=plan.tokens)
    layer = _most_of_a_layer(chosen, setup, state) + 4 * rows // shape.layers
    fixed = kept - cost.text + _pool(plan) + 8 * plan.tokens + noted + scores
    # Bytes: scores, and results of attention that are joined; under a window there are more.
    each = 24 if any(shape.windows) else 16
    scoring = each * (shape.heads + heads) * plan.tokens + _vectors(setup, plan.tokens)
    before = heads * int(plan.before.held.held.max())
    scoring += _POSITIONS * before
    if setup.kv == torch.int8:  # a layer's earlier rows, as numbers of the network
        scoring += before * (2 * shape.head_dim * setup.dtype.itemsize + 4)
    return fixed + max(cost.text + scoring, layer)


def _steps(plan: Plan, setup: Setup) -> int:
    """Bytes of the work space of an answer's steps."""
    shape, step, prompt = setup.shape, setup.rules.step, setup.rules.prompt
    prefers = prompt is not None and prompt.prefer is not None
    work = 5 * sum(plan.needed) if prefers else 0  # which rows leave last, as the policy sees them
    if step is None:
        return work
    heads = shape.layers * shape.kv_heads
    width = max(plan.needed) // shape.kv_heads if plan.pool is None else sum(plan.needed) // heads
    by_kernel = step.name in setup.ops.evict or step.needs_query
    if not setup.gpu and (prefers or any(shape.windows) or not by_kernel):
        work += 9 * heads * (width + 16)  # which rows a head uses
    return work if step.evict_first else work + 4 * shape.layers * shape.heads * (width + 16)


def held_after(plan: Plan, setup: Setup, steps: int) -> int:
    """Bytes of the rows held when `steps` tokens of the answer to a first prompt were fed. For
    layers with a sliding window this is an upper bound, because rows slide out one by one."""
    shape, rules, heads = setup.shape, setup.rules, setup.shape.kv_heads
    now, later = (
        [n if w is None else min(n, w - 1) for w in shape.windows]
        for n in (plan.tokens, plan.tokens + steps)
    )
    row = rules.row_nbytes(shape, setup.kv)
    if plan.pool is not None:
        bound = plan.pool
        if rules.step is None:
            bound = min(plan.pool, heads * sum(now)) + heads * shape.layers * steps
        return row * min(heads * sum(later), bound)
    totals, count = plan.totals, 0
    if rules.stride and plan.rows is not None:
        totals = [heads * plan.rows] * shape.layers
    for layer, window in enumerate(shape.windows):
        seen = now[layer]
        if rules.stride and window is not None:  # rows leave when the next block begins
            seen = min(plan.tokens, window - 1 + (plan.tokens - 1) % rules.stride + 1)
        after, bound = heads * seen, heads * max(seen, plan.rows or 0)
        if totals is not None:
            after, bound = min(totals[layer], after), totals[layer]
        if rules.step is None:
            bound = after + heads * steps
        count += min(max(heads * later[layer], after), bound)
    return row * count

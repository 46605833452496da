"""The four axes of a policy: what a row is worth, which rows may go, how many rows each layer and
head gets, who stays. A prompt policy answers them once at the end of every prompt, a step policy
picks one victim a head while an answer is written.

Everywhere: a higher score stays; rows are compared by position, never by slot; ties keep the
younger row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minikv import kernels
from minikv.errors import UsageError
from minikv.kernels.dispatch import Kernels
from minikv.policies import selection

ALL = 1 << 62
"""As a number of observed queries: every query of the prompt."""


class Moments:
    """Running mean and covariance of a layer's queries before rotation."""

    def __init__(self, heads: int, group: int, size: int, device: torch.device) -> None:
        self.count = 0
        self._sum = torch.zeros((heads, group, size), dtype=torch.float64, device=device)
        self._outer = torch.zeros((heads, group, size, size), dtype=torch.float64, device=device)

    def add(self, q: Tensor, angle: Tensor) -> None:
        """Queries [H, G, T, D] that were turned by angle [T, D / 2]."""
        q = q.to(torch.float64)
        one, two = q.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        q = torch.cat((one * cos + two * sin, two * cos - one * sin), -1)
        self.count += q.shape[2]
        self._sum += q.sum(2)
        self._outer += q.transpose(2, 3) @ q

    def normal(self) -> tuple[Tensor, Tensor]:
        """Mean [H, G, D] and covariance [H, G, D, D] (population), float32."""
        mean = self._sum / max(1, self.count)
        covariance = self._outer / max(1, self.count) - mean[..., None] * mean[..., None, :]
        return mean.to(torch.float32), covariance.to(torch.float32)


@dataclass(frozen=True, slots=True)
class PromptView:
    """One layer at the end of a prompt, before eviction: old and new rows together.

    pos [H, N] int64, -1 where a head has no row or only one that its window no longer sees;
    mass [H, G, N] and squares [H, N] float32: what the last `observed` queries gave each row
    (`kernels.observe`), None when nobody asked; key and value fetch [H, N, D] on demand (rows
    with pos -1 hold anything); carried: the step policy's columns [H, N] from before the prompt,
    zero for new rows; output: the layer's output projection [H, G, D, hidden], if it is known;
    turns: the first position of every prompt so far and the one after its last, this one included;
    queries: moments of the prompt's, if the scorer asked; rotary [D / 2]: angle per position;
    budget: rows per head that the layer may keep beside pinned ones; causal: no observed query saw
    a row after it; below() int64 [H, N]: bit i is set if the i-th query from the end gave the row
    less than an even share (of the last queries that the step policy's `prompt_history` asks for).
    attention(heads) float32 [h, G, W, N]: what each of the `observed` queries gave each row of some
    heads, where the scorer's evidence says `each_query`; lengths [W]: the length of the layer's
    input vector (after its norm) at these queries, where it says `lengths`; predicted [P]: the
    probability that the network gave the token at a position, 0 where that is not known, where it
    says `predicted`.
    peak [H, N] float32: what `Scorer.peak` made of a second pass over the prompt, 0 for rows from
    before it; None where there was none. asks: the prompt only asks about what was read before.
    ops: who computes.
    """

    layer: int
    position: int
    pos: Tensor
    observed: int
    mass: Tensor | None
    squares: Tensor | None
    key: Callable[[], Tensor]
    value: Callable[[], Tensor]
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    output: Callable[[], Tensor] | None = None
    turns: Sequence[tuple[int, int]] = ()
    queries: Moments | None = None
    rotary: Tensor | None = None
    budget: int = 0
    causal: bool = True
    below: Callable[[], Tensor] | None = None
    attention: Callable[[slice], Tensor] | None = None
    lengths: Tensor | None = None
    predicted: Tensor | None = None
    peak: Tensor | None = None
    asks: bool = False
    ops: Kernels = field(default_factory=Kernels)

    @property
    def live(self) -> Tensor:
        """bool [H, N]: rows that exist and can still be seen."""
        return self.pos >= 0


@dataclass(frozen=True, slots=True)
class StepView:
    """F heads that may have to give up rows: a layer's, or those of all layers. Padded to N rows.

    pos [F, N] int64, -1 for padding and for rows that may not be judged; cap [F]: rows a head
    keeps; position: tokens seen, the newest row included unless the policy evicts first; columns:
    the policy's own, [F, N] each; layer and head [F]; attention [F, N]: what the current query gave
    each row, mean over G. A policy that evicts first and needs the query has that [F, G, D] and the
    new row's key [F, 1, D] instead; of a block of t rows all queries [F, G * t, D] and keys
    [F, t, D].
    keys(heads) is [f, N, D]: the keys of all rows of the heads int64 [f], indices below F.
    layer_index: the layer, where all heads are of one. readable: numbers may be read without
    waiting for a device.
    """

    position: int | Tensor
    pos: Tensor
    cap: Tensor
    layer: Tensor
    head: Tensor
    columns: Mapping[str, Tensor]
    attention: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    keys: Callable[[Tensor], Tensor] | None = None
    layer_index: int | None = None
    readable: bool = False


@dataclass(frozen=True, slots=True)
class StepAppend:
    """What a kernel reads that evicts and then writes a new row, in one layer before attention.

    query [H, G, D]; key, value [H, D]; start, length, cap, free_slot int64 [H]; position int64 []:
    the new row's; columns: those of the arena [R, ...], and bool "leaves_last" [R] where some rows
    leave after all others; undo_rows: where overwritten rows are kept, [H, ...] by column; no
    length exceeds `width`; positions below `pinned` never leave; shown int32 [R]: the positions
    that the policy is shown, which are columns["pos"] where no row leaves last. turn: cosine and
    sine [1, 1, D], and where the rotated queries go [H, G, D], if queries and keys must be rotated
    first.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    start: Tensor
    length: Tensor
    cap: Tensor
    free_slot: Tensor
    position: Tensor
    columns: Mapping[str, Tensor]
    undo_rows: Mapping[str, Tensor]
    width: int
    pinned: int
    shown: Tensor
    turn: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What a kernel reads that makes room in full heads of all layers, before attention.

    rows: `kernels.Rows` before the new row, `newest` being the position that it will have; slot and
    free_slot int64 [L, H], in place: where the new row goes, and the row that it overwrites;
    columns: all of the arena [R, ...] by name; undo_rows: where overwritten rows are kept, [L * H,
    ...] by name.
    """

    rows: kernels.Rows
    free_slot: Tensor
    slot: Tensor
    columns: Mapping[str, Tensor]
    undo_rows: Mapping[str, Tensor]

    @property
    def heads(
        self,
    ) -> tuple[kernels.Rows, Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]]:
        """What every kernel's arguments begin with."""
        return self.rows, self.free_slot, self.slot, self.columns, self.undo_rows


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a kernel reads that ends a step for all heads: statistics, then victims.

    logits float32 [L, H, G, C] and lse [L, H, G] as attention left them; rows: `kernels.Rows`;
    accepted bool []: where it is false nothing is written; free_slot int64 [L, H], in place: the
    row that leaves, or -1; columns: the policy's, [R] each; quota: what `StepPolicy.quota` made of
    the caps; window int64 [L]: rows that a layer's query sees at most.
    """

    logits: Tensor
    lse: Tensor
    rows: kernels.Rows
    accepted: Tensor
    free_slot: Tensor
    columns: Mapping[str, Tensor]
    quota: Tensor | None
    window: Tensor

    @property
    def heads(self) -> tuple[Tensor, Tensor, kernels.Rows, Tensor, Tensor]:
        """What every kernel's arguments begin with."""
        return self.logits, self.lse, self.rows, self.accepted, self.free_slot


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a scorer reads and protects.

    `observe`: number of last prompt queries whose attention it reads (ALL: every one). `asks`:
    the choice depends on what was asked. `sinks` and `window`: rows that are protected at either
    end, for the smallest useful budget. Without `causal` an observed query also sees the rows after
    it. `queries_from`: it reads the moments of the prompt's queries from this position on.
    `second_pass`: it scores by the queries of further texts (`Scorer.second_pass`) in place of the
    prompt's own. `adds_up`: scores are at least 0 and can be added and multiplied, as attention
    can; if not, only their order means something. `each_query`, `lengths`, `predicted`: it reads
    what `PromptView` has under `attention`, `lengths` and `predicted`; with a second pass,
    `RepeatView.lengths`. `whole_layers`: the first layers, which keep every row, above the budget.
    """

    observe: int = 0
    asks: bool = False
    sinks: int = 0
    window: int = 0
    causal: bool = True
    queries_from: int | None = None
    second_pass: bool = False
    adds_up: bool = True
    each_query: bool = False
    lengths: bool = False
    predicted: bool = False
    whole_layers: int = 0


@dataclass(frozen=True, slots=True)
class Wording:
    """How a network is asked to repeat what it has read, in tokens. first: to repeat all of it;
    later: to repeat the part that begins behind the tokens that follow; answer: what its template
    puts between a question and its answer."""

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """A further text, in tokens, and the rows begin .. end - 1 of the prompt that it scores."""

    ids: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RepeatView:
    """T queries of a repeat in one layer, and the rows over which they are compared.

    query [H, G, T, D]; at int64 [T]: their positions; first: the conversation's first rows, which
    never leave; chunk: the rows that are scored; own: those of the repeat itself so far, each as
    `kernels.Part`; value() [H, n, D]: of the chunk; output: as in `PromptView`; lengths float32
    [T]: of the layer's input vector (after its norm) at the queries, if the scorer asked; lse
    float32 [H, G, T]: the log-sum-exp of the queries' logits over all of these rows, where it is
    known. ops: who computes.
    """

    layer: int
    query: Tensor
    at: Tensor
    first: Sequence[kernels.Part]
    chunk: kernels.Part
    own: kernels.Part
    window: int | None
    value: Callable[[], Tensor]
    output: Callable[[], Tensor] | None = None
    lengths: Tensor | None = None
    lse: Tensor | None = None
    ops: Kernels = field(default_factory=Kernels)


def blocks(heads: int, each: int, most: int) -> Iterator[slice]:
    """So many heads in slices, each of them with at most `most` numbers, or one head. each: numbers
    that a head has."""
    count = max(1, most // max(1, each))
    yield from (slice(lo, min(lo + count, heads)) for lo in range(0, heads, count))


class Scorer(ABC):
    """What a row is worth and which rows must stay: the first two of the four answers."""

    @property
    @abstractmethod
    def evidence(self) -> Evidence:
        """What it reads and protects."""

    @abstractmethod
    def score(self, view: PromptView) -> Tensor:
        """float32 [H, N]: what each row is worth. Values where the view has no row are ignored."""

    def protected(self, view: PromptView) -> Tensor:
        """bool [H, N]: rows that stay whatever their score; the sinks and the window."""
        return ends(view, self.evidence.sinks, self.evidence.window)

    def free(self, view: PromptView) -> Tensor:
        """bool [H, N]: the other rows, which stay or leave by their score."""
        return view.ops.divide(view.pos, self.protected(view), 0)[1]

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        """What it knows of a row and needs again after a later prompt; 0 for rows of an answer."""
        return {}

    def state(self, view: PromptView) -> dict[str, Tensor]:
        """These columns [H, N] after a prompt, from `view.carried`."""
        return {}

    def second_pass(
        self, ids: Sequence[int], first: int, words: Wording, room: int
    ) -> Sequence[Repeat]:
        """Further texts for a prompt of `ids`, if `evidence.second_pass`; none if it cannot be had.

        Each is fed behind the whole prompt before any row leaves. Nothing of it is stored. The
        first `first` rows of the prompt need no score. A text has at most `room` tokens. How long
        the texts are does not depend on the ids.
        """
        raise NotImplementedError

    def peak(self, view: RepeatView) -> Tensor:
        """float32 [H, n]: what the queries of a repeat give the rows that it scores. Of several
        answers about a row the largest counts."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Candidates:
    """The rows of a layer that compete for what is left of its budget: those that are free, with
    their scores float32 [H, N] and free bool [H, N]. counted: how many they are, int64 [H], where
    that is known."""

    view: PromptView
    scorer: Scorer
    scores: Tensor
    free: Tensor
    counted: Tensor | None = None

    @property
    def have(self) -> Tensor:
        """int64 [H]: how many rows of each head are free."""
        return self.free.sum(1) if self.counted is None else self.counted


class LayerAllocator:
    """How many rows each layer keeps. This one: all the same."""

    def rows(self, layers: int, budget: int, most: int, least: int, protected: int) -> list[int]:
        """Mean rows per head of each layer, summing to layers x budget (a release's rounding
        aside).

        most: what a head could hold at all; least: what it needs; protected: sinks and window.
        """
        return [budget] * layers


class GlobalAllocator(ABC):
    """One budget for all layers and heads: the best rows of all stay, wherever they are."""

    @abstractmethod
    def worth(self, rows: Candidates) -> Tensor:
        """float32 [H, N]: what each row is worth beside those of other layers."""


class HeadAllocator:
    """How many of a layer's free rows each head keeps. This one: all the same, as far as a head
    has rows; what it cannot use goes to the others.

    `drift`: rows per KV head by which the total may be exceeded.
    """

    @property
    def drift(self) -> int:
        return 0

    def check(self, scorer: Scorer) -> None:
        """Raise UsageError if it does not go with the scorer."""

    def share(self, rows: Candidates, total: Tensor, most: int) -> Tensor:
        """int64 [H], summing to `total` int64 [] <= most, or to all free rows if they are fewer.

        No head gets more than it has free rows.
        """
        heads = len(rows.free)
        return rows.view.ops.share(total.expand(heads), heads, rows.have, total)


class Selector:
    """Who stays. This one: the best rows of each head."""

    def check(self, scorer: Scorer) -> None:
        """Raise UsageError if it does not go with the scorer."""

    def select(self, rows: Candidates, counts: Tensor, most: int) -> Tensor:
        """bool [H, N]: counts[h] <= most of each head's free rows, or all of them if they are
        fewer; counts int64 [H]."""
        return rows.view.ops.best(rows.scores, rows.view.pos, rows.free, counts, most)


class Reweighter(ABC):
    """Other scores for a part of the rows."""

    @abstractmethod
    def select(self, rows: Candidates, counts: Tensor, most: int, selector: Selector) -> Tensor:
        """As `Selector.select`; `selector` chooses by the new scores."""


class Preference(ABC):
    """Rows that leave after all others, at the prompt and while an answer is written."""

    @abstractmethod
    def prefers(self, pos: Tensor, turns: Sequence[tuple[int, int]]) -> Tensor:
        """bool, of the shape of pos int64: these rows. turns: see `PromptView`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPolicy:
    """A one-shot method: it fires at the end of every prompt. Raises UsageError for parts that do
    not go together."""

    name: str
    scorer: Scorer
    layers: LayerAllocator | GlobalAllocator = field(default_factory=LayerAllocator)
    heads: HeadAllocator = field(default_factory=HeadAllocator)
    selector: Selector = field(default_factory=Selector)
    reweighter: Reweighter | None = None
    preference: Preference | None = None

    def __post_init__(self) -> None:
        self.heads.check(self.scorer)
        self.selector.check(self.scorer)
        plain = type(self.heads) is HeadAllocator and type(self.selector) is Selector
        if isinstance(self.layers, GlobalAllocator) and (self.reweighter or not plain):
            raise UsageError(
                f"{self.name}: one budget for all layers leaves nothing to share among heads",
                "leave out the parts that do (ada, draw, kvcrush, critical)",
            )
        if isinstance(self.layers, GlobalAllocator) and self.evidence.whole_layers:
            raise UsageError(
                f"{self.name}: one budget for all layers leaves no layer whole", "leave out `skip`"
            )

    @property
    def evidence(self) -> Evidence:
        """What its scorer reads and protects."""
        return self.scorer.evidence

    def layer_rows(self, layers: int, budget: int, most: int, least: int) -> list[int]:
        """See `LayerAllocator.rows`."""
        assert isinstance(self.layers, LayerAllocator)
        protected = self.evidence.sinks + self.evidence.window
        rows = self.layers.rows(layers, budget, most, least, protected)
        whole = min(self.evidence.whole_layers, layers)
        return [max(most, n) for n in rows[:whole]] + rows[whole:]

    def select(self, rows: Candidates, counts: Tensor, most: int) -> Tensor:
        """See `Selector.select`."""
        if self.reweighter is None:
            return self.selector.select(rows, counts, most)
        return self.reweighter.select(rows, counts, most, self.selector)

    def keep(self, view: PromptView, total: int, pinned: int = 0, least: int = 0) -> Tensor:
        """bool [H, N]: the rows that stay, `total` over the layer's heads.

        Rows at positions below `pinned` never leave, and every head gets `least` rows beside them.
        """
        ops = view.ops
        stays, free, counts = ops.divide(view.pos, self.scorer.protected(view), pinned)
        staying, own, have = counts
        scores = self.scorer.score(view)
        left = (total - staying.sum()).clamp(min=0)
        if self.preference is not None:
            preferred = self.preference.prefers(view.pos, view.turns) & free
            count = preferred.sum()
            fits = count <= left  # if not, there is room for some of them and for nothing else
            stays = stays | (preferred & fits)
            free = torch.where(fits, free & ~preferred, preferred)
            left = left - count * fits
            own, have = (stays & (view.pos >= pinned)).sum(1), free.sum(1)
        rows = Candidates(view, self.scorer, scores, free, have)
        counts = ops.ensure_least(self.heads.share(rows, left, total), own, have, least)
        return stays | self.select(rows, counts, total + len(free))

    def global_key(self, view: PromptView, pinned: int = 0, least: int = 0) -> Tensor:
        """int64 [H, N]: an order of the rows of all layers, for a `GlobalAllocator`; larger is
        better, `selection.NOT_FREE` where there is no row. Arguments as `keep`."""
        assert isinstance(self.layers, GlobalAllocator)
        sure, free, (_, own, have) = view.ops.divide(view.pos, self.scorer.protected(view), pinned)
        rows = Candidates(view, self.scorer, self.scorer.score(view), free, have)
        worth = self.layers.worth(rows)
        lack = (least - own).clamp(min=0)
        sure = sure | view.ops.best(worth, view.pos, free, lack, least)
        preferred = None
        if self.preference is not None:
            preferred = self.preference.prefers(view.pos, view.turns) & free
        key = view.ops.order_key(worth, view.pos, free)
        return selection.tiered_key(key, view.pos, sure, preferred)


def ends(view: PromptView, sinks: int, recent: int) -> Tensor:
    """bool [H, N]: the conversation's first `sinks` rows and the `recent` youngest."""
    return view.ops.ends(view.pos, sinks, max(0, view.position - recent))


class StepPolicy(ABC):
    """A method that evicts while an answer is written, once a head is at its cap.

    `score` and `update` are the rule in torch: its specification, and what runs where there is no
    kernel. `end_kernel`, `update_kernel`, `room_kernel` and `append_kernel` name the kernel that
    does the same faster.

    evict_first: the victim leaves before attention and the current query does not see it (the head
    then needs exactly cap rows); otherwise it is chosen by this step's attention. needs_query: one
    that evicts first reads the current query or key, so that it chooses layer by layer; without it
    the victims of all layers are chosen at once, before the first one. sinks and recent:
    rows at either end that never leave. block: a head gives up so many rows at once, when it is so
    many over its cap. observe: queries of a prompt from which the columns start (0: they start
    without). prompt_history: last queries of a prompt, at most 32, that are shown one by one
    (`PromptView.below`). needs_attention: `score` reads `StepView.attention`. norm_column: the
    only column that `init_state` sets, to the Euclidean norm of the key, if there is one; a kernel
    that writes the row then writes it, too.
    """

    name: str
    evict_first: bool = False
    needs_query: bool = True
    sinks: int = 0
    recent: int = 1
    block: int = 1
    observe: int = 0
    prompt_history: int = 0
    needs_attention: bool = False
    norm_column: str = ""

    def for_prefill(self) -> StepPolicy:
        """The policy that reads a prompt in blocks in this one's place (`BlockPrefill`)."""
        return self

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        """State per row; that of a new row starts at zero, then gets what `init_state` says."""
        return {}

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns [H, N] after a prompt, from `old` (zero for new rows) and what the view shows."""
        return {}

    def init_state(self, layer: int, key: Tensor) -> dict[str, Tensor]:
        """Columns [H] of the rows that an answer adds to a layer, whose keys are [H, D]."""
        return {}

    def attention(self, logits: Tensor, lse: Tensor, live: Tensor) -> Tensor:
        """float32 [..., N]: what a query gives each row of a head, its G query heads joined: the
        `probabilities` of `update`. This one: their mean.

        logits float32 [..., G, N], lse [..., G]; live bool [..., N]: rows that the query sees; the
        logits of others may be anything.
        """
        return (logits - lse[..., None]).exp_().mean(-2).masked_fill_(~live, 0.0)

    def update(  # noqa: B027
        self, columns: Mapping[str, Tensor], probabilities: Tensor, visible: Callable[[], Tensor]
    ) -> None:
        """Add one query's `attention` in place. All [R]; 0 where a row is unused.

        visible() is float32 [R]: how many rows the query saw in a row's head.
        """

    @abstractmethod
    def score(self, view: StepView, count: int) -> tuple[Tensor, Tensor]:
        """(scores float32, allowed bool) [F, N]: the `count` allowed rows of lowest score leave."""

    def quota(self, cap: Tensor) -> Tensor | None:
        """What its kernel must know of the caps int64 [L, H], of the same shape; or None."""
        return None

    def end_kernel(self, ops: Kernels, end: StepEnd) -> bool:
        """`update`, `score` and the choice of victims by a kernel. False if `ops` has none."""
        return False

    def update_kernel(self, ops: Kernels, end: StepEnd) -> bool:
        """`update` by a kernel, at the end of a step that evicts nothing (see `block`). False if
        `ops` has none."""
        return False

    def room_kernel(self, ops: Kernels, room: StepRoom) -> bool:
        """For `evict_first` without `needs_query`: `score` and the choice of victims by a kernel,
        for all layers. False if `ops` has none."""
        return False

    def append_kernel(self, ops: Kernels, append: StepAppend) -> bool:
        """For `evict_first` that needs the query: `score`, the choice of victims and the new row,
        in one layer."""
        return False


def policy_columns(prompt: PromptPolicy | None, step: StepPolicy | None) -> dict[str, torch.dtype]:
    """The columns that a pair of policies keeps of a row."""
    mine = prompt.scorer.columns if prompt is not None else {}
    return {**mine, **(step.columns if step is not None else {})}


def smallest_budget(prompt: PromptPolicy | None, step: StepPolicy | None, stride: int = 0) -> int:
    """Rows per head below which a pair of policies cannot work: sinks + window + 1. In blocks of
    `stride` rows those of a block are inside the cap when it attends, if `step` evicts before."""
    sinks = max(prompt.evidence.sinks if prompt else 0, step.sinks if step else 0)
    window = max(prompt.evidence.window if prompt else 0, step.recent if step else 0)
    block = stride - 1 if stride and step is not None and step.evict_first else 0
    return sinks + window + 1 + block


def unprotected(view: StepView, policy: StepPolicy, count: int = 1) -> Tensor:
    """bool [F, N]: rows that may leave; all but the newest where `count` must leave and fewer are
    neither sinks nor recent."""
    newest = view.position - 1
    free = (view.pos >= policy.sinks) & (view.pos <= newest - policy.recent)
    few = free.sum(1, keepdim=True) < count
    return free | (few & (view.pos >= 0) & (view.pos < newest))


def oldest_of_lowest(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """int64 [F]: of each head's free rows with the lowest score the oldest; all [F, N].

    A head needs a free row: nothing sensible comes of one that has none.
    """
    scores = scores.masked_fill(~free, torch.inf)
    tied = free & (scores <= scores.amin(1, keepdim=True))
    return pos.masked_fill(~tied, _NEVER).argmin(1)


def leaving(scores: Tensor, pos: Tensor, free: Tensor, counts: Tensor) -> Tensor:
    """bool [F, N]: each head's counts [F] free rows of lowest score, of equal ones the oldest."""
    young = pos.argsort(dim=1, stable=True)
    ranked = scores.masked_fill(~free, torch.inf).gather(1, young).argsort(dim=1, stable=True)
    order = young.gather(1, ranked)
    places = torch.arange(pos.shape[1], device=pos.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return (rank < counts[:, None]) & free


_NEVER = 1 << 40

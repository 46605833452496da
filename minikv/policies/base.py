"""The base classes of policies, and the views that they receive.

A policy answers four questions: what a row is worth, which rows may leave, how many rows each layer
and head keeps, and which rows stay. A prompt policy answers them once, at the end of every prompt.
A step policy picks the victims of each head while an answer is written.

In all of them, rows with higher scores stay; of equal scores, the younger row stays. Rows are
ordered by position, never by their index in the arena.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.policies import selection
from minikv.policies.counter_rng import uniform
from minikv.policies.moments import Moments, Rotation
from minikv.policies.repeats import Repeat, RepeatView, Wording

T = TypeVar("T")

ALL = 1 << 62
"""A number of observed queries that means every query of the prompt."""

Columns = Mapping[str, Tensor]

Visible = Callable[[], Tensor]
"""Returns how many rows a query saw; computed on demand."""


@dataclass(frozen=True, slots=True)
class PromptView:
    """One layer at the end of a prompt, before eviction: rows of earlier turns, then the prompt's
    rows.

    layer: its index. position: tokens counted, this prompt's included.
    pos int64 [H, N]: positions; -1 where a head has no row or its window no longer sees the row.
    observed: how many of the last queries were observed.
    mass float32 [H, G, N]: the sum of their attention to each row; squares float32 [H, N]: the sum
        of the squares of its mean over G (`kernels.add_attention_mass`). None if nothing was
        observed.
    key() and value() [H, N, D]: fetched on demand. Rows with pos -1 may hold any value.
    carried: the policies' columns [H, N] from before the prompt; zero for new rows.
    output() [H, G, D, hidden]: the layer's output projection; None if not known.
    turns: first position and end of every prompt so far, this one included.
    queries: moments of the prompt's queries; None unless `Evidence.queries_from` is set.
    rotary: how the network rotates queries and keys; None if not known.
    budget: rows per head that the layer may keep in addition to pinned ones.
    causal: no observed query saw a row after its own.
    below() int64 [H, N]: bit i is set if the i-th query from the end gave the row less than an even
        share of its attention; for the last `StepPolicy.prompt_history` queries.
    attention(heads) float32 [h, G, W, N]: the attention of each observed query to each row, for a
        slice of the heads; None unless `Evidence.each_query`.
    largest(scale) float32 [H, G, N]: the most attention that an observed query gives each row,
        after each query's attention is multiplied by `scale` [W].
    lengths float32 [W]: norms of the layer's input (after its norm) at the observed queries; None
        unless `Evidence.lengths`.
    sentences int64 [position]: how many sentences ended before each token of the conversation; None
        unless `Evidence.sentences`, or if the cache was not told.
    peak float32 [H, N]: the scores of `Scorer.peak` from a second pass over the prompt, 0 for rows
        from before it; None if there was none.
    asks: the prompt only asks about earlier text. ops: the kernels.
    earlier: how many of the first rows may be out of order; the others follow in order of position.
        None: all.
    shared: results for all layers of the prompt (`once`).
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
    rotary: Rotation | None = None
    budget: int = 0
    causal: bool = True
    below: Callable[[], Tensor] | None = None
    attention: Callable[[slice], Tensor] | None = None
    largest: Callable[[Tensor | None], Tensor] | None = None
    lengths: Tensor | None = None
    sentences: Tensor | None = None
    peak: Tensor | None = None
    asks: bool = False
    ops: Kernels = field(default_factory=Kernels)
    earlier: int | None = None
    shared: dict[object, Any] = field(default_factory=dict)
    _found: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def live(self) -> Tensor:
        """bool [H, N]: rows that exist and that the next token can still see."""
        return self.pos >= 0

    @property
    def order(self) -> Tensor:
        """int64 [H, `earlier`]: the first rows by position. Computed once."""
        return self.once("order", lambda: selection.order_of(self.pos[:, : self.earlier]))

    @property
    def able(self) -> Tensor:
        """float32 [H, N]: how many of the observed queries could see each row. Computed once."""
        first = self.position - self.observed
        last = None if self.causal else first  # None: every query saw every row
        return self.once("able", lambda: (self.position - self.pos.clamp(first, last)).float())

    @property
    def mean(self) -> Tensor:
        """float32 [H, N]: `mass`, the mean over G."""
        assert self.mass is not None
        return self.mass.mean(1)

    def uniform(self, seed: int) -> Tensor:
        """float32 [H, N] in (0, 1): a random number for each row."""
        heads = torch.arange(len(self.pos), device=self.pos.device)[:, None]
        return uniform(seed, self.layer, heads, self.position, self.pos)

    def once(self, key: object, make: Callable[[], T], *, shared: bool = False) -> T:
        """The result of `make`, computed at the first call with this key. shared: the same for
        other layers of the prompt."""
        known = self.shared if shared else self._found
        if key not in known:
            known[key] = make()
        found: T = known[key]
        return found

    def divide(self, sinks: int, recent: int, pinned: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows stay because they are among the first `sinks`, the last `recent` or the first
        `pinned` positions; which rows are free; and how many: see `divide` in
        kernels/evict/plain.py. Computed once."""
        young = max(0, self.position - recent)
        return self.once(
            ("divide", sinks, recent, pinned),
            lambda: self.ops.divide(self.pos, sinks, young, pinned),
            # In a first prompt, all heads of all layers without a window hold the same rows.
            shared=self.pos.stride(0) == 0,
        )


@dataclass(frozen=True, slots=True)
class StepView:
    """F heads that may have to evict, of some or all layers, padded to N rows.

    position: tokens counted, with the newest row unless the policy evicts first.
    pos int64 [F, N]: positions, all below `context`; -1 for padding and for pinned rows.
    free bool [F, N]: the rows that may leave (`StepPolicy.free`).
    cap int64 [F]: rows that a head may keep. count: the most rows that leave a head, an int or
        int64 [F, 1].
    layer: the index of the first layer; each has `heads` adjacent heads.
    column(name) [F, N]: one of the policy's columns.
    attention float32 [F, N]: the attention of the current query to each row, joined by
        `StepPolicy.attention`. None before attention.
    query and key: for a policy that evicts first and needs them, in one layer: the query [F, G, D]
        and the new row's key [F, 1, D]; for a block of t rows of a prompt [F, G * t, D] and [F, t,
        D].
    keys(heads) and values(heads) [f, N, D]: of all rows of the heads int64 [f], which are indices
        below F.
    readable: values may be read without waiting for a device.
    learnt float32 [F, n]: what the policy learnt of the queries; None if it learns nothing.
    rotary: how the network rotates queries and keys; None if not known.
    """

    position: int | Tensor
    pos: Tensor
    free: Tensor
    cap: Tensor
    count: int | Tensor
    layer: int
    heads: int
    column: Callable[[str], Tensor]
    attention: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    keys: Callable[[Tensor], Tensor] | None = None
    values: Callable[[Tensor], Tensor] | None = None
    readable: bool = False
    context: int = 0
    learnt: Tensor | None = None
    rotary: Rotation | None = None

    def uniform(self, seed: int) -> Tensor:
        """float32 [F, N] in (0, 1): a random number for each row."""
        each = torch.arange(len(self.pos), device=self.pos.device)[:, None]
        layer, head = self.layer + each // self.heads, each % self.heads
        return uniform(seed, layer, head, self.position, self.pos)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The inputs that a scorer reads, and the rows that it protects.

    observe: how many of the prompt's last queries are observed (ALL: every one).
    asks: the choice depends on the question.
    sinks and window: how many first and last rows are protected; they determine the smallest useful
        budget.
    causal: if False, an observed query also sees the rows after its own.
    queries_from: it reads the moments of the prompt's queries from this position on.
    second_pass: it scores with the queries of further texts (`Scorer.second_pass`) instead of the
        prompt's own.
    adds_up: scores are at least 0 and can be added and multiplied, as attention can; if False, only
        their order has a meaning.
    each_query, lengths and sentences: it reads `attention` and the fields of these names
        of `PromptView`; with a second pass `lengths` of `RepeatView`.
    whole_layers: how many first layers keep every row, in excess of the budget.
    copies, vectors, products and projects: the memory that it needs. copies: whether it reads `key`
        ("k"), `value` ("v") or both ("kv"). vectors: how many `blocks` of them in float32 exist at
        once; products: of as many numbers for each query head, made of them. projects: values are
        multiplied by the whole output projection. norms: how many `outputs.output_lengths` it reads
        for a value: "each" (one for each query head) or "one"; "" for none.
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
    sentences: bool = False
    whole_layers: int = 0
    copies: str = ""
    vectors: int = 0
    products: int = 0
    projects: bool = False
    norms: str = ""


class Scorer(ABC):
    """Decides what a row is worth and which rows must stay: the first two of the four questions."""

    axis = "scorer"
    differs: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def evidence(self) -> Evidence:
        """What the scorer reads and protects."""

    @abstractmethod
    def score(self, view: PromptView) -> Tensor:
        """float32 [H, N]: what each row is worth. Values where the view has no row are ignored."""

    def protected(self, view: PromptView) -> tuple[int, int]:
        """How many first and last positions stay regardless of their score: the sinks and the
        window."""
        return self.evidence.sinks, self.evidence.window

    def free(self, view: PromptView) -> Tensor:
        """bool [H, N]: the other rows, whose score decides whether they stay."""
        return view.divide(*self.protected(view))[1]

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        """Columns of the cache that carry a row's values to later prompts, with their dtypes. Rows
        of an answer have 0."""
        return {}

    def state(self, view: PromptView) -> dict[str, Tensor]:
        """The values of `columns` [H, N] after a prompt, from `view.carried`."""
        return {}

    def second_pass(
        self, ids: Sequence[int], first: int, words: Wording, room: int
    ) -> Sequence[Repeat]:
        """The further texts for a prompt of `ids`, if `evidence.second_pass`. Empty if `room` is
        too small for them.

        Each is fed after the whole prompt, before any row leaves. Its own rows are not stored. The
        first `first` rows of the prompt need no score. A text has at most `room` tokens. The
        lengths of the texts must not depend on the ids.
        """
        raise NotImplementedError

    def peak(self, view: RepeatView) -> Tensor:
        """float32 [H, n]: the scores that the queries of a repeat give to its chunk. A row that
        gets several scores keeps the largest."""
        raise NotImplementedError


class StepPolicy(ABC):
    """A method that evicts while an answer is written, once a head is at its cap.

    It is a rule in torch: `init` and `of_key` make the initial columns of a row, `update` adds a
    step's attention to them, and `score` says what each row is worth. If there is a faster kernel
    for all of this, it is registered under the policy's name (`Kernels.evict`).

    evict_first: the victim leaves before attention, so the current query does not see it, and a
        head needs exactly cap rows. Otherwise the victim is chosen after attention.
    needs_query: for `evict_first`: the policy reads the current query or key, so victims are chosen
        layer by layer. Without it, the victims of all layers are chosen before the first layer.
    sinks and recent: how many first and last rows never leave.
    block: a head evicts this many rows at once, when it is this many over its cap.
    observe: how many of a prompt's last queries the columns start from (0: none).
    prompt_history: how many of a prompt's last queries `PromptView.below` reports, at most 32.
    scratch: bytes of a row and head that `init` computes with, beside the columns.
    learns: it keeps statistics of the queries of all prompts and answers (`learn`).
    differs: from paper and release.
    """

    name: str
    differs: ClassVar[tuple[str, ...]] = ()
    evict_first: bool = False
    needs_query: bool = False
    learns: bool = False
    scratch: int = 0
    sinks: int = 0
    recent: int = 1
    block: int = 1
    observe: int = 0
    prompt_history: int = 0

    def for_prefill(self) -> StepPolicy:
        """The policy while a prompt is read in blocks (`BlockPrefill`): by default this one."""
        return self

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        """The policy's columns and their dtypes. The row of a new token starts with zeros; after
        its step it has the values of `of_key`."""
        return {}

    def init(self, view: PromptView) -> dict[str, Tensor]:
        """Columns [H, N] after a prompt; before it they were `view.carried`."""
        found = self.of_key(view.layer, view.key()[None]) if self.has_key_columns else {}
        return {name: values[0] for name, values in found.items()}

    def of_key(self, layer: int, key: Tensor) -> dict[str, Tensor]:
        """The columns [l, H, n] that depend only on a row's key. key [l, H, n, D]: of the l layers
        from `layer` on."""
        return {}

    @property
    def has_key_columns(self) -> bool:
        """Whether the policy implements `of_key`."""
        return type(self).of_key is not StepPolicy.of_key

    def attention(self, logits: Tensor, lse: Tensor, live: Tensor) -> Tensor:
        """float32 [..., N]: the attention of a query to each row of a KV head, its G query heads
        joined; the argument of `update`. This base class takes the mean over G.

        logits float32 [..., G, N]; lse [..., G]; live bool [..., N]: rows that the query sees. The
        logits of other rows may have any value.
        """
        return (logits - lse[..., None]).exp_().mean(-2).masked_fill_(~live, 0.0)

    def update(self, columns: Columns, attention: Tensor, visible: Visible) -> None:  # noqa: B027
        """Update the columns in place with one query's `attention`. All tensors have the same
        shape, e.g. [R]; attention is 0 for unused rows.

        visible() float32, of that shape: how many rows the query saw in the row's head.
        """

    def learnt_size(self, group: int, size: int) -> int:
        """How many numbers a policy that `learns` keeps of each head: G = `group`, D = `size`."""
        raise NotImplementedError

    def learn(self, learnt: Tensor, queries: Tensor) -> None:
        """Add queries float32 [F, G, T, D], before rotation, to the statistics `learnt` float32
        [F, n] of their heads, in place. They start as zeros."""
        raise NotImplementedError

    @abstractmethod
    def score(self, view: StepView) -> Tensor:
        """float32 [F, N]: what each row is worth. The rows with the lowest scores leave; infinity:
        this row must stay. Values where `view.free` is False are ignored."""

    def worth(self, view: StepView) -> Tensor:
        """The scores, infinite for rows that may not leave."""
        return self.score(view).masked_fill(~view.free, torch.inf)

    def free(
        self, pos: Tensor, position: int | Tensor, count: int | Tensor, *, readable: bool = False
    ) -> Tensor:
        """bool [F, N]: rows that may leave: those that are neither sinks nor recent, or, if these
        are fewer than `count`, all rows but the newest. The arguments are those of `StepView`."""
        found = (pos >= self.sinks) & (pos < position - self.recent)
        few = found.sum(1, keepdim=True) < count
        if readable and not bool(few.any()):
            return found
        return found | (few & (pos >= 0) & (pos < position - 1))

    def quota(self, cap: Tensor) -> Tensor | None:
        """A table for the policy's kernel, computed from cap int64 [L, H] and of the same shape;
        None if it needs none."""
        return None

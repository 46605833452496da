"""A prompt policy is made of parts: a scorer, and what carries worth on, shares the budget among
layers and heads, chooses the rows, replaces scores, or holds some rows back. Each part answers one
question.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from minikv.errors import UsageError
from minikv.policies.base import Evidence, PromptView, Scorer, StepPolicy
from minikv.policies.options import option
from minikv.policies.span import Span

_SURE, _PREFERRED = 0x7FFFFFFF << 32, 0x7FFFFFFE << 32  # above the key of every score


@dataclass(frozen=True)
class Candidates:
    """The rows of a layer that compete for the rest of its budget: those that are free bool [H, N],
    with scores float32 [H, N]. counted int64 [H]: how many these are, if known."""

    view: PromptView
    scorer: Scorer
    scores: Tensor
    free: Tensor
    counted: Tensor | None = None

    @cached_property
    def key(self) -> Tensor:
        """int64 [H, N]: the rows' `order_key`."""
        return self.view.ops.order_key(self.scores, self.view.pos, self.free)

    def best(self, counts: Tensor, most: int, also: Tensor | None = None) -> Tensor:
        """bool [H, N]: the counts[h] best of each head's rows, or all of them if they are fewer,
        and those in `also`. counts int64 [H]: at most `most` each."""
        return self.view.ops.best(self.key, counts, most, also)

    def wanted(self, total: Tensor, most: int) -> Tensor:
        """int64 [H]: how many of the layer's `total` best rows each head holds. total int64 [], at
        most `most`."""
        return self.view.ops.wanted(self.key, total, most)

    @property
    def have(self) -> Tensor:
        """int64 [H]: how many free rows each head has."""
        return self.free.sum(1) if self.counted is None else self.counted


# Each part answers a question (`axis`), and says how it `differs` from its paper and release.


@dataclass(frozen=True, slots=True)
class LayerAllocator:
    """How many rows each layer keeps. This base class gives every layer the same. So it replaces
    the one budget of a method, as in `kvzip+uniform` (the uniform threshold of KVzip's release,
    `layerwise` in kvpress)."""

    axis = "layers"
    name = "uniform"
    summary = "every layer keeps the same"
    differs: ClassVar[tuple[str, ...]] = ()

    def rows(self, layers: int, budget: int, most: int, least: int, protected: int) -> list[int]:
        """Mean rows per head of each layer. They sum to layers x budget, unless an option selects
        the rounding of a release.

        most: rows that a head could hold at most. least: rows that the policies need. protected:
        sinks and window.
        """
        return [budget] * layers


@dataclass(frozen=True, slots=True)
class GlobalBudget:
    """In place of layer and head budgets: the best rows of the whole cache stay, wherever they are
    (KVzip, arXiv 2505.23416, section 3.3; LayerDefensiveKV, arXiv 2510.13334; QuerySpan).
    `PromptPolicy.global_key` orders the rows.

    Scores of different layers are compared directly, so they need a common unit, as attention has.
    In addition, every head keeps the rows that the scorer protects, and a row that a decode step
    may evict. Only the best rows so far are kept while layers are read (`GlobalPool`), so peak
    memory is that of one layer.
    """

    axis = "layers"
    name = "global"
    summary = "one budget for all layers and heads"
    differs = (
        "scores are compared as they are, which suits attention; of key norms or a draw, layers "
        "may not be comparable",
        "every head keeps what its scorer protects and a token that an answer may overwrite; the "
        "releases may leave a head without any",
        "the releases hold every layer until all are scored; here the best tokens so far are held. "
        "The choice is the same",
    )


class HeadAllocator:
    """How many of a layer's free rows each head keeps. This base class gives every head the same;
    what a head has no rows for goes to the others.

    drift: rows per KV head by which the total may be exceeded.
    """

    axis = "heads"
    differs: ClassVar[tuple[str, ...]] = ()

    @property
    def drift(self) -> int:
        return 0

    def check(self, scorer: Scorer) -> None:
        """Raise UsageError if it cannot be combined with the scorer."""

    def share(self, rows: Candidates, total: Tensor, most: int) -> Tensor:
        """int64 [H]: rows for each head. They sum to `total` int64 [] (at most `most`), or to the
        number of free rows if that is less. No head gets more rows than it has free ones."""
        heads = len(rows.free)
        return rows.view.ops.share(rows.have, 0, 1, heads, rows.have, total)


class Selector:
    """Which rows stay. This base class keeps the best rows of each head."""

    axis = "select"
    differs: ClassVar[tuple[str, ...]] = ()

    def check(self, scorer: Scorer) -> None:
        """Raise UsageError if it cannot be combined with the scorer."""

    def select(self, rows: Candidates, counts: Tensor, most: int) -> Tensor:
        """bool [H, N]: counts[h] of each head's free rows, or all of them if they are fewer. counts
        int64 [H]: at most `most` each."""
        return rows.best(counts, most)


class Reweighter(ABC):
    """Replaces the scores of some of the rows before the selector chooses."""

    axis = "weigh"
    differs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def select(self, rows: Candidates, counts: Tensor, most: int, selector: Selector) -> Tensor:
        """As `Selector.select`; it passes the new scores to `selector`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The first `edge` and the last `edge` rows of each prompt leave after all others, both after a
    prompt and while an answer is written. They contain the question and the beginning of a
    document, which a later question may need although no scorer can know."""

    axis = "prefer"
    name = "turns"
    summary = "the ends of every turn"
    differs: ClassVar[tuple[str, ...]] = ()

    edge: int = option(8, "tokens at either end of a turn", (1, 4096))

    def prefers(self, pos: Tensor, turns: Sequence[tuple[int, int]]) -> Tensor:
        """bool, of the shape of pos int64: which rows these are. turns: see `PromptView`."""
        found = torch.zeros_like(pos, dtype=torch.bool)
        for begin, end in turns:
            inside = (pos >= begin) & (pos < end)
            found |= inside & ((pos < begin + self.edge) | (pos >= end - self.edge))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPolicy:
    """A method that evicts at the end of every prompt, made of one part for each question, in a
    field of its `axis`. Raises UsageError for parts that cannot be combined; which names cannot is
    for `registry`."""

    name: str
    scorer: Scorer
    carry: Span | None = None
    layers: LayerAllocator | GlobalBudget = field(default_factory=LayerAllocator)
    heads: HeadAllocator = field(default_factory=HeadAllocator)
    select: Selector = field(default_factory=Selector)
    weigh: Reweighter | None = None
    prefer: Turns | None = None

    def __post_init__(self) -> None:
        self.heads.check(self.scorer)
        self.select.check(self.scorer)
        if isinstance(self.layers, GlobalBudget) and self.evidence.whole_layers:
            raise UsageError(
                f"{self.name}: one budget for all layers leaves no layer whole", "leave out `skip`"
            )

    @property
    def evidence(self) -> Evidence:
        """What the scorer reads and protects, and what other parts read."""
        found = self.scorer.evidence
        if self.carry is not None:
            found = self.carry.evidence(found)
        if self.weigh is None:
            return found
        return replace(found, copies=found.copies or "v", projects=True)

    def scores(self, view: PromptView, free: Tensor) -> Tensor:
        """float32 [H, N]: what each row is worth. free bool [H, N]: the rows for which it
        decides."""
        scores, adds_up = self.scorer.score(view), self.scorer.evidence.adds_up
        if self.carry is None:
            return scores
        return self.carry.carried(view, scores, free, adds_up=adds_up)

    def layer_rows(self, layers: int, budget: int, most: int, least: int) -> list[int]:
        """See `LayerAllocator.rows`."""
        assert isinstance(self.layers, LayerAllocator)
        protected = self.evidence.sinks + self.evidence.window
        rows = self.layers.rows(layers, budget, most, least, protected)
        whole = min(self.evidence.whole_layers, layers)
        return [max(most, n) for n in rows[:whole]] + rows[whole:]

    def keep(self, view: PromptView, total: int, pinned: int = 0, least: int = 0) -> Tensor:
        """bool [H, N]: the rows that stay, `total` over all heads of the layer.

        Rows at positions below `pinned` never leave, and every head gets at least `least` rows
        beside them.
        """
        stays, free, counts = view.divide(*self.scorer.protected(view), pinned)
        staying, own, have = counts
        scores = self.scores(view, free)
        left = (total - staying.sum()).clamp(min=0)
        if self.prefer is not None:
            preferred = self.prefer.prefers(view.pos, view.turns) & free
            count = preferred.sum()
            fits = count <= left  # if not, only preferred rows compete for the room
            stays = stays | (preferred & fits)
            free = torch.where(fits, free & ~preferred, preferred)
            left = left - count * fits
            own, have = (stays & (view.pos >= pinned)).sum(1), free.sum(1)
        rows = Candidates(view, self.scorer, scores, free, have)
        counts = view.ops.ensure_least(self.heads.share(rows, left, total), own, have, least)
        most = total + len(free)
        if self.weigh is not None:
            return stays | self.weigh.select(rows, counts, most, self.select)
        if type(self.select) is Selector:  # in one launch
            return rows.best(counts, most, also=stays)
        return stays | self.select.select(rows, counts, most)

    def global_key(self, view: PromptView, pinned: int = 0, least: int = 0) -> Tensor:
        """int64 [H, N]: a key that orders the rows of all layers, for a `GlobalBudget`. Larger
        is better; `kernels.NOT_FREE` where there is no row. pinned and least: as for `keep`."""
        assert isinstance(self.layers, GlobalBudget)
        sure, free, (_, own, have) = view.divide(*self.scorer.protected(view), pinned)
        rows = Candidates(view, self.scorer, self.scores(view, free), free, have)
        sure = rows.best((least - own).clamp(min=0), least, also=sure)
        key, young = rows.key, view.pos.clamp(min=0)
        if self.prefer is not None:
            preferred = self.prefer.prefers(view.pos, view.turns) & free
            key = torch.where(preferred, _PREFERRED | young, key)
        return torch.where(sure, _SURE | young, key)


def policy_columns(prompt: PromptPolicy | None, step: StepPolicy | None) -> dict[str, torch.dtype]:
    """The columns that a pair of policies stores, with their dtypes."""
    prompt_columns = prompt.scorer.columns if prompt is not None else {}
    return {**prompt_columns, **(step.columns if step is not None else {})}


def smallest_budget(prompt: PromptPolicy | None, step: StepPolicy | None, stride: int = 0) -> int:
    """The least rows per head with which a pair of policies works: sinks + window + 1. With a
    `stride` and a `step` that evicts first, a block's rows must fit the cap as well: stride - 1
    more."""
    sinks = max(prompt.evidence.sinks if prompt else 0, step.sinks if step else 0)
    window = max(prompt.evidence.window if prompt else 0, step.recent if step else 0)
    block = stride - 1 if stride and step is not None and step.evict_first else 0
    return sinks + window + 1 + block

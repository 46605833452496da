"""The four axes of a policy: what a row is worth, which rows may go, how many rows each layer and
head gets, who stays. A prompt policy answers them once at the end of every prompt, a step policy
picks one victim a head while an answer is written.

Everywhere: a higher score stays; rows are compared by position, never by slot; ties keep the
younger row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PromptView:
    """One layer at the end of a prompt, before eviction: old and new rows together.

    pos [H, N] int64, -1 where a head has no row or only one that its window no longer sees;
    mass [H, G, N] and squares [H, N] float32: what the last `observed` queries gave each row
    (`kernels.observe`), None when nobody asked; key and value fetch [H, N, D] on demand (rows
    with pos -1 hold anything).
    """

    layer: int
    position: int
    pos: Tensor
    observed: int
    mass: Tensor | None
    squares: Tensor | None
    key: Callable[[], Tensor]
    value: Callable[[], Tensor]

    @property
    def live(self) -> Tensor:
        """bool [H, N]: rows that exist and can still be seen."""
        return self.pos >= 0


@dataclass(frozen=True, slots=True)
class StepView:
    """The F heads (of all layers) that must give up one row each. Padded to N rows.

    pos [F, N] int64, -1 for padding; cap [F]: rows a head keeps; position: tokens seen, the
    newest row included; columns: the policy's own, [F, N] each; layer and head [F]; query
    [F, G, D] is the current one for a policy that chooses before attention, else None.
    """

    position: int
    pos: Tensor
    cap: Tensor
    layer: Tensor
    head: Tensor
    columns: Mapping[str, Tensor]
    query: Tensor | None = None


Scorer = Callable[[PromptView], Tensor]
"""-> float32 [H, N]: what each row is worth. Values where the view has no row are ignored."""

Scope = Callable[[PromptView], Tensor]
"""-> bool [H, N]: rows that must stay whatever their score."""

Layers = Callable[[int, int], list[int]]
"""(L, budget) -> mean rows per head of each layer, summing to L x budget."""

Heads = Callable[[Tensor, Tensor, Tensor, int], list[int]]
"""(scores, pos, free [H, N], total) -> rows per head among the free ones, summing to total.

No head gets more than it has free rows, if the heads together have enough. Equal scores: the
younger row, then the first head.
"""

Selector = Callable[[PromptView, Tensor, Tensor, Sequence[int]], Tensor]
"""(view, scores [H, N], free bool [H, N], counts [H]) -> bool [H, N]: the chosen free rows."""


@dataclass(frozen=True, slots=True)
class PromptPolicy:
    """A one-shot method: it fires at the end of every prompt.

    `observe` is the number of last prompt queries whose attention the scorer reads; `asks` says
    whether the choice depends on what was asked; `sinks` and `window` are the rows that the
    scope keeps at either end, for the smallest useful budget; `drift` is how many rows per KV
    head `heads` may exceed its total by.
    """

    name: str
    scorer: Scorer
    scope: Scope
    heads: Heads
    layers: Layers
    select: Selector
    observe: int = 0
    asks: bool = False
    sinks: int = 0
    window: int = 0
    drift: int = 0


class StepPolicy(Protocol):
    """A method that evicts one row per head and step once the head is at its cap.

    `before`: the victim goes before attention and is not seen by the current query (the head
    then needs exactly cap rows); otherwise it is chosen from this step's probabilities.
    """

    @property
    def name(self) -> str: ...

    @property
    def before(self) -> bool: ...

    @property
    def sinks(self) -> int: ...

    @property
    def recent(self) -> int: ...

    @property
    def observe(self) -> int:
        """Queries of a prompt from which the columns start (0: they start at zero)."""
        ...

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        """Per-row state; a row that an answer adds starts at zero."""
        ...

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns [H, N] after a prompt, from `old` (zero for new rows) and the view's evidence."""
        ...

    def step(self, columns: Mapping[str, Tensor], probabilities: Tensor) -> None:
        """Add one query's attention in place. All [R], the mean over G; 0 where a row is unused."""
        ...

    def victims(self, view: StepView) -> Tensor:
        """int64 [F]: the column of each head's victim."""
        ...


def smallest_budget(prompt: PromptPolicy | None, step: StepPolicy | None) -> int:
    """Rows per head below which a pair of policies cannot work: sinks + window + 1."""
    sinks = max(prompt.sinks if prompt else 0, step.sinks if step else 0)
    window = max(prompt.window if prompt else 0, step.recent if step else 0)
    return sinks + window + 1


def best(scores: Tensor, pos: Tensor, free: Tensor, count: int) -> Tensor:
    """bool [N]: the `count` best of the free rows, or all of them when there are fewer."""
    rows = free.nonzero().squeeze(1)
    chosen = torch.zeros_like(free)
    if count >= len(rows):
        chosen[rows] = True
    elif count > 0:
        s = scores[rows]
        edge = torch.topk(s, count).values[-1]
        sure = s > edge
        tied = (s == edge).nonzero().squeeze(1)
        chosen[rows[sure]] = True
        left = count - int(sure.sum())
        young = torch.argsort(pos[rows[tied]], descending=True, stable=True)[:left]
        chosen[rows[tied[young]]] = True
    return chosen


def top(view: PromptView, scores: Tensor, free: Tensor, counts: Sequence[int]) -> Tensor:
    """Selector: the best rows of each head."""
    return torch.stack(
        [best(scores[h], view.pos[h], free[h], n) for h, n in enumerate(counts)]
    )


def even_layers(layers: int, budget: int) -> list[int]:
    """Layers: the same for all."""
    return [budget] * layers


def even_heads(scores: Tensor, pos: Tensor, free: Tensor, total: int) -> list[int]:
    """Heads: the same for all, as far as a head has rows; what it cannot use goes to the others."""
    return share([Fraction(total, len(free))] * len(free), free.sum(1).tolist(), total)


def share(wish: Sequence[Fraction], most: Sequence[int], total: int) -> list[int]:
    """Whole numbers near `wish` (which sums to `total`), each <= most, summing to `total` exactly.

    Largest remainder, ties to the first. When a wish exceeds its `most`, the excess is spread
    evenly over the rest. The sum is min(total, sum(most)).
    """
    total = min(total, sum(most))
    x = [min(w, Fraction(m)) for w, m in zip(wish, most, strict=True)]
    while (spare := total - sum(x)) > 0:
        open_ = [i for i, m in enumerate(most) if x[i] < m]
        for i in open_:
            x[i] = min(x[i] + Fraction(spare) / len(open_), Fraction(most[i]))
    counts = [w.numerator // w.denominator for w in x]
    order = sorted(range(len(x)), key=lambda i: (counts[i] - x[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def fill(used: Sequence[int], total: int) -> list[int]:
    """Raise the lowest of `used` evenly until they sum to `total`; none is lowered.

    fill([3, 9, 3], 18) == [5, 9, 4]: what heads with room to spare may grow to.
    """
    caps = list(used)
    spare = total - sum(caps)
    while spare > 0:
        low = min(caps)
        lowest = [i for i, c in enumerate(caps) if c == low]
        above = [c for c in caps if c > low]
        lift = min(spare // len(lowest), (min(above) - low) if above else spare)
        if lift == 0:
            for i in lowest[:spare]:
                caps[i] += 1
            break
        for i in lowest:
            caps[i] += lift
        spare -= lift * len(lowest)
    return caps


def last_rows(count: int) -> Scope:
    """Scope: the `count` youngest rows of each head stay."""

    def scope(view: PromptView) -> Tensor:
        return view.pos >= max(0, view.position - count)

    return scope


def group(mass: Tensor, how: str) -> Tensor:
    """[H, G, N] -> [H, N]: join the query heads of each KV head."""
    return mass.mean(1) if how == "mean" else mass.amax(1)

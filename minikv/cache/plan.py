"""The plan for a prompt: how many rows there are, how many may stay, and where they have room.

Everything is decided on the host, before the prompt is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.cache.arena import Arena, Layout
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.policies.selection import fill


@dataclass(frozen=True, slots=True)
class Plan:
    """How a prompt of `tokens` tokens that starts at `position` is read.

    totals[i]: rows that layer i may keep over all its heads (None: all).
    floor: the least cap of a head when only the step policy evicts.
    spare: rows that a head needs above its cap while an answer is written.
    needed[i]: rows of layer i's region in a new target.
    visible[i]: rows over all heads that exist after the prompt and that the next token can still
        see.
    shares: all rows stay where they are, and the new ones have room after them.
    turns, output(layer) and rotary: as in `PromptView`.
    pinned: positions below it are never evicted.
    pool: rows that all layers and heads may keep together, where they share one budget.
    given: how many first tokens of the prompt are not read because the tier has (or would have)
        their rows; these rows compete with the others.
    asks: the prompt only asks about what was read before.
    turn_tokens: how many of the last tokens belong to the last turn (None: all). Earlier queries
        are not observed: those of the last answer would keep what that answer needed.
    """

    position: int
    tokens: int
    totals: list[int] | None
    floor: int
    spare: int
    needed: list[int]
    visible: list[int]
    shares: bool = False
    turns: Sequence[tuple[int, int]] = ()
    output: Callable[[int], Tensor] | None = None
    rotary: Tensor | None = None
    pinned: int = 0
    pool: int | None = None
    given: int = 0
    asks: bool = False
    turn_tokens: int | None = None
    predicted: Tensor | None = None  # see `Prefill.predict`

    @property
    def read(self) -> int:
        """How many tokens go through the network."""
        return self.tokens - self.given

    @property
    def kept(self) -> int:
        """How many rows exist after the prompt, over all layers and heads, at most."""
        if self.pool is not None:
            return min(self.pool, sum(self.visible))
        most = self.visible if self.totals is None else map(min, self.visible, self.totals)
        return sum(most)

    def observes(self, queries: int) -> int:
        """How many of the last queries are observed, if a policy wants `queries`."""
        return min(
            self.read, queries, self.tokens if self.turn_tokens is None else self.turn_tokens
        )

    def evicts(self, layer: int) -> bool:
        """Whether the prompt policy may evict rows of the layer."""
        if self.pool is not None:
            return sum(self.visible) > self.pool
        return self.totals is not None and self.visible[layer] > self.totals[layer]


@dataclass(frozen=True, slots=True)
class RowsBefore:
    """The rows that exist before a prompt; all numbers are on the host.

    held: the arena's tables. seen[i]: rows of layer i, over all heads, that the first token after
    the prompt can still see.
    """

    held: Layout
    seen: list[int]

    @staticmethod
    def read(shape: Shape, arena: Arena, position: int, tokens: int) -> RowsBefore:
        """Read the arena's tables before a prompt of `tokens` tokens at `position`. One transfer
        from the device."""
        if not position:  # no transfer, so that planning also works for the device "meta"
            none = torch.zeros((shape.layers, shape.kv_heads), dtype=torch.int64)
            return RowsBefore(Layout(none, none, none, none, none - 1), [0] * shape.layers)
        end = position + tokens
        tables = arena.start, arena.length, arena.capacity, arena.cap, arena.free_slot
        slid = [i for i, w in enumerate(shape.windows) if w is not None and end >= w]
        firsts = [end - (shape.windows[i] or 0) + 1 for i in slid]
        counts = [arena.count_from(i, first) for i, first in zip(slid, firsts, strict=True)]
        numbers = torch.cat([*map(torch.flatten, tables), *(n[None] for n in counts)]).cpu()
        size = arena.start.numel()
        held = Layout(*numbers[: 5 * size].view(5, *arena.start.shape).unbind())
        seen = held.held.sum(1).tolist()
        for layer, count in zip(slid, numbers[5 * size :].tolist(), strict=True):
            seen[layer] = count
        return RowsBefore(held, seen)


def plan_prompt(
    shape: Shape,
    rules: Rules,
    arena_rows: int,
    before: RowsBefore,
    each: int | None,
    room: int,
    *,
    position: int,
    tokens: int,
    turns: Sequence[tuple[int, int]],
    pinned: int,
    given: int,
    asks: bool,
    turn_tokens: int | None,
    output: Callable[[int], Tensor] | None,
    rotary: Tensor | None,
) -> Plan:
    """The plan for a prompt under a budget of `each` rows per head (None: nothing is evicted).

    arena_rows: R of the present arena. room: rows per head for the answer if there is no step
    policy. The others are as in `Plan`. Raises UsageError if a layer gets fewer rows than the
    policies need.
    """
    step, held = rules.step, before.held
    spare = room if step is None else 0 if step.evict_first else step.block
    floor = each if each is not None and step is not None else 0
    totals = rules.layer_totals(each, int(held.held.max()) + tokens, shape, pinned)
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
            rows = zip(held.length, shape.windows, strict=True)
            most = [_all_rows(count + tokens, window, floor) for count, window in rows]
        needed = [count + shape.kv_heads * spare for count in most]
    new = [tokens if window is None else min(tokens, window) for window in shape.windows]
    plan = Plan(
        position=position,
        tokens=tokens,
        totals=totals,
        floor=floor,
        spare=spare,
        needed=needed,
        visible=[b + shape.kv_heads * n for b, n in zip(before.seen, new, strict=True)],
        turns=turns,
        output=output,
        rotary=rotary,
        pinned=pinned,
        pool=pool,
        given=given,
        asks=asks,
        turn_tokens=turn_tokens,
    )
    # If the arena has become more than twice as large as needed, a new target frees memory.
    shares = blocks is None and pool is None and position > 0 and 2 * sum(needed) > arena_rows
    return replace(plan, shares=shares and _fits(plan, shape, held, grows=step is None))


def _all_rows(rows: Tensor, window: int | None, floor: int) -> int:
    """Rows of a layer that only loses rows which slide out of its window. rows: of each head, int64
    [H]."""
    if window is not None:
        rows = rows.clamp(max=window)
    return int(rows.clamp(min=floor).sum())


def _fits(plan: Plan, shape: Shape, held: Layout, *, grows: bool) -> bool:
    """Whether every row stays and every head has room for its new rows after its old ones. grows:
    there is no step policy, so the answer's rows need room as well."""
    for layer, window in enumerate(shape.windows):
        count = held.held[layer]
        uneven = bool((count != count[0]).any()) or bool((held.free_slot[layer] >= 0).any())
        slides = window is not None and plan.position + plan.tokens >= window
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

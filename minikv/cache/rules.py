"""The rules of a cache: two policies and a budget, and the numbers of rows that follow from
them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.budget import Budget
from minikv.cache.stats import Shape
from minikv.errors import UsageError
from minikv.policies.base import ALL, Evidence, StepPolicy
from minikv.policies.parts import GlobalBudget, PromptPolicy, policy_columns, smallest_budget


@dataclass(frozen=True, slots=True)
class Rules:
    """A prompt policy, a step policy (None: evicts nothing) and their budget. With a `stride` the
    step policy also evicts while a prompt is read, in blocks of `stride` tokens.

    Raises UsageError for a policy without a budget.
    """

    prompt: PromptPolicy | None = None
    step: StepPolicy | None = None
    budget: Budget | None = None
    stride: int = 0

    def __post_init__(self) -> None:
        assert not self.stride or (self.step is not None and self.prompt is None)
        if self.evicts and self.budget is None:
            raise UsageError("a policy needs a budget", "give a `budget`, e.g. 512, 20% or 64MiB")

    @property
    def evicts(self) -> bool:
        """Whether there is a policy at all."""
        return self.prompt is not None or self.step is not None

    @property
    def evidence(self) -> Evidence:
        """What the prompt policy reads and protects; without one, nothing."""
        return Evidence() if self.prompt is None else self.prompt.evidence

    @property
    def observe(self) -> int:
        """How many of a prompt's last queries have their attention observed, see `Evidence`."""
        return self.evidence.observe or (0 if self.step is None else self.step.observe)

    @property
    def takes_share(self) -> bool:
        """Whether the budget is a share of the tokens read, so that a prompt decides its size."""
        return self.budget is not None and self.budget.unit == "share"

    @property
    def shares_layers(self) -> bool:
        """Whether all layers and heads share one budget."""
        return self.prompt is not None and isinstance(self.prompt.layers, GlobalBudget)

    def least(self, pinned: int = 0) -> int:
        """The smallest number of rows per head with which the policies work, if `pinned` positions
        are pinned."""
        sinks = max(self.evidence.sinks, self.step.sinks if self.step else 0)
        return smallest_budget(self.prompt, self.step, self.stride) + max(0, pinned - sinks)

    def budget_rows(self, tokens: int, shape: Shape, kv: torch.dtype) -> int:
        """The budget in rows per head after `tokens` tokens, with keys and values stored in the
        dtype `kv`. Raises UsageError if the policies need more."""
        budget = self.budget
        assert budget is not None
        row = self.row_nbytes(shape, kv)
        rows = budget.rows(tokens, row, shape.layers * shape.kv_heads)
        least = self.least()
        if self.evicts and rows < least:
            names = " with ".join(p.name for p in (self.prompt, self.step) if p)
            meant = "" if budget.unit == "rows" else f", which is {rows} tokens per head here,"
            raise UsageError(
                f"budget {budget}{meant} is too small for {names}",
                f"the smallest useful budget here is {least} tokens per head",
            )
        return rows

    def row_nbytes(self, shape: Shape, kv: torch.dtype) -> int:
        """Bytes of a stored row of one head, its columns included."""
        state = sum(dtype.itemsize for dtype in policy_columns(self.prompt, self.step).values())
        scales = 2 * torch.float32.itemsize if kv == torch.int8 else 0
        return 2 * shape.head_dim * kv.itemsize + scales + torch.int32.itemsize + state

    def refuse_pins(self, pinned: int, each: int) -> None:
        """Raise UsageError if `each` rows per head leave too few besides `pinned` positions."""
        least = self.least(pinned)
        if pinned and each < least:
            raise UsageError(
                f"a budget of {each} tokens per head is too small for {pinned} pinned ones",
                f"the smallest useful budget here is {least} tokens per head",
            )

    def layer_totals(
        self, each: int | None, most: int, shape: Shape, pinned: int
    ) -> list[int] | None:
        """Rows that each layer may keep over all its heads; None without a prompt policy, or if all
        layers share one budget. each: the budget in rows per head. most: the most rows that a head
        could hold. Raises UsageError if a layer gets fewer rows than the policies need."""
        if self.prompt is None or self.shares_layers:
            return None
        assert each is not None
        least = self.least(pinned)
        rows = self.prompt.layer_rows(shape.layers, each, most, least)
        if min(rows) < least:
            raise UsageError(
                f"{self.prompt.name} leaves a layer {min(rows)} tokens per head, of which "
                f"{least - 1} are protected",
                "a larger `budget` or a smaller beta gives every layer enough",
            )
        return [
            shape.kv_heads * (n if window is None else min(n, window))
            for n, window in zip(rows, shape.windows, strict=True)
        ]

    def first_rows(self, pinned: int) -> int:
        """Positions below it never leave: those that are pinned, and the sinks."""
        return max(pinned, self.evidence.sinks)

    @property
    def cannot_recall(self) -> str | None:
        """Why these policies cannot choose from a tier; None if they can."""
        if self.stride:
            return "with a stride rows are evicted while it reads"
        if self.prompt is not None:
            evidence, name = self.prompt.evidence, self.prompt.name
            if evidence.observe == ALL or evidence.queries_from is not None:
                return f"{name} needs the queries of all tokens"
            if evidence.second_pass:
                return f"{name} reads everything twice"
        if self.step is not None and self.step.learns:
            return f"{self.step.name} needs the queries of all tokens"
        return None


def unlearnt(step: StepPolicy | None, shape: Shape, device: torch.device) -> Tensor | None:
    """Zeros float32 [L, H, n] for what a step policy learns; None if it learns nothing."""
    if step is None or not step.learns:
        return None
    size = step.learnt_size(shape.heads // shape.kv_heads, shape.head_dim)
    return torch.zeros((shape.layers, shape.kv_heads, size), device=device)

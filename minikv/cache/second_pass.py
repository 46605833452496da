"""A prompt that is read twice before anything leaves: once to be read, and again to be scored.

First every row of every layer is kept, in an arena of its own. Then further texts are fed behind
the prompt, each on its own; none of their rows is stored, but what their queries look at scores the
rows of the prompt and of earlier turns. At the end all layers are compacted at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.cache.arena import Arena, Layout
from minikv.cache.prefill import Plan, Prefill
from minikv.cache.snapshot import Outcome
from minikv.cache.stats import Shape
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import ALL, Evidence, PromptPolicy, PromptView, Scorer, StepPolicy


@dataclass(frozen=True, slots=True)
class _EveryQuery(Scorer):
    """All queries of a pass are observed; nothing is chosen by them alone."""

    evidence = Evidence(observe=ALL)

    def score(self, view: PromptView) -> Tensor:
        raise AssertionError("a pass chooses nothing")


class SecondPassPrefill:
    """In place of `Prefill`: the same calls for the prompt itself, then `begin_pass`, the calls of
    a forward and `end_pass` for each further text, then `complete`."""

    def __init__(
        self,
        shape: Shape,
        arena: Arena,
        held: Layout,
        target: Arena,
        prompt: PromptPolicy,
        step: StepPolicy | None,
        plan: Plan,
        dtype: torch.dtype,
        ops: Kernels,
    ) -> None:
        """As `Prefill`. Everything is kept until `complete`, so this takes the memory of a cache
        without eviction."""
        self.shape, self.arena, self.target = shape, arena, target
        self.prompt, self.step, self.plan = prompt, step, plan
        self._dtype, self._ops = dtype, ops
        self._all = arena.fresh(plan.visible, step.columns if step is not None else {})
        whole = replace(
            plan, totals=None, floor=0, spare=0, needed=plan.visible, shares=False, pool=None
        )
        self._reading = Prefill(shape, arena, held, self._all, None, step, whole, dtype, ops)
        self._held: Layout | None = None  # of `_all`, when it is complete
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}  # mass and squares by layer
        self._queries = 0
        self._beside = target.nbytes
        self.peak = self._reading.peak + self._beside

    @property
    def end(self) -> int:
        """The position behind the prompt, at which every pass begins."""
        return self.plan.position + self.plan.tokens

    @property
    def layer_complete(self) -> bool:
        """Every row of the layer has been staged and attended to."""
        return self._reading.layer_complete

    def done(self, layer: int) -> int:
        """Tokens of the prompt read so far, in whole-prompt terms."""
        return self.plan.tokens if self._held is not None else self._reading.done(layer)

    def stage(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take in a chunk of rows and attend: shapes as in `Attend.attend`."""
        return self._reading.stage(layer, q, k, v)

    def finish(self, layer: int) -> None:
        """The layer is complete: keep its rows, or, of a pass, what its queries looked at."""
        if self._held is None:
            self._reading.finish(layer)
            return
        mass, squares = self._reading.sums()
        known = self._sums.get(layer)
        if known is None:
            self._sums[layer] = mass.clone(), squares.clone()
            self._beside += mass.nbytes + squares.nbytes
        else:
            known[0].add_(mass)
            known[1].add_(squares)

    def begin_pass(self, tokens: int) -> None:
        """The next forward is a further text, whose first position is `end`."""
        if self._held is None:
            self._note_peak(0)
            self._reading.complete()
            self._held = self._all.layout()
        plan = Plan(self.end, tokens, None, 0, 0, [], [], rotary=self.plan.rotary)
        nothing = self._all.fresh([0] * self.shape.layers, {})
        every = PromptPolicy(name="pass", scorer=_EveryQuery())
        self._reading = Prefill(
            self.shape, self._all, self._held, nothing, every, None, plan, self._dtype, self._ops
        )
        self._queries += tokens

    def end_pass(self) -> None:
        """The forward is over: its own rows are forgotten."""
        self._note_peak(self.arena.nbytes)

    def complete(self) -> Outcome:
        """Compact all layers. Waits for the device."""
        assert self._held is not None, "no pass scored the rows"
        plan = replace(self.plan, position=self.end, tokens=0)
        last = self._reading = Prefill(
            self.shape,
            self._all,
            self._held,
            self.target,
            self.prompt,
            self.step,
            plan,
            self._dtype,
            self._ops,
        )
        self._beside -= self.target.nbytes
        for layer, (mass, squares) in self._sums.items():
            last.rescore(layer, mass, squares, self._queries)
        outcome = last.complete()
        self._note_peak(self.arena.nbytes)
        return outcome

    def _note_peak(self, more: int) -> None:
        self.peak = max(self.peak, self._reading.peak + self._beside + more)

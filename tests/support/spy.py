"""A scorer that passes everything on to another one, and shows what it is asked to score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.repeats import Repeat, RepeatView, Wording


class Spy(Scorer):
    """`of`, after whose every score `note` gets the view and the scores."""

    def __init__(self, of: Scorer, note: Callable[[PromptView, Tensor], None]) -> None:
        self.of, self.note = of, note

    @property
    def evidence(self) -> Evidence:
        return self.of.evidence

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        return self.of.columns

    def protected(self, view: PromptView) -> tuple[int, int]:
        return self.of.protected(view)

    def state(self, view: PromptView) -> dict[str, Tensor]:
        return self.of.state(view)

    def second_pass(
        self, ids: Sequence[int], first: int, words: Wording, room: int
    ) -> Sequence[Repeat]:
        return self.of.second_pass(ids, first, words, room)

    def peak(self, view: RepeatView) -> Tensor:
        return self.of.peak(view)

    def score(self, view: PromptView) -> Tensor:
        scores = self.of.score(view)
        self.note(view, scores)
        return scores

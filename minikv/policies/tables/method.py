"""`PolicyInfo`: a registry row about a method."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from minikv.policies.options import Option, Value
from minikv.policies.tables.other_parts import OTHER_PARTS
from minikv.policies.tables.part import Part
from minikv.policies.tables.scorers import SCORERS

PARTS: dict[str, Part] = {part.name: part for part in (*SCORERS, *OTHER_PARTS)}
"""Every part by name. A policy is made of a scorer and of other parts where it does not use the
defaults."""

ATTENDS_FIRST = "a block attends to what is left, then as many tokens leave"
EVICTS_FIRST = "as many tokens leave as a block brings, then it attends"
"""How --stride reads a prompt: after attention a block evicts, or before."""


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """The facts of one method, from which help, validation and the policies table are made.

    parts: the parts of the prompt policy (empty: it is no prompt policy, or evicts nothing). module
    and cls: the step form, a `StepPolicy` whose fields are the options `own`. differs: how the step
    form differs from paper and release.
    """

    name: str
    prompt: bool  # may be given as --policy
    step: bool  # may be given as --decode
    when: str  # "never", "prompt", "step", "prompt + step"
    shape: str  # how the budget is spread: "uniform", "per head", ...
    scores: str  # what a row is worth
    state: str  # what is stored per row beyond k, v, position
    second: str  # what a second question finds
    paper: str  # arXiv number or "baseline"
    summary: str
    parts: tuple[str, ...] = ()
    module: str = ""
    cls: str = ""
    own: tuple[Option, ...] = ()
    preset: Mapping[str, Value] = field(default_factory=dict)  # other defaults of the parts
    stride: str = ""  # how --stride reads a prompt
    decode: str = ""  # what --decode auto means; empty: its own step form, or the default
    differs: tuple[str, ...] = ()

    @property
    def prompt_options(self) -> tuple[Option, ...]:
        """The options that it takes as --policy: those of its parts, each name once."""
        named: dict[str, Option] = {}
        for part in self.parts:
            for option in PARTS[part].options:
                value = self.preset.get(option.name, option.default)
                named.setdefault(option.name, replace(option, default=value))
        return tuple(named.values())

    @property
    def differences(self) -> tuple[str, ...]:
        """How it differs from paper and release, as prompt policy and as step policy. What a part
        says of an option does not hold where this method has another default of it."""
        lines = (line for part in self.parts for line in self._still_true(PARTS[part]))
        return (*lines, *self.differs)

    def _still_true(self, part: Part) -> list[str]:
        """The part's lines that name no option whose default is another one here."""
        own = {option.name: option.default for option in part.options}
        other = [name for name, value in self.preset.items() if own.get(name, value) != value]
        named = re.compile(rf"`({'|'.join(other)})`|\b({'|'.join(other)})=")
        return [line for line in part.differs if not other or not named.search(line)]

    @property
    def options(self) -> tuple[Option, ...]:
        """All options, as prompt policy and as step policy."""
        both = {option.name: option for option in (*self.prompt_options, *self.own)}
        return tuple(both.values())

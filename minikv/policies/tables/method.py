"""What a row about a method says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from minikv.policies.options import Option, Value
from minikv.policies.tables.other_parts import OTHER_PARTS
from minikv.policies.tables.part import Part
from minikv.policies.tables.scorers import SCORERS

PARTS: dict[str, Part] = {part.name: part for part in (*SCORERS, *OTHER_PARTS)}
"""Every part by name; a policy is a scorer and, where they are not the plain ones, others."""

ATTENDS_FIRST = "a block attends to what is left, then as many tokens leave"
EVICTS_FIRST = "as many tokens leave as a block brings, then it attends"
"""What --stride makes of a prompt."""


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """The facts of one method, from which help, validation and the policies table are made.

    `parts`: what it is made of as --policy (empty: it is none, or evicts nothing). `module` and
    `cls`: its step form, a `StepPolicy` whose fields are the options `own`. `differs`: as a part's,
    of the step form.
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
    stride: str = ""  # what --stride makes of a prompt
    decode: str = ""  # what --decode auto means; empty: its own step form, or the default
    differs: tuple[str, ...] = ()

    @property
    def prompt_options(self) -> tuple[Option, ...]:
        """What it takes as --policy: the options of its parts, one of each name."""
        named: dict[str, Option] = {}
        for part in self.parts:
            for option in PARTS[part].options:
                value = self.preset.get(option.name, option.default)
                named.setdefault(option.name, replace(option, default=value))
        return tuple(named.values())

    @property
    def differences(self) -> tuple[str, ...]:
        """How it differs from paper and release, in either form."""
        return (*(line for part in self.parts for line in PARTS[part].differs), *self.differs)

    @property
    def options(self) -> tuple[Option, ...]:
        """All that it takes, in either form."""
        both = {option.name: option for option in (*self.prompt_options, *self.own)}
        return tuple(both.values())

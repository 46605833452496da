"""What is known of a policy: `Part` and `Method`, of which its file has one or more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minikv.policies.options import Option, Value, options_of

if TYPE_CHECKING:
    from minikv.policies.base import StepPolicy


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt policy: a class whose fields are its options. differs: from paper and
    release, with the option that does as they do."""

    name: str
    cls: type[Any]
    summary: str
    differs: tuple[str, ...] = ()

    @property
    def axis(self) -> str:
        """The question that it answers, which its base class says."""
        found: str = self.cls.axis
        return found

    @property
    def options(self) -> tuple[Option, ...]:
        return options_of(self.cls)

    @property
    def shares_all(self) -> bool:
        """It cannot be combined with parts that share a budget among heads."""
        return hasattr(self.cls, "shares_all")

    def make(self, values: Mapping[str, Value]) -> Any:
        """The part with these values, which may also have options of other parts."""
        return self.cls(**{option.name: values[option.name] for option in self.options})


@dataclass(frozen=True, slots=True)
class Method:
    """What --policy or --decode takes: a prompt policy made of `parts`, a step policy `rule`, or
    both; neither for one that evicts nothing.

    preset: other defaults of the parts' options. decode: what --decode auto means; empty: its own
    rule, or the default. differs: how the rule differs from paper and release.
    """

    name: str
    summary: str
    _: KW_ONLY
    parts: tuple[Part, ...] = ()
    rule: type[StepPolicy] | None = None
    paper: str  # arXiv number or "baseline"
    scores: str  # what a row is worth
    shape: str = "uniform"  # how the budget is spread
    state: str = "-"  # what is stored per row beyond k, v, position
    second: str  # what a second question finds
    preset: Mapping[str, Value] = field(default_factory=dict)
    decode: str = ""
    differs: tuple[str, ...] = ()

    @property
    def when(self) -> str:
        """When it evicts."""
        times = (("prompt", self.parts), ("step", self.rule))
        return " + ".join(time for time, evicts in times if evicts) or "never"

    @property
    def stride(self) -> str:
        """How --stride reads a prompt; empty if it cannot."""
        if self.rule is None:
            return ""
        if self.rule().evict_first:
            return "as many tokens leave as a block brings, then it attends"
        return "a block attends to what is left, then as many tokens leave"

    @property
    def prompt_options(self) -> tuple[Option, ...]:
        """The options that it takes as --policy: those of its parts, each name once."""
        named: dict[str, Option] = {}
        for option in (option for part in self.parts for option in part.options):
            value = self.preset.get(option.name, option.default)
            named.setdefault(option.name, replace(option, default=value))
        return tuple(named.values())

    @property
    def step_options(self) -> tuple[Option, ...]:
        """The options that it takes as --decode."""
        return options_of(self.rule) if self.rule else ()

    @property
    def options(self) -> tuple[Option, ...]:
        """All options, as prompt policy and as step policy."""
        both = {option.name: option for option in (*self.prompt_options, *self.step_options)}
        return tuple(both.values())

    @property
    def differences(self) -> tuple[str, ...]:
        """How it differs from paper and release, as prompt policy and as step policy. What a part
        says of an option does not hold where this method has another default of it."""
        lines = (line for part in self.parts for line in self._still_true(part))
        return (*lines, *self.differs)

    def _still_true(self, part: Part) -> list[str]:
        """The part's lines that name no option whose default is another one here."""
        own = {option.name: option.default for option in part.options}
        other = [name for name, value in self.preset.items() if own.get(name, value) != value]
        named = re.compile(rf"`({'|'.join(other)})`|\b({'|'.join(other)})=")
        return [line for line in part.differs if not other or not named.search(line)]

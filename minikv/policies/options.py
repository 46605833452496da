"""What the file of a policy declares: the fields of its classes that are options, its `Part`s and
its `Method`s. Also the only place where values of options are checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.policies.base import StepPolicy

Value = int | float | str | bool
_OPTION = "option"  # the key of a field's metadata


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a policy. Its type is that of `default`: int, float, bool or str. low and high:
    limits of a number, both included. choices: only for str. odd: an int must be odd."""

    name: str
    default: Value
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    odd: bool = False


def option(default: Value, help: str, allowed: tuple[Any, ...] = (), odd: bool = False) -> Any:
    """A field of a policy's class that a user may set. allowed: the limits of a number, or the
    choices of a text."""
    choices = allowed if isinstance(default, str) else ()
    low, high = (None, None) if choices or not allowed else allowed
    return field(
        default=default, metadata={_OPTION: Option("", default, help, low, high, choices, odd)}
    )


def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a policy's class, in the order of its fields."""
    found = ((one.name, one.metadata.get(_OPTION)) for one in fields(cls))
    return tuple(replace(option, name=name) for name, option in found if option is not None)


# -- options that several policies have -----------------------------------------------------------


def window() -> Any:
    return option(32, "observation window: the last tokens, always kept", (1, 4096))


def kernel(default: int = 7) -> Any:
    help = "pooling width over neighbouring tokens (odd)"
    return option(default, help, (1, 63), odd=True)


def pooling(default: str = "max") -> Any:
    return option(default, "pooling of neighbouring scores", ("max", "avg"))


def group() -> Any:
    help = "how the query heads of a KV head are joined"
    return option("mean", help, ("mean", "sum", "max"))


def sinks(default: int = 4) -> Any:
    return option(default, "first tokens of the conversation, always kept", (0, 4096))


def recent(low: int = 0) -> Any:
    return option(10, "newest tokens, always kept", (low, 4096))


def seed() -> Any:
    return option(0, "seed of the random draws", (0, (1 << 31) - 1))


def rounding() -> Any:
    help = (
        "exact: totals are exact to the token; official: the authors' rounding, which drifts by a "
        "few tokens (per head and per layer)"
    )
    return option("exact", help, ("exact", "official"))


# -- what is known of a policy -------------------------------------------------------------------


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


# -- values ---------------------------------------------------------------------------------------


def read_options(
    name: str, options: Sequence[Option], given: Mapping[str, object]
) -> dict[str, Value]:
    """The values of all `options`: those of `given`, which are checked, else the defaults. Strings
    are parsed (`-o a=b`).

    Raises UsageError, which names the policy `name`, for an unknown option, or a value of the wrong
    type or out of range.
    """
    known = {option.name: option for option in options}
    values: dict[str, Value] = {option.name: option.default for option in options}
    for key, raw in given.items():
        option = known.get(key)
        if option is None:
            takes = ", ".join(known) or "no options"
            raise UsageError(f"{name} has no option {key!r}", f"{name} takes: {takes}")
        values[key] = _read(name, option, raw)
    return values


def _read(policy: str, option: Option, raw: object) -> Value:
    kind = type(option.default)
    try:
        if kind is bool:
            if isinstance(raw, bool):
                return raw
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                str(raw).lower()
            ]
        if kind is int and isinstance(raw, (bool, float)):
            raise ValueError
        value: Value = kind(str(raw))
    except (ValueError, KeyError):
        raise UsageError(
            f"{policy}: {option.name} must be {kind.__name__}, got {raw!r}", _hint(option)
        ) from None
    if option.choices and value not in option.choices:
        raise UsageError(
            f"{policy}: {option.name} must be one of {', '.join(option.choices)}, got {value!r}",
            _hint(option),
        )
    if isinstance(value, (int, float)):  # a bool was returned above
        low, high = option.low, option.high
        if not ((low is None or value >= low) and (high is None or value <= high)):
            raise UsageError(
                f"{policy}: {option.name} must be between {low} and {high}, got {value}",
                _hint(option),
            )
        if option.odd and isinstance(value, int) and value % 2 == 0:
            raise UsageError(f"{policy}: {option.name} must be odd, got {value}", _hint(option))
    return value


def _hint(option: Option) -> str:
    """The hint for a wrong value: what may be given instead."""
    allowed = ""
    if isinstance(option.default, bool):
        allowed = "give true or false; "
    elif option.low is not None and option.high is not None:
        odd = "an odd number " if option.odd else ""
        allowed = f"give {odd}from {option.low} to {option.high}; "
    default = str(option.default).lower() if allowed else option.default
    return f"{allowed}the default is {default}"

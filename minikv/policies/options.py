"""The declarations in the file of a policy: the options among the fields of its classes, and its
`Method`. Option values are checked here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.policies.base import StepPolicy

Value = int | float | str | bool
_OPTION = "option"  # the key of a field's metadata


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a policy. Its type is that of `default`: int, float, bool or str. low and high:
    limits of a number, both included; None: any. choices: only for str. odd: an int must be odd."""

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
    made = Option("", default, help, low, high, choices, odd)
    return field(default=default, metadata={_OPTION: made})


def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a policy's class, in the order of its fields."""
    found = ((one.name, one.metadata.get(_OPTION)) for one in fields(cls))
    return tuple(replace(option, name=name) for name, option in found if option is not None)


# -- options that several policies have -----------------------------------------------------------


window = partial(option, 32, "observation window: the last tokens, always kept", (1, 4096))
group = partial(
    option, "mean", "how the query heads of a KV head are joined", ("mean", "sum", "max")
)
seed = partial(option, 0, "seed of the random draws", (0, (1 << 31) - 1))
rounding = partial(
    option,
    "exact",
    "exact: totals are exact to the token; official: the authors' rounding, which drifts by a "
    "few tokens (per head and per layer)",
    ("exact", "official"),
)


def kernel(default: int = 7) -> Any:
    return option(default, "pooling width over neighbouring tokens (odd)", (1, 63), odd=True)


def pooling(default: str = "max") -> Any:
    return option(default, "pooling of neighbouring scores", ("max", "avg"))


def sinks(default: int = 4) -> Any:
    return option(default, "first tokens of the conversation, always kept", (0, 4096))


def recent(low: int = 0) -> Any:
    return option(10, "newest tokens, always kept", (low, 4096))


# -- what is known of a policy -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """A value of --policy or --decode: a prompt policy made of `parts`, a step policy `rule`, or
    both; neither for one that evicts nothing.

    parts: classes of `minikv.policies.parts` and scorers. Each states which question it answers
    (`axis`), its `name`, a `summary`, and how it `differs` from paper and release; its fields are
    its options. told: what a row is worth, without parts. preset: other defaults for the parts'
    options. decode: the meaning of --decode auto; empty: its own rule, or the default.
    """

    name: str
    summary: str
    _: KW_ONLY
    parts: tuple[type[Any], ...] = ()
    rule: type[StepPolicy] | None = None
    good: str  # what it is good for
    paper: str  # arXiv number or "baseline"
    told: str = "-"
    state: str = "-"  # what is stored per row beyond k, v, position
    again: str = ""  # how a second question is answered, if not as the scorer's evidence says
    preset: Mapping[str, Value] = field(default_factory=dict)
    decode: str = ""

    @property
    def when(self) -> str:
        """When it evicts."""
        times = (("prompt", self.parts), ("step", self.rule))
        return " + ".join(time for time, evicts in times if evicts) or "never"

    @property
    def second(self) -> str:
        """How a second question is answered."""
        asks = bool(self.parts) and self.parts[0]().evidence.asks
        return self.again or ("needs recall" if asks else "safe")

    @property
    def scores(self) -> str:
        """What a row is worth."""
        return self.parts[0].summary if self.parts else self.told

    @property
    def shape(self) -> str:
        """How the budget is divided."""
        names = {part.axis: part.name for part in self.parts}
        if names.get("layers") == "global":
            return "one for all layers and heads"
        if not self.parts:
            return "each head's own cap" if self.rule else "-"
        spread = {"layers": "per layer", "heads": "per head"}
        return " and ".join(text for axis, text in spread.items() if axis in names) or "uniform"

    @property
    def stride(self) -> str:
        """How --stride reads a prompt; empty if it cannot."""
        if self.rule is None:
            return ""
        if self.rule().evict_first:
            return "before each block attends, as many tokens leave as it has"
        return "after each block has attended, as many tokens leave as it has"

    @property
    def prompt_options(self) -> tuple[Option, ...]:
        """The options that it takes as --policy: those of its parts, each name once."""
        named: dict[str, Option] = {}
        for option in (option for part in self.parts for option in options_of(part)):
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
        """How it differs from paper and release, as prompt policy and as step policy, without the
        parts' statements about options for which this method has another default."""
        lines = [line for part in self.parts for line in self._still_true(part)]
        return (*lines, *(self.rule.differs if self.rule else ()))

    def _still_true(self, part: type[Any]) -> list[str]:
        """The part's lines that name no option with another default here."""
        own = {option.name: option.default for option in options_of(part)}
        other = [name for name, value in self.preset.items() if own.get(name, value) != value]
        named = re.compile(rf"`({'|'.join(other)})`|\b({'|'.join(other)})=")
        return [line for line in part.differs if not other or not named.search(line)]


# -- values ---------------------------------------------------------------------------------------


def read_options(
    name: str, options: Sequence[Option], given: Mapping[str, object]
) -> dict[str, Value]:
    """The values of all `options`: those of `given`, which are checked, or the defaults. Strings
    are parsed (`-o a=b`).

    Raises UsageError, which names the policy `name`, for an unknown option, or a value of the wrong
    type or out of range.
    """
    known = {option.name: option for option in options}
    values: dict[str, Value] = {option.name: option.default for option in options}
    for key, raw in given.items():
        if key not in known:
            takes = ", ".join(known) or "no options"
            raise UsageError(f"{name} has no option {key!r}", f"{name} takes: {takes}")
        value, wrong = _read(known[key], raw)
        if wrong:
            raise UsageError(f"{name}: {key} must be {wrong}", _hint(known[key]))
        values[key] = value
    return values


def _read(option: Option, raw: object) -> tuple[Value, str]:
    """The value that `raw` means, and "" or what it should have been."""
    kind, value = type(option.default), option.default
    try:
        if kind is int and isinstance(raw, (bool, float)):
            raise ValueError
        value = _YES_OR_NO[str(raw).lower()] if kind is bool else kind(str(raw))
    except (ValueError, KeyError):
        return value, f"{kind.__name__}, got {raw!r}"
    if option.choices and value not in option.choices:
        return value, f"one of {', '.join(option.choices)}, got {value!r}"
    if option.low is not None and option.high is not None:
        assert isinstance(value, (int, float))
        if not option.low <= value <= option.high:  # nor is NaN
            return value, f"between {option.low} and {option.high}, got {value}"
        if option.odd and value % 2 == 0:
            return value, f"odd, got {value}"
    return value, ""


_YES_OR_NO = dict.fromkeys(("true", "yes", "1"), True) | dict.fromkeys(("false", "no", "0"), False)


def _hint(option: Option) -> str:
    """The hint for a wrong value: the allowed ones."""
    if isinstance(option.default, bool):
        return f"give true or false; the default is {str(option.default).lower()}"
    if option.low is None:
        return f"the default is {option.default}"
    odd = "an odd number " if option.odd else ""
    return f"give {odd}from {option.low} to {option.high}; the default is {option.default}"

"""The options of a policy: their description, and the only place where values are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minikv.errors import UsageError

Value = int | float | str | bool


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

"""Flags with which a model and a document fit into memory, found by trying `forecast`.

`--budget auto` finds the largest budget that fits. If even its smallest does not, a policy that
reads in blocks may, or weights that take less memory, the most exact first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from minikv.cli.forecast import Forecast, Row, forecast
from minikv.errors import UsageError
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings, settings_of

_BLOCKS = ("roco", 32)
"""The policy and stride that take the least memory while a prompt is read."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Flags for a document of `tokens` tokens. They need `needs` of `free` bytes, and keep `rows`
    tokens per head; None: all. If `fits` is false, no flags fit, and these need the least."""

    tokens: int
    fits: bool
    flags: str
    needs: int
    free: int
    rows: int | None


def suggest(
    settings: Settings, made: Forecast, policy: str, room: int | None, folder: Path
) -> Suggestion | None:
    """Flags for the document of the forecast `made`, with `policy` or, if that does not fit,
    `_BLOCKS`. room and folder: as `made` was made with. None if free memory is not known, if the
    model's context is too short, or if no forecast is possible."""
    if made.free is None or not made.suffices:
        return None
    tries: list[tuple[Settings, Row]] = []
    for form in _forms(settings):
        for name, stride in ((policy, 0), _BLOCKS):
            own = settings.options if name == policy else {}
            one = replace(
                settings, weights=form, policy=name, stride=stride, budget="auto", options=own
            )
            row = _row(one, made, room, folder)
            if row is not None and not row.error:
                tries.append((one, row))
    if not tries:
        return None
    best, row = next((one for one in tries if one[1].fits), min(tries, key=lambda t: t[1].needs))
    return Suggestion(made.tokens, bool(row.fits), _flags(best), row.needs, made.free, row.rows)


def _forms(settings: Settings) -> tuple[str, ...]:
    """The values of --weights to try, the most exact first; only the user's own, if given."""
    if settings.weights != "auto":
        return (settings.weights,)
    return ("auto", "int8", "int8+head", "int4", "int4+head")


def _row(one: Settings, made: Forecast, room: int | None, folder: Path) -> Row | None:
    """The forecast; None if the policy cannot be used so, or the device does not support this value
    of --weights."""
    from minikv.models.errors import UnusableSetting

    case = [(one.policy, one.stride)]
    try:
        again = forecast(
            one, made.tokens, case, [one.eviction()], room=room, answer=made.answer, folder=folder
        )
    except (UnusableSetting, UsageError):
        return None
    return again.rows[0]


def _flags(settings: Settings) -> str:
    """The flags to type, with the user's own revision, device, dtype and KV dtype."""
    parts = []
    known = settings_of(Settings)
    for name in ("revision", "device", "dtype", "kv", "weights", "tier"):
        value = getattr(settings, name)
        if value and value != known[name].default:
            parts.append(f"{known[name].flag} {value}")
    if settings.policy != DEFAULT_PROMPT:
        parts.append(f"--policy {settings.policy}")
    if settings.stride:
        parts.append(f"--stride {settings.stride}")
    return " ".join(parts)

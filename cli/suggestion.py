"""Flags with which a model and a document fit into memory, found by trying `forecast`.

In this order: no eviction; the largest budget that fits; then the same with weights that take less
memory. Budgets below `_USEFUL` tokens come last, because they lose much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.forecast import Forecast, Row, forecast
from minikv.errors import UsageError
from minikv.settings import Settings, settings_of

_BUDGETS = tuple(1 << power for power in range(14, 6, -1))  # 16,384 to 128 tokens per head
_USEFUL = 512
_BLOCKS = ("roco", 32)
"""The policy and stride that take the least memory while a prompt is read."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Flags for a document of `tokens` tokens. They need `needs` of `free` bytes. If `fits` is
    false, no flags fit, and these need the least."""

    tokens: int
    fits: bool
    flags: str
    needs: int
    free: int


@dataclass(frozen=True, slots=True)
class _Case:
    """A policy, its stride and its budget in tokens per head; 0: none."""

    policy: str
    stride: int
    budget: int

    def eviction(self, settings: Settings, policy: str) -> EvictionConfig | UsageError:
        """The settings of this case, or why they are not valid. The user's options are for `policy`
        only."""
        options = settings.options if self.policy == policy else {}
        budget = str(self.budget) if self.budget else settings.budget
        try:
            return replace(
                settings, policy=self.policy, stride=self.stride, budget=budget, options=options
            ).eviction()
        except UsageError as error:
            return error


@dataclass(frozen=True, slots=True)
class _Try:
    """A case with one value of --weights, and its forecast. The lowest `rank` is the best."""

    rank: tuple[bool, int, int]
    form: str
    case: _Case
    row: Row


def suggest(
    settings: Settings, made: Forecast, policy: str, room: int | None, folder: Path
) -> Suggestion | None:
    """Flags for the document of the forecast `made`, with `policy` or, if that does not fit,
    `_BLOCKS`. room and folder: as `made` was made with. None if free memory is not known, if the
    model's context is too short, or if no forecast is possible."""
    if made.free is None or not made.suffices:
        return None
    budgets = [count for count in _BUDGETS if 2 * count <= made.tokens]
    cases = [_Case("full", 0, 0)]
    cases += [_Case(*one, count) for one in ((policy, 0), _BLOCKS) for count in budgets]
    choices = [case.eviction(settings, policy) for case in cases]
    tries = []
    for order, form in enumerate(_forms(settings)):
        rows = _rows(replace(settings, weights=form), made, cases, choices, room, folder)
        for place, (case, row) in enumerate(zip(cases, rows, strict=False)):
            if not row.error:
                tries.append(_Try((0 < case.budget < _USEFUL, order, place), form, case, row))
    if not tries:
        return None
    good = [one for one in tries if one.row.fits]
    best = min(good, key=lambda one: one.rank) if good else min(tries, key=lambda t: t.row.needs)
    flags = _flags(settings, best.form, best.case)
    return Suggestion(made.tokens, bool(good), flags, best.row.needs, made.free)


def _forms(settings: Settings) -> tuple[str, ...]:
    """The values of --weights to try, the most exact first; only the user's own, if given."""
    if settings.weights != "auto":
        return (settings.weights,)
    return ("auto", "int8", "int8+head", "int4", "int4+head")


def _rows(
    settings: Settings,
    made: Forecast,
    cases: Sequence[_Case],
    choices: Sequence[EvictionConfig | UsageError],
    room: int | None,
    folder: Path,
) -> tuple[Row, ...]:
    """The forecasts; none if the device does not support this value of --weights."""
    from minikv.models.errors import UnusableSetting

    named = [(case.policy, case.stride) for case in cases]
    try:
        again = forecast(
            settings, made.tokens, named, choices, room=room, answer=made.answer, folder=folder
        )
    except UnusableSetting:
        return ()
    return again.rows


def _flags(settings: Settings, form: str, case: _Case) -> str:
    """The flags to type, with the user's own revision, device, dtype and KV dtype."""
    parts = []
    known = settings_of(Settings)
    for name in ("revision", "device", "dtype", "kv"):
        value = getattr(settings, name)
        if value and value != known[name].default:
            parts.append(f"{known[name].flag} {value}")
    if form != "auto":
        parts.append(f"--weights {form}")
    parts.append(f"--policy {case.policy}")
    if case.stride:
        parts.append(f"--stride {case.stride}")
    if case.budget:
        parts.append(f"--budget {case.budget}")
    return " ".join(parts)

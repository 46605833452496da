"""Whether a row of the table of policies is true of its class."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from typing import Any

from minikv.policies import Option, Part, PolicyInfo, base

BASES: dict[str, Any] = {
    "scorer": base.Scorer,
    "layers": (base.LayerAllocator, base.GlobalAllocator),
    "heads": base.HeadAllocator,
    "select": base.Selector,
    "weigh": base.Reweighter,
    "prefer": base.Preference,
}


def fields(cls: type) -> dict[str, Any]:
    """Names and types of what the class itself takes."""
    kinds = typing.get_type_hints(cls)
    return {field.name: kinds[field.name] for field in dataclasses.fields(cls)}


def taken(options: tuple[Option, ...]) -> dict[str, type]:
    return {option.name: type(option.default) for option in options}


def check_part(part: Part) -> None:
    """The class of a part takes what its row says."""
    cls = getattr(importlib.import_module(part.module), part.cls)
    assert issubclass(cls, BASES[part.axis])
    assert cls.__mro__[1].__module__ == base.__name__, "no inheritance deeper than one"
    assert fields(cls) == taken(part.options)


def check_step(info: PolicyInfo) -> None:
    """The class of a step policy takes what its row says, beside fields that give a fact of the
    base class a value or remember what was computed."""
    cls = getattr(importlib.import_module(info.module), info.cls)
    assert cls.__mro__[1] is base.StepPolicy
    found, options = fields(cls), taken(info.own)
    known = {**typing.get_type_hints(base.StepPolicy), "matrices": object}
    assert {name: found.get(name) for name in options} == options
    assert {*found} - {*options} <= {*known}

"""The table of eviction policies: every method, and every part that methods are made of.

A row names the module and the class of a method or part, and its options, which are the fields of
that class. `composition` makes the object. The rows are in `minikv.policies.tables`, one file for
each kind. Importing this does not import torch, so `--help`, checks and `minikv policies` answer at
once.
"""

from __future__ import annotations

from minikv.policies.tables.method import PARTS, PolicyInfo
from minikv.policies.tables.part import Part
from minikv.policies.tables.prompt_methods import PROMPT_METHODS
from minikv.policies.tables.step_methods import STEP_METHODS

__all__ = [
    "DEFAULT_BUDGET",
    "DEFAULT_PROMPT",
    "DEFAULT_STEP",
    "PARTS",
    "POLICIES",
    "Part",
    "PolicyInfo",
    "prompt_names",
    "step_names",
]

POLICIES: dict[str, PolicyInfo] = {info.name: info for info in (*PROMPT_METHODS, *STEP_METHODS)}
"""Every method by name."""

DEFAULT_PROMPT = "adakv"
DEFAULT_STEP = "h2o"
DEFAULT_BUDGET = "auto"


def prompt_names() -> list[str]:
    """Names that `--policy` takes."""
    return [p.name for p in POLICIES.values() if p.prompt]


def step_names() -> list[str]:
    """Names that `--decode` takes, besides "auto"."""
    return [p.name for p in POLICIES.values() if p.step]

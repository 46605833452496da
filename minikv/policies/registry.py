"""The names of all policies and of the parts that they are made of, and the file of each.

Names need no torch. `method` and `part` import the policy's file, which does.
"""

from __future__ import annotations

import importlib
from typing import Any

from minikv.policies.options import Method

PROMPT = (
    "full global-span streaming snapkv pyramidkv adakv ada-pyramid nacl kvcrush h2o tova l2 "
    "keydiff expected kvzip kvzip+ ada-expected defensive dropkv chunkkv random"
).split()
"""The methods that --policy takes, in the order in which they are listed."""

STEP = (
    "streaming h2o tova l2 random roco scissorhands hashevict rkv vase triattention none"
).split()
"""The methods that --decode takes, besides "auto"."""

SCORERS = (
    "snapkv h2o tova proxies l2 keydiff expected defensive global-span dropkv chunkkv kvzip random "
    "streaming"
).split()
"""The parts that say what a token is worth."""

OTHER_PARTS = "span pyramid uniform global ada draw critical turns kvcrush".split()
"""The parts that can be added to a method."""

FILES = {
    "none": "full",
    "pyramid": "pyramidkv",
    "ada": "adakv",
    "ada-pyramid": "adakv",
    "proxies": "nacl",
    "draw": "nacl",
    "ada-expected": "expected",
    "kvzip+": "kvzip",
    "global": "parts",
    "global-span": "global_span",
    "uniform": "parts",
}
"""The file of this package in which a name is declared, where the file has another name."""

GONE = {"queryspan": '`policy="global-span"` keeps more whole answers, in one reading'}
"""Methods of earlier versions, with what to use instead."""

DEFAULT_PROMPT = "global-span"
DEFAULT_STEP = "h2o"
DEFAULT_BUDGET = "auto"


def prompt_names() -> list[str]:
    """Names that `--policy` takes."""
    return list(PROMPT)


def step_names() -> list[str]:
    """Names that `--decode` takes, besides "auto"."""
    return list(STEP)


def method_names() -> list[str]:
    """Names of all methods."""
    return list(dict.fromkeys((*PROMPT, *STEP)))


def part_names() -> list[str]:
    """Names of the parts that can be added to a prompt policy."""
    return list(OTHER_PARTS)


def method(name: str) -> Method:
    """The method of this name, which must be one."""
    return next(one for one in _declared(name) if isinstance(one, Method) and one.name == name)


def part(name: str) -> type[Any]:
    """The part of this name, which must be one."""
    found: type[Any] = next(
        one for one in _declared(name) if hasattr(one, "axis") and vars(one).get("name") == name
    )
    return found


def methods() -> list[Method]:
    """All methods."""
    return [method(name) for name in method_names()]


def parts() -> list[type[Any]]:
    """All parts, the scorers first."""
    return [part(name) for name in (*SCORERS, *OTHER_PARTS)]


def _declared(name: str) -> list[Any]:
    """What the policy's file declares."""
    module = importlib.import_module(f"minikv.policies.{FILES.get(name, name)}")
    return list(vars(module).values())

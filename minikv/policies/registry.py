"""The names of all policies and of the parts that they are made of, and the policy that a name
means: a method, or a method composed of parts (`h2o+ada+pyramid`).

Names need no torch, nor does refusing an unknown one. `method` and `part` import the policy's file,
which does.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minikv.checks import guess, quoted
from minikv.errors import UsageError
from minikv.policies.options import Method, options_of, read_options

if TYPE_CHECKING:
    from minikv.policies.base import StepPolicy
    from minikv.policies.parts import PromptPolicy

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
    "turns": "parts",
}
"""The file of this package in which a name is declared, where the file has another name."""

GONE = {"queryspan": '`policy="global-span"` keeps more whole answers, in one reading'}
"""Methods of earlier versions, with what to use instead."""

DEFAULT_PROMPT = "global-span"
DEFAULT_STEP = "h2o"
DEFAULT_BUDGET = "auto"
_AXES = ("scorer", "carry", "layers", "heads", "select", "weigh", "prefer")
"""The order in which a policy's parts are listed."""
_AMONG_HEADS = {"heads", "select", "weigh"}


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


def default_step(prompt: str) -> str:
    """What `--decode auto` means with this prompt policy: the step policy that the method names, or
    the same method if it has a step form, or the default one."""
    if prompt == "full":
        return "none"
    base = parse(prompt)[0]
    named = method(base).decode if base in prompt_names() else ""
    return named or (base if base in step_names() else DEFAULT_STEP)


def check_name(name: str, *, step: bool = False) -> None:
    """Raise the UsageError that `find` raises. Imports torch only for a composed name."""
    if name not in (step_names() if step else prompt_names()):
        find(name, step=step)


def find(name: str, *, step: bool = False) -> Method:
    """The method called `name`, or one composed of several. Raises UsageError, which suggests
    similar names.

    A prompt policy may be composed: `h2o+ada+pyramid` is H2O's scorer under Ada-KV's head budgets
    and PyramidKV's layer budgets, `kvcrush(h2o)` is `h2o+kvcrush`.
    """
    names = step_names() if step else prompt_names()
    if name in names:
        return method(name)
    flag, other = ("`decode`", "`policy`") if step else ("`policy`", "`decode`")
    if name in method_names():
        blocks = "" if step else f"`stride=32` makes {name} one that reads in blocks; without it, "
        raise UsageError(
            f"{name} works only as {other}, not as {flag}",
            f"{blocks}{flag} takes: {', '.join(names)}",
        )
    words = parse(name)
    for word in words:
        if word in GONE:
            raise UsageError(f"{word} is gone: {GONE[word]}")
    if len(words) > 1 and not step:
        return combine(name, words)
    near = guess(name, names, 3)
    raise UsageError(f"unknown policy {quoted(name)}", f"{near}{flag} takes: {', '.join(names)}")


def parse(name: str) -> list[str]:
    """The words of a composed name: `a+b` and `b(a)` -> [a, b]; `c(a)+b` -> [a, c, b];
    `kvzip++b` -> [kvzip+, b]."""
    terms, depth = [""], 0
    for sign in name.replace(" ", ""):
        depth += (sign == "(") - (sign == ")")
        if sign == "+" and depth == 0:
            terms.append("")
        else:
            terms[-1] += sign
    for at in range(len(terms) - 1, 0, -1):  # a name may end in a plus: kvzip+
        if not terms[at] and terms[at - 1] + "+" in method_names():
            terms[at - 1 : at + 1] = [terms[at - 1] + "+"]
    words: list[str] = []
    for term in terms:
        found = re.fullmatch(r"([\w-]+)\((.+)\)", term)
        words += [*parse(found[2]), found[1]] if found else [term]
    return words


def combine(name: str, words: Sequence[str]) -> Method:
    """The method that `words` describe: a method, then parts that replace its default parts.
    Raises UsageError."""
    base, *others = (method(word) if word in method_names() else None for word in words)
    if base is None and words[0] in SCORERS:  # NaCl's proxies
        base = replace(method("snapkv"), parts=(part(words[0]),))
    if base is None or not base.parts:
        scorers = [one.name for one in methods() if one.parts]
        raise UsageError(
            f"cannot compose {name!r}: {words[0]!r} does not say what a token is worth",
            f"begin with one of {', '.join(scorers)}",
        )
    given = {one.axis: one for one in base.parts}
    # The base's default may be one budget for all layers: another allocation replaces it.
    shared = {axis for axis, one in given.items() if one.name == "global"}
    added: dict[str, type[Any]] = {}
    preset = dict(base.preset)
    for word, other in zip(words[1:], others, strict=True):
        for one in _added(name, word, other):
            old = (given | added).get(one.axis, one)
            if old.name != one.name and one.axis not in shared - {*added}:
                raise UsageError(
                    f"cannot compose {name!r}: {old.name} and {one.name} answer the same question",
                    "take one of the two",
                )
            added[one.axis] = one
        preset |= other.preset if other is not None else {}
    if {*given, *added} & _AMONG_HEADS:
        given = {axis: one for axis, one in given.items() if axis not in shared}
    chosen = given | added
    parts = tuple(chosen[axis] for axis in _AXES if axis in chosen)
    among = [one.name for one in parts if one.axis in _AMONG_HEADS]
    if among and any(one.name == "global" for one in parts):
        raise UsageError(
            f"cannot compose {name!r}: global is one budget for all layers, which leaves "
            f"{among[0]} nothing to share among heads",
            "leave out one of the two",
        )
    return Method(
        name,
        "; ".join(one.summary for one in parts),
        parts=parts,
        good="answers of many words" if "carry" in chosen else base.good,
        paper="composed",
        again=base.again,
        preset=preset,
        decode=base.decode,
    )


def _added(name: str, word: str, other: Method | None) -> list[type[Any]]:
    """The parts that a later word of a composition adds: one part, or those of a method except its
    scorer. Raises UsageError."""
    if word in OTHER_PARTS:
        return [part(word)]
    given = [one for one in other.parts if one.axis != "scorer"] if other else []
    if not given:
        what = "also says what a token is worth" if other and other.parts else "is not a part"
        raise UsageError(
            f"cannot compose {name!r}: {word!r} {what}",
            f"{guess(word, OTHER_PARTS, 3)}parts are: {', '.join(OTHER_PARTS)}",
        )
    return given


def prompt_policy(name: str, options: Mapping[str, object] | None = None) -> PromptPolicy | None:
    """Build the prompt policy of this name; None if it evicts nothing. Raises UsageError for a
    wrong name or option."""
    info = find(name)
    values = read_options(info.name, info.prompt_options, options or {})
    if not info.parts:
        return None
    from minikv.policies.parts import PromptPolicy

    made = {
        one.axis: one(**{option.name: values[option.name] for option in options_of(one)})
        for one in info.parts
    }
    return PromptPolicy(name=info.name, **made)


def step_policy(name: str, options: Mapping[str, object] | None = None) -> StepPolicy | None:
    """Build the step policy of this name; None if it evicts nothing. Raises UsageError for a wrong
    name or option."""
    info = find(name, step=True)
    values = read_options(info.name, info.step_options, options or {})
    return info.rule(**values) if info.rule else None

"""Makes a policy from its name: a method, or a method composed of parts (`h2o+ada+pyramid`).

Importing this does not import torch, nor does refusing an unknown name; making a policy does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minikv.checks import quoted
from minikv.errors import UsageError
from minikv.policies import registry
from minikv.policies.options import Method, Part, read_options

if TYPE_CHECKING:
    from minikv.policies.base import StepPolicy
    from minikv.policies.parts import PromptPolicy

_FIELDS = {
    "scorer": "scorer",
    "layers": "layers",
    "heads": "heads",
    "select": "selector",
    "weigh": "reweighter",
    "prefer": "preference",
}
"""The field of `PromptPolicy` for each axis, in the order in which a policy's parts are listed."""
_AMONG_HEADS = ("heads", "select", "weigh")


def default_step(prompt: str) -> str:
    """What `--decode auto` means with this prompt policy: the same method if it has a step form,
    otherwise the default one, unless the method names another."""
    if prompt == "full":
        return "none"
    base = parse(prompt)[0]
    named = registry.method(base).decode if base in registry.prompt_names() else ""
    return named or (base if base in registry.step_names() else registry.DEFAULT_STEP)


def check_name(name: str, *, step: bool = False) -> None:
    """Raise the UsageError that `find` raises. Imports torch only for a composed name."""
    if name not in (registry.step_names() if step else registry.prompt_names()):
        find(name, step=step)


def find(name: str, *, step: bool = False) -> Method:
    """The method called `name`, or one composed of several. Raises UsageError, which suggests
    similar names.

    A prompt policy may be composed: `h2o+ada+pyramid` is H2O's scorer under Ada-KV's head budgets
    and PyramidKV's layer budgets, `kvcrush(h2o)` is `h2o+kvcrush`.
    """
    names = registry.step_names() if step else registry.prompt_names()
    if name in names:
        return registry.method(name)
    flag, other = ("`decode`", "`policy`") if step else ("`policy`", "`decode`")
    if name in registry.method_names():
        blocks = "" if step else f"`stride=32` makes {name} one that reads in blocks; without it, "
        raise UsageError(
            f"{name} works only as {other}, not as {flag}",
            f"{blocks}{flag} takes: {', '.join(names)}",
        )
    words = parse(name)
    if len(words) > 1 and not step:
        method = combine(name, words)
        check(method)
        return method
    guess = _guess(name, names)
    raise UsageError(f"unknown policy {quoted(name)}", f"{guess}{flag} takes: {', '.join(names)}")


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
        if not terms[at] and terms[at - 1] + "+" in registry.method_names():
            terms[at - 1 : at + 1] = [terms[at - 1] + "+"]
    words: list[str] = []
    for term in terms:
        found = re.fullmatch(r"([\w-]+)\((.+)\)", term)
        words += [*parse(found[2]), found[1]] if found else [term]
    return words


def combine(name: str, words: Sequence[str]) -> Method:
    """The method that `words` describe: a method, then parts that replace its default parts.
    Raises UsageError."""
    base = _base(name, words[0])
    chosen = {part.axis: part for part in base.parts}
    # One budget for all layers is a default of the base: another part that shares one replaces it.
    shared = "layers" in chosen and chosen["layers"].shares_all
    fixed = set(chosen) - ({"layers"} if shared else set())
    for part in (part for word in words[1:] for part in _added(name, word)):
        if part.axis in fixed and chosen[part.axis].name != part.name:
            raise UsageError(
                f"cannot compose {name!r}: {chosen[part.axis].name} and {part.name} answer the "
                "same question",
                "take one of the two",
            )
        chosen[part.axis] = part
        fixed.add(part.axis)
    if shared and "layers" not in fixed and not fixed.isdisjoint(_AMONG_HEADS):
        del chosen["layers"]
    parts = tuple(chosen[axis] for axis in _FIELDS if axis in chosen)
    preset = {**base.preset}
    for word in words[1:]:
        preset |= registry.method(word).preset if word in registry.method_names() else {}
    return replace(
        base,
        name=name,
        summary="; ".join(part.summary for part in parts),
        parts=parts,
        rule=None,
        paper="composed",
        scores=parts[0].summary,
        shape=_shape(parts),
        state="-",
        preset=preset,
        differs=(),
    )


def check(method: Method) -> None:
    """Raise UsageError if the parts of a composed method cannot go together."""
    whole = [part.name for part in method.parts if part.shares_all]
    among = [part.name for part in method.parts if part.axis in _AMONG_HEADS]
    if whole and among:
        raise UsageError(
            f"cannot compose {method.name!r}: {whole[0]} is one budget for all layers, which "
            f"leaves {among[0]} nothing to share among heads",
            "leave out one of the two",
        )


def _base(name: str, word: str) -> Method:
    """The method that a composition begins with. Raises UsageError."""
    base = registry.method(word) if word in registry.method_names() else None
    if base is None and word in registry.SCORERS:  # NaCl's proxies
        base = replace(registry.method("snapkv"), parts=(registry.part(word),))
    if base is None or not base.parts:
        scorers = [method.name for method in registry.methods() if method.parts]
        raise UsageError(
            f"cannot compose {name!r}: {word!r} does not say what a token is worth",
            f"begin with one of {', '.join(scorers)}",
        )
    return base


def _added(name: str, word: str) -> list[Part]:
    """The parts that a later word of a composition adds: one, or those of a method beside its
    scorer. Raises UsageError."""
    others = registry.part_names()
    if word in others:
        return [registry.part(word)]
    method = registry.method(word) if word in registry.method_names() else None
    given = [part for part in method.parts if part.axis != "scorer"] if method else []
    if not given:
        what = "also says what a token is worth" if method and method.parts else "is no part"
        raise UsageError(
            f"cannot compose {name!r}: {word!r} {what}",
            f"{_guess(word, others)}parts are: {', '.join(others)}",
        )
    return given


def _guess(word: str, names: Iterable[str]) -> str:
    """The beginning of a hint that names similar words; empty if there are none."""
    near = difflib.get_close_matches(word, list(names), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _shape(parts: Sequence[Part]) -> str:
    """How these parts spread the budget."""
    if any(part.shares_all for part in parts):
        return "one for all layers and heads"
    axes = {part.axis for part in parts}
    spread = {"layers": "per layer", "heads": "per head"}
    return " and ".join(text for axis, text in spread.items() if axis in axes) or "uniform"


def prompt_policy(name: str, options: Mapping[str, object] | None = None) -> PromptPolicy | None:
    """Build the prompt policy of this name; None if it evicts nothing. Raises UsageError for a
    wrong name or option."""
    method = find(name)
    values = read_options(method.name, method.prompt_options, options or {})
    if not method.parts:
        return None
    from minikv.policies.parts import PromptPolicy

    made = {_FIELDS[part.axis]: part.make(values) for part in method.parts}
    return PromptPolicy(name=method.name, **made)


def step_policy(name: str, options: Mapping[str, object] | None = None) -> StepPolicy | None:
    """Build the step policy of this name; None if it evicts nothing. Raises UsageError for a wrong
    name or option."""
    method = find(name, step=True)
    values = read_options(method.name, method.step_options, options or {})
    return method.rule(**values) if method.rule else None

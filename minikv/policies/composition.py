"""Makes a policy from its name: a method, or a method composed of parts (`h2o+ada+pyramid`).

Neither importing this module nor refusing an unknown name imports torch; making a policy does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minikv.checks import guess, quoted
from minikv.errors import UsageError
from minikv.policies import registry
from minikv.policies.options import Method, options_of, read_options

if TYPE_CHECKING:
    from minikv.policies.base import StepPolicy
    from minikv.policies.parts import PromptPolicy

_AXES = ("scorer", "carry", "layers", "heads", "select", "weigh", "prefer")
"""The order in which a policy's parts are listed."""
_AMONG_HEADS = {"heads", "select", "weigh"}


def default_step(prompt: str) -> str:
    """What `--decode auto` means with this prompt policy: the step policy that the method names, or
    the same method if it has a step form, or the default one."""
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
    for word in words:
        if word in registry.GONE:
            raise UsageError(f"{word} is gone: {registry.GONE[word]}")
    if len(words) > 1 and not step:
        method = combine(name, words)
        check(method)
        return method
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
    methods = [registry.method(word) if word in registry.method_names() else None for word in words]
    base = methods[0]
    if base is None and words[0] in registry.SCORERS:  # NaCl's proxies
        base = replace(registry.method("snapkv"), parts=(registry.part(words[0]),))
    if base is None or not base.parts:
        scorers = [method.name for method in registry.methods() if method.parts]
        raise UsageError(
            f"cannot compose {name!r}: {words[0]!r} does not say what a token is worth",
            f"begin with one of {', '.join(scorers)}",
        )
    given = {part.axis: part for part in base.parts}
    # The base's default may be one budget for all layers: another allocation replaces it.
    shared = {axis for axis, part in given.items() if part.name == "global"}
    added: dict[str, type[Any]] = {}
    for word, method in zip(words[1:], methods[1:], strict=True):
        for part in _added(name, word, method):
            old = (given | added).get(part.axis, part)
            if old.name != part.name and part.axis not in shared - {*added}:
                raise UsageError(
                    f"cannot compose {name!r}: {old.name} and {part.name} answer the same question",
                    "take one of the two",
                )
            added[part.axis] = part
    if {*given, *added} & _AMONG_HEADS:
        given = {axis: part for axis, part in given.items() if axis not in shared}
    chosen, preset = given | added, dict(base.preset)
    for method in methods[1:]:
        preset |= method.preset if method is not None else {}
    return Method(
        name,
        "; ".join(chosen[axis].summary for axis in _AXES if axis in chosen),
        parts=tuple(chosen[axis] for axis in _AXES if axis in chosen),
        good="answers of many words" if "carry" in chosen else base.good,
        paper="composed",
        second=base.second,
        preset=preset,
        decode=base.decode,
    )


def check(method: Method) -> None:
    """Raise UsageError if the parts of a composed method cannot be combined."""
    among = [part.name for part in method.parts if part.axis in _AMONG_HEADS]
    if among and any(part.name == "global" for part in method.parts):
        raise UsageError(
            f"cannot compose {method.name!r}: global is one budget for all layers, which "
            f"leaves {among[0]} nothing to share among heads",
            "leave out one of the two",
        )


def _added(name: str, word: str, method: Method | None) -> list[type[Any]]:
    """The parts that a later word of a composition adds: one part, or those of a method except its
    scorer. Raises UsageError."""
    others = registry.part_names()
    if word in others:
        return [registry.part(word)]
    given = [part for part in method.parts if part.axis != "scorer"] if method else []
    if not given:
        what = "also says what a token is worth" if method and method.parts else "is not a part"
        raise UsageError(
            f"cannot compose {name!r}: {word!r} {what}",
            f"{guess(word, others, 3)}parts are: {', '.join(others)}",
        )
    return given


def prompt_policy(name: str, options: Mapping[str, object] | None = None) -> PromptPolicy | None:
    """Build the prompt policy of this name; None if it evicts nothing. Raises UsageError for a
    wrong name or option."""
    method = find(name)
    values = read_options(method.name, method.prompt_options, options or {})
    if not method.parts:
        return None
    from minikv.policies.parts import PromptPolicy

    made = {
        part.axis: part(**{option.name: values[option.name] for option in options_of(part)})
        for part in method.parts
    }
    return PromptPolicy(name=method.name, **made)


def step_policy(name: str, options: Mapping[str, object] | None = None) -> StepPolicy | None:
    """Build the step policy of this name; None if it evicts nothing. Raises UsageError for a wrong
    name or option."""
    method = find(name, step=True)
    values = read_options(method.name, method.step_options, options or {})
    return method.rule(**values) if method.rule else None

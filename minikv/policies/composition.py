"""Makes a policy from its name: a method, or a method composed of parts (`h2o+ada+pyramid`).

Importing this does not import torch; making a policy does.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minikv.checks import quoted
from minikv.errors import UsageError
from minikv.policies.options import Value, read_options
from minikv.policies.registry import (
    DEFAULT_STEP,
    PARTS,
    POLICIES,
    Part,
    PolicyInfo,
    prompt_names,
    step_names,
)

if TYPE_CHECKING:
    from minikv.policies.base import PromptPolicy, StepPolicy

_AXES = ("scorer", "layers", "heads", "select", "weigh", "prefer")


def default_step(prompt: str) -> str:
    """What `--decode auto` means with this prompt policy: the same method if it has a step form,
    otherwise the default one, unless the policy's row names another."""
    if prompt == "full":
        return "none"
    base = _words(prompt)[0]
    row = POLICIES.get(prompt) or POLICIES.get(base)
    if row is not None and row.decode:
        return row.decode
    return base if base in POLICIES and POLICIES[base].step else DEFAULT_STEP


def find(name: str, *, step: bool = False) -> PolicyInfo:
    """The registry row called `name`, or one composed of several rows. Raises UsageError, which
    suggests similar names.

    A prompt policy may be composed: `h2o+ada+pyramid` is H2O's scorer under Ada-KV's head budgets
    and PyramidKV's layer budgets, `kvcrush(h2o)` is `h2o+kvcrush`.
    """
    names = step_names() if step else prompt_names()
    info = POLICIES.get(name)
    if info is not None and (info.step if step else info.prompt):
        return info
    flag, other = ("`decode`", "`policy`") if step else ("`policy`", "`decode`")
    if info is not None:
        blocks = "" if step else f"`stride=32` makes {name} one that reads in blocks; without it, "
        raise UsageError(
            f"{name} works only as {other}, not as {flag}",
            f"{blocks}{flag} takes: {', '.join(names)}",
        )
    words = _words(name)
    if len(words) > 1 and not step:
        return _composed(name, words)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"unknown policy {quoted(name)}", f"{guess}{flag} takes: {', '.join(names)}")


def _words(name: str) -> list[str]:
    """Split a composed name: `a+b` and `b(a)` -> [a, b]; `c(a)+b` -> [a, c, b]; `kvzip++b` ->
    [kvzip+, b]."""
    terms, depth = [""], 0
    for sign in name.replace(" ", ""):
        depth += (sign == "(") - (sign == ")")
        if sign == "+" and depth == 0:
            terms.append("")
        else:
            terms[-1] += sign
    for at in range(len(terms) - 1, 0, -1):  # a name may end in a plus: kvzip+
        if not terms[at] and terms[at - 1] + "+" in POLICIES:
            terms[at - 1 : at + 1] = [terms[at - 1] + "+"]
    words: list[str] = []
    for term in terms:
        found = re.fullmatch(r"([\w-]+)\((.+)\)", term)
        words += [*_words(found[2]), found[1]] if found else [term]
    return words


def _composed(name: str, words: list[str]) -> PolicyInfo:
    """The row that `words` describe: a policy, then parts that replace its default parts. Raises
    UsageError."""
    base = POLICIES.get(words[0])
    if base is None and words[0] in PARTS and PARTS[words[0]].axis == "scorer":  # NaCl's proxies
        base = replace(POLICIES["snapkv"], parts=(words[0],))
    if base is None or not base.parts:
        scorers = [p.name for p in POLICIES.values() if p.parts]
        raise UsageError(
            f"cannot compose {name!r}: {words[0]!r} does not say what a token is worth",
            f"begin with one of {', '.join(scorers)}",
        )
    chosen = {PARTS[part].axis: part for part in base.parts}
    # "global" in the base policy is a default: another part that shares a budget replaces it.
    shared = chosen.get("layers") == "global"
    fixed = set(chosen) - ({"layers"} if shared else set())
    others = [p.name for p in PARTS.values() if p.axis != "scorer"]
    for word in words[1:]:
        row = POLICIES.get(word)
        given = [word] if word in others else [p for p in row.parts if p in others] if row else []
        if not given:
            near = difflib.get_close_matches(word, others, n=3, cutoff=0.5)
            guess = f"did you mean {' or '.join(near)}? " if near else ""
            what = "also says what a token is worth" if row and row.parts else "is no part"
            raise UsageError(
                f"cannot compose {name!r}: {word!r} {what}",
                f"{guess}parts are: {', '.join(others)}",
            )
        for part in given:
            axis = PARTS[part].axis
            if axis in fixed and chosen[axis] != part:
                raise UsageError(
                    f"cannot compose {name!r}: {chosen[axis]} and {part} answer the same question",
                    "take one of the two",
                )
            chosen[axis] = part
            fixed.add(axis)
    if shared and "layers" not in fixed and fixed & {"heads", "select", "weigh"}:
        del chosen["layers"]
    parts = tuple(chosen[axis] for axis in _AXES if axis in chosen)
    whole = [part for part in parts if PARTS[part].shares_all]
    among = [part for part in parts if PARTS[part].axis in ("heads", "select", "weigh")]
    if whole and among:
        raise UsageError(
            f"cannot compose {name!r}: {whole[0]} is one budget for all layers, which leaves "
            f"{among[0]} nothing to share among heads",
            "leave out one of the two",
        )
    preset = {**base.preset}
    for word in words[1:]:
        preset |= POLICIES[word].preset if word in POLICIES else {}
    spread = {"layers": "per layer", "heads": "per head"}
    shape = " and ".join(text for axis, text in spread.items() if axis in chosen) or "uniform"
    shape = "one for all layers and heads" if whole else shape
    summary = "; ".join(PARTS[part].summary for part in parts)
    return replace(
        base,
        name=name,
        shape=shape,
        parts=parts,
        summary=summary,
        scores=PARTS[parts[0]].summary,
        paper="composed",
        preset=preset,
        step=False,
        when="prompt",
        state="-",
        module="",
        cls="",
        own=(),
        stride="",
        differs=(),
    )


def prompt_policy(name: str, options: Mapping[str, object] | None = None) -> PromptPolicy | None:
    """Build the prompt policy of this name; None if it evicts nothing. Raises UsageError for a
    wrong name or option."""
    info = find(name)
    values = read_options(info.name, info.prompt_options, options or {})
    if not info.parts:
        return None
    from minikv.policies.base import HeadAllocator, LayerAllocator, PromptPolicy, Selector

    parts = {PARTS[part].axis: _part(PARTS[part], values) for part in info.parts}
    return PromptPolicy(
        name=info.name,
        scorer=parts["scorer"],
        layers=parts.get("layers", LayerAllocator()),
        heads=parts.get("heads", HeadAllocator()),
        selector=parts.get("select", Selector()),
        reweighter=parts.get("weigh"),
        preference=parts.get("prefer"),
    )


def _part(part: Part, values: Mapping[str, Value]) -> Any:
    """The object that a part's row describes. `values` may also have options of other parts."""
    made = getattr(importlib.import_module(part.module), part.cls)
    return made(**{option.name: values[option.name] for option in part.options})


def step_policy(name: str, options: Mapping[str, object] | None = None) -> StepPolicy | None:
    """Build the step policy of this name; None if it evicts nothing. Raises UsageError for a wrong
    name or option."""
    info = find(name, step=True)
    values = read_options(info.name, info.own, options or {})
    if not info.module:
        return None
    made = getattr(importlib.import_module(info.module), info.cls)(**values)
    assert made.name == name
    return made  # type: ignore[no-any-return]

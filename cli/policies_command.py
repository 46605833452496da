"""`minikv policies`: the eviction methods, and what each does."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from minikv.checks import guess, quoted
from minikv.cli.screen.text import grid
from minikv.cli.settings.flags import Call, Json, command, group
from minikv.cli.settings.values import text
from minikv.errors import UsageError
from minikv.models import refuse_without_torch
from minikv.policies import Option, find, part_names, prompt_names, registry, step_names
from minikv.policies.composition import parse
from minikv.policies.options import Method, options_of

_QUESTIONS = {
    "scorer": "how much a token is worth, and which are always kept",
    "carry": "what a token passes on to the text that follows it",
    "layers": "how many tokens each layer keeps",
    "heads": "how many tokens each head of a layer keeps",
    "select": "which tokens a head keeps",
    "weigh": "what a token's score is multiplied with",
    "prefer": "which tokens are evicted last",
}

policies = group("minikv policies show global-span\n\nThe eviction methods, one line each.")


@policies.callback(invoke_without_command=True)
@command
def listed(call: Call, as_json: Json = False) -> None:
    refuse_without_torch()
    records = [_policy_record(info) for info in registry.methods()]
    call.terminal.data(json.dumps(records) if as_json else _policies_table(), fold=not as_json)


@policies.command()
@command
def show(
    call: Call,
    name: Annotated[str, typer.Argument(help="a name from `minikv policies`")],
    as_json: Json = False,
) -> None:
    """minikv policies show global-span

    One method: its options, defaults and limits, and how it differs from its paper and the paper's
    code.
    """
    refuse_without_torch()
    parts = (*registry.SCORERS, *part_names())
    if name in parts and name not in registry.method_names():
        part = registry.part(name)
        call.terminal.data(
            json.dumps(_part_record(part)) if as_json else _part_card(part), fold=not as_json
        )
        return
    if name in registry.method_names():
        info = registry.method(name)
    elif len(parse(name)) > 1:
        info = find(name)
    else:
        near = guess(name, [*registry.method_names(), *parts])
        raise UsageError(f"unknown policy {quoted(name)}", f"{near}`minikv policies` lists all")
    call.terminal.data(
        json.dumps(_policy_record(info)) if as_json else _policy_card(info), fold=not as_json
    )


def _policies_table() -> str:
    """Every method in the registry, one line of at most 80 characters each."""
    rows = [("POLICY", "WHEN", "GOOD FOR", "2ND QUESTION", "PAPER")]
    parts = ", ".join(part_names())
    rows += [(i.name, i.when, i.good, i.second, i.paper) for i in registry.methods()]
    return (
        f"{grid(rows, '<<<<<')}\n\n"
        f"{_wrapped('--policy takes ' + ', '.join(prompt_names()))}\n"
        f"{_wrapped('--decode takes ' + ', '.join(step_names()))}\n"
        f"{_wrapped('parts to add to a policy: ' + parts + ' (as in h2o+ada)')}\n"
        "minikv policies show NAME   what it scores with, budget, state, options"
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="    ", break_on_hyphens=False)


def _policy_card(info: Method) -> str:
    """One method: what it does, and its options with defaults and limits."""
    rows = [
        ("flag", " ".join(_flags(info))),
        ("good for", info.good),
        ("when", info.when),
        ("budget", info.shape),
        ("scores", info.scores),
        ("state", info.state),
        ("2nd question", info.second),
        ("paper", info.paper),
    ]
    if info.stride:
        rows.insert(3, ("--stride", info.stride))
    text = f"{textwrap.fill(f'{info.name}: {info.summary}', 80)}\n\n{grid(rows, '<<')}\n\n"
    return text + _options(info.options) + _differs(info.differences)


def _part_card(part: type[Any]) -> str:
    """One part of a policy: which question it answers, and its options."""
    used = [info.name for info in registry.methods() if part in info.parts]
    rows = [
        ("answers", _QUESTIONS[part.axis]),
        ("part of", ", ".join(used) or "no preset"),
        ("spelled", f"{part.name}(h2o)" if part.axis == "select" else _spelling(part)),
    ]
    return (
        f"{part.name}: {part.summary}\n\n{grid(rows, '<<')}\n\n{_options(options_of(part))}"
        + _differs(part.differs)
    )


def _spelling(part: type[Any]) -> str:
    return f"{part.name}+ada" if part.axis == "scorer" else f"h2o+{part.name}"


def _part_record(part: type[Any]) -> dict[str, object]:
    """A part as JSON has it."""
    return {
        "name": part.name,
        "axis": part.axis,
        "summary": part.summary,
        "options": [_option_record(option) for option in options_of(part)],
        "differences": list(part.differs),
    }


def _options(options: Sequence[Option]) -> str:
    if not options:
        return "no options"
    lines = []
    for option in options:
        lines.append(f"-o {option.name}={text(option.default)}")
        lines += textwrap.wrap(
            f"{option.help}{_limits(option)}", 80, initial_indent="    ", subsequent_indent="    "
        )
    return "\n".join(lines)


def _differs(lines: Sequence[str]) -> str:
    """How it differs from paper and release; nothing if it does not."""
    if not lines:
        return ""
    items = [textwrap.fill(x, 80, initial_indent="- ", subsequent_indent="  ") for x in lines]
    return "\n".join(["\n\ndifferences from paper and release", *items])


def _policy_record(info: Method) -> dict[str, object]:
    """A method as JSON has it."""
    return {
        "name": info.name,
        "prompt": "--policy" in _flags(info),
        "decode": "--decode" in _flags(info),
        "when": info.when,
        "good_for": info.good,
        "budget_shape": info.shape,
        "scores": info.scores,
        "state": info.state,
        "second_question": info.second,
        "paper": info.paper,
        "stride": info.stride,
        "summary": info.summary,
        "options": [_option_record(option) for option in info.options],
        "differences": list(info.differences),
    }


def _option_record(option: Option) -> dict[str, object]:
    return {
        "name": option.name,
        "default": option.default,
        "help": option.help,
        "low": option.low,
        "high": option.high,
        "choices": list(option.choices),
    }


def _flags(info: Method) -> list[str]:
    """The flags that take it; --policy, if it is composed."""
    composed = info.name not in registry.method_names()
    takes = ("--policy", prompt_names()), ("--decode", step_names())
    return ["--policy"] if composed else [flag for flag, names in takes if info.name in names]


def _limits(option: Option) -> str:
    if option.choices:
        return f" ({' or '.join(option.choices)})"
    if option.low is None and option.high is None:
        return ""
    return f" ({option.low:g} to {option.high:g})"

"""`minikv policies`: the eviction methods, and what each does."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from minikv.checks import guess, quoted
from minikv.cli.screen.text import grid
from minikv.cli.settings.flags import Call, command, group, text
from minikv.errors import UsageError
from minikv.models import refuse_without_torch
from minikv.policies import Option, find, part_names, prompt_names, registry, step_names
from minikv.policies.options import Method, options_of

_QUESTIONS = {
    "scorer": "how much a token is worth, and which are always kept",
    "carry": "what a token passes on to the text that follows it",
    "layers": "how many tokens each layer keeps",
    "heads": "how many tokens each head of a layer keeps",
    "select": "which tokens a head keeps",
    "weigh": "the factors of tokens' scores",
    "prefer": "which tokens are evicted last",
}
_COLUMNS = ("POLICY", "WHEN", "GOOD FOR", "2ND QUESTION", "PAPER")

policies = group("minikv policies show global-span\n\nThe eviction methods, one line each.")


@policies.callback(invoke_without_command=True)
@command
def listed(call: Call) -> None:
    refuse_without_torch()
    methods = registry.methods()
    rows = [_COLUMNS, *((i.name, i.when, i.good, i.second, i.paper) for i in methods)]
    names = (
        f"--policy takes {', '.join(prompt_names())}",
        f"--decode takes {', '.join(step_names())}",
        f"parts to add to a policy: {', '.join(part_names())} (as in h2o+ada)",
    )
    wide = min(80, call.terminal.columns or 80)
    wrapped = [
        textwrap.fill(line, wide, subsequent_indent="    ", break_on_hyphens=False)
        for line in names
    ]
    last = "minikv policies show NAME   what it scores with, budget, state, options"
    call.terminal.data(
        "\n".join([f"{grid(rows, '<<<<<', call.terminal.columns)}\n", *wrapped, last]), fold=True
    )


@policies.command(short_help="The options of one method, and how it differs from its paper.")
@command
def show(
    call: Call,
    name: Annotated[str, typer.Argument(help="a name from `minikv policies`")],
) -> None:
    """minikv policies show global-span

    One method: its options, defaults and limits, and how it differs from its paper and the paper's
    code.
    """
    refuse_without_torch()
    wide = min(80, call.terminal.columns or 80)
    if name in registry.method_names():
        card = _card(registry.method(name), wide)
    elif name in (*registry.SCORERS, *part_names()):
        card = _part(registry.part(name), wide)
    elif len(registry.parse(name)) > 1 or name in registry.GONE:
        card = _card(find(name), wide)
    else:
        near = guess(name, [*registry.method_names(), *registry.SCORERS, *part_names()])
        raise UsageError(f"unknown policy {quoted(name)}", f"{near}`minikv policies` lists all")
    call.terminal.data(card, fold=True)


def _card(info: Method, wide: int) -> str:
    """A method as text: what it does, and its options with defaults and limits."""
    rows = [
        ("flag", " ".join(_flags(info))),
        ("good for", info.good),
        ("when", info.when),
        *([("--stride", info.stride)] if info.stride else []),
        ("budget", info.shape),
        ("scores", info.scores),
        ("state", info.state),
        ("2nd question", info.second),
        ("paper", info.paper),
    ]
    summary = textwrap.fill(f"{info.name}: {info.summary}", wide)
    return _text(summary, rows, info.options, info.differences, wide)


def _part(part: type[Any], wide: int) -> str:
    """One part of a policy as text."""
    options, used = options_of(part), [i.name for i in registry.methods() if part in i.parts]
    spelled = {"select": f"{part.name}(h2o)", "scorer": f"{part.name}+ada"}
    rows = [
        ("answers", _QUESTIONS[part.axis]),
        ("part of", ", ".join(used) or "no preset"),
        ("spelled", spelled.get(part.axis, f"h2o+{part.name}")),
    ]
    return _text(f"{part.name}: {part.summary}", rows, options, part.differs, wide)


def _flags(info: Method) -> list[str]:
    """The flags that take it; --policy if it is composed."""
    if info.name not in registry.method_names():
        return ["--policy"]
    takes = ("--policy", prompt_names()), ("--decode", step_names())
    return [flag for flag, names in takes if info.name in names]


def _text(
    summary: str,
    rows: Sequence[tuple[str, str]],
    options: Sequence[Option],
    differences: Sequence[str],
    wide: int,
) -> str:
    lines = [f"{summary}\n", f"{grid(rows, '<<')}\n"]
    for one in options:
        allowed = f" ({' or '.join(one.choices)})" if one.choices else ""
        if one.low is not None:
            allowed = f" ({one.low:.12g} to {one.high:.12g})"
        lines.append(f"-o {one.name}={text(one.default)}")
        lines.append(textwrap.indent(textwrap.fill(f"{one.help}{allowed}", wide - 4), "    "))
    if not options:
        lines.append("no options")
    if differences:
        lines.append("\ndifferences from paper and release")
    lines += [textwrap.fill(f"- {one}", wide, subsequent_indent="  ") for one in differences]
    return "\n".join(lines)

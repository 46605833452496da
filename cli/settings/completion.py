"""What Tab completes, in a chat and in the shell. Only the options of policies load torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import typer

from minikv.cli.eval.names import TASKS
from minikv.errors import UsageError
from minikv.policies import find, part_names, prompt_names, step_names
from minikv.settings import Setting

BUDGETS = ("auto", "128", "256", "512", "1024", "10%", "20%", "64MiB")
"""Examples of budgets, in each unit."""


def policies(word: str = "") -> list[str]:
    """The prompt policies; after a "+", the parts that can be added to one."""
    begin, plus, _ = word.rpartition("+")
    if not plus:
        return prompt_names()
    return [f"{begin}+{part}" for part in part_names()]


def steps() -> list[str]:
    """The values of --decode."""
    return ["auto", *step_names()]


def options(policy: str) -> list[str]:
    """The options of a policy, as `NAME=`; none for an unknown policy."""
    with contextlib.suppress(UsageError):
        return [f"{option.name}=" for option in find(policy).options]
    return []


def values(setting: Setting, word: str = "") -> Sequence[str]:
    """The values of a setting, or examples of them."""
    if type(setting.default) is bool:
        return ("on", "off")
    known: dict[str, Callable[[], Sequence[str]]] = {
        "policy": lambda: policies(word),
        "decode": steps,
        "budget": lambda: BUDGETS,
        "device": lambda: ("auto", "cpu", "cuda"),
    }
    return setting.choices or setting.words or known.get(setting.name, tuple)()


def flag(setting: Setting) -> Callable[[str], list[str]] | None:
    """The function that completes a flag's value in the shell. None if the shell can do that by
    itself, or if there is nothing to complete.

    A value may be one of several, separated by commas.
    """
    if setting.name == "model":
        return _aliases
    if not values(setting) or type(setting.default) is bool:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in values(setting, word)]

    return complete


def policy_options(ctx: typer.Context, incomplete: str) -> list[str]:
    """After -o: the options of --policy and --decode."""
    names = (ctx.params.get("policy"), ctx.params.get("decode"))
    return list(dict.fromkeys(one for name in names if name for one in options(name)))


def tasks(incomplete: str) -> list[str]:
    """The names that `minikv eval --tasks` takes."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{task}" for task in TASKS]


def saved(incomplete: str = "") -> list[str]:
    """The saved chats, the newest first."""
    from minikv.cli.saved.listing import listing  # --help needs no chats

    with contextlib.suppress(UsageError):
        return [entry.name for entry in listing()]
    return []


def _aliases(incomplete: str) -> list[str]:
    from minikv.cli.settings import config

    with contextlib.suppress(UsageError):
        return list(config.load().aliases)
    return []

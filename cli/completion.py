"""What may follow: candidates for Tab in a chat and for the shell. Nothing here loads torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import typer

from minikv.cli.evaluation.names import TASKS
from minikv.errors import UsageError
from minikv.policies import PARTS, POLICIES, find, prompt_names, step_names
from minikv.settings import Setting

BUDGETS = ("128", "256", "512", "1024", "10%", "20%", "64MiB")
"""Some of the budgets that there are, one unit after the other."""


def policies(word: str = "") -> list[str]:
    """The policies for prompts; behind a "+", what may be added to one."""
    begin, plus, _ = word.rpartition("+")
    if not plus:
        return prompt_names()
    return [f"{begin}+{part.name}" for part in PARTS.values() if part.axis != "scorer"]


def steps() -> list[str]:
    """What --decode takes."""
    return ["auto", *step_names()]


def options(policy: str) -> list[str]:
    """The options of a policy, as `NAME=`; none of one that there is not."""
    with contextlib.suppress(UsageError):
        return [f"{option.name}=" for option in find(policy).options]
    return []


def chats() -> list[str]:
    """The saved chats, the newest first."""
    from minikv.cli.saved.listing import listing  # --help needs no chats

    with contextlib.suppress(UsageError):
        return [entry.name for entry in listing()]
    return []


def values(setting: Setting, word: str = "") -> Sequence[str]:
    """What a setting may be, or some of it."""
    if type(setting.default) is bool:
        return ("on", "off")
    known: dict[str, Callable[[], Sequence[str]]] = {
        "policy": lambda: policies(word),
        "decode": steps,
        "budget": lambda: BUDGETS,
        "device": lambda: ("auto", "cpu", "cuda"),
    }
    return setting.choices or known.get(setting.name, tuple)()


def flag(setting: Setting) -> Callable[[str], list[str]] | None:
    """What a shell completes behind a flag; None where it knows that itself, or nobody does.

    Commas stand between several values, where a flag takes them.
    """
    if setting.name == "model":
        return _aliases
    if setting.choices or not values(setting) or type(setting.default) is bool:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in values(setting, word)]

    return complete


def policy_options(ctx: typer.Context, incomplete: str) -> list[str]:
    """Behind -o: the options of --policy and --decode."""
    names = (ctx.params.get("policy"), ctx.params.get("decode"))
    return list(dict.fromkeys(one for name in names if name for one in options(name)))


def rows(incomplete: str) -> list[str]:
    """What `minikv policies show` takes."""
    return [*POLICIES, *(name for name in PARTS if name not in POLICIES)]


def tasks(incomplete: str) -> list[str]:
    """What `minikv eval --tasks` takes."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{task}" for task in TASKS]


def saved(incomplete: str) -> list[str]:
    """What --resume, `minikv chats show` and `minikv chats rm` take."""
    return chats()


def keys(incomplete: str) -> list[str]:
    """What `minikv config set` takes first."""
    from minikv.cli.config import SETTINGS

    return list(SETTINGS)


def key_values(ctx: typer.Context, incomplete: str) -> list[str]:
    """What `minikv config set` takes behind a key."""
    from minikv.cli.config import SETTINGS

    setting = SETTINGS.get(str(ctx.params.get("key")))
    return list(values(setting, incomplete)) if setting else []


def _aliases(incomplete: str) -> list[str]:
    from minikv.cli import config

    with contextlib.suppress(UsageError):
        return list(config.load().aliases)
    return []

"""Parses, shows and completes values of flags (lists with commas, pairs, numbers of tokens), and
rewrites the Python remedies in messages of the runtime as flags and commands. Only the options of
policies load torch.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import typer

from minikv.checks import quoted
from minikv.cli.eval.items import TASKS
from minikv.cli.screen.text import cells, cut, padded
from minikv.cli.settings.config import SETTINGS
from minikv.errors import UsageError
from minikv.policies import find, part_names, prompt_names
from minikv.settings import Setting

_SCALES = {"": 1, "k": 10**3, "ki": 1 << 10, "m": 10**6, "mi": 1 << 20}
_MOST = 1 << 30  # tokens


def read_list(text: str, flag: str = "") -> tuple[str, ...]:
    """The values between commas, each once. If a `flag` is given and there is no value, raises
    UsageError."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if flag and not parts:
        raise UsageError(f"{flag} names nothing", "give one or more, with commas between them")
    return parts


def read_pairs(pairs: list[str]) -> dict[str, object]:
    """["window=16"] -> {"window": "16"}. Raises UsageError on anything else."""
    options: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"an option is name=value, got {pair!r}", "for example -o window=16")
        options[name] = value
    return options


def read_count(text: str, flag: str) -> int:
    """ "100k", "32Ki", "1.5M" or "8192" as the number of tokens of a flag. Raises UsageError."""
    found = re.fullmatch(r"([\d,_]{0,30}\d(?:\.\d{1,18})?)\s*([kKmM]i?)?", text.strip())
    if found:
        number = Fraction(found[1].replace(",", "").replace("_", ""))
        number *= _SCALES[(found[2] or "").lower()]
        if number.denominator == 1 and 1 <= number <= _MOST:
            return int(number)
    raise UsageError(
        f"cannot read the number of tokens {quoted(text)}",
        f"for example {flag} 8192, 100k or 32Ki",
    )


def listed(values: Mapping[str, str], origins: Mapping[str, str]) -> list[str]:
    """Lines of name, value and origin."""
    names = max(len(name) for name in values)
    wide = min(max(cells(value) for value in values.values()), 24)
    return [
        f"{name:<{names}}  {padded(cut(' '.join(value.split()), 60) or '-', wide)}  "
        f"{origins.get(name, '')}".rstrip()
        for name, value in values.items()
    ]


def text(value: object) -> str:
    """A value in the form of a file, but a text without quotes."""
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


_CODE = re.compile(r"`([^`\n]+)`")
_CALL = re.compile(r"chat\.(\w+)\(([^()]*)\)")
_SET = re.compile(r"chat\.(\w+) = (.+)")


def worded(text: str, *, chat: bool = False) -> str:
    """`dtype="float32"` becomes --dtype float32, `chat.undo(2)` /undo 2, `chat.reuse = "once"`
    /set reuse once. chat: what can change there is changed there, so `budget` becomes /budget and
    `top_k` /set top_k. Other backquotes stay as they are."""
    return _CODE.sub(lambda found: _worded(found[1], chat) or found[0], text)


def _worded(code: str, chat: bool) -> str:
    if call := _CALL.fullmatch(code):
        return f"/{call[1]} {_plain(call[2])}".rstrip()
    if change := _SET.fullmatch(code):
        return f"/set {change[1]} {_plain(change[2])}"
    settings = [_setting(argument, chat) for argument in code.split(", ")]
    return " ".join(settings) if all(settings) else ""


def _setting(argument: str, chat: bool) -> str:
    name, _, value = argument.partition("=")
    if name not in SETTINGS:
        return ""
    shown = SETTINGS[name].flag
    if chat and SETTINGS[name].live:
        shown = f"/{name}" if name in ("policy", "budget", "system") else f"/set {name}"
    return f"{shown} {'' if value == 'True' else _plain(value)}".rstrip()


def _plain(value: str) -> str:
    return value.strip("\"'")


def policies(word: str = "") -> list[str]:
    """The prompt policies; after a "+", the parts that can be added to one."""
    begin, plus, _ = word.rpartition("+")
    if not plus:
        return prompt_names()
    return [f"{begin}+{part}" for part in part_names()]


def options_of(policy: str) -> list[str]:
    """The options of a policy, as `NAME=`; none for an unknown policy."""
    with contextlib.suppress(UsageError):
        return [f"{option.name}=" for option in find(policy).options]
    return []


def values_of(setting: Setting, word: str = "") -> Sequence[str]:
    """The values of a setting, or examples of them."""
    if type(setting.default) is bool:
        return ("on", "off")
    if setting.name == "policy":
        return policies(word)
    return setting.choices or setting.words or setting.examples


def completed(setting: Setting) -> Callable[[str], list[str]] | None:
    """The function that completes a flag's value in the shell. None if the shell can do that by
    itself, or if there is nothing to complete.

    A value may be one of several, separated by commas.
    """
    if setting.name == "model":
        return _aliases
    if not values_of(setting) or type(setting.default) is bool:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in values_of(setting, word)]

    return complete


def policy_options(ctx: typer.Context, incomplete: str) -> list[str]:
    """After -o: the options of --policy and --decode."""
    names = (ctx.params.get("policy"), ctx.params.get("decode"))
    return list(dict.fromkeys(one for name in names if name for one in options_of(name)))


def tasks(incomplete: str) -> list[str]:
    """The names that `minikv eval --tasks` takes."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{task}" for task in TASKS]


def saved(incomplete: str = "") -> list[str]:
    """The saved chats, the newest first."""
    from minikv.cli.saved.listing import listing  # late: --help needs no chats

    with contextlib.suppress(UsageError):
        return [entry.name for entry in listing()]
    return []


def _aliases(incomplete: str) -> list[str]:
    from minikv.cli.settings import config

    with contextlib.suppress(UsageError):
        return list(config.load().aliases)
    return []

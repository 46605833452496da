"""Values as flags take them (lists with commas, pairs, numbers of tokens), and as they are shown.
Loads nothing else, so `--help` may import it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction

from minikv.checks import quoted
from minikv.cli.screen.text import cells, cut, padded
from minikv.errors import UsageError

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


def read_count(text: str) -> int:
    """ "100k", "32Ki", "1.5M" or "8192" as a number of tokens. Raises UsageError."""
    found = re.fullmatch(r"([\d,_]{0,30}\d(?:\.\d{1,18})?)\s*([kKmM]i?)?", text.strip())
    if found:
        number = Fraction(found[1].replace(",", "").replace("_", ""))
        number *= _SCALES[(found[2] or "").lower()]
        if number.denominator == 1 and 1 <= number <= _MOST:
            return int(number)
    raise UsageError(
        f"cannot read the number of tokens {quoted(text)}",
        "for example --tokens 8192, 100k or 32Ki",
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
    """A value as a file would have it, a text without quotes."""
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)

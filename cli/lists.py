"""Lists with commas, as flags take them."""

from __future__ import annotations

from minikv.errors import UsageError


def read_list(text: str, flag: str = "") -> tuple[str, ...]:
    """What stands between commas, each once. Raises UsageError if it is nothing, where a `flag` is
    named."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if flag and not parts:
        raise UsageError(f"{flag} names nothing", "give one or more, with commas between them")
    return parts

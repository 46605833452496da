"""Checks of arguments, so that an error names the argument and its allowed values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from minikv.errors import UsageError

_BYTES = "decode it first, as in data.decode()"
_PATH = "read it first, as in path.read_text()"


def quoted(value: object) -> str:
    """A user's value for a message: as ASCII, and at most 60 characters."""
    try:
        text = ascii(value)
    except ValueError:  # Python converts no number of more than 4,300 digits to text
        text = "a very large number"
    return text if len(text) <= 60 else f"{text[:57]}..."


_NEAR = 0.65
"""`difflib`'s likeness from which on one name can be a slip for another: "h20" has 0.67 of "h2o",
"nonsense" 0.57 of "tokens"."""


def guess(word: str, names: Iterable[str], most: int = 1) -> str:
    """The beginning of a hint that asks for the most similar of these names, whatever signs they
    begin with; "" if none is."""
    import difflib  # needed after a slip only

    bare = {name.lstrip("/-"): name for name in names}
    near = difflib.get_close_matches(word.lstrip("/-"), bare, n=most, cutoff=_NEAR)
    return f"did you mean {' or '.join(bare[name] for name in near)}? " if near else ""


def whole(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise UsageError if `value` is not a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"`{name}` must be a whole number (int), got {quoted(value)}")
    _within(name, value, low, high)


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise UsageError if `value` is not a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"`{name}` must be a number, got {quoted(value)}")
    _within(name, value, low, high)


def _within(name: str, value: float, low: float, high: float) -> None:
    if low <= value <= high:  # NaN fails too
        return
    if high == math.inf:
        raise UsageError(f"`{name}` must be at least {low:,}, got {quoted(value)}")
    raise UsageError(f"`{name}` must be between {low:,} and {high:,}, got {quoted(value)}")


def text(what: str, value: object) -> None:
    """Raise UsageError if `value` is not a str."""
    if isinstance(value, str):
        return
    hint = _BYTES if isinstance(value, bytes | bytearray | memoryview) else ""
    if hasattr(value, "__fspath__"):
        hint = _PATH
    raise UsageError(f"{what} must be text (str), got {type(value).__name__}", hint)


def unicode(what: str, value: object) -> None:
    """Raise UsageError if `value` is not a str, or has lone surrogates, which no tokenizer accepts
    and which come from bytes that are not UTF-8."""
    text(what, value)
    assert isinstance(value, str)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code, at = ord(value[error.start]), f"at character {error.start:,}"
        why = f"a lone surrogate {at}"
        if 0xDC80 <= code <= 0xDCFF:  # Python's code for a byte that it could not decode
            why = f"byte 0x{code - 0xDC00:02x} {at} is not UTF-8"
        raise UsageError(f"{what} is not valid Unicode: {why}") from None


def function(name: str, value: object) -> None:
    """Raise UsageError if `value` is neither None nor callable."""
    if value is not None and not callable(value):
        raise UsageError(f"`{name}` must be a function, got {quoted(value)}")


def stop_texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The given stop texts, each once; none for None. A single text need not be in a sequence.
    Raises UsageError for one that is empty or not a str."""
    if isinstance(given, str | None):
        given = () if given is None else (given,)
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise UsageError(f"`stop` must be a text (str) or several, got {quoted(given)}")
    texts = tuple(given)
    for one in texts:
        text("each text of `stop`", one)
        if not one:
            raise UsageError("a stop text is empty", "every answer would end before it begins")
    return tuple(dict.fromkeys(texts))

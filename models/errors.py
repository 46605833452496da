"""Errors that say why a model cannot be used. The guide documents each `exit_code`."""

from __future__ import annotations


class ModelError(Exception):
    """Base: one line saying what happened and why; `hint` says what to do."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(hint)


class ModelUnavailable(ModelError):
    """Not found, gated, offline, or files missing."""


class UnsupportedModel(ModelError):
    """An architecture, setting, quantisation or weight format that minikv does not run."""


class CorruptModel(ModelError):
    """A damaged or unsafe file."""

    exit_code = 6


class ModelTooLarge(ModelError):
    """The weights do not fit into the memory that is free on the device."""

    exit_code = 4


class UnusableSetting(ModelError):
    """A setting that this machine, or this build of torch, does not support."""

    exit_code = 2


def quote(value: object, limit: int = 80) -> str:
    """A value from a file or a user, safe to show: escaped ASCII of at most `limit` characters.

    A text that is too long is cut in the middle, because the end of a path is the most informative.
    """
    try:
        text = ascii(value)
    except RecursionError:  # a list nested almost as deeply as the parser allows
        text = f"a deeply nested {type(value).__name__}"
    if len(text) <= limit:
        return text
    start = (limit - 3) // 2
    return f"{text[:start]}...{text[start + 3 - limit :]}"

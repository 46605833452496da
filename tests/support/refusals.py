"""Calls that end in a user's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minikv.errors import UsageError


def refused(
    says: str, act: Callable[..., object], *given: Any, error: Any = UsageError, **named: Any
) -> Any:
    """The error of this call, whose one line has the pattern `says`. Its hint is one line, too, and
    neither reaches a terminal as a command."""
    with pytest.raises(error, match=says or None) as caught:
        act(*given, **named)
    assert not {"\n", "\x1b"} & {*str(caught.value), *caught.value.hint}
    return caught.value


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises this error, whatever it is given."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail

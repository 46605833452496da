"""Calls that end in a user's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minikv.errors import UsageError


def refused(says: str, act: Callable[..., object], *given: Any, **named: Any) -> UsageError:
    """The UsageError of this call, whose one line has the pattern `says`."""
    with pytest.raises(UsageError, match=says) as caught:
        act(*given, **named)
    assert "\n" not in str(caught.value)
    return caught.value


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises this error, whatever it is given."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail

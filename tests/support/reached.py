"""A plugin of pytest: coverage notes which test runs each line, its fixtures included.

Its own `dynamic_context` leaves out fixtures and what hypothesis calls.
"""

from __future__ import annotations

from collections.abc import Iterator

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(item.nodeid.partition("[")[0])
    try:
        return (yield)
    finally:
        if measured is not None:
            measured.switch_context("")

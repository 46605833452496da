"""Without poison: filling memory would count as a launch."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _poison() -> None:
    """In place of the one that fills an arena's memory."""

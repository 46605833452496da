"""Tables of cases as text."""

from __future__ import annotations

from typing import Any

import pytest


def lines(table: str) -> list[Any]:
    """A case for each line of a table, whose columns stand between bars. The first names it. Lines
    that begin with # are for the reader."""
    told = [line for line in table.strip().splitlines() if line[0] != "#"]
    rows = [[cell.strip() for cell in line.split("|")] for line in told]
    return [pytest.param(*row, id=row[0]) for row in rows]

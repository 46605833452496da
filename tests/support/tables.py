"""Cases as a text."""

from __future__ import annotations

import pytest


def table(text: str) -> pytest.MarkDecorator:
    """`parametrize` by a text. Its first line names the columns, and each other line is a case.
    Bars separate the cells; `\\n` in one is a line end."""
    names, *cases = (
        [cell.strip().replace("\\n", "\n") for cell in line.split("|")]
        for line in text.strip().splitlines()
    )
    return pytest.mark.parametrize(names, cases)

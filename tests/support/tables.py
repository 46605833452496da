"""The cases of a test as a table of text."""

from __future__ import annotations

import re

import pytest

_BAR = re.compile(r"(?:^|(?<= ))\|(?= |$)")


def table(text: str) -> pytest.MarkDecorator:
    """The cases of a test: the first line has the names of its parameters, each other line a text
    for each of them, with bars between. A case is called by what its line says."""
    lines = (_BAR.split(line.strip()) for line in text.strip().splitlines())
    names, *rows = ([cell.strip() for cell in line] for line in lines)
    cases = [pytest.param(*row, id=" ".join(row)[:60]) for row in rows]
    return pytest.mark.parametrize(names, cases)

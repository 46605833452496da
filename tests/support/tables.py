"""Cases as a text."""

from __future__ import annotations

import re

import pytest

_BAR = re.compile(r"(?:^|(?<=\s))\|(?=\s|$)")


def table(text: str) -> pytest.MarkDecorator:
    """`parametrize` by a text. Its first line names the columns, and each other line is a case,
    called by what it says. Bars between blanks separate the cells; `\\n` in one is a line end.
    Lines that begin with # are for the reader."""
    names, *cases = (
        [cell.strip().replace("\\n", "\n") for cell in _BAR.split(line.strip())]
        for line in text.strip().splitlines()
        if line[0] != "#"
    )
    rows = [pytest.param(*case, id=" ".join(case)[:60]) for case in cases]
    return pytest.mark.parametrize(names, rows)

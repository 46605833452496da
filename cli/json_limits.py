"""A limit for JSON files: a small one can take a hundred times its size when it is parsed."""

from __future__ import annotations

import re

CONTAINERS, ITEMS = 1_000_000, 5_000_000
"""The most lists and objects, and the most commas, of one file, outside of texts. An object takes
64 bytes or more, a number 8 to 40."""

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text, or the rest of the file behind a quotation mark that has no second one. Otherwise each
escaped mark in the rest would be tried as a beginning, which is quadratic."""
_PIECE = re.compile(rb'(?:[^"]*+' + _TEXT.pattern + rb"){1,1000}+|[^\"]++", re.DOTALL)
"""Up to 1,000 texts with what is in front of them, or the rest: so little is copied at once."""


def refuse_many(data: bytes) -> None:
    """Raise ValueError if a JSON file has more lists, objects or items than any real one."""
    containers, items = data.count(b"{") + data.count(b"["), data.count(b",")
    if containers <= CONTAINERS and items <= ITEMS:
        return
    containers = items = 0
    for piece in _PIECE.finditer(data):  # perhaps they are in texts
        bare = _TEXT.sub(b"", piece[0])
        containers += bare.count(b"{") + bare.count(b"[")
        items += bare.count(b",")
        if containers > CONTAINERS or items > ITEMS:
            raise ValueError(
                f"more than {CONTAINERS:,} lists and objects, or {ITEMS:,} items, are too many"
            )

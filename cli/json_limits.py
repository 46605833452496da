"""A limit for JSON files: a small one can take a hundred times its size when it is parsed."""

from __future__ import annotations

import re

CONTAINERS, ITEMS = 1_000_000, 5_000_000
"""The most lists and objects, and the most commas, of one file, outside of texts. An object takes
64 bytes or more, a number 8 to 40."""

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text, or the rest of the file behind a quotation mark that has no second one. Otherwise each
escaped mark in the rest would be tried as a beginning, which is quadratic."""


def refuse_many(data: bytes) -> None:
    """Raise ValueError if a JSON file has more lists, objects or items than any real one."""
    containers, items = data.count(b"{") + data.count(b"["), data.count(b",")
    if containers > CONTAINERS or items > ITEMS:  # perhaps they are in texts
        bare = _TEXT.sub(b"", data)
        containers, items = bare.count(b"{") + bare.count(b"["), bare.count(b",")
    if containers > CONTAINERS or items > ITEMS:
        raise ValueError(f"{containers:,} lists and objects and {items:,} items are too many")

"""How a Python prompt and a notebook show chats and reports: as a line, or as a small table."""

from __future__ import annotations

import html
from collections.abc import Iterable

_MOST = 300  # characters of a cell


def clipped(text: str, most: int) -> str:
    """`text` on one line of at most `most` characters, with a space for what is not printable."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def line(what: str, words: Iterable[str]) -> str:
    """ "<minikv chat: bundled, 2 turns>"."""
    return f"<minikv {what}: {clipped(', '.join(filter(None, words)), _MOST)}>"


def table(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    """Rows (name, value) as an HTML table. All text is escaped; there are no styles and no
    scripts."""
    cells = "".join(
        f"<tr><th>{_cell(name)}</th><td>{_cell(value)}</td></tr>" for name, value in rows
    )
    return f"<table><caption>{_cell(caption)}</caption>{cells}</table>"


def _cell(text: str) -> str:
    return html.escape(clipped(text, _MOST))

"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def grid(lines: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Columns of equal width with two spaces between them; `sides`: < left, > right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(sides))]
    return "\n".join(
        "  ".join(
            f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)
        ).rstrip()
        for line in lines
    )

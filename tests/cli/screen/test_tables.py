"""Widths in cells, against rich's count of them and textwrap's rows of plain ASCII."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from minikv.cli.screen import terminal
from minikv.cli.screen.tables import cut, cut_middle, grid, padded, wrapped

SIGNS = ["a", "-", " ", " ", "中", "文", "é", "e\u0301", "❤\ufe0f", "👩\u200d🔬", "ก็", "😀"]
TEXTS = st.lists(st.sampled_from(SIGNS), max_size=60).map("".join)
KANJI = " ".join(["赤い果物"] * 20)


@given(TEXTS, st.integers(20, 80), st.integers(0, 6))
def test_no_row_is_too_wide_and_no_letter_is_lost(text: str, width: int, margin: int) -> None:
    rows = wrapped(text, width, " " * margin)
    assert all(cell_len(row) <= width or row.strip().isascii() for row in rows)
    assert "".join("".join(rows).split()) == "".join(text.split())
    assert not any(row.strip()[:1] in ("\u0301", "\ufe0f", "\u200d") for row in rows if row.strip())


@given(st.text("ab-/ ", max_size=90), st.integers(20, 40), st.integers(0, 6))
def test_ascii_is_broken_as_textwrap_breaks_it(text: str, width: int, margin: int) -> None:
    rows = textwrap.wrap(
        text,
        width,
        subsequent_indent=" " * margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if not text.startswith(" "):
        assert wrapped(text, width, " " * margin) == (rows or [""])


@pytest.mark.parametrize(
    ("line", "width", "rows"),
    [
        ("took back: " + "中" * 60, 80, ["took back: " + "中" * 34, "  " + "中" * 26]),
        (KANJI, 80, [" ".join(["赤い果物"] * 9)]),
        ("1  report-❤\ufe0f-中文.txt · 8 kB", 20, ["1  report-❤\ufe0f-中文.tx", "   t · 8 kB"]),
        ("名前  " + "中文 " * 9, 20, ["名前  中文 中文 中文", "      中文 中文 中文"]),
        ("中" * 10, 20, ["中" * 10]),
    ],
)
def test_lines_for_a_terminal_break_by_cells(line: str, width: int, rows: list[str]) -> None:
    made = terminal._wrapped(line, width).split("\n")
    assert made[: len(rows)] == rows
    assert max(map(cell_len, made)) <= width


@given(TEXTS, st.integers(2, 40))
def test_what_is_cut_fits_and_begins_and_ends_as_it_did(text: str, width: int) -> None:
    for made in (cut(text, width), cut_middle(text, width)):
        assert cell_len(made) <= width
        begin, sign, end = made.partition("…")
        assert made == text if not sign else text.startswith(begin) and text.endswith(end)
        assert bool(sign) == (cell_len(text) > width)


def test_columns_are_as_wide_as_their_widest_text() -> None:
    assert padded("中", 4) == "中  "
    assert padded("中", 4, ">") == "  中"
    table = grid([("NAME", "SIZE", "STATE"), ("中文-中文", "1", "ok"), ("é", "20", "")], "<><")
    assert table.split("\n") == ["NAME       SIZE  STATE", "中文-中文     1  ok", "é            20"]

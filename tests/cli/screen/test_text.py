"""Widths and rows, against rich's count of columns and textwrap's rows of plain ASCII."""

from __future__ import annotations

import re
import textwrap
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from minikv.cli.screen.text import broken, cells, clipped, cut, folded, grid, padded, shown

SIGNS = ["a", "-", " ", " ", "中", "文", "é", "e\u0301", "❤\ufe0f", "👩\u200d🔬", "ก็", "😀"]
TEXTS = st.lists(st.sampled_from(SIGNS), max_size=60).map("".join)
LETTERS = st.text(alphabet="ab  \t\n中😀e\u0301\ufe0f\x1b\r\u202e", max_size=60)


@settings(max_examples=150, deadline=None)
@given(LETTERS, st.integers(12, 30))
@example(" " * 40 + "x", 12)
@example("x" * 40, 12)
@example("a\t\t\t\u0301", 12)
def test_rows_fit_and_lose_nothing(text: str, width: int) -> None:
    rows = broken(text, width)
    assert "".join(text[a:b] for a, b in rows) == text.replace("\n", "")
    for (_, end), (begin, _) in pairwise(rows):
        assert begin == end or text[end:begin] == "\n"
    for begin, end in rows:
        # White space may hang over the edge, with the marks that it bears.
        line = re.sub(r"[ \t][ \t\u0301\ufe0f\x1b\r\u202e]*$", "", text[begin:end])
        assert cell_len(shown(line)) <= width
        assert "\x1b" not in shown(line)


@given(TEXTS, st.integers(20, 80), st.integers(0, 6))
def test_no_row_is_too_wide_and_no_letter_is_broken(text: str, width: int, margin: int) -> None:
    rows = folded(text, width, " " * margin, whole=True)
    assert all(cell_len(row) <= width or row.strip().isascii() for row in rows)
    assert "".join("".join(rows).split()) == "".join(text.split())
    assert not any(row.strip()[:1] in ("\u0301", "\ufe0f", "\u200d") for row in rows if row.strip())


@given(st.text("ab-/ ", max_size=90), st.integers(20, 40), st.integers(0, 6))
def test_ascii_is_broken_as_textwrap_breaks_it(text: str, width: int, margin: int) -> None:
    indent, whole = " " * margin, {"break_long_words": False, "break_on_hyphens": False}
    rows = textwrap.wrap(text, width, subsequent_indent=indent, **whole)  # type: ignore[arg-type]
    if not text.startswith(" "):
        assert [row for row in folded(text, width, indent, whole=True) if row.strip()] == rows


@pytest.mark.parametrize(
    ("text", "width", "rows"),
    [
        ("the mill is run by Ada", 12, ["the mill is", "  run by Ada"]),
        ("das Mühlrad 中中中 dreht", 13, ["das Mühlrad", "  中中中", "  dreht"]),
        (" ".join(["赤い果物"] * 10), 80, [" ".join(["赤い果物"] * 9), "  赤い果物"]),
        ("1  report-❤\ufe0f-中文.txt · 8 kB", 20, ["1  report-❤\ufe0f-中文", "  .txt · 8 kB"]),
        ("one\ntwo", 80, ["one", "  two"]),
        ("x" * 12, 9, ["x" * 9, "  " + "x" * 3]),
        ("", 80, [""]),
    ],
)
def test_rows_break_between_words_and_wide_letters(text: str, width: int, rows: list[str]) -> None:
    assert folded(text, width, "  ") == rows


@given(TEXTS, st.integers(2, 40))
def test_what_is_cut_fits_and_begins_as_it_did(text: str, width: int) -> None:
    made = cut(text, width)
    assert cell_len(made) <= width
    begin, sign, _ = made.partition("…")
    assert made == text if not sign else text.startswith(begin)
    assert bool(sign) == (cells(text) > width)
    assert cells(text) >= cell_len(text)


def test_names_are_one_line_and_columns_as_wide_as_their_widest_text() -> None:
    assert clipped("a\nb\x1b c", 20) == "a b c"
    assert clipped("中" * 20, 9) == "中" * 4 + "…"
    assert clipped("", 9) == ""
    assert padded("中", 4) == "中  "
    assert padded("中", 4, ">") == "  中"
    table = grid([("NAME", "SIZE", "STATE"), ("中文-中文", "1", "ok"), ("é", "20", "")], "<><")
    assert table.split("\n") == ["NAME       SIZE  STATE", "中文-中文     1  ok", "é            20"]
    table = grid([("a", "bb", "ccc"), ("x", "y", "z")], "<<>", 5)
    assert table == "a  bb\nx  y\n\na  ccc\nx    z"

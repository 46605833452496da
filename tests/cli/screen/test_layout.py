"""Text broken into the rows of a terminal."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from minikv.cli.screen import layout

LETTERS = st.text(alphabet="ab  \t\n中😀e\u0301\ufe0f\x1b\r\u202e", max_size=60)


@settings(max_examples=150, deadline=None)
@given(LETTERS, st.integers(12, 30), st.sampled_from(["utf-8", "ascii"]))
@example(" " * 40 + "x", 12, "utf-8")
@example("x" * 40, 12, "ascii")
@example("a\t\t\t\u0301", 12, "utf-8")
def test_rows_fit_and_lose_nothing(text: str, width: int, encoding: str) -> None:
    rows = layout.broken(text, width, encoding)
    assert "".join(text[a:b] for a, b in rows) == text.replace("\n", "")
    for (_, end), (begin, _) in pairwise(rows):
        assert begin == end or text[end:begin] == "\n"
    for begin, end in rows:
        # White space may stand over the edge, with the marks that it bears.
        line = re.sub(r" [ \u0301\ufe0f]*$", "", layout.shown(text[begin:end], encoding))
        # A sign that only becomes wide by what follows it may take the spare column of a screen.
        spare = text[begin:end].count("\ufe0f") if encoding == "utf-8" else 0
        assert cell_len(line) <= width + spare
        assert "\x1b" not in line
        line.encode(encoding)


def test_rows_break_between_words() -> None:
    text = "the mill is run by Ada"
    assert [text[a:b] for a, b in layout.broken(text, 12)] == ["the mill is ", "run by Ada"]
    wide = "das Mühlrad 中中中 dreht"
    assert [wide[a:b] for a, b in layout.broken(wide, 13)] == ["das Mühlrad ", "中中中 dreht"]


def test_folded_lines_are_indented() -> None:
    assert layout.folded("one two three", 8, "  ") == ["one two", "  three"]
    assert layout.folded("one\ntwo", 80, "  ") == ["one", "  two"]
    assert layout.folded("", 80) == [""]
    assert layout.folded("中", 80, "", "ascii") == ["\\u4e2d"]


def test_clipped_names() -> None:
    assert layout.clipped("a\nb\x1b c", 20) == "a b c"
    assert layout.clipped("中" * 20, 9) == "中" * 4
    assert layout.clipped("", 9) == ""

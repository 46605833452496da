"""Answers in Markdown on a terminal: what a terminal emulator shows of them, and what they cost."""

from __future__ import annotations

import fcntl
import io
import random
import re
import struct
import sys
import termios
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

pyte = pytest.importorskip("pyte")

from forked import Forked  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from pairwise import some_by_day  # noqa: E402
from rich.cells import cell_len  # noqa: E402
from terminals import Terminals  # noqa: E402

from minikv.cli.screen.markdown import Answer  # noqa: E402
from minikv.cli.screen.terminal import Terminal, clean  # noqa: E402

HERE = Path(__file__).parents[2]


class Window:
    """A terminal emulator with everything that scrolled off its top."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.size = (columns, rows)
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.5)
        self.stream = pyte.Stream(self.screen)
        self.written = ""

    def feed(self, text: str) -> None:
        self.written += text
        self.stream.feed(text.replace("\n", "\r\n"))

    def resize(self, columns: int, rows: int) -> None:
        self.size = (columns, rows)
        self.screen.resize(rows, columns)

    def lines(self) -> list[str]:
        """All rows ever shown, without what was erased."""
        above = [
            "".join(row[x].data for x in range(self.size[0])) for row in self.screen.history.top
        ]
        return [line.rstrip() for line in [*above, *self.screen.display]]

    def text(self) -> str:
        """The lines, those that the terminal itself broke put together again."""
        return "".join(
            line if cell_len(line) == self.size[0] else line + "\n" for line in self.lines()
        ).rstrip("\n")

    def styles(self, word: str) -> dict[str, object]:
        """How the first letter of `word` looks; it must be on the screen."""
        for y, line in enumerate(self.screen.display):
            x = line.find(word)
            if x >= 0:
                return dict(self.screen.buffer[y][x]._asdict())
        raise AssertionError(f"no {word!r} in {self.screen.display}")


def show(
    pieces: str | Sequence[str],
    columns: int = 80,
    rows: int = 24,
    *,
    colour: bool = True,
    ascii: bool = False,
) -> Window:
    """A whole answer, piece by piece; a string comes in pieces of three characters."""
    window = Window(columns, rows)
    answer = Answer(lambda: window.size, colour=colour, ascii=ascii)
    if isinstance(pieces, str):
        pieces = [pieces[at : at + 3] for at in range(0, len(pieces), 3)]
    for piece in pieces:
        window.feed(answer.push(piece))
    window.feed(answer.finish())
    return window


# -- what it looks like ----------------------------------------------------------------------


def test_blocks_are_set_and_nothing_of_their_source_stays() -> None:
    window = show(
        "# Title\nSome **bold**, *slanted*, `code` and ~~gone~~ words.\n\n"
        "- one **1**\n  - deeper\n2. second\n> quoted *q*\n\n---\nEnd [here](http://a.b/c)."
    )
    assert window.lines()[:11] == [
        "Title",
        "Some bold, slanted, code and gone words.",
        "",
        "• one 1",
        "  • deeper",
        "2. second",
        "│ quoted q",
        "",
        "─" * 79,
        "End here (http://a.b/c).",
        "",
    ]
    assert window.styles("Title")["bold"]
    assert window.styles("bold")["bold"]
    assert window.styles("slanted")["italics"]
    assert window.styles("code")["fg"] == "cyan"
    assert window.styles("gone")["strikethrough"]
    assert not window.styles("words")["bold"]


def test_emphasis_between_letters_without_spaces_is_one_in_scripts_that_have_none() -> None:
    assert show("文の**太字**と").text() == "文の太字と"


def test_without_colour_styles_stay_and_code_keeps_its_signs() -> None:
    window = show("Some **bold** and `code`.", colour=False)
    assert window.text() == "Some bold and `code`."
    assert window.styles("bold")["bold"]
    assert not re.search(r"\x1b\[[0-9;]*[34][0-9]m", window.written)


def test_ascii_terminals_get_ascii_signs() -> None:
    window = show("- a **b**\n\n> c *d*\n\n---\n\n| x | y |\n|---|---|\n| 1 | 2 |\n", ascii=True)
    assert window.written.isascii()
    assert window.lines()[:5] == ["* a b", "", "| c d", "", "-" * 79]


def test_a_table_is_set_where_its_words_fit() -> None:
    source = "| name | value |\n|:--|--:|\n| alpha | **1** |\n| beta gamma | 22 |\n"
    assert show(source).lines()[:6] == [
        "┌────────────┬───────┐",
        "│ name       │ value │",
        "├────────────┼───────┤",
        "│ alpha      │     1 │",
        "│ beta gamma │    22 │",
        "└────────────┴───────┘",
    ]
    narrow = show(source, columns=18).lines()
    assert [line for line in narrow if line.startswith("│ beta  ")]  # between words
    assert show(source, columns=14).text().split() == source.split()  # left as it was


def test_the_block_under_construction_is_seen_while_it_grows() -> None:
    window = Window()
    answer = Answer(lambda: window.size, colour=True, ascii=False)
    for piece in ("Some", " **bo", "ld** wor"):
        window.feed(answer.push(piece))
    assert window.text() == "Some **bold** wor"
    window.feed(answer.push("ds\n\nNext"))
    assert window.text() == "Some bold words\n\nNext"


@pytest.mark.parametrize(
    "source",
    [
        "x**2 + y**2 and 2*3*4 and __init__ stay",
        r"\(x_1\) and \[y\] keep their backslashes",
        "a <b>tag</b> &amp; an &lt;entity&gt;",
        "[link=file:///etc/passwd]no[/link] [bold red]markup[/] :smile:",
        "[1]: http://a.b/definition",
        "snake_case_name and a_b_c",
        "2024. was a year",
        "#hashtag and #1",
        "-5 degrees, +5 degrees",
        "~~~ not closed, `nor this, **nor this",
        "| a | b |",
        "-",
        "<!-- a comment -->",
        '[text](http://a.b "with a title")',
    ],
)
def test_what_is_not_markdown_stays_as_it_was_written(source: str) -> None:
    assert show(source).text().replace("• ", "- ") == source


def test_escape_sequences_come_from_here_alone() -> None:
    """No OSC at all, so no link and no clipboard; nothing but styles and erasing."""
    window = show("[click](http://evil.example) <http://also.example> ![i](http://img.example)\n")
    assert window.text() == "click (http://evil.example) http://also.example i (http://img.example)"
    assert set(re.findall(r"\x1b(.)", window.written)) <= {"["}
    assert set(re.findall(r"\x1b\[[0-9;]*(.)", window.written)) <= {"m", "A", "J"}


def test_only_the_rows_of_the_block_are_taken_back() -> None:
    window = Window(40, 20)
    window.feed("before\n")
    answer = Answer(lambda: window.size, colour=True, ascii=False)
    for letter in "**b** " + "word " * 20:
        window.feed(answer.push(letter))
    assert {word for line in window.lines() for word in line.split()} == {"before", "**b**", "word"}
    window.feed(answer.finish() + "after")
    lines = window.lines()
    assert [line.split() for line in lines[:4]] == [
        ["before"],
        ["b", *["word"] * 7],
        ["word"] * 8,
        ["word"] * 5,
    ]
    assert lines[4] == "after"


WIDTHLESS = re.compile("[\u200d\ufe0f\u20e3]")
EMOJI = ["👩‍🚀", "👨‍👩‍👧‍👦", "❤️‍🔥", "🏳️‍🌈", "👩🏽‍💻", "🇨🇭", "☝🏽", "❤️", "👍🏽", "1️⃣"]


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize("sign", EMOJI)
def test_emoji_of_several_characters_leave_no_source_in_a_paragraph(
    sign: str, columns: int
) -> None:
    """Some terminals show such a sign as one, some its parts side by side. This one does that; it
    cannot show what has no width, which is taken out."""
    words = ["**bold word**", sign, "plain", f"**{sign} x**", sign * 3, f"x{sign}y", "more words"]
    long = sign * (5 if sign[0].isascii() else 20)  # a word of ASCII signs is never broken
    parts = [*words * 3, long, "**end**"]
    for first in range(len(words)):
        source = " ".join(parts[first:])
        window = Window(columns, 40)
        answer = Answer(partial(getattr, window, "size"), colour=True, ascii=False)
        for piece in [*source, ""]:
            written = answer.push(piece) if piece else answer.finish()
            window.feed(WIDTHLESS.sub("", written))
        assert "**" not in window.text()
        plain = WIDTHLESS.sub("", source).replace("**", "").replace(" ", "")
        assert "".join(window.text().split()) == plain


def test_an_emoji_of_several_characters_is_not_broken_at_the_margin() -> None:
    written = show("ab **c** " + "👩‍🚀" * 12, columns=21).written
    for line in written.split("\n"):
        assert line.count("👩") == line.count("🚀")
    assert written.count("\n") > 4


def test_a_word_that_outgrows_the_line_is_not_broken() -> None:
    source = "**b** so " + "abcdefghij" * 6 + " end"
    assert show(source, columns=40).text() == source


def test_deep_lists_are_no_code() -> None:
    assert show("- a\n\n    - b **c**\n\n      d **e**\n").text() == "• a\n\n    • b c\n\n      d e"
    assert show("a\n\n    - b **c**\n").text() == "a\n\n    - b **c**"


# -- code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", ["```", "~~~~", "````"])
def test_code_is_written_line_by_line_exactly(fence: str) -> None:
    code = ["def f(x):", "\treturn  '**' + x  # " + "long " * 30, "", "  ``", "", "", "end  "]
    source = f"Look:\n{fence}python\n" + "\n".join(code) + f"\n{fence}\n**after**"
    window = Window(40, 10)
    answer = Answer(lambda: window.size, colour=False, ascii=False)
    out = "".join(answer.push(piece) for piece in re.split(r"(?<=\W)", source)) + answer.finish()
    assert "\n" + "\n".join(code) + "\n" in out
    assert out.count("return") == 1
    assert out.endswith("\x1b[1mafter\x1b[0m\n")
    assert show(source).text().split() == source.replace("**after**", "after").split()


PYTHON = '''```python
@cached
def area(r: float) -> float:  # a note
    """Long
    text"""
    return 3.14 * r if r else "none"
```
'''


def test_code_gets_colours_line_by_line() -> None:
    window = show(PYTHON)
    assert window.text() == PYTHON.rstrip("\n")
    looks = {
        word: window.styles(word) for word in ("def", "area", "Long", "text", "3.14", '"none"')
    }
    assert looks["def"]["fg"] == "magenta"
    assert looks["area"]["bold"]
    assert looks["Long"]["fg"] == looks["text"]["fg"] == looks['"none"']["fg"] == "green"
    assert looks["3.14"]["fg"] == "cyan"
    assert window.styles("float")["fg"] == "cyan"


def test_a_line_of_code_has_its_colours_before_the_next_one_comes() -> None:
    window = Window()
    answer = Answer(lambda: window.size, colour=True, ascii=False)
    for piece in ("```py\n", "if x", ":"):
        window.feed(answer.push(piece))
    assert window.styles("if")["fg"] == "default"
    window.feed(answer.push("\n    pas"))
    assert window.styles("if")["fg"] == "magenta"
    assert window.text() == "```py\nif x:\n    pas"


@pytest.mark.parametrize("language", ["", "nonsense", "text", "{", "mermaid"])
def test_code_in_no_known_language_stays_plain(language: str) -> None:
    window = show(PYTHON.replace("python", language, 1))
    assert window.styles("def")["fg"] == "default"
    assert "\x1b[K" not in window.written


def test_code_without_colour_and_indented_code_stay_plain() -> None:
    assert "\x1b[K" not in show(PYTHON, colour=False).written
    indented = "Look:\n\n" + PYTHON.replace("```python\n", "").replace("```", "").replace(
        "\n", "\n    "
    )
    assert "\x1b[K" not in show(indented).written


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_line_of_code_that_does_not_fit_on_a_row_is_left_as_it_is(columns: int) -> None:
    source = "```python\nif a:\n    return '中文' + 'long long long long long'\nif b: 1\n```\n"
    window = show(source, columns=columns)
    assert "".join(window.text().split()) == "".join(source.split())
    assert window.styles("if b")["fg"] == "magenta"
    assert window.styles("return")["fg"] == ("magenta" if columns == 80 else "default")


def test_a_line_of_code_is_left_as_it_is_after_a_resize_or_a_message_inside_it() -> None:
    for resized in (True, False):
        window = Window()
        answer = Answer(partial(getattr, window, "size"), colour=True, ascii=False)
        window.feed(answer.push("```python\nif a:\n    ret"))
        if resized:
            window.resize(70, 20)
        else:
            answer.disturb()
        window.feed(answer.push("urn b\nif c: 1\n"))
        assert window.styles("return")["fg"] == "default"
        assert window.styles("if c")["fg"] == "magenta"
        assert window.text() == "```python\nif a:\n    return b\nif c: 1"


def test_code_in_a_list_gets_colours() -> None:
    window = show("- so:\n\n  ```sh\n  for i in 1 2; do echo $i; done\n  ```\n")
    assert window.styles("for")["fg"] == "magenta"
    assert window.text() == "• so:\n\n  ```sh\n  for i in 1 2; do echo $i; done\n  ```"


@pytest.mark.parametrize(
    "kind",
    some_by_day(
        ["py", "c", "js", "json", "html", "diff", "sql", "yaml", "rust"],
        ("py", "c", "html", "diff").__contains__,
    ),
)
@given(text=st.text(st.sampled_from("a1 \t\"'`{}()<>/*#-+\\\n=;:!$&é中"), max_size=120))
@settings(max_examples=40, deadline=None)
def test_colours_never_change_code(kind: str, text: str) -> None:
    source = f"~~~~{kind}\n{text}\n~~~~\nend"
    plain, coloured = show(source, 60, 200, colour=False), show(source, 60, 200)
    assert coloured.lines() == plain.lines()


def test_indented_code_and_code_in_a_list() -> None:
    source = (
        "Run:\n\n    a  *b*  c\n\n\n    d\n\nor\n\n"
        "1. this:\n   ```sh\n   ls  -l\n   ```\n   and {}so{}"
    )
    assert show(source.format("**", "**") + "\n").text() == source.format("", "")


def test_a_fence_that_is_never_closed_loses_nothing() -> None:
    assert show("```\na\n  b").text() == "```\na\n  b"
    assert show("```\na\n``").text() == "```\na\n``"
    assert show("text\n``").text() == "text\n``"
    assert show("text\n```p").text() == "text\n```p"


# -- the window ------------------------------------------------------------------------------


def test_a_block_taller_than_the_window_stays_as_it_streamed() -> None:
    source = " ".join(f"**w{n}**" for n in range(200))
    window = show(f"{source}\n\n**last**", columns=40, rows=10)
    assert window.text().split() == [*source.split(), "last"]


def test_a_resize_leaves_the_block_and_sets_the_next() -> None:
    window = Window(80, 24)
    answer = Answer(lambda: window.size, colour=True, ascii=False)
    window.feed(answer.push("**first** " + "word " * 20))
    window.resize(60, 24)
    window.feed(answer.push("more **words**\n\n**second**"))
    window.feed(answer.finish())
    text = window.text()
    assert text.count("**first**") == text.count("**words**") == text.count("second") == 1
    assert "**second**" not in text


def test_somebody_else_wrote() -> None:
    window = Window()
    answer = Answer(lambda: window.size, colour=True, ascii=False)
    window.feed(answer.push("**first** "))
    window.feed("[1]+ Stopped\n")
    answer.disturb()
    window.feed(answer.push("go on\n\n**second**") + answer.finish())
    assert window.text() == "**first** [1]+ Stopped\ngo on\n\nsecond"


def test_wide_characters_and_joined_ones_are_counted_as_the_widest_terminal_does() -> None:
    family = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}"
    source = "**x** " + "漢字かな" * 30 + " " + f"{family}\N{HEAVY BLACK HEART}\ufe0f " * 20
    for columns in range(20, 60):
        text = show(source, columns=columns, rows=40).text()
        assert text.startswith("x")
        assert text.replace("\n", "").count("漢字かな") == 30
        assert text.count("x") == 1


UNIQUE = "q{}z"


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Markdown in which every word is another one."""
    count = 0

    def words(least: int = 1, most: int = 30, *, marks: bool = True) -> str:
        nonlocal count
        out = []
        for _ in range(draw(st.integers(least, most))):
            count += 1
            word = UNIQUE.format(count)
            style = draw(st.integers(0, 12)) if marks else 0
            shapes = {
                1: "**{}**",
                2: "*{}*",
                3: "`{}`",
                4: "~~{}~~",
                5: "[{}](http://l.k)",
                6: "漢{}字",
                7: "<b>{}",
                8: "**{}",
                9: "{}\\*",
                10: "é{}…",
            }
            out.append(shapes.get(style, "{}").format(word))
        return " ".join(out)

    blocks = []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(
            st.sampled_from(
                [
                    "text",
                    "head",
                    "list",
                    "loose",
                    "quote",
                    "table",
                    "fence",
                    "rule",
                    "code",
                    "lines",
                ]
            )
        )
        if kind == "text":
            block = words(1, 60)
        elif kind == "lines":
            block = "\n".join(words(1, 8) for _ in range(3))
        elif kind == "head":
            block = "#" * draw(st.integers(1, 6)) + " " + words(1, 6)
        elif kind in ("list", "loose"):
            gap = "\n\n" if kind == "loose" else "\n"
            marks = draw(
                st.lists(
                    st.sampled_from(["- ", "1. ", "  * ", "    - ", "12) "]), min_size=1, max_size=6
                )
            )
            block = gap.join(mark + words(1, 20) for mark in marks)
            if draw(st.booleans()):
                block += f"{gap}   {words()}"
        elif kind == "quote":
            block = "\n".join("> " + words(1, 20) for _ in range(draw(st.integers(1, 3))))
        elif kind == "table":
            columns = draw(st.integers(1, 4))
            rows = [[words(1, 3) for _ in range(columns)] for _ in range(3)]
            rows.insert(1, ["---"] * columns)
            block = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        elif kind == "fence":
            body = "\n".join("  " * n + words(1, 5, marks=False) for n in range(3))
            block = f"```{draw(st.sampled_from(['', 'py']))}\n{body}\n```"
        elif kind == "code":
            block = "\n".join("    " + words(1, 4, marks=False) for _ in range(2))
        else:
            block = draw(st.sampled_from(["---", "***", "- - -"]))
        blocks.append(block + draw(st.sampled_from(["\n", "\n\n", "\n\n\n"])))
    whole = "".join(blocks)
    # Ctrl-C comes anywhere.
    return whole[: draw(st.integers(1, len(whole)))] if draw(st.booleans()) else whole


@settings(max_examples=25, deadline=None)
@given(
    documents(),
    st.sampled_from([40, 80, 200]),
    st.sampled_from([10, 40]),
    st.integers(0, 1 << 30),
    st.integers(0, 3),
)
def test_every_word_is_on_screen_or_above_exactly_once(
    source: str, columns: int, rows: int, seed: int, resizes: int
) -> None:
    draw = random.Random(seed)
    window = Window(columns, rows)
    answer = Answer(lambda: window.size, colour=True, ascii=False)
    window.feed("before\n" * draw.randrange(rows + 3))
    at = 0
    while at < len(source):
        step = draw.randrange(1, 12)
        window.feed(answer.push(source[at : at + step]))
        at += step
        if resizes == 1 and draw.random() < 0.02:
            answer.disturb()
    window.feed(answer.finish())
    text = window.text()
    shown = re.findall(r"q\d+z", text)
    assert sorted(shown) == sorted(re.findall(r"q\d+z", source))
    assert text.count("漢") == source.count("漢")
    assert window.screen.cursor.x == 0


def test_long_answers_cost_little() -> None:
    """2,000 words, a token at a time: the issue's figure is 0.2 s of CPU in all."""
    draw = random.Random(7)
    word = "the of a policy cache token keeps attention rows **head** `budget` layer".split()
    blocks = []
    for number in range(28):
        text = " ".join(draw.choice(word) for _ in range(60))
        blocks.append(
            [f"{text}.", f"## Part {number}\n\n{text}.", f"- {text}\n- {text[:80]}", f"1. {text}"][
                number % 4
            ]
        )
    source = "\n\n".join(blocks)
    assert 1_700 < len(source.split()) < 2_300
    pieces = re.findall(r"\s*\S{1,5}", source)
    terminal = Terminal()
    terminal.out = Tty()
    terminal.plain = False
    with terminal.answering():
        began = time.process_time()
        for piece in pieces:
            terminal.answer(piece)
        terminal.end_answer()
        cost = time.process_time() - began
    assert "\x1b[1m" in terminal.out.getvalue()
    assert cost < 0.4


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


# -- the terminal around it ------------------------------------------------------------------


def answered(out: io.StringIO, text: str, *, plain: bool = False) -> str:
    terminal = Terminal(plain=plain)
    terminal.out = out
    with terminal.answering():
        for piece in re.findall(r"(?s).{1,4}", text):
            terminal.answer(piece)
        terminal.end_answer()
    return out.getvalue()


@pytest.mark.parametrize("why", ["plain", "dumb", "unset", "piped"])
def test_elsewhere_the_text_is_as_it_came(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setenv("TERM", "dumb" if why == "dumb" else "xterm")
    if why == "unset":
        monkeypatch.delenv("TERM")
    out = io.StringIO() if why == "piped" else Tty()
    text = "# A\n\n**b** " + "c " * 200
    assert answered(out, f"{text}\n\n", plain=why == "plain") == f"{text}\n"


def test_on_a_terminal_it_is_set_and_ends_with_one_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert answered(Tty(), "**b**\x1b[2J\n\n").endswith("\x1b[1mb\x1b[0m[2J\n")
    assert answered(Tty(), "") == "\n"


CHILD = """
import signal, termios, os
from minikv.cli.screen.terminal import Terminal
terminal = Terminal()
def echo():
    return bool(termios.tcgetattr(1)[3] & termios.ECHO)
before = echo()
with terminal.answering():
    for piece in ("Some **bo", "ld** text"):
        terminal.answer(piece)
    inside = echo()
    if os.environ.get("RESUME"):
        os.kill(os.getpid(), signal.SIGCONT)
    for piece in ("\\n\\n", "**next**"):
        terminal.answer(piece)
    terminal.end_answer()
print(before, inside, echo(), "done")
"""


@pytest.mark.parametrize("resumed", ["", "1"])
def test_keys_are_not_echoed_into_an_answer(resumed: str) -> None:
    child = Terminals([sys.executable, "-c", CHILD], {"TERM": "xterm", "RESUME": resumed})
    try:
        child.until("True False True done")
    finally:
        child.close()
    window = Window()
    window.stream.feed(child.seen)
    first = "Some **bold** text" if resumed else "Some bold text"
    assert window.text().startswith(f"{first}\n\nnext\nTrue")


BACKGROUND = """
import os, signal, sys, termios
from minikv.cli.screen.keyboard import unechoed
def echo(on=None):
    mode = termios.tcgetattr(1)
    if on is not None:
        mode[3] = mode[3] | termios.ECHO if on else mode[3] & ~termios.ECHO
        termios.tcsetattr(1, termios.TCSANOW, mode)
    return bool(mode[3] & termios.ECHO)
echo(False)
with unechoed(sys.stdout, lambda: None):
    echo(True)
    os.kill(os.getpid(), signal.SIGCONT)
    inside = echo()
print(inside, echo(), "done")
"""


def test_echo_that_a_shell_switched_on_is_left_on() -> None:
    """A chat that began in the background of a line editor saw echo off; the shell switches it on
    before the chat comes to the front."""
    child = Terminals([sys.executable, "-c", BACKGROUND], {"TERM": "xterm"})
    try:
        child.until("False True done")
    finally:
        child.close()


POOR = {
    "dumb": {"TERM": "dumb"},
    "colourless": {"TERM": "xterm", "NO_COLOR": "1"},
    "ascii": {"TERM": "xterm", "PYTHONIOENCODING": "ascii"},
    "C": {
        "TERM": "xterm",
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    },
}


@pytest.mark.parametrize("kind", some_by_day(POOR, lambda kind: kind != "ascii"))
def test_a_chat_on_a_poor_terminal(tmp_path: Path, kind: str) -> None:
    document = tmp_path / "mill.txt"
    document.write_text("The mill is run by Ada. " * 30)
    env = {"COLUMNS": "40", "LINES": "20", "MINIKV_HOME": str(tmp_path), **POOR[kind]}
    chat: Terminals
    if kind in ("ascii", "C"):  # encodings hang on how Python starts
        main = HERE / "support" / "fake_main.py"
        chat = Terminals([sys.executable, str(main), "0", "chat", str(document)], env)
    else:
        chat = Forked("chat", str(document), env=env, columns=40, pace=0)
    fcntl.ioctl(chat.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 40, 0, 0))
    try:
        chat.prompt = "> " if kind == "dumb" else "\x1b[?25h"
        chat.until("leaves.", 240.0)
        chat.ready()
        chat.type("Who?\r")
        chat.until("without eviction")
        chat.ready()
        chat.type("/settle\r")
        chat.until("unknown command")
        chat.ready()
        chat.type("\x04")
        assert chat.code() == 0
    finally:
        chat.close()
    assert "Error" not in chat.seen
    if kind == "dumb":
        assert "\x1b" not in chat.seen
        return
    if kind != "colourless":
        assert chat.seen.isascii()
    else:
        assert not re.search(r"\x1b\[[0-9;]*[34][0-9][;m]", chat.seen)
    window = Window(40, 20)
    window.stream.feed(chat.seen)
    rows = [line for line in window.lines() if line]
    assert max(cell_len(line) for line in rows) <= 40
    # Sentences of ours are broken between words.
    assert "Ctrl-C stops" in " ".join(" ".join(rows).split())


_HOSTILE = (
    *(
        "\x1b]0;owned\x07",
        "\x1b]52;c;QUJD\x07",
        "\x1b]8;;http://evil\x1b\\",
        "\x1b[2J",
        "\x1b[?1049h",
    ),
    *(
        "\x1b[?25l",
        "\x1bc",
        "\x1b(0",
        "\x9b31m",
        "\x9d0;x\x9c",
        "\x1bP",
        "\x1b_",
        "\x1b[6n",
        "\x1b",
    ),
    *("\x07", "\x08", "\x0b", "\x0c", "\r", "\x00", "\x7f", "\x85", "\u202e", "\u2066", "\u200b"),
    *("\U000e0041", "\u2028", "\ud800", "[31m", "]0;x", "0;1m", "\\x1b[31m", "&#27;[31m"),
)
_PLAIN = (
    *("word", " ", "\n", "\n\n", "**bold**", "*it*", "`code`", "```sh\n", "\n```\n", "- item\n"),
    *(
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "# head\n",
        "> quote\n",
        "1. one\n",
        "é",
        "漢字",
        "👩‍🚀",
    ),
    *(
        "漢字",
        "[x](http://a.b)",
        "<http://a.b>",
        "![i](http://c)",
        "[bold red]",
        ":smile:",
        "&amp;",
        "\t",
    ),
)


@pytest.mark.parametrize("count", [400, pytest.param(100_000, marks=pytest.mark.soak)])
def test_hostile_outputs_split_at_random_send_styles_and_text_only(count: int) -> None:
    """No sequence but styles, up and erase; no control character; the emulator's title and modes
    stay as they are."""
    draw = random.Random(15)
    for number in range(count):
        parts = [
            draw.choice(_HOSTILE if draw.random() < 0.4 else _PLAIN)
            for _ in range(draw.randrange(1, 14))
        ]
        source, at = "".join(parts), 0
        terminal = Terminal()
        terminal.out, terminal.plain = Tty(), False
        with terminal.answering():
            while at < len(source):
                step = draw.randrange(1, 9)
                terminal.answer(source[at : at + step])
                at += step
            terminal.end_answer()
        written = terminal.out.getvalue()
        rest = re.sub(r"\r?\x1b\[[0-9;]*[mAJK]", "", written)
        assert clean(rest) == rest, (number, source)
        if number % 20 == 0:
            window = Window()
            modes = set(window.screen.mode)
            window.feed(written)
            assert (window.screen.title, window.screen.mode) == ("", modes), (number, source)

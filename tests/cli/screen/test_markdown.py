"""Answers in Markdown on a terminal: what a terminal emulator shows of them, and what they cost."""

from __future__ import annotations

import itertools
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest

pyte = pytest.importorskip("pyte")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from pairwise import some_by_day  # noqa: E402
from rich.cells import cell_len  # noqa: E402
from terminals import Terminals  # noqa: E402
from typed import Tty, printed  # noqa: E402

from minikv.cli.screen.markdown import Answer  # noqa: E402
from minikv.cli.screen.terminal import Terminal  # noqa: E402
from minikv.cli.screen.text import clean, encodable  # noqa: E402


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
        top, columns = self.screen.history.top, range(self.size[0])
        above = ["".join(row[x].data for x in columns) for row in top]
        return [line.rstrip() for line in [*above, *self.screen.display]]

    def text(self) -> str:
        """The lines, those that the terminal itself broke put together again."""
        ends = ((line, "" if cell_len(line) == self.size[0] else "\n") for line in self.lines())
        return "".join(line + end for line, end in ends).rstrip("\n")

    def styles(self, word: str) -> dict[str, object]:
        """How the first letter of `word` looks; it must be on the screen."""
        for y, line in enumerate(self.screen.display):
            x = line.find(word)
            if x >= 0:
                return dict(self.screen.buffer[y][x]._asdict())
        raise AssertionError(f"no {word!r} in {self.screen.display}")


def opened(columns: int = 80, rows: int = 24, *, colour: bool = True) -> tuple[Window, Answer]:
    """A window and an answer that is written to it."""
    window = Window(columns, rows)
    return window, Answer(lambda: window.size, colour=colour)


def show(
    pieces: str | Sequence[str], columns: int = 80, rows: int = 24, *, colour: bool = True
) -> Window:
    """A whole answer, piece by piece; a string comes in pieces of three characters."""
    window, answer = opened(columns, rows, colour=colour)
    if isinstance(pieces, str):
        pieces = [pieces[at : at + 3] for at in range(0, len(pieces), 3)]
    for piece in pieces:
        window.feed(answer.push(piece))
    window.feed(answer.finish())
    return window


# -- what it looks like ----------------------------------------------------------------------
PYTHON = '''```python
@cached
def area(r: float) -> float:  # a note
    """Long
    text"""
    return 3.14 * r if r else "none"
```
'''
FAMILY = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}"
TABLE = "| name | value |\n|:--|--:|\n| alpha | **1** |\n| beta gamma | 22 |\n"
LISTED = "1. this:\n   ```sh\n   ls  -l\n   ```\n   and {0}so{0}"
STYLED = "# Title\nSome **bold**, *slanted*, `code` and ~~gone~~ words."
NESTED = "- one **1**\n  - deeper\n2. second\n> quoted *q*\n\n---\nEnd"
LINKED = "[here](http://a.b/c) <http://d.e> ![i](http://f.g)"

LOOKS: dict[str, str] = {
    STYLED: "Title\nSome bold, slanted, code and gone words.",
    NESTED: "• one 1\n  • deeper\n2. second\n│ quoted q\n\n" + "─" * 79 + "\nEnd",
    LINKED: "here (http://a.b/c) http://d.e i (http://f.g)",
    "文の**太字**と": "文の太字と",
    "- a\n\n    - b **c**\n\n      d **e**\n": "• a\n\n    • b c\n\n      d e",
    "Run:\n\n    a  *b*  c\n\n\n    d\n\nor **x**": "Run:\n\n    a  *b*  c\n\n    d\n\nor x",
    "a\n\n    - b **c**\n": "a\n\n    - b **c**",
    LISTED.format("**"): LISTED.format(""),
    PYTHON: PYTHON.rstrip("\n"),
    TABLE: (
        "┌────────────┬───────┐\n│ name       │ value │\n├────────────┼───────┤\n"
        "│ alpha      │     1 │\n│ beta gamma │    22 │\n└────────────┴───────┘"
    ),
    "```\na\n  b": "```\na\n  b",
    "```\na\n``": "```\na\n``",
    "text\n``": "text\n``",
    "text\n```p": "text\n```p",
} | {
    # What is no Markdown stays as it was written.
    text: text
    for text in (
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
        "*" * 2 + "b so " + "abcdefghij" * 9,  # a word that outgrows the line
    )
}


@pytest.mark.parametrize(("source", "shown"), LOOKS.items())
def test_what_a_terminal_shows_of_a_source(source: str, shown: str) -> None:
    assert show(source).text() == shown


@pytest.mark.parametrize(
    ("source", "word", "look"),
    [
        ("# Title", "Title", {"bold": True, "underscore": True}),
        ("### Title", "Title", {"bold": True, "underscore": False}),
        ("a **bold** word", "bold", {"bold": True}),
        ("a **bold** word", "word", {"bold": False}),
        ("an *i* word", "i word", {"italics": True}),
        ("a `code` word", "code", {"fg": "cyan"}),
        ("~~gone~~ now", "gone", {"strikethrough": True}),
        ("[here](http://a.b)", "here", {"underscore": True}),
        ("| name |\n|---|\n| x |\n", "name", {"bold": True}),
        (PYTHON, "def", {"fg": "magenta"}),  # code gets colours line by line
        (PYTHON, "area", {"bold": True}),
        (PYTHON, "Long", {"fg": "green"}),
        (PYTHON, "text", {"fg": "green"}),
        (PYTHON, '"none"', {"fg": "green"}),
        (PYTHON, "3.14", {"fg": "cyan"}),
        (PYTHON, "float", {"fg": "cyan"}),
    ],
)
def test_the_styles_of_words(source: str, word: str, look: dict[str, object]) -> None:
    assert show(source).styles(word).items() >= look.items()


def test_poor_terminals_get_the_signs_and_styles_that_they_can_show() -> None:
    grey = show("Some **bold** and `code`.\n```py\ndef f(): 1\n```\n", colour=False)
    assert grey.text() == "Some bold and `code`.\n```py\ndef f(): 1\n```"
    assert grey.styles("bold")["bold"]
    assert not re.search(r"\x1b\[[0-9;]*[34][0-9]m|\x1b\[K", grey.written)
    window = show("- a **b**\n\n> c *d*\n\n---\n\n| x | y |\n|---|---|\n| 1 | 2 |\n")
    written = encodable(window.written, "ascii")
    assert "\\u" not in written
    window = Window()
    window.feed(written)
    assert window.lines()[:5] == ["* a b", "", "| c d", "", "-" * 79]
    assert window.lines()[6:9] == ["+---+---+", "| x | y |", "+---+---+"]


def test_what_does_not_fit_stays_as_it_streamed() -> None:
    narrow = show(TABLE, columns=18).lines()
    assert [line for line in narrow if line.startswith("│ beta  ")]  # between words
    assert show(TABLE, columns=14).text().split() == TABLE.split()
    source = " ".join(f"**w{n}**" for n in range(200))
    window = show(f"{source}\n\n**last**", columns=40, rows=10)
    assert window.text().split() == [*source.split(), "last"]


def test_the_block_under_construction_is_seen_and_its_rows_alone_are_taken_back() -> None:
    window, answer = opened(50, 20)
    window.feed("before\n")
    for piece in ("Some", " **bo", "ld** wor"):
        window.feed(answer.push(piece))
    assert window.text() == "before\nSome **bold** wor"
    window.feed(answer.push("d " + "word " * 20 + "\n\nNext"))
    rows = ["before", "Some bold word" + " word" * 7, "word" + " word" * 9, "word word word"]
    assert window.lines()[:6] == [*rows, "", "Next"]


def test_a_block_that_was_under_way_is_shown_again_when_the_answer_goes_on() -> None:
    (_, whole), (_, first), (_, code), (_, fresh) = (opened(60, colour=False) for _ in range(4))
    styles, table = re.compile(r"\x1b\[[\d;]*[A-Za-z]"), "| a | b |\n|---|---|\n| 1 |"
    whole.push("# Head\n\nOne two **thr")
    assert styles.sub("", first.resume("# Head\n\nOne two **thr")) == "One two **thr"
    assert first.push("ee** four.\n\n- a") == whole.push("ee** four.\n\n- a")
    assert code.resume("Text:\n\n```py\nx = 1\ny") == ""
    assert code.push(" = 2\n```\n").startswith(" = 2\n")
    assert opened(60, colour=False)[1].resume("done.\n\n") == ""
    assert styles.sub("", fresh.resume(f"So:\n\n{table}")) == table
    assert "│" in fresh.push(" 2 |\n\nEnd")  # the whole table, formatted


WIDTHLESS = re.compile("[\u200d\ufe0f\u20e3]")
EMOJI = ["👩‍🚀", "👨‍👩‍👧‍👦", "❤️‍🔥", "🏳️‍🌈", "👩🏽‍💻", "🇨🇭", "☝🏽", "❤️", "👍🏽", "1️⃣"]


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize("sign", EMOJI)
def test_emoji_of_several_characters_leave_no_source(sign: str, columns: int) -> None:
    """Some terminals show such a sign as one, some its parts side by side. This one does that; it
    cannot show what has no width, which is taken out."""
    words = ["**bold word**", sign, "plain", f"**{sign} x**", sign * 3, f"x{sign}y", "more words"]
    long = sign * (5 if sign[0].isascii() else 20)  # a word of ASCII signs is never broken
    parts = [*words * 3, long, "**end**"]
    for first in range(len(words)):
        source = " ".join(parts[first:])
        window, answer = opened(columns, 40)
        for piece in [*source, ""]:
            written = answer.push(piece) if piece else answer.finish()
            window.feed(WIDTHLESS.sub("", written))
        assert "**" not in window.text()
        plain = WIDTHLESS.sub("", source).replace("**", "").replace(" ", "")
        assert "".join(window.text().split()) == plain


# -- code ------------------------------------------------------------------------------------
@pytest.mark.parametrize("fence", ["```", "~~~~", "````"])
def test_code_is_written_line_by_line_exactly(fence: str) -> None:
    code = ["def f(x):", "\treturn  '**' + x  # " + "long " * 30, "", "  ``", "", "", "end  "]
    source = f"Look:\n{fence}python\n" + "\n".join(code) + f"\n{fence}\n**after**"
    out = show(re.split(r"(?<=\W)", source), 40, 10, colour=False).written
    assert "\n" + "\n".join(code) + "\n" in out
    assert out.count("return") == 1
    assert out.endswith("\x1b[1mafter\x1b[0m\n")
    assert show(source).text().split() == source.replace("**after**", "after").split()


@pytest.mark.parametrize("language", ["", "nonsense", "text", "{", "mermaid"])
def test_code_in_no_known_language_stays_plain(language: str) -> None:
    assert "\x1b[K" not in show(PYTHON.replace("python", language, 1)).written
    indented = PYTHON.replace("```python\n", "").replace("```", "").replace("\n", "\n    ")
    assert "\x1b[K" not in show(f"Look:\n\n    {indented}").written


@pytest.mark.parametrize("change", ["", "resize", "message"])
def test_a_line_of_code_has_its_colours_when_it_ends_if_nothing_came_between(change: str) -> None:
    window, answer = opened()
    window.feed(answer.push("```python\nif a:\n    ret"))
    assert window.styles("if")["fg"] == "magenta"
    assert window.styles("ret")["fg"] == "default"
    if change == "resize":
        window.resize(70, 24)
    elif change:
        answer.disturb()
    window.feed(answer.push("urn b\nif c: 1\n"))
    assert window.styles("return")["fg"] == ("default" if change else "magenta")
    assert window.styles("if c")["fg"] == "magenta"
    assert window.text() == "```python\nif a:\n    return b\nif c: 1"


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_line_of_code_that_does_not_fit_on_a_row_is_left_as_it_is(columns: int) -> None:
    source = "```python\nif a:\n    return '中文' + 'long long long long long'\nif b: 1\n```\n"
    window = show(source, columns=columns)
    assert "".join(window.text().split()) == "".join(source.split())
    assert window.styles("if b")["fg"] == "magenta"
    assert window.styles("return")["fg"] == ("magenta" if columns == 80 else "default")


KINDS_OF_CODE = "py c js json html diff sql yaml rust".split()


@pytest.mark.parametrize("kind", some_by_day(KINDS_OF_CODE, "py c html diff".split().__contains__))
@given(text=st.text(st.sampled_from("a1 \t\"'`{}()<>/*#-+\\\n=;:!$&é中"), max_size=120))
@settings(max_examples=20, deadline=None)
def test_colours_never_change_code(kind: str, text: str) -> None:
    source = f"~~~~{kind}\n{text}\n~~~~\nend"
    plain, coloured = show(source, 60, 200, colour=False), show(source, 60, 200)
    assert coloured.lines() == plain.lines()


# -- the window ------------------------------------------------------------------------------
def test_a_resize_or_another_writer_leaves_the_block_and_sets_the_next() -> None:
    window, answer = opened()
    window.feed(answer.push("**first** " + "word " * 20))
    window.resize(60, 24)
    window.feed(answer.push("more **words**\n\n**second** "))
    window.feed("[1]+ Stopped\n")
    answer.disturb()
    window.feed(answer.push("go on\n\n**third**") + answer.finish())
    text = window.text()
    assert text.count("**first**") == text.count("**words**") == text.count("**second**") == 1
    assert text.endswith("[1]+ Stopped\ngo on\n\nthird")


def test_wide_characters_and_joined_ones_are_counted_as_the_widest_terminal_does() -> None:
    source = "**x** " + "漢字かな" * 30 + " " + f"{FAMILY}\N{HEAVY BLACK HEART}\ufe0f " * 20
    for columns in range(20, 60):
        text = show(source, columns=columns, rows=40).text()
        assert text.startswith("x")
        assert text.replace("\n", "").count("漢字かな") == 30
        assert text.count("x") == 1
    written = show("ab **c** " + "👩‍🚀" * 12, columns=21).written
    assert all(line.count("👩") == line.count("🚀") for line in written.split("\n"))
    assert written.count("\n") > 4


UNIQUE = "q{}z"
MARKED = "{}|{}|{}|**{}**|*{}*|`{}`|~~{}~~|[{}](http://l.k)|漢{}字|<b>{}|**{}|{}\\*|é{}…".split("|")
KINDS = "text head list loose quote table fence rule code lines".split()


def pieces_of(source: str, draw: random.Random, most: int) -> Iterator[str]:
    """The source in pieces of fewer characters than `most`."""
    while source:
        step = draw.randrange(1, most)
        yield source[:step]
        source = source[step:]


@contextmanager
def written_to() -> Iterator[Terminal]:
    """A terminal in memory in the middle of an answer, which then ends."""
    terminal = Terminal()
    terminal.out, terminal.plain = Tty(), False
    with terminal.answering():
        yield terminal
        terminal.end_answer()


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Markdown in which every word is another one."""
    numbers = itertools.count(1)

    def words(least: int = 1, most: int = 30, *, marks: bool = True) -> str:
        shape = st.sampled_from(MARKED) if marks else st.just("{}")
        shapes = draw(st.lists(shape, min_size=least, max_size=most))
        return " ".join(shape.format(UNIQUE.format(next(numbers))) for shape in shapes)

    def block() -> str:
        kind = draw(st.sampled_from(KINDS))
        if kind == "text":
            return words(1, 60)
        if kind == "lines":
            return "\n".join(words(1, 8) for _ in range(3))
        if kind == "head":
            return "#" * draw(st.integers(1, 6)) + " " + words(1, 6)
        if kind in ("list", "loose"):
            gap = "\n\n" if kind == "loose" else "\n"
            signs = st.sampled_from(["- ", "1. ", "  * ", "    - ", "12) "])
            marks = draw(st.lists(signs, min_size=1, max_size=6))
            more = f"{gap}   {words()}" if draw(st.booleans()) else ""
            return gap.join(mark + words(1, 20) for mark in marks) + more
        if kind == "quote":
            return "\n".join("> " + words(1, 20) for _ in range(draw(st.integers(1, 3))))
        if kind == "table":
            columns = draw(st.integers(1, 4))
            rows = [[words(1, 3) for _ in range(columns)] for _ in range(3)]
            rows.insert(1, ["---"] * columns)
            return "\n".join("| " + " | ".join(row) + " |" for row in rows)
        if kind == "fence":
            body = "\n".join("  " * n + words(1, 5, marks=False) for n in range(3))
            return f"```{draw(st.sampled_from(['', 'py']))}\n{body}\n```"
        if kind == "code":
            return "\n".join("    " + words(1, 4, marks=False) for _ in range(2))
        return draw(st.sampled_from(["---", "***", "- - -"]))

    ends = st.sampled_from(["\n", "\n\n", "\n\n\n"])
    whole = "".join(block() + draw(ends) for _ in range(draw(st.integers(1, 7))))
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
    window, answer = opened(columns, rows)
    window.feed("before\n" * draw.randrange(rows + 3))
    for piece in pieces_of(source, draw, 12):
        window.feed(answer.push(piece))
        if resizes == 1 and draw.random() < 0.02:
            answer.disturb()
    window.feed(answer.finish())
    text = window.text()
    assert sorted(re.findall(r"q\d+z", text)) == sorted(re.findall(r"q\d+z", source))
    assert text.count("漢") == source.count("漢")
    assert window.screen.cursor.x == 0


def test_long_answers_cost_little() -> None:
    """2,000 words, a token at a time: the issue's figure is 0.2 s of CPU in all."""
    draw = random.Random(7)
    word = "the of a policy cache token keeps attention rows **head** `budget` layer".split()
    text = [" ".join(draw.choice(word) for _ in range(60)) for _ in range(28)]
    forms = ("{0}.", "## Part\n\n{0}.", "- {0}\n- {0:.80}", "1. {0}")
    source = "\n\n".join(forms[n % 4].format(one) for n, one in enumerate(text))
    assert 1_700 < len(source.split()) < 2_300
    pieces = re.findall(r"\s*\S{1,5}", source)
    began = time.process_time()
    with written_to() as terminal:
        for piece in pieces:
            terminal.answer(piece)
    cost = time.process_time() - began
    assert "\x1b[1m" in printed(terminal)
    assert cost < 0.4


# -- the terminal around it ------------------------------------------------------------------
CHILD = """
import os, signal, sys, termios
from minikv.cli.screen.keyboard import unechoed
from minikv.cli.screen.terminal import Terminal
terminal = Terminal()
def echo(on=None):
    mode = termios.tcgetattr(1)
    if on is not None:
        mode[3] = mode[3] | termios.ECHO if on else mode[3] & ~termios.ECHO
        termios.tcsetattr(1, termios.TCSANOW, mode)
    return bool(mode[3] & termios.ECHO)
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
echo(False)
with unechoed(sys.stdout):
    echo(True)
    os.kill(os.getpid(), signal.SIGCONT)
    inside = echo()
print(inside, echo(), "in front")
"""


@pytest.mark.parametrize("resumed", ["", "1"])
def test_keys_are_not_echoed_into_an_answer(resumed: str) -> None:
    """A chat that began in the background of a line editor saw echo off; the shell switches it on
    before the chat comes to the front, and then it is left on."""
    env = {"TERM": "xterm", "RESUME": resumed}
    with closing(Terminals([sys.executable, "-c", CHILD], env)) as child:
        child.until("True False True done")
        child.until("False True in front")
    window = Window()
    window.stream.feed(child.seen)
    first = "Some **bold** text" if resumed else "Some bold text"
    assert window.text().startswith(f"{first}\n\nnext\nTrue")


_HOSTILE = (
    *"\x1b]0;owned\x07 \x1b]52;c;QUJD\x07 \x1b]8;;http://evil\x1b\\ \x1b[2J \x1b[?1049h".split(" "),
    *"\x1b[?25l \x1bc \x1b(0 \x9b31m \x9d0;x\x9c \x1bP \x1b_ \x1b[6n \x1b".split(" "),
    *"\x07\x08\x0b\x0c\r\x00\x7f\x85\u202e\u2066\u200b\U000e0041\u2028\ud800",
    *"[31m ]0;x 0;1m \\x1b[31m &#27;[31m".split(" "),
)
_PLAIN = (
    *" \n\té",
    *"word **bold** *it* `code` 漢字 👩‍🚀 漢字 [bold red] :smile: &amp;".split(),
    *"[x](http://a.b) <http://a.b> ![i](http://c)".split(),
    *("\n\n", "```sh\n", "\n```\n", "- item\n", "1. one\n", "# head\n", "> quote\n"),
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
)


@pytest.mark.parametrize("count", [400, pytest.param(100_000, marks=pytest.mark.soak)])
def test_hostile_outputs_split_at_random_send_styles_and_text_only(count: int) -> None:
    """No sequence but styles, up and erase; no control character; the emulator's title and modes
    stay as they are."""
    draw = random.Random(15)
    for number in range(count):
        kinds = [_HOSTILE if draw.random() < 0.4 else _PLAIN for _ in range(draw.randrange(1, 14))]
        source = "".join(draw.choice(kind) for kind in kinds)
        with written_to() as terminal:
            for piece in pieces_of(source, draw, 9):
                terminal.answer(piece)
        written = printed(terminal)
        rest = re.sub(r"\r?\x1b\[[0-9;]*[mAJK]", "", written)
        assert clean(rest) == rest, (number, source)
        if number % 20 == 0:
            window = Window()
            modes = set(window.screen.mode)
            window.feed(written)
            assert (window.screen.title, window.screen.mode) == ("", modes), (number, source)

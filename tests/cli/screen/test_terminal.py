"""The one place that writes: which characters pass, and where each text goes."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import os
import sys
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from refusals import failing, refused
from typed import Tty

from minikv.cli.screen import terminal
from minikv.cli.screen.terminal import OutputError, Terminal
from minikv.cli.screen.text import clean

Use = Callable[..., tuple[Any, Any, Any]]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes a Terminal, with stdout and stderr that are none. To be called in the test, as pytest
    has streams of its own for a fixture."""

    def begin(kind: type[io.StringIO] = io.StringIO, **given: bool) -> tuple[Any, ...]:
        out, err = kind(), kind()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return Terminal(**given), out, err

    return begin


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch, streams: Use) -> Use:
    """The same on a terminal of 40 columns that takes escape sequences."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return partial(streams, Tty)


# -- characters -----------------------------------------------------------------------------------
def test_the_filter_drops_what_unicode_calls_control_and_nothing_else() -> None:
    """Every code point, against Unicode's own tables."""
    every = "".join(map(chr, range(0x110000)))
    turns = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    hostile = {sign for sign in every if unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")}
    hostile |= {sign for sign in every if unicodedata.bidirectional(sign) in turns}
    hostile |= {chr(0xE0000 + n) for n in range(0x80)}  # tags, of which not all have a name
    unseen = {
        chr(n) for n in (0x61C, 0x180E, 0x200B, 0x200E, 0x200F, *range(0x2060, 0x2070), 0xFEFF)
    } | set("\xad\u034f\u17b4\u17b5\u2800\u3164\uffa0\ufff9\ufffa\ufffb")
    assert set(every) - set(clean(every)) == (hostile | unseen) - {"\n", "\t"}
    seen = "".join(f"\\u{ord(sign):04x}" for sign in sorted(unseen - hostile))
    assert clean("".join(sorted(unseen))) == seen
    joined = "\u200c\u200d"
    formats = {sign for sign in every[:0xFFFF] if unicodedata.category(sign) == "Cf"}
    visible = {sign for sign in formats if unicodedata.bidirectional(sign) in ("AN", "AL", "L")}
    assert formats - hostile - unseen <= visible | set(joined)


def test_what_a_stream_cannot_encode(monkeypatch: pytest.MonkeyPatch, streams: Use) -> None:
    for name in ("stderr", "stdout"):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding="ascii", newline=""))
        made = Terminal()
        if name == "stderr":
            signs = "a · b\x1b › … × – — • │ ─ ━╸ ▁▂▃▄▅▆▇█ é"
            assert made.writable(signs) == "a - b > ... x - - * | - -  .:-=+*#@ \\xe9"
            made.say("│é")
        else:
            made.answer("│é")
            made.end_answer()
        assert raw.getvalue() == b"|\\xe9\n"
    # One without an encoding takes everything.
    assert streams()[0].writable("é│\x07") == "é│"  # io.StringIO has none


# -- what goes where ------------------------------------------------------------------------------
def test_the_answer_alone_goes_to_stdout(streams: Use) -> None:
    made, out, err = streams()
    with made.answering():
        made.answer("one\x1b[1m\n\n")
        assert out.getvalue() == "one[1m"  # newlines wait
        made.resume_answer("of a Markdown answer only")
        made.answer("two\n")
        made.end_answer()
    made.data("{}\x07")
    made.note("a note")
    made.warn("a warning\x1b[2J")
    made.fail("wrong", "do this")
    made.fail("wrong again")
    made.page(["line 1", "line 2"])
    made.status("no terminal, no live line")
    assert out.getvalue() == "one[1m\n\ntwo\n{}\n"
    assert err.getvalue() == (
        "a note\n! a warning[2J\nerror: wrong\n  do this\nerror: wrong again\nline 1\nline 2\n"
    )
    assert not made.copy("no clipboard")
    made, _, err = streams(quiet=True)  # which silences notes and no errors
    made.note("a note")
    made.warn("a warning")
    made.say("said")
    made.fail("wrong")
    assert err.getvalue() == "said\nerror: wrong\n"


def test_a_terminal_gets_styles_and_a_live_line(screens: Use) -> None:
    """What is written next takes the live line away first."""
    made, out, err = screens()
    assert (made.live, made.colour, made.plain) == (True, True, False)
    line = ("reading [5m" + "é" * 60)[:39]
    for act, written in (
        (lambda: made.say("bad", "bad"), "\x1b[31mbad\x1b[0m\n"),
        (lambda: made.data("a table"), ""),
        (lambda: made.answer("a word"), ""),
        (made.end_answer, ""),
        (lambda: made.page(["one", "two"]), "one\ntwo\n"),
        (made.close, ""),
    ):
        err.seek(err.truncate(0))
        made.status("reading \x1b[5m" + "é" * 60)
        act()
        assert err.getvalue() == f"\r\x1b[K{line}\r\x1b[K{written}"
        made.clear_status()
        assert err.getvalue() == f"\r\x1b[K{line}\r\x1b[K{written}"
    made.say("plain")
    assert err.getvalue().endswith("\x1b[Kplain\n")
    assert out.getvalue() == "a table\na word\n"


@pytest.mark.parametrize(
    ("variables", "given", "may"),
    [
        ({"NO_COLOR": "1"}, {}, "live"),
        ({"NO_COLOR": ""}, {}, "live colour"),
        ({"TERM": "dumb"}, {}, "plain"),
        ({}, {"plain": True}, "plain"),
        ({}, {"quiet": True}, "colour"),
    ],
    ids=str,
)
def test_what_a_terminal_may_be_shown(
    screens: Use,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    given: dict[str, bool],
    may: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made, out, err = screens(**given)
    live, colour, plain = (word in may for word in ("live", "colour", "plain"))
    assert (made.live, made.colour, made.plain) == (live, colour, plain)
    made.say("x", "bad")
    assert ("\x1b" in err.getvalue()) == colour
    assert made.copy("a\x1bb é") != plain
    data = base64.b64encode("ab é".encode()).decode()
    assert err.getvalue().endswith(f"\x1b]52;c;{data}\x07") != plain
    with made.answering():
        made.answer("a `word`\n\n")
        made.end_answer()
    assert ("\x1b[36mword" in out.getvalue()) == colour
    monkeypatch.delenv("TERM")
    assert Terminal().plain  # nobody says what the terminal can do


def test_an_answer_on_a_terminal_is_markdown(screens: Use) -> None:
    """Thoughts are dimmed and cleaned."""
    made, out, err = screens()
    made.think("so\x1b[31m it is")
    assert err.getvalue() == "\x1b[2mso[31m it is\x1b[0m"
    assert out.getvalue() == ""
    with made.answering():
        made.answer("**bo")
        made.answer("ld**\x1b[2J\n\n")
        assert "\x1b[1mbold" in out.getvalue()
        made.answer("a **block")
        made.say("a message between")
        made.answer("**\n\n")  # what is above the message stays as it is
        made.end_answer()
    assert "\x1b[2J" not in out.getvalue()
    assert out.getvalue().endswith("a **block**\n")
    with made.answering():  # it continues in the middle of a line, which is written again
        made.resume_answer("one\n\na **bo")
        assert out.getvalue().endswith("a **block**\na **bo")
        made.answer("ld** word")
        made.end_answer()
    assert out.getvalue().endswith("\r\x1b[Ja \x1b[1mbold\x1b[0m word\n")
    made.answer("**plain**")  # outside of an answer it is no Markdown
    assert out.getvalue().endswith("**plain**")


# -- streams that fail ----------------------------------------------------------------------------
def test_messages_that_nobody_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr is a pipe without a reader: nothing fails, now or when the program ends."""
    reader, writer = os.pipe()
    os.close(reader)
    with (tmp_path / "out").open("w") as out, open(writer, "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        made = Terminal()
        made.say("nobody reads this")
        made.say("nor this")
        made.answer("the answer")
        assert Path(out.name).read_text() == "the answer"
        null = os.stat(os.devnull)
        assert os.path.samestat(os.fstat(err.fileno()), null)
        assert not os.path.samestat(os.fstat(out.fileno()), null)


def test_an_answer_that_nobody_takes_is_an_error(streams: Use) -> None:
    """Messages that a full disk refuses cost no answer."""

    def broken(error: OSError) -> Any:
        return Mock(wraps=io.StringIO(), encoding="utf-8", write=failing(error))

    full = OSError(errno.ENOSPC, "No space left on device")
    made, out, _ = streams()
    made.err = broken(full)
    made.say("a message")
    made.answer("the answer")
    assert out.getvalue() == "the answer"
    made, *_ = streams()
    made.out = broken(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    with pytest.raises(BrokenPipeError):
        made.answer("x")
    made.out = broken(full)
    with pytest.raises(OutputError, match="cannot write the output: No space left on device"):
        made.data("x")


@pytest.mark.parametrize(
    ("typed", "agreed"),
    [("y\n", True), (" YES \n", True), ("\n", False), ("n\n", False), ("", False)],
)
def test_nothing_is_removed_without_a_yes(
    monkeypatch: pytest.MonkeyPatch, screens: Use, typed: str, agreed: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Tty(typed))
    made, _, err = screens()
    assert made.confirmed("remove \x1ball?", yes=False) is agreed
    assert err.getvalue().startswith("remove all? [y/N] ")
    assert made.confirmed("?", yes=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    refused("no terminal to answer on", made.confirmed, "?", yes=False)


def test_closed_streams_are_replaced_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """stdin is empty, stdout gives an error, and stderr takes everything. A closed stream is no
    terminal, nor can it be flushed."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert not terminal._is_tty(closed)
    terminal.hush()
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    terminal.open_streams()
    made: tuple[Any, ...] = sys.stdin, sys.stdout, sys.stderr
    try:
        assert made[0].read() == ""
        assert made[2].write("anything") == 8
        made[2].flush()
        made[1].write("an answer")
        with pytest.raises(OSError, match="Bad file descriptor"):
            made[1].flush()
        numbers = [stream.fileno() for stream in made]
        assert numbers == sorted(numbers)
        terminal.open_streams()  # what is there stays
        assert (sys.stdin, sys.stdout, sys.stderr) == made
        terminal.hush()  # and what cannot be written gives no error at the exit
        made[1].close()
    finally:
        for stream in made:
            with contextlib.suppress(OSError):
                stream.close()


# -- widths ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("told", "widths"),
    [(None, {"": 80, "100": 100, "12": 20, "0": 80, "x": 80}), (90, {"": 90, "50": 50, "99": 90})],
)
def test_columns_makes_a_window_narrower_and_never_wider(
    monkeypatch: pytest.MonkeyPatch, told: int | None, widths: dict[str, int]
) -> None:
    """Where the terminal says nothing, it has as many as COLUMNS."""
    if told:
        monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((told, 40)))
    for columns, width in widths.items():
        monkeypatch.setenv("COLUMNS", columns)
        with open(os.devnull) as stream:
            assert terminal.window(stream) == (width, 40 if told else 24), columns


WORDS, NAMED = "word " * 9, "  a rather long name  "


@pytest.mark.parametrize(
    ("line", "width", "rows"),
    [
        ("x" * 40, 40, ["x" * 40]),
        (f"name  {WORDS}end", 40, ["name  " + "word " * 6 + "word", "      word word end"]),
        # A first column of more than a third of the width is none: the line's own margin and two.
        (f"{NAMED}{WORDS}", 40, [f"{NAMED}word word word", "    word word word word word word"]),
        (" " * 9 + WORDS, 40, [" " * 9 + "word " * 5 + "word", " " * 9 + "word word word"]),
        ("/path" * 9 + " a-b", 40, ["/path" * 9, "  a-b"]),
        ("took back: " + "中" * 60, 80, ["took back: " + "中" * 34, "  " + "中" * 26]),
        ("名前  " + "中文 " * 9, 20, ["名前  中文 中文 中文", "      中文 中文 中文"]),
    ],
)
def test_long_lines_are_broken_behind_a_narrow_first_column(
    screens: Use, monkeypatch: pytest.MonkeyPatch, line: str, width: int, rows: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    for term in ("xterm", "dumb"):
        monkeypatch.setenv("TERM", term)
        made, out, err = screens()
        made.say(line)
        made.data(line, fold=True)
        assert out.getvalue() == err.getvalue()
        assert err.getvalue().split("\n")[: len(rows)] == rows
        made.data(line)  # JSON stays one line
        assert out.getvalue().endswith(f"\n{line}\n")


# -- the live line, keys, and remedies ------------------------------------------------------------
def test_of_many_frames_ten_a_second_are_drawn(screens: Use, streams: Use) -> None:
    """None is made where there is no terminal."""
    made, _, err = streams()
    made.frame(lambda: pytest.fail("nobody sees it"))
    assert err.getvalue() == ""
    made, _, err = screens()
    now, asked = [0.0], list[int]()
    made.clock = lambda: now[0]
    for count in range(50):
        now[0] = count / 25

        def drawn(count: int = count) -> str:
            asked.append(count)
            return f"frame {count}"

        made.frame(drawn)
    assert asked == list(range(0, 50, 3))  # of 25 a second
    assert err.getvalue().endswith("frame 48")
    # It is cut by cells: a wide character takes two, and the last column stays free.
    made, _, err = screens()
    made.status("é" * 30 + "世界" * 9)
    assert err.getvalue() == "\r\x1b[K" + "é" * 30 + "世界世界"


@pytest.mark.parametrize("plain", [False, True])
def test_keys_are_kept_from_open_to_close(
    screens: Use, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    keys = Mock()
    monkeypatch.setattr(terminal, "Keyboard", keys)
    made, *_ = screens(plain=plain)
    made.open_keyboard()
    assert (made.keyboard is None) == plain
    made.close()
    assert made.keyboard is None
    done = [] if plain else [call.open(), call.close()]
    assert keys().method_calls == done


def test_a_remedy_is_told_as_it_is_typed(streams: Use, screens: Use) -> None:
    """And the screen is what stderr can show, and the columns are stdout's."""
    made, *_ = streams()
    for chat, shown in ((False, "use --budget 64"), (True, "use /set budget 64")):
        made.chat = chat
        assert made.words("use `budget=64`") == shown
        assert made.words("no remedy") == "no remedy"
    assert (made.screen.rows, made.columns) == (0, 0)
    made, *_ = screens()
    shown = made.screen
    assert (shown.width, shown.rows > 0, shown.colour, made.columns) == (40, True, True, 40)

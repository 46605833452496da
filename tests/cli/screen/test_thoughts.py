"""Thoughts on the screen: folded, shown or hidden, at every width and without a terminal."""

from __future__ import annotations

import io
from typing import Any

import pyte
import pytest
from small_chat import scripted

from minikv.cli.chat.turn import record, run_turn
from minikv.cli.failures import Interrupts
from minikv.cli.screen.progress import Thinking
from minikv.cli.screen.terminal import Terminal
from minikv.settings import Generation

THOUGHTS = (
    "Who runs the mill? Let me see: it was sold in 1912, and Ada has run it since then. But there "
    "is a lease further down, with a_word_that_is_wider_than_a_row_of_fifty_columns, until 1950."
)
TEXT = f"<think>\n{THOUGHTS}\n\nSo it is Ada.\x1b[31m\n</think>\n\nIt is **Ada**."
SHOWN = f"{THOUGHTS}\n\nSo it is Ada.[31m"
FOLDED = f"thought for {len(TEXT) - 16} tokens"


class Stream(io.StringIO):
    """What a program writes to stdout and stderr, on a terminal or not."""

    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


def run(
    monkeypatch: pytest.MonkeyPatch, how: str, *, width: int = 0, most: int = 900, **given: Any
) -> tuple[str, str]:
    """What a turn writes to stdout and to stderr; on a terminal (width) to both together."""
    out = Stream(bool(width))
    err = out if width else Stream(tty=False)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width or 80))
    terminal = Terminal(**given)
    terminal.thoughts = how
    run_turn(scripted(TEXT), "who?", Generation(max_tokens=most), terminal, Interrupts())
    return out.getvalue(), "" if width else err.getvalue()


@pytest.mark.parametrize(
    ("how", "quiet", "err"),
    [
        ("fold", False, f"{FOLDED}\n"),
        ("show", False, f"{SHOWN}\n{FOLDED}\n"),
        ("hide", False, ""),
        ("show", True, ""),
    ],
)
def test_a_pipe_gets_the_answer_alone(
    monkeypatch: pytest.MonkeyPatch, how: str, quiet: bool, err: str
) -> None:
    assert run(monkeypatch, how, quiet=quiet) == ("It is **Ada**.\n", err)


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("how", ["fold", "show", "hide"])
def test_a_terminal_keeps_what_the_setting_says(
    monkeypatch: pytest.MonkeyPatch, how: str, width: int
) -> None:
    monkeypatch.setattr("minikv.cli.screen.progress.FRAME", 0.0)
    written, _ = run(monkeypatch, how, width=width)
    screen = pyte.HistoryScreen(width, 40)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    rows = [row.rstrip() for row in screen.display if row.strip()]
    assert rows[-1] == "It is Ada."
    *thoughts, folded = rows[:-1] or [""]
    assert folded == ("" if how == "hide" else FOLDED)
    # A word that is wider than the terminal is broken there.
    assert "".join("".join(thoughts).split()) == ("".join(SHOWN.split()) if how == "show" else "")
    words = [word for row in thoughts for word in row.split() if "_" not in word]
    assert set(words) <= set(SHOWN.split())
    # While they came, one line had their end, or, hidden, only their number.
    live = [part for part in written.split("\r\x1b[K") if part.startswith("\x1b[2mthinking")]
    assert bool(live) == (how != "show")
    assert any("since then." in line for line in live) == (how == "fold")
    assert all(len(line.removeprefix("\x1b[2m").split("\x1b")[0]) < width for line in live)


def test_thoughts_that_do_not_end_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(monkeypatch, "fold", most=40)
    assert out == "\n"
    first, second = err.splitlines()
    assert first == "thought for 40 tokens"
    assert second.startswith("! the model was still thinking, so there is no answer; ")


def test_a_record_has_thoughts_beside_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for text, thoughts in ((TEXT, f"{THOUGHTS}\n\nSo it is Ada.\x1b[31m"), ("Ada.", None)):
        chat = scripted(text)
        list(chat.ask("who?", 900))
        found = record(chat.turns[0])
        assert found.get("thoughts") == thoughts
        assert found["answer"] == text.rpartition("</think>\n\n")[2]


def test_the_line_is_written_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Stream(tty=True))
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    thinking = Thinking(terminal, clock=lambda: 0.0)
    for tokens in range(1, 50):
        thinking("a", tokens)
    thinking.end()
    thinking.end()
    assert terminal.err.getvalue().count("thinking") == 1  # type: ignore[attr-defined]
    assert terminal.err.getvalue().count("thought for 49") == 1  # type: ignore[attr-defined]

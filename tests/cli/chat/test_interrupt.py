"""Ctrl-C, SIGTERM and keys at every moment of a chat, on a terminal and without one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import termios
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pyte
import pytest
import small_chat
from forked import Forked, Piped
from pairwise import some_by_day
from terminals import Terminals
from typed import answer_of, context

from minikv.cli.chat.command import converse
from minikv.cli.saved.listing import listing

SUPPORT = Path(__file__).parents[2] / "support"
ANSWER = answer_of("The mill is run by Ada.", "first?")[:3]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_ends_a_question_between_tokens(document: str, number: int, code: int) -> None:
    """Without a terminal, too: one newline ends it. So does Ctrl-C a chat that waits for a line."""
    with Piped("ask", "first?", document, pace=0.05) as process:
        first = process.stdout.read(3)
        process.send_signal(number)
        out = process.stdout.read()
        assert process.wait() == code
        assert re.fullmatch(rb"[a-z]{3,39}\n", first + out)
        assert b"Traceback" not in process.stderr.read()
    if number == signal.SIGINT:
        with Piped("chat", document, pace=0) as process:
            process.stdin.write(b"q\n")
            assert process.stdout.readline()
            time.sleep(0.3)  # from the answer to the next line
            process.send_signal(number)
            assert process.wait() == code


_ECHO = """
import os, sys, termios
from fakes import ByteTokenizer, ChatML, FakeEngine
import minikv.cli.chat.turn
from minikv.cli.main import run
from minikv.chat.session import ChatSession

def note(where):
    with open(os.environ["NOTES"], "a") as file:
        echoed = termios.tcgetattr(2)[3] & termios.ECHO
        print(where, "echoed" if echoed else "silent", file=file)

class Tokenizer(ByteTokenizer):
    def encode(self, text):
        note("encoding")
        return super().encode(text)

def build(settings, progress=None):
    note("loading")
    engine, tokenizer = FakeEngine(), Tokenizer()
    engine.hook = lambda fed: note("reading")
    return ChatSession(engine, tokenizer, ChatML(tokenizer), settings, max_context=4096)

minikv.cli.chat.turn.build = build
run()
"""


@pytest.mark.parametrize("out", some_by_day(["/dev/null", "/dev/stdout"], "/dev/null".__eq__))
def test_keys_pressed_meanwhile_are_not_echoed(document: str, tmp_path: Path, out: str) -> None:
    """While the model loads, under a command and around an answer, wherever that goes."""
    notes = tmp_path / "notes"
    command = ["sh", "-c", f'exec "$@" >{out}', "sh", sys.executable, "-c", _ECHO]
    env = {"TERM": "xterm", "COLUMNS": "100", "NOTES": str(notes), "PYTHONPATH": str(SUPPORT)}
    with contextlib.closing(Terminals([*command, "chat", document], env)) as terminal:
        terminal.prompt = "\x1b[?25h"
        terminal.until("Ctrl-D leaves.")
        for line, end in (("/docs", "read with your next question"), ("q", "without eviction")):
            terminal.ready()
            terminal.type(f"{line}\r")
            terminal.until(end)
        terminal.ready()
        terminal.type("/exit\r")
        assert terminal.code() == 0
    said = {"loading silent", "encoding silent", "reading silent"}
    assert set(notes.read_text().splitlines()) == said


@pytest.fixture(params=["dumb", "xterm"])
def talk(request: pytest.FixtureRequest, document: str) -> Iterator[Terminals]:
    """A chat on a terminal, with plain input and with the line editor."""
    env = {"TERM": request.param, "COLUMNS": "100", "LINES": "40"}
    with contextlib.closing(Forked("chat", document, env=env, pace=0.04)) as terminal:
        terminal.until("Ctrl-D leaves.")
        terminal.ready()
        yield terminal
    assert "Traceback" not in terminal.seen


def test_ctrl_c_stops_what_runs_and_takes_back_what_was_typed_ahead(talk: Terminals) -> None:
    def told(typed: str, *found: str) -> str:
        """All up to the prompt after this was typed and that was shown."""
        talk.type(typed)
        text = "".join(talk.until(each) for each in found)
        talk.ready()
        return text

    told("\x03", "Ctrl-D or /exit leaves")  # at the prompt it hints, and drops nothing typed later
    told("/docs\r/tokens\r", "report.txt", "room left")
    talk.type(f"{'word ' * 60}\r")  # while reading: nothing is added
    talk.until("\n")
    time.sleep(0.8)
    text = told("\x03", "nothing was added")
    assert re.search(r"stopped reading at [\d,]+ of [\d,]+ tokens", text)
    talk.type("first?\r")  # while writing: the answer alone stops
    talk.until(ANSWER)
    told("\x03", "stopped by user", "without eviction")
    talk.type("second?\r")  # what is typed during an answer runs in order
    time.sleep(0.8)
    plain = "\x1b" not in talk.seen  # then the terminal shows what is typed during an answer
    third = () if plain else ("third?",)
    answered = "without eviction"
    told("/docs\rthird?\r", "40 tokens · ", answered, "report.txt", *third, answered)
    talk.type("fourth?\r")  # and Ctrl-C takes it back
    talk.until("fourth?")
    talk.until("\n")
    time.sleep(0.8)
    talk.type("fifth?\r/docs\r")
    time.sleep(0.2)
    told("\x03", "stopped by ", "without eviction")
    with pytest.raises(AssertionError, match="no 'report"):
        talk.until("report", 0.7)
    talk.type("\x04")
    assert talk.code() == 0
    assert talk.seen.count("fifth") == plain


@pytest.mark.parametrize("asked", [False, True])
def test_two_interrupts_within_two_seconds_leave(talk: Terminals, asked: bool) -> None:
    """What was written of an answer is saved, and a last line says how to continue."""
    if asked:
        talk.type("first?\r")
        talk.until(ANSWER)
        talk.type("\x03")
        time.sleep(0.01)
    else:
        talk.type("\x03")
        talk.until("Ctrl-D or /exit leaves")
        talk.ready()
    talk.type("\x03")
    assert talk.code() == 130
    assert ("continues this chat" in talk.seen) == asked


@pytest.mark.parametrize("typed", [True, False])
def test_a_sent_question_begins_anew(monkeypatch: pytest.MonkeyPatch, typed: bool) -> None:
    """Of lines from a pipe none is sent by the user, who presses twice to leave all of them."""
    monkeypatch.setattr("minikv.cli.failures.TWICE", 1e9)
    session = small_chat.chat()
    prompt = session.engine.prompt

    def pressing(*given: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return prompt(*given)

    monkeypatch.setattr(session.engine, "prompt", pressing)
    at_the_prompt = [KeyboardInterrupt, "/docs", KeyboardInterrupt]
    coming = iter(["Who?", "Why?", "/docs", *at_the_prompt, EOFError])

    def read_line() -> str:
        line = next(coming)
        if isinstance(line, str):
            return line
        raise line

    ends = contextlib.nullcontext() if typed else pytest.raises(KeyboardInterrupt)
    with ends:
        assert converse(context(session), read_line, typed=typed) == 0
    assert len(list(coming)) == (0 if typed else 5)


HOW = (("dumb", signal.SIGTERM), ("xterm", signal.SIGTERM), ("xterm", signal.SIGHUP))


@pytest.mark.parametrize(
    ("moment", "how"),
    some_by_day(
        [*product(("prompt", "answer", "loading"), HOW)],
        lambda case: case[1] == HOW[1] or case[0] == "answer",
    ),
    ids=str,
)
def test_sigterm_saves_the_chat_and_leaves_the_terminal_clean(
    document: str, moment: str, how: tuple[str, int]
) -> None:
    """143, no toolbar, the terminal's mode as before, and what was written of the answer kept."""
    term, number = how
    env = {"TERM": term, "COLUMNS": "100", "LINES": "24"}
    talk: Terminals
    if moment == "loading":  # the imports of a process of its own take long enough
        main = [sys.executable, str(SUPPORT / "fake_main.py"), "0", "chat", document]
        talk = Terminals(["sh", "-c", 'echo up; exec "$@"', "sh", *main], env)
        talk.until("up")
        before = termios.tcgetattr(talk.fd)
    else:
        talk = Forked("chat", document, env=env, pace=0.04)
        before = talk.modes
    with contextlib.closing(talk):
        while moment == "loading" and termios.tcgetattr(talk.fd) == before:
            time.sleep(0.01)
        if moment != "loading":
            talk.until("Ctrl-D leaves.")
            talk.ready()
        if moment == "answer":
            talk.type("first?\r")
            talk.until(ANSWER)
        os.kill(talk.pid, number)
        assert talk.code() == 143
        assert termios.tcgetattr(talk.fd) == before
    assert "Traceback" not in talk.seen
    screen = pyte.Screen(100, 24)
    pyte.Stream(screen).feed(talk.seen)
    assert not any("of 4,096 tokens" in line for line in screen.display)
    assert talk.seen.rfind("\x1b[?2004h") <= talk.seen.rfind("\x1b[?2004l")
    assert [entry.turns for entry in listing()] == [1] * (moment == "answer")

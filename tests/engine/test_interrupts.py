"""A stop at every boundary of a prompt and at every step of an answer, and Ctrl-C on a terminal:
the chat lives, and the next answer is that of a chat which was never interrupted."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from tensors import torch_threads
from terminals import Terminals
from test_machine import Setting, eviction, facts, stopped_before_writing
from whole import whole as sound

import minikv
from minikv.cli.saved.keeper import Keeper
from minikv.cli.screen.terminal import Terminal
from minikv.errors import Interrupted


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The network is too small for more."""
    with torch_threads(1):
        yield


# -- every boundary --------------------------------------------------------------------------------

EVERYWHERE = {
    "plain": Setting(eviction(("adakv", "auto"), 48), windows=(None,) * 4),
    "evict first": Setting(eviction(("snapkv", "l2"), 48), windows=(None, 40, None, 40)),
    "twice": Setting(eviction(("kvzip", "auto"), 48), windows=(None,) * 4),
    "twice, file": Setting(eviction(("kvzip", "auto"), 48), "file", windows=(None,) * 4),
    "recall": Setting(eviction(("adakv", "auto"), 48), "ram", reuse="auto", windows=(None,) * 4),
}
TOLD = "The mill stands by the river, and nobody knows who built it. "


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_stop_at_every_layer_and_chunk_of_a_prompt(name: str, part: float) -> None:
    """Four layers, chunks of 32 tokens: at each boundary the chat is as it was, and in the end it
    answers as if nothing had been stopped.

    By day at every third boundary, so after each of the layers, and after others of them in the
    second prompt and in another setting."""
    stride, first = (1, 1) if part == 1 else (3, 1 + [*EVERYWHERE].index(name) % 3)
    chat, plain = EVERYWHERE[name].chat(), EVERYWHERE[name].chat()
    for turn, question in enumerate(("Who?", "And then?")):
        for one in (chat, plain):
            one.attach(TOLD * 2, f"{turn}.txt")
        calls, total = itertools.count(1), 0

        def count(done: int, of: int, calls: Iterator[int] = calls) -> None:
            nonlocal total
            total = next(calls)

        "".join(plain.ask(question, 5, progress=count))
        before = facts(chat)
        for at in sorted({*range(first, total, stride), total - 1}):
            left = iter(range(at, 0, -1))

            def stop(done: int, of: int, left: Iterator[int] = left) -> None:
                if next(left, 0) == 1:
                    chat.cancel()

            with pytest.raises(Interrupted):
                list(chat.ask(question, 5, progress=stop))
            sound(chat)
            assert facts(chat) == before
        assert total >= 4 * 5
        first = first % stride + 1
        "".join(chat.ask(question, 5))
        assert facts(chat) == facts(plain)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_stop_at_every_step_of_an_answer(name: str, part: float) -> None:
    """What was written stays, and the next question is answered as after so many tokens. By day
    after an odd or an even number of them, by the setting."""
    first = 1 + [*EVERYWHERE].index(name) % 2
    for written in range(1, 9) if part == 1 else range(first, 9, 2):
        chat, plain = EVERYWHERE[name].chat(), EVERYWHERE[name].chat()
        for one in (chat, plain):
            one.attach(TOLD * 2, "mill.txt")
        answer = chat.ask("Who?", 40, 0.8)
        for _ in range(written):
            next(answer, None)
        chat.cancel()
        assert list(answer) == []
        sound(chat)
        report = chat.report
        "".join(plain.ask("Who?", report.tokens.generated, 0.8))
        if report.stop_reason == "user":
            assert report.tokens.generated == written
        assert facts(chat) == facts(plain)
        for one in (chat, plain):
            "".join(one.ask("And then?", 4))
        assert facts(chat) == facts(plain)


# -- on a terminal ---------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("count", [200, 1000])
def test_ctrl_c_on_a_terminal_at_random_moments(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat on a pseudo-terminal gets so many SIGINTs while it reads and writes. It lives, leaves
    with 0, and what it saved is the chat of the same questions whose answers had as many tokens."""
    model, story, home = tmp_path / "tiny", tmp_path / "story.txt", tmp_path / "home"
    tiny.write(model)
    story.write_text("a story of a crane and a tiger, told twice. " * 4)
    settings = {"policy": "adakv", "budget": 48, "reuse": "once", "tier": "none"}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "minikv.cli", "chat", str(story), "-m", str(model), *flags]
    command += ["--device", "cpu", "-n", "400", "--dtype", "float32"]
    environment = {"TERM": "dumb", "COLUMNS": "200", "MINIKV_HOME": str(home)}
    draw, came = random.Random(13), 0
    terminal = Terminals(command, environment | {"OMP_NUM_THREADS": "1"})
    try:
        terminal.prompt = "> "
        terminal.until("Ctrl-D leaves.")
        terminal.ready()
        for number in range(count):
            if number % 8 == 7:
                terminal.type("/reset\r")
                terminal.ready()
            terminal.type(f"question {number}?\r")
            terminal.until(f"question {number}?\r\n")
            time.sleep(draw.uniform(0.0, 0.4))  # an answer takes longer
            os.kill(terminal.pid, signal.SIGINT)
            terminal.ready()
            came += 1
            time.sleep(2.0)  # twice in a moment leaves
        terminal.type("And now?\r")  # the last one above may have been stopped before it was read
        terminal.until("And now?\r\n")
        terminal.ready()
        terminal.type("/save whole\r")
        terminal.until("whole")
        terminal.ready()
        terminal.type("\x04")
        assert terminal.code() == 0
        assert "Traceback" not in terminal.seen
        assert "bug in minikv" not in terminal.seen
    finally:
        terminal.close()
    sys.stderr.write(f"{came} signals, {terminal.seen.count('stopped')} lines say so\n")
    assert came == count
    monkeypatch.setenv("MINIKV_HOME", str(home))
    given: dict[str, Any] = {**settings, "dtype": "float32", "device": "cpu"}
    chat, plain = minikv.load(str(model), **given), minikv.load(str(model), **given)
    Keeper(Terminal(quiet=True)).load(chat, "whole")
    sound(chat, keys=False)
    for turn in chat.turns:
        for document in turn.documents:
            plain.attach(document.text, document.name)
        written = turn.report.tokens.generated
        if written:
            "".join(plain.ask(turn.question, written))
        else:
            stopped_before_writing(plain, turn.question, 0.0)
    assert (chat.fed, chat.pending_token) == (plain.fed, plain.pending_token)
    assert "".join(chat.ask("The last?", 8)) == "".join(plain.ask("The last?", 8))

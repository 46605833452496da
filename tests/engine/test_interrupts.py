"""Ctrl-C at random moments: the chat lives, its cache is whole, and the next answer is the one that
a chat would give which was never interrupted."""

from __future__ import annotations

import io
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from small import VOCAB, engine, network
from small_chat import chat_over
from terminals import Terminals
from test_machine import Setting, eviction, facts, stopped_before_writing
from torch import Tensor
from whole import whole as sound

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.interrupt import Interrupts
from minikv.cli.saved.keeper import Keeper
from minikv.cli.terminal import Terminal
from minikv.cli.turn import run_turn
from minikv.errors import Interrupted
from minikv.settings import Generation

BOS, USER, ASSISTANT, END, STOP = range(VOCAB - 5, VOCAB)
PAIRS = [("full", "none"), ("adakv", "roco"), ("h2o", "h2o"), ("streaming", "streaming")]
DOCUMENT = "The mill stands by the river, and nobody knows who built it. " * 3
CONTEXT = 1800


class Letters:
    """One token per character, as many as the small network knows."""

    vocab = VOCAB
    stop_ids = frozenset({STOP})

    def encode(self, text: str) -> list[int]:
        return [ord(sign) % BOS for sign in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(0x100 + id) for id in ids)

    def stream(self) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(0x100 + token)

    def flush(self) -> str:
        return ""


class Template:
    notes = ()

    def opening(self, messages: Sequence[Any]) -> list[int]:
        ids = [BOS]
        for message in messages:
            role = USER if message.role == "user" else ASSISTANT
            ids += [role, *Letters().encode(message.content), END]
        return [*ids, ASSISTANT]

    def following(self, messages: Sequence[Any]) -> list[int]:
        return [END, USER, *Letters().encode(messages[-1].content), END, ASSISTANT]

    def lookalikes(self, text: str) -> int:
        return 0

    def markers(self, text: str) -> int:
        return 0

    def lost(self, text: str) -> int:
        return 0


def make(net: Any, policy: str, step: str) -> ChatSession:
    run = engine(net, policy, step, 48)
    chat = chat_over(
        run,
        Letters(),
        Template(),
        max_context=CONTEXT,
        eviction=EvictionConfig.read(policy, step, "48"),
    )  # type: ignore[arg-type]
    chat.attach(DOCUMENT, "mill.txt")
    return chat


def whole(chat: ChatSession) -> None:
    """Tokens, positions and every layer's and head's rows agree."""
    kv: Any = chat.engine.kv
    assert kv.position == len(chat.fed) == kv.stats().seen
    for layer in range(kv.shape.layers):
        for head in range(kv.shape.kv_heads):
            kept = chat.kept(layer, head)
            assert len(kept) == int(kv.arena.held[layer, head])
            assert bool((kept[1:] > kept[:-1]).all())
            assert len(kept) == 0 or 0 <= int(kept[0]) <= int(kept[-1]) < len(chat.fed)
            if chat.eviction.policy == "full":
                assert len(kept) == len(chat.fed)


def same(one: ChatSession, other: ChatSession) -> None:
    assert (one.fed, one.pending_token, one.turn) == (other.fed, other.pending_token, other.turn)
    assert one.messages == other.messages
    assert [d.name for d in one.pending] == [d.name for d in other.pending]
    kv: Any = one.engine.kv
    for layer in range(kv.shape.layers):
        for head in range(kv.shape.kv_heads):
            assert torch.equal(one.kept(layer, head), other.kept(layer, head))


def ask(chat: ChatSession, question: str, tokens: int) -> str:
    """As the chat does it, with the answer on a terminal that is a string."""
    terminal = Terminal(quiet=True)
    terminal.out = io.StringIO()
    answer = run_turn(chat, question, Generation(max_tokens=tokens), terminal, Interrupts())
    assert terminal.out.getvalue() == f"{answer}\n"
    return answer


def interrupted(chat: ChatSession, question: str, tokens: int, seconds: float) -> str | None:
    """Ask, with a Ctrl-C after so long. None if it came while the prompt was read."""
    pressed = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    # As the chat has it around every line, so that one which comes late does no harm either.
    with Interrupts().stopping(lambda: None):
        pressed.start()
        try:
            return ask(chat, question, tokens)
        except Interrupted:
            return None
        finally:
            pressed.join()
            time.sleep(0)  # the signal is handled now at the latest


def stop_after_reading(chat: ChatSession) -> Callable[[], None]:
    """The next turn of `chat` ends before its first token."""
    prompt = chat.engine.prompt

    def then_stop(*given: Any) -> Tensor:
        logits = prompt(*given)
        chat.cancel()
        return logits

    chat.engine.prompt = then_stop  # type: ignore[method-assign]

    def back() -> None:
        chat.engine.prompt = prompt  # type: ignore[method-assign]

    return back


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The network is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def moments(count: int, seed: int) -> dict[str, int]:
    """So many interrupted turns over all the policies; what was interrupted how often."""
    draw = random.Random(seed)
    net = network()
    came = {"reading": 0, "before the first token": 0, "writing": 0, "too late": 0}
    chats: dict[tuple[str, str], tuple[ChatSession, ChatSession]] = {}
    took = 0.2
    for number in itertools.count():
        if sum(came.values()) - came["too late"] == count:
            break
        assert came["too late"] < 10 * count
        pair = PAIRS[number % len(PAIRS)]
        if pair not in chats or chats[pair][0].room < 700:
            chats[pair] = make(net, *pair), make(net, *pair)
        chat, twin = chats[pair]
        if number % 3 == 0:
            for one in (chat, twin):
                one.attach(DOCUMENT.upper(), f"{number}.txt")
        question, turns = f"Who built it, and why, in the year {number}?", chat.turn
        answer = interrupted(chat, question, 40, draw.uniform(0.0, 1.1 * took))
        whole(chat)
        if answer is None:
            came["reading"] += 1
            assert chat.turn == turns
        else:
            assert chat.report is not None
            stopped = chat.report.stop_reason == "user"
            written = chat.report.tokens.generated
            assert len(answer) == written
            back = stop_after_reading(twin) if stopped and not written else None
            assert ask(twin, question, written if stopped and written else 40) == answer
            if back:
                back()
            came[
                "too late" if not stopped else "writing" if written else "before the first token"
            ] += 1
            took = max(0.9 * took, chat.report.time_s.total)
        same(chat, twin)
        assert ask(chat, "And then?", 8) == ask(twin, "And then?", 8)
        whole(chat)
        same(chat, twin)
    return came


def test_a_few_random_moments() -> None:
    came = moments(8, seed=1)
    assert came["reading"] + came["writing"] > 0


@pytest.mark.soak
def test_two_hundred_random_moments() -> None:
    came = moments(200, seed=2)
    sys.stderr.write(f"{came}\n")
    assert came["reading"] >= 30
    assert came["writing"] >= 30


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
        assert report is not None
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

"""A turn from the command line: the bundled model says where a document is not of its world."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_chat import reported
from typed import Tty, invoke, screen
from typed import said as told

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.chat.turn import TOY, note_report, record, run_turn
from minikv.cli.eval.tasks import CHATS
from minikv.cli.failures import Interrupts
from minikv.cli.screen import render
from minikv.cli.screen.terminal import Terminal
from minikv.models import BUNDLED
from minikv.settings import Generation

ENGLISH = (
    "The quarterly report shows that revenue grew by eleven percent, mostly because customers in "
    "northern Europe renewed their contracts earlier than expected. "
)
CODE, SAMPLE = Path(render.__file__).read_text(), (BUNDLED / "sample.txt").read_text()


@pytest.fixture(scope="module")
def session() -> ChatSession:
    return minikv.load(device="cpu", tier="none")


DOCUMENTS: dict[str, tuple[list[str], int]] = {
    "none": ([], 0),
    "sample": ([SAMPLE[:4000]], 0),
    "made": (["made"], 0),
    "English": ([ENGLISH], 1),
    "longer": ([ENGLISH * 9], 1),
    "code": ([CODE[:3000]], 1),
    "Chinese": (["\u4e16\u754c\u4f60\u597d " * 20], 1),
    "several": ([SAMPLE[:4000], ENGLISH, CODE[:500]], 1),
}


@pytest.mark.parametrize(("texts", "times"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_toy_says_that_it_does_not_know_a_document(
    session: ChatSession, texts: list[str], times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """And puts it into the record, once. Another model does not."""
    if texts == ["made"]:
        texts = [next(CHATS["followup"].items(session.tokenizer, 600, 6, 7)).document]
    own, terminal = session.facts, Terminal()
    for facts, count in ((own, times), (replace(own, model="owner/another"), 0)):
        session.reset()
        session.facts = facts
        for text in texts:
            session.attach(text)
        run_turn(session, "Who?", Generation(max_tokens=1), terminal, Interrupts())
        session.facts = own
        assert capsys.readouterr().err.count(TOY) == count
        for left in (count, 0):
            assert record(session.turns[-1], terminal)["warnings"] == [TOY] * left


@pytest.mark.parametrize(
    ("message", "times"),
    [(ENGLISH, 1), (SAMPLE[:2000], 0), ("Who?", 1)],
    ids=["English", "sample", "short"],
)
def test_the_toy_says_so_of_a_message_without_a_document(message: str, times: int) -> None:
    done = invoke("ask", "-", "-n", "1", "--remember", "off", input=message)
    assert done.stderr.count(TOY) == times


def test_the_whole_sample_is_of_its_world(session: ChatSession) -> None:
    """However it is cut: the beginning alone is looked at."""
    text = SAMPLE
    pieces = [text[at : at + 2000] for at in range(0, len(text) - 2000, 2000)]
    least = min(len(piece) / len(session.tokenizer.encode(piece)) for piece in pieces)
    assert least > 4


def test_it_is_said_once_a_document_and_in_the_header(
    session: ChatSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header names the form of the weights."""
    session.reset()
    session.attach(ENGLISH)
    lines = render.header(session, "0", 512).splitlines()
    words = "a toy that knows only a made-up world; your documents need -m NAME"
    assert [line.split(None, 2)[0] for line in lines[:2]] == ["minikv", "model"]
    assert lines[2].strip() == words
    for times in (1, 0):  # the second question brings no document
        run_turn(session, "Who?", Generation(max_tokens=1), Terminal(), Interrupts())
        assert capsys.readouterr().err.count(TOY) == times
    for weights, words in (("auto", "· float32 ·"), ("Q4_1", "· Q4_1 in float32 ·")):
        monkeypatch.setattr(session, "facts", replace(session.facts, weights=weights))
        assert words in render.header(session, "0", 512)


@pytest.mark.parametrize(
    ("columns", "kept"), [(120, " of 512 tokens per head"), (72, " of 512 ·"), (50, "")]
)
def test_the_figures_under_an_answer_fit_on_a_line(
    session: ChatSession, columns: int, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without those that are wanted least, where they do not; a file has them all."""
    session.reset()
    session.configure(EvictionConfig.read("adakv", budget=64))
    session.attach(SAMPLE[:2200])
    list(session.ask("Who?", max_tokens=1))
    report = reported(session)
    grown = replace(report.tokens, seen_total=512, generated=9)
    report = replace(report, tokens=grown, stop_reason="length")
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal, file = screen(), screen()
    terminal.err = Tty()
    note_report(report, terminal)
    note_report(report, file)
    speed, memory = told(terminal).splitlines()
    assert max(len(speed), len(memory)) <= columns
    assert re.match("  9 tokens · .*stopped by", speed)
    assert re.search(f"{kept}.*not checked$", memory)
    assert ("kept" in memory) == bool(kept)
    assert " · first token" in told(file)
    assert " of 512 tokens per head" in told(file)

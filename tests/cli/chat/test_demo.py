"""`minikv demo`: what its text says is what the bundled model does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from forked import Forked

from minikv.cli.chat import demo
from minikv.cli.screen.terminal import Terminal
from minikv.models import BUNDLED


def ran(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """The answers, and everything else."""
    demo.demo(Terminal())
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


def test_a_follow_up_goes_wrong_from_the_kept_cache_and_right_when_read_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "STEPS", demo.STEPS[:3])
    answers, text = ran(capsys)
    assert answers == ["Axel Narolt", "Katya Warolt", "Katya Warulf"]
    assert re.findall(r"^  (Right|Wrong)\.", text, re.M) == ["Right", "Wrong", "Right"]
    # What the text says of /kept: the name that was asked for is kept, the other one is not.
    first, second = text.split("› /kept find ")[1:]
    assert "still there" in first.partition("\n\n")[0]
    assert "whole in 1 of 12 heads" in second.partition("2 of 3")[0]
    assert text.count("\n") > 30
    sample = (BUNDLED / "sample.txt").read_text()
    assert all(step.answer in step.said in sample for step in demo.STEPS)
    text = " ".join(text.split())
    for step in demo.STEPS[:3]:
        assert step.then in text  # it went as expected
        assert step.title in text


@pytest.mark.soak
def test_the_whole_demo_goes_as_its_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    answers, text = ran(capsys)
    assert len(answers) == len(demo.STEPS) == 4
    verdicts = re.findall(r"^  (Right|Wrong)\.", text, re.M)
    assert verdicts == ["Wrong" if step.fails else "Right" for step in demo.STEPS]
    compared = text.split("› /compare streaming")[1]
    said = re.findall(r"^  answer +(.+)$", compared, re.M)
    assert said[0] == said[2] == "Morthorpe"  # global-span and the full cache
    assert said[1] != "Morthorpe"  # streaming
    assert "minikv chat FILE" in text
    assert "is a toy that knows only its own made-up world" in text.splitlines()[-1]


def test_enter_goes_on_and_q_leaves(tmp_path: Path) -> None:
    env = {"TERM": "xterm", "MINIKV_HOME": str(tmp_path)}
    terminal = Forked("demo", env=env, columns=50)
    try:
        terminal.until("Enter: continue, q: leave")
        assert "Axel" not in terminal.seen  # nothing is run before
        terminal.type("\n")
        terminal.until("Right. The document says:", 120)
        terminal.until("Enter: continue, q: leave")
        terminal.type("q\n")
        assert terminal.code() == 0
    finally:
        terminal.close()
    assert "That was the demo" not in terminal.seen
    assert os.listdir(tmp_path) == []  # nothing is saved
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.seen)
    lines = re.split(r"[\r\n]+", shown.partition("1 of 4")[2].partition("[Enter")[0])
    assert max(map(len, lines)) <= 50

"""The model that ships: its files, its training script, and what it still answers under a budget.

The figures with confidence intervals are in docs/measurements; these runs are small enough for
every change, those behind the soak marker for every night. Their bounds, three standard errors
below those figures, leave room for chance.
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

import minikv
from minikv.chat.session import ChatSession
from minikv.models import BUNDLED
from minikv.models.bundled import world
from minikv.models.bundled.exam import fresh

SEED = 555_000_000
SCRIPT = Path(__file__).resolve().parents[2] / "docs/measurements/train.py"


@pytest.fixture(scope="module")
def full() -> ChatSession:
    return minikv.load(policy="full")


def exact(
    chat: ChatSession, tokens: int, chats: int, asked: int, seed: int, *, least: int = 1
) -> list[bool]:
    """Whether each answer was exactly right: of `chats` chats, which ask `asked` questions each
    about a document of `tokens` tokens. least: tokens of the shortest answer asked for."""
    right = []
    for i in range(chats):
        chat.reset()
        doc = fresh(chat.tokenizer, tokens, seed + i)
        chat.attach(doc.text, name="report.txt")
        facts = (f for f in doc.facts if len(chat.tokenizer.encode(f.answer)) >= least)
        doc = world.Document(doc.text, tuple(facts))
        for question, answer in world.questions(random.Random(seed + i), doc, asked):
            right.append("".join(chat.ask(question, max_tokens=16)).strip() == answer)
    return right


def test_size_of_the_files() -> None:
    files = [path for path in BUNDLED.iterdir() if path.suffix != ".py" and path.is_file()]
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in files
    }
    assert sum(path.stat().st_size for path in files) < 12_000_000


def test_sample_document(full: ChatSession) -> None:
    text = (BUNDLED / "sample.txt").read_text()
    assert 6000 <= len(full.tokenizer.encode(text)) <= 8000
    asked = json.loads((BUNDLED / "questions.json").read_text())
    assert len(asked) >= 10
    for item in asked:
        assert item["answer"] in text
        assert 1 <= len(full.tokenizer.encode(item["answer"])) <= 5


@pytest.mark.parametrize(
    ("tokens", "chats", "least"),
    [
        (2000, 3, 0.9),
        (4000, 1, 0.75),
        pytest.param(2000, 12, 0.95, marks=pytest.mark.soak),
        pytest.param(4000, 8, 0.92, marks=pytest.mark.soak),
        pytest.param(7900, 4, 0.85, marks=pytest.mark.soak),
    ],
)
def test_four_questions_about_a_fresh_document(
    full: ChatSession, tokens: int, chats: int, least: float
) -> None:
    right = exact(full, tokens, chats, 4, SEED + tokens)
    assert mean(right) >= least, right


@pytest.mark.parametrize(
    ("tokens", "budget", "count"),
    [
        (1000, 64, 6),
        pytest.param(2000, 128, 6, marks=pytest.mark.soak),
        pytest.param(4000, 256, 24, marks=pytest.mark.soak),
    ],
)
def test_a_budget_of_a_sixteenth_keeps_the_answers(
    full: ChatSession, tokens: int, budget: int, count: int
) -> None:
    """One question with its document: 6.4 % of the tokens, nine tenths of the score.

    Answers of two tokens and more, since the first one is decided before eviction. Recency alone,
    which is blind to the question, must do far worse.
    """
    baseline = mean(exact(full, tokens, count, 1, SEED + 9, least=2))
    assert baseline >= 0.8
    chat = minikv.load(policy="adakv", budget=budget)
    assert mean(exact(chat, tokens, count, 1, SEED + 9, least=2)) >= 0.9 * baseline
    stats = chat.engine.kv.stats()
    assert stats.held_bytes <= 0.07 * stats.full_bytes
    blind = minikv.load(policy="streaming", budget=budget)
    assert mean(exact(blind, tokens, count, 1, SEED + 9, least=2)) <= 0.5 * baseline


def arguments(out: Path, phase: str) -> list[str]:
    """Of the training script, for a few steps."""
    flags = ["--out", str(out), "--phases", phase, "--batch", "512"]
    return [*flags, "--no-compile", "--device", "cpu"]


def test_the_training_makes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in this process. The vocabulary is learned from documents of a tenth the length,
    which takes a tenth of the time."""
    document, questions = world.document, world.questions

    def shorter(rng: random.Random, sentences: int, facts: int) -> world.Document:
        return document(rng, 9, 6) if sentences == 90 else document(rng, sentences, facts)

    def fewer(rng: random.Random, doc: world.Document, count: int) -> Iterator[tuple[str, str]]:
        return questions(rng, doc, 6 if count == 60 else count)

    monkeypatch.setattr(world, "document", shorter)
    monkeypatch.setattr(world, "questions", fewer)
    monkeypatch.setattr(sys, "argv", ["train", *arguments(tmp_path, "64:1e3:1e-3:1e-4")])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    importlib.import_module("train").main()
    answers(tmp_path)


@pytest.mark.soak
def test_the_training_script_makes_the_same_model_twice(tmp_path: Path) -> None:
    """A few steps: the files load, and a second run of the same seed is the same."""
    for run in ("0", "1"):
        given = arguments(tmp_path / run, "64:4e3:1e-3:1e-4")
        subprocess.run(
            [sys.executable, SCRIPT, *given], check=True, capture_output=True, timeout=500
        )
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("0", "1")]
    assert weights[0] == weights[1]
    answers(tmp_path / "0")


def answers(folder: Path) -> None:
    """The model can be loaded, and has an answer."""
    chat = minikv.load(str(folder), policy="full")
    chat.attach("The mayor of Velmora is Tarin Oskvin.")
    assert isinstance("".join(chat.ask("Who is the mayor of Velmora?", max_tokens=4)), str)
    assert chat.report is not None

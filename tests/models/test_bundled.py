"""The model that ships: its files, its training script, and what it still answers under a budget.

The figures with confidence intervals are in docs/measurements; these runs are small enough for
every change, those behind the soak marker for every night. Their bounds, three standard errors
below those figures, leave room for chance.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from pairwise import some_by_day

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


def test_long_answers_to_the_letter(full: ChatSession) -> None:
    """One of each kind about a fresh document, with the chat's own settings of decoding."""
    chat = full
    for number, kind in enumerate(world.LONG):
        chat.reset()
        doc = fresh(chat.tokenizer, 1000, SEED + number, (kind, kind))
        fact = next(f for f in doc.facts if f.kind)
        chat.attach(doc.text, name="report.txt")
        assert "".join(chat.ask(fact.questions[0], max_tokens=96)).strip() == fact.answer, kind


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


def test_files_and_the_sample_document(full: ChatSession) -> None:
    files = [path for path in BUNDLED.iterdir() if path.suffix != ".py" and path.is_file()]
    needed = {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"}
    assert needed <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) < 12_000_000
    text = (BUNDLED / "sample.txt").read_text()
    assert 6000 <= len(full.tokenizer.encode(text)) <= 8000
    asked = json.loads((BUNDLED / "questions.json").read_text())
    assert len(asked) >= 10
    for item in asked:
        assert item["answer"] in text
        assert 1 <= len(full.tokenizer.encode(item["answer"])) <= 5


SHORT = [(2000, 3, 1.0), (4000, 1, 1.0)]
LONG = [(2000, 12, 0.97), (4000, 8, 0.97), (7900, 4, 0.93)]


@pytest.mark.parametrize(
    ("tokens", "chats", "least"), some_by_day([*SHORT, *LONG], SHORT.__contains__)
)
def test_four_questions_about_a_fresh_document(
    full: ChatSession, tokens: int, chats: int, least: float
) -> None:
    right = exact(full, tokens, chats, 4, SEED + tokens)
    assert mean(right) >= least, right


SIXTEENTHS = [(1000, 64, 6), (2000, 128, 6), (4000, 256, 24)]


@pytest.mark.parametrize(
    ("tokens", "budget", "count"), some_by_day(SIXTEENTHS, SIXTEENTHS[:1].__contains__)
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


@pytest.mark.soak
@pytest.mark.parametrize("start", [(), ("--start", str(BUNDLED))])
def test_the_training_makes_a_model(tmp_path: Path, monkeypatch: Any, start: Any) -> None:
    """One step in this process, of a new model or the bundled one, and its exam. The vocabulary is
    learned from documents of a tenth the length, which takes a tenth of the time."""
    document, questions = world.document, world.questions

    def shorter(rng: random.Random, sentences: int, *more: Any) -> world.Document:
        of_vocabulary = (sentences, *more) == (90, 60)
        return document(rng, 9, 6) if of_vocabulary else document(rng, sentences, *more)

    def fewer(rng: random.Random, doc: world.Document, count: int) -> Iterator[tuple[str, str]]:
        return questions(rng, doc, 6 if count == 60 else count)

    monkeypatch.setattr(world, "document", shorter)
    monkeypatch.setattr(world, "questions", fewer)
    flags = "--minutes 0.001 --phases 64:1:1e-5:1e-5 --batch 512 --workers 1 --no-compile --exam 1"
    given = ["train", "--out", str(tmp_path), *flags.split(), "--device", "cpu", *start]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    train = importlib.import_module("train")
    monkeypatch.setattr(train, "LENGTHS", (1000,))
    train.main()
    chat = minikv.load(str(tmp_path), policy="full")
    chat.attach("The mayor of Velmora is Tarin Oskvin.")
    assert isinstance("".join(chat.ask("Who is the mayor of Velmora?", max_tokens=4)), str)
    assert chat.report is not None
    found = json.loads((tmp_path / "exam.json").read_text())
    assert {*found} == {f"{kind} 1000" for kind in ("short", *world.LONG)}
    assert all(sum(right for right, _ in found.values()) > 8 for _ in start), found

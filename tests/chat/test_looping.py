"""Answers that go round in circles: which are told of, what is told, and the penalty that helps."""

from __future__ import annotations

import random
import re
from itertools import count
from typing import Any, Literal

import pytest
import torch
from fakes import FakeEngine
from small_chat import chat
from tiers import MILL, recalling
from transformers import RepetitionPenaltyLogitsProcessor

from minikv.chat.looping import line, loops
from minikv.chat.session import ChatSession
from minikv.cli.wording import worded
from minikv.engine.sampling import WINDOW, Sampling, pick


def ids(text: str) -> list[int]:
    """A token for each word and sign."""
    known: dict[str, int] = {}
    return [known.setdefault(word, len(known)) for word in re.findall(r" ?\w+|\s+|\S", text)]


def prose(words: int, seed: int = 1) -> str:
    made = random.Random(seed)
    return " ".join(made.choice(WORDS) + made.choice(["", "", "", ",", "."]) for _ in range(words))


WORDS = MILL.split() + [a + b for a in "bdfgklmnprst" for b in ("ane", "ill", "oke", "und")]
ONE = "The package is used to check a package. "
TWO = "It is written in a clear way, as it should. "
TABLE = "| Name | Year | Price | Open |\n| --- | --- | --- | --- |\n"
RECORD = '{{"name": "item {0}", "count": {0}, "tags": ["a", "b"]}},\n'


@pytest.mark.parametrize(
    "text",
    [
        "na " * 100,
        "- " * 80,
        ONE * 9,
        prose(200) + ONE * 12,
        (ONE + TWO) * 6,
        prose(40) + (prose(60, 2) + "\n") * 3,  # a long paragraph again and again
        ONE * 20 + prose(15),  # it found its way out, to no purpose
        "".join(f"{ONE * 4}But page {i}. " for i in range(8)),  # with a change now and then
        TABLE + "|  |  |  |  |\n" * 40,
    ],
)
def test_circles_are_seen(text: str) -> None:
    assert loops(ids(text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tobacco",
        "No. " * 10,
        ONE * 3,
        prose(2000),
        (prose(26) + "\n") * 2,  # a short answer, said twice
        "".join(f"| {prose(2, i)} | {1900 + i} | {i} | yes |\n" for i in range(60)),
        TABLE + "".join(f"| Item {i} | {1900 + i} | {3 * i} | yes |\n" for i in range(60)),
        "".join(f"{i}. The name of the person is {prose(3, i)}.\n" for i in range(60)),
        "".join(RECORD.format(i) for i in range(40)),
        "".join(f"- **{prose(1, i)}**: The text says so about {prose(4, i)}\n" for i in range(40)),
        prose(300) + ONE * 2 + prose(100, 2) + ONE,
        ONE * 20 + prose(200),  # it found its way out long ago
    ],
)
def test_lists_tables_and_short_answers_are_none(text: str) -> None:
    assert not loops(ids(text))


@pytest.mark.parametrize(
    ("sampling", "own", "end"),
    [
        (Sampling(), Sampling(0.6), "; --repeat-penalty 1.1 or --temperature auto may help"),
        (Sampling(), Sampling(), "; --repeat-penalty 1.1 or --temperature 0.7 may help"),
        (Sampling(0.5), Sampling(0.6), "; --repeat-penalty 1.1 may help"),
        (Sampling(repeat_penalty=1.1), Sampling(0.6), "; --temperature auto may help"),
        (Sampling(0.5, repeat_penalty=1.2), Sampling(), ""),
    ],
)
def test_only_what_was_not_tried_is_advised(sampling: Sampling, own: Sampling, end: str) -> None:
    told = [worded(text) for text in line([7] * 99, sampling, own)]
    assert told == [f"the answer repeats itself{end}"]
    assert line([*range(99)], sampling, own) == []


def test_a_turn_says_so_once_under_its_answer(talk: Any) -> None:
    session: ChatSession = talk(script=[*b"no, " * 40])
    told: list[str] = []
    list(session.ask("Why?", 20, notice=told.append))
    assert told == []
    list(session.continue_answer(100, notice=told.append))
    list(session.ask("And?", 100, notice=told.append))
    assert [text[:25] for text in told] == ["the answer repeats itself"] * 2
    assert [turn.report.warnings for turn in session.turns] == [(text,) for text in told]


@pytest.fixture
def talk() -> Any:
    from fakes import ByteTokenizer, ChatML

    def made(script: list[int]) -> ChatSession:
        engine, tokenizer = FakeEngine(), ByteTokenizer()
        engine.script, engine.length = script, len(script)
        return ChatSession(engine, tokenizer, ChatML(tokenizer), max_context=4096)  # type: ignore[arg-type]

    return made


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_penalty_of_a_chat_looks_at_prompt_and_answer(temperature: float) -> None:
    """Beside transformers' penalty, whole and in parts; and written again without eviction."""
    how = Sampling(temperature, 20, 0.95, 0.01, 1.7)
    filters: dict[str, Any] = {"top_k": 20, "top_p": 0.95, "min_p": 0.01, "repeat_penalty": 1.7}

    def asked(session: ChatSession, parts: list[int]) -> list[int]:
        session.attach(MILL[:90])
        list(session.ask("Who mills?", parts[0], temperature, **filters))
        for more in parts[1:]:
            list(session.continue_answer(more, temperature, **filters))
        return session._log.tokens

    whole = asked(chat(policy="full"), [90])
    assert asked(chat(policy="full"), [1, 30, 59]) == whole
    other, penalty = chat(policy="full"), RepetitionPenaltyLogitsProcessor(1.7)
    fed = whole[:-90]
    logits = other.engine.prompt(list(fed))
    for position in count(len(fed)):
        if position == len(whole):
            break
        bent = penalty(torch.tensor([fed[-WINDOW:]]), logits[None].clone())[0]
        vocab, ops = other.tokenizer.vocab, other.engine.kv.ops
        bare = Sampling(temperature, 20, 0.95, 0.01)
        fed.append(pick(bent, vocab, bare, 0, position, ops))
        logits = other.engine.step(fed[-1])
    assert fed == whole
    unbent = asked_without(temperature)
    assert unbent != whole
    session = recalling()
    tokens = asked(session, [40])
    list(session.verify())
    assert session.verified is not None
    assert [*session.verified.tokens] == whole[-90:][:40]
    assert tokens[:-40] == whole[:-90]
    assert session.report is not None
    assert session.report.sampling["repeat_penalty"] == how.repeat_penalty


def asked_without(temperature: float) -> list[int]:
    session = chat(policy="full")
    session.attach(MILL[:90])
    list(session.ask("Who mills?", 90, temperature, top_k=20, top_p=0.95, min_p=0.01))
    return session._log.tokens


@pytest.mark.parametrize("first", [0.5, "auto"])
def test_auto_is_the_models_own_sampling_under_what_is_given(
    first: float | Literal["auto"],
) -> None:
    own = Sampling(0.6, 50, 0.9, 0.02)
    session, told = chat(policy="full", own=own), []
    list(session.ask("Who?", 4, first, notice=told.append))
    list(session.ask("Who?", 4, "auto", top_k=3, min_p=0.1, notice=told.append))
    list(session.ask("Who?", 4, "auto", notice=told.append))
    list(session.continue_answer(4, "auto", top_p=0.5, repeat_penalty=1.2, notice=told.append))
    list(session.ask("Who?", 4, notice=told.append))
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    drawn = [tuple(turn.report.sampling[name] for name in names) for turn in session.turns]
    assert drawn[0] == ((0.5, 0, 1.0, 0.0, 1.0) if first != "auto" else (0.6, 50, 0.9, 0.02, 1.0))
    assert drawn[1:] == [
        (0.6, 3, 0.9, 0.1, 1.0),
        (0.6, 50, 0.5, 0.02, 1.2),
        (0.0, 0, 1.0, 0.0, 1.0),
    ]
    assert told == []


def test_auto_says_once_why_it_is_greedy() -> None:
    session, told = chat(policy="full", not_own="the file is empty"), []
    for _ in range(2):
        list(session.ask("Who?", 4, "auto", notice=told.append))
    want = "the file is empty: --temperature auto takes the likeliest token, as 0 does"
    assert [worded(text) for text in told] == [want]
    assert {turn.report.sampling["temperature"] for turn in session.turns} == {0.0}

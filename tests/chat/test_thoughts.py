"""Thoughts are told from the answer however their text is cut into tokens, and what a later turn
reads is what the template writes of the conversation."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import PADDED, ByteStream, ByteTokenizer, FakeTags, ThinkML
from small import SPOKEN, network, over
from small_chat import chat_over, reported, scripted, verified
from test_answer import Texts

from minikv.chat.answer import Answer
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.thoughts import Thoughts
from minikv.engine.engine import Engine
from minikv.errors import ContextError

FENCE = "Use it so:\n```\n<think>\nx\n</think>\n```\n"
# What the model writes, whether the prompt has opened the thoughts, and what of it is what.
WRITTEN = {
    "thoughts": ("<think>\nso or so\n</think>\n\nYes.\n", False, "so or so", "Yes.\n"),
    "opened": ("so\n</think>\n\nYes.", True, "so", "Yes."),
    "space before": ("\n <think>a</think>b", False, "a", "b"),
    "none": ("Yes.", False, "", "Yes."),
    "nearly a tag": ("<thin", False, "", "<thin"),
    "another tag": ("<thinking>a</thinking>", False, "", "<thinking>a</thinking>"),
    "a tag within code": (f"<think>a</think>\n{FENCE}", False, "a", FENCE),
    "a tag in an answer alone": (FENCE, False, "", FENCE),
    "nested": ("<think>a<think>b</think>c</think>d", False, "a<think>b", "c</think>d"),
    "a part of a tag within": ("a </thin </think>b", True, "a </thin", "b"),
    "never closed": ("<think>\na </thin", False, "a </thin", ""),
    "opened, never closed": ("a\n", True, "a", ""),
    "empty": ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    "only opened": ("<think>", False, "", ""),
    "a stop text within": ("<think>a STOP b</think>cSTOPd", False, "a STOP b", "c"),
    "beyond ASCII": ("<think>\u00e9\U0001f600</think>\u00e9", False, "\u00e9\U0001f600", "\u00e9"),
}


def cuttings(text: str, rng: random.Random) -> list[list[str]]:
    """The text in one piece, letter by letter, and cut at random."""
    made = [[text], list(text)]
    for _ in range(12):
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        made.append([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])])
    return made


@pytest.mark.parametrize("case", WRITTEN)
def test_thoughts_are_told_from_the_answer(case: str) -> None:
    text, opened, thoughts, answer = WRITTEN[case]
    for pieces in cuttings(text, random.Random(case)):
        say = Mock()
        made = Answer(Texts(pieces), ["STOP"], Thoughts(FakeTags(), opened, say=say))
        shown = ""
        for token in range(len(pieces)):
            shown += made.push(token)
            if made.stopped:
                break
        shown += made.finish()
        made.reason = "length"
        ended = made.ended(ByteTokenizer(), range(made.generated - made.overshot))
        assert (ended.thoughts.text, shown, ended.text) == (thoughts, answer, answer), pieces
        assert "".join(call.args[0] for call in say.mock_calls).strip() == thoughts
        # Its tokens are those up to the one that completes the closing tag.
        inside = bool(opened or "<think>" in text.lstrip()[:7])
        close = text.find("</think>") + 8 if "</think>" in text else len(text) + 1
        ends = itertools.accumulate(map(len, pieces))
        upto = next((i for i, end in enumerate(ends, 1) if end >= close), len(pieces))
        assert ended.thoughts.tokens == (upto if inside else 0)
        counts = [call.args[1] for call in say.mock_calls]
        assert counts == sorted(counts)
        # An interrupt may have left fewer tokens in the transcript than were taken.
        fewer = made.generated // 2
        codec: Any = SimpleNamespace(stream=lambda pieces=pieces: Texts(pieces))
        left = Thoughts(FakeTags(), opened)
        for token in range(fewer):
            left.push(token, pieces[token])
        cut = made.ended(codec, range(fewer)).thoughts
        assert (cut.text, cut.tokens) == (left.text, left.tokens)


def test_a_control_token_without_text_is_a_tag() -> None:
    tags = FakeTags(begin="[THINK]", end="[/THINK]", unseen={300: "[THINK]", 301: "[/THINK]"})
    made = Answer(ByteStream(), (), Thoughts(tags, opened=False))
    text = "".join(map(made.push, [300, *b"so", 301, *b"Yes"])) + made.finish()
    assert (made.thoughts.text, made.thoughts.tokens, text) == ("so", 4, "Yes")


# -- in a chat -----------------------------------------------------------------------------------


@pytest.mark.parametrize("opens", [False, True])
def test_an_answer_and_its_thoughts_are_counted_apart(opens: bool) -> None:
    said: list[str] = []
    begin = "" if opens else "<think>\n"
    chat = scripted(f"{begin}so\n</think>\n\nYes.", opens=opens)
    pieces = chat.ask("a?", thinking=lambda piece, tokens: said.append(piece))
    assert "".join(pieces) == "Yes."
    turn, tokens = chat.turns[0], reported(chat).tokens
    assert (turn.answer, turn.thoughts, "".join(said)) == ("Yes.", "so", "so\n")
    assert (tokens.generated, tokens.thoughts) == (len(begin) + 17, len(begin) + 11)
    assert reported(chat).lines()[0].startswith(f"6 tokens after {tokens.thoughts} of thought")
    assert 0 < reported(chat).time_s.thoughts < reported(chat).time_s.decode
    assert chat.messages[-1].content == "Yes."


@pytest.mark.parametrize(
    ("most", "max_tokens", "reason", "answer"),
    [(0, 12, "length", ""), (9, 12, "length", ""), (9, 30, "eos", "so much"), (1, 30, "eos", "")],
)
def test_thoughts_that_do_not_end(most: int, max_tokens: int, reason: str, answer: str) -> None:
    """The script continues where it is when the closing tag is fed, which takes 11 tokens."""
    chat = scripted("think on and on.....so much", opens=True)
    told: list[str] = []
    found = "".join(chat.ask("a?", max_tokens, max_thoughts=most, notice=told.append))
    lines = [line for line in told if line.startswith("the model was still thinking")]
    assert (reported(chat).stop_reason, len(lines)) == (reason, int(reason == "length"))
    assert answer in found
    if reason == "length":  # the answer continues as if it had had more tokens at once
        assert (found, reported(chat).tokens.thoughts) == ("", max_tokens)
        more = "".join(chat.continue_answer(60, max_thoughts=most))
        twin = scripted("think on and on.....so much", opens=True)
        assert more == "".join(twin.ask("a?", 60, max_thoughts=most))
        assert chat.turns[0].thoughts == twin.turns[0].thoughts
    else:
        assert reported(chat).tokens.thoughts == most + 9  # with the closing tag
        assert bytes(id for id in chat.fed if id < 256).count(b"\n</think>\n\n") == 1


@pytest.mark.parametrize("least", [0, 5, 9])
@pytest.mark.parametrize("written", [*range(8, 24)])
def test_an_answer_that_goes_on_ends_thoughts_that_are_too_long(least: int, written: int) -> None:
    """Wherever it was stopped, also in the closing tag; `least`: the limit until then."""
    text = "think on and on. " * 6
    chat, count = scripted(text, opens=True), least if 0 < least <= written else written
    answer = "".join(chat.ask("a?", written, max_thoughts=least))
    answer += "".join(chat.continue_answer(60, max_thoughts=5))
    twin = scripted(text, opens=True)
    assert answer == "".join(twin.ask("a?", written + 60, max_thoughts=count))
    assert (answer, text[:count].strip()) == (chat.turns[0].answer, chat.turns[0].thoughts)
    assert bytes(id for id in chat.fed if id < 256).count(b"</think>") == 1


def test_a_stopped_thought_can_be_continued_after_a_refused_question() -> None:
    chat, twin = (thinker() for _ in range(2))
    for one in (chat, twin):
        list(one.ask("who?", 10, 0.7))
    with pytest.raises(ContextError):
        list(chat.ask("long " * 500))
    more = ["".join(one.continue_answer(30, 0.7, max_thoughts=12)) for one in (chat, twin)]
    assert more[0] == more[1] == chat.turns[0].answer != ""


def test_an_opening_tag_longer_than_the_limit_is_written_whole() -> None:
    chat = scripted("<think>on and on and on, yes")
    assert "".join(chat.ask("a?", max_thoughts=2)).endswith(", yes")
    assert b"<think>\n</think>\n\n" in bytes(id for id in chat.fed if id < 256)


def test_stopped_within_thoughts() -> None:
    chat, told = scripted("so and so", opens=True), list[str]()
    pieces = chat.ask("a?", notice=told.append, thinking=lambda piece, n: n == 3 and chat.cancel())
    assert "".join(pieces) == ""
    assert (chat.turns[0].thoughts, reported(chat).stop_reason, told) == ("so", "user", [])


def thinker(
    policy: str = "full", budget: int = 48, window: int | None = None, **given: Any
) -> ChatSession:
    """A chat over a small random network that thinks until the closing tag is fed."""
    net = network(64, 3, windows=(window,) * 2, max_context=2048, vocab=PADDED, **SPOKEN)
    eviction = EvictionConfig.read(policy, budget=budget)
    tokenizer, forgets = ByteTokenizer(), given.pop("forgets", True)
    tokenizer.stop_ids = frozenset()
    engine = Engine(net, over(net, eviction.rules()))
    template = ThinkML(tokenizer, forgets=forgets)
    made = chat_over(engine, tokenizer, template, max_context=2048, eviction=eviction, **given)
    made.attach("There once was a mill beside a river. " * 4)
    return made


def asked(chat: ChatSession, question: str) -> list[int]:
    """Ask; return what had been read when the answer began."""
    list(chat.ask(question, 40, 0.7, max_thoughts=12))
    tokens = reported(chat).tokens
    return chat.fed[: tokens.prompt_reused + tokens.prompt_new]


CHATS: dict[str, dict[str, Any]] = {
    "nothing evicted": {},
    "window": {"window": 40},
    "evicted once": {"policy": "adakv", "reuse": "once"},
    "evicted in steps": {"policy": "h2o", "reuse": "once"},
    "read again": {"policy": "adakv", "reuse": "refresh"},
    "recalled": {"policy": "adakv", "reuse": "recall"},
    "second pass": {"policy": "kvzip", "reuse": "blind"},
}


@pytest.mark.parametrize("case", CHATS)
def test_a_turn_reads_what_the_template_writes(case: str) -> None:
    chat = thinker(**CHATS[case])
    chat.recall.kind = "ram" if case == "recalled" else "none"
    for number in range(3):
        read = asked(chat, f"{number}, who?")
        assert read == chat.template.opening(chat.messages[:-1]), number
        assert chat.turns[-1].thoughts
        kept = [chat.kept(layer, head) for layer in range(2) for head in range(2)]
        assert all(int(some.min()) >= 0 and int(some.max()) < len(chat.fed) for some in kept)
    first, fed = chat.turns[-1], list(chat.fed)
    chat.undo()
    asked(chat, first.question)
    again = chat.turns[-1]
    if case not in ("evicted once", "evicted in steps", "second pass"):  # the cache is another
        assert (again.thoughts, again.answer, chat.fed) == (first.thoughts, first.answer, fed)
    if case == "recalled":
        assert verified(chat).tokens
        assert reported(chat).tokens.prompt_reused > 150
    chat.undo(2)
    assert asked(chat, "1, who?") == chat.template.opening(chat.messages[:-1])


@pytest.mark.parametrize("window", [None, 40])
def test_the_cache_is_that_of_a_chat_that_never_thought(window: int | None) -> None:
    """Cut back, the cache answers as one that reads the conversation as the template writes it. If
    rows have slid out of a window, all is read again."""
    cut, read = thinker(window=window), thinker(window=window, reuse="refresh")
    for question in ("who?", "and when?", "why?"):
        assert asked(cut, question) == asked(read, question)
        assert cut.turns[-1].thoughts == read.turns[-1].thoughts
        assert cut.turns[-1].answer == read.turns[-1].answer
    assert reported(read).reuse == "refresh"
    assert reported(cut).reuse == ("once" if window is None else "refresh")
    assert (reported(cut).tokens.prompt_new < 60) == (window is None)


def test_a_template_that_keeps_thoughts_keeps_the_cache() -> None:
    chat = thinker(forgets=False)
    asked(chat, "who?")
    before = list(chat.fed)
    asked(chat, "when?")
    assert chat.fed[: len(before)] == before

"""An answer: its text, its ends, whether it repeats itself, and the penalty against that."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

import pytest
import torch
from fakes import ByteStream, FakeEngine
from hypothesis import example, given
from hypothesis import strategies as st
from small_chat import chat, reported, verified
from test_session import check, make
from tiers import MILL, recalling
from transformers import RepetitionPenaltyLogitsProcessor

from minikv.chat.answer import Answer, loops
from minikv.chat.answer import looping as line
from minikv.chat.session import ChatSession
from minikv.checks import stop_texts
from minikv.cli.settings.config import worded
from minikv.engine.sampling import WINDOW, Sampling, pick
from minikv.errors import NumericsError, UsageError

TEXT = "für\n\nalle Q"
IDS = list(TEXT.encode())


@pytest.mark.parametrize("stop", [(), ("\n\n#",), ("\n\nalle",), ("ü",), ("le Q",)])
def test_an_answer_that_goes_on_is_the_one_that_never_stopped(stop: tuple[str, ...]) -> None:
    """At every token, also inside of a character and of a stop text."""

    def run(answer: Answer, ids: list[int]) -> str:
        out = ""
        for id in ids:
            out += answer.push(id)
            if answer.stopped:
                break
        return out + answer.finish()

    whole = Answer(ByteStream(), stop)
    run(whole, IDS)
    for at in range(1, len(IDS)):
        first = Answer(ByteStream(), stop)
        shown = run(first, IDS[:at])
        assert first.text == shown
        if first.stopped:
            continue
        second = Answer.resumed(ByteStream(), stop, IDS[:at], shown)
        more = run(second, IDS[at:])
        assert second.text == whole.text
        assert second.stopped == whole.stopped
        assert second.generated == whole.generated
        # On the screen it reads on, but for a character or a stop text that was shown in part.
        if whole.text.startswith(shown):
            assert shown + more == whole.text


def test_what_is_shown_already_is_not_shown_again() -> None:
    answer = Answer.resumed(ByteStream(), ("\nQ",), b"ab\n", "ab\n")
    assert answer.text == "ab"
    assert answer.push(b"c"[0]) == "c"
    assert answer.text == "ab\nc"


def test_nan_in_an_answer_stops_it_and_keeps_what_was_written() -> None:
    engine = FakeEngine()
    chat = make(engine=engine)
    engine.nan_at = len("q") + 4 + 3
    pieces: list[str] = []
    with pytest.raises(NumericsError):
        pieces.extend(chat.ask("q"))
    assert len(pieces) == 3
    assert reported(chat).stop_reason == "error"
    assert chat.messages[-1].content == "".join(pieces)
    engine.nan_at = None
    check(chat)
    list(chat.ask("next"))
    check(chat)


def test_a_character_over_several_tokens_arrives_whole() -> None:
    engine = FakeEngine(length=5)
    engine.script = [*"aé".encode(), 0xE2, 0x82]
    chat = make(engine=engine)
    pieces = list(chat.ask("q"))
    assert pieces == ["a", "é", "\ufffd"]  # the unfinished one is flushed at the end
    assert chat.messages[-1].content == "aé\ufffd"


def test_a_token_whose_text_cannot_be_had_is_not_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = make()

    class Broken(ByteStream):
        def push(self, token: int) -> str:
            if len(chat.fed) > 12:
                raise RuntimeError("no text")
            return super().push(token)

    monkeypatch.setattr(chat.tokenizer, "stream", Broken)
    with pytest.raises(RuntimeError, match="no text"):
        list(chat.ask("q"))
    report = reported(chat)
    assert report.tokens.generated > 0
    assert chat.pending_token is None
    assert len(chat.tokenizer.encode(chat.turns[0].answer)) == report.tokens.generated
    check(chat)


@dataclass
class Texts:
    """A stream whose token n has the n-th text."""

    texts: Sequence[str]

    def push(self, token: int) -> str:
        return self.texts[token]

    def flush(self) -> str:
        return ""


def cut(texts: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    found, out = Answer(Texts(pieces), texts), ""
    for token in range(len(pieces)):
        out += found.push(token)
        if found.stopped:
            return out, True
    return out + found.finish(), False


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab\n", max_size=5), max_size=8),
)
@example(["abc", "b"], ["abc"])
@example(["aab"], ["a", "aa", "b"])
def test_the_cut_does_not_depend_on_how_the_text_comes(stops: list[str], pieces: list[str]) -> None:
    texts, whole = tuple(stops), "".join(pieces)
    # By its meaning: the shortest beginning that ends with a stop text, without the longest such.
    ends = [n for n in range(1, len(whole) + 1) if whole[:n].endswith(texts)] if texts else []
    expected = whole
    if ends:
        start = whole[: ends[0]]
        expected = start[: -max(len(t) for t in texts if start.endswith(t))]
    assert cut(texts, pieces) == (expected, bool(ends))
    assert cut(texts, list(whole)) == (expected, bool(ends))


def test_nothing_that_may_become_a_stop_text_is_given_out() -> None:
    found = Answer(Texts(("yes\n", "\n", "R", "\n\nQ", ":x")), ("\n\nQ:",))
    assert [found.push(token) for token in range(5)] == ["yes", "", "\n\nR", "", ""]
    assert found.stopped


@pytest.mark.parametrize("given", [5, 0, True, b"x", [b"x"], [None], object(), 1.5, "", ["a", ""]])
def test_what_is_no_stop_text_is_refused(given: Any) -> None:
    for use in (partial(make().ask, "tell me"), make().continue_answer):
        with pytest.raises(UsageError, match=r"`stop`|empty"):
            use(stop=given)


def test_one_text_may_stand_alone_and_none_is_no_text() -> None:
    assert stop_texts("ab") == ("ab",)
    assert stop_texts(["x", "y", "x"]) == ("x", "y")
    assert list(make().ask("tell me", stop=None)) == list(make().ask("tell me"))


def test_an_answer_ends_before_a_stop_text_over_several_tokens() -> None:
    whole = "".join(make().ask("tell me"))
    assert len(whole) == 12  # one character per token
    chat = make()
    pieces = list(chat.ask("tell me", stop=[whole[4:7], "no such text"]))
    assert "".join(pieces) == whole[:4]
    assert reported(chat).stop_reason == "stop"
    assert reported(chat).sampling["stop"] == [whole[4:7], "no such text"]
    assert reported(chat).tokens.generated == 7
    assert chat.messages[-1].content == chat.turns[-1].answer == whole[:4]
    # The last token of the stop text was not fed, and is not fed later.
    assert chat.pending_token is None
    following = chat.template.following([*chat.messages, type(chat.messages[0])("user", "and?")])
    before = list(chat.fed)
    list(chat.ask("and?"))
    assert chat.fed[: len(before) + len(following)] == before + following


def test_text_that_a_stop_text_could_have_begun_with_is_not_lost() -> None:
    whole = "".join(make().ask("tell me"))
    for end in (whole[-1] + "#", whole[4] + "#"):
        assert "".join(make().ask("tell me", stop=end)) == whole
    assert "".join(make().ask("tell me", max_tokens=5, stop=[whole[4] + "#"])) == whole[:5]
    # Held back, then not a stop text; and not yet known to be none.
    for end, pieces in ((3, [whole[0], whole[1:4]]), (5, [whole[0]])):
        chat = make()
        answer = chat.ask("tell me", stop=[whole[1:end] + "#"])
        assert [next(answer) for _ in pieces] == pieces
        answer.close()  # type: ignore[attr-defined]
        assert chat.messages[-1].content == "".join(pieces)


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


CIRCLES = [
    "na " * 100,
    "- " * 80,
    ONE * 9,
    prose(200) + ONE * 12,
    (ONE + TWO) * 6,
    prose(40) + (prose(60, 2) + "\n") * 3,  # a long paragraph again and again
    ONE * 20 + prose(15),  # it found its way out, to no purpose
    "".join(f"{ONE * 4}But page {i}. " for i in range(8)),  # with a change now and then
    TABLE + "|  |  |  |  |\n" * 40,
]
OTHERS = [
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
]


@pytest.mark.parametrize(
    ("text", "circles"), [*((text, True) for text in CIRCLES), *((text, False) for text in OTHERS)]
)
def test_circles_are_seen_and_lists_tables_and_short_answers_are_none(
    text: str, circles: bool
) -> None:
    assert loops(ids(text)) == circles


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


def test_a_turn_says_so_once_under_its_answer() -> None:
    engine = FakeEngine(length=160)
    engine.script = [*b"no, " * 40]
    session, told = make(engine=engine), list[str]()
    list(session.ask("Why?", 20, notice=told.append))
    assert told == []
    list(session.continue_answer(100, notice=told.append))
    list(session.ask("And?", 100, notice=told.append))
    assert [text[:25] for text in told] == ["the answer repeats itself"] * 2
    assert [turn.report.warnings for turn in session.turns] == [(text,) for text in told]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_penalty_of_a_chat_looks_at_prompt_and_answer(temperature: float) -> None:
    """Beside transformers' penalty, whole and in parts; and written again without eviction."""
    bare, filters = Sampling(temperature, 20, 0.95, 0.01), {"top_k": 20, "top_p": 0.95}

    def asked(session: ChatSession, parts: list[int], penalty: float = 1.7) -> list[int]:
        given: Any = {**filters, "min_p": 0.01, "repeat_penalty": penalty}
        session.attach(MILL[:90])
        list(session.ask("Who mills?", parts[0], temperature, **given))
        for more in parts[1:]:
            list(session.continue_answer(more, temperature, **given))
        return session.log.ids

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
        fed.append(pick(bent, vocab, bare, 0, position, ops))
        logits = other.engine.step(fed[-1])
    assert fed == whole
    assert asked(chat(policy="full"), [90], 1.0) != whole
    session = recalling()
    tokens = asked(session, [40])
    assert [*verified(session).tokens] == whole[-90:][:40]
    assert tokens[:-40] == whole[:-90]
    assert reported(session).sampling["repeat_penalty"] == 1.7


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
    session, told = chat(policy="full", own="the file is empty"), []
    for _ in range(2):
        list(session.ask("Who?", 4, "auto", notice=told.append))
    want = "the file is empty: --temperature auto takes the likeliest token, as 0 does"
    assert [worded(text) for text in told] == [want]
    assert {turn.report.sampling["temperature"] for turn in session.turns} == {0.0}


@pytest.mark.parametrize(("stop", "tokens"), [("ll", b"all"), ("l", b"al")])
def test_the_last_token_is_no_part_of_the_answer_if_a_stop_text_begins_with_it_or_before(
    stop: str, tokens: bytes
) -> None:
    answer = Answer(ByteStream(), (stop,))
    assert "".join(map(answer.push, tokens)) == "a"
    assert answer.stopped
    assert answer.overshot

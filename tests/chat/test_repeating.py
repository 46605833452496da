"""A chat under a policy that reads everything twice: one cache answers all questions, and what
that costs is said before it is paid."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import ByteTokenizer, ChatML
from small_chat import chat, held_of, say

import minikv
from minikv.chat import repeating
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.cli.interrupt import Interrupts
from minikv.cli.terminal import Terminal
from minikv.cli.turn import run_turn
from minikv.errors import Interrupted, MemoryShortError, UsageError
from minikv.settings import Generation

MILL = "A mill stands by the river and grinds. " * 8
WELL = "A well is deep and cold and dry. " * 6


def fed(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes through the network from here on, text by text; steps are left out."""
    seen: list[str] = []
    network: Any = session.engine.network
    forward = network.forward

    def heard(ids: Any, kv: Any) -> Any:
        if len(ids) > 1:
            seen.append(bytes(i for i in ids.tolist() if i < 128).decode())
        return forward(ids, kv)

    monkeypatch.setattr(network, "forward", heard)
    return seen


def document(session: ChatSession) -> list[set[int]]:
    """Positions of the document that each head holds."""
    end = len(session.start()) + len(MILL)
    return [{p for p in head if p < end} for head in held_of(session)]


def test_the_request_is_made_of_the_template() -> None:
    """The sentences of the release, and what ends a question and begins an answer."""
    tokenizer = ByteTokenizer()
    template = ChatML(tokenizer)
    made = repeating.wording(tokenizer, template)
    assert bytes(made.first) == b"\n\nRepeat the previous context exactly."
    assert bytes(made.later).endswith(b"exactly, starting with ")
    whole = template.opening([minikv.chat.transcript.Message("user", "Who?")])
    assert tuple(whole[-len(made.answer) :]) == made.answer
    assert len(made.answer) > 0
    assert bytes(i for i in whole[: -len(made.answer)] if i < 256).endswith(b"Who?")


def test_one_cache_answers_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document is read and repeated once; later questions are read alone, and nothing of the
    document leaves for them but for what the first ones need."""
    session = chat("kvzip", 60, reuse="auto")
    seen, told = fed(session, monkeypatch), []
    session.attach(MILL)
    list(session.ask("Who?", 4, notice=told.append))
    assert len(seen) == 3
    assert seen[0].endswith(MILL + "\n\n")
    assert "Repeat the previous context exactly." in seen[1]
    assert seen[1].endswith(MILL[2:] + "\n\n")  # the first rows always stay
    assert seen[2].startswith("Who?")
    assert [line for line in told if "one cache serves all questions" in line]
    first = document(session)
    assert sum(map(len, first)) > 4 * 30
    for question in ("Why?", "How?", "When?", "And?", "Who?", "Why?"):
        say(session, question, 4)
    assert len(seen) == 3 + 6
    later = document(session)
    assert all(a <= b for a, b in zip(later, first, strict=True))
    say(session, "How?", 4)
    assert document(session) == later  # no more than a quarter of the budget, ever
    assert [r.reuse for r in session.reports] == ["blind", *["once"] * 7]
    assert {r.shaped_by_turn for r in session.reports} == {None}
    assert all(r.tokens.kept_mean <= 60 + 8 for r in session.reports)


def test_the_same_as_blind_by_name() -> None:
    auto, named = chat("kvzip", 60, reuse="auto"), chat("kvzip", 60, reuse="blind")
    for session in (auto, named):
        session.attach(MILL)
        say(session, "Who?")
        session.attach(WELL)
        say(session, "Why?")
    assert held_of(auto) == held_of(named)
    assert auto.messages == named.messages


def test_a_later_document_is_scored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    session = chat("kvzip", 60, reuse="auto")
    session.attach(MILL)
    say(session, "Who?", 4)
    seen = fed(session, monkeypatch)
    session.attach(WELL)
    say(session, "Why?", 4)
    assert len(seen) == 3
    assert seen[1].endswith(WELL + "\n\n")
    assert all(document(session))


def test_a_short_document_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    session = chat("kvzip", 1000, reuse="auto")
    seen, told = fed(session, monkeypatch), []
    session.attach(MILL)
    list(session.ask("Who?", 4, notice=told.append))
    assert not [text for text in seen if "Repeat" in text]
    assert len(told) == 1
    assert "nothing was evicted" in told[0]


def test_the_cost_is_told_before_it_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    session = chat("kvzip", 60, reuse="blind")
    seen, told = fed(session, monkeypatch), []

    def notice(line: str) -> None:
        told.append((line, len(seen)))

    session.attach(MILL)
    list(session.ask("Who?", 4, notice=notice))
    (line, before), *_ = [one for one in told if one[0].startswith("kvzip scores")]
    assert before == 0
    first = len(session.start()) + len(MILL) - 4  # but for those that always stay
    words = repeating.wording(session.tokenizer, session.template)
    more = first + len(words.first) + len(words.answer)
    assert f"it reads {more + 2:,} tokens more to score {first + 6:,} (2.1 times the tok" in line
    assert "with 79.0 KiB of RAM until then" in line


def test_no_memory_is_said_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    session = chat("kvzip", 60, reuse="auto")
    session.recall = Recall(session.engine.kv, "none", "same", lambda: 1000)
    seen = fed(session, monkeypatch)
    session.attach(MILL)
    with pytest.raises(MemoryShortError, match="of RAM, and 1,000 B are free") as error:
        list(session.ask("Who?"))
    assert error.value.exit_code == 4
    assert seen == []
    assert session.fed == []
    assert session.pending


def test_recall_is_refused_by_name() -> None:
    session = chat("kvzip", 60, reuse="recall")
    session.attach(MILL)
    with pytest.raises(UsageError, match="kvzip reads everything twice"):
        list(session.ask("Who?"))


def test_progress_grows_to_the_end_and_an_interrupt_leaves_the_chat() -> None:
    session = chat("kvzip", 60, reuse="auto")
    session.attach(MILL)
    steps: list[tuple[int, int, bool]] = []

    def progress(done: int, total: int) -> None:
        steps.append((done, total, session.scoring))

    list(session.ask("Who?", 4, progress=progress))
    done, totals, scoring = zip(*steps, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert done[-1] == totals[-1]
    assert set(scoring) == {False, True}
    assert not scoring[0]

    session = chat("kvzip", 60, reuse="auto")
    session.attach(MILL)

    def stop(done: int, total: int) -> None:
        if session.scoring:
            session.cancel()

    with pytest.raises(Interrupted):
        list(session.ask("Who?", 4, progress=stop))
    assert session.fed == []
    say(session, "Who?", 4)
    fresh = chat("kvzip", 60, reuse="auto")
    fresh.attach(MILL)
    say(fresh, "Who?", 4)
    assert held_of(session) == held_of(fresh)


def test_the_bar_says_that_it_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    session = chat("kvzip", 60, reuse="auto")
    session.attach(MILL)
    labels: list[str] = []

    def shown(self: Any, done: int, total: int) -> None:
        labels.append(self.label)

    monkeypatch.setattr("minikv.cli.turn.Live.__call__", shown)
    run_turn(session, "Who?", Generation(max_tokens=4), Terminal(), Interrupts(), show=False)
    assert list(dict.fromkeys(labels)) == ["reading", "scoring what was read"]


def test_a_saved_cache_keeps_its_scores() -> None:
    """The scores are a column of the cache: what is restored goes on as before."""
    session, other = chat("kvzip", 60, reuse="auto"), chat("kvzip", 60, reuse="auto")
    session.attach(MILL)
    say(session, "Who?", 4)
    other.restore(session.snapshot())
    for one in (session, other):
        say(one, "Why is that so, and since when?", 4)
    assert held_of(session) == held_of(other)
    assert session.messages == other.messages

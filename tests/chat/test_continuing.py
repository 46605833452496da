"""A full context: questions are refused, or the oldest turns leave. Then every answer is that of a
chat that never had them, which reads what is left anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from small_chat import chat, held_of, reported, say
from tiers import MILL, RIVER

from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.chat.snapshot import ChatSnapshot, Conversation
from minikv.chat.store import Store
from minikv.chat.transcript import system_messages
from minikv.errors import ContextError, Interrupted, UsageError

CONTEXT = 1040
CASES: dict[str, dict[str, Any]] = {
    "nothing evicted": {"policy": "full", "known": True},
    "in steps": {"policy": "h2o"},
    "recalled": {"tier": "file", "known": True},
    "from the store": {"tier": "none", "store": True, "known": True},
    "read again": {},
    "once": {"policy": "streaming", "reuse": "once"},
    "second pass": {"policy": "kvzip"},
    "window": {"policy": "full", "window": 64},
}


def talk(folder: Path, **given: Any) -> ChatSession:
    """A chat about the mill, which has a system prompt, in a context of `CONTEXT` tokens."""
    tier, store = given.pop("tier", "none"), given.pop("store", False)
    given.pop("known", None)
    made = chat(**{"reuse": "auto", "overflow": "drop", "system": "Be brief."} | given)
    made.max_context = CONTEXT
    made.recall = Recall(made.engine.kv, tier)
    if store:
        made.recall.store = Store(folder, 1 << 30, {}, least=100)
    made.attach(MILL, "mill.txt")
    return made


def anew(session: ChatSession, folder: Path, left: int, question: str, **given: Any) -> ChatSession:
    """Another chat with the last `left` turns of this one, which asks the question."""
    turns = session.turns[len(session.turns) - left :]
    documents = [document for turn in session.turns for document in turn.documents]
    if turns:
        turns[0] = replace(turns[0], documents=tuple(documents[: len(documents)]))
    waits = [] if turns else documents
    said = Conversation(opened_with=system_messages("Be brief."), turns=turns, pending=waits)
    held = ChatSnapshot(None, session.eviction, session.seed, said)
    given.pop("store", None)
    other = talk(folder, **given)
    other.restore(held)
    say(other, question)
    return other


@pytest.mark.parametrize("case", CASES)
def test_after_turns_left_answers_are_those_of_a_chat_without_them(
    case: str, tmp_path: Path
) -> None:
    given = CASES[case]
    session = talk(tmp_path, **given)
    left, question, warned = 0, "", 0
    for number in range(40):
        question = f"{number}, what of the mill and of the river? {'so ' * (number % 7)}"
        before, left = session.snapshot(), len(session.turns)
        say(session, question)
        warned += any("are left for this conversation" in w for w in reported(session).warnings)
        if reported(session).dropped:
            break
    report = reported(session)
    assert (report.dropped, warned) == (left - left // 2, 1)
    assert f"the {report.dropped} oldest turns left" in report.warnings[-1]
    assert [d.name for d in session.turns[0].documents] == ["mill.txt"]
    assert report.tokens.seen_total < CONTEXT
    assert (report.tokens.prompt_reused > len(MILL)) == given.get("known", False)
    twin = talk(tmp_path / "twin", **given)
    twin.restore(before)
    other = anew(twin, tmp_path, left // 2, question, **given)
    for later in ("And then?", "Since when?"):
        assert session.turns[-1].answer == other.turns[-1].answer
        assert held_of(session) == held_of(other)
        assert session.fed == other.fed
        say(session, later)
        say(other, later)


def test_documents_stay_and_a_question_may_be_alone_with_them(tmp_path: Path) -> None:
    session = talk(tmp_path)
    say(session, "Who? " * 20)
    say(session, "Why? " * 20)
    session.attach(RIVER, "river.txt")
    say(session, "long " * 70)
    assert reported(session).dropped == 2
    (turn,) = session.turns
    assert [document.name for document in turn.documents] == ["mill.txt", "river.txt"]
    before, fed = list(session.turns), list(session.fed)
    for stop in (None, lambda done, total: session.cancel()):  # refused, and stopped
        text = "long " * (300 if stop is None else 60)
        with pytest.raises(ContextError if stop is None else Interrupted):
            list(session.ask(text, progress=stop))
        assert (session.turns, session.pending) == (before, [])
    assert say(session, "Who?")
    assert fed[:300] == session.fed[:300]


def test_a_full_context_is_refused_unless_turns_may_leave(tmp_path: Path) -> None:
    session = talk(tmp_path, overflow="refuse")
    say(session, "Who? " * 20)
    fed = list(session.fed)
    found = refused("", lambda: list(session.ask("long " * 140)), error=ContextError)
    assert 'chat.overflow = "drop"' in found.hint
    assert (len(session.turns), session.fed) == (1, fed)
    session.overflow = "drop"
    assert say(session, "long " * 120)
    assert reported(session).dropped == 1
    with pytest.raises(UsageError, match="overflow must be one of refuse, drop"):
        session.overflow = "shift"

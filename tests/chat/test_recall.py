"""A chat with a tier: every question is answered as the first was, whatever happened in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import failing, refused
from small_chat import chat, held_of, reported, say, talked
from tiers import MILL, RIVER, recalling

import minikv
from minikv.cache.tier_rows import TierError
from minikv.chat.recall import Place, Recall, somewhere
from minikv.chat.report import size
from minikv.chat.session import ChatSession
from minikv.cli.screen import render
from minikv.errors import ContextError, UsageError

ROW = 2 * 2 * 2 * 8 * 4
"""Bytes of a token: keys and values of 2 layers of 2 heads, 8 numbers in float32."""


def modes(session: ChatSession) -> list[str]:
    return [report.reuse for report in session.reports]


def test_recall_answers_as_reading_all_of_it_anew_does(monkeypatch: pytest.MonkeyPatch) -> None:
    session = recalling()
    engine, prompts = session.engine, []
    recall = engine.recall

    def recorded(ids: list[int], *how: Any) -> torch.Tensor:
        logits = recall(ids, *how)
        prompts.append((list(ids), len(ids) - how[-1], logits, held_of(session)))
        return logits

    monkeypatch.setattr(engine, "recall", recorded)
    session.attach(MILL)
    for i, question in enumerate(("Who?", "Why?", "And the river?", "Who?")):
        if i == 2:
            session.attach(RIVER, "river.txt")
        say(session, question)
    assert len(prompts) == 4
    for ids, asked, logits, held in prompts:
        anew = chat()
        want = anew.engine.prompt(ids, turn_tokens=asked)
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
        assert held_of(anew) == held
    assert modes(session) == ["once", "recall", "recall", "recall"]
    assert all(report.misses == 0 for report in session.reports)
    assert {report.loss.method for report in session.reports} == {"window"}
    for report, before in zip(session.reports[1:], session.reports, strict=False):
        tokens = report.tokens
        assert tokens.prompt_reused == before.tokens.prompt_reused + before.tokens.prompt_new
        read = tokens.prompt_reused + tokens.prompt_new + tokens.generated
        assert read - tokens.seen_total in (0, 1)  # the last token is not fed


def test_progress_of_a_recalled_question_never_passes_its_total() -> None:
    session, seen = recalling(), list[tuple[int, int]]()
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        list(session.ask(question, progress=lambda done, total: seen.append((done, total))))
        assert seen[-1] == (reported(session).tokens.prompt_new,) * 2
    session.undo()  # the tier has all of the question: no token of it is new
    seen.clear()
    list(session.ask("Why?", progress=lambda done, total: seen.append((done, total))))
    assert reported(session).tokens.prompt_new == 0
    assert not seen


def test_turns_taken_back_are_found_in_the_tier() -> None:
    """Until the chat is reset, or closed, which gives the memory back."""
    session = talked(recalling(), MILL, "Who?", "Why?")
    session.undo(2)
    say(session, "Since when?")
    assert modes(session) == ["recall"]
    assert session.reports[0].tokens.prompt_reused > len(MILL)
    assert session.recall.nbytes > 0
    session.reset()
    assert (session.recall.nbytes, session.recall.tokens, session.recall.place) == (0, 0, "")
    session.attach(RIVER)
    fresh = talked(recalling(), RIVER)
    assert say(session, "Who?") == say(fresh, "Who?")
    kv = session.engine.kv
    assert kv.tier is not None
    session.close()
    assert kv.tier is None


def test_after_a_chat_was_taken_up_everything_is_read_once_more() -> None:
    session = talked(recalling(), MILL, "Who?")
    snapshot = session.snapshot()
    other = recalling()
    other.restore(snapshot)
    assert other.reads_again == len(other.fed)
    want = say(session, "Why?")[0]
    assert say(other, "Why?")[0] == want
    assert modes(other) == ["once", "refresh"]
    say(other, "And?")
    assert modes(other)[2] == "recall"


def test_a_tier_that_was_asked_for_and_does_not_fit_is_refused_before_reading() -> None:
    session = talked(recalling("ram", free=1000), MILL)
    refused(r"tier=.ram.. does not fit", lambda: list(session.ask("Who?")))
    assert (session.fed, len(session.pending)) == ([], 1)


@pytest.mark.parametrize("given", [{"reuse": "once"}, {"reuse": "refresh"}, {"policy": "full"}])
def test_where_nothing_is_recalled_there_is_no_tier(given: dict[str, Any]) -> None:
    session = talked(recalling("ram", **given), MILL, "Who?", "Why?")
    assert (session.recall.nbytes, session.reports[-1].tier) == (0, "")


def test_answers_of_the_bundled_model_follow_the_full_cache() -> None:
    """The later questions of a chat under a small budget, as by a cache without eviction."""
    from minikv.cli.eval.tasks import CHATS

    found: dict[str, list[str]] = {}
    for policy, reuse in (("full", "once"), ("adakv", "auto")):
        session = minikv.load(policy=policy, budget=64, reuse=reuse)
        item = next(CHATS["followup"].items(session.tokenizer, 1000, 6, 7))
        session.attach(item.document, "report.txt")
        found[policy] = ["".join(session.ask(q, max_tokens=12)) for q in item.questions]
    assert found["adakv"] == found["full"]
    assert modes(session)[1:] == ["recall"] * (len(item.questions) - 1)


@pytest.mark.parametrize("policy", ["snapkv+turns", "adakv+turns"])
def test_a_turn_begins_where_it_began_whatever_the_tier_has(policy: str) -> None:
    """Policies that keep the ends of turns longest see the turns of the conversation, also of a
    short question."""
    session = talked(recalling(policy=policy, budget=64), MILL, "Who?")
    first = session.reports[0].tokens
    ends = [first.prompt_new]
    say(session, "Why?")
    kv: Any = session.engine.kv
    assert kv.state.turns == ((0, ends[0]), (first.seen_total, kv.state.turns[1][1]))


def test_a_file_is_made_where_it_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user says where: /tmp may be in memory."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/somewhere")
    monkeypatch.delenv("TMPDIR", raising=False)
    assert somewhere().path.parent == Path("/var/tmp")
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert somewhere().path.parent == Path("/somewhere")
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr("os.access", lambda *given: False)
    assert somewhere().path.parent == Path("/somewhere")


GONE = "tier.kv: No such file or directory"


def test_no_tier_is_announced_for_a_document_that_is_too_long() -> None:
    session, said = recalling(), list[str]()
    session.recall.say = said.append
    with pytest.raises(ContextError):
        list(talked(session, MILL * 8).ask("Who?", notice=said.append))
    assert (said, session.recall.tier) == ([], None)


@pytest.mark.parametrize(
    ("kind", "free", "error", "place", "line"),
    [
        ("ram", None, None, "ram", "RAM (the tier): {size}; this saves time, not memory"),
        ("auto", None, None, "file", "a file (the tier): {size} for {tokens:,} tokens"),
        ("auto", 1000, None, "file", "a file (the tier): {size} for {tokens:,} tokens"),
        ("auto", None, OSError(), "ram", f"RAM (the tier): {{size}}, as {GONE}; this saves"),
        ("auto", None, TierError("3 B"), "ram", "RAM (the tier): {size}, as 3 B; this saves"),
        ("auto", None, UsageError("full"), "ram", "RAM (the tier): {size}, as full; this saves"),
        ("auto", 1000, OSError(), "", f"no tier: {GONE}; in RAM it takes "),
    ],
)
def test_where_a_tier_is_and_why_is_said_once(
    kind: str, free: int | None, error: Exception | None, place: str, line: str, tmp_path: Path
) -> None:
    """On a CPU a tier is a file wherever there is room: in RAM it would take what eviction saves.
    Where none fits, everything is read again, and the reason is said."""
    session, said, notes = recalling(kind, free=free), list[str](), list[str]()
    session.recall.say = said.append

    there = Place(tmp_path / ("gone" if error else "") / "tier.kv")
    found = error is None or isinstance(error, OSError)
    session.recall.where = (lambda: there) if found else failing(error)  # type: ignore[arg-type]
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        list(session.ask(question, 4, notice=notes.append))
    first, report = session.reports
    assert modes(session) == ["once", "recall" if place else "refresh"]
    assert (report.tier, report.to_dict()["tier"]) == (place, place)
    assert report.kv_bytes.tier == session.recall.nbytes
    assert bool(report.kv_bytes.tier) == bool(place)
    assert session.recall.here == (session.recall.nbytes if place == "ram" else 0)
    assert report.kv_bytes.tier_here == session.recall.here
    tokens = first.tokens.prompt_new
    assert len(said) == 1
    shown = said[0].removeprefix("for later questions, all that was read stays in ")
    assert shown.startswith(line.format(size=size(ROW * tokens), tokens=tokens))
    if place:
        kept = size(report.kv_bytes.held + report.kv_bytes.tier_here)
        begins = f"KV {'and tier ' * (place == 'ram')}{kept.split()[0]} "
        assert report.lines()[1].startswith(begins)
        where_to = {"ram": "RAM", "file": "a file"}[place]
        stats = render.stats(report)
        assert f"{size(report.kv_bytes.tier)} in {where_to}: all that was read" in stats
        assert "chosen for this question from all that was read" in stats
        assert not notes
    else:
        (note,) = notes
        assert f"there is no tier ({GONE}; in RAM it takes" in note
        assert "1,000 B are free" in note


def test_memory_that_is_short_makes_the_tier_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or when it has become too much for it: with a GPU, where RAM comes first."""
    monkeypatch.setattr(Recall, "_places", ("ram", "file"))
    session, free, said = recalling("auto"), [1000], list[str]()
    session.recall = Recall(session.engine.kv, "auto", "same", lambda: free[0])
    session.recall.say, session.recall.where = said.append, lambda: Place(tmp_path / "tier.kv")
    session.attach(MILL)
    say(session, "Who?")
    assert " in a file (the tier): " in said[0]
    assert "1,000 B are free" in said[0]
    session.reset()
    free[0] = 1 << 30
    session.attach(MILL)
    say(session, "Who?")
    assert " in RAM (the tier): " in said[1]
    free[0] = 0
    session.attach(RIVER * 3)
    say(session, "Why?")
    assert (session.recall.place, modes(session)[-1]) == ("file", "recall")

"""Reading again that is stopped. A policy that reads everything twice: one
cache answers all questions, and what that costs is said before it is paid."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from fakes import ByteTokenizer, ChatML
from refusals import failing, refused
from small_chat import chat, held_of, reported, say, talked
from test_reuse import MILL, WELL, cache
from tiers import recalling

import minikv
from minikv.cache.tier_file import FileRows
from minikv.cache.tier_rows import TierError
from minikv.chat import reading
from minikv.chat.recall import Place, Recall
from minikv.chat.report import size
from minikv.chat.session import ChatSession
from minikv.cli.chat.turn import run_turn
from minikv.cli.failures import Interrupts
from minikv.cli.screen.terminal import Terminal
from minikv.errors import Interrupted, MemoryShortError
from minikv.settings import Generation


def asked(**given: Any) -> ChatSession:
    """A chat in which one question was answered."""
    return talked(chat(**given), MILL, "Who?")


@pytest.mark.parametrize(("after", "raises"), [(0.0, False), (0.5, False), (0.5, True)])
def test_reading_again_that_is_stopped_leaves_the_cache(after: float, raises: bool) -> None:
    session = asked(reuse="auto")
    before = cache(session)

    stop = failing(Interrupted("stopped", "by the caller")) if raises else session.cancel

    def progress(done: int, total: int) -> None:
        if done >= after * total:
            stop()

    with pytest.raises(Interrupted):
        list(session.ask("Why?", 8, progress=progress))
    assert cache(session) == before
    list(session.ask("Why?", 8))  # it is read again as ever
    assert session.reports[-1].reuse == "refresh"


@pytest.mark.parametrize("reuse", ["recall", "once", "refresh", "blind"])
def test_a_policy_is_told_of_the_sentences_of_the_whole_conversation(
    reuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each prompt, as many as ended before each token that the cache will have seen."""
    make = recalling if reuse == "recall" else chat
    session = make(reuse=reuse, policy="global-span")
    network, told = session.engine.network, list[list[int]]()
    forward = network.forward

    def heard(ids: Any, kv: Any) -> Any:
        found = session.engine.kv.sentences
        if len(ids) > 1:
            told.append([] if found is None else found.tolist())
        return forward(ids, kv)

    monkeypatch.setattr(network, "forward", heard)
    session.attach(MILL)
    for question in ("Who? And. Why?", "When. Or not.", "So. What?"):
        say(session, question, 4)
        ends = [0, *accumulate(session.tokenizer.sentence_ends(session.log.ids))]
        begins = len(session.log.ids) - session.report.tokens.generated
        assert [*map(len, told)][-1] == begins
        assert all(one == ends[: len(one)] for one in told)
        assert session.engine.kv.sentences is None
        told.clear()
        if question.startswith("When"):
            session.undo()


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


def zipped() -> ChatSession:
    """A chat about the mill under a policy that reads everything twice."""
    return talked(chat("kvzip", 60, reuse="auto"), MILL)


def document(session: ChatSession) -> list[set[int]]:
    """Positions of the document that each head holds."""
    end = len(session.start()) + len(MILL)
    return [{p for p in head if p < end} for head in held_of(session)]


def test_the_request_is_made_of_the_template() -> None:
    """The sentences of the release, and what ends a question and begins an answer."""
    tokenizer = ByteTokenizer()
    template = ChatML(tokenizer)
    made = reading.wording(tokenizer, template)
    assert bytes(made.first) == b"\n\nRepeat the previous context exactly."
    assert bytes(made.later).endswith(b"exactly, starting with ")
    whole = template.opening([minikv.chat.transcript.Message("user", "Who?")])
    assert tuple(whole[-len(made.answer) :]) == made.answer
    assert len(made.answer) > 0
    assert bytes(i for i in whole[: -len(made.answer)] if i < 256).endswith(b"Who?")


def test_one_cache_answers_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document is read and repeated once; later questions are read alone, and nothing of the
    document leaves for them but for what the first ones need."""
    session = zipped()
    seen, told = fed(session, monkeypatch), []
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


def test_a_later_document_is_scored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    session = zipped()
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
    assert told == []
    assert reported(session).saved == "nothing evicted"


def test_the_cost_is_told_before_it_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    session = chat("kvzip", 60, reuse="blind")
    seen, told = fed(session, monkeypatch), []
    session.attach(MILL)
    list(session.ask("Who?", 4, notice=lambda line: told.append((line, len(seen)))))
    (line, before), *_ = [one for one in told if one[0].startswith("kvzip has the model repeat")]
    assert before == 0
    first = len(session.start()) + len(MILL) - 4  # but for those that always stay
    words = reading.wording(session.tokenizer, session.template)
    more = first + len(words.first) + len(words.answer)
    assert f"it reads {more + 2:,} tokens more to score {first + 6:,} (2.1 times the tok" in line
    layers, heads, row = 2, 2, 2 * 8 * 4
    rows = layers * (first + 6) + more + 2  # of all layers, and of the text in one
    held = size(heads * row * rows)
    assert f"with {held} of RAM until then" in line


@pytest.mark.parametrize("kind", ["none", "ram", "auto"])
def test_no_memory_is_said_before_anything_is_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = zipped()
    session.recall = Recall(session.engine.kv, kind, "same", lambda: 1000)
    seen, says = fed(session, monkeypatch), "of RAM, and 1,000 B are free"
    error = refused(says, lambda: list(session.ask("Who?")), error=MemoryShortError)
    assert error.exit_code == 4
    # A file would take more RAM than that, too, while it is read.
    assert ("in a file" in str(error)) == (kind == "auto")
    assert ('`tier="file"`' in error.hint) == (kind != "auto")
    assert (session.engine.kv.scoring_tier, seen, session.fed) == (None, [], [])
    assert session.pending


def test_progress_grows_to_the_end_and_an_interrupt_leaves_the_chat() -> None:
    session, steps = zipped(), list[tuple[int, int, bool]]()
    list(session.ask("Who?", 4, progress=lambda *now: steps.append((*now, session.scoring))))
    done, totals, scoring = zip(*steps, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert done[-1] == totals[-1]
    assert set(scoring) == {False, True}
    assert not scoring[0]

    session, fresh = zipped(), zipped()
    with pytest.raises(Interrupted):
        list(session.ask("Who?", 4, progress=lambda *_: session.scoring and session.cancel()))
    assert session.fed == []
    for each in (session, fresh):
        say(each, "Who?", 4)
    assert held_of(session) == held_of(fresh)


def test_the_bar_says_that_it_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    shown = lambda live, *_: labels.append(live.label)  # noqa: E731
    monkeypatch.setattr("minikv.cli.chat.turn.Live.__call__", shown)
    run_turn(zipped(), "Who?", Generation(max_tokens=4), Terminal(), Interrupts(), show=False)
    assert list(dict.fromkeys(labels)) == ["reading", "scoring the text"]


# -- in a file -------------------------------------------------------------------------------------


def deep() -> ChatSession:
    """With layers enough that two of them are few."""
    return chat("kvzip", 60, layers=6, reuse="auto")


def filed(path: Path, kind: str = "file", free: int | None = None) -> ChatSession:
    """A chat whose files are made in a folder. free: bytes of RAM that it is told are free."""
    session = deep()
    session.recall = Recall(session.engine.kv, kind, "same", lambda: free)
    session.recall.where = lambda: Place(path / "rows.kv", named=True)
    return session


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[FileRows]:
    """The files that were closed."""
    found: list[FileRows] = []
    close = FileRows.close

    def noted(self: FileRows) -> None:
        if self._closing.alive:
            found.append(self)
        close(self)

    monkeypatch.setattr(FileRows, "close", noted)
    return found


def talk(session: ChatSession) -> list[str]:
    """Two documents, a question about each and one more; what was told."""
    told: list[str] = []
    for text, question in ((MILL, "Who?"), (WELL, "Why?"), ("", "When?")):
        if text:
            session.attach(text)
        list(session.ask(question, 6, notice=told.append))
    return told


@pytest.mark.parametrize("dtype", ["same", "int8"])
def test_a_file_changes_no_answer_and_is_gone_after_it(
    dtype: str, tmp_path: Path, closed: list[FileRows]
) -> None:
    """Whatever --tier-dtype says: what is scored is kept as it is."""
    plain, session = deep(), filed(tmp_path)
    session.recall._coded = dtype == "int8"
    told = [talk(one) for one in (plain, session)]
    assert held_of(plain) == held_of(session)
    assert plain.messages == session.messages
    lines = [[line for line in one if "serves all questions" in line] for one in told]
    assert [len(some) for some in lines] == [2, 2]
    assert not any("in a file" in line for line in lines[0])
    assert all("in a file, read 2 times, and" in line for line in lines[1])
    assert len(closed) == 2
    assert list(tmp_path.iterdir()) == []
    assert session.engine.kv.scoring_tier is None
    pairs = zip(plain.reports, session.reports, strict=True)
    peaks = [(a.kv_bytes.peak_prefill, b.kv_bytes.peak_prefill) for a, b in pairs]
    assert peaks[0][1] < peaks[0][0]
    assert peaks[1][1] < peaks[1][0]
    assert peaks[2][1] == peaks[2][0]
    assert (session.recall.place, session.recall.nbytes) == ("", 0)


def test_texts_that_are_read_again_together_have_one_file(
    tmp_path: Path, closed: list[FileRows]
) -> None:
    """A chat whose cache is gone reads both documents again, each scored where it ends: the file
    has room for the longer one, and the second takes the place of the first."""
    plain, session = deep(), filed(tmp_path)
    for one in (plain, session):
        talk(one)
        one.undo()
        assert one.fed == []
    count, told = len(closed), []
    list(plain.ask("When?", 4))
    list(session.ask("When?", 4, notice=told.append))
    assert len(closed) == count + 1
    assert held_of(plain) == held_of(session)
    assert plain.messages == session.messages
    (line,) = [line for line in told if "in a file" in line]
    first = len(session.start()) + len(MILL) + 2
    found = re.search(r"to score ([\d,]+) ", line)
    assert found
    assert int(found[1].replace(",", "")) > first + len(WELL)  # of both
    assert size(6 * 2 * 2 * 8 * 4 * first) in line  # layers, heads, keys and values, of the longer


@pytest.mark.parametrize("free", [None, 450_000, 300_000])
def test_auto_takes_a_file_where_ram_is_short(free: int | None, tmp_path: Path) -> None:
    session = filed(tmp_path, "auto", free)
    assert any("in a file" in line for line in talk(session)) == (free == 300_000)


def test_a_file_by_name_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    session = talked(filed(tmp_path / "nowhere"), MILL)
    says = r'`tier="file"` is not possible: rows\.kv'
    error = refused(says, lambda: list(session.ask("Who?")))
    assert error.hint == '`tier="ram"` keeps keys and values in memory'
    assert session.fed == []
    session.recall.kind = "ram"
    say(session, "Who?")


@pytest.mark.parametrize("free", [None, 300_000])
def test_a_file_that_fails_costs_a_second_reading(
    free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: list[FileRows]
) -> None:
    """In RAM, if there is enough: else the turn is refused, and the chat is as it was."""
    plain, session = deep(), filed(tmp_path, "file", free)
    for one in (plain, session):
        one.attach(MILL)
    list(plain.ask("Who?", 4))
    seen, told = fed(session, monkeypatch), []

    def damaged(rows: FileRows, *given: Any) -> None:
        if rows.rows:
            raise TierError("rows.kv is damaged from token 0 on", 0)

    monkeypatch.setattr(FileRows, "_load", damaged)
    if free is not None:
        with pytest.raises(MemoryShortError, match=r"in a file: rows\.kv is damaged"):
            list(session.ask("Who?", 4, notice=told.append))
        assert session.fed == []
        assert session.pending
    else:
        list(session.ask("Who?", 4, notice=told.append))
        assert held_of(plain) == held_of(session)
        assert plain.messages == session.messages
        assert len(seen) == 2 + 3
        assert any("in a file" in line for line in told)
        assert " of RAM until then" in told[-1]
    assert any("of the rows to be scored cannot be used: rows.kv is damaged" in x for x in told)
    assert len(closed) == 1
    # It is not tried again in this conversation.
    session.reset()
    assert session.recall.broken == ""

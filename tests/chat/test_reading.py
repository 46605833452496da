"""Reading again that is skipped: only that is stopped, and a cancel beside it is not lost."""

from __future__ import annotations

import pytest
from small_chat import chat, say
from test_reuse import MILL, cache

from minikv.errors import Interrupted


def test_skipped_reading_answers_from_the_cache_as_it_is() -> None:
    session, plain = chat(reuse="auto"), chat(reuse="once")
    for each in (session, plain):
        each.attach(MILL)
        say(each, "Who?")
    assert session.reads_again == len(session.fed)
    assert plain.reads_again == 0

    def skip(done: int, total: int) -> None:
        if session.rereading and done > total // 2:
            session.skip()

    notes: list[str] = []
    answer = "".join(session.ask("Why?", 8, 0.7, progress=skip, notice=notes.append))
    assert answer == say(plain, "Why?")[0]
    assert cache(session) == cache(plain)
    assert session.report is not None
    assert session.report.reuse == "once"
    assert session.report.misses == 1
    assert session.report.lines()[2].startswith("may miss what question 1 did not need")
    assert session.report.tokens == plain.reports[1].tokens
    assert notes[-1] == "stopped reading again: this answer comes from the cache as it is"
    # the next question is read again as ever, and a plain cancel takes the question back
    before = cache(session)
    with pytest.raises(Interrupted):
        list(session.ask("And?", 12, progress=lambda done, total: session.cancel()))
    assert cache(session) == before
    list(session.ask("And?", 12))
    assert session.reports[-1].reuse == "refresh"


@pytest.mark.parametrize("order", [("skip", "cancel"), ("cancel", "skip"), ("skip", "skip")])
def test_a_cancel_beside_a_skip_is_not_lost(order: tuple[str, str]) -> None:
    session = chat(reuse="auto")
    session.attach(MILL)
    say(session, "Who?")
    before = cache(session)

    def both(done: int, total: int) -> None:
        if session.rereading and done > total // 2:
            for name in order:
                getattr(session, name)()

    asking = session.ask("Why?", 8, progress=both)
    if "cancel" in order:
        with pytest.raises(Interrupted):
            list(asking)
        assert cache(session) == before
    else:
        assert list(asking)


def test_a_cancel_as_soon_as_a_skip_is_told_ends_the_question() -> None:
    session = chat(reuse="auto")
    session.attach(MILL)
    say(session, "Who?")
    before = cache(session)

    def skip(done: int, total: int) -> None:
        if session.rereading:
            session.skip()

    def end(line: str) -> None:
        if line.startswith("stopped reading again"):
            session.cancel()

    with pytest.raises(Interrupted):
        list(session.ask("Why?", 8, progress=skip, notice=end))
    assert cache(session) == before


def test_skip_after_the_last_chunk_does_not_stop_the_answer() -> None:
    session, plain = chat(reuse="auto"), chat(reuse="auto")
    for each in (session, plain):
        each.attach(MILL)
        say(each, "Who?")

    def late(done: int, total: int) -> None:
        if done == total:
            session.skip()

    assert "".join(session.ask("Why?", 8, 0.7, progress=late)) == say(plain, "Why?")[0]
    assert session.report is not None
    assert session.report.stop_reason != "user"


def test_skip_where_nothing_is_read_again_is_a_cancel() -> None:
    session = chat(reuse="auto")
    session.attach(MILL)
    with pytest.raises(Interrupted):
        list(session.ask("Who?", 3, progress=lambda done, total: session.skip()))
    assert session.fed == []
    answer = session.ask("Who?", 12)
    next(answer)
    session.skip()
    list(answer)
    assert session.report is not None
    assert session.report.stop_reason == "user"

"""What the next question reads: the table of `plan`, a case a row; then how messages become tokens,
what does not fit, and that a chat does and says what was planned."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fakes import ByteTokenizer, ChatML
from refusals import refused
from small_chat import chat, reported, say, talked
from test_report import report
from test_session import check, make

from minikv.cache.stats import CacheStats
from minikv.chat import plan as planning
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.plan import Composer, PlanSettings, PromptPlan, Question, Situation
from minikv.chat.snapshot import Conversation
from minikv.chat.transcript import Document, Message, Stored, TokenLog, Turn
from minikv.errors import ContextError, Interrupted, MemoryShortError, UsageError

MILL = "A mill stands by the river and grinds. " * 8
COMPOSER = Composer(ChatML(ByteTokenizer()), lambda: None, lambda: False)
STATS = CacheStats(0, 0, 0.0, *[0] * 8, False, False)


def plan(said: Conversation, question: Question, *given: Any) -> PromptPlan:
    return Situation(said, *given).plan(question)


def documents(text: str) -> tuple[Document, ...]:
    return (Document(text.strip()),) if text else ()


@dataclass(frozen=True)
class Case:
    """A row of the table.

    cache: "filled"; "empty"; or "again": empty after a turn whose tokens are known. tier: how many
    of its tokens are the conversation's; None: there is none. how: "all", "recall", "new" or "cut":
    `parts` says where. why: the beginning of the line for the user. brings, had: text of
    the documents of this question and of the one before.
    """

    cache: str
    tier: int | None
    reuse: str
    record: str
    how: str
    given: int = 0
    why: str = ""
    parts: tuple[str, ...] = ()
    policy: str = "adakv"
    brings: str = ""
    had: str = "mill\n\n"
    evicted: int = 9
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        return self.cache == "empty"

    def inputs(self) -> tuple[Conversation, Question, CacheStats, Stored, PlanSettings]:
        messages = [Message("user", f"{self.brings}Why?")]
        said, seen = Conversation(pending=[*documents(self.brings)]), []
        if not self.first:
            asked = Message("user", f"{self.had}Who?")
            read = COMPOSER.opening([asked])
            seen = [*read, *b"Ad"]  # the last token of the answer was not fed
            messages = [asked, Message("assistant", "Ada"), *messages]
            had = documents(self.had)
            tokens = replace(report().tokens, prompt_new=len(read), seen_total=len(seen))
            turn = Turn("Who?", "Ada", had, replace(report(), tokens=tokens))
            fed = len(seen) if self.cache == "filled" else 0
            said = replace(said, turns=[turn], log=TokenLog([*seen, *b"a"], fed))
        eviction = EvictionConfig.read(self.policy, budget=64)
        limits = {"max_context": 500, "pinned": 2, **self.settings}
        tier = Stored(why="none fits", kind="auto")
        if self.tier is not None:
            tier = Stored([*seen[: self.tier], *[-1] * 9], True, "", "ram")
        return (
            said,
            COMPOSER.question(said, messages),
            replace(STATS, evicted=self.evicted, gaps=self.evicted > 0),
            tier,
            PlanSettings(eviction, eviction.rules(), self.reuse, **limits),
        )


SEEN = len(COMPOSER.opening([Message("user", "mill\n\nWho?")])) + 2
AGAIN = '`reuse="auto"` reads everything again with each question: adakv keeps what one question'
BLUNT = '`reuse="auto"` keeps the cache: streaming does not choose'
NONE = "there is no document to evict beforehand"
WELL = "well\n\n"
FIRST = {"brings": WELL, "parts": (WELL, "Why?")}
BOTH = {"brings": WELL, "parts": ("mill\n\n", f"Who?Ada{WELL}", "Why?")}
LATER = {"brings": WELL, "parts": (f"a{WELL}", "Why?")}
ANEW: dict[str, Any] = {"settings": {"rereads": True}}

CASES = [
    # empty, a tier
    Case("empty", 0, "auto", "once", "recall"),
    Case("again", SEEN, "auto", "recall", "recall", SEEN),
    Case("again", 7, "recall", "recall", "recall", 7),
    Case("again", 7, "auto", "recall", "recall", 7, policy="full"),  # another policy evicted
    Case("again", 7, "auto", "recall", "recall", 7, policy="full", evicted=0),
    Case("again", 0, "recall", "refresh", "recall"),
    # empty, blind
    Case("empty", None, "blind", "blind", "cut", **FIRST),
    Case("empty", None, "auto", "blind", "cut", policy="kvzip", **FIRST),
    Case("again", None, "blind", "blind", "cut", **BOTH),
    Case("empty", None, "blind", "once", "cut", why=NONE),
    Case("empty", None, "blind", "once", "cut", policy="full"),
    Case("empty", None, "auto", "once", "cut", policy="kvzip"),
    Case("again", None, "blind", "once", "cut", had=""),
    # empty
    *(Case("empty", None, reuse, "once", "all", brings=WELL) for reuse in ("auto", "once")),
    *(Case("again", None, reuse, "refresh", "all") for reuse in ("auto", "once", "refresh")),
    Case("again", 7, "once", "refresh", "all"),
    # filled, a tier
    Case("filled", SEEN, "auto", "recall", "recall", SEEN),
    Case("filled", 7, "auto", "recall", "recall", 7),
    Case("filled", 7, "recall", "recall", "recall", 7),
    Case("filled", 7, "auto", "recall", "recall", 7, **ANEW),
    Case("filled", 0, "auto", "refresh", "recall"),
    Case("filled", 7, "auto", "recall", "recall", 7, policy="full"),
    Case("filled", 7, "auto", "once", "new", policy="full", evicted=0),  # the cache has all
    # filled, everything again
    Case("filled", None, "refresh", "refresh", "all"),
    Case("filled", 7, "refresh", "refresh", "all"),
    Case("filled", None, "once", "refresh", "all", **ANEW),
    Case("filled", None, "auto", "refresh", "all", **ANEW),
    Case("filled", None, "auto", "refresh", "all", why=AGAIN),
    Case("filled", None, "recall", "refresh", "all", why=AGAIN),
    # filled, blind
    Case("filled", None, "blind", "blind", "cut", **LATER),
    Case("filled", None, "auto", "blind", "cut", policy="kvzip", **LATER),
    Case("filled", None, "blind", "once", "new"),
    # filled
    Case("filled", None, "auto", "once", "new", why=BLUNT, policy="streaming"),
    Case("filled", None, "auto", "once", "new", evicted=0),
    Case("filled", None, "auto", "once", "new", had=""),
    Case("filled", 7, "once", "once", "new", brings=WELL),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cache}-{case.reuse}-{case.record}")
def test_the_table(case: Case) -> None:
    given = said, question, *_ = case.inputs()
    before = copy.deepcopy((said.log.ids, said.log.seen, question.ids))
    found = plan(*given)
    assert (said.log.ids, said.log.seen, question.ids) == before
    assert (found.reuse, found.given) == (case.record, case.given)
    filled, new = case.cache == "filled", not case.first and case.how in ("new", "cut")
    begins = not filled or case.how in ("all", "recall")
    assert found.anew == begins
    assert found.recalled == (case.how == "recall")
    template = COMPOSER.template
    following = [*said.log.unfed, *template.following(question.messages)] if new else []
    assert found.ids == (template.opening(question.messages) if begins else following)
    assert len(found.parts) == max(1, len(case.parts))
    if case.parts:
        assert tuple(map(ByteTokenizer().decode, found.parts)) == case.parts
    assert found.pinned == (2 if begins and not (filled and found.recalled) else 0)
    seen = said.report.tokens.seen_total if said.report is not None else 0
    assert found.begins == (seen if case.how in ("all", "recall") else 0)
    assert found.tokens == len(found.ids) - case.given
    assert found.why.startswith(case.why)
    assert bool(found.why) == bool(case.why)


@pytest.mark.parametrize(
    ("case", "asks"),
    [
        (Case("empty", None, "once", "once", "all"), True),
        (Case("empty", None, "once", "once", "all", brings=WELL), False),
        (Case("again", None, "once", "refresh", "all"), False),
        (Case("again", None, "once", "refresh", "all", had=""), True),
        (Case("empty", None, "blind", "blind", "cut", brings=WELL), True),
        (Case("filled", None, "once", "once", "new"), True),
        (Case("filled", None, "once", "once", "new", brings=WELL), False),
        (Case("filled", None, "refresh", "refresh", "all"), False),
        (Case("filled", 7, "auto", "recall", "recall"), False),
    ],
)
def test_a_prompt_only_asks_where_it_brings_no_document(case: Case, asks: bool) -> None:
    assert plan(*case.inputs()).asks == asks


TRAINED = r"needs 25 tokens and 8 are left: this model was trained for 9 positions\n"
USED = rf"needs 9 tokens and 8 are left.*, {SEEN} of them used by this chat\n"
TWICE = r'^`reuse="recall"` is not possible: kvzip reads everything twice\n'


@pytest.mark.parametrize(
    ("reuse", "changes", "tier", "error", "words"),
    [
        ("refresh", {"settings": {"max_context": 9}}, "auto", ContextError, TRAINED),
        ("once", {"settings": {"max_context": SEEN + 9}}, "auto", ContextError, USED),
        ("recall", {"policy": "kvzip"}, "auto", UsageError, TWICE),
        ("recall", {}, "none", UsageError, r'is not possible: `tier="none"`\n'),
    ],
)
def test_what_is_refused(
    reuse: str, changes: dict[str, Any], tier: str, error: type[Exception], words: str
) -> None:
    *given, stored, settings = Case("filled", None, reuse, "", "", **changes).inputs()
    with pytest.raises(error, match=words):
        plan(*given, replace(stored, kind=tier), settings)  # type: ignore[misc]


def test_what_was_read_is_recalled_as_it_was_though_the_text_may_have_other_tokens() -> None:
    said, question, held, tier, settings = Case("again", 7, "auto", "", "").inputs()
    known = [*said.log.ids[:-1], 900]
    found = plan(replace(said, log=TokenLog(known)), question, held, tier, settings)
    assert found.ids == [*known, *question.following(question.messages)]


@pytest.mark.parametrize("length", [499, 500])
def test_auto_reads_again_only_what_fits(length: int) -> None:
    """Otherwise it continues with the cache, and nothing is said."""
    said, question, *given = Case("filled", None, "auto", "", "").inputs()
    found = plan(said, replace(question, opening=lambda _: [0] * length), *given)  # type: ignore[arg-type]
    fits = length < 500
    assert (found.reuse, bool(found.why)) == ("refresh" if fits else "once", fits)


@pytest.mark.parametrize(
    ("shared", "least", "chunk", "gives"),
    [(30, 0, 1, 30), (30, 4, 1, 26), (30, 4, 8, 24), (5, 4, 8, 0), (40, 0, 1, 30), (3, 40, 1, 0)],
)
def test_what_a_tier_gives(shared: int, least: int, chunk: int, gives: int) -> None:
    tier = Stored([*range(shared), *[-1] * 5], True, least=least, chunk=chunk)
    assert tier.gives([*range(30)]) == gives


# -- what a chat does and says ----------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-3, 1.0, 1e9, None])
def test_the_answer_of_auto_depends_on_no_clock(
    rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that reads so many tokens per second."""
    ticks = itertools.count()
    session, plain = (talked(chat(reuse=reuse), MILL) for reuse in ("auto", "refresh"))
    for question in ("Who?", "Why?", "And then?"):
        want = say(plain, question)
        for module in ("turn", "reading", "answer") if rate is not None else ():
            clock = lambda: next(ticks) * 100 / rate  # noqa: E731
            monkeypatch.setattr(f"minikv.chat.{module}.perf_counter", clock)
        assert say(session, question) == want
        monkeypatch.undo()
    assert [r.reuse for r in session.reports] == ["once", "refresh", "refresh"]


def test_what_was_evicted_is_read_again_once_nothing_leaves_any_more() -> None:
    session = talked(chat("adakv", 48, reuse="auto"), MILL, "Who?")
    assert session.engine.kv.stats().evicted
    session.configure(EvictionConfig.read("full", "none"))
    notes: list[str] = []
    for question in ("Why?", "When?"):
        list(session.ask(question, 3, notice=notes.append))
    assert [report.reuse for report in session.reports] == ["once", "refresh", "once"]
    assert notes == ["everything is read again: now nothing has to leave the cache"]


def test_what_slid_out_of_a_window_is_not_read_again() -> None:
    session = talked(chat("full", reuse="auto", window=64), MILL, "Who?", "Why?")
    assert session.engine.kv.stats().evicted
    assert [report.reuse for report in session.reports] == ["once", "once"]


def test_auto_says_what_it_does_once_and_again_when_that_changes() -> None:
    session = talked(chat(reuse="auto"), MILL)
    notes: list[str] = []
    for n, policy in enumerate(("adakv", "adakv", "adakv", "streaming", "streaming")):
        session.configure(EvictionConfig.read(policy, budget=48))
        list(session.ask(f"Question {n}?", 3, notice=notes.append))
    assert [r.reuse for r in session.reports] == ["once", "refresh", "refresh", "once", "once"]
    assert len(notes) == 2
    assert notes[0].startswith('`reuse="auto"` reads everything again with each question')
    assert "streaming does not choose by what is asked" in notes[1]
    session.configure(EvictionConfig.read("adakv", budget=48))
    list(session.ask("Last?", 3, notice=notes.append))
    assert len(notes) == 3
    assert reported(session).reuse == "refresh"
    assert reported(session).warnings == (notes[2],)


def test_auto_follows_the_policy_of_now() -> None:
    session = talked(chat(reuse="auto", budget=64), MILL, "Who?")
    session.configure(EvictionConfig.read("streaming", budget=64))
    assert session.reads_again == 0
    say(session, "Why?")
    assert session.reports[1].reuse == "once"
    assert "streaming does not choose" in session.reports[1].warnings[0]
    session.configure(EvictionConfig.read("adakv", budget=64))
    assert session.reads_again == len(session.fed)


def test_a_prompt_over_the_context_is_refused_with_numbers_and_nothing_is_fed() -> None:
    chat = talked(make(max_context=64), "y" * 50)
    # 52 + 6 + 4 control tokens = 62 fit and leave room for one more; 63 do not.
    with pytest.raises(ContextError, match=r"needs 64 tokens and 63 are left.* 64 positions") as e:
        list(chat.ask("question"[:8]))
    assert e.value.exit_code == 5
    assert "nothing was cut" in e.value.hint
    assert chat.fed == []
    check(chat)
    list(chat.ask("quest", max_tokens=1))
    check(chat)


def test_prompt_that_leaves_exactly_one_position_is_answered_to_the_end_of_the_context() -> None:
    chat = make(max_context=20)
    pieces = list(chat.ask("q" * 13))  # 13 + 4 = 17 fed; 3 positions left
    assert reported(chat).stop_reason == "context"
    assert len(chat.fed) == 20
    assert len("".join(pieces)) == 4  # the fourth is pending_token: no position is left to feed it
    check(chat)
    with pytest.raises(ContextError, match="used by this chat"):
        list(chat.ask("more"))
    check(chat)


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it would take a hundred times its memory."""
    chat, given = make(max_context=4096), list[int]()
    encode = chat.tokenizer.encode
    noted = lambda text: given.append(len(text)) or encode(text)  # noqa: E731
    monkeypatch.setattr(chat.tokenizer, "encode", noted)
    chat.attach("word " * 2_000_000)
    says = "needs more than 8,192 tokens and 4,095 are left"
    refused(says, lambda: list(chat.ask("q")), error=ContextError)
    assert sum(given) <= planning._LONG
    assert len(chat.pending) == 1


# -- from messages to tokens -------------------------------------------------------------------


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A chat whose tokenizer never comes back from a long text, and stops the chat meanwhile."""
    talk = chat()
    compose, never = talk.template.opening, threading.Event()

    def opening(messages: Sequence[Any]) -> list[int]:
        if len(messages[-1].content) > 1000:
            talk.cancel()
            never.wait()
        return compose(messages)

    monkeypatch.setattr(talk.template, "opening", opening)
    monkeypatch.setattr(planning, "_LONG", 1000)
    monkeypatch.setattr(talk, "max_context", 1 << 30)
    yield talk
    never.set()


def test_ctrl_c_is_heard_while_a_text_is_tokenized(endless: Any) -> None:
    endless.attach("a mill " * 300)
    with pytest.raises(Interrupted, match="before anything was read"):
        list(endless.ask("What?"))
    assert (endless.turns, endless.fed, len(endless.pending)) == ([], [], 1)


def test_a_text_that_memory_does_not_suffice_for_is_refused(endless: Any) -> None:
    """The library's allocator would end the process."""
    endless.recall.free = lambda: 1000
    endless.attach("a mill " * 300)
    with pytest.raises(MemoryShortError, match="tokenizing") as caught:
        list(endless.ask("What?"))
    assert caught.value.exit_code == 4
    assert len(endless.pending) == 1

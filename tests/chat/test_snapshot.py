"""A chat set aside and taken up again is bit for bit the one that was never set aside."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import PADDED, ByteTokenizer, ChatML, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from small import PAIRS, engine, ids, network, scheduler, shape
from torch import Tensor

from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.snapshot import CacheSnapshot
from minikv.cache.stats import CacheStats, Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Turn
from minikv.engine.engine import Engine
from minikv.errors import Interrupted, UsageError
from minikv.models.config import ModelConfig
from minikv.models.llama import Llama
from minikv.models.rope import RopeConfig

Trace = list[Tensor]


def go_on(run: Engine, seed: int) -> Trace:
    """Logits of every forward, and after each what every head holds."""
    trace: Trace = []

    def note(logits: Tensor) -> None:
        trace.append(logits)
        kv = run.kv
        heads = [(i, h) for i in range(kv.shape.layers) for h in range(kv.shape.kv_heads)]
        trace.extend(kv.kept(*where) for where in heads)

    for turn in range(2):
        note(run.prompt(ids(21 - 10 * turn, seed=seed + turn)))
        for token in ids(5 - 3 * turn, seed=seed + 100 + turn):
            note(run.step(token))
    return trace


def same(one: Trace, two: Trace) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def put_back(kv: KVCache, held: CacheSnapshot) -> None:
    kv.restore(held, kv.prompt_policy, kv.step_policy, kv.budget, kv.stride)


def between_steps(stats: CacheStats) -> CacheStats:
    """Without what the first step after a change of the layout makes for itself."""
    return replace(stats, allocated_bytes=0)


@pytest.mark.parametrize(("prompt", "step"), PAIRS)
def test_what_follows_is_bit_identical(prompt: str, step: str) -> None:
    """In the middle of an answer, in this cache and in another; one layer has a sliding window."""
    net = network(layers=2, heads=4, kv_heads=2, windows=(20, None))
    run, other = (engine(net, prompt, step, 48) for _ in range(2))
    run.prompt(ids(70))
    for token in ids(4, seed=1):
        run.step(token)
    held, stats = run.kv.snapshot(), run.kv.stats()
    want = go_on(run, 5)
    put_back(run.kv, held)
    assert between_steps(run.kv.stats()) == between_steps(stats)
    assert same(go_on(run, 5), want)
    put_back(other.kv, held)
    assert same(go_on(other, 5), want)


@pytest.mark.parametrize(("prompt", "step"), [("adakv", "roco"), ("full", "none"), ("l2", "l2")])
def test_before_anything_and_after_a_prompt(prompt: str, step: str) -> None:
    net = network(windows=(20, None, 60))
    run = engine(net, prompt, step, 48)
    empty = run.kv.snapshot()
    run.prompt(ids(90))
    read = run.kv.snapshot()
    want = go_on(run, 5)
    put_back(run.kv, read)
    assert same(go_on(run, 5), want)
    put_back(run.kv, empty)
    assert run.kv.stats().held_bytes == 0
    run.prompt(ids(90))
    assert same(go_on(run, 5), want)


def test_a_budget_in_blocks_or_as_a_share_or_pinned_goes_on_too() -> None:
    net = network()
    strided = EvictionConfig.read("roco", budget=48, stride=8).policies()
    shared = EvictionConfig.read("adakv", budget="40%").policies()
    for policies, pinned in ((strided, 0), (shared, 0), (shared, 6)):
        runs = [engine(net, "full", "none", None) for _ in range(2)]
        for run in runs:
            run.kv.configure(*policies)
        run, other = runs
        run.kv.pin(pinned)
        run.prompt(ids(120))
        for token in ids(5):
            run.step(token)
        held = run.kv.snapshot()
        want = go_on(run, 3)
        other.kv.restore(held, *policies)
        assert other.kv.stats().budget_rows == run.kv.stats().budget_rows
        assert same(go_on(other, 3), want)


def test_only_rows_in_use_are_copied_and_never_shared() -> None:
    run = engine(network(), "adakv", "roco", 48)
    run.prompt(ids(400))
    held = run.kv.snapshot()
    stats = run.kv.stats()
    assert held.nbytes == stats.held_bytes == 9 * 48 * run.kv.arena.row_nbytes()
    before = {name: column.clone() for name, column in held.columns.items()}
    layout = copy.deepcopy(held.layout)
    put_back(run.kv, held)
    go_on(run, 1)
    assert all(torch.equal(column, before[name]) for name, column in held.columns.items())
    assert torch.equal(held.layout.length, layout.length)
    assert torch.equal(held.layout.free_slot, layout.free_slot)


def test_no_memory_for_the_old_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    run, twin = (engine(net, "adakv", "roco", 48) for _ in range(2))
    for each in (run, twin):
        each.prompt(ids(90))
    held = run.kv.snapshot()
    for each in (run, twin):
        each.prompt(ids(30, seed=1))

    def refuse(self: Any, *like: Any) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("minikv.cache.arena.Arena._blank", refuse)
        with pytest.raises(MemoryError):
            put_back(run.kv, held)
    assert same(go_on(run, 5), go_on(twin, 5))


def test_a_check_is_what_configure_says_and_changes_nothing() -> None:
    net = network()
    run, twin = (engine(net, "adakv", "roco", 48) for _ in range(2))
    small = scheduler(net, "streaming", "streaming", 48)
    for each in (run, twin):
        each.prompt(ids(90))
    run.kv.check(small.prompt_policy, small.step_policy, small.budget)
    with pytest.raises(UsageError, match="too small"):
        run.kv.check(run.kv.prompt_policy, run.kv.step_policy, Budget.parse(8))
    assert run.kv.budget == Budget.parse(48)
    assert same(go_on(run, 5), go_on(twin, 5))


def test_a_cache_of_another_network_or_policy_is_not_taken() -> None:
    held = engine(network(), "adakv", "roco", 48).kv.snapshot()
    for other in (
        engine(network(layers=2), "adakv", "roco", 48),
        engine(network(), "adakv", "tova", 48),
        engine(network(heads=4, kv_heads=2), "adakv", "roco", 48),
        engine(network(head_dim=4), "adakv", "roco", 48),
    ):
        other.prompt(ids(90))
        stats = other.kv.stats()
        with pytest.raises(ValueError, match="not one of this network"):
            put_back(other.kv, held)
        assert other.kv.stats() == stats
        assert other.step(3).isfinite().all()


# -- on the way to a file -----------------------------------------------------------------


def through_json(held: CacheSnapshot) -> CacheSnapshot:
    return CacheSnapshot.read(json.loads(json.dumps(held.record())), held.columns)


@pytest.mark.parametrize(("prompt", "step"), [("adakv", "roco"), ("full", "none")])
def test_a_record_of_a_cache_is_the_cache(prompt: str, step: str) -> None:
    run = engine(network(windows=(20, None, 60)), prompt, step, 48)
    for turn in range(2):
        run.prompt(ids(90 - 40 * turn, seed=turn))
        for token in ids(9, seed=turn):
            run.step(token)
    stats = run.kv.stats()
    held = through_json(run.kv.snapshot())
    want = go_on(run, 5)
    put_back(run.kv, held)
    assert between_steps(run.kv.stats()) == between_steps(stats)
    assert same(go_on(run, 5), want)


def spoil(record: dict[str, Any], key: str, value: object) -> None:
    """Put a value at `key`, "length.0.1" for one in a table."""
    name, *path = key.split(".")
    if not path:
        record[name] = value
        return
    table = record[name]
    for step in path[:-1]:
        table = table[int(step)]
    table[int(path[-1])] = value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position", -1),
        ("position", 2.5),
        ("position", True),
        ("position", 1 << 70),
        ("turns", 3),
        ("turns", [[0]]),
        ("turns", [[0, "a"]]),
        ("pinned", None),
        ("rows", "48"),
        ("open", 1),
        ("peak", "much"),
        ("evict_s", "1"),
        ("lost", {"0": 1}),
        ("lost", ["x"]),
        ("shaped", None),
        ("region", []),
        ("region", [0, 5]),
        ("region.1", 10**9),
        ("region.2", 0),
        ("start.0.0", -3),
        ("start.1.0", 0),
        ("length.0.1", -1),
        ("length.0.1", 10**6),
        ("length.0.1", 1),
        ("capacity.0.0", 10**6),
        ("capacity", [[1]]),
        ("cap.0.0", -1),
        ("hole.0.0", 10**6),
        ("hole.0.0", -2),
        ("start", "abc"),
        ("start", [[0.5]]),
        ("hole", None),
        ("length", [[[1]]]),
    ],
)
def test_a_record_that_no_cache_wrote_is_refused(key: str, value: object) -> None:
    run = engine(network(), "adakv", "roco", 48)
    run.prompt(ids(90))
    held = run.kv.snapshot()
    record = json.loads(json.dumps(held.record()))
    CacheSnapshot.read(record, held.columns)
    spoil(record, key, value)
    with pytest.raises((ValueError, TypeError)):
        CacheSnapshot.read(record, held.columns)
    assert run.kv.stats().seen == 90


def test_a_record_without_a_key_or_with_a_short_column_is_refused() -> None:
    run = engine(network(), "adakv", "roco", 48)
    run.prompt(ids(90))
    held = run.kv.snapshot()
    for key in held.record():
        record = held.record()
        del record[key]
        with pytest.raises(KeyError):
            CacheSnapshot.read(record, held.columns)
    with pytest.raises(ValueError, match="every row"):
        CacheSnapshot.read(held.record(), {**held.columns, "pos": held.columns["pos"][1:]})


# -- a chat -------------------------------------------------------------------------------


def chat(policy: str = "adakv", budget: int | str = 48, **given: Any) -> ChatSession:
    """A session over a small random network that speaks bytes."""
    config = ModelConfig(
        family="llama",
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=32,
        mlp=48,
        vocab=PADDED,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        max_context=2048,
        windows=(None, None),
    )
    net = Llama(config, rows=64).randomise(3, std=0.3)
    eviction = EvictionConfig.read(policy, budget=budget)
    prompt, step, rows, stride = eviction.policies()
    kv = KVCache(shape(net), prompt, step, rows, stride=stride, poison=True)
    tokenizer = ByteTokenizer()
    return ChatSession(
        Engine(net, kv), tokenizer, ChatML(tokenizer), max_context=2048, eviction=eviction, **given
    )  # type: ignore[arg-type]


def say(session: ChatSession, question: str, tokens: int = 8) -> tuple[str, list[int]]:
    """The answer, and all that was fed up to it."""
    answer = "".join(session.ask(question, tokens, 0.7))
    return answer, list(session.fed)


def held_of(session: ChatSession) -> list[list[int]]:
    kv: Any = session.engine.kv
    assert isinstance(kv.shape, Shape)
    return [kv.kept(i, h).tolist() for i in range(2) for h in range(2)]


def test_a_snapshot_of_a_chat_is_the_chat() -> None:
    session = chat(seed=5, system="be brief")
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    say(session, "Who owns the mill?")
    session.attach("second text", "two.txt")
    snapshot = session.snapshot()
    want = [say(session, "Who?"), say(session, "Why?")], held_of(session)
    session.configure(EvictionConfig.read("streaming", budget=40))
    session.seed = 9
    say(session, "Something else")
    session.restore(snapshot)
    assert session.turn == len(session.turns) == len(session.reports) == 1
    assert [d.name for d in session.pending] == ["two.txt"]
    assert [d.name for d in session.documents] == ["mill.txt"]
    assert session.report is session.turns[0].report
    assert session.eviction.policy == "adakv"
    assert ([say(session, "Who?"), say(session, "Why?")], held_of(session)) == want
    session.reset()
    session.restore(snapshot)  # also where there is nothing any more, and a second time
    assert ([say(session, "Who?"), say(session, "Why?")], held_of(session)) == want


def test_turns_are_what_the_transcript_says_and_the_curve_what_was_measured() -> None:
    session = chat(system="be brief")
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    session.attach("no name")
    say(session, "Who owns the mill?")
    say(session, "Why?")
    written = [message for turn in session.turns for message in turn.messages()]
    assert session.messages[1:] == written
    assert [turn.question for turn in session.turns] == ["Who owns the mill?", "Why?"]
    assert [len(turn.documents) for turn in session.turns] == [2, 0]
    assert session.reports[1] is session.report
    stats: Any = session.engine.kv.stats()
    assert len(session.curve) == 4
    assert session.curve[-1] == (stats.seen, stats.held_bytes, stats.full_bytes)
    seen, held, full = zip(*session.curve, strict=True)
    assert list(seen) == sorted(seen)
    assert max(held) < max(full)
    session.reset()
    assert (session.turns, session.reports, session.curve) == ([], [], [])


def test_a_turn_that_was_stopped_or_failed_is_in_the_list() -> None:
    engine = FakeEngine()
    tokenizer = ByteTokenizer()
    session = ChatSession(
        engine,
        tokenizer,
        ChatML(tokenizer),
        max_context=4096,  # type: ignore[arg-type]
    )
    answer = session.ask("one")
    first = next(answer)
    answer.close()  # type: ignore[attr-defined]
    engine.nan_at = len(session.fed) + 12
    with pytest.raises(Exception, match="NaN"):
        list(session.ask("two", max_tokens=50))
    assert [turn.report.stop_reason for turn in session.turns] == ["user", "error"]
    assert session.turns[0].answer == first
    session.cancel()

    def stop(done: int, total: int) -> None:
        session.cancel()

    engine.nan_at = None
    with pytest.raises(Interrupted):
        list(session.ask("three", progress=stop))
    assert len(session.turns) == session.turn == 2


# -- undo ---------------------------------------------------------------------------------


def test_undo_and_the_same_question_give_the_same_answer() -> None:
    session = chat(undo_turns=16)
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    questions = ["Who owns the mill?", "Why?", "Since when?"]
    answers, kept = [], []
    for question in questions:
        answers.append(say(session, question))
        kept.append(held_of(session))
    for back in (1, 2, 3):
        taken = session.undo(back)
        assert [turn.question for turn in taken] == questions[-back:]
        assert session.undone == taken
        assert len(session.turns) == session.turn == 3 - back
        for i in range(3 - back, 3):
            assert say(session, questions[i]) == answers[i]
            assert session.undone == []
            assert held_of(session) == kept[i]
    session.undo(3)
    assert [d.name for d in session.pending] == ["mill.txt"]
    assert session.documents == []
    assert session.report is None


def test_undo_keeps_the_settings_of_now_and_documents_that_wait() -> None:
    session = chat(undo_turns=16)
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    say(session, "Who?")
    say(session, "Why?")
    session.attach("waiting", "w.txt")
    session.configure(EvictionConfig.read("streaming", budget=40))
    session.seed = 3
    session.undo(2)
    assert session.eviction.policy == "streaming"
    assert session.seed == 3
    assert [d.name for d in session.pending] == ["mill.txt", "w.txt"]
    say(session, "Who?")
    stats: Any = session.engine.kv.stats()
    assert stats.kept_max == 40


def test_undo_says_what_it_cannot_do() -> None:
    session = chat(undo_turns=2)
    with pytest.raises(UsageError, match="no turn to take back"):
        session.undo()
    for i in range(5):
        say(session, f"question {i}")
    fed = list(session.fed)
    with pytest.raises(UsageError, match="1 or more"):
        session.undo(0)
    with pytest.raises(UsageError, match="this chat has 5 turns"):
        session.undo(6)
    with pytest.raises(UsageError, match=r"before question 3 is not kept: at most 2") as error:
        session.undo(3)
    assert error.value.hint.startswith("/undo 2 or 5 works")
    assert session.fed == fed
    assert len(session.turns) == 5
    session.undo(2)
    assert len(session.turns) == 3
    with pytest.raises(UsageError, match="before question 3"):
        session.undo(1)
    session.undo(3)  # the cache before the first question is empty, and always kept
    assert session.fed == []


def test_snapshots_stay_under_their_limit_and_are_made_only_if_wanted() -> None:
    session = chat(undo_turns=16)
    say(session, "a long first question " * 5)
    one = session.snapshot().nbytes
    session.history.nbytes = 3 * one + one // 2
    for i in range(6):
        say(session, f"question {i}")
        kept = session.history.before
        assert sum(snapshot.nbytes for snapshot in kept.values()) <= session.history.nbytes
        assert 0 in kept
    assert len(kept) == 4
    session.history.nbytes = one // 2  # as with --policy full over a long document
    say(session, "more")
    with pytest.raises(UsageError, match=r"is not kept: .*KiB in all") as error:
        session.undo()
    assert "/undo 8 works" in error.value.hint
    plain = chat()
    say(plain, "q")
    assert plain.history.before == {}


def test_a_question_that_was_not_read_leaves_undo_as_it_was() -> None:
    session = chat(undo_turns=16)
    say(session, "one")
    session.undo()
    with pytest.raises(Interrupted):
        list(session.ask("two", progress=lambda done, total: session.cancel()))
    assert [turn.question for turn in session.undone] == ["one"]
    say(session, "two")
    session.undo()
    assert session.fed == []


def test_a_snapshot_without_a_cache_is_read_again_with_the_next_question() -> None:
    session, plain = chat("full"), chat("full")
    session.attach("A mill stands by the river. " * 4, "mill.txt")
    say(session, "Who?")
    snapshot = session.snapshot()
    again = type(snapshot)(
        None,
        snapshot.eviction,
        snapshot.seed,
        snapshot.messages,
        snapshot.documents,
        turns=snapshot.turns,
        curve=snapshot.curve,
    )
    plain.restore(again)
    assert plain.fed == []
    assert len(plain.turns) == 1
    say(plain, "Why?")
    say(session, "Why?")
    # The whole conversation was read at once, the unread end of the first answer included.
    assert plain.template.opening(plain.messages[:3]) == plain.fed[:-7]
    assert plain.reports[1].tokens.prompt_new > session.reports[1].tokens.prompt_new
    assert plain.reports[1].tokens.prompt_reused == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["ask", "undo", "undo2", "retry", "stop"]), max_size=9))
def test_any_undoing_and_asking_is_the_chat_without_what_was_undone(steps: list[str]) -> None:
    engine = FakeEngineWithMemory()
    tokenizer = ByteTokenizer()
    session = ChatSession(
        engine,
        tokenizer,
        ChatML(tokenizer),
        max_context=4096,
        undo_turns=16,  # type: ignore[arg-type]
    )
    asked: list[str] = []
    for i, step in enumerate(steps):
        back = {"undo": 1, "undo2": 2, "retry": 1}.get(step, 0)
        if back > len(asked):
            with pytest.raises(UsageError):
                session.undo(back)
            continue
        last = asked[-1] if asked else ""
        if back:
            session.undo(back)
            asked = asked[: len(asked) - back]
        if step == "retry":
            list(session.ask(last))
            asked.append(last)
        elif not back:
            question = f"question {i}"
            answer = session.ask(question)
            if step == "stop":
                next(answer)
                next(answer)
                answer.close()  # type: ignore[attr-defined]
                session.undo()
            else:
                list(answer)
                asked.append(question)
    straight = ChatSession(
        FakeEngine(),
        tokenizer,
        ChatML(tokenizer),
        max_context=4096,  # type: ignore[arg-type]
    )
    for question in asked:
        list(straight.ask(question))
    assert session.messages == straight.messages
    assert session.fed == straight.fed == engine.fed
    assert [turn.question for turn in session.turns] == asked
    assert all(isinstance(turn, Turn) for turn in session.turns)


class FakeEngineWithMemory(FakeEngine):
    """A fake whose cache can be set aside."""

    def __init__(self) -> None:
        super().__init__()
        kv: Any = self.kv
        kv.snapshot = lambda: Kept(list(self.fed))
        kv.restore = self.put_back
        kv.check = lambda *eviction: None

    def put_back(self, held: Kept, *eviction: object) -> None:
        self.fed = list(held.fed)
        self.kv.position = len(self.fed)


class Kept:
    def __init__(self, fed: list[int]) -> None:
        self.fed, self.nbytes = fed, len(fed)

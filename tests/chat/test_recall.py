"""A chat with a tier: every question is answered as the first was, whatever happened in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_chat import chat, held_of, say

import minikv
from minikv.cache.tier_rows import TierError
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.recall import Place, Recall, _in_memory, somewhere
from minikv.chat.report import size
from minikv.chat.session import ChatSession
from minikv.cli import render
from minikv.errors import Interrupted, UsageError

MILL = "A mill stands by the river and grinds. " * 8
RIVER = "The river is slow and brown. " * 8
ROW = 2 * 2 * 2 * 8 * 4
"""Bytes of a token: keys and values of 2 layers of 2 heads, 8 numbers in float32."""


def recalling(kind: str = "ram", free: int | None = None, **given: Any) -> ChatSession:
    session = chat(reuse=given.pop("reuse", "auto"), **given)
    session.recall = Recall(session.engine.kv, kind, "same", lambda: free)
    return session


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


def test_the_record_and_the_lines_name_the_tier() -> None:
    session, said = recalling(), list[str]()
    session.recall.say = said.append
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        say(session, question)
    report = session.reports[1]
    first = session.reports[0].tokens.prompt_new
    assert said == [f"tier: RAM, {size(ROW * first)}; this saves time, not memory"]
    assert (report.tier, report.kv_bytes.tier) == ("ram", session.recall.nbytes)
    assert report.kv_bytes.tier > 0
    assert report.kv_bytes.tier_here == report.kv_bytes.tier
    taken = size(report.kv_bytes.held + report.kv_bytes.tier)
    assert report.lines()[1].startswith(f"KV and tier {taken} (nothing saved) · kept ")
    assert f"{size(report.kv_bytes.tier)} in RAM: all that was read" in render.stats(report)
    assert "chosen for this question from all that was read" in render.stats(report)
    assert report.to_dict()["tier"] == "ram"
    plain = chat(reuse="auto")
    plain.attach(MILL)
    say(plain, "Who?")
    assert (plain.reports[0].tier, plain.reports[0].kv_bytes.tier) == ("", 0)


def test_progress_of_a_recalled_question_never_passes_its_total() -> None:
    session, seen = recalling(undo_turns=0), list[tuple[int, int]]()
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        list(session.ask(question, progress=lambda done, total: seen.append((done, total))))
        assert seen[-1][0] == seen[-1][1]
    session.undo()  # the tier has all of the question: no token of it is new
    seen.clear()
    list(session.ask("Why?", progress=lambda done, total: seen.append((done, total))))
    assert session.report is not None
    assert session.report.tokens.prompt_new == 0
    assert all(0 < done <= total for done, total in seen)
    session.undo()
    with pytest.raises(Interrupted, match=r"stopped reading at (\d+) of [1-9]\d* tokens"):
        list(session.ask("Why?", progress=lambda done, total: session.cancel()))


def test_undo_and_another_policy_use_what_the_conversation_shares() -> None:
    session = recalling(undo_turns=4)
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        say(session, question)
    want, held = say(session, "And?"), held_of(session)
    session.undo()
    session.attach(RIVER)
    say(session, "Other?")
    assert modes(session)[2] == "recall"
    session.undo()
    session.pending.clear()
    assert say(session, "And?")[0] == want[0]
    assert held_of(session) == held
    session.configure(EvictionConfig.read("snapkv", budget=64))
    say(session, "Last?")
    report = session.reports[-1]
    assert (report.policy, report.reuse, report.misses) == ("snapkv", "recall", 0)
    asked = report.tokens.prompt_reused + report.tokens.prompt_new
    plain = chat("snapkv", 64)
    begins = session.reports[-2].tokens.seen_total
    plain.engine.prompt(session.fed[:asked], turn_tokens=asked - begins)
    for token in session.fed[asked:]:
        plain.engine.step(token)
    assert held_of(session) == held_of(plain)


def test_turns_taken_back_without_a_copy_are_found_in_the_tier() -> None:
    session = recalling(undo_turns=0)
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        say(session, question)
    session.undo(2)
    say(session, "Since when?")
    assert modes(session) == ["recall"]
    assert session.reports[0].tokens.prompt_reused > len(MILL)


def test_a_reset_gives_the_memory_back() -> None:
    session = recalling()
    session.attach(MILL)
    say(session, "Who?")
    assert session.recall.nbytes > 0
    session.reset()
    assert (session.recall.nbytes, session.recall.tokens, session.recall.place) == (0, 0, "")
    session.attach(RIVER)
    fresh = recalling()
    fresh.attach(RIVER)
    assert say(session, "Who?") == say(fresh, "Who?")


def test_a_stopped_question_leaves_all_as_it_was() -> None:
    session, plain = recalling(), recalling()
    for each in (session, plain):
        each.attach(MILL)
        say(each, "Who?")
    with pytest.raises(Interrupted):
        list(session.ask("Never?", progress=lambda done, total: session.cancel()))
    assert say(session, "Why?") == say(plain, "Why?")
    assert held_of(session) == held_of(plain)
    with pytest.raises(Interrupted):  # skip is a cancel where nothing is read again
        list(session.ask("Never?", progress=lambda done, total: session.skip()))
    assert modes(session) == ["once", "recall"]


def test_after_a_chat_was_taken_up_everything_is_read_once_more() -> None:
    session = recalling()
    session.attach(MILL)
    say(session, "Who?")
    snapshot = session.snapshot()
    other = recalling()
    other.restore(snapshot)
    assert other.reads_again == len(other.fed)
    want = say(session, "Why?")[0]
    assert say(other, "Why?")[0] == want
    assert modes(other) == ["once", "refresh"]
    say(other, "And?")
    assert modes(other)[2] == "recall"


def test_where_no_tier_fits_the_reason_is_said_and_everything_is_read_again(
    tmp_path: Path,
) -> None:
    session = recalling("auto", free=1000)
    session.recall.where = lambda: Place(tmp_path / "gone" / "tier.kv")
    session.attach(MILL)
    notes: list[str] = []
    for question in ("Who?", "Why?", "And?"):
        list(session.ask(question, 4, notice=notes.append))
    assert modes(session) == ["once", "refresh", "refresh"]
    assert len(notes) == 1
    assert "there is no tier (tier.kv: No such file or directory; what was read takes" in notes[0]
    assert "1,000 B are free" in notes[0]


def test_a_tier_that_was_asked_for_and_does_not_fit_is_refused_before_reading() -> None:
    session = recalling("ram", free=1000)
    session.attach(MILL)
    with pytest.raises(UsageError, match=r"tier=.ram.. does not fit"):
        list(session.ask("Who?"))
    assert (session.fed, len(session.pending)) == ([], 1)


@pytest.mark.parametrize("reuse", ["once", "refresh", "blind"])
def test_the_other_ways_take_no_tier(reuse: str) -> None:
    session = recalling("ram", reuse=reuse)
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        say(session, question)
    assert (session.recall.nbytes, session.reports[-1].tier) == (0, "")


def test_a_chat_without_eviction_takes_no_tier() -> None:
    session = recalling("ram", policy="full")
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        say(session, question)
    assert modes(session) == ["once", "once"]
    assert session.recall.nbytes == 0


def test_answers_of_the_bundled_model_follow_the_full_cache() -> None:
    """The later questions of a chat under a small budget, as by a cache without eviction."""
    from minikv.cli.eval.tasks import followup

    found: dict[str, list[str]] = {}
    for policy, reuse in (("full", "once"), ("adakv", "auto")):
        session = minikv.load(policy=policy, budget=64, reuse=reuse)
        item = next(iter(followup(session.tokenizer, 1000, 1, 7)))
        session.attach(item.document, "report.txt")
        found[policy] = ["".join(session.ask(q, max_tokens=12)) for q in item.questions]
    assert found["adakv"] == found["full"]
    assert modes(session)[1:] == ["recall"] * (len(item.questions) - 1)


@pytest.mark.parametrize("undo_turns", [0, 4])
@pytest.mark.parametrize("policy", ["snapkv+turns", "adakv+turns"])
def test_a_turn_begins_where_it_began_whatever_the_tier_has(policy: str, undo_turns: int) -> None:
    """Policies that keep the ends of turns longest see the turns of the conversation, also of a
    short question, and the same ones when it is asked again."""
    session = recalling(policy=policy, budget=64, undo_turns=undo_turns)
    session.attach(MILL)
    say(session, "Who?")
    first = session.reports[0].tokens
    ends = [first.prompt_new]
    want, held = say(session, "Why?")[0], held_of(session)
    kv: Any = session.engine.kv
    assert kv._turns == [(0, ends[0]), (first.seen_total, kv._turns[1][1])]
    if undo_turns:  # without a copy the borders of earlier turns are not known
        session.undo()
        assert say(session, "Why?")[0] == want
        assert held_of(session) == held
    session.refresh_every = 2
    say(session, "And?")
    assert [begin for begin, _ in kv._turns][:2] == [0, first.seen_total]
    assert len(kv._turns) == 3


def test_another_chats_tier_is_no_tier_of_this_one() -> None:
    one, other = recalling(), recalling()
    for each, text in ((one, MILL), (other, RIVER)):
        each.attach(text)
        say(each, "Who?")
    one.restore(other.snapshot())
    assert one.reads_again >= len(one.fed) - 20
    say(one, "Why?")
    assert one.reports[-1].tokens.prompt_reused < 20


def test_a_tier_that_fails_within_an_answer_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    session, plain = recalling(), recalling()
    for each in (session, plain):
        each.attach(MILL)
        say(each, "Who?")
    session.refresh_every = 4
    recall, passes = session.engine.recall, []

    def failing(*given: Any) -> torch.Tensor:
        passes.append(len(given[0]))
        if len(passes) > 1:
            raise TierError("no space left")
        return recall(*given)

    monkeypatch.setattr(session.engine, "recall", failing)
    assert say(session, "Why?")[0] == say(plain, "Why?")[0]
    report = session.reports[-1]
    assert len(passes) == 2
    assert report.stop_reason != "error"
    assert any("goes on without it" in line for line in report.warnings)


def test_a_chat_that_evicts_no_longer_recalls_what_was_evicted() -> None:
    session, full = recalling(), chat("full")
    session.attach(MILL)
    say(session, "Who?")
    session.configure(EvictionConfig.read("full"))
    for question in ("Why?", "And?"):
        say(session, question)
    assert modes(session) == ["once", "recall", "once"]
    assert [report.misses for report in session.reports] == [0, 0, 0]
    full.engine.prompt(session.fed)
    assert held_of(session) == held_of(full)


def test_closing_a_chat_gives_its_tier_back() -> None:
    session = recalling()
    session.attach(MILL)
    say(session, "Who?")
    kv = session.engine.kv
    assert kv.tier is not None
    session.close()
    assert kv.tier is None
    assert len(session.reports) == 1


def test_a_notice_that_raises_about_the_tier_leaves_cache_and_log_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read is in the cache: the turn counts, and the next question goes on behind it."""
    session = recalling()
    session.attach(MILL)
    say(session, "Who?")
    monkeypatch.setattr(session.recall, "keep", lambda ids: "the tier is gone")

    def broken(line: str) -> None:
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError):
        list(session.ask("Why?", 4, notice=broken))
    assert session.engine.kv.position == len(session.fed)
    assert len(session.turns) == session.turn == 2
    monkeypatch.undo()
    say(session, "And then?")
    assert session.engine.kv.position == len(session.fed)


@pytest.mark.parametrize(
    ("table", "inside"),
    [
        ("/dev/sda1 / ext4 rw 0 0\ntmpfs /a tmpfs rw 0 0\n", True),
        ("/dev/sda1 / ext4 rw 0 0\nnone /a ramfs rw 0 0\n", True),
        ("/dev/sda1 / ext4 rw 0 0\n", False),
        ("tmpfs / tmpfs rw 0 0\n/dev/sda1 /a ext4 rw 0 0\n", False),
        ("tmpfs / tmpfs rw 0 0\n/dev/sda1 /a/b ext4 rw 0 0\n", False),  # bound below
        ("tmpfs / tmpfs rw 0 0\n", True),
        ("/dev/sda1 / ext4 rw 0 0\ntmpfs /a/bc tmpfs rw 0 0\n", False),  # another's name
        ("/dev/sda1 /a ext4 rw 0 0\ntmpfs /a tmpfs rw 0 0\n", True),  # the later one is on top
        ("tmpfs /a\\040b tmpfs rw 0 0\nbroken\n\n", False),
        ("", False),
        (None, False),  # no such file: not Linux
    ],
)
def test_where_files_take_memory(tmp_path: Path, table: str | None, inside: bool) -> None:
    """By a table of mounts as /proc/mounts has it, about /a/b."""
    folder, mounts = tmp_path / "a" / "b", tmp_path / "mounts"
    folder.mkdir(parents=True)
    if table is not None:
        mounts.write_text(table.replace(" /a", f" {tmp_path}/a"))
    assert _in_memory(folder, mounts) == inside
    (tmp_path / "link").symlink_to(folder)
    assert _in_memory(tmp_path / "link", mounts) == inside


@pytest.mark.parametrize("memory", [True, False])
def test_a_file_is_made_where_it_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    monkeypatch.setattr("minikv.chat.recall._in_memory", lambda folder: memory)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/somewhere")
    folder = somewhere().path.parent
    assert folder == Path("/var/tmp" if memory else "/somewhere")
    monkeypatch.setattr("os.access", lambda *given: False)
    assert somewhere().path.parent == Path("/somewhere")


@pytest.mark.parametrize("free", [1 << 30, 1000, None])
def test_on_a_cpu_a_tier_is_a_file(free: int | None, tmp_path: Path) -> None:
    """Wherever there is room for it: in RAM it would take what eviction saves."""
    session, said = recalling("auto", free=free), list[str]()
    session.recall.say = said.append
    session.recall.where = lambda: Place(tmp_path / "tier.kv")
    session.attach(MILL)
    say(session, "Who?")
    report = session.report
    assert report is not None
    assert (report.tier, session.recall.kind) == ("file", "auto")
    assert (report.kv_bytes.tier_here, session.recall.here) == (0, 0)
    assert report.kv_bytes.tier > 0
    assert report.lines()[1].startswith("KV ")
    tokens = report.tokens.prompt_new
    whole = size(ROW * tokens)
    assert said == [f"tier: a file, {whole} for {tokens:,} tokens"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "tier.kv: No such file or directory"),
        (UsageError("the disk is full"), "the disk is full"),
        (TierError("the disk has 3 B"), "the disk has 3 B"),
    ],
)
def test_where_no_file_can_be_made_a_tier_is_in_ram_and_says_why(
    error: Exception | None, why: str, tmp_path: Path
) -> None:
    session, said = recalling("auto"), list[str]()
    session.recall.say = said.append

    def where() -> Place:
        if error is not None:
            raise error
        return Place(tmp_path / "gone" / "tier.kv")

    session.recall.where = where
    session.attach(MILL)
    for question in ("Who?", "Why?"):
        say(session, question)
    report = session.reports[-1]
    assert (report.tier, report.reuse) == ("ram", "recall")
    assert report.kv_bytes.tier_here == report.kv_bytes.tier == session.recall.here > 0
    (line,) = said
    assert line.startswith("tier: RAM, ")
    assert line.endswith(f", as {why}; this saves time, not memory")

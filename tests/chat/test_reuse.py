"""Later questions: what is read again for them, what that costs, and that nothing breaks on it."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vocabularies as v
from fakes import BOS, USER
from lettered import lettered
from refusals import refused
from small_chat import chat, held_of, reported, say, talked
from test_session import make
from typer.testing import CliRunner

import minikv
import minikv.cli.chat.turn
from minikv.chat import plan
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import UNKNOWN
from minikv.chat.session import ChatSession
from minikv.chat.transcript import shared
from minikv.cli.main import app
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.transcript import read
from minikv.cli.screen import render
from minikv.cli.screen.terminal import Terminal
from minikv.models.templates import ChatTemplate, Message
from minikv.models.tokenizer import Tokenizer

MILL = "A mill stands by the river and grinds. " * 8
WELL = "A well is deep and cold and dry. " * 6


def cache(session: ChatSession) -> tuple[object, ...]:
    """All that the cache is, bit by bit, times and peaks aside."""
    held = session.engine.kv.snapshot()
    record = {k: x for k, x in held.record().items() if k not in ("evict_s", "peak")}
    return record, {name: column.tolist() for name, column in held.columns.items()}


# -- refresh --------------------------------------------------------------------------------


def test_a_refresh_is_a_chat_that_reads_its_transcript_for_the_first_time() -> None:
    """Its rows, its answers, and its figures, which count the old cache that is kept meanwhile."""
    session, fresh = (chat(system="be brief", seed=4) for _ in range(2))
    session.attach(MILL, "mill.txt")
    say(session, "Who?", 5)
    session.attach(WELL, "well.txt")
    before = session.snapshot()
    session.refresh()
    fresh.restore(replace(before, held=None))
    assert say(fresh, "Why?") == say(session, "Why?")
    assert cache(fresh) == cache(session)
    one, two = session.reports[1], fresh.reports[1]
    assert session.fed[: one.tokens.prompt_new] == session.template.opening(session.messages[:-1])
    assert session.evicted_for_turn == fresh.evicted_for_turn == 2
    assert one.tokens == two.tokens
    assert one.tokens.prompt_reused == 0
    assert one.tokens.seen_total == len(session.fed)
    assert one.tokens.evicted_total == round(len(session.fed) - one.tokens.kept_mean)
    assert one.kv_bytes.peak_prefill == two.kv_bytes.peak_prefill + before.held.nbytes
    assert one.kv_bytes.full == two.kv_bytes.full
    assert one.time_s.evict > 0
    assert one.rate.prefill_tok_s == pytest.approx(one.tokens.prompt_new / one.time_s.prefill)
    assert one.lines()[1].endswith("read again · not checked")
    # It was for one question: the next continues from there.
    assert say(session, "And?")[0] == say(fresh, "And?")[0]
    assert [r.reuse for r in session.reports] == ["once", "refresh", "once"]
    assert [r.shaped_by_turn for r in session.reports] == [1, 2, 2]


def test_nothing_to_read_again_is_said_and_off_takes_it_back() -> None:
    session = talked(make(), "waiting")
    refused("nothing to read again", session.refresh)
    list(session.ask("q"))
    session.refresh()
    session.refresh(wanted=False)
    fed = len(session.fed)
    list(session.ask("r"))
    assert reported(session).tokens.prompt_reused == fed
    session.refresh()
    session.reset()
    assert not session.rereads


def test_pinned_rows_stay_pinned() -> None:
    session = talked(chat(system="be brief", pin_system=True, reuse="refresh", budget=64), MILL)
    for question in ("Who?", "Why?"):
        say(session, question)
        assert all(set(range(len(session.start()))) <= set(head) for head in held_of(session))


# -- blind ----------------------------------------------------------------------------------


def note_prompts(
    session: ChatSession, patch: pytest.MonkeyPatch, fed: list[Any], held: list[Any]
) -> None:
    """What each prompt reads, and what is held after it."""
    read = session.engine.prompt

    def prompt(ids: Any, *more: Any) -> Any:
        out = read(ids, *more)
        fed.append(list(ids))
        held.append([{*head} for head in held_of(session)])
        return out

    patch.setattr(session.engine, "prompt", prompt)


def test_blind_documents_are_judged_before_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays of the document is the same for any question, which costs as many rows as it
    brings: the policy's budget, and nothing on top."""
    kept = []
    for question in ("Who?", "What is the name of the river?"):
        session, fed, held = chat(reuse="blind"), list[list[int]](), list[list[set[int]]]()
        note_prompts(session, monkeypatch, fed, held)
        session.attach(MILL, "mill.txt")
        say(session, question, 1)
        document, rest = fed
        assert document[:2] == [BOS, USER]
        assert bytes(document[2:]).decode() == f"Document: mill.txt\n\n{MILL}\n\n"
        assert document + rest == session.template.opening(session.messages[:1])
        kept.append(held[0])
        left = [head & {*range(len(document))} for head in held[1]]
        assert all(now <= was for now, was in zip(left, held[0], strict=True))
        for layer in (0, 2):
            before, after, old = (sum(map(len, one[layer : layer + 2])) for one in (*held, left))
            assert (before, after) == (96, 96)
            assert before - old == after - old <= 2 * len(rest)
    assert kept[0] == kept[1]


def test_blind_says_that_no_question_shaped_the_cache() -> None:
    session = talked(chat(reuse="blind"), MILL, "Who?", "Why?")
    assert [r.shaped_by_turn for r in session.reports] == [0, 0]
    assert [r.reuse for r in session.reports] == ["blind", "once"]
    assert [r.loss.method for r in session.reports] == [UNKNOWN, UNKNOWN]
    assert session.reports[1].lines()[1].endswith("evicted before any question · not checked")
    assert "evicted for no question" in render.stats(session.reports[1])
    assert session.reports[0].warnings == session.reports[1].warnings == ()


def test_what_is_under_the_budget_is_evicted_for_no_question() -> None:
    session = talked(chat(reuse="blind", budget=600), MILL, "Who?")
    assert reported(session).shaped_by_turn is None


QUESTIONS = ["a", "7?", "and?", " a", "\nWhat?", "\n\n\nWhat?", "é", "中", "  \t7", "?", "\n"]


def cut(template: ChatTemplate, tokenizer: Tokenizer, document: str, question: str) -> None:
    """The parts are the prompt itself, the document is before the cut and the question after."""
    for before in ([], [Message("system", "be brief")] * (not template._folds)):
        messages = [*before, Message("user", document + question)]
        ids = template.opening(messages)

        found = plan.parts(ids, [(len(before), document)], template.opening, messages)
        assert [id for part in found for id in part] == ids
        first, rest = found
        shown, bare = tokenizer.decode(first).rstrip(), document.strip()
        # Nothing of the question comes before the cut. A full stop may come after it, in one token
        # with the line breaks behind it and those that the question begins with.
        assert shown.endswith(bare) or (question[0] == "\n" and shown.endswith(bare[:-1]))
        assert tokenizer.decode(rest).count(question.strip()) >= 1


@pytest.mark.parametrize("format", v.FORMATS)
def test_built_in_templates_are_cut_where_the_document_ends(tmp_path: Path, format: str) -> None:
    specials = {"llama-3": v.LLAMA_3, "chatml": v.CHATML}
    control = {"mistral-v3": "v3", "mistral-v7": "v7"}
    data: Any = control.get(format, "v1")
    if format in specials:
        data = v.byte_level_json(specials[format])
    tokenizer = Tokenizer.from_folder(v.write_folder(tmp_path, data))
    template = ChatTemplate.built_in(format, tokenizer)
    rng = random.Random(7)
    for question in QUESTIONS:
        text = " ".join(rng.choice(["river", "mill", "été", "7", "a"]) for _ in range(40))
        cut(template, tokenizer, f"Document: d.txt\n\n{text}.\n\n", question)
        cut(template, tokenizer, f"{text} end\n\n", question)


@pytest.fixture(scope="module")
def bundled() -> ChatSession:
    return minikv.load(budget=64)


def test_the_bundled_template_is_cut_where_the_document_ends(bundled: ChatSession) -> None:
    template: Any = bundled.template
    for question in QUESTIONS:
        cut(template, bundled.tokenizer, "Document: d\n\nVelgate exports salt.\n\n", question)  # type: ignore[arg-type]


def test_what_runs_have_in_common() -> None:
    assert shared([1, 2, 3], [1, 2, 4], [1, 2]) == shared([1, 2], [1, 2]) == 2
    assert shared([5], [6]) == shared([], [1]) == 0
    long = list(range(10_000))
    for at in (0, 1, 4095, 4096, 4097, 8191, 8192, 9999):
        other = [*long]
        other[at] = -1
        assert shared(long, tuple(long), other) == at
    assert shared(long, tuple(long[:8192])) == 8192


# -- auto -----------------------------------------------------------------------------------


def test_what_an_answer_from_another_questions_cache_says() -> None:
    """That it is one; and its loss is not known, as it is against all that was read."""
    session = talked(chat(), MILL, "Who?", "Why?", "And?")
    session.refresh()
    for question in ("Again?", "Last?"):
        say(session, question)
    assert [r.misses for r in session.reports] == [0, 1, 1, 0, 4]
    assert [len(r.lines()) for r in session.reports] == [2, 3, 3, 2, 3]
    assert "question 4" in session.reports[4].lines()[2]
    first, later, _, again, _ = (r.loss for r in session.reports)
    assert first.est_mass_lost_mean is not None
    assert (later.est_mass_lost_mean, later.method) == (None, UNKNOWN)
    assert later.est_mass_lost_max is later.est_mass_lost_argmax_layer is None
    assert again.method == "window"
    assert "not known: tokens were evicted before" in render.stats(session.reports[1])
    # Nothing leaves, so nothing hides the loss.
    whole = talked(chat(budget=2000), MILL, "Who?", "Why?")
    assert UNKNOWN not in [r.loss.method for r in whole.reports]


def test_a_saved_chat_keeps_the_setting() -> None:
    session = talked(chat(reuse="blind"), MILL, "Who?")
    with contextlib.closing(Keeper(Terminal())) as keeper:
        keeper.save(session, "one")
    for given, want in (((), "blind"), (("reuse",), "refresh")):
        other = chat(reuse="refresh")
        with contextlib.closing(Keeper(Terminal())) as keeper:
            keeper.load(other, "one", given=given)
            assert (other.reuse, other.evicted_for_turn) == (want, 0)
            assert other.report == session.report
            other.reuse = "auto"
            keeper.keep(other)
    assert read("one").facts["reuse"] == "auto"


# -- the command line -----------------------------------------------------------------------


def test_commands_in_a_chat(tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text("The mill is run by Ada. " * 20)
    typed = "/refresh|/set reuse|first|/refresh|second|/stats|/refresh now|/set reuse blind"
    typed += "|/set reuse never|third"
    flags = "--reuse once --policy adakv --budget 64 --max-tokens 4".split()
    called = ["chat", str(tmp_path / "report.txt"), *flags]
    done = CliRunner().invoke(app, called, input=typed.replace("|", "\n"))
    assert done.exit_code == 2  # of /refresh with nothing there
    err = " ".join(done.stderr.split())
    told = """there is nothing to read again
        reuse once --reuse
        your next question reads the documents and all that was said again
        refresh: the whole conversation was read again for this question
        tokens read again
        /refresh takes nothing
        reuse blind /set
        text read so far stays as it is; /clear reads it again, and evicts before any question
        reuse must be one of auto, recall, refresh, once, blind, got 'never'"""
    assert [line for line in map(str.strip, told.splitlines()) if line not in err] == []
    assert err.count("tokens read again") == 1


def test_reading_again_judges_by_the_last_question_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a recall does: otherwise the answer before it is in the window of queries."""
    session, asked = chat(reuse="refresh"), []
    read = session.engine.prompt

    def prompt(ids: list[int], progress: Any, room: int, asks: bool, last: int | None) -> Any:
        asked.append(ids if last is None else ids[-last:])
        return read(ids, progress, room, asks, last)

    monkeypatch.setattr(session.engine, "prompt", prompt)
    session.attach(MILL, "mill.txt")
    say(session, "Who?", 1)
    say(session, "Why?", 1)
    first, second = asked
    assert first == session.template.opening(session.messages[:1])
    text = bytes(id for id in second if id < 256)
    assert b"Why?" in text
    assert b"Who?" not in text
    assert second[-4:] == session.template.opening(session.messages[:3])[-4:]


@pytest.mark.parametrize(("tier", "reuse"), [("none", "auto"), ("ram", "auto"), ("none", "once")])
def test_after_a_lost_cache_it_is_known_how_much_is_read_again(tier: str, reuse: str) -> None:
    session = talked(
        lettered(EvictionConfig.read("adakv", budget=48), tier=tier, reuse=reuse), MILL, "Who?"
    )
    seen, written = len(session.fed), session.reports[0].tokens.generated
    session.engine.kv.discard()
    session.guard.change(lambda: None)
    again, answer = session.reads_again, written if tier == "ram" else 0
    assert abs(again + answer - (written if tier == "ram" else seen)) <= 1
    say(session, "Why?")
    assert abs(session.reports[1].tokens.prompt_reread - again - answer) <= 1
    said = f"{again:,} tokens read again" in session.reports[1].lines()[1]
    assert said == (tier == "none")

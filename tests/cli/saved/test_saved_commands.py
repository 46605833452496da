"""/undo, /retry, /save and /load as a person sees them."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine
from lettered import lettered
from pairwise import pairwise
from small_chat import chat, say
from tiers import recalling
from typed import context, fake_chat

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.transcript import TokenLog
from minikv.cli.chat.slash import Context
from minikv.cli.chat.turn import run_turn
from minikv.cli.saved import commands
from minikv.cli.saved.transcript import read
from minikv.cli.screen import render
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean
from minikv.cli.settings.config import SETTINGS
from minikv.errors import ContextError, Interrupted, UsageError
from minikv.settings import Generation

RUN = {word: command.run for command in commands.COMMANDS for word in command.words}


@dataclass
class Talk:
    """A chat with commands; what was printed since the last look."""

    session: ChatSession
    context: Context
    capsys: pytest.CaptureFixture[str]

    def ask(self, question: str) -> str:
        run_turn(
            self.session,
            question,
            self.context.generation,
            self.terminal(),
            self.context.interrupts,
        )
        return self.capsys.readouterr().out

    def terminal(self) -> Terminal:
        """With the streams of now: those of a fixture are closed when the test begins."""
        terminal = self.context.terminal
        terminal.out, terminal.err = sys.stdout, sys.stderr
        return terminal

    def run(self, line: str) -> tuple[str, str]:
        """What went to stdout and to stderr."""
        word, *arguments = line.split()
        self.terminal()
        RUN[word](self.context, arguments)
        captured = self.capsys.readouterr()
        return captured.out, captured.err

    def refused(self, line: str) -> str:
        before = self.session.messages, self.session.fed, self.session.eviction, self.session.seed
        with pytest.raises(UsageError) as error:
            self.run(line)
        assert before == (
            self.session.messages,
            self.session.fed,
            self.session.eviction,
            self.session.seed,
        )
        return f"{error.value}; {error.value.hint}"


def make(session: ChatSession, capsys: pytest.CaptureFixture[str], active: bool = True) -> Talk:
    return Talk(session, context(session, Terminal(), Generation(12), save=active), capsys)


@pytest.fixture
def talk(home: Path, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Over a fake, whose answers follow from every token that was fed."""
    return make(fake_chat(FakeEngine(), undo_turns=16), capsys)


@pytest.fixture
def real(home: Path, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Over a small random network and a real cache."""
    session = chat(undo_turns=16)
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    return make(session, capsys)


def test_undo_says_what_it_took_back(talk: Talk) -> None:
    talk.session.attach("text", "a.txt")
    first = talk.ask("Who\nruns   it?")
    talk.session.attach("more", "b.txt")
    talk.ask("Why? \x1b[31m" + "x" * 100)
    out, err = talk.run("undo 2")
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("took back: Why? [31mxxx")
    assert lines[0].endswith("…")
    assert len(lines[0]) <= 90
    assert lines[1] == "took back: Who runs it?"
    assert lines[2] == "  a.txt will be read with your next question"
    assert lines[3] == "  b.txt came later and went too; /add brings it back"
    assert talk.ask("Who\nruns   it?") == first
    _, err = talk.run("undo")
    assert err.splitlines()[1] == "  a.txt will be read with your next question"
    assert "there is no turn to take back" in talk.refused("undo")


def test_undo_without_a_copy_says_that_the_rest_is_read_again(talk: Talk) -> None:
    talk.session.undo_turns = 1
    for question in ("one", "two", "three"):
        talk.ask(question)
    assert "read" not in talk.run("undo")[1]
    assert "your next question reads the rest of the conversation again" in talk.run("undo")[1]
    _, err = talk.run("retry")
    assert "asking again: one" in err
    assert [turn.question for turn in talk.session.turns] == ["one"]


def test_retry_asks_the_last_question_that_was_not_taken_back(talk: Talk) -> None:
    first, second = talk.ask("one"), talk.ask("two")
    assert talk.run("retry")[0] == second
    talk.run("undo")
    assert talk.run("retry")[0] == first
    assert [turn.question for turn in talk.session.turns] == ["one"]
    assert talk.ask("two") == second
    talk.run("undo 2")
    assert "no question was read yet" in talk.refused("retry")


def test_retry_with_other_settings_is_for_one_answer(real: Talk) -> None:
    first = real.ask("Who?")
    fed, own = list(real.session.fed), real.session.eviction
    out, err = real.run("retry --policy streaming --budget=40")
    assert err.splitlines()[0].startswith("for this answer: streaming, then streaming · budget 40")
    assert "the next question reads all again, for the chat's own policy" in err
    assert real.session.eviction == own
    assert real.session.reports[-1].policy == "streaming"
    assert real.session.reports[-1].tokens.kept_max <= 41
    assert len(real.session.turns) == 1
    assert real.session.rereads
    out, err = real.run("retry")
    assert out == first
    assert real.session.fed == fed
    assert not real.session.rereads
    _, err = real.run("retry --seed 5")
    assert err.splitlines()[0].endswith("seed 5")
    assert real.session.reports[-1].seed == 5
    assert real.session.seed == 0


@pytest.mark.parametrize("reuse", ["once", "auto"])
def test_a_retry_with_another_policy_answers_as_that_policy_does(real: Talk, reuse: str) -> None:
    """On a later question the cache is the chat's own policy's: it is not what answers."""
    other = chat(policy="streaming", budget=40, reuse="refresh", undo_turns=16)
    other.attach("A mill stands by the river. " * 8, "mill.txt")
    real.session.reuse = reuse
    real.ask("Who?")
    real.ask("Why?")
    before = real.session.snapshot()
    other.restore(replace(before, held=None, said=replace(before.said, log=TokenLog())))
    other.undo()
    other.configure(EvictionConfig.read("streaming", budget=40))
    want = "".join(other.ask("Why?", real.context.generation.max_tokens))
    out, _ = real.run("retry --policy streaming --budget 40")
    assert out.rstrip("\n") == clean(want).rstrip("\n")
    record = real.session.reports[-1]
    assert (record.policy, record.reuse, record.misses) == ("streaming", "refresh", 0)
    # and the next question is answered by the chat's own policy, from a cache of its own
    real.ask("And?")
    record = real.session.reports[-1]
    assert (record.policy, record.reuse, record.misses) == ("adakv", "refresh", 0)


def test_where_settings_come_from_after_a_retry_and_a_load(real: Talk) -> None:
    origins = real.context.origins
    origins |= dict.fromkeys(SETTINGS, "default")
    real.ask("Who?")
    real.run("save mine")
    real.run("retry --policy streaming --seed 3")
    assert changed(origins) == {}
    origins["temperature"] = "--temperature"
    real.run("load mine")
    from_chat = dict.fromkeys(
        "policy decode budget stride seed reuse overflow system pin_system".split(), "chat mine"
    )
    assert changed(origins) == {**from_chat, "temperature": "--temperature"}


def test_what_a_run_took_from_the_chat_that_it_resumed(real: Talk) -> None:
    real.ask("Who?")
    real.run("save mine")
    saved = read("mine")
    held = {"policy", "decode", "budget", "stride"}
    own = {"seed", "system", "pin_system", "reuse", "overflow"}
    run = {"model", "revision", "dtype", "kv", "weights"}
    assert commands.origins_of(saved, ()) == dict.fromkeys(held | own | run, "chat mine")
    stated = set(commands.origins_of(saved, {"seed", "model"}))
    assert stated == (held | own | run) - {"seed", "model", "revision"}
    assert set(commands.origins_of(saved, {"budget"})) == (held | own | run) - {"budget"}
    assert set(commands.origins_of(saved, {"budget"}, reread=True)) == own | run


def changed(origins: dict[str, str]) -> dict[str, str]:
    return {name: origin for name, origin in origins.items() if origin != "default"}


def test_full_after_an_eviction_does_not_say_that_nothing_was(real: Talk) -> None:
    full, small = EvictionConfig.read("full"), EvictionConfig.read("streaming", budget=40)
    real.session.configure(full)
    first = real.ask("Who?")
    assert render.policy_line(real.session) == "full: nothing is evicted"
    real.session.configure(small)
    real.run("retry")  # by the policy of now
    assert real.session.reports[-1].policy == "streaming"
    real.session.configure(full)
    assert render.policy_line(real.session) == "full: nothing more is evicted"
    assert render.toolbar(real.session, 100).startswith("full: nothing more is evicted · ")
    assert real.run("retry")[0] == first
    real.session.reset()
    assert render.policy_line(real.session) == "full: nothing is evicted"


def test_a_seed_goes_to_a_policy_that_draws_unless_it_has_its_own(real: Talk) -> None:

    real.ask("Who?")
    real.run("retry --policy random --seed 3")
    assert real.session.reports[-1].policy_options["seed"] == 3
    real.session.configure(EvictionConfig.read("random", budget=48))
    real.run("retry --seed 4")
    assert real.session.reports[-1].policy_options["seed"] == 4
    own = EvictionConfig.read("random", budget=48, options={"seed": 9}, seed=4)
    real.session.configure(own)
    real.run("retry --seed 5")
    assert real.session.reports[-1].policy_options["seed"] == 9


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("undo x", "/undo takes a number"),
        ("undo 1 2", "/undo takes a number"),
        ("undo -1", "/undo takes a number"),
        ("undo ²", "/undo takes a number"),
        ("undo 0", "1 or more"),
        ("undo 2", "this chat has 1 turn"),
        ("retry --polcy x", "does not take '--polcy'"),
        ("retry adakv", "does not take 'adakv'"),
        ("retry --policy", "needs a value"),
        ("retry --policy nonsense", "nonsense"),
        ("retry --budget much", "the budget cannot be"),
        ("retry --budget 3", "too small"),
        ("retry --seed x", "--seed must be a whole number, got 'x'"),
        ("save a b", "/save takes one name"),
        ("save ../x", "cannot be the name"),
        ("load a b", "/load takes a name"),
        ("load --reread", "/load takes a name"),
        ("load --reread --reread x", "/load takes a name"),
        ("load nope", "no saved chat 'nope'"),
    ],
)
def test_what_cannot_be_done_changes_nothing(real: Talk, line: str, said: str) -> None:
    assert "no question was read yet" in real.refused("retry")
    real.ask("Who?")
    assert said in real.refused(line)
    assert len(real.session.turns) == 1


@pytest.mark.parametrize("error", [Interrupted, ContextError])
def test_a_retry_that_is_stopped_while_reading_says_how_to_go_on(
    talk: Talk, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = talk.ask("one")
    prompt = talk.session.engine.prompt

    def stopped(*how: Any) -> Any:
        if error is ContextError:
            raise ContextError("too long")
        talk.session.cancel()
        return prompt(*how)

    monkeypatch.setattr(talk.session.engine, "prompt", stopped)
    with pytest.raises(error):
        talk.run("retry")
    monkeypatch.setattr(talk.session.engine, "prompt", prompt)
    told = "the question is taken back; /retry asks it again" in talk.capsys.readouterr().err
    assert told or error is ContextError
    assert talk.run("retry")[0] == first


def test_save_and_load(real: Talk, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real.ask("Who?")
    _, err = real.run("save mine")
    assert err.startswith("saved as mine, and after every turn from now on: ")
    assert "minikv chat --resume mine" in err
    want = real.ask("Why?")
    keeper = real.context.keeper
    keeper.keep(real.session)
    real.run("undo")
    real.session.reset()
    real.ask("Something else")
    keeper.keep(real.session)
    _, err = real.run("load mine")
    lines = err.splitlines()
    assert lines[0].startswith("mine: 2 turns, resumed in ")
    assert lines[0].endswith(" ms; nothing was read again")
    assert lines[1] == "  adakv, then h2o · budget 48 tokens per head"
    assert lines[2] == "  mill.txt: 224 characters"
    assert lines[3] == "› Why?"
    assert clean(real.session.turns[-1].answer).rstrip("\n") == want.rstrip("\n")
    _, err = real.run("load mine --reread")
    assert "your next question reads it again" in err
    _, err = real.run("load")
    head, _, last = err.splitlines()
    assert head.split()[:3] == ["NAME", "TURNS", "AGE"]
    assert last.split()[:2] == ["mine", "2"]
    assert last.endswith("Who?")
    real.run("load mine")
    real.ask("And now?")
    _, err = real.run("undo 2")
    assert "your next question reads the rest of the conversation again" in err
    assert [turn.question for turn in real.session.turns] == ["Who?"]
    real.run("load mine")
    _, err = real.run("retry")
    assert "asking again: Why?" in err
    assert real.session.reports[-1].reuse == "refresh"


def test_without_saving(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    talk = make(chat(undo_turns=16), capsys, active=False)
    assert talk.run("load")[1] == f"no saved chat in {home}\n"
    talk.ask("Who?")
    talk.run("save mine")
    other = make(chat(), capsys, active=False)
    other.ask("not saved")
    with pytest.raises(UsageError, match="open in another"):
        other.run("load mine")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "tier", "reuse"),
    pairwise(
        ("adakv", "streaming", "full"),
        ("auto", "file", "none"),
        ("auto", "recall", "refresh", "once"),
    ),
)
def test_a_chat_that_is_opened_says_what_the_next_question_reads(
    policy: str, tier: str, reuse: str, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    """One thing, and that is what happens."""
    if reuse == "recall" and (tier == "none" or policy == "full"):
        return  # refused, or nothing to recall

    def started() -> Talk:
        eviction = EvictionConfig.read(policy, budget="48")
        return make(lettered(eviction, tier=tier, reuse=reuse), capsys)

    first = started()
    first.session.attach("A mill stands by the river. " * 8, "mill.txt")
    first.ask("Who?")
    first.run("save mine")
    if tier != "file":  # a tier in memory is not there in the next process
        shutil.rmtree(home / "mine" / "tier.kv", ignore_errors=True)
    first.context.keeper.close()
    first.session.recall.leave()
    second = started()
    _, err = second.run("load mine")
    seen = len(second.session.fed)
    said = next(line for line in err.splitlines() if line.startswith("mine: 1 turn, resumed in"))
    second.ask("Why?")
    assert second.session.report is not None
    read = second.session.report.tokens.prompt_new
    again = re.search(r"; your next question reads ([\d,]+) tokens again$", said)
    assert said.endswith("; nothing was read again") == (again is None)
    question = read - (int(again[1].replace(",", "")) if again else 0)
    assert 0 < question < 60 < seen
    second.session.recall.leave()


@pytest.mark.parametrize("kind", ["ram", "none"])
def test_reading_again_is_said_where_it_happens(kind: str) -> None:
    """As after /retry under another policy, which has the next question choose anew."""
    session = recalling(kind)
    session.attach("The mill is run by Ada. " * 8)
    say(session, "Who?")
    session.refresh()
    told, read = commands._read_again(session), len(session.fed)
    say(session, "When?")
    assert (told, session.report.reuse) == ((0, "recall") if kind == "ram" else (read, "refresh"))

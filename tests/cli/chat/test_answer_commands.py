"""/continue, /copy, /verify, /undo and /retry; chat -p and --json; ask --continue; --stop."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ggufs
import pytest
import torch
from checkpoints import Spec
from fakes import FakeEngine
from refusals import refused
from small_chat import chat, reported
from tables import table
from talk import Talk, make
from tiers import MILL, recalling
from typed import Tty, World, answer_of, context, fails, fake_chat, invoke, on_screen, said, screen

import minikv.cli.chat.turn
from minikv.chat.answer import Verification
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import AgainstFull
from minikv.chat.session import ChatSession
from minikv.chat.transcript import TokenLog
from minikv.cli.chat import answer_commands, slash_commands
from minikv.cli.chat.answer_commands import check, shown
from minikv.cli.failures import Interrupts
from minikv.cli.saved.database import ChatFile
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.transcript import read
from minikv.cli.screen import render
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean
from minikv.errors import ContextError, Interrupted
from minikv.models import BUNDLED

TEXT = "The mill is run by Ada."


def told(of: World | Talk) -> list[str]:
    """The questions of the last command's chat."""
    return [turn.question for turn in of.session.turns]


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# -- /continue ------------------------------------------------------------------------------
def test_continue_goes_on_with_the_answer(world: World, document: str) -> None:
    whole = answer_of(TEXT, "Who runs it?")
    result = world.ok("chat", document, "-n", "5", input="Who runs it?\n/continue\n/continue\n")
    assert result.stdout.splitlines() == [whole[:5], whole[5:10], whole[10:]]
    lines = [line for line in result.stderr.splitlines() if " tokens · " in line]
    assert [line.split()[0] for line in lines] == ["5", "10", "12"]
    assert "stopped by max_tokens" in lines[1]
    assert "stopped by" not in lines[2]
    assert [turn.answer for turn in world.session.turns] == [whole]
    result = world.run("chat", document, input="/continue\nWho runs it?\n/continue\n")
    none = "error: there is no answer to continue"
    fails(result, 2, none, "nothing to continue: the model ended its answer")
    assert len(result.stdout.splitlines()) == 1
    # In another process, too.
    world.run("chat", document, "-n", "3", input="Who runs it?\n/continue\n/save mine\n")
    result = world.ok("chat", "--resume=", "-n", "50", input="/continue\nAnd?\n")
    assert result.stdout.splitlines()[0] == whole[6:]
    assert world.session.turns[0].answer == whole
    assert whole in world.run("chats", "show", "mine").stdout


# -- /copy ----------------------------------------------------------------------------------
def test_copy_sends_the_answer_to_the_terminals_clipboard(world: World, document: str) -> None:
    session, terminal = fake_chat(), screen()
    answer = "".join(session.ask("Who runs it?"))
    terminal.err, terminal.plain = Tty(), False
    commands = {word: one for one in answer_commands.COMMANDS for word in one.words}
    commands["copy"].run(context(session, terminal), [])
    text = said(terminal)
    (sent,) = re.findall(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07", text)
    assert base64.b64decode(sent).decode() == answer
    assert re.search(f"sent {len(answer)} character.*to the terminal's clipboard", text)
    # Where it cannot, it says what to do.
    result = world.run("chat", document, input="/copy\nWho?\n/copy\n")
    none = "there is no answer to copy"
    fails(result, 2, none, "/copy needs a terminal", "/export FILE.html")
    assert "\x1b" not in result.output
    world.patch.setattr(answer_commands, "MOST", 3)
    result = world.run("chat", document, input="Who?\n/copy\n")
    assert "the answer has 12 bytes, and a terminal's clipboard takes about 3" in result.stderr


# -- chat -p and --json ---------------------------------------------------------------------
def test_a_first_question_is_asked_and_the_chat_stays(world: World, document: str) -> None:
    result = world.ok("chat", document, "-p", "Who runs it?", input="And why?\n")
    assert told(world) == ["Who runs it?", "And why?"]
    assert "› Who runs it?" in result.stderr
    world.ok("chat", "-p", "/help is a word", input="")  # without a document, too
    assert world.session.turns[0].question == "/help is a word"
    assert world.run("chat", document, "-p", " ").exit_code == 2


def test_json_is_a_record_per_turn_and_nothing_else(world: World, document: str) -> None:
    first = answer_of(TEXT, "Who runs it?")
    lines = "Who runs it?\n/stats\n/retry\n/set top_k 4\nAnd why?\n/continue\n"
    result = world.run("chat", document, "--json", input=lines)
    found = records(result.stdout)
    first_twice = [("Who runs it?", 1)] * 2  # the second one is of /retry
    assert [(one["question"], one["turn"]) for one in found] == [*first_twice, ("And why?", 2)]
    assert found[0]["answer"] == found[1]["answer"] == first
    assert found[0]["documents"] == ["report.txt"]
    assert found[0]["tokens"]["generated"] == 12
    assert found[2]["sampling"]["top_k"] == 4
    assert "\x1b" not in result.stdout
    # A question that failed has one, too.
    world.max_context = 120
    result = world.run("chat", document, "--json", input=f"Who?\n{'long ' * 40}\n/nosuch\nWhy?\n")
    first, failed, last = records(result.stdout)
    for one in (first, last):
        assert ("answer" in one, one.get("code")) == (True, None)
    assert ("answer" in failed, failed["code"], result.exit_code) == (False, 5, 5)
    assert failed["question"].startswith("long long")
    assert "tokens" in failed["error"]


# -- ask --continue -------------------------------------------------------------------------
def test_ask_goes_on_in_a_saved_chat(
    world: World, document: str, home: Path, tmp_path: Path
) -> None:
    world.run("chat", document, input="Who runs it?\nSince when?\nWhy?\n")
    (home / os.listdir(home)[0]).rename(home / "mine")
    for question, more in (("Since when?", ()), ("Why?", ("--json",))):
        result = world.ok("ask", "--chat", "mine", question, *more, input="")
        assert len(result.stdout.splitlines()) == 1  # the answer alone
    assert "in chat mine (4 turns)" in result.stderr
    assert told(world) == ["Who runs it?", *["Since when?", "Why?"] * 2]
    assert json.loads(result.stdout)["answer"] == world.session.turns[-1].answer
    assert "\n> Since when?\n" in world.run("chats", "show", "mine").stdout
    assert os.listdir(home) == ["mine"]
    other = tmp_path / "other.txt"
    other.write_text("And a second document.")
    world.run("ask", "--chat", "mine", "And that?", str(other))
    assert [d.name for d in world.session.documents] == ["report.txt", "other.txt"]


@table("""
    words                  | said
    --chat mine --continue | --continue means the chat of the last ask
    -c                     | there is no ask to continue
    -c --remember off      | with --remember off no ask is saved
    --chat nosuch          | no saved chat 'nosuch'
    --chat=                | cannot be the name of a chat
    --chat ../mine         | cannot be the name of a chat
""")
def test_ask_refuses_other_chats(world: World, words: str, said: str) -> None:
    result = world.run("ask", "Who?", *words.split(), input="")
    fails(result, 2, said)
    assert result.stdout == ""


def test_ask_that_fails_leaves_the_saved_chat(world: World, document: str, home: Path) -> None:
    world.run("ask", "Who runs it?", document)
    (file,) = home.glob("*/*")
    before = file.read_bytes()
    world.run("ask", "Who?", document, "--remember", "off")  # neither kept nor in its place
    world.max_context = 60
    for words in (("ask", "-c", "long " * 20, document), ("ask", "long " * 20, document)):
        assert world.run(*words).exit_code == 5
        assert {*home.glob("*/*")} <= {file, file.with_name("lock")}
        assert file.read_bytes() == before
    world.max_context = 4096
    file.write_bytes(before.replace(b"Who runs it?", b"Who turns it"))
    result = world.run("ask", "-c", "Since when?")
    removes = "`minikv chats rm last-ask` removes it"
    fails(result, 2, "chat last-ask is damaged: ", removes)
    assert (result.stdout, len(file.read_bytes())) == ("", len(before))
    world.ok("ask", "Who runs it?", document)  # another takes its place
    world.ok("ask", "-c", "Since when?")


def test_a_file_with_forms_of_its_own_is_continued(tmp_path: Path) -> None:
    """The form that a report shows is no value of --weights."""
    spec = Spec(hidden=256, heads=4, kv_heads=2, head_dim=64, vocab=320)
    path = ggufs.model(tmp_path, spec, {"attn_q": "Q4_0"})
    for words, piped in ((("Who?", "-m", str(path)), "A mill."), (("-c", "Where?"), "")):
        result = invoke("ask", *words, "-n", "4", input=piped)
        assert result.exit_code == 0, result.stderr


def test_the_last_ask_is_a_chat_of_its_own(world: World, document: str, home: Path) -> None:
    world.ok("ask", "Who runs it?", document)
    assert [oct(path.stat().st_mode & 0o777) for path in home.rglob("*")] == ["0o700", "0o600"]
    world.run("chat", document, input="Why?\n")
    result = world.run("ask", "-c", "Since when?", input="")
    assert told(world) == ["Who runs it?", "Since when?"]
    assert 'after "Who runs it?" (1 turn)' in result.stderr
    world.run("chat", "--resume=", input="So?\n")  # the last chat
    assert told(world) == ["Why?", "So?"]
    world.run("chat", "--resume", "last-ask", input="And?\n/save last-ask\n/fork last-ask\n")
    assert told(world) == ["Who runs it?", "Since when?", "And?"]
    assert len(os.listdir(home)) == 3  # it continues as a chat of its own
    with closing(ChatFile("last-ask", lock=True)):  # another -c at the same time
        result = world.run("ask", "-c", "Since when?", input="")
        fails(result, 2, "chat last-ask is open in another minikv")
        assert result.stdout == ""
        world.run("ask", "Where?", document)  # takes its place
    world.run("ask", "-c", "And where?", input="")
    assert told(world) == ["Where?", "And where?"]
    assert "last-ask" in world.run("chats").stdout
    world.run("chats", "rm", "last-ask", "--yes")
    assert world.run("ask", "-c", "Who?").exit_code == 2


def test_many_asks_at_once_leave_a_whole_one(home: Path) -> None:
    terminal, sessions = screen(), [fake_chat() for _ in range(8)]
    for session in sessions:
        list(session.ask("Who runs it?"))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda session: Keeper(terminal).keep_ask(session), sessions))
    assert said(terminal) == ""
    assert [path.name for path in home.rglob("*")] == ["last-ask", "chat.db"]
    assert [turn.question for turn in read("last-ask").turns] == ["Who runs it?"]


POLICIES = [f"--policy {name}" for name in "adakv streaming h2o kvzip full".split()]
LONG = "--policy adakv LONG"


@pytest.mark.parametrize("flags", [*POLICIES, "--budget 20% --reuse once", "--reuse recall", LONG])
def test_ask_continues_as_one_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    """The bundled model, and a document that is read again, or of which it is remembered what was
    read: the same rows and answers as in a chat."""
    made, real = list[ChatSession](), minikv.cli.chat.turn.build

    def build(*given: Any) -> ChatSession:
        made.append(real(*given))
        return made[-1]

    monkeypatch.setattr(minikv.cli.chat.turn, "build", build)
    text, path = (BUNDLED / "sample.txt").read_text(), tmp_path / "text.txt"
    path.write_text(text[: 12_000 if "LONG" in flags else 3_000])
    words = ["--budget", "64", *flags.removesuffix("LONG").split()]
    first, *later = "Who is the mayor?", "What does Halhart Works make?", "Where?"
    assert invoke("ask", first, str(path), *words).exit_code == 0
    for question in later:
        assert invoke("ask", "-c", question, input="").exit_code == 0
    lines = "\n".join([first, *later])
    assert invoke("chat", str(path), *words, "--remember", "off", input=lines).exit_code == 0
    *_, ask, chat = made
    assert [turn.answer for turn in ask.turns] == [turn.answer for turn in chat.turns]
    assert ask.fed == chat.fed
    shape = chat.engine.kv.shape
    for layer, head in itertools.product(range(shape.layers), range(shape.kv_heads)):
        assert torch.equal(ask.kept(layer, head), chat.kept(layer, head))
    new = ask.turns[1].report.tokens.prompt_new
    assert (new < 200) == ("LONG" in flags or "kvzip" in flags or "once" in flags)


# -- --stop ---------------------------------------------------------------------------------
def test_stop_ends_an_answer_of_ask_and_of_a_chat(world: World, document: str) -> None:
    whole = answer_of(TEXT, "Who runs it?")
    result = world.run("ask", "Who runs it?", document, "--stop", "#", "--stop", whole[4:6])
    assert result.stdout == whole[:4] + "\n"
    lines = f"Who runs it?\n/undo\n/set stop {whole[2:4]}\nWho runs it?\n"
    result = world.run("chat", document, "--stop", whole[4:6], input=lines)
    assert result.stdout.splitlines() == [whole[:4], whole[:2]]
    assert "stopped by a stop text" in result.stderr
    # Those of a command line may name a new line.
    world.writes("one\ntwo\\three")
    assert world.run("ask", "Who?", document, "--stop", r"\n").stdout == "one\n"
    assert world.run("ask", "Who?", document, "--stop", r"\\").stdout == "one\ntwo\n"
    fails(world.run("ask", "Who?", document, "--stop", ""), 2, "must not have an empty text")


# -- `/verify` and `--check` -----------------------------------------------------------------
PARTS, LATER, SAME = 48, 300, 320
"""Budgets under which the answer to "Who?" is another after 1 token, after 11 and not at all."""


def asked(**given: Any) -> ChatSession:
    session = recalling(**given)
    session.attach(MILL)
    list(session.ask("Who?", 12))
    return session


def verified(session: ChatSession, line: str = "/verify") -> None:
    slash_commands.execute(context(session, Terminal()), line)


def checked(session: ChatSession, capsys: pytest.CaptureFixture[str]) -> str:
    check(session, Terminal(), Interrupts())
    return capsys.readouterr().err


def test_the_same_answer_is_one_line_others_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing was evicted, nothing is written again."""
    verified(asked(budget=SAME))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("the same: all 12 tokens, each written from all that was read")
    assert err.count("\n") == 1
    session = asked()
    verified(session)
    err = capsys.readouterr().err
    assert re.search("(?s)the answer:\n.*from all that was read:\n", err)
    assert f"the same: {session.verified.same} token" in err
    assert all(char.isprintable() or char == "\n" for char in err)
    session = asked(budget=1000)
    monkeypatch.setattr(session, "verify", lambda **given: [][0])
    verified(session)
    assert capsys.readouterr().err == "as without eviction: nothing was evicted\n"
    assert checked(session, capsys) == ""


@pytest.mark.parametrize("width", [50, 80, 120])
def test_it_fits_the_screen_and_shows_no_control_characters(width: int) -> None:
    found = Verification((1, 2), "\x1b[31mred " * 40, 3, True, "\x1b[2J blue", None, True, 1.0)
    lines = on_screen(shown("中文 " * 60, found), width)
    assert "\x1b" not in "".join(lines)
    assert "and from all that was read it is its end" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("budget", [PARTS, SAME])
def test_ctrl_c_stops_it_and_the_chat_is_as_it_was(
    budget: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = asked(budget=budget)
    fed, report, turns = list(session.fed), reported(session), len(session.turns)
    forward, steps = session.engine.network.forward, 0

    def pressed(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*args)

    monkeypatch.setattr(session.engine.network, "forward", pressed)
    stopped = refused("stopped verifying", verified, session, error=Interrupted)
    assert stopped.hint == "the chat is as it was"
    assert ("the answer:" in capsys.readouterr().err) == (budget == PARTS)
    assert reported(session).against_full.checked == (budget == PARTS)
    still = replace(reported(session), against_full=report.against_full)
    assert (session.fed, still, len(session.turns)) == (fed, report, turns)


@pytest.mark.parametrize(
    ("budget", "words", "known"),
    [
        (PARTS, "differs from the full cache after 1 token", (False, True, 1)),
        (LATER, "differs from the full cache after 11 tokens", (False, True, 11)),
        (SAME, "as without eviction (checked)", (True, True, None)),
    ],
)
def test_check_says_which_it_was_and_puts_it_into_the_record(
    budget: int, words: str, known: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    session = asked(budget=budget)
    assert reported(session).against_full.words == "not checked"
    assert checked(session, capsys) == f"  {words}\n"
    assert session.report.against_full == AgainstFull(*known)
    assert session.turns[-1].report is session.report
    assert checked(session, capsys) == ""  # it is known now


@pytest.mark.parametrize("budget", [LATER, SAME])
@pytest.mark.parametrize("by", ["key", "ctrl-c"])
def test_check_stops_when_something_is_typed(
    budget: int, by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, terminal, steps = asked(budget=budget), Terminal(), 0
    before = session.report

    def typed() -> bool:
        nonlocal steps
        steps += 1
        if steps == 3 and by == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        return steps == 3 and by == "key"

    monkeypatch.setattr(terminal, "keyboard", SimpleNamespace(waiting=typed))
    check(session, terminal, Interrupts())
    assert (steps, len(session.verified.tokens), session.report) == (3, 3, before)
    assert capsys.readouterr().err == ""


def test_check_without_a_tier_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    session = asked(reuse="once")
    assert re.fullmatch(".*no tier.*\n", checked(session, capsys))
    assert reported(session).against_full.words == "not checked"
    assert checked(recalling(), capsys) == ""  # no answer yet
    # /verify refuses in a line.
    refused("no answer to verify", verified, recalling())
    refused("takes nothing", verified, asked(), "/verify all")
    refused("no tier", verified, asked(reuse="once"))


# -- /undo and /retry as a person sees them ---------------------------------------------------
@pytest.fixture
def talk(home: Path, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Over a fake, whose answers follow from every token that was fed."""
    return make(fake_chat(FakeEngine()), capsys)


def test_undo_says_what_it_took_back(talk: Talk) -> None:
    talk.session.attach("text", "a.txt")
    first = talk.ask("Who\nruns   it?")
    talk.session.attach("more", "b.txt")
    talk.ask("Why? \x1b[31m" + "x" * 100)
    out, err = talk.run("undo 2")
    assert out == ""
    cut, *lines = err.splitlines()
    assert re.fullmatch(r"undone: Why\? \[31mxxx.*…", cut)
    assert len(cut) <= 90
    again = "  a.txt will be read with your next question"
    later = "  b.txt came later and went too; /add brings it back"
    assert lines[:3] == ["undone: Who runs it?", again, later]
    assert talk.ask("Who\nruns   it?") == first
    assert talk.run("undo")[1].splitlines()[1] == again
    assert "there is no turn to undo" in talk.refused("undo")


def test_retry_asks_the_last_question_that_was_not_taken_back(talk: Talk, real: Talk) -> None:
    """It reads the rest again where something was evicted; otherwise the cache is cut."""
    first, second = talk.ask("one"), talk.ask("two")
    assert talk.run("retry")[0] == second
    talk.run("undo")
    assert talk.run("retry")[0] == first
    assert told(talk) == ["one"]
    assert talk.ask("two") == second
    talk.run("undo 2")
    assert "all questions were undone" in talk.refused("retry")
    for each in (talk, real):
        for question in ("one", "two", "three"):
            each.ask(question)
        said = "your next question reads the rest of the conversation again"
        assert (said in each.run("undo")[1]) == (each is real)
        assert "asking again: two" in each.run("retry")[1]
        assert told(each) == ["one", "two"]


def test_retry_with_other_settings_is_for_one_answer(real: Talk) -> None:
    """A seed goes to a policy that draws unless it has its own."""
    first = real.ask("Who?")
    fed, own = list(real.session.fed), real.session.eviction
    _, err = real.run("retry --policy streaming --budget=40")
    assert err.splitlines()[0].startswith("for this answer: streaming, then streaming · budget 40")
    assert "the next question reads all again, for the chat's own policy" in err
    (turn,) = real.session.turns
    assert (real.session.eviction, real.session.rereads) == (own, True)
    assert (turn.report.policy, turn.report.tokens.kept_max <= 41) == ("streaming", True)
    out, _ = real.run("retry")
    assert (out, real.session.fed, real.session.rereads) == (first, fed, False)
    _, err = real.run("retry --seed 5")
    assert err.splitlines()[0].endswith("seed 5")
    assert (real.session.reports[-1].seed, real.session.seed) == (5, 0)
    for own_settings, line, seed in (
        (None, "retry --policy random --seed 3", 3),
        ({}, "retry --seed 4", 4),
        ({"options": {"seed": 9}, "seed": 4}, "retry --seed 5", 9),
    ):
        if own_settings is not None:
            real.session.configure(EvictionConfig.read("random", budget=48, **own_settings))
        real.run(line)
        assert real.session.reports[-1].policy_options["seed"] == seed


@pytest.mark.parametrize("reuse", ["once", "auto"])
def test_a_retry_with_another_policy_answers_as_that_policy_does(real: Talk, reuse: str) -> None:
    """On a later question the cache is the chat's own policy's: it is not what answers."""
    other = chat(policy="streaming", budget=40, reuse="refresh")
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
    # And the next question is answered by the chat's own policy, from a cache of its own.
    retried = real.session.reports[-1]
    real.ask("And?")
    for record, policy in ((retried, "streaming"), (real.session.reports[-1], "adakv")):
        assert (record.policy, record.reuse, record.misses) == (policy, "refresh", 0)


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


@table("""
    line                    | said
    undo x                  | /undo takes a number
    undo 1 2                | /undo takes a number
    undo -1                 | /undo takes a number
    undo ²                  | /undo takes a number
    undo 0                  | 1 or more
    undo 2                  | this chat has 1 turn
    retry --polcy x         | does not take '--polcy'
    retry adakv             | does not take 'adakv'
    retry --policy          | needs a value
    retry --policy nonsense | nonsense
    retry --budget much     | the budget cannot be
    retry --budget 3        | too small
    retry --seed x          | --seed must be a whole number, got 'x'
    save a b                | /save takes one name
    save ../x               | cannot be the name
    load a b                | /load takes a name
    load --reread           | /load takes a name
    load --reread --reread x | /load takes a name
    load nope               | no saved chat 'nope'
""")
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
    told = "the question is undone; /retry asks it again" in talk.capsys.readouterr().err
    assert told or error is ContextError
    assert talk.run("retry")[0] == first

"""/save, /fork and /load as a person sees them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from lettered import lettered
from pairwise import pairwise
from refusals import refused
from small_chat import chat, reported, say
from talk import Talk, make
from tiers import recalling

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.saved import commands
from minikv.cli.saved.transcript import read
from minikv.cli.screen.text import clean
from minikv.cli.settings.config import SETTINGS


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
    session = real.session
    assert commands.origins_of(session, saved, ()) == dict.fromkeys(held | own | run, "chat mine")
    stated = set(commands.origins_of(session, saved, {"seed", "model"}))
    assert stated == (held | own | run) - {"seed", "model", "revision"}
    for name in ("budget", "policy"):
        assert {*commands.origins_of(session, saved, {name})} == (held | own | run) - {name}
        session.configure(EvictionConfig.read("snapkv", budget=48))


def changed(origins: dict[str, str]) -> dict[str, str]:
    return {name: origin for name, origin in origins.items() if origin != "default"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("save a b", "/save takes one name"),
        ("save ../x", "cannot be the name"),
        ("load a b", "/load takes a name"),
        ("load --reread", "/load takes a name"),
        ("load --reread --reread x", "/load takes a name"),
        ("load nope", "no saved chat 'nope'"),
    ],
)
def test_what_cannot_be_done_changes_nothing(real: Talk, line: str, said: str) -> None:
    real.ask("Who?")
    assert said in real.refused(line)
    assert len(real.session.turns) == 1


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
    first, *lines = err.splitlines()
    assert first.startswith("mine: 2 turns, resumed in ")
    assert first.endswith(" ms; nothing was read again")
    policy = "  adakv, then h2o · budget 48 tokens per head"
    assert lines[:3] == [policy, "  mill.txt: 224 characters", "› Why?"]
    assert clean(real.session.turns[-1].answer).rstrip("\n") == want.rstrip("\n")
    assert "your next question reads it again" in real.run("load mine --reread")[1]
    _, err = real.run("load")
    head, _, last = err.splitlines()
    assert head.split()[:3] == ["NAME", "TURNS", "AGE"]
    assert last.split()[:2] == ["mine", "2"]
    assert last.endswith("Who?")
    real.run("load mine")
    real.ask("And now?")
    rest = "your next question reads the rest of the conversation again"
    assert rest in real.run("undo 2")[1]
    assert [turn.question for turn in real.session.turns] == ["Who?"]
    real.run("load mine")
    assert "asking again: Why?" in real.run("retry")[1]
    assert real.session.reports[-1].reuse == "refresh"


def test_without_saving(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    talk = make(chat(), capsys, active=False)
    assert talk.run("load")[1] == f"no saved chat in {home}\n"
    talk.ask("Who?")
    talk.context.keeper.keep(talk.session)
    assert not home.exists()
    talk.run("save mine")
    talk.ask("Why?")
    talk.context.keeper.keep(talk.session)
    assert len(read("mine").turns) == 2
    other = make(chat(), capsys, active=False)
    other.ask("not saved")
    refused("open in another", other.run, "load mine")
    assert not capsys.readouterr().err


POLICIES = ("adakv", "streaming", "full")


@pytest.mark.parametrize(
    ("policy", "tier", "reuse"),
    pairwise(POLICIES, ("auto", "file", "none"), ("auto", "recall", "refresh", "once")),
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
    read = reported(second.session).tokens.prompt_new
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
    told, read = session.reads_again, len(session.fed)
    say(session, "When?")
    assert (told, session.report.reuse) == ((0, "recall") if kind == "ram" else (read, "refresh"))

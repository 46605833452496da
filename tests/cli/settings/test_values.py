"""What Tab offers in a chat, and what a shell is offered; what the runtime says in Python becomes
what is typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import python
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from small_chat import chat

from minikv.chat.session import ChatSession
from minikv.cli.chat import slash_commands
from minikv.cli.chat.command import _help
from minikv.cli.chat.slash import Command
from minikv.cli.failures import explain
from minikv.cli.paths import chats_folder
from minikv.cli.screen.editor import Commands
from minikv.cli.settings.config import SETTINGS, worded
from minikv.errors import UsageError
from minikv.policies import prompt_names, step_names

Offers = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def session() -> ChatSession:
    made = chat()
    made.attach("text", "my report (1).txt")
    return made


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file, and a home with a saved chat, as far as a list reads it."""
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").write_text("x")
    folder = chats_folder() / "thesis"
    folder.mkdir(parents=True)
    (folder / "chat.jsonl").write_text('{"turns": 1, "title": "q", "identity": {"model": "m"}}\n')
    return tmp_path


@pytest.fixture
def tab(session: ChatSession, saved: Path) -> Offers:
    """What Tab puts in for the last word of a line; for a path, behind it."""
    offers, event = Commands(_help(session)).get_completions, CompleteEvent()
    return lambda line: [one.text for one in offers(Document(line), event)]


def test_chats_settings_and_their_values(tab: Offers) -> None:
    assert {"reuse", "policy", "temperature"} <= {*tab("/set ")}
    assert "h2o+ada" in tab("/policy h2o+a")
    assert "h2o" not in tab("/compare h2o ")
    assert "64MiB" in tab("/retry --budget ")
    assert {"512", "20%", "64MiB"} <= {*tab("/set budget ")}
    assert "kept" in tab("/help k")
    offers = {
        "/load ": ["thesis"],  # not the file
        "/load thesis --": ["--reread"],
        "/set reus": ["reuse"],
        "/set reuse ": [*SETTINGS["reuse"].choices],
        "/set quiet ": ["on", "off"],
        "/set policy snap": ["snapkv"],
        "/set decode ": ["auto", *step_names()],
        "/policy ": prompt_names(),
        "/policy snapkv win": ["window="],
        "/policy snapkv decode=ro": ["decode=roco"],
        "/compare ": [*prompt_names(), "budget="],
        "/compare h2o budget=5": ["budget=512"],
        "/retry --": ["--policy", "--budget", "--seed"],
        "/retry --policy stream": ["streaming"],
        "/retry --policy streaming --": ["--budget", "--seed"],
        "/kept ": ["all", "find"],
        "/drop ": ["my\\ report\\ (1).txt"],
        "/drop my\\ r": ["my\\ report\\ (1).txt"],
        "/add thes": ["is.txt"],
        "/export thes": ["is.txt"],
        "/export --": ["--force"],
    }
    none = ("set reuse once", "set model", "set top_p", "retry --seed", "none", "stats")
    offers |= {f"/{line} ": [] for line in none}
    assert {line: tab(line) for line in offers} == offers


@pytest.mark.parametrize("command", slash_commands.COMMANDS, ids=lambda command: command.words[0])
def test_every_command_that_takes_words_of_ours_offers_them(tab: Offers, command: Command) -> None:
    """What a command's usage writes in small letters, Tab offers."""
    words = re.findall(r"(?<![\w\"=.])(?:--)?[a-z]{3,}", command.takes.split("FILE")[0])
    offered = [*tab(f"/{command.words[0]} "), *tab(f"/{command.words[0]} --")]
    assert {*words} - {"option", "value"} <= {one.rstrip("=") for one in offered}


# -- the shell ------------------------------------------------------------------------------
ALL = """
import contextlib, io, json, os, sys
from minikv.cli.__main__ import run
os.environ["_MINIKV_COMPLETE"], sys.argv, found = "complete_bash", ["minikv"], []
for line in json.load(sys.stdin):
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        run()
    found.append([said.getvalue().split(), [*sys.modules]])
print(json.dumps(found))
"""


def test_the_shell_completes_values_without_torch(saved: Path) -> None:
    """What bash is offered for the last word of each line. Only the options of a policy need torch:
    they are in the policy's file, which imports it."""
    (saved / "minikv.toml").write_text('[aliases]\nbigger = "some/model"\n')
    lines = {
        "chat --policy ": prompt_names(),
        "chat --policy h2o+ad": ["h2o+ada"],
        "ask q --decode ro": ["roco"],
        "chat --budget 5": ["512"],
        "chat --resume ": ["thesis"],
        "chats show ": ["thesis"],
        "chats rm th": ["thesis"],
        "chat --reuse o": ["once"],
        "eval --policy adakv,snap": ["adakv,snapkv"],
        "eval --tasks facts,nee": ["facts,needle"],
        "chat -m big": ["bigger"],
        "chat the": [],  # left to the shell, which knows files
        "chat --policy snapkv -o win": ["window="],
    }
    done = python("-c", ALL, input=json.dumps([f"minikv {line}" for line in lines]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {line: said for line, (said, _) in zip(lines, found, strict=True)} == lines
    *others, (_, loaded) = found
    assert {"minikv.cli.settings.flags", "torch"} <= {*loaded}
    for _, loaded in others:
        assert not {*loaded} & {"torch", "numpy", "transformers", "huggingface_hub"}


# -- what the runtime says in python is shown as it is typed ---------------------------------
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('try `dtype="float32"`', "try --dtype float32"),
        ('`dtype="auto", weights="int4+head"` fits', "--dtype auto --weights int4+head fits"),
        ("run without `offline=True` once", "run without --offline once"),
        ("`max_tokens` must be 1", "--max-tokens must be 1"),
        ("a larger `budget` or less", "a larger --budget or less"),
        ("start anew with `chat.reset()`", "start anew with /reset"),
        ("`chat.undo(2)` works", "/undo 2 works"),
        ('`chat.reuse = "once"` turns it off', "/set reuse once turns it off"),
        ("log in with `hf auth login`", "log in with `hf auth login`"),
        ("`minikv ask -` reads", "`minikv ask -` reads"),
        ("`nonsense=3` and `budgt`", "`nonsense=3` and `budgt`"),
        ("no code at all", "no code at all"),
    ],
)
def test_python_becomes_flags_and_commands(text: str, shown: str) -> None:
    assert worded(text) == shown


def test_errors_and_hints_are_reworded() -> None:
    error = UsageError("`top_p` is wrong", 'use `device="cpu"`; `policy` takes: h2o')
    for talking, flag, policy in ((False, "--top-p", "--policy"), (True, "/set top_p", "/policy")):
        made = explain(error, chat=talking)
        hint = f"use --device cpu; {policy} takes: h2o"
        assert (made.message, made.hint) == (f"{flag} is wrong", hint)

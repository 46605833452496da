"""A turn is a transaction, and so is every other operation of a chat: whatever fails in it, once
or from then on, cache and transcript agree, and what follows is that of a chat in which nothing
failed; or, where a step failed, of one that reads the conversation again.

As SQLite does it: the first call of a kind fails, then the second, until a run ends without one."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import KINDS, Fault, failing
from test_machine import Setting, eviction, facts, stopped_before_writing
from whole import whole

from minikv import policies
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.transcript import read
from minikv.cli.terminal import Terminal

STORY = "a story of a crane and a tiger, told twice. " * 2
MORE = "the river is slow and brown. " * 3
WRITTEN = 4

CASES: dict[str, Setting] = {
    **{name: Setting(eviction((name, "auto"), 48)) for name in policies.prompt_names()},
    **{f"full, {name}": Setting(eviction(("full", name), 48)) for name in policies.step_names()},
    "in blocks": Setting(EvictionConfig.read("roco", budget=96, stride=16)),
    "int8": Setting(eviction(("adakv", "scissorhands"), 48), kv=torch.int8),
    "soft pins": Setting(eviction(("snapkv+turns", "tova"), 48)),
    "windows": Setting(eviction(("adakv", "auto"), 48), windows=(None, 40)),
    "pinned": Setting(eviction(("adakv", "auto"), 60), system="Be brief.", pin_system=True),
    "a share": Setting(eviction(("adakv", "auto"), "60%")),
    "read again": Setting(eviction(("adakv", "auto"), 48), reuse="refresh"),
    "two prompts": Setting(eviction(("adakv", "auto"), 48), reuse="blind"),
    "ram": Setting(eviction(("adakv", "auto"), 48), "ram", reuse="auto"),
    "ram, int8": Setting(eviction(("adakv", "auto"), 48), "ram", "int8", reuse="auto"),
    "ram, snapkv": Setting(eviction(("snapkv", "h2o"), 64), "ram", reuse="auto"),
    "file": Setting(eviction(("adakv", "auto"), 48), "file", reuse="auto"),
    "file, kvzip": Setting(eviction(("kvzip", "auto"), 48), "file", reuse="auto"),
    "file, l2": Setting(eviction(("snapkv", "l2"), 48), "file", reuse="auto"),
}


@dataclass
class Chat:
    """A chat with its keeper. `answer`: the pieces of the operation's answer, as they came."""

    setting: Setting
    every: int = 0
    pieces: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = self.setting.chat()
        self.session.refresh_every = self.every
        terminal = Terminal(quiet=True)
        self.told: list[str] = []
        terminal.warn = self.told.append  # type: ignore[method-assign, assignment]
        self.keeper = Keeper(terminal)
        self.keeper.attend(self.session)
        self.session.attach(STORY, "story.txt")

    def ask(self, question: str, tokens: int = WRITTEN, temperature: float = 0.0) -> None:
        self.pieces = []
        for piece in self.session.ask(question, tokens, temperature):
            self.pieces.append(piece)

    def close(self) -> None:
        self.session.recall.leave()
        self.keeper.close()


def first(chat: Chat) -> None:
    """One turn."""
    chat.ask("what is in it?")


def two(chat: Chat) -> None:
    """Two turns, the second with a document of its own."""
    first(chat)
    chat.session.attach(MORE, "more.txt")
    chat.ask("and then?", temperature=0.8)


def stored(chat: Chat) -> None:
    """Two turns; the first was saved."""
    first(chat)
    chat.keeper.save(chat.session, "one")
    chat.ask("and then?")


def nothing(chat: Chat) -> None:
    """A new chat."""


def ask(chat: Chat) -> None:
    chat.ask("and now, what?", temperature=0.8)


def go_on(chat: Chat) -> None:
    chat.pieces = []
    for piece in chat.session.continue_answer(3, 0.8):
        chat.pieces.append(piece)


def undo(chat: Chat) -> None:
    chat.session.undo()


def undo_under_another_policy(chat: Chat) -> None:
    chat.session.undo(2)


def configured(chat: Chat) -> None:
    two(chat)
    chat.session.configure(eviction(("l2", "l2"), 40))


def retry(chat: Chat) -> None:
    question = chat.session.turns[-1].question
    if len(chat.session.turns) == 2:  # else it was taken back, and the asking failed
        chat.session.undo()
    chat.ask(question)


def reset(chat: Chat) -> None:
    chat.session.reset(keep_documents=True)


def configure(chat: Chat) -> None:
    chat.session.configure(eviction(("snapkv", "h2o"), 64))


def attach(chat: Chat) -> None:
    chat.session.attach(MORE, "more.txt")


def snapshot(chat: Chat) -> None:
    session = chat.session
    session.restore(session.snapshot())


def save(chat: Chat) -> None:
    chat.keeper.save(chat.session, "two")


def fork(chat: Chat) -> None:
    chat.keeper.fork(chat.session, "two")


def keep(chat: Chat) -> None:
    """As after every turn, in which a failure is a warning."""
    chat.keeper.keep(chat.session)


def load(chat: Chat) -> None:
    chat.keeper.load(chat.session, "one")


Step = Callable[[Chat], None]
OPERATIONS: list[tuple[str, Step, Step]] = [
    ("first turn", nothing, ask),
    ("second turn", first, ask),
    ("third turn", two, ask),
    ("continue", first, go_on),
    ("undo", two, undo),
    ("undo under another policy", configured, undo_under_another_policy),
    ("retry", two, retry),
    ("reset", two, reset),
    ("configure", two, configure),
    ("attach", first, attach),
    ("snapshot", two, snapshot),
    ("save", two, save),
    ("fork", stored, fork),
    ("keep", stored, keep),
    ("load", stored, load),
]


SAMPLED = [each for each in OPERATIONS if each[0] not in ("attach", "reset", "continue")]
"""Those in which much can fail."""


class Reference:
    """What chats in which nothing failed are after an operation, and after the next question: one
    in which it was not begun, one in which it ended, and those in which its answer was stopped
    after so many tokens; with the cache, or without it."""

    def __init__(self, setting: Setting, setup: Step, step: Step, every: int = 0) -> None:
        self.setting, self.setup, self.step, self.every = setting, setup, step, every
        self._made: dict[object, list[dict[str, Any]]] = {}

    def made(self) -> Chat:
        """A chat as it is before the operation."""
        chat = Chat(self.setting, self.every)
        self.setup(chat)
        chat.pieces = []
        return chat

    def of(self, what: object, *, lost: bool) -> list[dict[str, Any]]:
        key = what, lost
        if key not in self._made:
            with a_home():
                chat = self.made()
                _apply(chat, self.step, what)
                if lost:
                    chat.session.engine.kv.drop()
                    chat.session._settle()
                found = [facts(chat.session)]
                chat.ask("the last one?", 3)
                self._made[key] = [*found, facts(chat.session)]
                chat.close()
        return self._made[key]


def _apply(chat: Chat, step: Step, what: object) -> None:
    session, temperature = chat.session, 0.8
    if what == "done":
        step(chat)
    elif what == "undone":
        session.undo()
    elif isinstance(what, tuple):
        question, temperature, undone, tokens, dropped = what
        if undone:
            session.undo()
        if question is None:
            if tokens:
                "".join(session.continue_answer(tokens, temperature))
        elif tokens:
            chat.ask(question, tokens, temperature)
        else:
            stopped_before_writing(session, question, temperature)
        if dropped:  # one that was drawn and lost does not belong to the answer
            session._log.pending = None
            last = session.turns[-1]
            text = last.answer[:-1]
            tokens_of = replace(last.report.tokens, generated=last.report.tokens.generated - 1)
            report = replace(last.report, tokens=tokens_of)
            session.turns[-1] = replace(last, answer=text, report=report)
            session.messages[-1] = replace(session.messages[-1], content=text)
    else:
        assert what == "not begun"


@contextlib.contextmanager
def a_home() -> Iterator[Path]:
    """A home of its own."""
    before = os.environ["MINIKV_HOME"]
    home = Path(tempfile.mkdtemp(dir=before))
    os.environ["MINIKV_HOME"] = str(home)
    try:
        yield home
    finally:
        os.environ["MINIKV_HOME"] = before
        shutil.rmtree(home)


def faults(reference: Reference, coming: Iterator[Fault], chain: int = 1) -> int | None:
    """Put a fault into the operation, and look at the chat after it and after the next question;
    how many came, None if there are no more. As long as nothing was begun, the chat has up to
    `chain` faults before that question, one after the other."""
    came: list[Fault] = []
    fault = next(coming, None)
    if fault is None:
        return None
    with a_home() as home:
        chat = reference.made()
        try:
            session, before = chat.session, facts(chat.session)
            what: object = "not begun"
            while fault is not None and what == "not begun":
                chat.pieces, raised = [], None
                try:
                    with failing(session, fault):
                        reference.step(chat)
                except Exception as error:
                    raised = error
                came += [fault] * fault.fired
                lost = bool(session.turns) and not session._log.seen
                what = outcome(reference, chat, before, raised, fault, lost)
                whole(session)
                tidy(home)
                alike(chat, reference.of(what, lost=lost)[0])
                fault = next(coming, None) if len(came) < chain and what == "not begun" else None
            chat.ask("the last one?", 3)
            whole(session)
            alike(chat, reference.of(what, lost=lost)[1])
        except BaseException as error:
            error.add_note(f"after {[(f.kind, f.at, f.lasting) for f in came]}")
            raise
        finally:
            chat.close()
    return len(came)


def outcome(
    reference: Reference,
    chat: Chat,
    before: dict[str, Any],
    raised: Exception | None,
    fault: Fault,
    lost: bool,
) -> object:
    """Of which chat without a fault this one must be the same. lost: a step failed."""
    session, step = chat.session, reference.step
    if raised is None:
        return "done"
    dropped = bool(session.turns) and session.pending_token is None and not lost
    if step is go_on:
        grown = len(chat.pieces)
        if dropped and session.report.stop_reason == "error":
            return None, 0.8, False, grown + 1, True
        return (None, 0.8, False, grown, False) if grown else "not begun"
    asks = step in (ask, retry)
    if step is retry and session.turn < before["turn"]:
        return "undone"
    grown = session.turn - before["turn"] + (step is retry)
    if asks and grown == 1 and facts(session) != before:
        report = session.report
        assert report is not None
        dropped &= report.stop_reason == "error" and report.tokens.generated > 0
        question = session.turns[-1].question
        temperature = 0.8 if step is ask else 0.0
        tokens = report.tokens.generated + dropped
        return question, temperature, step is retry, tokens, dropped
    return "not begun"


def alike(chat: Chat, want: dict[str, Any]) -> None:
    """The chat is as this one, unless it is now without its tier."""
    if without_tier(chat):
        return
    found = facts(chat.session)
    for name, value in want.items():
        if name != "evicted":  # a figure of the record, which is not counted without memory
            assert found[name] == value, name


def without_tier(chat: Chat) -> bool:
    """The user was told that the tier, or a saved cache, cannot be used: then more is read again,
    and what was read is the same but for the order in which sums are made."""
    report = chat.session.report
    lines = [*chat.told, *(report.warnings if report else ())]
    said = [re.sub(r"\S*\.tier-\S*", "", line) for line in lines]  # the name of a file
    return chat.setting.tier != "none" and any("tier" in line for line in said)


def tidy(home: Path) -> None:
    """Every chat that there is can be read, and nothing is left of one that is not."""
    folder = home / "chats"
    for path in folder.rglob("*.tmp") if folder.is_dir() else ():
        raise AssertionError(path)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not path.name.startswith(".tier-"):  # of a chat that goes on
            read(path.name)


def one_by_one(kind: str, *, lasting: bool, step: int) -> Iterator[Fault]:
    """Every `step`-th call of this kind, until one is beyond the last."""
    for at in itertools.count(1, step):
        fault = Fault(kind, at, lasting=lasting)
        yield fault
        if not fault.fired:
            return


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("part", range(8))
def test_whatever_fails_the_chat_is_whole(part: int) -> None:
    """A sample of cases, operations and faults, 500 or more in the eight parts; the soak below
    takes many more."""
    draw, came, samples = random.Random(part), 0, []
    for i, name in enumerate(CASES):
        if i % 8 == part:
            _, setup, step = SAMPLED[(i // 8 * 7 + part) % len(SAMPLED)]
            samples.append((CASES[name], step, Reference(CASES[name], setup, step)))
    for _ in range(6):  # each time a few faults of each, until there are enough
        for setting, step, reference in samples if came < 63 else ():
            coming = drawn(draw, setting, step, 10)
            while (one := faults(reference, coming, 16)) is not None:
                came += one
    assert came >= 63, came


def drawn(draw: random.Random, setting: Setting, step: Step, count: int) -> Iterator[Fault]:
    """Faults that can come; of allocations and kernels there are many in an operation."""
    kinds = ["allocation", "allocation", "render"]
    if step in (ask, retry):
        kinds += ["kernel", "tokenise"]
    if step in (save, fork, keep, load) or setting.tier == "file":
        kinds += ["read", "write"]
    for _ in range(count):
        kind = draw.choice(kinds)
        most = {"allocation": 7.5, "kernel": 5}.get(kind, 1.5)
        yield Fault(kind, int(2 ** draw.uniform(0, most)), lasting=draw.random() < 0.5)


@pytest.mark.parametrize("name", ["pyramidkv", "windows"])
def test_a_kernel_that_fails_in_a_step_leaves_no_statistics_behind(name: str) -> None:
    """Also the one that counts the step, after which its statistics cannot be taken back."""
    _, setup, step = OPERATIONS[1]
    reference = Reference(CASES[name], setup, step)
    for at in range(26, 36):
        assert faults(reference, iter([Fault("kernel", at)])) == 1


STEPS = {"allocation": 29, "kernel": 3}
"""Of these there are many: every so many are taken."""


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_every_fault_of_every_operation(name: str) -> None:
    came: Counter[str] = Counter()
    for operation, setup, step in OPERATIONS:
        reference = Reference(CASES[name], setup, step)
        for kind, lasting in itertools.product(KINDS, (False, True)):
            coming = one_by_one(kind, lasting=lasting, step=STEPS.get(kind, 1))
            while (one := faults(reference, coming)) is not None:
                came[operation] += one
    sys.stderr.write(f"{name}: {came.total()} faults, {dict(came)}\n")
    assert came.total() > 100

"""Any operations of a chat in any order: after every one the chat is whole (`whole`), and it is
what a fresh chat is that was given the same operations without those that were cancelled or taken
back.

`Machine` applies operations to a chat. Beside it is the list of those that count; a plain chat, the
twin, is made of that list. Where a policy has a rule that can be said in one line (`full`,
`streaming`), lists of positions say which rows stay.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from faults import Fault, failing
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lettered import lettered
from small import SOON
from whole import kept_of, whole

from minikv import policies
from minikv.chat.answer import Writer
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Turn
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.transcript import read as read_saved
from minikv.cli.screen.terminal import Terminal
from minikv.errors import Interrupted, MinikvError, UsageError

TEXTS = (
    "A mill stands by the river and grinds. ",
    "The river is slow and brown, and a crane looks for fish in it. " * 2,
    "No name, no date. ",
    "Nobody knows who built the mill, nor why it stands there. " * 3,
)
QUESTIONS = ("Who?", "Why was it so?", "And then, in the year of the flood?", "When")
PAIRS = [
    *((name, "auto") for name in policies.prompt_names()),
    *(("full", step) for step in policies.step_names()),
    ("adakv", "none"),
    ("h2o+ada+pyramid", "h2o"),
    ("snapkv+critical+turns", "tova"),
]
STRIDED = [name for name in policies.step_names() if name != "none"]
BUDGETS = (40, 48, 64, 96, "35%", "60%")
WINDOWS = 8
"""Observed tokens, where a policy lets one choose: with its default a small budget is too small."""

Op = tuple[Any, ...]


def eviction(pair: tuple[str, str], budget: int | str, stride: int = 0) -> EvictionConfig:
    """Settings under which the policies evict in texts as short as these."""
    policy, decode = pair
    if stride:
        return EvictionConfig.read(policy, budget=budget, stride=stride)
    step = policies.default_step(policy) if decode == "auto" else decode
    options = dict(SOON.get(step, {}))
    if "window" in {option.name for option in policies.find(policy).prompt_options}:
        options["window"] = WINDOWS
    return EvictionConfig.read(policy, decode, budget, options)


@dataclass(frozen=True)
class Setting:
    """What a chat has from its beginning to its end."""

    eviction: EvictionConfig
    tier: str = "none"
    tier_dtype: str = "same"
    reuse: str = "once"
    system: str = ""
    pin_system: bool = False
    windows: tuple[int | None, ...] = (None, None)
    kv: torch.dtype | None = None

    def chat(self) -> ChatSession:
        return lettered(**{field.name: getattr(self, field.name) for field in fields(self)})


def held(session: ChatSession) -> list[list[int]]:
    layers = range(session.engine.kv.shape.layers)
    return [rows for layer in layers for rows in kept_of(session, layer)]


ALIKE = ("fed", "pending_token", "turn", "messages", "documents", "pending", "eviction", "seed")


def facts(session: ChatSession) -> dict[str, Any]:
    """What two chats that are the same have in common."""
    last = session.report
    return {
        **{name: copy(getattr(session, name)) for name in ALIKE},
        # Where nothing is cached, all is read in any case, and no file keeps the wish.
        "rereads": session.rereads and bool(session.fed),
        "position": session.engine.kv.position,
        "generated": [report.tokens.generated for report in session.reports],
        "seen": [report.tokens.seen_total for report in session.reports],
        "evicted": last.tokens.evicted_total if last and session.fed else None,
        "kept": held(session),
    }


def stopped_before_writing(session: ChatSession, question: str, temperature: float) -> None:
    """Ask, and stop when all was read."""
    write = Writer.write

    def stopped(*given: Any) -> Any:
        session.cancel()
        return write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "write", stopped)
        assert "".join(session.ask(question, 3, temperature)) == ""


def apply(session: ChatSession, op: Op) -> None:
    """One operation that counts."""
    name, *given = op
    if name in ("attach", "configure"):
        getattr(session, name)(*given)
    elif name == "ask" and not given[1]:
        stopped_before_writing(session, given[0], given[2])
    elif name in ("ask", "continue"):
        list(session.ask(*given) if name == "ask" else session.continue_answer(*given))
    elif name in ("seed", "reuse"):
        setattr(session, name, *given)
    elif name == "refresh":
        session.refresh(wanted=given[0])
    elif name == "clear":
        session.recall.clear()
    elif name == "lost":  # a step failed
        session.engine.kv.discard()
        session.guard.change(lambda: None)
    elif name == "undrawn":
        session.log.pending = None
        last = session.turns[-1]
        text = last.answer[:-1]
        counts = replace(last.report.tokens, generated=last.report.tokens.generated - 1)
        session.turns[-1] = replace(last, answer=text, report=replace(last.report, tokens=counts))
    elif name == "forget":  # the cache is gone, the conversation is not
        turns, snapshot = session.engine.kv.state.turns, session.snapshot()
        session.restore(replace(snapshot, held=None))
        if given:  # but it is known where its turns begin
            session.engine.kv.state = replace(session.engine.kv.state, turns=turns)
    elif name == "turns":
        session.engine.kv.state = replace(session.engine.kv.state, turns=given[0])
    else:
        raise AssertionError(name)


class Machine:
    """A chat and what it must be. `home`: where chats are saved."""

    def __init__(self, setting: Setting, home: Path) -> None:
        self.setting, self.home = setting, home
        self.session = setting.chat()
        terminal, self.told = Terminal(quiet=True), list[str]()
        terminal.warn = self.told.append  # type: ignore[method-assign, assignment]
        self.keeper = Keeper(terminal, active=True)
        self.keeper.attend(self.session)
        self.script: list[Op] = []
        self.saved: dict[str, tuple[list[Op], tuple[Any, ...]]] = {}
        self.fault: Fault | None = None  # comes into the next call
        self.tierless = False  # a fault took the tier: more is read again, in another order of sums
        self._uncounted: object = None  # a record made while there was no memory to count
        self.numbers = itertools.count(1)
        self.counts: Counter[str] = Counter()
        self._twin: tuple[list[Op], ChatSession, Setting] | None = None

    # -- faults -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Around a call of the chat or its keeper: in here the fault comes, if there is one."""
        with failing(self.session, self.fault) if self.fault else contextlib.nullcontext():
            yield
        if self.fault:
            self._note(self.fault)
        self.fault = None  # the call ended well in spite of it

    def refusal(self, call: Callable[[], object]) -> MinikvError | None:
        """Of a call of the chat or its keeper: what it raised, if it may. Under a fault nothing is
        expected of it."""
        try:
            with self.faults():
                call()
        except MinikvError as error:
            if self.fault:
                raise
            return error
        return None

    def _note(self, fault: Fault) -> None:
        self.counts["fault"] += fault.fired
        report = self.session.report
        self._uncounted = report
        lines = [*self.told, *(report.warnings if report else ())]
        said = [re.sub(r"\S*\.tier-\S*", "", line) for line in lines]  # the name of a file
        self.tierless |= self.setting.tier != "none" and any("tier" in line for line in said)

    def fail(self, fault: Fault, operation: Callable[[], None], op: Op = ()) -> None:
        """A fault comes into the operation: it was not begun, or it ended, or its answer ends
        there. If a step failed, the conversation is read or recalled again. op: what is noted of an
        answer, which has so many tokens."""
        before, name = facts(self.session), self.keeper.name
        self.fault = fault
        try:
            operation()
        except Exception as error:
            if self.fault is None or not (fault.fired or isinstance(error, MinikvError)):
                raise  # not the fault, and no refusal
            self.fault = None
            self._note(fault)
            self._failed(before, op)
            for each in (name, self.keeper.name):  # what was saved there may be older
                self.saved.pop(each or "", None)
            self.check("failed")
        assert not [*self.folder.rglob("*.tmp")]
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.is_dir() and not path.name.startswith(".tier-"):  # of an open chat
                read_saved(path.name)

    def _failed(self, before: dict[str, Any], op: Op) -> None:
        """Note what a call did that raised."""
        session = self.session
        report = session.report
        lost = bool(before["fed"] or session.turn > before["turn"]) and not session.fed
        if op and facts(session) != before and report is not None:
            name, *given = op
            tokens = report.tokens.generated
            if name == "continue":
                tokens -= before["generated"][-1]
            # One that was drawn and lost does not belong to the answer.
            undrawn = report.stop_reason == "error" and session.pending_token is None and not lost
            undrawn &= report.tokens.generated > 0
            given[-2] = tokens + undrawn
            if name == "ask" or given[-2]:
                self.script.append((name, *given))
            if undrawn:
                self.script.append(("undrawn",))
        if lost:
            self.script.append(("lost",))

    # -- operations ---------------------------------------------------------------------------

    def attach(self, text: str, name: str | None) -> None:
        self.session.attach(text, name)
        self.script.append(("attach", text, name))
        self.check("attach")

    def ask(self, question: str, tokens: int, temperature: float) -> None:
        session, before = self.session, facts(self.session)
        op = ("ask", question, tokens, temperature)
        if error := self.refusal(lambda: list(session.ask(*op[1:]))):
            self.refused(op, error, before)
            return
        self.script.append(op)
        self.check("ask")
        self._plain(before)

    def stop_reading(self, question: str, after: int, how: str) -> None:
        """Cancelled, or an exception in a callback, at the `after`-th call of progress."""
        session, before, calls = self.session, facts(self.session), itertools.count(1)

        def progress(done: int, total: int) -> None:
            if next(calls) == after:
                if how == "raise":
                    raise KeyboardInterrupt
                session.cancel()

        try:
            "".join(session.ask(question, 3, 0.8, progress=progress))
        except (Interrupted, KeyboardInterrupt):
            assert facts(session) == before
            self.check("cancel")
            return
        except MinikvError as error:
            self.refused(("ask", question, 3, 0.8), error, before)
            return
        report = session.report
        tokens = 0 if report.stop_reason == "user" and not report.tokens.generated else 3
        self.script.append(("ask", question, tokens, 0.8))
        self.check("too late")

    def stop_writing(self, question: str, after: int, how: str, temperature: float) -> None:
        """Stopped when so many pieces were taken."""
        session, before = self.session, facts(self.session)
        op = ("ask", question, 9, temperature)
        try:
            answer = session.ask(question, 9, temperature)
            for _ in range(after):
                next(answer, None)
            if how == "cancel":
                session.cancel()
                "".join(answer)
            elif how == "finish":
                session.finish()
            answer.close()
        except MinikvError as error:
            self.refused(op, error, before)
            return
        if session.report.stop_reason == "user":
            op = ("ask", question, session.report.tokens.generated, *op[3:])
        self.script.append(op)
        self.check("stop")
        self._plain(before)

    def _plain(self, before: dict[str, Any]) -> None:
        """Which rows stay, as lists of positions, where a rule of one line says so."""
        session, kv = self.session, self.session.engine.kv
        now, report = session.eviction, session.report
        assert report is not None
        bounded = (now.policy, now.decode) == ("streaming", "streaming")
        if not bounded and (now.policy, now.decode) != ("full", "none"):
            return
        if any(self.setting.windows) or now.stride:
            return
        owed = session.pending_token is not None
        read = len(session.fed) - report.tokens.generated + owed
        goes_on = bool(before["fed"]) and report.reuse in ("once", "blind")
        begin = len(before["fed"]) if goes_on else 0
        old = before["kept"] if goes_on else [[] for _ in before["kept"]]
        if len({len(rows) for rows in old}) > 1 or (bounded and now.budget.unit != "rows"):
            return  # another policy shared among heads
        kept_always = max(int(now.policy_options.get("sinks", 0)), kv.pinned)
        most = int(now.budget.value) if bounded else 1 << 60

        def last(rows: list[int]) -> list[int]:
            if len(rows) <= most:
                return rows
            stay = [at for at in rows if at < kept_always]
            rest = [at for at in rows if at >= kept_always]
            return [*stay, *rest[len(rest) - (most - len(stay)) :]]

        for rows, found in zip(old, held(session), strict=True):
            rows = last([*rows, *range(begin, read)])
            for at in range(read, len(session.fed)):
                rows = last([*rows, at])
            assert found == rows
        self.counts["plain"] += 1

    def go_on(self, tokens: int, temperature: float) -> None:
        session, before = self.session, facts(self.session)
        op = ("continue", tokens, temperature)
        if error := self.refusal(lambda: list(session.continue_answer(tokens, temperature))):
            self.refused(op, error, before, say=False)
            return
        last = self.script[-1]
        if last[0] == "ask" and last[2] and last[3] == temperature:
            self.script[-1] = ("ask", last[1], last[2] + tokens, *last[3:])
        else:
            self.script.append(op)
        self.check("continue")

    def undo(self, turns: int, *, retry: bool = False) -> None:
        session, before = self.session, facts(self.session)
        now, pending, seed = session.eviction, list(session.pending), session.seed
        flag, count = session.rereads, len(session.turns)
        taken = list[Turn]()
        if self.refusal(lambda: taken.extend(session.undo(turns))):
            assert not 1 <= turns <= count
            assert facts(session) == before
            return
        at = [i for i, op in enumerate(self.script) if op[0] == "ask"][count - turns]
        self.script, cut = self.script[:at], bool(session.fed)
        if not cut and count > turns:  # the cache may be gone, never be another one
            self.script.append(("forget", "undone"))
        twin, known = self.twin(), session.engine.kv.state.turns
        if known != twin.engine.kv.state.turns:
            # What is gone had read everything again, as one turn: where older ones began is lost.
            self.script.append(("turns", known))
        for document in pending:
            if document not in twin.pending:
                self.script.append(("attach", document.text, document.name))
        wanted = [("configure", twin.eviction, now), ("refresh", twin.rereads, flag and cut)]
        wanted += [("reuse", twin.reuse, session.reuse), ("seed", twin.seed, seed)]
        self.script += [(name, want) for name, found, want in wanted if found != want]
        self._rounded()
        self.check("undo by cutting" if cut else "undo")
        if retry:
            self.ask(taken[0].question, 4, 0.8)

    def reset(self, *, keep: bool) -> None:
        session = self.session
        documents = [*session.documents, *session.pending] if keep else []
        session.reset(keep_documents=keep)
        self.setting = replace(self.setting, eviction=session.eviction, reuse=session.reuse)
        self.script = [("seed", session.seed)] if session.seed else []
        self.script += [("attach", document.text, document.name) for document in documents]
        self.check("reset")

    def configure(self, wanted: EvictionConfig) -> None:
        before = facts(self.session)
        if self.refusal(lambda: self.session.configure(wanted)):
            assert facts(self.session) == before
            return
        self.script.append(("configure", wanted))
        self.check("configure")

    def seed(self, seed: int) -> None:
        self.session.seed = seed
        self.script.append(("seed", seed))

    def reuse(self, reuse: str) -> None:
        self.session.reuse = reuse
        self.script.append(("reuse", reuse))

    def refresh(self, *, wanted: bool) -> None:
        try:
            self.session.refresh(wanted=wanted)
        except MinikvError:
            assert wanted
            assert not self.session.fed
            return
        self.script.append(("refresh", wanted))

    def save(self) -> None:
        """Under a new name; the chat continues there."""
        name = f"chat-{next(self.numbers)}"
        with self.faults():
            self.keeper.save(self.session, name)
        self._noted(name)
        self.check("save")

    def _noted(self, name: str) -> None:
        session = self.session
        self.saved = {n: each for n, each in self.saved.items() if (self.folder / n).is_dir()}
        self.saved[name] = [*self.script], (self.setting, session.seed)

    @property
    def folder(self) -> Path:
        return self.home / "chats"

    def fork(self) -> None:
        """The chat continues under another name, and the old one stays."""
        keeper, session, fault, old = self.keeper, self.session, self.fault, None
        if keeper.name in self.saved and keeper._conversation == session.conversation:
            old = keeper.name
        name = f"fork-{next(self.numbers)}"
        with self.faults():
            keeper.save(session, name, fork=True)
        if old is not None and fault is not None:  # then it may be older: that is a warning
            del self.saved[old]
        elif old is not None:
            self._noted(old)
        self._noted(name)
        self.check("fork")

    def load(self, pick: int, *, fresh: bool) -> None:
        """One of the saved chats, in this session or in that of another process."""
        names = sorted(n for n in self.saved if (self.folder / n).is_dir())
        if not names:
            self.save()
            return
        name = names[pick % len(names)]
        script, (setting, seed) = self.saved[name]
        if fresh:
            self.close()
            self.session = self.setting.chat()
            self.keeper = Keeper(Terminal(quiet=True), active=True)
            self.keeper.attend(self.session)
        before = facts(self.session)
        if self.refusal(lambda: self.keeper.load(self.session, name)):
            assert not read_saved(name).facts["cache"], "it was saved before a question"
            assert facts(self.session) == before
            self.keeper.load(self.session, name, reread=True)
        self.setting, self.script = setting, [*script]
        if not self.session.fed and self.session.turns:
            self.script.append(("forget",))
        assert self.session.seed == seed
        self._rounded()
        self.check("load")

    def _rounded(self) -> None:
        """A tier of int8 may have more of the conversation than the twin's, which reads that anew
        and without rounding: it is emptied."""
        if self.setting.tier_dtype == "int8":
            self.session.recall.clear()
            self.script.append(("clear",))

    def close(self) -> None:
        """The process ends."""
        self.session.recall.leave()
        self.keeper.close()

    # -- what must be true ----------------------------------------------------------------------

    def twin(self) -> ChatSession:
        """A chat that was given the operations that count, and nothing else."""
        done, made, began = self._twin or ([], None, None)
        if made is None or self.script[: len(done)] != done or began != self.setting:
            if made is not None:
                made.recall.leave()
            done, made = [], self.setting.chat()
        for op in self.script[len(done) :]:
            apply(made, op)
        self._twin = [*self.script], made, self.setting
        return made

    def refused(
        self, op: Op, error: MinikvError, before: dict[str, Any], *, say: bool = True
    ) -> None:
        """Nothing changed, and the twin says the same."""
        assert facts(self.session) == before
        twin = self.twin()
        if say:
            with pytest.raises(type(error)) as raised:
                apply(twin, op)
            assert str(raised.value) == str(error)
            twin.recall.leave()
            self._twin = None  # an error in the middle of it is what is tested
        self.check("refused")

    def check(self, name: str) -> None:
        self.counts[name] += 1
        whole(self.session)
        if self.tierless:
            return
        mine, want = facts(self.session), facts(self.twin())
        for fact, value in want.items():
            counted = fact != "evicted" or self.session.report != self._uncounted
            assert mine[fact] == value or not counted, fact

    def end(self) -> None:
        self.close()
        if self._twin is not None:
            self._twin[1].recall.leave()


# -- what hypothesis draws ------------------------------------------------------------------------

TEMPERATURE = st.sampled_from([0.0, 0.8])
QUESTION = st.sampled_from(QUESTIONS)


@st.composite
def evictions(draw: st.DrawFn) -> EvictionConfig:
    """Any policies and budget; in one of ten cases a step policy that also reads, in blocks."""
    if draw(st.integers(0, 9)) == 0:
        step = draw(st.sampled_from(STRIDED))
        return EvictionConfig.read(step, budget=96, options=SOON.get(step), stride=16)
    return eviction(draw(st.sampled_from(PAIRS)), draw(st.sampled_from(BUDGETS)))


@st.composite
def machine_settings(draw: st.DrawFn) -> Setting:
    tier = draw(st.sampled_from(["none", "none", "ram", "file"]))
    reuses = ["once", "auto", "refresh", "blind"] if tier == "none" else ["auto", "auto", "once"]
    system, pinned = draw(st.sampled_from([("", False), ("Be brief.", False), ("Be brief.", True)]))
    return Setting(
        draw(evictions()),
        tier,
        draw(st.sampled_from(["same", "same", "int8"])),
        draw(st.sampled_from(reuses)),
        system,
        pinned,
        draw(st.sampled_from([(None, None), (None, None), (None, 48)])),
        draw(st.sampled_from([None, None, torch.int8])),
    )


def made_fault(kind: str, at: float, lasting: bool) -> Fault:
    """A fault at a share of the calls of its kind that an operation may make: early ones often."""
    most = {"allocation": 7.5, "kernel": 5}.get(kind, 1.5)
    return Fault(kind, int(2 ** (at * most)), lasting=lasting)


class Chats(RuleBasedStateMachine):
    """Any operation in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir=os.environ["MINIKV_HOME"]))
        self.before = os.environ["MINIKV_HOME"]
        os.environ["MINIKV_HOME"] = str(self.home)
        self.machine: Machine | None = None

    @initialize(setting=machine_settings())
    def begin(self, setting: Setting) -> None:
        try:
            self.machine = Machine(setting, self.home)
        except UsageError:  # a budget below what these policies need
            small = eviction(("adakv", "auto"), 48)
            self.machine = Machine(replace(setting, eviction=small), self.home)

    @property
    def m(self) -> Machine:
        STEPS["steps"] += 1
        return self.machine

    def roomy(self) -> bool:
        """A full context refuses all that follows: some of that is enough."""
        machine = self.machine
        return machine is None or machine.session.room > 200 or machine.counts["refused"] < 2

    @rule(text=st.sampled_from(TEXTS), name=st.sampled_from([None, "a.txt"]))
    def attach(self, text: str, name: str | None) -> None:
        self.m.attach(text, name)

    @precondition(roomy)
    @rule(question=QUESTION, tokens=st.integers(1, 6), temperature=TEMPERATURE)
    def ask(self, question: str, tokens: int, temperature: float) -> None:
        self.m.ask(question, tokens, temperature)

    @precondition(roomy)
    @rule(question=QUESTION, tokens=st.integers(1, 6), text=st.sampled_from(TEXTS))
    def ask_about(self, question: str, tokens: int, text: str) -> None:
        self.m.attach(text, "b.txt")
        self.m.ask(question, tokens, 0.0)

    @precondition(roomy)
    @rule(
        question=QUESTION,
        after=st.integers(1, 12),
        how=st.sampled_from(["cancel", "cancel", "raise"]),
    )
    def stop_reading(self, question: str, after: int, how: str) -> None:
        self.m.stop_reading(question, after, how)

    @precondition(roomy)
    @rule(
        after=st.integers(1, 24),
        how=st.sampled_from(["cancel", "cancel", "raise"]),
        text=st.sampled_from(TEXTS),
    )
    def stop_reading_about(self, after: int, how: str, text: str) -> None:
        self.m.attach(text, "c.txt")
        self.m.stop_reading("Who?", after, how)

    @precondition(roomy)
    @rule(
        question=QUESTION,
        after=st.integers(1, 4),
        how=st.sampled_from(["cancel", "close", "finish"]),
        temperature=TEMPERATURE,
    )
    def stop_writing(self, question: str, after: int, how: str, temperature: float) -> None:
        self.m.stop_writing(question, after, how, temperature)

    @rule(tokens=st.integers(1, 4), temperature=TEMPERATURE)
    def go_on(self, tokens: int, temperature: float) -> None:
        self.m.go_on(tokens, temperature)

    @rule(turns=st.sampled_from([0, 1, 1, 2, 3]), retry=st.booleans())
    def undo(self, turns: int, retry: bool) -> None:
        self.m.undo(turns, retry=retry)

    @rule(keep=st.sampled_from([None, None, True, False]))
    def reset(self, keep: bool | None) -> None:
        if keep is None:  # what would follow is worth more
            self.m.ask("Who?", 3, 0.0)
        else:
            self.m.reset(keep=keep)

    @rule(wanted=evictions(), budget=st.booleans())
    def policy(self, wanted: EvictionConfig, budget: bool) -> None:
        """Another policy, or only another budget."""
        now = self.m.session.eviction
        self.m.configure(replace(now, budget=wanted.budget) if budget else wanted)

    @rule(seed=st.sampled_from([None, 0, 1, 2]), wanted=st.sampled_from([None, True, True, False]))
    def adjust(self, seed: int | None, wanted: bool | None) -> None:
        machine = self.m
        if seed is not None:
            machine.seed(seed)
        if wanted is not None:
            machine.refresh(wanted=wanted)

    @precondition(roomy)
    @rule(
        kind=st.sampled_from(["allocation", "allocation", "kernel", "render", "tokenise"]),
        at=st.floats(0, 1),
        lasting=st.booleans(),
        text=st.sampled_from([None, *TEXTS]),
        temperature=TEMPERATURE,
        go_on=st.booleans(),
    )
    def fail_in_an_answer(
        self, kind: str, at: float, lasting: bool, text: str | None, temperature: float, go_on: bool
    ) -> None:
        machine, fault = self.m, made_fault(kind, at, lasting)
        if go_on:
            op = "continue", 3, temperature
            machine.fail(fault, lambda: machine.go_on(3, temperature), op)
        else:
            if text is not None:
                machine.attach(text, "d.txt")
            op = "ask", "Who?", 4, temperature
            machine.fail(fault, lambda: machine.ask("Who?", 4, temperature), op)
        self.go_on_after_a_fault()

    @rule(
        kind=st.sampled_from(["allocation", "read", "write", "write", "render"]),
        at=st.floats(0, 1),
        lasting=st.booleans(),
        name=st.sampled_from(["undo", "configure", "save", "fork", "load", "load"]),
        wanted=evictions(),
    )
    def fail_elsewhere(
        self, kind: str, at: float, lasting: bool, name: str, wanted: EvictionConfig
    ) -> None:
        machine = self.m
        operations: dict[str, Callable[[], None]] = {
            "undo": lambda: machine.undo(1),
            "configure": lambda: machine.configure(wanted),
            "save": machine.save,
            "fork": machine.fork,
            "load": lambda: machine.load(0, fresh=False),
        }
        machine.fail(made_fault(kind, at, lasting), operations[name])
        self.go_on_after_a_fault()

    def go_on_after_a_fault(self) -> None:
        """Without its tier a chat has no twin any more: another one begins."""
        machine = self.m
        if machine.tierless:
            machine.end()
            self.machine = Machine(machine.setting, self.home)
            self.machine.numbers, self.machine.counts = machine.numbers, machine.counts

    @rule(fork=st.booleans())
    def save(self, fork: bool) -> None:
        self.m.fork() if fork else self.m.save()

    @rule(pick=st.integers(0, 7), fresh=st.booleans())
    def load(self, pick: int, fresh: bool) -> None:
        self.m.load(pick, fresh=fresh)

    def teardown(self) -> None:
        os.environ["MINIKV_HOME"] = self.before
        if self.machine is not None:
            self.machine.end()
            for name, count in self.machine.counts.items():
                STEPS[name] += count
        shutil.rmtree(self.home)


STEPS: Counter[str] = Counter()
"""What the machines of a test did."""


def run(runs: int, steps: int, seed: int) -> Counter[str]:
    """So many runs of so many steps, the same ones for a seed."""
    STEPS.clear()
    how = settings(
        max_examples=runs,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],  # the steps are told; making them fewer takes minutes
    )
    kind = type("Chats", (Chats,), {})
    hypothesis.seed(seed)(kind)
    run_state_machine_as_test(kind, settings=how)
    return STEPS


def test_any_order_of_operations() -> None:
    done = run(50, 20, 14)
    assert done["steps"] > 750
    assert done["fault"] > 30
    assert min(done[name] for name in ("ask", "cancel", "stop", "undo", "load", "refused")) > 5


CUT = {
    "full": Setting(eviction(("full", "none"), 96)),
    "full, tier": Setting(eviction(("full", "none"), 96), "ram", reuse="auto"),
    "full, int8": Setting(eviction(("full", "none"), 96), kv=torch.int8),
    "windows": Setting(eviction(("full", "none"), 96), windows=(None, 1024)),
    "under the budget": Setting(eviction(("snapkv", "none"), 900), pin_system=True, system="Be."),
    "in steps": Setting(eviction(("streaming", "streaming"), 900)),
    "in blocks": Setting(EvictionConfig.read("streaming", budget=900, stride=16)),
    "sums": Setting(eviction(("h2o", "h2o"), 900)),  # its numbers are also of later tokens
}


@pytest.mark.parametrize("name", CUT)
def test_undo_cuts_a_cache_from_which_nothing_was_evicted(name: str) -> None:
    """What comes later, also an eviction, is that of a chat that never had the turn."""
    machine = Machine(CUT[name], Path(os.environ["MINIKV_HOME"]))
    machine.attach(TEXTS[1], "a.txt")
    for question in QUESTIONS[:3]:
        machine.ask(question, 4, 0.8)
    machine.undo(1, retry=True)
    machine.go_on(3, 0.8)
    machine.undo(2)
    machine.attach(TEXTS[3], "b.txt")
    machine.ask("When", 3, 0.0)
    machine.stop_writing("Why?", 2, "cancel", 0.8)
    machine.undo(1)
    cuts = 0 if name == "sums" else 3
    assert machine.counts["undo by cutting"] == cuts
    machine.configure(eviction(("snapkv", "none"), 64))
    machine.ask("And?", 6, 0.8)
    machine.undo(1)
    assert machine.counts["undo by cutting"] == cuts  # something was evicted
    machine.ask("And?", 6, 0.8)
    machine.end()


UNDONE = {
    "a share": ("full", ("snapkv", "none"), "100%", "none"),
    "a share, and a step policy": ("full", ("streaming", "streaming"), "50%", "none"),
    "turns": ("snapkv+turns", ("snapkv+turns", "none"), 64, "ram"),
    "turns, and a step policy": ("adakv+turns", ("adakv+turns", "tova"), 64, "ram"),
}


@pytest.mark.parametrize("name", UNDONE)
def test_an_undone_turn_leaves_no_mark(name: str) -> None:
    """Neither on a budget that is a share of what was read, nor on where turns begin."""
    first, then, budget, tier = UNDONE[name]
    found = []
    for undone in (False, True):
        start = EvictionConfig.read("full", "none") if first == "full" else eviction(then, budget)
        chat = lettered(start, reuse="auto", tier=tier)
        for question in QUESTIONS[:2]:
            chat.attach(TEXTS[1], "a.txt")
            "".join(chat.ask(question, 4))
        chat.configure(eviction(then, budget))
        if undone:
            "".join(chat.ask("Gone?", 1))
            chat.undo()
        chat.attach(TEXTS[1] * 3, "b.txt")
        answer = "".join(chat.ask("And then?", 8))
        found.append((answer, [kept_of(chat, layer) for layer in range(2)]))
        chat.recall.leave()
    assert found[0] == found[1]


@pytest.mark.parametrize("tier", ["none", "ram", "file"])
def test_turns_drop_behind_a_pinned_system_prompt(tier: str) -> None:
    start = eviction(("snapkv", "none"), 64)
    given = {"tier": tier, "system": "Be brief.", "pin_system": True, "overflow": "drop"}
    chat = lettered(start, reuse="auto", **given)
    for _ in range(9):
        "".join(chat.ask("Why? " + TEXTS[1], 6))
    assert len(chat.turns) < 9
    assert all(kept_of(chat, 0)[head][:9] == [*range(9)] for head in range(2))
    chat.recall.leave()


SEEDS = range(*(int(end) for end in os.environ.get("MACHINE_SEEDS", "0:20").split(":")))
"""Those of the long run: 5,000 operations each, so 0:200 are a million."""


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_a_hundred_thousand_operations(seed: int) -> None:
    done = run(100, 50, seed)
    sys.stderr.write(f"{dict(done)}\n")
    assert done["steps"] > 4000

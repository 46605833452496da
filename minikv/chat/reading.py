"""Reads the planned prompts, or others if reading is stopped or the tier fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minikv.cache.tier_rows import TierError
from minikv.chat import prompt_plan, repeating
from minikv.chat.cancelling import Cancelling
from minikv.chat.fidelity import Measuring
from minikv.chat.planning import Planner
from minikv.chat.prompt_plan import PromptPlan, Read
from minikv.chat.protocols import Tokenizer
from minikv.chat.reuse import Decision
from minikv.chat.room import Room
from minikv.chat.transcript import Message
from minikv.engine.engine import Engine
from minikv.errors import Interrupted


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the prompt of a turn. expected: tokens of the answer. warn(line): shows a line to the
    user."""

    engine: Engine
    tokenizer: Tokenizer
    planner: Planner
    room: Room
    expected: int
    measuring: Measuring
    cancelling: Cancelling
    progress: Callable[[int, int], None] | None
    warn: Callable[[str], None]

    def read(
        self, plan: PromptPlan, decision: Decision | None, messages: Sequence[Message]
    ) -> tuple[PromptPlan, Read]:
        """Read what `plan` says. If `skip` stops that, read only the new tokens. If the tier is
        damaged, also read the tokens that it has lost. Returns the plan that was carried out and
        its result.

        The user is told first what a second pass costs. Between chunks, `progress` is called. After
        any error, the cache is as it was before. Otherwise the caller must call `Recall.scored`
        once the turn counts.
        """
        self.cancelling.rereading = self.planner.rereads(plan, decision)
        try:
            self._tell_scoring(plan)
            return self._read(plan, messages)
        except BaseException:
            self.planner.recall.scored()
            raise
        finally:
            self.cancelling.rereading = False

    def _tell_scoring(self, plan: PromptPlan) -> None:
        for line in repeating.lines(self.engine, self.tokenizer, self.planner, plan):
            self.warn(line)

    def _read(self, plan: PromptPlan, messages: Sequence[Message]) -> tuple[PromptPlan, Read]:
        cancelling = self.cancelling
        try:
            found = self._feed(plan)
        except TierError as error:
            self.warn(self.planner.recall.failed(error))
            plan, decision = self.planner.plan(messages)
            self.room.refuse(plan)
            cancelling.rereading = self.planner.rereads(plan, decision)
            self._tell_scoring(plan)
            return self._read(plan, messages)
        except Interrupted:
            if cancelling.cancelled() or not cancelling.skipped:  # `progress` may raise it, too
                raise
            plan = self.planner.only_new(messages)
            if not self.room.has(plan):
                raise
        else:
            cancelling.skipped = False  # `skip` came after everything was read
            return plan, found
        cancelling.rereading = False  # first: from here on `skip` is `cancel`
        cancelling.skipped = False
        self.warn("stopped reading again: this answer comes from the cache as it is")
        return plan, self._feed(plan)

    def _feed(self, plan: PromptPlan) -> Read:
        return prompt_plan.read(
            self.engine,
            plan,
            self.expected,
            self.progress,
            self.cancelling.stopped,
            self.measuring,
        )

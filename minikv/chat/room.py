"""The positions that a chat has left, and the refusal of texts that do not fit."""

from __future__ import annotations

from dataclasses import dataclass

from minikv.chat.min_tokens import MinTokens
from minikv.chat.prompt_plan import PromptPlan
from minikv.errors import ContextError


@dataclass(frozen=True, slots=True)
class Room:
    """The positions of a chat. max_context: those that the model was trained for. fed: tokens that
    the cache has seen. left: positions that are left, with the pending token counted as used."""

    max_context: int
    fed: int
    left: int

    def refuse_text(self, text: str, bound: MinTokens) -> None:
        """Raise ContextError for a text that cannot fit. Does not tokenize it."""
        size = len(text.encode())
        if size <= self.left:
            return  # it fits even with one token per byte, so the bound is not needed
        least = bound.of(size)
        if least > self.left:
            raise self._refusal("needs at least", least, self.fed)

    def has(self, plan: PromptPlan) -> bool:
        """Whether the prompts of the plan and one token of an answer fit."""
        return plan.fits(self.fed, self.max_context)

    def refuse(self, plan: PromptPlan) -> None:
        """Raise ContextError if the prompts of the plan do not fit."""
        if not self.has(plan):
            raise self._refusal("needs", plan.length, plan.behind(self.fed))

    def _refusal(self, verb: str, tokens: int, used: int) -> ContextError:
        """The error for a prompt of `tokens` tokens. used: positions of the chat that stay in
        use."""
        room = max(self.max_context - used - 1, 0)
        by_chat = f", {used:,} of them used by this chat" if used else ""
        choices = ["a shorter document", "a model with a longer context"]
        if self.fed:
            choices.insert(0, "a new conversation (`chat.reset()`)")
        return ContextError(
            f"the prompt {verb} {tokens:,} tokens and {room:,} are left: this model was trained "
            f"for {self.max_context:,} positions{by_chat}",
            f"eviction does not extend that, and nothing was cut; choose {', '.join(choices)}",
        )

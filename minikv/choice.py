"""What the user chose about eviction: names, budget and options, checked before torch is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minikv.budget import Budget
from minikv.errors import UsageError
from minikv.policies import (
    DEFAULT_BUDGET,
    DEFAULT_PROMPT,
    PolicyInfo,
    Value,
    default_step,
    find,
    prompt_policy,
    read_options,
    step_policy,
)

if TYPE_CHECKING:
    from minikv.policy import PromptPolicy, StepPolicy


_MOST = 1 << 60  # rows or bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """A prompt policy, a decode policy and a budget. Build with `read`, which checks them."""

    policy: str
    decode: str
    budget: Budget
    policy_options: Mapping[str, Value]
    decode_options: Mapping[str, Value]

    @staticmethod
    def read(
        policy: str = DEFAULT_PROMPT,
        decode: str = "auto",
        budget: str | int = DEFAULT_BUDGET,
        options: Mapping[str, object] | None = None,
    ) -> Choice:
        """Check names and options. An option goes to the policy that has it, to both if both do.

        Raises UsageError that names the nearest policies, the options there are, or what a budget
        looks like; also where nothing is evicted, so that a typing error is never let through.
        """
        prompt = find(policy)
        step = find(default_step(policy) if decode == "auto" else decode, step=True)
        given = dict(options or {})
        for name in given:
            if not _has(prompt, name) and not _has(step, name):
                takes = [option.name for info in (prompt, step) for option in info.options]
                raise UsageError(
                    f"{prompt.name} with {step.name} has no option {name!r}",
                    f"it takes: {', '.join(dict.fromkeys(takes)) or 'no options'}",
                )
        return Choice(
            prompt.name,
            step.name,
            read_budget(budget),
            read_options(prompt, {n: v for n, v in given.items() if _has(prompt, n)}),
            read_options(step, {n: v for n, v in given.items() if _has(step, n)}),
        )

    @property
    def evicts(self) -> bool:
        """Whether anything is ever evicted under this choice."""
        return self.policy != "full" or self.decode != "none"

    def policies(self) -> tuple[PromptPolicy | None, StepPolicy | None, Budget | None]:
        """The objects that the scheduler takes."""
        prompt = prompt_policy(self.policy, self.policy_options)
        step = step_policy(self.decode, self.decode_options)
        return prompt, step, self.budget if self.evicts else None

    def budget_record(self) -> dict[str, object]:
        """The budget as the turn record has it; None where nothing is evicted."""
        if not self.evicts:
            return {"unit": None, "value": None}
        value = float(self.budget.value)
        return {"unit": self.budget.unit, "value": int(value) if value.is_integer() else value}

    def options_record(self) -> dict[str, object]:
        """The options in force; the decode policy and its options stand under `decode`."""
        decode: dict[str, object] = {"policy": self.decode, **self.decode_options}
        return {**self.policy_options, "decode": decode}


def read_budget(text: str | int) -> Budget:
    """`Budget.parse`, and a UsageError for more than any memory holds: torch counts in 64 bits."""
    budget = Budget.parse(text)
    if budget.value > _MOST:
        raise UsageError(
            f"budget {text} is more than any memory holds", "--policy full never evicts"
        )
    return budget


def _has(info: PolicyInfo, name: str) -> bool:
    return any(option.name == name for option in info.options)

"""The user's eviction settings: policies, budget and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from minikv.cache.budget import Budget
from minikv.errors import UsageError
from minikv.policies import (
    DEFAULT_BUDGET,
    DEFAULT_PROMPT,
    Option,
    Value,
    default_step,
    find,
    prompt_policy,
    read_options,
    step_names,
    step_policy,
)

if TYPE_CHECKING:
    from minikv.cache.rules import Rules
    from minikv.policies.options import Method


_MOST = 1 << 60  # rows or bytes
MOST_STRIDE = 256  # the network's chunks are multiples of every allowed stride


@dataclass(frozen=True, slots=True)
class EvictionConfig:
    """A prompt policy, a step policy and a budget. Make one with `read`, which checks them."""

    policy: str
    decode: str
    budget: Budget
    policy_options: Mapping[str, Value]
    decode_options: Mapping[str, Value]
    stride: int = 0

    @staticmethod
    def read(
        policy: str = DEFAULT_PROMPT,
        decode: str = "auto",
        budget: str | int = DEFAULT_BUDGET,
        options: Mapping[str, object] | None = None,
        seed: int = 0,
        stride: int = 0,
    ) -> EvictionConfig:
        """Check names and options. An option goes to the policy that has it, or to both.

        seed: for random draws, unless `options` has another. stride: if not 0, `policy` is a step
        policy that also evicts while prompts are read in blocks of `stride` tokens.

        Raises UsageError for any mistake, even in settings that have no effect here. Its hint
        suggests similar policies, lists the options, or shows examples of budgets.
        """
        if stride:
            step = _strided(policy, decode, stride)
            prompt = find("full")
        else:
            prompt = find(policy)
            step = find(default_step(policy) if decode == "auto" else decode, step=True)
        given = dict(options or {})
        reading, writing = _names(prompt.prompt_options), _names(step.step_options)
        for name in given:
            if name not in reading and name not in writing:
                takes = [*reading, *writing]
                pair = step.name if stride else f"{prompt.name} with {step.name}"
                raise UsageError(
                    f"{pair} has no option {name!r}",
                    f"it takes: {', '.join(dict.fromkeys(takes)) or 'no options'}",
                )
        given.setdefault("seed", seed)  # for policies that have the option
        return EvictionConfig(
            step.name if stride else prompt.name,
            step.name,
            read_budget(budget),
            read_options(
                prompt.name, prompt.prompt_options, {n: v for n, v in given.items() if n in reading}
            ),
            read_options(
                step.name, step.step_options, {n: v for n, v in given.items() if n in writing}
            ),
            stride,
        )

    @property
    def may_evict(self) -> bool:
        """Whether there is a policy at all."""
        return self.policy != "full" or self.decode != "none"

    @property
    def evicts(self) -> bool:
        """Whether there is a policy, and a budget that limits how much may stay."""
        return self.may_evict and not self.budget.everything

    @property
    def pair(self) -> str:
        """The names of the policies, for a message."""
        plain = self.stride or self.decode == "none"
        return self.policy if plain else f"{self.policy} with {self.decode}"

    def least_rows(self) -> int:
        """The smallest budget in rows per head with which these policies work, without pinned rows.
        Raises UsageError for options that contradict each other."""
        return replace(self, budget=Budget("rows", Fraction(_MOST))).rules().least()

    def rules(self) -> Rules:
        """The rules for a cache. Imports torch. Raises UsageError for options that contradict each
        other."""
        from minikv.cache.rules import Rules  # imports torch

        prompt = None if self.stride else prompt_policy(self.policy, self.policy_options)
        step = step_policy(self.decode, self.decode_options)
        if not self.evicts:
            return Rules()
        budget = self.budget if self.budget.unit != "auto" else Budget("rows", self.budget.value)
        return Rules(prompt, step, budget, self.stride)

    def under(self, rows: int) -> EvictionConfig:
        """These settings with `budget="auto"` decided: `rows` rows per head, 0 for all."""
        return replace(self, budget=Budget("auto", Fraction(rows)))

    def budget_record(self) -> dict[str, object]:
        """The budget for the turn record: unit and value, both None without a policy. The value of
        "auto" is the number of rows per head that it stands for; None: all."""
        if not self.may_evict:
            return {"unit": None, "value": None}
        if self.budget.everything:
            return {"unit": "auto", "value": None}
        value = float(self.budget.value)
        return {"unit": self.budget.unit, "value": int(value) if value.is_integer() else value}

    def options_record(self) -> dict[str, object]:
        """The options for the turn record; the step policy and its options are under `decode`."""
        decode: dict[str, object] = {"policy": self.decode, **self.decode_options}
        stride = {"stride": self.stride} if self.stride else {}
        return {**self.policy_options, **stride, "decode": decode}


def _strided(policy: str, decode: str, stride: int) -> Method:
    """The step policy that evicts while a prompt is read in blocks and while the answer is written.
    Raises UsageError."""
    if stride < 1 or stride > MOST_STRIDE or stride & (stride - 1):
        raise UsageError(
            f"`stride` must be a power of two up to {MOST_STRIDE}, got {stride}",
            "1 is as in the papers, 32 is much faster",
        )
    names = [name for name in step_names() if name != "none"]
    if policy not in names:
        raise UsageError(
            f"{policy} cannot read a prompt in blocks", f"`stride` takes: {', '.join(names)}"
        )
    if decode not in ("auto", policy):
        raise UsageError(
            f"with `stride`, {policy} also evicts while writing, not {decode}",
            "leave `decode` out",
        )
    return find(policy, step=True)


def read_budget(text: str | int) -> Budget:
    """`Budget.parse`. Also raises UsageError for a budget beyond torch's 64-bit integers."""
    budget = Budget.parse(text)
    if budget.value > _MOST:
        raise UsageError(
            f"budget {text} is more than any memory holds", '`policy="full"` never evicts'
        )
    return budget


def stated(budget: str) -> str:
    """Return `budget` if a measurement can be made under it. Raises UsageError."""
    if budget == "auto":
        raise UsageError(
            '`budget="auto"` evicts nothing while everything fits: there is nothing to measure',
            "give budgets, such as 128,256",
        )
    return budget


def _names(options: Iterable[Option]) -> list[str]:
    return [option.name for option in options]

"""Computes what fits into memory, for `budget="auto"` and `minikv plan`.

The engine itself plans a prompt with the same figures for the cache (`minikv.cache.plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from minikv.cache.plan import Plan, Prompt, Setup, peak, plan_prompt
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.cache.tier_rows import row_nbytes
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.errors import ContextError, UsageError
from minikv.kernels.decode.cpu import unfit
from minikv.kernels.dispatch import GPU_BLOCK, Kernels
from minikv.kernels.evict import cpu
from minikv.kernels.mass.cpu import quadratic_forms
from minikv.kernels.native import choice
from minikv.policies.repeats import Wording

USEFUL = 512
"""The smallest budget that `budget="auto"` chooses, in tokens per head: a smaller one would save
little compared to the memory for reading."""
_WORDS = Wording((0,) * 32, (0,) * 32, (0,) * 32)
"""The most tokens that a template or a tokenizer may need for a request to repeat a text."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that decide how much fits in addition to the weights.

    dtype: the network's. kv: that of stored keys and values. work(tokens): bytes that the network
    needs to read that many tokens. beside(tokens): bytes of a tier in the cache's own memory. gpu:
    this memory is a GPU's. ops: the kernels, as far as memory depends on them.
    """

    shape: Shape
    dtype: torch.dtype
    kv: torch.dtype
    work: Callable[[int], int]
    beside: Callable[[int], int] = lambda tokens: 0
    gpu: bool = False
    ops: Kernels = field(default_factory=Kernels)

    def plan(self, eviction: EvictionConfig, tokens: int, answer: int) -> tuple[Plan, Setup]:
        """The engine's plan for a first prompt of `tokens` tokens. Raises UsageError and
        ContextError."""
        rules, shape = eviction.rules(), self.shape
        setup = Setup(shape, rules, self.dtype, self.kv, self.ops, words=_WORDS, gpu=self.gpu)
        rows = None
        if rules.budget is not None:
            rows = min(rules.budget_rows(tokens, shape, self.kv), shape.max_context)
        room = min(answer, max(1, shape.max_context - tokens))
        prompt = Prompt(position=0, tokens=tokens, rows=rows, room=room, turns=[(0, tokens)])
        return plan_prompt(prompt, setup), setup

    def needs(self, eviction: EvictionConfig, tokens: int, answer: int) -> tuple[int, int] | None:
        """Bytes in addition to the weights: for a first prompt of `tokens` tokens and an answer,
        and for a later question, whose arena exists at the same time as the earlier one's. None if
        the policies cannot work with this. Without eviction there is no tier."""
        try:
            plan, setup = self.plan(eviction, tokens, answer)
        except (UsageError, ContextError):
            return None
        found = peak(plan, setup, in_file=True)
        first = max(found.reading, found.writing) + self.tier(setup.rules, tokens)
        first += self.work(tokens)
        return first, first + found.rows

    def tier(self, rules: Rules, tokens: int) -> int:
        """Bytes of a tier of `tokens` tokens in the cache's own memory."""
        return self.beside(tokens) if rules.evicts and rules.cannot_recall is None else 0

    def rows(
        self,
        eviction: EvictionConfig,
        tokens: int,
        answer: int,
        free: int | None,
        held: int = 0,
    ) -> int:
        """The rows per head that `budget="auto"` stands for in a conversation of `tokens` tokens
        and an answer: 0 if all fit into `free` bytes (None: not known) with an eighth of them to
        spare, otherwise as many as fit, at least `USEFUL` or what the policies need. Rounded to two
        digits, so that a little more free memory changes nothing. held: bytes that the cache has
        now, which are freed once the prompt is read."""
        if free is None or not eviction.may_evict:
            return 0

        def fits(rows: int) -> bool:
            needs = self.needs(eviction.under(rows), tokens, answer)
            return (
                needs is not None and needs[0] <= usable(free) and needs[1] <= usable(free + held)
            )

        if fits(0):
            return 0
        least = max(USEFUL, eviction.least_rows())
        digits = range(len(str(least)) - 2, len(str(tokens)))
        steps = [first * 10**zeros for zeros in digits for first in range(10, 100)]
        steps = [rows for rows in steps if least < rows < tokens]
        low, high = 0, len(steps)  # steps before `low` fit, those from `high` on do not
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(steps[middle]) else (low, middle)
        return steps[low - 1] if low else least


def likely(name: str, shape: Shape, dtype: torch.dtype, *, gpu: bool) -> Kernels:
    """The kernels that a chat with this value of the setting `kernels` will have for a network of
    this shape and dtype, as far as memory depends on them. Nothing is compiled."""
    ops = Kernels()
    if gpu:
        ops.block = GPU_BLOCK
    elif name != "torch" and not unfit(dtype, shape.head_dim):
        ops.evict = cpu.evict
        if choice.CHOICES[choice.processor()]["prompt statistics"] == choice.C:
            ops.quadratic_forms = quadratic_forms
    return ops


def usable(free: int) -> int:
    """How many of the free bytes, after the weights, a chat may plan with."""
    return free - free // 8


def too_much(nbytes: int, free: int | None) -> str:
    """Why host memory has no room for `nbytes` bytes; "" if it has. free: free bytes, None if not
    known."""
    if free is None or nbytes <= usable(free):
        return ""
    return f"that takes {size(nbytes)} of RAM, and {size(free)} are free"


def fit_words(rows: int, tokens: int) -> str:
    """The result of `Machine.rows` for `tokens` tokens, in words."""
    if not rows:
        return "all of it fits: nothing is evicted"
    most = "no more than " if rows <= USEFUL else ""
    return f"{most}{rows:,} tokens per head fit: {100 * rows // max(tokens, 1)}% of what is read"


def tier_beside(
    shape: Shape, dtype: torch.dtype, tokens: int, tier: str, tier_dtype: str, *, cuda: bool
) -> int:
    """Bytes that a tier of `tokens` tokens adds to the cache's own memory. tier and tier_dtype: see
    `Settings`. A prompt is staged in the tier itself, unless the tier is int8."""
    if tier != "ram" or cuda:
        return 0
    coded = tier_dtype == "int8"
    whole = tokens * row_nbytes(shape, dtype, coded)
    return whole if coded else whole - whole // shape.layers

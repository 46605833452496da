"""What two policies, a budget and a stride come to. No network is needed for that."""

from __future__ import annotations

from dataclasses import replace

import torch
from refusals import refused

from minikv import policies
from minikv.cache.plan import Prompt, Setup, repeats
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.errors import ContextError
from minikv.policies.repeats import Wording

SHAPE = Shape(4, 2, 4, 8, (None, 20, None, None), 1000)
WORDS = Wording([1, 2], [3], [4])


def rules(policy: str, decode: str = "none", budget: str = "100", stride: int = 0) -> Rules:
    return EvictionConfig.read(policy, decode, budget, stride=stride).rules()


def test_a_policy_needs_a_budget_and_none_needs_none() -> None:
    refused("needs a budget", Rules, prompt=policies.prompt_policy("adakv"))
    refused("needs a budget", Rules, step=policies.step_policy("h2o"))
    assert not Rules().evicts
    assert Rules().cannot_recall is None


def test_the_least_budget_has_room_for_pins_that_are_no_sinks() -> None:
    step = policies.step_policy("streaming")
    assert step.sinks == 4
    made = rules("full", "streaming")
    assert [made.least(n) - made.least() for n in (0, 3, 4, 5, 20)] == [0, 0, 0, 1, 16]
    made.refuse_pins(0, 1)  # nothing is pinned
    made.refuse_pins(20, made.least(20))
    refused(f"is {made.least(20)} tokens per head", made.refuse_pins, 20, made.least(20) - 1)


def test_a_budget_in_bytes_counts_what_the_policies_keep_and_int8_is_smaller() -> None:
    """A row of bfloat16: 2 * 8 numbers, a position, and RoCo's three floats."""
    made = rules("full", "roco", "64KiB")
    row = 2 * 8 * 2 + 4 + 3 * 4
    assert made.budget_rows(0, SHAPE, torch.bfloat16) == (64 << 10) // (row * 4 * 2)
    coded = 2 * 8 + 4 + 2 * 4 + 3 * 4  # a scale for keys, one for values
    assert made.budget_rows(0, SHAPE, torch.int8) == (64 << 10) // (coded * 4 * 2)


def test_a_share_is_of_what_was_read_and_may_be_too_small() -> None:
    made = rules("snapkv", budget="50%")
    assert made.takes_share
    assert made.budget_rows(400, SHAPE, torch.float32) == 200
    says = "which is 10 tokens per head here, is too small for snapkv"
    refused(says, made.budget_rows, 20, SHAPE, torch.float32)


def test_layers_share_what_pyramidkv_says_and_a_window_bounds_it() -> None:
    made = rules("pyramidkv")
    totals = made.layer_totals(100, 500, SHAPE, 0)
    assert totals[1] == 2 * 20
    assert totals[0] > totals[2] > totals[3]
    assert rules("full").layer_totals(None, 500, SHAPE, 0) is None
    assert rules("snapkv+global").layer_totals(100, 500, SHAPE, 0) is None


def test_what_always_has_room_is_not_read_twice() -> None:
    """Half of the budget, with all before it; of a question, half of the budget by itself."""
    made = rules("kvzip", budget="200")

    def texts(
        tokens: int, position: int, *, asks: bool, most: int = 1000, which: Rules = made
    ) -> int:
        shape, kind = replace(SHAPE, max_context=most), torch.float32
        setup = Setup(shape, which, kind, kind, words=WORDS)
        rows = None if which.budget is None else 200
        prompt = Prompt(position=position, tokens=tokens, rows=rows, asks=asks)
        return len(repeats(prompt, setup))

    told = [(100, 0, False), (101, 0, False), (50, 51, False), (50, 51, True), (101, 51, True)]
    assert [texts(n, at, asks=asks) > 0 for n, at, asks in told] == [0, 1, 1, 0, 1]
    assert not texts(500, 0, asks=False, which=rules("snapkv"))
    says = "5 of 106 positions are left"
    refused(says, texts, 101, 0, asks=False, most=106, error=ContextError)
    assert not texts(500, 0, asks=False, which=replace(made, prompt=None, budget=None))


def test_why_a_tier_cannot_be_chosen_from() -> None:
    assert rules("adakv").cannot_recall is None
    assert rules("h2o").cannot_recall == "h2o needs the queries of all tokens"
    assert rules("kvzip").cannot_recall == "kvzip reads everything twice"
    learning = rules("adakv", "triattention", "300")
    assert learning.cannot_recall == "triattention needs the queries of all tokens"
    strided = rules("roco", "auto", "100", 8)
    assert strided.cannot_recall == "with a stride rows are evicted while it reads"

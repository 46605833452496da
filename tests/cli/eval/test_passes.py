"""How a document is put through a chat, each measure beside a plain way to compute it."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch

import minikv
from minikv.cache.attend import DenseAttend
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.transcript import Message
from minikv.cli.eval import passes, tasks
from minikv.cli.eval.items import Item
from minikv.cli.eval.passes import PASSES


def test_perplexity_is_that_of_a_plain_forward_that_begins_as_a_chat_does() -> None:
    """With the BOS and what comes before the user's words; the last quarter is scored."""
    chat = minikv.load(policy="full", dtype="float32")
    text = "The mill was cold. " * 20
    memory: passes.Memory = {}
    (first,) = PASSES["text"].run(chat, Item(text, (), ()), memory)
    plain = chat.tokenizer.encode(text)
    whole = chat.template.opening([Message("user", text)])
    start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    tokens, read = whole[: start + len(plain)], start + 3 * len(plain) // 4
    assert start
    net = chat.engine.network
    with torch.inference_mode():
        states = net.hidden(torch.tensor(tokens), DenseAttend((None,) * 4))  # type: ignore[attr-defined]
        logits = net.logits(states[read - 1 : -1])  # type: ignore[attr-defined]
        want = torch.nn.functional.cross_entropy(
            logits, torch.tensor(tokens[read:]), reduction="none"
        )
    assert [t[0] for t in first] == pytest.approx(want.tolist(), rel=1e-4, abs=1e-4)
    # Beside it another cache, whose distributions are compared by torch's own divergence.
    chat.configure(EvictionConfig.read("streaming", "streaming", "20"))
    (second,) = PASSES["text"].run(chat, Item(text, (), ()), memory)
    fed = chat.engine
    chat.reset()
    said = [fed.prompt(tokens[:read])]
    said += [fed.step(token).clone() for token in tokens[read:-1]]
    full = torch.distributions.Categorical(logits=logits.float())
    other = torch.distributions.Categorical(logits=torch.stack(said).float())
    apart = torch.distributions.kl_divergence(full, other)
    assert [t[1] for t in second] == pytest.approx(apart.tolist(), rel=1e-3, abs=1e-4)
    assert [t[2] for t in second] == (full.probs.argmax(1) == other.probs.argmax(1)).tolist()
    assert {t[1:] for t in first} == {(0.0, True)}


def test_the_first_difference_is_that_of_the_answers() -> None:
    """Of the answers that a chat writes: fed with the full cache's, the same tokens come first as
    long as the chat would write the same."""
    chat = minikv.load(policy="full")
    (item,) = tasks.facts(chat.tokenizer, 1000, 1, 5, questions=3)
    memory: passes.Memory = {}
    beside = {}
    for policy, budget in (("full", "512"), ("adakv", "48"), ("streaming", "48")):
        chat.configure(EvictionConfig.read(policy, budget=budget))
        beside[policy] = PASSES["beside"].run(chat, item, memory)
        for one, found in zip(item.single(), beside[policy], strict=True):
            same = [t[2] for t in found]
            until = same.index(False) if False in same else len(same)
            chat.reset()
            said = chat.tokenizer.encode("".join(PASSES["answers"].run(chat, one, {})))
            full = [token for token, _ in memory[one.questions[0]]]
            shared = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(said, full, strict=False))
            )
            assert shared == min(until, len(full) - 1)
    assert all(t[1:] == (0.0, True) for found in beside["full"] for t in found)
    assert any(not t[2] for found in beside["streaming"] for t in found)

"""How a document is put through a chat, each measure beside a plain way to compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairwise import some_by_day
from small import engine, ids, network
from views import kept

import minikv
from minikv.cache.attend import DenseAttend
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.transcript import Message
from minikv.cli.eval import passes, tasks
from minikv.cli.eval.items import Item
from minikv.cli.eval.passes import PASSES, Rereading
from minikv.engine.engine import Engine
from minikv.models.llama import Llama
from minikv.policies import default_step, prompt_names


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
        scored = torch.tensor(tokens[read:])
        want = torch.nn.functional.cross_entropy(logits, scored, reduction="none")
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
            alike = [a == b for a, b in zip(said, full, strict=False)]
            shared = [*alike, False].index(False)
            assert shared == min(until, len(full) - 1)
    assert all(t[1:] == (0.0, True) for found in beside["full"] for t in found)
    assert any(not t[2] for found in beside["streaming"] for t in found)


# -- a document that many policies read is computed once -------------------------------------
class Counted:
    """A network that notes how many tokens it reads, and behind how many."""

    def __init__(self, net: Llama, seen: list[tuple[int, int]]) -> None:
        self.net, self.rows, self.seen = net, net.rows, seen

    def forward(self, tokens: torch.Tensor, kv: Any) -> torch.Tensor:
        self.seen.append((len(tokens), kv.position))
        return self.net.forward(tokens, kv)


@pytest.mark.parametrize("windows", some_by_day([None, (20, None, 30)], bool))
def test_a_document_read_once_is_as_if_each_had(windows: tuple[int | None, ...] | None) -> None:
    """Bit for bit, for every prompt policy: what is kept, the logits, those of a second prompt."""
    net = network(windows=windows)
    kv, seen = engine(net).kv, list[tuple[int, int]]()
    shared = Engine(Rereading(Counted(net, seen), kv), kv)  # type: ignore[arg-type]
    names = [*prompt_names(), "h2o+ada+pyramid", "kvcrush(h2o)", "snapkv+critical+turns"]
    for name in names:
        alone = engine(net, name, default_step(name), 40)
        shared.reset()
        kv.configure(EvictionConfig.read(name, budget=40).rules())
        for tokens in (ids(150), ids(20, seed=7)):
            assert torch.equal(alone.prompt(tokens), shared.prompt(tokens)), name
            assert kept(alone.kv) == kept(kv), name
            assert torch.equal(alone.step(5), shared.step(5)), name
    assert 1 < sum(count == 150 for count, _ in seen) < len(names) // 2


@pytest.mark.parametrize("decode", ["none", "roco"])
def test_a_document_is_repeated_once_for_all_budgets(decode: str) -> None:
    """Bit for bit: what is kept under each budget, and the logits of the prompt and of a question;
    other options and other tokens have a pass of their own."""
    net = network(windows=(None, 40, None))
    kv, seen = engine(net).kv, list[tuple[int, int]]()
    shared = Engine(Rereading(Counted(net, seen), kv), kv)  # type: ignore[arg-type]
    runs: list[tuple[str, int, dict[str, object]]] = [("kvzip", 20, {}), ("kvzip", 30, {})]
    runs += [("kvzip+uniform", 30, {}), ("kvzip+", 30, {}), ("kvzip", 30, {"chunk": 60})]
    for seed in (1, 2):
        for name, budget, options in (*runs, ("kvzip", 40, {})):
            alone = engine(net, name, decode, budget, prompt_options=options)
            shared.reset()
            kv.configure(EvictionConfig.read(name, decode, budget, options).rules())
            for tokens, asks in ((ids(150, seed=seed), False), (ids(9), True)):
                got = shared.prompt(tokens, None, 256, asks)
                assert torch.equal(alone.prompt(tokens, None, 256, asks), got), name
                assert kept(alone.kv) == kept(kv), name
            assert torch.equal(alone.step(5), shared.step(5)), name
    # Read once; repeated for kvzip, for kvzip+, and in three chunks.
    texts = sum(count > 20 and position in (0, 150) for count, position in seen)
    assert texts == 2 * (1 + 1 + 1 + 3)

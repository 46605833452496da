"""Runs a document through a chat for a task: for answers, or to compare with the full cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Prefill
from minikv.cache.second_pass import SecondPass
from minikv.cache.tier import Tier
from minikv.chat import plan, reading
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Document, Message, Template
from minikv.cli.eval.items import Item
from minikv.engine.decode_loop import Network
from minikv.errors import ContextError
from minikv.models.tokenizer import Tokenizer
from minikv.policies.base import ALL


class Rereading:
    """A `Network` over `kv` that stores the rows of the last first prompt in a tier, and its
    scores. For another policy only the end of the same prompt is fed, unless the policy needs the
    queries of all tokens. `network.rows` must say how many tokens it reads together."""

    def __init__(self, network: Network, kv: KVCache) -> None:
        self.network, self.kv = network, kv
        self._chunk: int = getattr(network, "rows", 1)
        self._tier = Tier(kv.shape, kv.dtype, kv.device)
        self._ids: Tensor | None = None
        self._scored: dict[object, SecondPass] = {}

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `Network`; `kv` is over this object's cache, or a text that scores."""
        reading = self.kv.reading
        own_tier = type(reading) is Prefill and reading.tier is not None
        later = kv.position or self.kv.position
        if not isinstance(reading, Prefill) or own_tier or later:
            return self.network.forward(ids, kv)
        self._renew(ids)
        if isinstance(reading, SecondPass):
            needs = reading.scorer, *reading.plan.repeats
            known = self._scored.setdefault(needs, reading)
            if known.scored:
                reading.score_as(known)
            else:
                self._scored[needs] = reading
        self._tier.open(len(ids))
        reading.tier, reading.plan = self._tier, replace(reading.plan, given=self._given(reading))
        logits = self.network.forward(ids[reading.plan.given :], kv)
        self._tier.commit(len(ids))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)  # anything else that a policy needs from the network

    def _given(self, reading: Prefill) -> int:
        """How many of the first tokens need not be fed. Feeding begins where one of the network's
        chunks begins. So every number is the same as if all of the prompt were read, if the tier's
        rows were read in the same chunks."""
        rules, plan = reading.setup.rules, reading.plan
        everything = rules.observe == ALL or rules.evidence.queries_from is not None
        if everything or reading.learnt is not None:
            return 0
        # A single token would be read like a step, with differently rounded sums.
        given = max(0, min(plan.tokens - max(2, plan.observed(rules)[1]), self._tier.length))
        return given - given % self._chunk

    def _renew(self, ids: Tensor) -> None:
        """Discard the remains of an error. For other tokens, forget the stored prompt."""
        self._tier.drop()
        if self._ids is None or not torch.equal(ids, self._ids):
            self._ids, self._scored = ids.clone(), {}
            self._tier.truncate(0)


# -- prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bare(Document):
    """A document that is rendered without its name and without anything after it."""

    def rendered(self) -> str:
        return self.text


def document(item: Item) -> Document:
    """The item's document in the form for a chat."""
    return _Bare(item.document) if item.name is None else Document(item.document, item.name)


class _Begun:
    """A `Template` whose prompts end with the beginning of the answer."""

    def __init__(self, template: Template, begins: list[int]) -> None:
        self._template, self._begins = template, begins

    def opening(self, messages: Sequence[Message]) -> list[int]:
        return self._template.opening(messages) + self._begins

    def following(self, messages: Sequence[Message]) -> list[int]:
        return self._template.following(messages) + self._begins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._template, name)


@contextmanager
def worded(chat: ChatSession, item: Item) -> Iterator[None]:
    """A context in which the chat's prompts end with the given beginning of the item's answer."""
    before = chat.template
    if item.opens:
        begins = cast(Tokenizer, chat.tokenizer).encode(item.opens, "inside")
        chat.template = cast(Template, _Begun(before, begins))
    try:
        yield
    finally:
        chat.template = before


def prompts(chat: ChatSession, item: Item) -> tuple[list[int], ...]:
    """The first prompt, with the document and a question, in parts if the chat evicts before it
    sees the question."""
    with worded(chat, item):
        rendered = document(item).rendered()
        messages = [*chat.messages, Message("user", rendered + item.questions[0])]
        ids = chat.template.opening(messages)
        if chat.reuse != "blind":
            return (ids,)
        asked = [(len(chat.messages), rendered)]
        return plan.parts(ids, asked, chat.template.opening, [*chat.messages, Message("user", "")])


# -- answers ----------------------------------------------------------------------------------


def answers(chat: ChatSession, item: Item, _: Memory | None = None) -> list[str]:
    """The answers to the questions of an item, in one chat, or each in a separate chat."""
    made = []
    for number, question in enumerate(item.questions):
        if item.apart and number:
            chat.reset()
        if item.apart or not number:
            chat.pending.append(document(item))
        with worded(chat, item):
            # Not stripped: the metrics decide about white space.
            made.append("".join(chat.ask(question, max_tokens=item.max_tokens)))
    return made


def _needs_to_answer(chat: ChatSession, item: Item) -> int:
    """The positions of all questions, with the longest possible answers."""

    def needed(one: Item) -> int:
        first, later = sum(map(len, prompts(chat, one))), one.questions[1:]
        asked = [Message("user", "a"), Message("assistant", "a")]
        following = (chat.template.following([*asked, Message("user", q)]) for q in later)
        return first + sum(map(len, following)) + len(one.questions) * one.max_tokens

    return max(map(needed, item.single()))


# -- compared with the full cache -------------------------------------------------------------

Token = tuple[float, float, bool]
"""(nats of the token, KL from the full cache, whether both have the same likeliest token)."""
Memory = dict[str, list[tuple[int, Tensor]]]
"""The results of the full cache, which runs first: its tokens and log-probabilities, by
question."""


def _text(chat: ChatSession, item: Item, memory: Memory) -> list[list[Token]]:
    """The `Token`s of the last quarter of the document."""
    reading.prepare(chat.engine.kv, chat.tokenizer, chat.template)
    chat.engine.reset()
    ids, read = _scored(chat, item)
    return [_fed(chat, _read(chat, ids[:read]), memory, "", ids[read:])]


def _read(chat: ChatSession, ids: Sequence[int], before: Sequence[int] = ()) -> Tensor:
    """Feed a prompt after the tokens `before`, as a chat does. Returns its last logits."""
    kv = chat.engine.kv
    kv.sentences = reading.sentences(kv, chat.tokenizer, [*before, *ids])
    try:
        return chat.engine.prompt(ids)
    finally:
        kv.sentences = None


def _beside(chat: ChatSession, item: Item, memory: Memory) -> list[list[Token]]:
    """The `Token`s of the full cache's own answer to a chat's first question, or to each question
    that is asked apart. Up to the first difference, this cache would write the same answer."""
    found = []
    for one in item.single():
        chat.reset()
        parts = prompts(chat, one)
        if sum(map(len, parts)) + one.max_tokens > chat.max_context:
            raise ContextError("a document does not fit the model", "choose a smaller --length")
        with worded(chat, one):
            reading.prepare(chat.engine.kv, chat.tokenizer, chat.template)
        fed: list[int] = []
        for ids in parts:
            logits = _read(chat, ids, fed)
            fed += ids
        found.append(_fed(chat, logits, memory, one.questions[0], [], one.max_tokens))
    return found


def _fed(
    chat: ChatSession,
    logits: Tensor,
    memory: Memory,
    question: str,
    tokens: Sequence[int],
    most: int = 0,
) -> list[Token]:
    """Feed the tokens, or at most `most` of the full cache's own, one by one."""
    known, found = memory.setdefault(question, []), list[Token]()
    last, vocab = len(known) or len(tokens) or most, chat.tokenizer.vocab
    first, token = not known, -1
    while len(found) < last:
        if found:
            logits = chat.engine.step(token)
        said = logits.float().log_softmax(-1)
        best = int(said[:vocab].argmax())
        if first:
            known.append((tokens[len(found)] if tokens else best, said))
        token, full = known[len(found)]
        kl = float((full.exp() * (full - said))[full > -torch.inf].sum())
        found.append((-float(said[token]), kl, best == int(full[:vocab].argmax())))
        if first and not tokens and token in chat.tokenizer.stop_ids:
            break
    return found


def _scored(chat: ChatSession, item: Item) -> tuple[list[int], int]:
    """The document's tokens and how many of them are read as a prompt."""
    # Without the beginning of a chat, above all a BOS, a real model's perplexity is far off.
    start, ids = chat.start(), chat.tokenizer.encode(item.document)
    return start + ids, len(start) + max(1, 3 * len(ids) // 4)


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pass:
    """run(chat, item, memory): measures a document; returns a list of answers, or of `Token`s.
    memory: the document's, empty for the first policy. needs: the most positions that it takes.
    asks: whether the result depends on `--reuse`."""

    run: Callable[[ChatSession, Item, Memory], list[Any]]
    needs: Callable[[ChatSession, Item], int]
    asks: bool = True


PASSES: Mapping[str, Pass] = {
    "answers": Pass(answers, _needs_to_answer),
    "beside": Pass(_beside, _needs_to_answer),
    "text": Pass(_text, lambda chat, item: len(_scored(chat, item)[0]), asks=False),
}

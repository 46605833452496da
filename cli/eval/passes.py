"""How a task runs a document through a chat: for answers, or beside the full cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from minikv.chat import plan, reading
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Document, Message, Template
from minikv.cli.eval.items import Item
from minikv.errors import ContextError
from minikv.models.tokenizer import Tokenizer

# -- prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bare(Document):
    """A document that is rendered without its name and without anything after it."""

    def rendered(self) -> str:
        return self.text


def document(item: Item) -> Document:
    """The item's document as a chat has it before a question."""
    return _Bare(item.document) if item.name is None else Document(item.document, item.name)


class _Wording:
    """A `Template` for an item: the chat's own, or, without roles, one whose prompt is the text
    alone. Prompts end with the beginning of the answer."""

    def __init__(self, chat: ChatSession, roles: bool, begins: str) -> None:
        self._template, self._tokenizer = chat.template, cast(Tokenizer, chat.tokenizer)
        self._roles = roles
        self._begins = self._tokenizer.encode(begins, "inside") if begins else []
        self.notes = chat.template.notes if roles else ()
        self.tags = chat.template.tags if roles else None

    def opening(self, messages: Sequence[Any]) -> list[int]:
        if self._roles:
            return self._template.opening(messages) + self._begins
        tokenizer = self._tokenizer
        start = [id for id, _ in tokenizer.split(tokenizer.start) if id is not None]
        text = "".join(message.content for message in messages)
        return start + tokenizer.encode(text, "after" if start else "start") + self._begins

    def following(self, messages: Sequence[Any]) -> list[int]:
        if self._roles:
            return self._template.following(messages) + self._begins
        return self._tokenizer.encode(messages[-1].content, "inside") + self._begins

    def lookalikes(self, text: str) -> int:
        return self._template.lookalikes(text) if self._roles else 0

    def markers(self, text: str) -> int:
        return self._template.markers(text) if self._roles else 0

    def lost(self, text: str) -> int:
        return self._template.lost(text) if self._roles else 0


@contextmanager
def worded(chat: ChatSession, item: Item, number: int) -> Iterator[None]:
    """Inside, the chat writes its prompts in the way that question `number` of the item needs."""
    before: Template = chat.template
    chat.template = _Wording(chat, item.roles, item.opens[number] if item.opens else "")
    try:
        yield
    finally:
        chat.template = before


def prompts(chat: ChatSession, item: Item) -> tuple[list[int], ...]:
    """The first prompt, with the document and a question, cut where the chat evicts before it sees
    the question."""
    with worded(chat, item, 0):
        rendered = document(item).rendered()
        messages = [*chat.messages, Message("user", rendered + item.questions[0])]
        ids = chat.template.opening(messages)
        if chat.reuse != "blind":
            return (ids,)
        asked = [(len(chat.messages), rendered)]
        return plan.parts(ids, asked, chat.template.opening, [*chat.messages, Message("user", "")])


# -- answers ----------------------------------------------------------------------------------


def answers(chat: ChatSession, item: Item, _: Memory | None = None) -> list[str]:
    """The answers to the questions of an item, in one chat, or each in a chat of its own."""
    made = []
    for number, question in enumerate(item.questions):
        if item.apart and number:
            chat.reset()
        if item.apart or not number:
            chat.pending.append(document(item))
        with worded(chat, item, number):
            # Not stripped: the metrics know what white space means to them.
            answer = "".join(chat.ask(question, max_tokens=item.max_tokens))
        made.append(answer.lstrip("\n").split("\n")[0] if item.first_line else answer)
    return made


def _needs_to_answer(chat: ChatSession, item: Item) -> int:
    """Positions of all questions, if every answer is as long as it may be."""

    def needed(one: Item) -> int:
        first, later = sum(map(len, prompts(chat, one))), one.questions[1:]
        asked = [Message("user", "a"), Message("assistant", "a")]
        following = (chat.template.following([*asked, Message("user", q)]) for q in later)
        return first + sum(map(len, following)) + len(one.questions) * one.max_tokens

    return max(map(needed, item.single()))


# -- beside the full cache --------------------------------------------------------------------

Token = tuple[float, float, bool]
"""(nats of the token, KL from what the full cache says, whether the same token comes first)."""
Memory = dict[str, list[tuple[int, Tensor]]]
"""What the full cache said, which comes first: its tokens and logarithms, by question."""


def _text(chat: ChatSession, item: Item, memory: Memory) -> list[list[Token]]:
    """At each token of the last quarter of the document."""
    reading.prepare(chat.engine.kv, chat.tokenizer, chat.template)
    chat.engine.reset()
    ids, read = _scored(chat, item)
    return [_fed(chat, chat.engine.prompt(ids[:read]), memory, "", ids[read:])]


def _beside(chat: ChatSession, item: Item, memory: Memory) -> list[list[Token]]:
    """At each token of the full cache's own answer to a chat's first question, or to each that is
    asked apart. Up to the first that is not the same, the answer is what this cache would write."""
    found = []
    for one in item.single():
        chat.reset()
        parts = prompts(chat, one)
        if sum(map(len, parts)) + one.max_tokens > chat.max_context:
            raise ContextError("a document does not fit the model", "choose a smaller --length")
        with worded(chat, one, 0):
            reading.prepare(chat.engine.kv, chat.tokenizer, chat.template)
        for ids in parts:
            logits = chat.engine.prompt(ids)
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
    # Without what a chat begins with, a BOS above all, a real model's perplexity is off by far.
    start, ids = chat.start(), chat.tokenizer.encode(item.document)
    return start + ids, len(start) + max(1, 3 * len(ids) // 4)


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pass:
    """run(chat, item, memory): measure a document: a list of answers, or of `Token`s. memory: that
    of the document, empty for the first policy. needs: the most positions it takes. asks: whether
    the result depends on `--reuse`."""

    run: Callable[[ChatSession, Item, Memory], list[Any]]
    needs: Callable[[ChatSession, Item], int]
    asks: bool = True


PASSES: Mapping[str, Pass] = {
    "answers": Pass(answers, _needs_to_answer),
    "beside": Pass(_beside, _needs_to_answer),
    "text": Pass(_text, lambda chat, item: len(_scored(chat, item)[0]), asks=False),
}


# -- items that are longer than the model's context -----------------------------------------------

TRUNCATIONS = ("none", "middle")


def fitted(
    chat: ChatSession, items: Iterable[Item], passes: Sequence[Pass], truncate: str
) -> tuple[list[Item], int, int]:
    """The items that fit the model's context with their answers in each of the passes, in their
    order; how many of them were cut to fit, with `truncate` "middle"; how many others do not fit.
    """
    found: list[Item] = []
    cut = skipped = 0
    for item in items:
        fits = _over(chat, item, passes) <= 0
        shorter = item if fits else _shortened(chat, item, passes) if truncate == "middle" else None
        found += [] if shorter is None else [shorter]
        cut += not fits and shorter is not None
        skipped += shorter is None
    return found, cut, skipped


def _over(chat: ChatSession, item: Item, passes: Sequence[Pass]) -> int:
    """How many positions more than the model has the item takes."""
    return max(one.needs(chat, item) for one in passes) - chat.max_context


def _shortened(chat: ChatSession, item: Item, passes: Sequence[Pass]) -> Item | None:
    """The item without the middle of its prompt, as LongBench's pred.py does it: equally many
    tokens stay at either end. None where the document would not be more than its question."""
    tokenizer, question = chat.tokenizer, item.questions[0]
    ids = tokenizer.encode(item.document + question)
    keep = len(ids)
    while (over := _over(chat, item, passes)) > 0:
        keep -= over
        half = keep // 2
        end = tokenizer.decode(ids[-half:]) if half > 0 else ""
        if not end.endswith(question) or len(end) == len(question):
            return None
        document = tokenizer.decode(ids[:half]) + end[: len(end) - len(question)]
        item = replace(item, document=document)
    return item

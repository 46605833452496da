"""How a task runs a document through a chat: for answers, perplexity, or attention lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.cache.kv_cache import KVCache
from minikv.chat import plan, reading
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Document, Message, Template
from minikv.cli.eval.items import Item
from minikv.cli.eval.rereading import Rereading
from minikv.engine.decode_loop import Network
from minikv.engine.engine import Engine, Predicting
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


def _opening(chat: ChatSession, item: Item) -> int:
    """Tokens of the shortest first prompt: with a question, unless the chat is `blind`."""
    return min(len(prompts(chat, one)[0]) for one in item.single())


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


# -- attention lost ---------------------------------------------------------------------------


def _lost(chat: ChatSession, item: Item, _: Memory | None = None) -> list[float]:
    """Attention lost at each token of the right answer, mean over layers; of a chat's first
    question, or of each that is asked apart."""
    found = []
    for one in item.single():
        chat.reset()
        parts, answer = prompts(chat, one), _answer(chat, one)
        if sum(map(len, parts)) + len(answer) > chat.max_context:
            raise ContextError("a document does not fit the model", "choose a smaller --length")
        with worded(chat, one, 0):
            reading.prepare(chat.engine.kv, chat.tokenizer, chat.template)
        heard = Shadow(chat.engine.network, chat.engine.kv)
        for ids in parts:
            heard.prompt(ids)
        found += [heard.step(token) for token in answer]
    return found


def _answer(chat: ChatSession, item: Item) -> list[int]:
    return chat.tokenizer.encode(item.right[0][0])


def _needs_to_lose(chat: ChatSession, item: Item) -> int:
    return max(sum(map(len, prompts(chat, one))) + len(_answer(chat, one)) for one in item.single())


class Shadow:
    """A `Network` and an `Attend` in one: feeds a network over a cache and stores every key, to
    measure the attention that is lost.

    A step loses 1 minus the probability of the tokens that the cache still holds, under attention
    over all tokens ever seen (in a layer with a sliding window, over those in the window); mean
    over the query heads and layers.
    """

    def __init__(self, network: Network, kv: KVCache) -> None:
        self._network, self._kv = network, kv
        self._to: Attend = kv
        self._keys: list[Tensor | None] = [None] * kv.shape.layers  # [H, T, D] each
        self._lost: list[float] = []
        self._hears = False

    def prompt(self, ids: Sequence[int]) -> None:
        """Read a prompt, or the next part of one."""
        first, self._hears = not self._kv.position, True
        Engine(self, self._kv, capture=None).prompt(ids)
        # Of a prompt that was read before only the end is computed again.
        if first and isinstance(self._network, Rereading):
            self._keys = list(self._network.keys())

    def step(self, token: int) -> float:
        """Feed a token. The attention that is lost."""
        self._lost, self._hears = [], True
        self.forward(torch.tensor([token], device=self._kv.device), self._kv)
        return sum(self._lost) / len(self._lost)

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `Network`. A later forward of the same prompt only scores: its keys do not stay."""
        if not self._hears:
            return self._network.forward(ids, kv)
        self._to = kv
        logits = self._network.forward(ids, self)
        self._hears = False
        return logits

    def hidden(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `minikv.engine.engine.Predicting`. Keys are heard when the prompt itself is fed."""
        return cast(Predicting, self._network).hidden(ids, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `minikv.engine.engine.Predicting`."""
        return cast(Predicting, self._network).logits(hidden)

    @property
    def position(self) -> int | Tensor:
        """See `minikv.cache.attend.Attend`, as everything below."""
        return self._to.position

    @property
    def watch(self) -> Callable[[Tensor], None] | None:
        return getattr(self._to, "watch", None)

    def advance(self, tokens: int) -> None:
        self._to.advance(tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before, rows = self._keys[layer], k.to(torch.float32, copy=True).transpose(0, 1)
        self._keys[layer] = keys = rows if before is None else torch.cat((before, rows), 1)
        reads = self._kv.reading
        out = self._to.attend(layer, q, k, v)
        if not reads:
            self._lost.append(self._missed(layer, q[0], keys))
        return out

    def _missed(self, layer: int, q: Tensor, keys: Tensor) -> float:
        shape = self._kv.shape
        query = q.float().view(shape.kv_heads, -1, shape.head_dim)
        logits = query @ keys.transpose(1, 2).float() * shape.head_dim**-0.5
        window = shape.windows[layer]
        if window is not None and keys.shape[1] > window:
            logits[..., : keys.shape[1] - window] = -torch.inf
        p = logits.softmax(-1).mean(1)  # [H, N]
        kept = [p[h, self._kv.attended(layer, h)].sum() for h in range(shape.kv_heads)]
        return 1.0 - float(torch.stack(kept).mean())


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pass:
    """run(chat, item, memory): measure a document: a list of answers, of the attention lost at each
    token, or of `Token`s. memory: of the same document, empty for the first policy. needs: the
    most positions it takes. reads: tokens of the first prompt, of which a budget may be a share.
    asks: whether the result depends on `--reuse`."""

    run: Callable[[ChatSession, Item, Memory], list[Any]]
    needs: Callable[[ChatSession, Item], int]
    reads: Callable[[ChatSession, Item], int]
    asks: bool = True


PASSES: Mapping[str, Pass] = {
    "answers": Pass(answers, _needs_to_answer, _opening),
    "beside": Pass(_beside, _needs_to_answer, _opening),
    "text": Pass(
        _text,
        lambda chat, item: len(_scored(chat, item)[0]),
        lambda chat, item: _scored(chat, item)[1],
        asks=False,
    ),
    "loss": Pass(_lost, _needs_to_lose, _opening),
}

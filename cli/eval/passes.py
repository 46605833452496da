"""How a task runs a document through a chat: for answers, perplexity, or attention lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.chat import reading
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Message
from minikv.cli.eval import wording
from minikv.cli.eval.files import Item
from minikv.cli.eval.measure import Shadow, negative_log_likelihood
from minikv.cli.eval.rereading import Rereading
from minikv.engine.engine import Engine, Network, Predicting
from minikv.errors import ContextError


@dataclass(frozen=True, slots=True)
class Pass:
    """run(chat, item): measure a document; a list of answers, or of numbers by token. needs: the
    most positions it takes. reads: tokens of the first prompt, of which a budget may be a share.
    asks: whether the result depends on `--reuse`."""

    run: Callable[[ChatSession, Item], list[Any]]
    needs: Callable[[ChatSession, Item], int]
    reads: Callable[[ChatSession, Item], int]
    asks: bool = True


def answers(chat: ChatSession, item: Item) -> list[str]:
    """The answers to the questions of an item, in one chat, or each in a chat of its own."""
    if item.at_once:
        chat.pending.append(wording.document(item))
        return written(chat, item)
    made = []
    for number, question in enumerate(item.questions):
        if item.apart and number:
            chat.reset()
        if item.apart or not number:
            chat.pending.append(wording.document(item))
        with wording.worded(chat, item, number):
            # Not stripped: the metrics know what white space means to them.
            answer = "".join(chat.ask(question, max_tokens=item.max_tokens))
        made.append(answer.lstrip("\n").split("\n")[0] if item.first_line else answer)
    return made


def written(chat: ChatSession, item: Item) -> list[str]:
    """The answers to the questions of an item, as one answer to a prompt with all of them."""
    answers = ["".join(chat.ask(item.opening, max_tokens=item.max_tokens))]
    messages, vocab = list(chat.messages), chat.tokenizer.vocab
    owed = [] if chat.pending_token is None else [chat.pending_token]
    for question in item.questions[1:]:
        messages.append(Message("user", question))
        for token in owed + chat.template.following(messages):
            logits = chat.engine.step(token)
        stream, text, owed = chat.tokenizer.stream(), "", []
        for _ in range(item.max_tokens):
            token = int(logits[:vocab].argmax())
            if token in chat.tokenizer.stop_ids:
                break
            text += stream.push(token)
            logits = chat.engine.step(token)
        answers.append(text + stream.flush())
        messages.append(Message("assistant", answers[-1]))
    return answers


def _needs_to_answer(chat: ChatSession, item: Item) -> int:
    """Positions of all questions, if every answer is as long as it may be."""
    if item.apart:
        return max(_needs_to_answer(chat, one) for one in item.single())
    needed = len(wording.opening(chat, item, 0)) + item.max_tokens
    for question in item.questions[1:]:
        asked = [Message("user", "a"), Message("assistant", "a"), Message("user", question)]
        needed += len(chat.template.following(asked)) + item.max_tokens
    return needed


def _opening(chat: ChatSession, item: Item) -> int:
    """Tokens of the shortest first prompt: with a question, but where the chat is `blind`."""
    return min(len(wording.parts(chat, one, 0)[0]) for one in item.single())


def _perplexity(chat: ChatSession, item: Item) -> list[float]:
    """Nats of each token in the last quarter of the document."""
    reading.prepare(chat.engine.kv, chat.tokenizer, chat.template)
    return negative_log_likelihood(chat.engine, *_scored(chat, item))


def _scored(chat: ChatSession, item: Item) -> tuple[list[int], int]:
    """The document's tokens and how many of them are read as a prompt."""
    # Without what a chat begins with, a BOS above all, a real model's perplexity is off by far.
    start, ids = chat.start(), chat.tokenizer.encode(item.document)
    return start + ids, len(start) + max(1, 3 * len(ids) // 4)


def _lost(chat: ChatSession, item: Item) -> list[float]:
    """Attention lost at each token of the right answer, mean over layers; of a chat's first
    question, or of each that is asked apart."""
    found = []
    for one in item.single():
        chat.reset()
        found += _lost_by_answer(chat, one)
    return found


def _lost_by_answer(chat: ChatSession, item: Item) -> list[float]:
    kv, network = chat.engine.kv, chat.engine.network
    prompts, answer = wording.parts(chat, item, 0), _answer(chat, item)
    with wording.worded(chat, item, 0):
        reading.prepare(kv, chat.tokenizer, chat.template)
    if sum(map(len, prompts)) + len(answer) > chat.max_context:
        raise ContextError("a document does not fit the model", "choose a smaller --length")
    keys: list[Tensor] = []
    for ids in prompts:
        heard = _Heard(network)
        Engine(heard, kv, capture=None).prompt(ids)
        # Of a prompt that was read before only the end is computed again.
        if not keys and isinstance(network, Rereading):
            new = network.keys()
        else:
            new = [torch.cat(layer, 1) for layer in heard.keys]
        keys = [torch.cat(both, 1) for both in zip(keys, new, strict=True)] if keys else new
    shadow = Shadow(kv, keys)
    for token in answer:
        network.forward(torch.tensor([token], device=kv.device), shadow)
    return [float(x.mean()) for x in shadow.lost]


class _Heard:
    """A `Network` that remembers the keys of the first forward, [H, T, D] a layer."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._done = False
        self.keys: list[list[Tensor]] = []

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `Network`. A later forward of the same prompt only scores."""
        if self._done:
            return self._network.forward(ids, kv)
        self._done = True
        return self._network.forward(ids, _Hearing(kv, self.keys))

    def hidden(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `minikv.engine.engine.Predicting`. Keys are heard when the prompt itself is fed."""
        return cast(Predicting, self._network).hidden(ids, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `minikv.engine.engine.Predicting`."""
        return cast(Predicting, self._network).logits(hidden)


class _Hearing:
    """`Attend` that keeps the keys which pass."""

    def __init__(self, kv: Attend, keys: list[list[Tensor]]) -> None:
        self.position, self.advance = kv.position, kv.advance
        self._kv, self._keys = kv, keys

    @property
    def watch(self) -> Callable[[Tensor], None] | None:
        """See `Attend`."""
        return getattr(self._kv, "watch", None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        if layer == len(self._keys):
            self._keys.append([])
        self._keys[layer].append(k.to(torch.float32, copy=True).transpose(0, 1))
        return self._kv.attend(layer, q, k, v)


def _answer(chat: ChatSession, item: Item) -> list[int]:
    """The right answer to the first question."""
    return chat.tokenizer.encode(item.right[0][0])


def _needs_to_lose(chat: ChatSession, item: Item) -> int:
    return max(
        len(wording.opening(chat, one, 0)) + len(_answer(chat, one)) for one in item.single()
    )


PASSES: Mapping[str, Pass] = {
    "answers": Pass(answers, _needs_to_answer, _opening),
    "ppl": Pass(
        _perplexity,
        lambda chat, item: len(_scored(chat, item)[0]),
        lambda chat, item: _scored(chat, item)[1],
        asks=False,
    ),
    "loss": Pass(_lost, _needs_to_lose, _opening),
}

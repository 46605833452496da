"""The ways in which a document is put through a chat: for answers, perplexity, attention lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minikv.chat.session import ChatSession
from minikv.chat.transcript import Document, Message
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.measure import Shadow, negative_log_likelihood
from minikv.cli.evaluation.rereading import Rereading
from minikv.errors import ContextError


@dataclass(frozen=True, slots=True)
class Pass:
    """run(chat, item): what is measured of a document, a list of answers or of numbers by token.
    needs: positions that it takes at most. reads: tokens of the first prompt, which a budget as a
    share is of."""

    run: Callable[[ChatSession, Item], list[Any]]
    needs: Callable[[ChatSession, Item], int]
    reads: Callable[[ChatSession, Item], int]


def answers(chat: ChatSession, item: Item) -> list[str]:
    """To the questions of an item, in one chat."""
    chat.attach(item.document, "report.txt")
    made = []
    for question in item.questions:
        # Not stripped: the metrics know what white space means to them.
        answer = "".join(chat.ask(question, max_tokens=item.max_tokens))
        made.append(answer.lstrip("\n").split("\n")[0] if item.first_line else answer)
    return made


def _needs_to_answer(chat: ChatSession, item: Item) -> int:
    """Positions of all questions, if every answer is as long as it may be."""
    needed = len(_opening(chat, item)) + item.max_tokens
    for question in item.questions[1:]:
        asked = [Message("user", "a"), Message("assistant", "a"), Message("user", question)]
        needed += len(chat.template.following(asked)) + item.max_tokens
    return needed


def _opening(chat: ChatSession, item: Item) -> list[int]:
    """The prompt with the document and its first question."""
    content = Document(item.document, "report.txt").rendered() + item.questions[0]
    return chat.template.opening([*chat.messages, Message("user", content)])


def _perplexity(chat: ChatSession, item: Item) -> list[float]:
    """Nats of each token in the last quarter of the document."""
    return negative_log_likelihood(chat.engine, *_scored(chat, item))


def _scored(chat: ChatSession, item: Item) -> tuple[list[int], int]:
    """The document's tokens and how many of them are read as a prompt."""
    # Without what a chat begins with, a BOS above all, a real model's perplexity is off by far.
    start, ids = chat.start(), chat.tokenizer.encode(item.document)
    return start + ids, len(start) + max(1, 3 * len(ids) // 4)


def _lost(chat: ChatSession, item: Item) -> list[float]:
    """Attention lost at each token of the right answer, mean over layers."""
    kv, network = chat.engine.kv, chat.engine.network
    prompt, answer = _opening(chat, item), _answer(chat, item)
    if len(prompt) + len(answer) > chat.max_context:
        raise ContextError("a document does not fit the model", "choose a smaller --length")
    if isinstance(network, Rereading) and not kv.stride:
        chat.engine.prompt(prompt)
        shadow = Shadow(kv, network.keys())
    else:
        shadow = Shadow(kv)
        kv.begin(len(prompt))
        network.forward(torch.tensor(prompt, device=kv.device), shadow)
    for token in answer:
        network.forward(torch.tensor([token], device=kv.device), shadow)
    return [float(x.mean()) for x in shadow.lost]


def _answer(chat: ChatSession, item: Item) -> list[int]:
    """The right answer to the first question."""
    return chat.tokenizer.encode(item.right[0][0])


PASSES: Mapping[str, Pass] = {
    "answers": Pass(answers, _needs_to_answer, lambda chat, item: len(_opening(chat, item))),
    "ppl": Pass(
        _perplexity,
        lambda chat, item: len(_scored(chat, item)[0]),
        lambda chat, item: _scored(chat, item)[1],
    ),
    "loss": Pass(
        _lost,
        lambda chat, item: len(_opening(chat, item)) + len(_answer(chat, item)),
        lambda chat, item: len(_opening(chat, item)),
    ),
}

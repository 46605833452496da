"""Several answers in one: one prompt has all questions, and one answer has all values.

This is a long answer that the bundled model can write, because it was trained on one short value
after the other. Between two values, the next question is fed again, token by token, as a part of
the answer. So a step policy evicts about 45 times before the last value. The first value shows what
a prompt policy lost; the later ones show what a step policy lost in addition.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from minikv.chat.session import ChatSession
from minikv.chat.transcript import Message
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.tasks import TRAINED, Manner
from minikv.models.bundled import exam
from minikv.models.bundled.exam import Codec

QUESTIONS = 4


def interview(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with `QUESTIONS` questions each, about facts whose values have at least
    `how.least` tokens; about any facts, if the document has too few of those."""
    for i in range(count):
        doc, rng = exam.fresh(codec, tokens, seed + i), random.Random(seed + i)
        long = [f for f in doc.facts if len(codec.encode(f.answer)) >= how.least]
        few = rng.sample(long if len(long) >= QUESTIONS else list(doc.facts), QUESTIONS)
        yield Item(
            doc.text,
            tuple(rng.choice(f.questions) + how.adds for f in few),
            tuple((f.answer,) for f in few),
            how.metric,
            max_tokens=how.max_tokens,
            at_once=True,
        )


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

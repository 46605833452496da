"""How a document is put through a chat."""

from __future__ import annotations

import pytest

import minikv
from minikv.chat.transcript import Message
from minikv.cli.eval import passes, run
from minikv.cli.eval.files import Item
from minikv.cli.eval.measure import negative_log_likelihood
from minikv.engine.engine import Engine


def test_perplexity_begins_as_a_chat_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the BOS and what stands before the user's words; the last quarter is scored."""
    chat = minikv.load(policy="full")
    fed: list[tuple[list[int], int]] = []

    def spy(engine: Engine, tokens: list[int], read: int) -> list[float]:
        fed.append((tokens, read))
        return negative_log_likelihood(engine, tokens, read)

    monkeypatch.setattr(passes, "negative_log_likelihood", spy)
    text = "The mill was cold. " * 20
    one = run.Run(
        chat, ["ppl"], [Item(text, ("What?",), (("a",),))] * 2, run.choices([], [], [], 0)
    )
    one.measure(lambda done, total: None)
    tokens, read = fed[0]
    plain = chat.tokenizer.encode(text)
    start = tokens[: len(tokens) - len(plain)]
    assert start
    assert tokens[len(start) :] == plain
    assert chat.template.opening([Message("user", text)])[: len(tokens)] == tokens
    assert read == len(start) + 3 * len(plain) // 4
    assert one.cells()[0].n == 2 * (len(tokens) - read)

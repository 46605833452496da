"""The real command line over a fake model, as a process of its own: `fake_main.py PACE ARGS...`.

PACE seconds pass at every chunk of a prompt and at every token, so that a test can interrupt. With
FAKE_ANSWER in the environment, the model has tags for thoughts, and each of its answers is this.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import minikv.cli.chat.turn
from minikv.cli.main import run
from minikv.settings import Settings

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession


def main() -> None:
    use_fake(float(sys.argv.pop(1)))
    run()


def use_fake(pace: float) -> None:
    """From now on this process has the fake model in the place of any other."""

    def build(settings: Settings, progress: object = None) -> ChatSession:
        # Most tests of the command line end before a model is needed, and torch takes a second.
        from fakes import END, ByteTokenizer, ChatML, FakeEngine, ThinkML

        from minikv.chat.session import ChatSession

        engine = FakeEngine(length=40)
        engine.hook = lambda fed: time.sleep(pace)
        tokenizer = ByteTokenizer()
        template = ChatML(tokenizer)
        if answer := os.environ.get("FAKE_ANSWER"):
            template = ThinkML(tokenizer, opens=False)
            engine.length, engine.script = 1 << 20, [*answer.encode(), END]
        return ChatSession(
            engine, tokenizer, template, replace(settings, reuse="once"), max_context=4096
        )  # type: ignore[arg-type]

    minikv.cli.chat.turn.build = build


if __name__ == "__main__":
    main()

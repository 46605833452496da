"""The real command line over a fake model, as a process of its own: `fake_main.py PACE ARGS...`.

PACE seconds pass at every chunk of a prompt and at every token, so that a test can interrupt.
"""

from __future__ import annotations

import sys
import time

from fakes import ByteTokenizer, ChatML, FakeEngine

import minikv.cli.turn
from minikv.chat.session import ChatSession
from minikv.cli.main import run
from minikv.settings import Settings


def main() -> None:
    pace = float(sys.argv.pop(1))

    def build(settings: Settings, progress: object = None) -> ChatSession:
        engine = FakeEngine(length=40)
        engine.hook = lambda fed: time.sleep(pace)
        tokenizer = ByteTokenizer()
        return ChatSession(
            engine,
            tokenizer,
            ChatML(tokenizer),
            max_context=4096,
            eviction=settings.eviction(),
            seed=settings.seed,
            system=settings.system,
        )  # type: ignore[arg-type]

    minikv.cli.turn.build = build
    run()


if __name__ == "__main__":
    main()

"""A chat over a small random network that speaks bytes."""

from __future__ import annotations

from typing import Any

from fakes import END, PADDED, ByteTokenizer, ChatML, FakeEngine, ThinkML
from small import SPOKEN, network, over
from views import kept

from minikv.chat.answer import Verification
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import TurnReport
from minikv.chat.session import ChatSession
from minikv.engine.engine import Engine
from minikv.settings import Settings, settings_of


def chat(
    policy: str = "adakv",
    budget: int | str = 48,
    layers: int = 2,
    window: int | None = None,
    decode: str = "auto",
    **given: Any,
) -> ChatSession:
    """A session over a small random network that speaks bytes. window: of all layers."""
    size = {"max_context": 2048}
    net = network(64, 3, windows=(window,) * layers, vocab=PADDED, **size, **SPOKEN)
    eviction = EvictionConfig.read(policy, decode, budget)
    engine = Engine(net, over(net, eviction.rules()))
    return chat_over(engine, eviction=eviction, **size, **given)


def chat_over(
    engine: Any, tokenizer: Any = None, template: Any = None, **given: Any
) -> ChatSession:
    """A chat whose settings are given by name, with the others; later questions are answered from
    what the first one left, unless `reuse` says otherwise. By default it speaks bytes."""
    tokenizer = tokenizer or ByteTokenizer()
    template = template or ChatML(tokenizer)
    if "fidelity" in given:
        given["fidelity"] = "on" if given["fidelity"] else "off"
    named = {name: given.pop(name) for name in settings_of(Settings) if name in given}
    settings = Settings(**{"reuse": "once"} | named)
    return ChatSession(engine, tokenizer, template, settings, **{"max_context": 4096} | given)


def scripted(text: str, *, opens: bool = False) -> ChatSession:
    """A chat over a fake whose every answer is this text, with its thoughts."""
    engine = FakeEngine(length=10_000)
    template = ThinkML(ByteTokenizer(), opens=opens)
    engine.script = [0] * len(template.opens) + [*text.encode(), END]
    return chat_over(engine, template.tokenizer, template)


def say(session: ChatSession, question: str, tokens: int = 8) -> tuple[str, list[int]]:
    """The answer, and all that was fed up to it."""
    answer = "".join(session.ask(question, tokens, 0.7))
    return answer, list(session.fed)


def talked(session: ChatSession, document: str, *questions: str) -> ChatSession:
    """The chat, with the document attached and these questions asked about it."""
    session.attach(document)
    for question in questions:
        say(session, question)
    return session


def held_of(session: ChatSession) -> list[list[int]]:
    return kept(session.engine.kv)  # type: ignore[arg-type]


def reported(session: ChatSession) -> TurnReport:
    """The record of the last turn."""
    assert session.report is not None
    return session.report


def verified(session: ChatSession) -> Verification:
    """The last answer, written again without eviction."""
    list(session.verify())
    assert session.verified is not None
    return session.verified

"""A chat over fakes with a cache that forgets, for tests of what is exported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from fakes import FakeEngine, FakeKv
from small_chat import chat_over

from minikv.cache.stats import Shape
from minikv.chat.closing import Facts
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.export.facts import ChatFacts, Section

LAYERS, HEADS = 3, 2
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!-- ]]> ' \" ` &amp; &lt; {{ 7 * 7 }} {% raw %}\u2028\u2029\x1b]0;owned\x07\x1b[31m\x00\x9b"
    "\u202egnp.exe\u202c\u2066x\u2069\U000e0041[bold]red[/bold] été 日本語 👩‍🔬 \U0001f600"
)


class Forgetful(FakeKv):
    """Head h of layer l keeps the positions that l + h + 2 divides."""

    def kept(self, layer: int, head: int) -> torch.Tensor:
        return torch.arange(0, self.position, layer + head + 2)


def chat(system: str = "") -> ChatSession:
    engine = FakeEngine()
    engine.kv = Forgetful()
    engine.kv.shape = Shape(LAYERS, HEADS, HEADS, 8, (None,) * LAYERS, 4096)  # type: ignore[attr-defined]
    facts = Facts(model="someone/fake-7B", revision="abc", weight_bytes=1 << 30)
    given = {"eviction": EvictionConfig.read("adakv", budget=64), "facts": facts, "system": system}
    return chat_over(engine, **given)


def large(facts: ChatFacts, layers: int, heads: int, tokens: int) -> ChatFacts:
    """`facts` with made-up tokens and kept sets of that size: a page as large as they get."""
    draw = np.random.default_rng(0)
    return replace(
        facts,
        model={**facts.model, "layers": layers, "kv_heads": heads},
        text=tuple(f" word{i % 1000}" if i % 40 else "\n" for i in range(tokens)),
        sections=(Section("document", "report.pdf", 10, tokens - 10),),
        held=draw.random((layers, heads, tokens)) < 0.5,
    )

"""Gathers the facts of a chat that an export shows, and converts them to JSON.

The JSON of `/export chat.json`, version 1. The version increases when a key changes its meaning.

    format      "minikv chat"
    version     1
    minikv      version of the program that wrote it
    made        when, UTC, ISO 8601
    model       name, revision ("" if none), dtype, device, kernels, weight_bytes, layers, kv_heads,
                max_context (positions)
    policy      at the time of the export: name, decode, options, budget {unit, value}
    system      the system prompt, "" if none
    documents   [{name (or null), characters}]
    turns       [{question, answer, documents: indices into documents, record, thoughts}]; `record`
                is the turn record of `minikv ask --json`; thoughts: "" if there are none
    tokens      {text, sections}: every token that was fed, in order. text[i] is what token i added
                to the text: "" if it is the beginning of a character that a later token completes,
                null for a control token. sections: [{kind, label, start, end}], kind is document,
                question or answer, start and end are token positions, end exclusive
    kept        [[bitmap per KV head] per layer]: base64; bit i % 8 of byte i // 8, counted from the
                least significant, says whether the head still holds token i
    curve       [[tokens seen, bytes held, bytes a full cache would hold]], measured at the end of
                each reading and of each answer
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minikv
from minikv.cli.chat.kept import Spans, held, spell
from minikv.cli.screen.render import PIPED

if TYPE_CHECKING:
    import numpy as np

    from minikv.chat.report import TurnReport
    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Turn

_OF_MODEL = ("revision", "dtype", "device", "kernels", "weight_bytes")
_PATH = re.compile(r"(?<![\w/:.])(?:~|/[^\s/'\"`(),;:]+)(?:/[^\s/'\"`(),;:]+)*/([^\s/'\"`(),;:]+)")


@dataclass(frozen=True, slots=True)
class Section:
    """The tokens [start, end) of a document, a question or an answer."""

    kind: str
    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class ChatFacts:
    """All that an export shows. model, policy: as in the JSON, and text, sections as in its
    `tokens`. held: bool [L, H, T]. curve: (tokens seen, bytes held, bytes of a full cache)."""

    made: str
    model: Mapping[str, Any]
    policy: Mapping[str, Any]
    system: str
    turns: tuple[Turn, ...]
    text: tuple[str | None, ...]
    sections: tuple[Section, ...]
    held: np.ndarray
    curve: tuple[tuple[int, int, int], ...]

    @property
    def last(self) -> TurnReport:
        """The newest turn record."""
        return self.turns[-1].report

    def to_dict(self) -> dict[str, object]:
        """The JSON object that is documented above."""
        import numpy as np

        documents: list[object] = []
        turns = []
        for turn in self.turns:
            before = len(documents)
            documents += [{"name": d.name, "characters": len(d.text)} for d in turn.documents]
            turns.append(
                {
                    "question": turn.question,
                    "answer": turn.answer,
                    "documents": list(range(before, len(documents))),
                    "record": turn.report.to_dict(),
                    "thoughts": turn.thoughts,
                }
            )
        bitmaps = np.packbits(self.held, axis=2, bitorder="little")
        return {
            "format": "minikv chat",
            "version": 1,
            "minikv": minikv.__version__,
            "made": self.made,
            "model": self.model,
            "policy": self.policy,
            "system": self.system,
            "documents": documents,
            "turns": turns,
            "tokens": {"text": self.text, "sections": [asdict(one) for one in self.sections]},
            "kept": [
                [base64.b64encode(bits.tobytes()).decode() for bits in layer] for layer in bitmaps
            ],
            "curve": self.curve,
        }


def gather(session: ChatSession) -> ChatFacts:
    """The facts of a chat between two turns. Reads the cache, changes nothing."""
    facts, eviction, shape = session.facts, session.eviction, session.engine.kv.shape
    spans = spell(session.tokenizer, session.fed)
    return ChatFacts(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        model={
            "name": _without_folder(facts.model),
            **{name: getattr(facts, name) for name in _OF_MODEL},
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "max_context": session.max_context,
        },
        policy={
            "name": eviction.policy,
            "decode": eviction.decode,
            "options": eviction.options_record(),
            "budget": eviction.budget_record(),
        },
        system=session.system,
        turns=tuple(map(_without_paths, session.turns)),
        text=_pieces(spans, len(session.fed)),
        sections=_sections(spans, session.turns, forgets=session.forgets),
        held=held(session).numpy(),
        curve=tuple(session.curve),
    )


def _without_folder(name: str) -> str:
    """A model's name; for a directory of this machine, only its last part."""
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    local = path.is_absolute() or name.startswith((".", "~")) or path.is_dir()
    return (path.name or path.resolve().name) if local else name


def _without_paths(turn: Turn) -> Turn:
    """The turn with only the last part of each absolute path in its warnings."""
    warnings = tuple(_PATH.sub(r"\1", line) for line in turn.report.warnings)
    return replace(turn, report=replace(turn.report, warnings=warnings))


def _pieces(spans: Spans, tokens: int) -> tuple[str | None, ...]:
    """The text that each of the first `tokens` tokens adds, as in `text` of the JSON."""
    pieces: list[str | None] = [None] * tokens
    for token, start, end in zip(
        spans.token, spans.start, (*spans.start, len(spans.text))[1:], strict=True
    ):
        pieces[token] = spans.text[start:end]
    return tuple(pieces)


def _sections(spans: Spans, turns: Sequence[Turn], *, forgets: bool = False) -> tuple[Section, ...]:
    """The token ranges of the texts of the conversation, found by searching the text of each turn.

    forgets: the template leaves out the thoughts of earlier turns. A text that the template changed
    is not found and gets no section.
    """
    text, sections = spans.text, []

    def mark(kind: str, label: str, part: str, begin: int) -> None:
        """A section for `part` without the space around it, if it begins at `begin`."""
        bare = part.strip()
        begin += len(part) - len(part.lstrip())
        if bare and text[begin : begin + len(bare)] == bare:
            found = spans.overlap(begin, begin + len(bare))
            first, last = spans.token[found[0]], spans.token[found[-1]]
            sections.append(Section(kind, label, first, last + 1))

    def place(token: int) -> int:
        """Where the text of the tokens from position `token` on begins."""
        return (*spans.start, len(text))[bisect_left(spans.token, token)]

    before = 0
    for number, turn in enumerate(turns, 1):
        # Search the end of the prompt of this turn: a short text may also occur elsewhere.
        spent = turn.report.tokens
        end = place(spent.prompt_reused + spent.prompt_new)
        message = turn.messages()[0].content
        at, before = text.rfind(message.strip(), before, end), end
        if at < 0:
            at = len(text)  # the message was not found, so nothing is marked
        at -= len(message) - len(message.lstrip())
        for document in turn.documents:
            shown = document.rendered()
            name = document.name or PIPED
            mark("document", name, document.text, at + shown.rfind(document.text))
            at += len(shown)
        mark("question", f"question {number}", turn.question, at)
        answer = turn.answer.strip()
        # After its thoughts, or where they would be if the template has left them out since.
        end = place(spent.prompt_reused + spent.prompt_new + spent.thoughts)
        left_out = forgets and spent.thoughts and turn is not turns[-1]
        end = at + len(turn.question) if left_out else end
        mark("answer", f"answer {number}", answer, text.find(answer, end))
    return tuple(sections)

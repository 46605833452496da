"""The facts of a chat that a report shows: gathered from a session, and as JSON.

The JSON of `/export chat.json`, version 1. The version is raised when a key changes its meaning.

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
                is the turn record of `minikv ask --json`, or null if none is known; thoughts: ""
                or missing if there are none
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
from typing import TYPE_CHECKING, NamedTuple

import minikv
from minikv.chat.report import TurnReport, thought_for
from minikv.cli.chat.kept import Spans, spell
from minikv.cli.screen.render import budget_words, pair_words

if TYPE_CHECKING:
    from torch import Tensor

    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Turn as Asked

FORMAT = "minikv chat"
VERSION = 1
_PATH = re.compile(r"(?<![\w/:.])(?:~|/[^\s/'\"`(),;:]+)(?:/[^\s/'\"`(),;:]+)*/([^\s/'\"`(),;:]+)")
KINDS = ("document", "question", "answer")


@dataclass(frozen=True, slots=True)
class Model:
    """The model that answered, and the device it ran on."""

    name: str
    revision: str
    dtype: str
    device: str
    kernels: str
    weight_bytes: int
    layers: int
    kv_heads: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Policy:
    """The eviction settings. budget: its unit and value, both None if there is none."""

    name: str
    decode: str
    options: Mapping[str, object]
    budget: Mapping[str, object]

    @property
    def words(self) -> str:
        """ "global-span, then h2o, budget 512 tokens per head"."""
        return f"{pair_words(self.name, self.decode)}, {budget_words(self.budget)}"


@dataclass(frozen=True, slots=True)
class Attached:
    """A document. Its text is in the tokens."""

    name: str | None
    characters: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer. documents: indices into those of the chat. record: what was
    measured, or None."""

    question: str
    answer: str
    documents: tuple[int, ...]
    record: TurnReport | None
    thoughts: str = ""

    @property
    def folded(self) -> str:
        """ "thought for 312 tokens"."""
        return thought_for(self.record.tokens.thoughts) if self.record else "thoughts"


@dataclass(frozen=True, slots=True)
class Section:
    """Tokens [start, end) that are a document's, a question's or an answer's text."""

    kind: str
    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """What each token added to the text, and the texts that they are."""

    text: tuple[str | None, ...]
    sections: tuple[Section, ...]


class Point(NamedTuple):
    """Bytes of KV cache held after so many tokens, and what a full cache would hold."""

    tokens: int
    held: int
    full: int


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """All that a report shows: the keys of the JSON."""

    minikv: str
    made: str
    model: Model
    policy: Policy
    system: str
    documents: tuple[Attached, ...]
    turns: tuple[Turn, ...]
    tokens: Tokens
    kept: tuple[tuple[str, ...], ...]
    curve: tuple[Point, ...]

    @property
    def last(self) -> TurnReport | None:
        """The newest turn record; None if there is none."""
        return next((turn.record for turn in reversed(self.turns) if turn.record), None)

    def to_dict(self) -> dict[str, object]:
        """What `json.dumps` writes as documented above."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def gather(session: ChatSession) -> ChatFacts:
    """The facts of a chat between two turns. Reads the cache, changes nothing."""
    facts, eviction, shape = session.facts, session.eviction, session.engine.kv.shape
    spans = spell(session.tokenizer, session.fed)
    documents = [document for turn in session.turns for document in turn.documents]
    return ChatFacts(
        minikv=minikv.__version__,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        model=Model(
            name=_without_folder(facts.model),
            revision=facts.revision,
            dtype=facts.dtype,
            device=facts.device,
            kernels=facts.kernels,
            weight_bytes=facts.weight_bytes,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            max_context=session.max_context,
        ),
        policy=Policy(
            eviction.policy, eviction.decode, eviction.options_record(), eviction.budget_record()
        ),
        system=session.system,
        documents=tuple(Attached(d.name, len(d.text)) for d in documents),
        turns=_turns(session.turns),
        tokens=Tokens(
            _pieces(spans, len(session.fed)),
            _sections(spans, session.turns, forgets=session.forgets),
        ),
        kept=tuple(
            tuple(
                bitmap(session.kept(layer, head), len(session.fed))
                for head in range(shape.kv_heads)
            )
            for layer in range(shape.layers)
        ),
        curve=tuple(Point(*point) for point in session.curve),
    )


def _without_folder(name: str) -> str:
    """A model's name. A directory of this machine is named by its last part alone."""
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    local = path.is_absolute() or name.startswith((".", "~")) or path.is_dir()
    return (path.name or path.resolve().name) if local else name


def bitmap(positions: Tensor, tokens: int) -> str:
    """A set of positions below `tokens` (LongTensor [n]), in the format of `kept` of the JSON."""
    import numpy as np

    held = np.zeros(tokens, dtype=bool)
    held[positions.cpu().numpy()] = True
    return base64.b64encode(np.packbits(held, bitorder="little").tobytes()).decode()


def _pieces(spans: Spans, tokens: int) -> tuple[str | None, ...]:
    """What each of so many tokens adds to the text, as in `text` of the JSON."""
    pieces: list[str | None] = [None] * tokens
    for token, start, end in zip(
        spans.token, spans.start, (*spans.start, len(spans.text))[1:], strict=True
    ):
        pieces[token] = spans.text[start:end]
    return tuple(pieces)


def _turns(turns: Sequence[Asked]) -> tuple[Turn, ...]:
    """The turns, with their documents as indices into those of the chat, in the same order. Of an
    absolute path in a warning, only the last part stays."""
    shown: list[Turn] = []
    before = 0
    for turn in turns:
        brought = range(before, before + len(turn.documents))
        before = brought.stop
        lines = tuple(_PATH.sub(r"\1", line) for line in turn.report.warnings)
        record = replace(turn.report, warnings=lines)
        shown.append(Turn(turn.question, turn.answer, tuple(brought), record, turn.thoughts))
    return tuple(shown)


def _sections(
    spans: Spans, turns: Sequence[Asked], *, forgets: bool = False
) -> tuple[Section, ...]:
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

    count = 0
    for number, turn in enumerate(turns, 1):
        # Search where the record says the turn was read: a short text may also occur elsewhere.
        spent = turn.report.tokens
        end = place(spent.prompt_reused + spent.prompt_new)
        message = turn.messages()[0].content
        at = text.rfind(message.strip(), place(spent.prompt_reused), end)
        if at < 0:
            at = len(text)  # the message was not found, so nothing is marked
        at -= len(message) - len(message.lstrip())
        for document in turn.documents:
            count += 1
            shown = document.rendered()
            name = document.name or f"document {count}"
            mark("document", name, document.text, at + shown.rfind(document.text))
            at += len(shown)
        mark("question", f"question {number}", turn.question, at)
        answer = turn.answer.strip()
        # Behind its thoughts, or where they would be if the template has left them out since.
        end = place(spent.prompt_reused + spent.prompt_new + spent.thoughts)
        left_out = forgets and spent.thoughts and turn is not turns[-1]
        end = at + len(turn.question) if left_out else end
        mark("answer", f"answer {number}", answer, text.find(answer, end))
    return tuple(sections)

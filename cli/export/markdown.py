"""A chat as a readable Markdown transcript, with a table of figures per turn."""

from __future__ import annotations

import re

from minikv.chat.report import size
from minikv.cli.export.facts import ChatFacts, Turn
from minikv.cli.export.safe import visible
from minikv.cli.screen.render import figures

_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def render(facts: ChatFacts) -> str:
    """The transcript. Questions and answers are quoted, so that code fences and headings in them do
    not affect the rest. HTML and images in them stay text."""
    model, policy = facts.model, facts.policy
    revision = f" @ {model.revision[:12]}" if model.revision else ""
    parts = [
        f"# Chat with {_cell(model.name + revision)}",
        "\n".join(
            [
                f"- {_cell(model.dtype)}, {size(model.weight_bytes)} of weights, context "
                f"{model.max_context:,}, {_cell(model.device)} with {_cell(model.kernels)} kernels",
                f"- policy {_cell(policy.words)}",
                f"- written by minikv {_cell(facts.minikv)}, {_cell(facts.made)}",
            ]
        ),
    ]
    if facts.system:
        parts.append(f"System prompt:\n\n{_quote(facts.system)}")
    for number, turn in enumerate(facts.turns, 1):
        parts.append(_turn(facts, number, turn))
    return visible("\n\n".join(parts) + "\n")


def _turn(facts: ChatFacts, number: int, turn: Turn) -> str:
    parts = [f"## Question {number}"]
    for index in turn.documents:
        document = facts.documents[index]
        name = _cell(document.name or f"document {index + 1}")
        parts.append(f"With {name}, {document.characters:,} characters.")
    parts.append(_quote(turn.question))
    parts.append(f"**Answer {number}**")
    if turn.thoughts:
        parts.append(f"<details><summary>{turn.folded}</summary>")
        parts += [_quote(turn.thoughts), "</details>"]
    parts.append(_quote(turn.answer))
    if turn.record is None:
        parts.append("No figures were recorded for this turn.")
        return "\n\n".join(parts)
    parts += [f"Warning: {_cell(line)}" for line in turn.record.warnings]
    table = ["| figure | value |", "|---|---|"]
    table += [f"| {name} | {_cell(value)} |" for name, value in figures(turn.record)]
    return "\n\n".join([*parts, "\n".join(table)])


def _quote(text: str) -> str:
    lines = _inert(text).split("\n") if text.strip() else ["(empty)"]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def _inert(text: str) -> str:
    return _TAG.sub("&lt;", text).replace("![", "!\\[")


def _cell(text: str) -> str:
    """The text in one line, with Markdown escaped."""
    line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", line)

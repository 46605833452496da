"""A chat as a readable Markdown transcript, with a table of figures per turn."""

from __future__ import annotations

import re

import minikv
from minikv.chat.report import size, thought_for
from minikv.cli.export.facts import ChatFacts
from minikv.cli.screen.render import figures

_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def render(facts: ChatFacts) -> str:
    """The transcript. Questions and answers are quoted, so that code fences and headings in them do
    not affect the rest. HTML and images in them stay text."""
    model = facts.model
    revision = f" @ {model.revision[:12]}" if model.revision else ""
    parts = [
        f"# Chat with {_cell(model.name + revision)}",
        f"- {_cell(model.dtype)}, {size(model.weight_bytes)} of weights, context "
        f"{model.max_context:,}, {_cell(model.device)} with {_cell(model.kernels)} kernels\n"
        f"- policy {_cell(facts.policy.words)}\n"
        f"- written by minikv {_cell(minikv.__version__)}, {_cell(facts.made)}",
    ]
    if facts.system:
        parts.append(f"System prompt:\n\n{_quote(facts.system)}")
    for number, (turn, documents) in enumerate(zip(facts.turns, facts.attached(), strict=True), 1):
        parts.append(f"## Question {number}")
        parts += [f"With {_cell(name)}, {length:,} characters." for name, length in documents]
        parts += [_quote(turn.question), f"**Answer {number}**"]
        if turn.thoughts:
            folded = thought_for(turn.report.tokens.thoughts)
            parts.append(f"<details><summary>{folded}</summary>")
            parts += [_quote(turn.thoughts), "</details>"]
        parts.append(_quote(turn.answer))
        parts += [f"Warning: {_cell(line)}" for line in turn.report.warnings]
        rows = [f"| {name} | {_cell(value)} |" for name, value in figures(turn.report)]
        parts.append("\n".join(["| figure | value |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _quote(text: str) -> str:
    inert = _TAG.sub("&lt;", text).replace("![", "!\\[")
    lines = inert.split("\n") if text.strip() else ["(empty)"]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def _cell(text: str) -> str:
    """The text in one line, with Markdown escaped."""
    line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", line)

"""A chat as one HTML page. It loads nothing, runs only its own script and escapes foreign text."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources

from minikv.chat.report import percent_saved, size
from minikv.cli.export.answers import formatted
from minikv.cli.export.facts import ChatFacts, Turn
from minikv.cli.export.figures import rows
from minikv.cli.export.safe import visible
from minikv.cli.render import budget_words
from minikv.cli.wording import worded


def render(facts: ChatFacts) -> str:
    """The page. Foreign text gets into it in three ways: by the template, which escapes it; as the
    HTML of an answer's Markdown, see `answers`; and as JSON in which no character has a meaning for
    an HTML parser."""
    import jinja2

    folder = resources.files("minikv.cli.export")
    style, script, page = (
        folder.joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "js", "html")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(page).render(
        # The browser refuses every script and style but these two.
        policy=(
            "default-src 'none'; base-uri 'none'; form-action 'none'; "
            f"script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
            "require-trusted-types-for 'script'; trusted-types 'none'"
        ),
        style=style,
        script=script,
        data=_data(facts),
        **_words(facts),
    )


def _words(facts: ChatFacts) -> dict[str, object]:
    """The values of the template, as text."""
    model, policy = facts.model, facts.policy
    return {
        "title": visible(f"{_short(model.name)}: {policy.name}"),
        "model": visible(model.name),
        "revision": visible(model.revision[:12]),
        "policy_words": visible(policy.words),
        "chips": [
            visible(chip)
            for chip in (
                f"policy {policy.name}",
                f"while answering {policy.decode}",
                budget_words(policy.budget),
            )
        ],
        "machine": [
            (name, visible(value))
            for name, value in (
                ("Model", model.name),
                ("Revision", model.revision or "none"),
                ("Weights", f"{size(model.weight_bytes)}, {model.dtype}"),
                ("Shape", f"{model.layers} layers × {model.kv_heads} KV heads"),
                ("Context", f"{model.max_context:,} tokens"),
                ("Ran on", f"{model.device}, {model.kernels} kernels"),
                ("Policy", policy.words),
                ("Options", _options(facts)),
            )
        ],
        "made": visible(facts.made),
        "minikv": visible(facts.minikv),
        "system": visible(facts.system),
        "cards": _cards(facts),
        "share": _share(facts),
        "turns": [_turn(facts, number, turn) for number, turn in enumerate(facts.turns, 1)],
        "tokens": len(facts.pieces),
    }


def _cards(facts: ChatFacts) -> list[tuple[str, str, str]]:
    """(name, figure, what it means) of the last turn."""
    report = facts.last
    if report is None:
        return []
    tokens, kv = report.tokens, report.kv_bytes
    cards = [
        (
            "KV cache saved",
            percent_saved(kv.saved) if kv.saved > 0 else "–",
            report.memory,
        ),
        (
            "Tokens kept per head",
            f"{tokens.kept_mean:,.0f}",
            f"of {tokens.seen_total:,}, min {tokens.kept_min:,}, max {tokens.kept_max:,}",
        ),
        ("First token", f"{report.time_s.first_token:.2f} s", "after the last question"),
    ]
    if report.rate.decode_tok_s is not None:
        cards.append(("Writing", f"{report.rate.decode_tok_s:.1f} tok/s", "measured, last answer"))
    return cards


def _share(facts: ChatFacts) -> int | None:
    """Bytes held as a percentage of a full cache, rounded, for the bar in the header. None if not
    known."""
    report = facts.last
    if report is None or not report.kv_bytes.full:
        return None
    return round(100 * (1 - report.kv_bytes.saved))


def _turn(facts: ChatFacts, number: int, turn: Turn) -> dict[str, object]:
    report = turn.report
    return {
        "number": number,
        "question": visible(turn.question),
        "answer": formatted(visible(turn.answer)) if turn.answer.strip() else "",
        "documents": [
            (
                visible(facts.documents[i].name or f"document {i + 1}"),
                f"{facts.documents[i].characters:,} characters",
            )
            for i in turn.documents
        ],
        "lines": [visible(worded(line)) for line in report.lines()] if report else [],
        "warnings": [visible(line) for line in report.warnings] if report else [],
        "rows": [(name, visible(value)) for name, value in rows(report)] if report else [],
    }


def _options(facts: ChatFacts) -> str:
    plain = [
        f"{name}={value}"
        for name, value in facts.policy.options.items()
        if isinstance(value, str | int | float)
    ]
    return ", ".join(plain) or "none"


def _data(facts: ChatFacts) -> str:
    """The JSON for the script: the tokens, the heads that hold them, and the memory curve."""
    data = {
        "layers": facts.model.layers,
        "heads": facts.model.kv_heads,
        "pieces": [None if piece is None else visible(piece) for piece in facts.pieces],
        "sections": [[s.kind, visible(s.label), s.start, s.end] for s in facts.sections],
        "kept": facts.kept,
        "curve": [[point.tokens, point.held, point.full] for point in facts.curve],
    }
    text = json.dumps(data, separators=(",", ":"))
    # json.dumps gives ASCII. Only these three could end the element or begin a comment.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]

"""A chat as one HTML page. It loads nothing, runs no script and escapes foreign text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from minikv.chat.report import percent_saved, size
from minikv.cli.export.facts import ChatFacts, Point
from minikv.cli.export.safe import visible
from minikv.cli.screen.render import budget_words, figures
from minikv.cli.screen.strips import percent
from minikv.cli.wording import worded

if TYPE_CHECKING:
    import numpy as np

LEVELS = 10  # shades, as many as classes s1 to s10 in page.css
_BARS = 120  # of the strip above the text
_WIDE, _HIGH = 420, 200  # of the chart, as in page.html
_FOREIGN = ("link", "image", "autolink", "html_inline", "html_block", "reference", "entity")


def render(facts: ChatFacts) -> str:
    """The page. Foreign text gets into it in two ways: by the template, which escapes it, and as
    the HTML of an answer's Markdown, see `formatted`."""
    import jinja2

    folder = resources.files("minikv.cli.export")
    style, page = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "html"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(figures=figures, formatted=formatted, worded=worded)
    # The browser refuses every script, and every style but this one.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    values = {**_header(facts), **_text(facts), **_memory(facts.curve)}
    return visible(
        environment.from_string(page).render(facts=facts, policy=policy, style=style, **values)
    )


def formatted(text: str) -> str:
    """The Markdown of an answer as HTML: text, lists, tables and code. No link, image or HTML of
    the answer becomes one of the page, and no attribute comes from it."""
    parser = _parser()
    tokens = parser.parse(text)
    for token in tokens:
        start = token.attrs.get("start")
        token.attrs = {} if start is None else {"start": int(start)}
        token.info = ""  # the language of code would become a class
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h4"  # below the page's own headings
    return str(parser.renderer.render(tokens, parser.options, {}))


@cache
def _parser() -> MarkdownIt:
    return (
        MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table").disable(_FOREIGN)
    )


def _header(facts: ChatFacts) -> Mapping[str, object]:
    """What the page begins and ends with: model, policy, machine, the figures of the last turn."""
    model, policy, report = facts.model, facts.policy, facts.last
    cards = []
    share = None
    if report is not None:
        tokens, kv = report.tokens, report.kv_bytes
        saved = percent_saved(kv.saved) if kv.saved > 0 else "–"
        kept = f"of {tokens.seen_total:,}, min {tokens.kept_min:,}, max {tokens.kept_max:,}"
        cards = [
            ("KV cache saved", saved, report.memory),
            ("Tokens kept per head", f"{tokens.kept_mean:,.0f}", kept),
            ("First token", f"{report.time_s.first_token:.2f} s", "after the last question"),
        ]
        if (rate := report.rate.decode_tok_s) is not None:
            cards.append(("Writing", f"{rate:.1f} tok/s", "measured, last answer"))
        share = round(100 * (1 - kv.saved)) if kv.full else None
    options = [
        f"{name}={value}"
        for name, value in policy.options.items()
        if isinstance(value, str | int | float)
    ]
    chips = [f"policy {policy.name}", f"while answering {policy.decode}"]
    chips.append(budget_words(policy.budget))
    return {
        "title": f"{model.name.rstrip('/').rsplit('/', 1)[-1]}: {policy.name}",
        "chips": [*chips, *([f"revision {model.revision[:12]}"] if model.revision else [])],
        "cards": cards,
        "share": share,
        "machine": [
            ("Model", model.name),
            ("Revision", model.revision or "none"),
            ("Weights", f"{size(model.weight_bytes)}, {model.dtype}"),
            ("Shape", f"{model.layers} layers × {model.kv_heads} KV heads"),
            ("Context", f"{model.max_context:,} tokens"),
            ("Ran on", f"{model.device}, {model.kernels} kernels"),
            ("Policy", policy.words),
            ("Options", ", ".join(options) or "none"),
        ],
    }


def _text(facts: ChatFacts) -> Mapping[str, object]:
    """The tokens with the share of the heads that hold them, the strip above them, and how many
    tokens each head holds."""
    import numpy as np

    count, heads = len(facts.tokens.text), facts.model.layers * facts.model.kv_heads
    if not count or not heads:
        return {"parts": []}
    held = np.zeros(count, dtype=np.int64)  # by how many heads
    rows = np.zeros((facts.model.layers, facts.model.kv_heads), dtype=np.int64)
    for layer, bitmaps in enumerate(facts.kept):
        for head, bitmap in enumerate(bitmaps):
            packed = np.frombuffer(base64.b64decode(bitmap), dtype=np.uint8)
            bits = np.unpackbits(packed, count=count, bitorder="little")
            held += bits
            rows[layer, head] = bits.sum()
    some = int(np.count_nonzero(held))
    bars = min(count, _BARS)
    edges = np.arange(bars + 1) * count // bars
    shares = np.add.reduceat(held, edges[:-1]) / (heads * np.diff(edges))
    largest = float(shares.max())
    return {
        "parts": _parts(facts, held, heads),
        "strip": [
            {
                "height": round(50 * share / largest, 1) if share else 0,
                "words": f"tokens {begin:,} to {end - 1:,}: {percent(share)} kept",
            }
            for share, begin, end in zip(
                shares.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True
            )
        ],
        "bands": [
            {
                "kind": section.kind,
                "x": round(section.start / count * bars, 2),
                "width": round((section.end - section.start) / count * bars, 2),
                "words": f"{section.label}: tokens {section.start:,} to {section.end - 1:,}",
            }
            for section in facts.tokens.sections
        ],
        "most": percent(largest),
        "kept": (
            f"A head holds {percent(float(rows.mean()) / count)} of the tokens on average; "
            f"{some:,} of {count:,} tokens are held by at least one head."
        ),
        "map": _map(rows, count),
    }


def _parts(facts: ChatFacts, held: np.ndarray, heads: int) -> Sequence[Mapping[str, object]]:
    """The tokens, from one beginning of a document, question or answer to the next."""
    looks = ["mark " * (not piece) for piece in facts.tokens.text]
    levels = -(-LEVELS * held // heads)
    tokens = [
        {
            "look": f"{look}s{level}",
            "words": f"token {i:,}: {by:,} of {heads:,} heads",
            "text": "·" if piece is None else piece,
        }
        for i, (piece, look, level, by) in enumerate(
            zip(facts.tokens.text, looks, levels.tolist(), held.tolist(), strict=True)
        )
    ]
    labels = {0: ""} | {section.start: section.label for section in facts.tokens.sections}
    starts = sorted(labels)
    return [
        {"label": labels[begin], "tokens": tokens[begin:end]}
        for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
    ]


def _map(rows: np.ndarray, count: int) -> Mapping[str, object]:
    """A table of heads by layers. Its shades go from the fewest tokens of a head to the most."""
    low, high = int(rows.min()), int(rows.max())

    def cell(layer: int, head: int) -> Mapping[str, object]:
        kept = int(rows[layer, head])
        level = 1 + round((LEVELS - 1) * (kept - low) / (high - low)) if high > low else 6
        place = f"layer {layer}, KV head {head}"
        return {
            "level": level if kept else 0,
            "words": f"{place}: {kept:,} of {count:,} tokens kept ({percent(kept / count)})",
            "text": f"{kept:,}" if layers <= 12 else "",
        }

    layers, heads = rows.shape
    return {
        "rows": [[cell(layer, head) for layer in range(layers)] for head in range(heads)],
        "step": -(-layers // 8),
        "words": f"{low:,} to {high:,} tokens" if high > low else f"{low:,} tokens each",
    }


def _memory(curve: Sequence[Point]) -> Mapping[str, object]:
    """The chart of bytes held and bytes of a full cache, and its table."""
    far = max([1, *(point.tokens for point in curve)])
    most = max([1, *(max(point.held, point.full) for point in curve)])

    def place(tokens: int, size: int) -> tuple[float, float]:
        return round(_WIDE * tokens / far, 1), round(_HIGH - _HIGH * size / most, 1)

    def line(values: Sequence[tuple[int, int]]) -> str:
        return " ".join("{},{}".format(*place(*value)) for value in [(0, 0), *values])

    points = []
    for point in curve:
        held, full = size(point.held), size(point.full)
        share = 1 - point.held / point.full if point.full else 0
        saved = percent_saved(share) if share > 0 else "nothing"
        (x, high), (_, above) = (
            place(point.tokens, point.held),
            place(point.tokens, point.full),
        )
        points.append(
            {
                "x": x,
                "held": high,
                "full": above,
                "cells": (f"{point.tokens:,}", held, full, saved),
                "words": f"after {point.tokens:,} tokens: {held} held, {full} in a full cache, "
                f"{saved} saved",
            }
        )
    return {
        "curve": points,
        "chart": {
            "most": size(most),
            "half": size(most // 2),
            "tokens": f"{far:,}",
            "held": line([(point.tokens, point.held) for point in curve]),
            "full": line([(point.tokens, point.full) for point in curve]),
        },
    }

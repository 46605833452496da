"""`/export FILE`: writes the chat as an HTML page or as JSON, according to the file's name. The
page loads nothing, runs no script and escapes foreign text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import minikv
from minikv.chat.report import amount, percent_saved, size, thought_for
from minikv.cli.chat.slash import Command, Context
from minikv.cli.export.facts import ChatFacts, gather
from minikv.cli.paths import write
from minikv.cli.screen.render import PIPED, budget_words, figures, pair_words, percent
from minikv.cli.screen.text import clean
from minikv.cli.settings.config import worded
from minikv.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from markdown_it import MarkdownIt

    from minikv.cli.export.facts import ChatFacts


_FORCE = "--force"
_FORMATS = (".html", ".json")


def export(context: Context, arguments: list[str]) -> None:
    """Write the chat so far to a file. Raises UsageError, and then no file has changed."""
    names = [argument for argument in arguments if argument != _FORCE]
    if len(names) != 1 or (names[0].startswith("-") and len(names[0]) > 1):
        raise UsageError(
            "/export takes one file",
            f"/export report.html or chat.json; {_FORCE} replaces a file that exists",
        )
    path = Path(os.path.expanduser(names[0]))
    # Refuse before reading the cache.
    kind = path.suffix.lower()
    if kind == ".md":
        raise UsageError("/export writes no Markdown", "`minikv chats show NAME` prints a chat")
    if kind not in _FORMATS:
        raise UsageError(
            f"cannot tell from {clean(path.name)!r} what to write",
            f"the name must end in {' or '.join(_FORMATS)}",
        )
    _refuse(path, _FORCE in arguments)
    if not context.session.turns:
        raise UsageError("there is nothing to export yet", "ask a question first")
    data = rendered(gather(context.session), kind).encode()
    _refuse(path, _FORCE in arguments)
    try:
        write(path.parent, path.name, data, 0o666)
    except OSError as error:
        raise _cannot(path, error) from None
    context.terminal.say(f"{clean(str(path))}: {size(len(data))}")


def rendered(facts: ChatFacts, kind: str) -> str:
    """The text of a file: JSON, or a page without invisible characters."""
    if kind == ".json":
        return json.dumps(facts.to_dict(), indent=1) + "\n"
    return _visible(render(facts))


def _visible(text: str) -> str:
    """`text` with names instead of the characters that `clean` drops (controls, bidi overrides,
    tags, lone surrogates), because an export shows every token."""
    return "".join(c if clean(c) else _name(ord(c)) for c in text) if clean(text) != text else text


def _name(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures, e.g. for ESC
    return f"⟨U+{code:04X}⟩"


def _refuse(path: Path, force: bool) -> None:
    """Raise UsageError if the path exists, is not a regular file, or has no directory."""
    shown = clean(str(path))
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UsageError(f"no directory {clean(str(path.parent))}", "make it first") from None
        return
    except OSError as error:
        raise _cannot(path, error) from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{shown} is not a regular file", "choose another name")
    if not force:
        raise UsageError(f"{shown} exists", "--force replaces it, or choose another name")


def _cannot(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {clean(str(path))}: {error.strerror or error}", "nothing was written"
    )


# -- the page -----------------------------------------------------------------------------------

LEVELS = 10  # shades, as many as classes s1 to s10 in page.css
_BARS = 120  # in the strip above the text
_FOREIGN = ("link", "image", "autolink", "html_inline", "html_block", "reference", "entity")


def render(facts: ChatFacts) -> str:
    """The page. Foreign text enters it in two ways: through the template, which escapes it, and as
    the HTML of an answer's Markdown, see `formatted`."""
    import jinja2

    folder = resources.files("minikv.cli.export")
    style, page = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "html"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        figures=figures, formatted=formatted, worded=worded, size=size, thoughts=thought_for
    )
    # The browser refuses every script, and every style but this one.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.from_string(page).render(
        facts=facts,
        piped=PIPED,
        version=minikv.__version__,
        style=style,
        allowed=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'",
        cards=_cards(facts),
        policy=_policy_words(facts),
        machine=_machine(facts),
        curve=_curve(facts),
        **_text(facts),
    )


def formatted(text: str) -> str:
    """The Markdown of an answer as HTML: text, lists, tables and code. Links, images and HTML in
    the answer do not become active, and no attribute comes from it."""
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
    from markdown_it import MarkdownIt

    return (
        MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table").disable(_FOREIGN)
    )


def _cards(facts: ChatFacts) -> Sequence[tuple[str, str, str]]:
    """The figures of the last turn: name, figure, meaning."""
    tokens, kv, rate = facts.last.tokens, facts.last.kv_bytes, facts.last.rate.decode_tok_s
    saved = percent_saved(kv.saved) if kv.saved > 0 else "–"
    kept = f"of {tokens.seen_total:,}, min {tokens.kept_min:,}, max {tokens.kept_max:,}"
    cards = [
        ("KV cache saved", saved, facts.last.memory),
        ("Tokens kept per head", f"{tokens.kept_mean:,.0f}", kept),
        ("First token", f"{facts.last.time_s.first_token:.2f} s", "after the last question"),
    ]
    if rate is not None:
        cards.append(("Writing", f"{rate:.1f} tok/s", "measured, last answer"))
    return cards


def _machine(facts: ChatFacts) -> Sequence[tuple[str, str]]:
    model = facts.model
    options = [
        f"{name}={value}"
        for name, value in facts.policy["options"].items()
        if isinstance(value, str | int | float)
    ]
    return [
        ("Model", model["name"]),
        ("Revision", model["revision"] or "none"),
        ("Weights", f"{size(model['weight_bytes'])}, {model['dtype']}"),
        ("Shape", f"{model['layers']} layers × {model['kv_heads']} KV heads"),
        ("Context", f"{model['max_context']:,} tokens"),
        ("Ran on", f"{model['device']}, {model['kernels']} kernels"),
        ("Policy", _policy_words(facts)),
        ("Options", ", ".join(options) or "none"),
    ]


def _policy_words(facts: ChatFacts) -> str:
    """ "global-span, then h2o, budget 512 tokens per head"."""
    policy = facts.policy
    return f"{pair_words(policy['name'], policy['decode'])}, {budget_words(policy['budget'])}"


def _curve(facts: ChatFacts) -> Sequence[tuple[str, str, str, str, float, float]]:
    """The rows of the table of memory: tokens, bytes held, those of a full cache, the saving, and
    both numbers of bytes in percent of the largest."""
    most = max([1, *(max(held, full) for _, held, full in facts.curve)])
    rows = []
    for tokens, held, full in facts.curve:
        share = 1 - held / full if full else 0
        saved = percent_saved(share) if share > 0 else "nothing"
        bars = round(100 * held / most, 1), round(100 * full / most, 1)
        rows.append((f"{tokens:,}", size(held), size(full), saved, *bars))
    return rows


def _text(facts: ChatFacts) -> Mapping[str, object]:
    """The tokens with the share of the heads that hold them, the strip above them, and how many
    tokens each head holds."""
    import numpy as np

    layers, heads, count = facts.held.shape
    if not count:
        return {"parts": []}
    by = facts.held.sum(axis=(0, 1))  # how many heads hold each token
    bars = min(count, _BARS)
    edges = np.arange(bars + 1) * count // bars
    shares = np.add.reduceat(by, edges[:-1]) / (layers * heads * np.diff(edges))
    largest = float(shares.max())
    mean = percent(float(facts.held.mean()))
    return {
        "parts": _parts(facts, by, layers * heads),
        "strip": [
            (
                round(50 * share / largest, 1) if share else 0,
                f"tokens {begin:,} to {end - 1:,}: {percent(share)} kept",
            )
            for share, begin, end in zip(
                shares.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True
            )
        ],
        "scale": bars / count,
        "kept": f"The tallest bar is {percent(largest)}. A head holds {mean} of the tokens on "
        f"average; {np.count_nonzero(by):,} of {amount(count, 'token')} are held by at least "
        "one head.",
        "map": _map(facts.held.sum(axis=2), count),
    }


def _parts(facts: ChatFacts, by: np.ndarray, heads: int) -> Sequence[Mapping[str, object]]:
    """The tokens in parts, each from the beginning of a document, question or answer to the next
    one."""
    tokens = [
        (
            f"{'mark ' * (not piece)}s{-(-LEVELS * held // heads)}",
            f"token {i:,}: {held:,} of {heads:,} heads",
            "·" if piece is None else piece,
        )
        for i, (piece, held) in enumerate(zip(facts.text, by.tolist(), strict=True))
    ]
    labels = {0: ""} | {section.start: section.label for section in facts.sections}
    starts = sorted(labels)
    return [
        {"label": labels[begin], "tokens": tokens[begin:end]}
        for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
    ]


def _map(rows: np.ndarray, count: int) -> Sequence[Sequence[tuple[str, str, str]]]:
    """A row of cells for each head, one for each layer: class, words, text. The shades go from the
    fewest tokens of a head to the most."""
    low, high = int(rows.min()), int(rows.max())

    def cell(layer: int, head: int, kept: int) -> tuple[str, str, str]:
        level = 1 + round((LEVELS - 1) * (kept - low) / max(high - low, 1))
        place = f"layer {layer}, KV head {head}"
        words = f"{place}: {kept:,} of {amount(count, 'token')} kept ({percent(kept / count)})"
        return f"s{level if kept else 0}", words, f"{kept:,}" if len(rows) <= 12 else ""

    return [
        [cell(layer, head, kept) for layer, kept in enumerate(column)]
        for head, column in enumerate(rows.T.tolist())
    ]


COMMANDS = (
    Command(
        ("export",),
        "FILE.html|json [--force]",
        "write the chat as a report or a file",
        export,
        files=True,
        follows=(_FORCE,),
    ),
)

"""Which heads still hold which tokens, for /export; and `/kept`: the document on screen, shaded by
the share of heads that hold each token.

Not only colour shows this: each line begins with its mean share, as a block and as a percentage.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, product
from typing import TYPE_CHECKING

from minikv.chat.report import amount
from minikv.cli.chat.slash import Command, Context
from minikv.cli.screen.render import PIPED, level, percent, strip
from minikv.cli.screen.terminal import BLOCKS, Screen
from minikv.cli.screen.text import broken, cells, clipped, folded, shown
from minikv.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Document, Tokenizer


@dataclass(frozen=True, slots=True)
class Spans:
    """The text of a run of tokens, piece by piece.

    Piece k is text[start[k] : end[k]] and belongs to the token at position token[k]. Tokens without
    text (control tokens) have no piece; tokens that together spell one character all have the same
    piece. Start and end ascend.
    """

    text: str
    token: tuple[int, ...]
    start: tuple[int, ...]
    end: tuple[int, ...]

    def overlap(self, begin: int, end: int) -> range:
        """The pieces that overlap text[begin:end]."""
        return range(bisect_right(self.end, begin), bisect_left(self.start, end))


@dataclass(frozen=True, slots=True)
class Part:
    """A document in the cache: the tokens at positions first to last, the last one excluded."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Which of the T tokens fed so far each KV head holds, and the text of the tokens.

    held: bool [L, H, T] on the host. parts: the documents whose text was found among the tokens, in
    order; there may be none.
    """

    held: Tensor
    spans: Spans
    parts: tuple[Part, ...]

    @property
    def slots(self) -> int:
        """L x H: how many heads can hold a token."""
        return int(self.held.shape[0] * self.held.shape[1])

    def share(self) -> Tensor:
        """float32 [T]: the share of the heads that hold each token."""
        import torch

        return self.held.flatten(0, 1).sum(0, dtype=torch.float32) / self.slots

    def rows(self) -> Tensor:
        """int64 [L, H]: tokens held by each head."""
        return self.held.sum(2)

    def among(self, tokens: Sequence[int]) -> Tensor:
        """int64 [L, H]: how many of the tokens at these positions each head holds."""
        return self.held[:, :, list(tokens)].sum(2)


def read(session: ChatSession) -> Kept:
    """The present facts of a chat. Between turns only; if nothing was fed, T is 0."""
    spans = spell(session.tokenizer, session.fed)
    parts = filter(None, locate(spans, session.documents))
    return Kept(held(session), spans, tuple(parts))


def held(session: ChatSession) -> Tensor:
    """bool [L, H, T]: whether a head holds the token at position t of `session.fed`."""
    import torch

    shape = session.engine.kv.shape
    found = torch.zeros(shape.layers, shape.kv_heads, len(session.fed), dtype=torch.bool)
    for layer, head in product(range(shape.layers), range(shape.kv_heads)):
        found[layer, head, session.kept(layer, head)] = True
    return found


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> Spans:
    """The text of `ids`, as from `tokenizer.decode`, and where each token's text is.

    A stream returns no text for a control token, and none yet for the first bytes of a character.
    Decoding the token alone tells these two apart, and whether it ends inside a character.
    """
    alone: dict[int, tuple[bool, bool]] = {}

    def look(id: int) -> tuple[bool, bool]:
        """Whether the token has any text, and whether it ends inside a character."""
        stream = tokenizer.stream()
        said, rest = stream.push(id), stream.flush()
        return bool(said or rest), bool(rest)

    stream = tokenizer.stream()
    pieces: list[str] = []
    token: list[int] = []
    start: list[int] = []
    end: list[int] = []
    length = 0
    for position, id in enumerate(ids):
        piece = stream.push(id)
        if id not in alone:
            alone[id] = look(id)
        has_text, unfinished = alone[id]
        if not piece and not has_text:
            continue
        pieces.append(piece)
        token.append(position)
        start.append(length)
        length += len(piece)
        end.append(length + (unfinished or not piece))
    pieces.append(stream.flush())
    return Spans("".join(pieces), tuple(token), tuple(start), tuple(end))


def locate(spans: Spans, documents: Sequence[Document]) -> list[Part | None]:
    """Where the documents are among the tokens; None for a document whose text the tokenizer
    changes (a normaliser)."""
    parts: list[Part | None] = []
    at = 0
    for document in documents:
        whole = document.rendered()
        begin = spans.text.find(whole, at)  # with its name: a short text may also be elsewhere
        begin = (
            begin + whole.rfind(document.text) if begin >= 0 else spans.text.find(document.text, at)
        )
        if begin < 0:
            parts.append(None)
            continue
        at = begin + len(document.text)
        pieces = spans.overlap(begin, at)
        first, last = spans.token[pieces[0]], spans.token[pieces[-1]] + 1
        parts.append(Part(document.name or PIPED, first, last))
    return parts


MOST_SLICES = 64
MOST_DOCUMENTS = 8
PAGE = 40
"""Lines of text that /kept shows, if they need not fit a screen."""
LEAST = 5
"""Lines of text on the smallest screen."""
_BELOW = 3  # rows of the screen below the text: an empty one, the prompt and the toolbar
LISTED = 8
"""The most occurrences that `/kept find` lists: they fit on a screen."""
LIKELY_LOST = 0.1
"""A phrase is likely lost if a smaller share of the heads holds all of it."""
# Background and foreground of the 256-colour table, from no head to all heads. The scale is that
# of viridis: lightness increases, so that the order can be seen without hues. Every pair has a
# contrast of at least 4.5. None is one of the 16 colours that a terminal's theme sets, so they look
# the same on dark and light terminals.
SHADES = (
    (234, 250),
    (53, 231),
    (55, 231),
    (25, 231),
    (30, 16),
    (36, 16),
    (77, 16),
    (148, 16),
    (227, 16),
)
_USAGE = '/kept, /kept all, /kept find "TEXT"'
_NAME = 24  # cells of a document's name
_GUTTER = 7  # a block, a percentage and the spaces around them


# -- the command ----------------------------------------------------------------------------


def _kept(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    if not session.fed:
        how = "your next question reads or recalls it again"
        terminal.say(f"nothing is cached: {how}" if session.turns else "no turn yet")
        return
    facts, width = read(session), terminal.screen.width
    match arguments:
        case ["find", text] if text.strip():
            recalls = session.reuse in ("auto", "recall") and bool(session.recall.place)
            terminal.say(find(facts, text.strip(), width, recalls=recalls))
        case [] | ["all"]:
            first = terminal.set(summary(session, facts, width)).split("\n")
            terminal.page(page(facts, terminal.screen, first, whole=bool(arguments)))
        case _:
            raise UsageError(f"/kept does not take {' '.join(arguments)!r}", _USAGE)


COMMANDS = (
    Command(
        ("kept",),
        '[all | find "TEXT"]',
        "the text shaded by how many heads still hold it; or where a phrase is still held",
        _kept,
        follows=("all", "find"),
    ),
)


# -- strips ---------------------------------------------------------------------------------


def strips(session: ChatSession, width: int) -> str:
    """What the cache holds, as strips of at most `width` columns (40 at the least); "" before the
    first turn."""
    facts = read(session)
    if not session.fed:
        return ""
    rows = [[float(n) for n in layer] for layer in facts.rows().tolist()]
    return f"{by_head(rows, width)}\n{along(facts, width)}"


def by_head(rows: Sequence[Sequence[float]], width: int) -> str:
    """One strip per KV head, along the layers. rows[layer][head]: how many tokens are held."""
    layers, heads = len(rows), len(rows[0])
    largest = max(max(layer) for layer in rows)
    lines = [f"kept per layer and KV head: {BLOCKS[-1]} is {largest:,.0f} tokens, the most in one"]
    runs = -(-layers // (width - len(f"  head {heads - 1} ||")))
    each = -(-layers // runs)  # so that the runs are of about equal length
    for first in range(0, layers, each):
        last = min(first + each, layers)
        lines += [f"  layers {first} to {last - 1}"] * (layers > 1)
        lines += [
            f"  {f'head {head}':<{len(f'head {heads - 1}')}} "
            + strip([rows[layer][head] for layer in range(first, last)], largest)
            for head in range(heads)
        ]
    return "\n".join(lines)


def along(facts: Kept, width: int) -> str:
    """The mean share of heads that hold a token, along each document."""
    share = facts.share()
    places = [(clipped(p.name, width), p.first, p.last) for p in facts.parts]
    places = places[:MOST_DOCUMENTS] or [("the chat", 0, len(share))]
    lines = []
    for name, first, last in places:
        count = min(MOST_SLICES, width - 4, last - first)
        ends = [first + (last - first) * i // count for i in range(count + 1)]
        values = [float(share[a:b].mean()) for a, b in pairwise(ends)]
        each = f"{count} slices of about {round((last - first) / count):,} tokens"
        if count == last - first:
            each = "a sign per token"
        top = f"{BLOCKS[-1]} is {percent(max(values))} of the heads" if any(values) else "nothing"
        lines += [f"kept along {name}, {each}: {top}", f"  {strip(values, max(values))}"]
    if len(facts.parts) > MOST_DOCUMENTS:
        lines.append(f"  and {len(facts.parts) - MOST_DOCUMENTS} more documents")
    return "\n".join(lines)


# -- the summary and the pages ----------------------------------------------------------------


def summary(session: ChatSession, facts: Kept, width: int) -> str:
    """How much was kept, and a strip of where it was kept."""
    layers, heads, tokens = facts.held.shape
    rows = facts.rows()
    lines = [
        f"kept {percent(float(facts.share().mean()))} of {amount(tokens, 'token')} in "
        f"{layers} x {heads} heads (layers x KV heads): {float(rows.double().mean()):,.1f} "
        f"in each on average, {int(rows.min()):,} to {int(rows.max()):,}"
    ]
    if bool(facts.held.all()):
        lines.append("every head holds every token")
    windows = [w for w in session.engine.kv.shape.windows if w is not None and w < tokens]
    if windows:
        lines.append(
            f"{len(windows)} of {layers} layers see the last {max(windows):,} tokens at the most, "
            "whatever the policy"
        )
    return "\n".join([*lines, along(facts, width), ""])


def page(facts: Kept, screen: Screen, first: Sequence[str] = (), *, whole: bool) -> list[str]:
    """The shaded text with the lines `first` above it; unless `whole`, as much as fits on the
    screen, and at least `LEAST` lines of text."""
    spans = facts.spans
    share = facts.share()[list(spans.token)].tolist()
    rows = broken(spans.text, max(screen.width - _GUTTER - 1, 12))
    # Blank lines between messages and paragraphs stay, those at the end do not.
    while rows and not spans.text[slice(*rows[-1])].strip():
        rows.pop()
    sums = [0.0, *accumulate(share)]
    pieces = [spans.overlap(begin, end) for begin, end in rows]
    means = [(sums[p.stop] - sums[p.start]) / len(p) if p else None for p in pieces]
    largest = max((mean for mean in means if mean is not None), default=0.0)
    above = [*first, *_scale(largest, screen)]
    room = len(rows) if whole else PAGE
    if screen.rows and not whole:
        room = max(LEAST, screen.rows - _BELOW - len(above) - 1)
    lines = [
        (_gutter(mean, largest) + _shaded(facts, span, share, screen)).rstrip()
        for span, mean in zip(rows[:room], means, strict=False)
    ]
    more = [f"/kept all shows the other {len(rows) - room:,} lines, too"] * (len(rows) > room)
    return [*above, *lines, *more]


def _scale(largest: float, screen: Screen) -> list[str]:
    """A legend for the block and the percentage of a line, and for the colours."""
    meaning = "share of the heads that hold a token, mean of the line"
    if largest:
        meaning += f"; {BLOCKS[-1]} is {percent(largest)}, the most on a line"
    lines = folded(meaning, screen.width, "  ")
    if screen.colour:
        shades = "".join(_paint("  ", shade) for shade in range(len(SHADES)))
        lines.append(f"no head {shades} all heads")
    return lines


def _gutter(mean: float | None, largest: float) -> str:
    if mean is None:
        return " " * _GUTTER
    sign = strip([mean], largest)[1:-1]
    return f"{sign} {percent(mean):>4} "


def _shaded(facts: Kept, span: tuple[int, int], share: Sequence[float], screen: Screen) -> str:
    """One row of text; if there are colours, shaded token by token."""
    begin, end = span
    text = facts.spans.text[begin:end]
    if not screen.colour:
        return shown(text)
    spans, at, end = facts.spans, begin, begin + len(text.rstrip())
    pieces: list[tuple[int, str]] = []  # shade and text
    for k in spans.overlap(begin, end):
        last = min(spans.end[k], end)
        if last > at:
            pieces.append((level(share[k], len(SHADES) - 1), spans.text[at:last]))
            at = last
    return "".join(
        _paint(shown("".join(text for _, text in run)), shade)
        for shade, run in groupby(pieces, key=lambda piece: piece[0])
    )


def _paint(text: str, shade: int) -> str:
    back, front = SHADES[shade]
    return f"\x1b[48;5;{back};38;5;{front}m{text}\x1b[0m"


# -- a phrase ----------------------------------------------------------------------------------


def find(facts: Kept, text: str, width: int, *, recalls: bool = False) -> str:
    """Where a phrase occurs, how many heads hold each occurrence, and whether it is likely lost.
    recalls: the next question is answered from all that was read."""
    spans = facts.spans
    # White space matches any, because a line of the document may end inside a phrase.
    pattern = r"\s+".join(re.escape(word) for word in text.split())
    places = [m.span() for m in re.finditer(pattern, spans.text, re.IGNORECASE)]
    if not places:
        return f"no {text!r} among the {len(facts.held[0, 0]):,} tokens fed so far"
    lines: list[str] = []
    found: list[tuple[bool, float, float]] = []  # in a document, held whole, held in part
    for place in places:
        tokens = [spans.token[k] for k in spans.overlap(*place)]
        first, last = tokens[0], tokens[-1]
        counts = facts.among(tokens)
        whole, some = int((counts == len(tokens)).sum()), int((counts > 0).sum())
        name = next((p.name for p in facts.parts if p.first <= first < p.last), "")
        found.append((bool(name), whole / facts.slots, some / facts.slots))
        if len(found) > LISTED:
            continue
        heads = f"tok {first:,}" + (f" to {last:,}" if last > first else "")
        heads += f"  {clipped(name or 'chat', _NAME)}  "
        heads += f"whole in {whole:,} of {facts.slots:,} heads ({percent(found[-1][1])})"
        if some > whole and len(tokens) > 1:
            heads += f", in part in {some - whole:,} more"
        lines += [heads, f"  {_quote(facts, place, width - 2)}"]
    if (more := len(places) - LISTED) > 0:
        lines.append(f"and {more:,} more place{'s' * (more > 1)}")
    return "\n".join([*lines, _verdict(found, recalls)])


def _verdict(found: Sequence[tuple[bool, float, float]], recalls: bool) -> str:
    """One line about the best-kept occurrence: of those in documents if there are any, otherwise of
    all."""
    documents = [place for place in found if place[0]]
    _, whole, some = max(documents or found, key=lambda place: place[1:])
    again = "/refresh reads the documents again for your next question"
    if recalls:
        again = "your next question still sees it, because the tier has all that was read"
    if some == 0:
        where = "gone from the documents in" if len(documents) < len(found) else "gone from"
        return f"{where} this cache; {again}"
    if whole < LIKELY_LOST:
        held = "no head holds it whole" if whole == 0 else "fewer than 1 in 10 heads hold it whole"
        return f"likely lost to this cache: {held}; {again}"
    if whole == 1:
        return "still there: every head holds it whole"
    return f"still there: {percent(whole)} of the heads hold it whole"


def _quote(facts: Kept, place: tuple[int, int], room: int) -> str:
    """The text at a place, with whole words of the text around it, in `room` columns."""
    text, (begin, end) = facts.spans.text, place
    middle = re.sub(r"\s", " ", text[begin:end])
    spare = (room - cells(shown(middle))) // 2 - 1
    left = _words(text[max(0, begin - room) : begin][::-1], spare)[::-1]
    right = _words(text[end : end + room], spare)
    quote = shown(" ".join(f"{left}{middle}{right}".split()))
    quote = "…" * (begin > len(left)) + quote
    quote += "…" * (end + len(right) < len(text))
    if len(broken(quote, room)) > 1:
        quote = quote[: broken(quote, room - 1)[0][1]].rstrip() + "…"
    return quote


def _words(text: str, room: int) -> str:
    """As many whole words from the beginning of `text` as fit; if no word fits, characters."""
    text = re.sub(r"\s", " ", text)
    return text[slice(*broken(text, room)[0])] if room > 0 else ""

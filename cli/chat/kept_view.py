"""`/kept`: the document on screen, shaded by the share of heads that still hold each token.

Colour is not the only sign: each line begins with its mean share, as a block and as a percentage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from minikv.chat.report import amount
from minikv.cli.chat import kept
from minikv.cli.chat.kept import Kept
from minikv.cli.chat.slash import Command, Context
from minikv.cli.screen.render import along, level, percent, strip
from minikv.cli.screen.terminal import Screen
from minikv.cli.screen.text import broken, cells, clipped, folded, shown
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

PAGE = 40
"""Lines of text on a page, if it need not fit a screen."""
LEAST = 5
"""Lines of text on a page of the smallest screen."""
_BELOW = 3  # rows of the screen below a page: an empty one, the prompt and the toolbar
PASSAGE, PASSAGES = 12, 10
"""Tokens of a passage of `/kept top`, and how many it shows."""
LISTED = 20
"""The most occurrences that `/kept find` lists."""
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
_USAGE = '/kept [PAGE | all], /kept top, /kept find "TEXT"'
_NAME = 24  # cells of a document's name
_GUTTER = 7  # a block, a percentage and the spaces around them


# -- the command ----------------------------------------------------------------------------


def _kept(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    screen = terminal.screen
    if not session.fed:
        terminal.say("no turn yet: nothing has been read")
        return
    facts = kept.read(session)
    match arguments or ["1"]:
        case ["top"]:
            lines = top(facts, screen)
        case ["find", text] if text.strip():
            recalls = session.reuse in ("auto", "recall") and bool(session.recall.place)
            lines = find(facts, text.strip(), screen, recalls=recalls)
        case ["all"]:
            lines = page(facts, None, screen, summary(session, facts, screen))
        case [number] if re.fullmatch("[0-9]{1,9}", number):
            lines = page(facts, int(number), screen, summary(session, facts, screen))
        case _:
            raise UsageError(f"/kept does not take {' '.join(arguments)!r}", _USAGE)
    terminal.page(lines)


COMMANDS = (
    Command(
        ("kept",),
        '[PAGE | all | top | find "TEXT"]',
        "the text shaded by how many heads still hold it; its best-kept passages; a phrase",
        _kept,
        follows=("all", "find", "top"),
    ),
)


# -- the summary and the pages ----------------------------------------------------------------


def summary(session: ChatSession, facts: Kept, screen: Screen) -> list[str]:
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
    wrapped = [line for text in lines for line in folded(text, screen.width, "  ")]
    strips = along(facts, screen.width, screen.signs, screen.encoding)
    return [*wrapped, *strips.split("\n"), ""]


def page(facts: Kept, number: int | None, screen: Screen, first: Sequence[str] = ()) -> list[str]:
    """Page `number` of the shaded text, or all of it (None), with the lines `first` above the first
    page. A page fits on the screen, unless that has room for fewer than `LEAST` lines of text.
    Raises UsageError if there is no such page."""
    spans = facts.spans
    share = facts.share()[list(spans.token)].tolist()
    rows = broken(spans.text, max(screen.width - _GUTTER - 1, 12), screen.encoding)
    # Blank lines between messages and paragraphs stay, those at the end do not.
    while rows and not spans.text[slice(*rows[-1])].strip():
        rows.pop()
    sums = [0.0, *accumulate(share)]
    pieces = [spans.overlap(begin, end) for begin, end in rows]
    means = [(sums[p.stop] - sums[p.start]) / len(p) if p else None for p in pieces]
    largest = max((mean for mean in means if mean is not None), default=0.0)
    above = _scale(largest, screen)
    below = folded(
        f"/kept {(number or 0) + 1} shows the next page, /kept all everything", screen.width, "  "
    )
    size, least = PAGE, PAGE
    if screen.rows:
        size = max(LEAST, screen.rows - _BELOW - 1 - len(above) - len(below))
        least = max(LEAST, size - len(first))
    starts = [0, *range(least, len(rows), size)]
    if number is not None and not 1 <= number <= len(starts):
        raise UsageError(f"/kept has no page {number:,}: 1 to {len(starts):,}", _USAGE)
    begin, end = 0, len(rows)
    if number is not None:
        begin, end = [*starts, end][number - 1 : number + 1]
    lines = list(first) if number in (1, None) else []
    if rows:
        lines.append(_title(facts, rows[begin:end], number, len(starts), screen))
    lines += above
    for span, mean in zip(rows[begin:end], means[begin:end], strict=True):
        line = _gutter(mean, largest, screen) + _shaded(facts, span, share, screen)
        lines.append(line.rstrip())
    return lines + (below if number is not None and number < len(starts) else [])


def _title(
    facts: Kept, rows: Sequence[tuple[int, int]], number: int | None, pages: int, screen: Screen
) -> str:
    """Which page this is, and which tokens and documents are on it."""
    pieces = facts.spans.overlap(rows[0][0], rows[-1][1])
    first, last = facts.spans.token[pieces[0]], facts.spans.token[pieces[-1]]
    names = [part.name for part in facts.parts if part.first <= last and first < part.last]
    parts = [f"tokens {first:,} to {last:,}"]
    if number is not None and pages > 1:
        parts.insert(0, f"page {number:,} of {pages:,}")
    parts += [clipped(name, _NAME, screen.encoding) for name in names]
    return clipped((" · " if screen.blocks else " - ").join(parts), screen.width, screen.encoding)


def _scale(largest: float, screen: Screen) -> list[str]:
    """What the block and the percentage of a line mean, and the colours."""
    meaning = "share of the heads that hold a token, mean of the line"
    if largest:
        meaning += f"; {screen.signs[-1]} is {percent(largest)}, the most on a line"
    lines = folded(meaning, screen.width, "  ", screen.encoding)
    if screen.colour:
        shades = "".join(_paint("  ", shade) for shade in range(len(SHADES)))
        lines.append(f"no head {shades} all heads")
    return lines


def _gutter(mean: float | None, largest: float, screen: Screen) -> str:
    if mean is None:
        return " " * _GUTTER
    sign = strip([mean], largest, screen.signs)[1:-1]
    return f"{sign} {percent(mean):>4} "


def _shaded(facts: Kept, span: tuple[int, int], share: Sequence[float], screen: Screen) -> str:
    """One row of text; if there are colours, shaded token by token."""
    begin, end = span
    text = facts.spans.text[begin:end]
    if not screen.colour:
        return shown(text, screen.encoding)
    spans, at, end = facts.spans, begin, begin + len(text.rstrip())
    pieces: list[tuple[int, str]] = []  # shade and text
    for k in spans.overlap(begin, end):
        last = min(spans.end[k], end)
        if last > at:
            pieces.append((level(share[k], len(SHADES) - 1), spans.text[at:last]))
            at = last
    return "".join(
        _paint(shown("".join(text for _, text in run), screen.encoding), shade)
        for shade, run in groupby(pieces, key=lambda piece: piece[0])
    )


def _paint(text: str, shade: int) -> str:
    back, front = SHADES[shade]
    return f"\x1b[48;5;{back};38;5;{front}m{text}\x1b[0m"


# -- passages and phrases -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passage:
    """The pieces `first` to `last` - 1, and the mean share of the heads that hold them."""

    first: int
    last: int
    share: float


def passages(facts: Kept, count: int = PASSAGES) -> list[Passage]:
    """The best-kept runs of `PASSAGE` tokens that do not overlap, best first.

    Only of the documents, if there are any, because template, question and answer are mostly
    protected. Passages that no head holds any of are left out.
    """
    spans = facts.spans
    share = facts.share()[list(spans.token)].tolist()
    sums = [0.0, *accumulate(share)]
    ranges = [spans.within(p.first, p.last) for p in facts.parts] or [range(len(share))]
    runs = [
        Passage(first, first + size, (sums[first + size] - sums[first]) / size)
        for where in ranges
        if (size := min(PASSAGE, len(where)))
        for first in range(where.start, where.stop - size + 1)
    ]
    chosen: list[Passage] = []
    taken = bytearray(len(share))
    for run in sorted(runs, key=lambda run: run.share, reverse=True):
        if len(chosen) == count or run.share < 1e-9:
            break
        if not any(taken[run.first : run.last]):
            chosen.append(run)
            taken[run.first : run.last] = b"\1" * (run.last - run.first)
    return chosen


def top(facts: Kept, screen: Screen) -> list[str]:
    """The best-kept passages: share, position and text."""
    spans, found = facts.spans, passages(facts)
    where = "the documents" if facts.parts else "the chat"
    if bool(facts.held.all()):
        return folded("every head holds every token: nothing is evicted", screen.width, "  ")
    if not found:
        return folded(f"no head holds anything of {where}", screen.width, "  ")
    said = f"best-kept passages of {where}: {PASSAGE} tokens each, share of the heads that hold "
    lines = folded(f"{said}them on average", screen.width, "  ")
    digits = len(f"{len(facts.held[0, 0]):,}")
    for run in found:
        label = _gutter(run.share, found[0].share, screen)
        label += f"tok {spans.token[run.first]:>{digits},}  "
        place = spans.start[run.first], spans.end[run.last - 1]
        lines.append(label + _quote(facts, place, screen.width - len(label), screen))
    return lines


def find(facts: Kept, text: str, screen: Screen, *, recalls: bool = False) -> list[str]:
    """Where a phrase occurs, how many heads hold each occurrence, and whether it is likely lost.
    recalls: the next question is answered from all that was read."""
    spans = facts.spans
    # White space matches any, because a line of the document may end inside a phrase.
    pattern = r"\s+".join(re.escape(word) for word in text.split())
    places = [m.span() for m in re.finditer(pattern, spans.text, re.IGNORECASE)]
    if not places:
        missing = f"no {text!r} among the {len(facts.held[0, 0]):,} tokens fed so far"
        return folded(missing, screen.width, "  ", screen.encoding)
    room = screen.rows - _BELOW - 4  # for the lines about further places and the verdict
    lines: list[str] = []
    listed = 0
    found: list[tuple[bool, float, float]] = []  # in a document, held whole, held in part
    for place in places:
        tokens = [spans.token[k] for k in spans.overlap(*place)]
        first, last = tokens[0], tokens[-1]
        counts = facts.among(tokens)
        whole, some = int((counts == len(tokens)).sum()), int((counts > 0).sum())
        name = next((p.name for p in facts.parts if p.first <= first < p.last), "")
        found.append((bool(name), whole / facts.slots, some / facts.slots))
        if len(found) > listed + 1:
            continue  # the screen is full
        heads = f"tok {first:,}" + (f" to {last:,}" if last > first else "")
        heads += f"  {clipped(name or 'chat', _NAME, screen.encoding)}  "
        heads += f"whole in {whole:,} of {facts.slots:,} heads ({percent(found[-1][1])})"
        if some > whole and len(tokens) > 1:
            heads += f", in part in {some - whole:,} more"
        entry = folded(heads, screen.width, "  ", screen.encoding)
        entry.append(f"  {_quote(facts, place, screen.width - 2, screen)}")
        fits = not screen.rows or len(lines) + len(entry) <= room
        if not listed or (listed < LISTED and fits):
            lines += entry
            listed += 1
    if more := len(places) - listed:
        lines.append(f"and {more:,} more place{'s' * (more > 1)}")
    return [*lines, *folded(_verdict(found, recalls), screen.width, "  ")]


def _verdict(found: Sequence[tuple[bool, float, float]], recalls: bool) -> str:
    """One line about the best-kept occurrence: of those in documents, if any, else of all."""
    documents = [place for place in found if place[0]]
    _, whole, some = max(documents or found, key=lambda place: place[1:])
    again = "/refresh reads the documents again for your next question"
    if recalls:
        again = "your next question looks at it all the same, as all that was read is there"
    if some == 0:
        where = "gone from the documents in" if len(documents) < len(found) else "gone from"
        return f"{where} this cache; {again}"
    if whole < LIKELY_LOST:
        held = "no head holds it whole" if whole == 0 else "fewer than 1 in 10 heads hold it whole"
        return f"likely lost to this cache: {held}; {again}"
    if whole == 1:
        return "still there: every head holds it whole"
    return f"still there: {percent(whole)} of the heads hold it whole"


def _quote(facts: Kept, place: tuple[int, int], room: int, screen: Screen) -> str:
    """The text at a place, with whole words of the text around it, in `room` columns."""
    text, (begin, end), encoding = facts.spans.text, place, screen.encoding
    middle = re.sub(r"\s", " ", text[begin:end])
    spare = (room - cells(shown(middle, encoding))) // 2 - len(screen.dots)
    left = _words(text[max(0, begin - room) : begin][::-1], spare, encoding)[::-1]
    right = _words(text[end : end + room], spare, encoding)
    quote = shown(" ".join(f"{left}{middle}{right}".split()), encoding)
    quote = screen.dots * (begin > len(left)) + quote
    quote += screen.dots * (end + len(right) < len(text))
    if len(broken(quote, room)) > 1:
        quote = quote[: broken(quote, room - len(screen.dots))[0][1]].rstrip() + screen.dots
    return quote


def _words(text: str, room: int, encoding: str) -> str:
    """As many whole words from the beginning of `text` as fit; if no word fits, characters."""
    text = re.sub(r"\s", " ", text)
    return text[slice(*broken(text, room, encoding)[0])] if room > 0 else ""

"""`/kept`: the document on screen, shaded by the share of heads that still hold each token.

Colour is not the only sign: each line begins with its mean share, as a block and as a percentage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from minikv.cli.chat import kept
from minikv.cli.chat.kept import Kept
from minikv.cli.chat.slash import Command, Context
from minikv.cli.screen.strips import along, level, percent, strip
from minikv.cli.screen.terminal import Screen
from minikv.cli.screen.text import broken, clipped, folded, shown
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

PAGE = 40
"""Lines of text on a page, if it need not fit a screen."""
LEAST = 5
"""Lines of text on a page of the smallest screen."""
_BELOW = 3  # rows of the screen below a page: an empty one, the prompt and the toolbar
PASSAGE = 12
"""Tokens of a passage of `/kept top`."""
MOST_PASSAGES = 100
LISTED = 20
"""The most occurrences that `/kept find` lists without `all`."""
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
_USAGE = '/kept [PAGE | all], /kept top [N], /kept find "TEXT" [all]'
_NAME = 24  # cells of a document's name
_GUTTER = 7  # a block, a percentage and the spaces around them


# -- the command ----------------------------------------------------------------------------


def _kept(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    screen = terminal.screen
    if not session.fed:
        terminal.say("no turn yet: nothing has been read")
        return
    word, rest = (arguments[0], arguments[1:]) if arguments else ("1", [])
    number = int(word) if _is_count(word) else None
    facts = kept.read(session)
    if word == "top":
        lines = top(facts, _passages(rest), screen)
    elif word == "find":
        lines = find(facts, *_phrase(rest), screen, recalls=_recalls(session))
    elif rest or (number is None and word != "all"):
        raise UsageError(f"/kept does not take {' '.join(arguments)!r}", _USAGE)
    else:
        lines = page(facts, number, screen, summary(session, facts, screen))
    terminal.page(lines)


def _passages(arguments: Sequence[str]) -> int:
    if not arguments:
        return 10
    count = int(arguments[0]) if _is_count(arguments[0]) else 0
    if len(arguments) > 1 or not 1 <= count <= MOST_PASSAGES:
        raise UsageError(
            f"/kept top takes how many passages, 1 to {MOST_PASSAGES}, got {' '.join(arguments)!r}",
            "/kept top 10",
        )
    return count


def _phrase(arguments: Sequence[str]) -> tuple[str, bool]:
    """The text to find, and whether to list every occurrence."""
    if not arguments or not arguments[0].strip():
        raise UsageError("/kept find takes a text", '/kept find "net debt"')
    text, rest = arguments[0].strip(), list(arguments[1:])
    if rest not in ([], ["all"]):
        whole = " ".join(arguments)
        raise UsageError(f"/kept find takes one text, got {whole!r}", f'/kept find "{whole}"')
    return text, bool(rest)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _after_kept(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    if not before:
        return ("all", "find", "top")
    return ("all",) if len(before) == 2 and before[0] == "find" else ()


COMMANDS = (
    Command(
        ("kept",),
        '[PAGE | all | top [N] | find "TEXT"]',
        "the text shaded by how many heads still hold it; its best-kept passages; a phrase",
        _kept,
        follows=_after_kept,
    ),
)


# -- the summary and the pages ----------------------------------------------------------------


def _recalls(session: ChatSession) -> bool:
    """Whether the next question is answered from all that was read."""
    return session.reuse in ("auto", "recall") and bool(session.recall.place)


def summary(session: ChatSession, facts: Kept, screen: Screen) -> list[str]:
    """How much was kept, and a strip of where it was kept."""
    layers, heads, tokens = facts.held.shape
    rows = facts.rows()
    lines = [
        f"kept {percent(float(facts.share().mean()))} of {tokens:,} tokens in "
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
    end = begin + len(text.rstrip())
    total = [0.0] * (end - begin)
    count = [0] * (end - begin)
    spans = facts.spans
    for k in spans.overlap(begin, end):
        for i in range(max(spans.start[k], begin), min(spans.end[k], end)):
            total[i - begin] += share[k]
            count[i - begin] += 1
    most = len(SHADES) - 1
    levels = [level(t / max(n, 1), most) for t, n in zip(total, count, strict=True)]
    runs = groupby(range(begin, end), key=lambda i: levels[i - begin])
    return "".join(
        _paint("".join(shown(spans.text[i], screen.encoding) for i in run), shade)
        for shade, run in runs
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


def passages(facts: Kept, count: int) -> list[Passage]:
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


def top(facts: Kept, count: int, screen: Screen) -> list[str]:
    """The best-kept passages: share, position and text."""
    spans = facts.spans
    found = passages(facts, count)
    where = "the documents" if facts.parts else "the chat"
    if bool(facts.held.all()):
        return folded("every head holds every token: nothing is evicted", screen.width, "  ")
    if not found:
        return folded(f"no head holds anything of {where}", screen.width, "  ")
    lines = folded(
        f"best-kept passages of {where}: {PASSAGE} tokens each, share of the heads that hold "
        "them on average",
        screen.width,
        "  ",
    )
    largest = found[0].share
    digits = len(f"{len(facts.held[0, 0]):,}")
    for run in found:
        label = f"{_gutter(run.share, largest, screen)}tok {spans.token[run.first]:>{digits},}  "
        place = (spans.start[run.first], spans.end[run.last - 1])
        lines += _quoted(facts, place, label, screen)
    return lines


def find(
    facts: Kept, text: str, everything: bool, screen: Screen, *, recalls: bool = False
) -> list[str]:
    """Where a phrase occurs, how many heads hold each occurrence, and whether it is likely lost."""
    spans = facts.spans
    # White space matches any, because a line of the document may end inside a phrase.
    pattern = r"\s+".join(re.escape(word) for word in text.split())
    places = [m.span() for m in re.finditer(pattern, spans.text, re.IGNORECASE)]
    if not places:
        missing = f"no {text!r} among the {len(facts.held[0, 0]):,} tokens fed so far"
        return folded(missing, screen.width, "  ", screen.encoding)
    lines: list[str] = []
    listed = 0
    room = screen.rows - _BELOW - 4  # for the lines about further places and the verdict
    found: list[tuple[bool, float, float]] = []  # in a document, held whole, held in part
    for place in places:
        tokens = [spans.token[k] for k in spans.overlap(*place)]
        counts = facts.among(tokens)
        whole, some = counts == len(tokens), counts > 0
        name = next((p.name for p in facts.parts if p.first <= tokens[0] < p.last), "")
        all_heads = facts.slots
        found.append((bool(name), int(whole.sum()) / all_heads, int(some.sum()) / all_heads))
        if len(found) > listed + 1:
            continue  # the screen is full
        first, last = tokens[0], tokens[-1]
        label = f"tok {first:,}" + (f" to {last:,}" if last > first else "")
        label += f"  {clipped(name or 'chat', _NAME, screen.encoding)}  "
        entry = _quoted(facts, place, label, screen)
        heads = f"  whole in {int(whole.sum()):,} of {all_heads:,} heads ({percent(found[-1][1])})"
        if (partly := int((some & ~whole).sum())) and len(tokens) > 1:
            heads += f", in part in {partly:,} more"
        if bool(whole.any()):
            heads += f": {_layers(whole.any(1).tolist())}"
        entry += folded(heads, screen.width, "    ")
        fits = not screen.rows or len(lines) + len(entry) <= room
        if everything or not listed or (listed < LISTED and fits):
            lines += entry
            listed += 1
    if more := len(places) - listed:
        rest = f'{more:,} more place{"s" * (more > 1)}: /kept find "{text}" all lists them'
        lines += folded(rest, screen.width, "  ", screen.encoding)
    return [*lines, *folded(_verdict(found, recalls), screen.width, "  ")]


def _verdict(found: Sequence[tuple[bool, float, float]], recalls: bool) -> str:
    """One line about the best-kept occurrence: of those in documents, if any, else of all.
    recalls: the next question is answered from all that was read."""
    documents = [place for place in found if place[0]]
    _, whole, some = max(documents or found, key=lambda place: place[1:])
    again = "/refresh reads the documents again for your next question"
    if recalls:
        again = "your next question looks at it all the same, as all that was read is there"
    if some == 0:
        return f"gone from this cache; {again}"
    if whole < LIKELY_LOST:
        held = "no head holds it whole" if whole == 0 else "fewer than 1 in 10 heads hold it whole"
        return f"likely lost to this cache: {held}; {again}"
    if whole == 1:
        return "still there: every head holds it whole"
    return f"still there: {percent(whole)} of the heads hold it whole"


def _layers(has: Sequence[bool]) -> str:
    """[True, True, False, True] -> "layers 0-1, 3"."""
    if all(has):
        return "all layers"
    runs: list[list[int]] = []
    for layer in (i for i, yes in enumerate(has) if yes):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    names = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return f"layer{'s' if sum(has) > 1 else ''} {', '.join(names)}"


def _quoted(facts: Kept, place: tuple[int, int], label: str, screen: Screen) -> list[str]:
    """A label and the text at a place, with some of the text around it, in one line or two."""
    from rich.cells import cell_len

    begin, end = place
    text = facts.spans.text
    below = len(label) > screen.width // 2
    room = screen.width - (4 if below else len(label)) - 1
    middle = re.sub(r"\s", " ", text[begin:end])
    spare = (room - cell_len(shown(middle, screen.encoding)) - 2 * len(screen.dots)) // 2
    left = _words(text[max(0, begin - room) : begin][::-1], spare, screen)[::-1]
    right = _words(text[end : end + room], spare, screen)
    quote = " ".join(f"{left}{middle}{right}".split())
    cut_left, cut_right = begin > len(left), end + len(right) < len(text)
    quote = (screen.dots if cut_left else "") + shown(quote, screen.encoding)
    quote += screen.dots if cut_right else ""
    if len(broken(quote, room)) > 1:
        quote = quote[: broken(quote, room - len(screen.dots))[0][1]].rstrip() + screen.dots
    return (
        [*folded(label.rstrip(), screen.width, "    "), f"    {quote}"]
        if below
        else [label + quote]
    )


def _words(text: str, cells: int, screen: Screen) -> str:
    """As many whole words from the beginning of `text` as fit; if no word fits, characters."""
    if cells < 1:
        return ""
    text = re.sub(r"\s", " ", text)
    return text[slice(*broken(text, cells, screen.encoding)[0])]

"""An answer in Markdown on a terminal: text is written as it comes, and a block is formatted when
it ends.

A block is a paragraph, a heading, one item of a list, a quote or a table. It is first written as
plain text, broken between words here, so that the number of its rows is known. If all of it is
still on the screen when it ends, its rows are erased and it is written again with styles; otherwise
it stays as it is. Nothing above the current block is changed, so the scrollback holds everything
exactly once. Code is written as it comes and never broken. A line of code that fits on one row is
written again in colours when it ends, if its language is known.

rich draws the styles, the tables and the colours of code; markdown-it, its parser, reads what is
inside a line. rich.markdown was tried for whole blocks and is not used: it writes a document at
once and can take nothing back, it drops HTML tags, definitions of links, addresses of images, the
backslashes of LaTeX and the signs of `x**2 + y**2` and `__init__`, it writes item "2." as "2", and
its import with pygments takes 0.1 s, which only an answer with code needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from minikv.cli.screen.text import broken, most_cells, units

if TYPE_CHECKING:
    from minikv.cli.screen.code import Code

_NEAR = 24  # columns before the margin from which on a word waits until it is whole
_CODE = ("fence", "indented")
# The start of a line that can still become several kinds of block.
_OPEN = re.compile(r"(?:([-*_])(?: *\1)* *|\+|\d{1,9}[.)]?|#{1,6}|`{1,2}|~{1,2}|(?:`{3}|~{3}).*)?")
_KINDS = {
    "rule": re.compile(r"([-*_]) *(?:\1 *){2,}$"),
    "fence": re.compile(r"`{3,}[^`]*$|~{3,}"),
    "item": re.compile(r"(?:[-*+]|\d{1,9}[.)])(?:[ \t]|$)"),
    "heading": re.compile(r"#{1,6}(?:[ \t]|$)"),
    "quote": re.compile(">"),
    "table": re.compile(r"\|"),
    "text": re.compile(""),
}
_PROSE = re.compile(r"[^\\`*_~\[\]<>&|#]*")  # text without any sign of Markdown
# What formatting takes away or adds: ASCII signs, bullets and lines.
_ORNAMENT = re.compile(r"[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f\u2022\u2500-\u257f\s]+")


class Answer:
    """One answer while it streams. Every method returns what to write.

    `size` gives columns and rows of the terminal. It is asked at every piece: after a resize the
    current block stays as it is.
    """

    def __init__(self, size: Callable[[], tuple[int, int]], *, colour: bool, ascii: bool) -> None:
        self._size = size
        self._formatter = _Formatter(colour=colour, ascii=ascii)
        self._window = size()
        self._rows = Rows(self._window[0] - 1)
        self._kind = ""  # of the current block; empty between two blocks
        self._source = ""  # its Markdown; of code, the current line
        self._fence = ""  # the marks that opened the code
        self._code: Code | None = None  # its colours, if it has any
        self._in_list = False  # indented lines belong to a list, they are not code
        self._blanks = 0  # empty lines since the last line with text
        self._last = ""  # the kind of the last block, empty before the first
        self._line = ""  # the start of the current line, as long as its kind is not known
        self._decided = False  # whether its kind is known

    def push(self, piece: str) -> str:
        """What to write for a piece of text that went through `clean`."""
        self._look()
        first, *others = piece.split("\n")
        out = self._more(first)
        for part in others:
            out += self._end_line() + self._more(part)
        return out

    def resume(self, text: str) -> str:
        """What to write before an answer continues after `text`, which was written before: the last
        block again if it is not complete, from the start of a line. Code is not written again."""
        self.push(text)
        if not self._kind or self._kind in _CODE or not self._source:
            return ""
        self._rows = Rows(self._window[0] - 1)
        return self._rows.write(self._source)

    def finish(self) -> str:
        """What to write at the end. The cursor is then at the start of a line."""
        self._look()
        out = self._end_line() if self._line or self._decided else ""
        out += self._end_block()
        return out if self._last else "\n"

    def disturb(self) -> None:
        """Call when the window was resized or other output was written to it: the current block
        then stays as it is."""
        self._window = self._size()
        self._rows.width = self._window[0] - 1
        self._rows.known = False

    def _look(self) -> None:
        if self._size() != self._window:
            self.disturb()

    def _more(self, text: str) -> str:
        """The next characters of the current line."""
        if self._decided:
            return self._show(text)
        self._line += text
        return self._decide(self._line_kind(self._line)) if text else ""

    def _end_line(self) -> str:
        out = "" if self._decided else self._decide(self._line_kind(self._line, whole=True))
        self._decided = False
        if self._kind in _CODE:
            return out + self._end_code_line()
        return out + (self._end_block() if self._kind in ("heading", "rule") else "")

    def _line_kind(self, line: str, whole: bool = False) -> str:
        """What the current line is: the kind of block that it begins, "more" of the current block,
        "blank", or "closing" a fence. Empty while that depends on characters that follow."""
        text, inside = line.lstrip(" \t"), self._kind
        if inside == "fence":
            marks = text.rstrip()
            if set(marks) <= {self._fence[0]}:  # a closing fence, or nothing yet
                return ("closing" if len(marks) >= len(self._fence) else "more") if whole else ""
            return "more"
        if not text:
            return "blank" if whole else ""
        if not whole and _OPEN.fullmatch(text):
            return ""
        kind = next(kind for kind, begin in _KINDS.items() if begin.match(text))
        deep = len(line.expandtabs(4)) - len(text.expandtabs(4)) >= 4 and not self._in_list
        if deep and inside in ("", "indented", "table"):
            return "more" if inside == "indented" else "indented"
        if kind == "text":
            return "more" if inside in ("text", "item", "quote") else "text"
        return "more" if kind == inside in ("quote", "table") else kind

    def _decide(self, kind: str) -> str:
        """Write the start of the current line, now that its kind is known."""
        if not kind:
            return ""
        line, self._line, self._decided = self._line, "", True
        if kind == "blank":
            self._blanks += 1
            return self._end_block()
        if kind == "more":
            return self._show(line if self._kind in _CODE else f"\n{line}")
        if kind == "closing":
            self._kind, self._last = "", "closed"
            return f"\x1b[2m{line}\x1b[0m\n"
        return self._begin(kind, line)

    def _begin(self, kind: str, line: str) -> str:
        out = self._end_block()
        if self._blanks and self._last:
            out += "\n" * (self._blanks if kind == self._last == "indented" else 1)
        text = line.lstrip(" \t")
        self._in_list = kind == "item" or (self._in_list and len(line) - len(text) >= 2)
        self._kind, self._last, self._source, self._blanks = kind, kind, "", 0
        self._window = self._size()
        self._rows = Rows(self._window[0] - 1)
        self._fence, self._code = "", None
        if kind != "fence":
            return out + self._show(line)
        self._fence = text[: len(text) - len(text.lstrip(text[0]))]
        self._code = self._formatter.code(text.lstrip(text[0]))
        return f"{out}\x1b[2m{line}\x1b[0m"

    def _show(self, text: str) -> str:
        self._source += text if self._kind else ""
        return text if self._kind in _CODE else self._rows.write(text) if self._kind else ""

    def _end_code_line(self) -> str:
        """End a line of code, in colours if all of it is on the current row."""
        line, self._source = self._source, ""
        found = self._code.line(line) if self._code is not None and line else None
        fits, self._rows.known = self._rows.known, True
        if found is None or not fits or most_cells(found.plain) > self._rows.width:
            return "\n"
        return f"\r\x1b[K{self._formatter.styled(found)}\n"

    def _end_block(self) -> str:
        """Format the block if all of it can still be erased; else end its last line."""
        kind, self._kind = self._kind, ""
        if not kind or kind in _CODE:
            return ""
        rows = self._rows
        if rows.known and rows.count < self._window[1]:
            formatted = self._formatter.format(kind, self._source, rows.width)
            if formatted is not None:
                up = f"\x1b[{rows.count - 1}A" if rows.count > 1 else ""
                return f"\r{up}\x1b[J{formatted}\n"
        return rows.flush() + "\n"


class Rows:
    """Breaks the current block between words, and counts its rows on the screen.

    `known` becomes False when the terminal breaks a line itself: at a word wider than the window.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 1
        self.known = True
        self._row = ""  # the current row as far as it came
        self._shown = 0  # how many of its characters were written

    def write(self, text: str) -> str:
        """What to write for more text."""
        first, *lines = text.replace("\t", "    ").split("\n")
        out = self._more(first)
        for line in lines:
            out += self.flush() + "\n"
            self.count += 1
            self._row, self._shown = "", 0
            out += self._more(line)
        return out

    def flush(self) -> str:
        """What waits to be written, without blanks at its end."""
        waits = self._row[self._shown :].rstrip(" ")
        self._shown = len(self._row)
        return waits

    def _more(self, text: str) -> str:
        self._row += text
        out = ""
        while most_cells(self._row.rstrip(" ")) > self.width:
            end = broken(self._row, self.width, whole=True)[0][1]
            if self._shown <= end < len(self._row):
                line = self._row[:end].rstrip(" ")
                self.known = self.known and most_cells(line) <= self.width
                out += line[self._shown :] + "\n"
                self.count += 1
                self._row, self._shown = self._row[end:], 0
            else:  # a word that is wider than a row, or was begun far from the margin
                self.known = False
                out += self._row[self._shown :]
                self._row = " " * (most_cells(self._row) % (self.width + 1))
                self._shown = len(self._row)
        safe = len(self._row)
        if self._row and self.width - most_cells(self._row) < _NEAR:
            # Near the margin the last word waits, which may not fit, and so do the blanks before.
            *_, last = units(self._row)
            safe = len(self._row[: len(self._row) - len(last)].rstrip(" "))
        out += self._row[self._shown : safe]
        self._shown = max(self._shown, safe)
        return out


# -- blocks with styles ---------------------------------------------------------------------------


class _Formatter:
    """Turns a block of Markdown into text with styles, if that can show all its words."""

    def __init__(self, *, colour: bool, ascii: bool) -> None:
        self._parser = MarkdownIt("commonmark", {"html": False})
        self._parser.enable(["table", "strikethrough"])
        self._parser.core.ruler.disable(["text_join"])  # it does not keep which signs had a \
        self._console = Console(width=80)  # rich asks one for its defaults; nothing is printed
        self._colour = colour
        self._bullet, self._bar, self._dash = ("*", "|", "-") if ascii else ("•", "│", "─")
        self._box = box.ASCII2 if ascii else box.SQUARE

    def code(self, language: str) -> Code | None:
        """The colours of a block of code, if this terminal has any and they are known."""
        if not self._colour or not language.strip():
            return None
        from minikv.cli.screen.code import Code  # with pygments

        return Code.of(language)

    def styled(self, line: Text) -> str:
        """A line with its styles."""
        return _ansi(line.render(self._console))

    def format(self, kind: str, source: str, width: int) -> str | None:
        """`source` for `width` columns, without a last newline; None if it stays as it is."""
        if kind == "text" and _PROSE.fullmatch(source):
            return None  # nothing would change
        try:
            rows = self._table(source, width) if kind == "table" else self._set(kind, source, width)
        except (_Unknown, RecursionError):
            return None
        text = "\n".join(_ansi(row).rstrip(" ") for row in rows)
        plain = "".join(segment.text for row in rows for segment in row)
        return text if plain.strip() and _letters(plain) == _letters(source) else None

    def _set(self, kind: str, source: str, width: int) -> list[list[Segment]]:
        """The rows of any block but a table: text behind a margin. Raises _Unknown."""
        body = source.lstrip(" \t")
        indent = " " * (len(source) - len(body))
        style, first, later = _NONE, "", ""
        if kind == "rule":
            return [[Segment(indent), Segment(self._dash * (width - len(indent)), _DIM)]]
        if kind == "heading":
            level = len(body) - len(body.lstrip("#"))
            body, style = body.strip("# \t"), _TITLE if level <= 2 else _BOLD
        elif kind == "item":
            mark, body = [*body.split(None, 1), ""][:2]
            first = f"{self._bullet if mark in '-*+' else mark} "
            later = " " * len(first)
        elif kind == "quote":
            first = later = f"{self._bar} "
            body = re.sub(r"(?m)^[ \t]*> ?", "", body)
        if not body.strip():
            raise _Unknown
        body = re.sub(r"(?m)^[ \t]+", "", body)
        return [
            [Segment(indent + (later if number else first)), *row]
            for number, row in enumerate(self._wrapped(body, style, width - len(indent + first)))
        ]

    def _wrapped(self, source: str, style: Style, width: int) -> Iterator[list[Segment]]:
        text = self._inline(source, style)
        if any(len(word) > width for word in text.plain.split() if word.isascii()):
            raise _Unknown  # an address should stay whole
        for begin, end in broken(text.plain, max(width, 8)):
            line = text[begin:end]
            line.rstrip()
            yield list(line.render(self._console))

    def _inline(self, source: str, style: Style) -> Text:
        return self._styled(self._parser.parseInline(source)[0].children or (), style)

    def _styled(self, tokens: Sequence[Token], style: Style) -> Text:
        """The text inside a line, with its styles."""
        text = Text()
        styles = [style]
        literal: list[bool] = []  # for every open emphasis whether its signs are shown
        link = (0, "")  # where its text begins, and where it points
        for at, token in enumerate(tokens):
            shown, own = "", _NONE
            if token.type == "text":
                shown = token.content
            elif token.type == "text_special":
                # LaTeX keeps its backslashes, and entities stay as they were written.
                kept = token.info == "entity" or token.content in "()[]{}"
                shown = token.markup if kept else token.content
            elif token.type == "code_inline":
                mark, own = ("", _CYAN) if self._colour else (token.markup, _NONE)
                shown = f"{mark}{token.content}{mark}"
            elif token.type in ("softbreak", "hardbreak"):
                shown = "\n"
            elif token.type in _EMPHASIS:
                # In x**2 + y**2 and __init__ the rules of Markdown see emphasis.
                sides = text.plain[-1:] + tokens[at + 1].content[:1]
                between = len(sides) == 2 and sides.isascii() and sides.isalnum()
                literal.append(between or token.markup == "__")
                styles.append(_NONE if between else _EMPHASIS[token.type])
                shown = token.markup if literal[-1] else ""
            elif token.type in ("strong_close", "em_close", "s_close"):
                styles.pop()
                shown = token.markup if literal.pop() else ""
            elif token.type == "link_open":
                link = len(text), str(token.attrs["href"])
                styles.append(_UNDERLINE)
            elif token.type == "link_close":
                styles.pop()
                shown = "" if text.plain[link[0] :] == link[1] else f" ({link[1]})"
            elif token.type == "image":
                shown = f"{token.content} ({token.attrs['src']})"
            else:
                raise _Unknown
            text.append(shown, Style.combine([own, *styles]))
        return text

    def _table(self, source: str, width: int) -> list[list[Segment]]:
        """The rows of a table, if no word has to be broken for it. Raises _Unknown."""
        rows: list[list[Text]] = []
        side = ""
        for token in self._parser.parse(source):
            if token.type == "tr_open":
                rows.append([])
            elif token.type in ("th_open", "td_open"):
                side = str(token.attrs.get("style")).removeprefix("text-align:")
            elif token.type == "inline" and rows:
                style = _BOLD if len(rows) == 1 else _NONE
                cell = self._styled(token.children or (), style)
                cell.justify = _SIDES.get(side)
                rows[-1].append(cell)
        words = [
            [word for cell in column for word in cell.plain.split()]
            for column in zip(*rows, strict=True)
        ]
        longest = [max(map(most_cells, column), default=1) for column in words]
        if not rows or sum(longest) + 3 * len(longest) + 1 > width:
            raise _Unknown
        table = Table(box=self._box, border_style=_DIM, header_style=_NONE)
        for head, least in zip(rows[0], longest, strict=True):
            table.add_column(head, min_width=least)
        for row in rows[1:]:
            table.add_row(*row)
        return self._console.render_lines(table, self._console.options.update(width=width))


class _Unknown(Exception):
    """Something that is not formatted, but stays as it was written."""


_NONE, _BOLD, _DIM, _CYAN = Style.null(), Style(bold=True), Style(dim=True), Style(color="cyan")
_UNDERLINE, _TITLE = Style(underline=True), Style(bold=True, underline=True)
_EMPHASIS = {
    "strong_open": Style(bold=True),
    "em_open": Style(italic=True),
    "s_open": Style(strike=True),
}
_SIDES: dict[str, Literal["left", "center", "right"]] = {"center": "center", "right": "right"}


def _ansi(row: Iterable[Segment]) -> str:
    """A row with its styles."""
    return "".join(s.style.render(s.text) if s.style else s.text for s in row)


def _letters(text: str) -> Counter[str]:
    return Counter(_ORNAMENT.sub("", text))

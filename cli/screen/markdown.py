"""Shows an answer in Markdown on a terminal: text is written as it comes, and each line is
formatted when it ends.

Models write a paragraph, a heading, an item or a line of a quote as one line. It is first written
as plain text, broken between words here, so that the number of its rows is known. If all of it is
still on the screen when it ends, its rows are erased and it is written again with styles; otherwise
it stays plain. A table is formatted when its last line has ended, code line by line, in colours if
its language is known. Code is never broken. Earlier lines never change, so the scrollback has
everything exactly once.

rich draws the styles, the tables and the colours of code; its parser, markdown-it, parses the
inside of a line. rich.markdown is not used: it writes only whole documents, it drops HTML tags,
definitions of links, addresses of images, the backslashes of LaTeX and the signs of `x**2 + y**2`
and `__init__`, it writes item "2." as "2", and its import with pygments takes 0.1 s, which only an
answer with code needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from minikv.cli.screen.text import broken, cells, units

if TYPE_CHECKING:
    from rich.syntax import Syntax

_NEAR = 24  # within this many columns of the margin, a word is written only when it is complete
_FENCE = re.compile(r"(`{3,})([^`]*)$|(~{3,})(.*)$")
_RULE = re.compile(r"([-*_]) *(?:\1 *){2,}$")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])(?:[ \t]+|$)")
_HEADING = re.compile(r"(#{1,6})[ \t]+")
_PROSE = re.compile(r"[^\\`*_~\[\]<>&|#]*")  # text without any sign of Markdown
# Characters that formatting removes or adds: ASCII signs, bullets and lines.
_ORNAMENT = re.compile(r"[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f\u2022\u2500-\u257f\s]+")


class Answer:
    """One answer while it is written. Every method returns the text to write.

    size(): columns and rows of the terminal. It is called for every piece, because the current line
    or table is not formatted after a resize.
    """

    def __init__(self, size: Callable[[], tuple[int, int]], *, colour: bool) -> None:
        self._size = size
        self._colour = colour
        self._formatter = _Formatter(colour=colour)
        self._window = size()
        self._rows = Rows(self._window[0] - 1)  # the rows of the current line or table
        self._line = ""  # the current line
        self._begun = False  # whether some of it is on the screen: blanks at its start wait
        self._raw = False  # whether the line is code, which is never broken
        self._table: list[str] = []  # the lines before it that belong to the same table
        self._fence = ""  # the marks that opened the code
        self._code: Code | None = None  # its colours, if it has any
        self._in_list = False  # indented lines belong to a list, they are not code
        self._blank = False  # whether an empty line is to be written before the next one
        self._any = False  # whether anything was written

    def push(self, piece: str) -> str:
        """The text to write for a piece of the answer. The piece must have gone through `clean`."""
        self._look()
        first, *others = piece.split("\n")
        out = self._more(first)
        for part in others:
            out += self._end_line() + self._more(part)
        return out

    def resume(self, text: str) -> str:
        """The text to write before an answer continues after `text`: its last line or table again
        if it is not complete, except code."""
        self.push(text)
        if self._raw or not (self._begun or self._table):
            return ""
        self._rows = Rows(self._window[0] - 1)
        return self._rows.write("\n".join([*self._table, self._line]))

    def finish(self) -> str:
        """The text to write at the end. The cursor is then at the start of a line."""
        self._look()
        out = self._end_line() if self._begun else ""
        out += self._end_table()
        return out if self._any else "\n"

    def disturb(self) -> None:
        """Leave the current line or table unformatted, because the window was resized or other
        output was written to it."""
        self._window = self._size()
        self._rows.width = self._window[0] - 1
        self._rows.known = False

    def _look(self) -> None:
        if self._size() != self._window:
            self.disturb()

    def _more(self, text: str) -> str:
        """Write more characters of the current line."""
        self._line += text
        if self._begun:
            return text if self._raw else self._rows.write(text)
        bare = self._line.lstrip(" \t")
        if not self._line or not (bare or self._fence):
            return ""
        out = "" if bare.startswith("|") else self._end_table()
        if self._blank and self._any:
            out += "\n"
        self._begun, self._blank, self._any = True, False, True
        if not self._table:
            self._window = self._size()
            self._rows = Rows(self._window[0] - 1)
        deep = len(self._line.expandtabs(4)) - len(bare.expandtabs(4))
        self._in_list = self._in_list and deep >= 2
        self._raw = bool(self._fence) or (deep >= 4 and not self._in_list)
        return out + (self._line if self._raw else self._rows.write(self._line))

    def _end_line(self) -> str:
        line, self._line = self._line, ""
        begun, self._begun = self._begun, False
        bare = line.lstrip(" \t")
        if self._fence:
            return self._end_code_line(line, bare.rstrip())
        if not begun:
            self._blank = True
            return self._end_table()
        if self._raw:
            return "\n"
        if bare.startswith("|"):
            self._table.append(line)
            return self._rows.write("\n")
        self._in_list = self._in_list or bool(_ITEM.match(bare))
        if opened := _FENCE.match(bare):
            self._fence, language = [group for group in opened.groups() if group is not None]
            self._code = code_in(language) if self._colour else None
            return self._again(f"\x1b[2m{line}\x1b[0m")
        return self._again(self._formatter.line(line, self._rows.width))

    def _end_code_line(self, line: str, marks: str) -> str:
        """End a line of code, in colours if all of it is on the current row."""
        self._any = True
        if not line:
            self._rows = Rows(self._window[0] - 1)
        if len(marks) >= len(self._fence) and set(marks) == {self._fence[0]}:
            self._fence, self._code = "", None
            return self._again(f"\x1b[2m{line}\x1b[0m")
        found = self._code.line(line) if self._code is not None and line else None
        if found is None or cells(found.plain) > self._rows.width:
            return "\n"
        return self._again(self._formatter.styled(found))

    def _end_table(self) -> str:
        lines, self._table = self._table, []
        formatted = self._formatter.table("\n".join(lines), self._rows.width) if lines else None
        return "" if formatted is None else self._again(formatted, "")

    def _again(self, formatted: str | None, otherwise: str = "\n") -> str:
        """The text that erases the line or table and writes it formatted; the text that ends it if
        it can no longer be erased."""
        rows = self._rows
        if formatted is None or not rows.known or rows.count >= self._window[1]:
            return rows.flush() + otherwise
        up = f"\x1b[{rows.count - 1}A" if rows.count > 1 else ""
        return f"\r{up}\x1b[J{formatted}\n"


class Rows:
    """Breaks the current block between words, and counts its rows on the screen.

    `known` becomes False when the terminal breaks a line itself, at a word wider than the window:
    the count is then wrong.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 1
        self.known = True
        self._row = ""  # the current row so far
        self._shown = 0  # how many of its characters were written

    def write(self, text: str) -> str:
        """The text to write for more input."""
        first, *lines = text.replace("\t", "    ").split("\n")
        out = self._more(first)
        for line in lines:
            out += self.flush() + "\n"
            self.count += 1
            self._row, self._shown = "", 0
            out += self._more(line)
        return out

    def flush(self) -> str:
        """The text that is held back, without blanks at its end."""
        waits = self._row[self._shown :].rstrip(" ")
        self._shown = len(self._row)
        return waits

    def _more(self, text: str) -> str:
        self._row += text
        out = ""
        while cells(self._row.rstrip(" ")) > self.width:
            end = broken(self._row, self.width, whole=True)[0][1]
            if self._shown <= end < len(self._row):
                line = self._row[:end].rstrip(" ")
                self.known = self.known and cells(line) <= self.width
                out += line[self._shown :] + "\n"
                self.count += 1
                self._row, self._shown = self._row[end:], 0
            else:  # the word is wider than a row, or began far from the margin
                self.known = False
                out += self._row[self._shown :]
                self._row = " " * (cells(self._row) % (self.width + 1))
                self._shown = len(self._row)
        safe = len(self._row)
        if self._row and self.width - cells(self._row) < _NEAR:
            # Near the margin, the last word may not fit: it waits, with the blanks before it.
            *_, last = units(self._row)
            safe = len(self._row[: len(self._row) - len(last)].rstrip(" "))
        out += self._row[self._shown : safe]
        self._shown = max(self._shown, safe)
        return out


# -- with styles ----------------------------------------------------------------------------------


class _Formatter:
    """Formats Markdown as text with styles. Its results are None where that would lose a word."""

    def __init__(self, *, colour: bool) -> None:
        self._parser = MarkdownIt("commonmark", {"html": False})
        self._parser.enable(["table", "strikethrough"])
        self._parser.core.ruler.disable(["text_join"])  # it loses which signs had a \
        self._console = Console(width=80)  # rich needs one for its defaults; it prints nothing
        self._colour = colour

    def styled(self, line: Text) -> str:
        """A line with its styles."""
        return _ansi(line.render(self._console))

    def line(self, source: str, width: int) -> str | None:
        """A formatted line of at most `width` columns, without a newline at its end."""
        body = source.strip(" \t")
        indent = " " * (len(source) - len(source.lstrip(" \t")))
        style, first, later = _NONE, "", ""
        if _RULE.match(body):
            return f"{indent}{_DIM.render('─' * (width - len(indent)))}"
        if heading := _HEADING.match(body):
            body = body[heading.end() :].rstrip("# \t")
            style = _TITLE if len(heading[1]) <= 2 else _BOLD
        elif item := _ITEM.match(body):
            first = f"{'•' if item[1] in '-*+' else item[1]} "
            body, later = body[item.end() :], " " * len(first)
        elif body.startswith(">"):
            first = later = "│ "
            body = body.removeprefix(">").removeprefix(" ")
        elif _PROSE.fullmatch(body):
            return None  # nothing would change
        text = self._styled(self._parser.parseInline(body)[0].children or (), style)
        room = width - len(indent + first)
        if not body or any(len(word) > room for word in text.plain.split() if word.isascii()):
            return None  # an address should stay whole
        rows: list[list[Segment]] = []
        for begin, end in broken(text.plain, max(room, 8)):
            row = text[begin:end]
            row.rstrip()
            rows.append([Segment(indent + (later if rows else first)), *row.render(self._console)])
        return _whole(rows, source)

    def _styled(self, tokens: Sequence[Token], style: Style) -> Text:
        """The text inside a line, with its styles."""
        text = Text()
        styles = [style]
        literal: list[bool] = []  # for every open emphasis, whether its signs are shown
        link = (0, "")  # where its text begins, and its target
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
            elif token.type in _EMPHASIS:
                # By the rules of Markdown, x**2 + y**2 and __init__ contain emphasis.
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
            text.append(shown, Style.combine([own, *styles]))
        return text

    def table(self, source: str, width: int) -> str | None:
        """A table without a newline at its end, unless a word would have to be broken."""
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
        longest = [max(map(cells, column), default=1) for column in words]
        if not rows or sum(longest) + 3 * len(longest) + 1 > width:
            return None
        table = Table(box=box.SQUARE, border_style=_DIM, header_style=_NONE)
        for head, least in zip(rows[0], longest, strict=True):
            table.add_column(head, min_width=least)
        for row in rows[1:]:
            table.add_row(*row)
        options = self._console.options.update(width=width)
        return _whole(self._console.render_lines(table, options), source)


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


def _whole(rows: Sequence[Iterable[Segment]], source: str) -> str | None:
    """The rows with their styles; None if a letter of the source is missing in them."""
    plain = "".join(segment.text for row in rows for segment in row)
    if not plain.strip() or _letters(plain) != _letters(source):
        return None
    return "\n".join(_ansi(row).rstrip(" ") for row in rows)


def _letters(text: str) -> Counter[str]:
    return Counter(_ORNAMENT.sub("", text))


# -- code -----------------------------------------------------------------------------------------

MOST_LINES = 200
"""How many earlier lines are parsed to colour the current one."""
TAB = 8
"""Columns from one tab stop of a terminal to the next."""
_LOOKS = {
    "dim": "Comment Generic.Prompt",
    "magenta": "Comment.Preproc Keyword Operator.Word Name.Tag",
    "cyan": "Keyword.Constant Keyword.Type Name.Builtin Name.Decorator Name.Attribute "
    "Literal.Number",
    "bold": "Name.Class Name.Function Generic.Heading Generic.Subheading",
    "green": "Literal.String Generic.Inserted",
    "red": "Generic.Deleted",
}
"""The colours are few and the terminal's own, so that they are readable on dark and light
backgrounds."""


def code_in(language: str) -> Code | None:
    """The code of a block with this language after its opening marks; None if the language is not
    known, or plain text."""
    words = language.strip().strip("{}").lstrip(".").split()
    if not words:
        return None
    from rich.syntax import ANSISyntaxTheme, Syntax  # with pygments

    lexer = Syntax("", words[0].rstrip(",;:").lower(), tab_size=TAB).lexer
    if lexer is None or "text" in lexer.aliases:
        return None
    looks = {
        tuple(name.split(".")): Style.parse(look)
        for look, names in _LOOKS.items()
        for name in names.split()
    }
    return Code(Syntax("", lexer, theme=ANSISyntaxTheme(looks), tab_size=TAB))


class Code:
    """The code of one block, which gets its colours line by line while an answer is written."""

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._lines: list[str] = []

    def line(self, text: str) -> Text | None:
        """The next line in colours, tabs as spaces; None if it has no colours, or if these would
        change the text."""
        self._lines = [*self._lines[-MOST_LINES:], text]
        if "\t" in text and not text.isascii():
            return None  # where a tab ends depends on the width of the characters before it
        number = len(self._lines)
        read = self._syntax.highlight("\n".join(self._lines), line_range=(number, number))
        lines = read.split("\n", allow_blank=True)
        found = lines[number - 1] if len(lines) >= number else Text()
        return found if found.spans and found.plain == text.expandtabs(TAB) else None

"""An answer in Markdown on a terminal: text is written as it comes, and a block is formatted when
it ends.

A block is a paragraph, a heading, one item of a list or a table. It is first written as plain text,
broken between words here, so that the number of its rows is known. If all of it is still on the
screen when it ends, its rows are erased and it is written again with styles; otherwise it stays as
it is. Nothing above the current block is changed, so the scrollback holds everything exactly once.
Code is written as it comes and never broken. A line of code that fits on one row is written again
in colours when it ends, if its language is known.

markdown-it parses a block; rich breaks lines and draws tables. rich.markdown is not used for the
blocks. It drops text: HTML tags and comments, definitions of links, addresses of images, the
backslashes of LaTeX, the signs of `x**2 + y**2` and `__init__`. It writes item "2." as "2". Its
import (with pygments) takes twice as long, which delays the first token. `code` loads pygments only
for a block that names a language.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich.cells import cell_len, get_character_cell_size
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from minikv.cli.screen.code import Code

_NEAR = 24  # columns before the margin from which on a word waits until it is whole
_CODE = ("fence", "indented")
_BULLET = re.compile(r"[-*+](?: |\t|$)")
_NUMBER = re.compile(r"\d{1,9}[.)](?: |\t|$)")
_HEADING = re.compile(r"#{1,6}(?: |\t|$)")
_RULE = re.compile(r"([-*_]) *(?:\1 *){2,}$")
_JOINER = "\u200d"
_TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))
_FLAGS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))  # two of these letters are a flag
_MOST = {"\ufe0f": 1} | dict.fromkeys([*_TONES, *_FLAGS], 2)  # columns
_PROSE = re.compile(r"[^\\`*_~\[\]<>&|#]*")  # text in which Markdown sees no sign of its own
_UNDERLINED = re.compile(r"\n *[-=]")
# What formatting takes away or adds: ASCII signs, bullets and lines.
_ORNAMENT = re.compile(r"[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f\u2022\u2500-\u257f\s]+")


class Answer:
    """One answer while it streams. Every method returns what is to be written.

    `size` gives columns and rows of the terminal. It is asked at every piece: after a resize the
    current block stays as it is.
    """

    def __init__(self, size: Callable[[], tuple[int, int]], *, colour: bool, ascii: bool) -> None:
        self._size = size
        self._formatter = _Formatter(colour=colour, ascii=ascii)
        self._window = size()
        self._rows = _Rows(self._window[0] - 1)
        self._kind = ""  # of the current block; empty between two blocks
        self._source = ""  # its Markdown, unless it is code
        self._fence = ""  # what opened the code
        self._code: Code | None = None  # its colours, if it has any
        self._opening = False  # whether the current line is the one that opened it
        self._in_list = False  # indented lines belong to a list, they are not code
        self._blanks = 0  # empty lines since the last line with text
        self._last = ""  # the kind of the last block, empty before the first
        self._line = ""  # the start of the current line, as long as its kind is not known
        self._decided = False  # whether its kind is known

    def push(self, piece: str) -> str:
        """What to write for a piece of text that went through `terminal.clean`."""
        self._look()
        out: list[str] = []
        first, *others = piece.split("\n")
        self._more(first, out)
        for part in others:
            self._end_line(out)
            self._more(part, out)
        return "".join(out)

    def resume(self, text: str) -> str:
        """What to write before an answer continues after `text`, which was written before: the last
        block again if it is not complete, from the start of a line. Code is not written again."""
        self.push(text)
        if not self._kind or self._kind in (*_CODE, "closing"):
            return ""
        self._rows = _Rows(self._window[0] - 1)
        first, *others = self._source.replace("\t", "    ").split("\n")
        out = [self._rows.write(first)]
        for line in others:
            out += [self._rows.newline(), self._rows.write(line)]
        return "".join(out)

    def finish(self) -> str:
        """What to write at the end. The cursor is then at the start of a line."""
        self._look()
        out: list[str] = []
        if self._line or self._decided:
            self._end_line(out)
        self._end_block(out)
        return "".join(out) if self._last else "\n"

    def disturb(self) -> None:
        """Call when the window was resized or other output was written to it: the current block
        then stays as it is."""
        self._window = self._size()
        self._rows.width = self._window[0] - 1
        self._rows.known = False

    def _look(self) -> None:
        if self._size() != self._window:
            self.disturb()

    def _more(self, text: str, out: list[str]) -> None:
        """The next characters of the current line."""
        if self._decided:
            self._show(text, out)
        elif text:
            self._line += text
            self._decide(self._line_kind(self._line), out)

    def _end_line(self, out: list[str]) -> None:
        if not self._decided:
            self._decide(self._line_kind(self._line, whole=True), out)
        self._decided = False
        if self._kind in _CODE:
            self._end_code_line(out)
        elif self._kind == "closing":
            self._kind, self._last = "", "fence"
            out.append("\n")
        elif self._kind in ("heading", "rule"):
            self._end_block(out)

    def _end_code_line(self, out: list[str]) -> None:
        """End a line of code, in colours if all of it stands on the current row."""
        line, self._source = self._source, ""
        if self._opening:
            self._opening = False
            self._code = self._formatter.code(line.strip().lstrip(self._fence[0]))
        elif self._code is not None and (text := self._code.line(line)) is not None:
            whole = _width(text.plain) <= self._rows.width and self._rows.known
            coloured = self._formatter.coloured(text) if whole else ""
            if coloured != text.plain and coloured:
                out.append(f"\r\x1b[K{coloured}")
        self._rows.known = True
        out.append("\n")

    def _line_kind(self, line: str, whole: bool = False) -> str:
        """What the current line is: the kind of block that it begins, "more" of the current block,
        "blank", or "closing" a fence. Empty while that depends on characters that follow."""
        text = line.lstrip(" \t")
        if self._kind == "fence":
            if set(text.rstrip()) <= {self._fence[0]}:  # a closing fence, or nothing yet
                closes = len(text.rstrip()) >= len(self._fence)
                return ("closing" if closes else "more") if whole else ""
            return "more"
        if not text:
            return "blank" if whole else ""
        kind = _begins(text, whole)
        inside = self._kind
        deep = len(line.expandtabs(4)) - len(text.expandtabs(4)) >= 4 and not self._in_list
        if not kind or (deep and inside in ("", "indented", "table")):
            return kind and ("more" if inside == "indented" else "indented")
        if kind == "text":
            return "more" if inside in ("text", "item", "quote") else "text"
        underline = kind == "rule" and inside == "text" and text[0] == "-"
        return "more" if underline or kind == inside in ("quote", "table") else kind

    def _decide(self, kind: str, out: list[str]) -> None:
        """Write the start of the current line, now that its kind is known."""
        if not kind:
            return
        line, self._line, self._decided = self._line, "", True
        if kind == "blank":
            self._end_block(out)
            self._blanks += 1
            return
        if kind == "closing":
            self._kind = kind
        elif kind != "more":
            self._begin(kind, line, out)
        elif self._kind not in _CODE:
            self._source += "\n"
            out.append(self._rows.newline())
        if kind in ("fence", "closing"):
            self._source = line
            out.append(f"\x1b[2m{line}\x1b[0m")
        else:
            self._show(line, out)

    def _begin(self, kind: str, line: str, out: list[str]) -> None:
        self._end_block(out)
        if self._blanks and self._last:
            out.append("\n" * (self._blanks if kind == self._last == "indented" else 1))
        text = line.lstrip(" \t")
        self._in_list = kind == "item" or (self._in_list and len(line) - len(text) >= 2)
        self._kind, self._last, self._source, self._blanks = kind, kind, "", 0
        if kind == "fence":
            self._fence = text[: len(text) - len(text.lstrip(text[0]))]
            self._opening, self._code = True, None
        self._window = self._size()
        self._rows = _Rows(self._window[0] - 1)

    def _show(self, text: str, out: list[str]) -> None:
        if self._kind in _CODE:
            self._source += text
            out.append(text)
        elif self._kind:
            self._source += text
            out.append(self._rows.write(text.replace("\t", "    ")))

    def _end_block(self, out: list[str]) -> None:
        """Format the block if all of it can still be erased; else end its last line."""
        kind, self._kind = self._kind, ""
        if not kind or kind in _CODE:
            return
        rows = self._rows
        formatted = None
        if rows.known and rows.count < self._window[1]:
            formatted = self._formatter.format(kind, self._source, rows.width)
        if formatted is None:
            out.append(rows.flush() + "\n")
            return
        up = f"\x1b[{rows.count - 1}A" if rows.count > 1 else ""
        out.append(f"\r{up}\x1b[J{formatted}\n")


def _begins(text: str, whole: bool) -> str:
    """The kind of block that a line without its indent begins; empty if more of it is needed."""
    sign = text[0]
    if sign in "`~":
        run = len(text) - len(text.lstrip(sign))
        if run < 3:
            return "text" if whole or run < len(text) else ""
        if sign == "`" and "`" in text[run:]:
            return "text"  # code in a line
        return "fence" if whole else ""
    if sign in "-*_" and set(text) <= {sign, " "}:
        if not whole:
            return ""
        if _RULE.match(text):
            return "rule"
    if not whole and re.fullmatch(r"\d{1,9}[.)]?|#{1,6}|\+", text):
        return ""
    if _BULLET.match(text) or _NUMBER.match(text):
        return "item"
    if _HEADING.match(text):
        return "heading"
    return {">": "quote", "|": "table"}.get(sign, "text")


class _Rows:
    """Breaks the current block between words, and counts its rows on the screen.

    `known` becomes False when the terminal breaks a line itself: at a word wider than the window.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 1
        self.known = True
        self._column = 0
        self._word = ""  # not written yet: it may not fit
        self._begun = False  # whether the first part of this word is written
        self._before = ""  # the last character
        self._half = False  # whether that is the first letter of a flag
        self._sign = False  # whether the word is a wide character or an emoji so far

    def write(self, text: str) -> str:
        """What to write for more text without line ends."""
        out: list[str] = []
        for part in re.findall(r" +|[^ ]+", text):
            if part[0] == " ":
                out.append(self.flush())
                self._before, self._sign = " ", False
                spaces = part[: max(self.width - self._column, 0)]
                self._column += len(spaces)
                out.append(spaces)
                if len(spaces) < len(part):
                    self._column = self.width
                self._begun = False
            elif part.isascii():
                if self._sign:
                    out.append(self.flush())
                self._before, self._sign = part[-1], False
                self._word += part
            else:
                out += self._wide(part)
        # Far from the margin no word waits, so that a slow answer is seen to go on.
        if self._word and self.width - self._column - _width(self._word) >= _NEAR:
            out.append(self.flush())
            self._begun = True
        return "".join(out)

    def newline(self) -> str:
        """End the line."""
        held = self.flush()
        self._before, self._sign = "", False
        self.count += 1
        self._column = 0
        return held + "\n"

    def flush(self) -> str:
        """Write the word that waits, on the next row if it does not fit on this one."""
        word, self._word = self._word, ""
        begun, self._begun = self._begun, False
        size = _width(word)
        if self._column + size <= self.width:
            self._column += size
            return word
        before = ""
        if self._column and not begun:
            self.count += 1
            self._column = 0
            before = "\n"
        if self._column + size > self.width:
            self.known = False
        self._column = (self._column + size) % (self.width + 1)
        return before + word

    def _wide(self, part: str) -> Iterator[str]:
        """A word that is not ASCII: it can be broken around every wide character and emoji, but not
        inside one that is made of several characters."""
        for sign in part:
            pair = sign in _FLAGS and self._half
            self._half = sign in _FLAGS and not pair
            joined = pair or _joins(self._before, sign)
            if not joined and (_breaks(sign) or self._sign):
                yield self.flush()
            self._sign = _breaks(sign) or (joined and self._sign)
            self._word += sign
            self._before = sign


def _width(word: str) -> int:
    """The most columns that a terminal may take for a word: a terminal that cannot join characters
    shows each of them, also skin tones and the letters of a flag."""
    if word.isascii():
        return len(word)
    return sum(_MOST.get(sign) or get_character_cell_size(sign) for sign in word)


def _joins(before: str, sign: str) -> bool:
    """Whether a character belongs to the one before it, flags aside."""
    return before == _JOINER or sign in _TONES or get_character_cell_size(sign) == 0


def _breaks(sign: str) -> bool:
    """Whether a line may be broken before and after a character: it is wide, or an emoji."""
    return get_character_cell_size(sign) == 2 or sign in _FLAGS or "\u2600" <= sign <= "\u27bf"


def _ends(text: str, width: int) -> list[int]:
    """Where rows of at most so many columns end in a text."""
    ends: list[int] = []
    at = 0
    for line in text.split("\n"):
        rows = _Rows(width)
        written = "".join([rows.write(line), rows.flush()])
        # Only line ends were put in; spaces that hang over the margin were left out.
        i = at
        for sign in written:
            if sign == "\n":
                while text[i : i + 1] == " ":
                    i += 1
                ends.append(i)
            else:
                while text[i] != sign:
                    i += 1
                i += 1
        at += len(line) + 1
        ends.append(at)
    return [end for end in ends if end < len(text)]


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

    def coloured(self, text: Text) -> str:
        """A line with its styles."""
        return "".join(_coloured(text.render(self._console)))

    def format(self, kind: str, source: str, width: int) -> str | None:
        """`source` for `width` columns, without a last newline; None if it stays as it is."""
        if kind == "text" and _PROSE.fullmatch(source) and not _UNDERLINED.search(source):
            return None  # nothing would change
        lines = source.split("\n")
        indent = len(lines[0]) - len(lines[0].lstrip(" \t"))
        text = "\n".join(line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines)
        margin = " " * indent
        try:
            rows = [
                [Segment(margin), *row]
                for row in self._block(self._parser.parse(text), max(width - indent, 8))
            ]
        except (_Unknown, RecursionError):
            return None
        plain = "".join(segment.text for row in rows for segment in row)
        if not plain.strip() or _letters(plain) != _letters(source):
            return None
        return "\n".join("".join(_coloured(row)).rstrip(" ") for row in rows)

    def _block(self, tokens: Sequence[Token], width: int) -> Iterator[list[Segment]]:
        """Rows of a block. Raises _Unknown for what stays as it is."""
        # One entry for every list item or quote around: before its first row, before the others.
        margins: list[tuple[str, str]] = []
        style = _NONE
        apart = False  # a paragraph stands above in the same item or quote
        rest = iter(tokens)
        for token in rest:
            rows: Iterable[list[Segment]] = ()
            room = width - sum(cell_len(after) for _, after in margins)
            if token.type == "list_item_open":
                mark = f"{token.info}{token.markup}" if token.info else self._bullet
                margins.append((f"{mark} ", " " * (cell_len(mark) + 1)))
                apart = False
            elif token.type == "blockquote_open":
                margins.append((f"{self._bar} ", f"{self._bar} "))
            elif token.type in ("list_item_close", "blockquote_close"):
                margins.pop()
            elif token.type == "heading_open":
                style = _TITLE if token.tag in ("h1", "h2") else _BOLD
            elif token.type == "heading_close":
                style = _NONE
                apart = False
            elif token.type == "inline":
                text = self._inline(token.children or (), style)
                rows = self._wrapped(text, room)
                if apart:
                    rows = [[], *rows]
                apart = True
            elif token.type == "table_open":
                rows = self._table(rest, room)
            elif token.type == "hr":
                rows = [[Segment(self._dash * room, _DIM)]]
            elif token.type not in _SILENT:
                raise _Unknown
            elif token.type == "paragraph_open" and token.hidden:
                apart = False
            for row in rows:
                yield [*(Segment(first) for first, _ in margins), *row]
                margins = [(after, after) for _, after in margins]

    def _wrapped(self, text: Text, width: int) -> list[list[Segment]]:
        if any(len(word) > width for word in text.plain.split() if word.isascii()):
            raise _Unknown  # an address should stay whole
        if text.plain.isascii():
            lines = text.wrap(self._console, max(width, 8))
        else:  # measured as while it was written; rich joins what some terminals do not
            lines = text.divide(_ends(text.plain, max(width, 8)))
        for line in lines:
            line.rstrip()
        return [list(line.render(self._console)) for line in lines]

    def _inline(self, tokens: Sequence[Token], style: Style) -> Text:
        text = Text()
        styles = [style]
        literal: list[bool] = []  # for every open emphasis whether its signs are shown
        link = (0, "")  # where its text begins, and where it points
        for at, token in enumerate(tokens):
            shown = ""
            if token.type == "text":
                shown = token.content
            elif token.type == "text_special":
                # LaTeX keeps its backslashes, and entities stay as they were written.
                kept = token.info == "entity" or token.content in "()[]{}"
                shown = token.markup if kept else token.content
            elif token.type == "code_inline":
                if self._colour:
                    text.append(token.content, Style.combine([_CYAN, *styles]))
                else:
                    shown = f"{token.markup}{token.content}{token.markup}"
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
            if shown:
                text.append(shown, Style.combine(styles))
        return text

    def _table(self, tokens: Iterator[Token], width: int) -> list[list[Segment]]:
        """The rest of a table, if no word has to be broken for it."""
        rows: list[list[Text]] = []
        for token in tokens:
            if token.type == "table_close":
                break
            if token.type == "tr_open":
                rows.append([])
            elif token.type in ("th_open", "td_open"):
                side = token.attrs.get("style")
            elif token.type == "inline":
                cell = self._inline(token.children or (), _BOLD if len(rows) == 1 else _NONE)
                cell.justify = _SIDES.get(str(side).removeprefix("text-align:"))
                rows[-1].append(cell)
        if not rows or any(len(row) != len(rows[0]) for row in rows):
            raise _Unknown
        table = Table(box=self._box, show_edge=True, border_style=_DIM, header_style=_NONE)
        least = 1
        for number, head in enumerate(rows[0]):
            words = [word for row in rows for word in row[number].plain.split()]
            longest = max((cell_len(word) for word in words), default=1)
            table.add_column(head, min_width=longest)
            least += longest + 3
        if least > width:
            raise _Unknown
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
_SILENT = (
    "paragraph_open",
    "paragraph_close",
    "bullet_list_open",
    "bullet_list_close",
    "ordered_list_open",
    "ordered_list_close",
)


def _letters(text: str) -> Counter[str]:
    return Counter(_ORNAMENT.sub("", text))


def _coloured(row: Iterable[Segment]) -> Iterator[str]:
    for segment in row:
        if segment.style:
            yield segment.style.render(segment.text, color_system=ColorSystem.STANDARD)
        else:
            yield segment.text

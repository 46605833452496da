"""Converts HTML and Word files to text.

mammoth turns a Word file into HTML, with its headings, lists, tables and notes. So one parser
serves both, in a child process. Scripts, styles and images are left out; the text of links stays.
"""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser

from minikv.cli.documents.loaders import serve

MODULE = "minikv.cli.documents.markup"
"""What `extract` runs."""

ZIP = b"PK\x03\x04"
_CHARSET = re.compile(rb"<meta[^>]+charset=[\"']?([\w-]+)", re.I)

_PAGE = re.compile(rb"(\xef\xbb\xbf)?(\s|<\?xml[^>]*>|<!--.*?-->)*<(!doctype )?html", re.I | re.S)
_RAISED = {"sup": "^", "sub": "_"}  # otherwise 1<sup>2</sup> would be 12

_HIDDEN = frozenset("script style template noscript svg iframe object".split())
_LINES = frozenset(
    "address article aside body br caption dd details dialog div dl dt fieldset figcaption figure "
    "footer form header hr legend main nav option section summary".split()
)
_PARAGRAPHS = frozenset("p h1 h2 h3 h4 h5 h6 title blockquote pre ul ol table".split())
_UNPACKED = 256 << 20  # bytes of a Word file's parts, pictures included
_NONE = -1  # as a gap: breaks before the next text do not count


def is_word(data: bytes) -> bool:
    """Whether data is a Word file (.docx), perhaps a damaged one."""
    return data.startswith(ZIP) and re.search(rb"word/document\d*\.xml", data) is not None


def is_html(data: bytes) -> bool:
    """Whether data begins like a page."""
    return _PAGE.match(data[:4096]) is not None


def _number(text: str | None) -> int:
    """The number in an attribute; 0 if it is not a positive number."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else 0


def as_utf8(data: bytes) -> bytes:
    """A page as UTF-8, converted from the encoding that it names; unchanged if that fails."""
    try:
        data.decode()
    except UnicodeDecodeError:
        if named := _CHARSET.search(data[:4096]):
            with contextlib.suppress(LookupError, UnicodeError):
                return data.decode(named[1].decode()).encode()
    return data


def child(data: bytes, write: Callable[[str], object]) -> str:
    """See `loaders.Child`; data: a Word file, or HTML in UTF-8."""
    if data.startswith(ZIP):
        try:
            import mammoth
        except ImportError:
            return "needs mammoth, which is not installed: pip install 'minikv[docx]'"
        size = sum(part.file_size for part in zipfile.ZipFile(io.BytesIO(data)).infolist())
        if size > _UNPACKED:
            return f"unpacks to {size >> 20:,} MiB: extract its text with another program"
        without = mammoth.images.img_element(lambda image: {})
        html = mammoth.convert_to_html(io.BytesIO(data), convert_image=without).value
    else:
        html = data.decode("utf-8", "replace")
    page = _Page()
    page.feed(html)
    page.close()  # flushes an unfinished tag
    write("".join(page.text))
    return ""


class _Page(HTMLParser):
    """Collects the pieces of a page's `text`: an empty line between paragraphs, a line for each
    item of a list and each row of a table, " | " between cells."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self._gap = _NONE  # line ends before the next text
        self._hidden = self._pre = 0  # how many of these are open
        self._lists: list[int | None] = []  # the last number of each open list
        self._first = True  # whether the next cell is its row's first
        self._mark = ""  # to put before the next text, if that is a number or a word

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in _HIDDEN
        self._pre += tag == "pre"
        self._break(tag)
        self._mark = _RAISED.get(tag, "")
        given = next((_number(v) for k, v in attrs if k in ("start", "value")), 0)
        if tag in ("ol", "ul"):
            self._lists.append(max(given, 1) - 1 if tag == "ol" else None)
        elif tag == "li":
            number = self._lists.pop() if self._lists else None
            if number is not None and given:
                number = given - 1
            self._lists.append(None if number is None else number + 1)
            mark = "-" if number is None else f"{number + 1}."
            self._put("  " * (min(len(self._lists), 9) - 1) + mark + " ", max(self._gap, 1))
            self._gap = _NONE
        elif tag == "tr":
            self._gap, self._first = max(self._gap, 1), True
        elif tag in ("td", "th"):
            self._put("" if self._first else " | ", self._gap if self._first else 0)
            self._gap, self._first = _NONE, False

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in _HIDDEN))
        self._pre = max(0, self._pre - (tag == "pre"))
        if tag in ("ol", "ul") and self._lists:
            self._lists.pop()
        if tag in ("td", "th"):
            self._gap = _NONE
        elif tag == "table":
            self._gap = 2
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._pre:
            data = re.sub(r"[ \t\r\n\f]+", " ", data)
            if self._gap or self.text[-1].endswith(" "):
                data = data.lstrip(" ")
        if data:
            if self._mark and self._gap == 0 and data[0].isalnum():
                data = self._mark + data
            self._put(data, self._gap)
            self._gap, self._mark = 0, ""

    def _break(self, tag: str) -> None:
        if self._gap != _NONE:
            wanted = 2 if tag in _PARAGRAPHS and not self._lists else tag in _LINES | _PARAGRAPHS
            self._gap = max(self._gap, wanted)

    def _put(self, piece: str, gap: int) -> None:
        """Add text after `gap` line ends."""
        if self.text:
            if gap > 0:
                self.text[-1] = self.text[-1].rstrip(" ")
            self.text.append("\n" * gap + piece)
        else:
            self.text.append(piece.lstrip(" "))


if __name__ == "__main__":
    serve(child)

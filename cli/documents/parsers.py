"""Converts PDFs, HTML and Word files to text, in a child process (`child.extract`).

pypdf reads a PDF, page by page. mammoth turns a Word file into HTML, with its headings, lists,
tables and notes, so one parser serves both. Scripts, styles and images are left out; the text of
links stays.
"""

from __future__ import annotations

import contextlib
import io
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from minikv.chat.report import amount
from minikv.cli.documents.child import TIMEOUT, extract, serve
from minikv.errors import UsageError

# How the child ends a page on its standard output. A page's mark is followed by the number of its
# characters in fonts that do not identify their letters, or by nothing if the page is broken.
_PAGE, _MARK = "\f", "\0"

_BLANK = b"\xef\xbb\xbf \t\r\n"  # may precede a PDF
# Bullets of word processors from a symbol font: private-use characters, but known.
_BULLET = re.compile("^[ \t]*[\uf000-\uf0ff](?=\\s)", re.MULTILINE)
# pypdf's output for letters without a name, or with a meaningless one.
_SQUARE, _NAMES = "\u25a1", re.compile(r"(?:/[a-zA-Z]{1,3}\d{1,4}){3,}")
_MAPPED = re.compile(rb"beginbf(char|range)\s*<")
_EMPTY = re.compile(rb"(<\w+>\s*)<\s*>")
# The encodings of composite fonts that identify letters by themselves, and that pypdf knows.
_LETTERS = re.compile(
    r"/(Uni\w+-(UCS2|UTF16)|90ms-RKSJ|GB-EUC|GBpc-EUC|GBK|GBK2K|ETen-B5|ETenms-B5)(-HW)?-[HV]"
)
_WAY_OUT = (
    "try pdftotext (`pdftotext FILE -` prints the text), or recognise the text instead "
    "(ocrmypdf --force-ocr)"
)
# Too long for a word, in scripts that put spaces between words.
_LONG = re.compile("[A-Za-z\u00c0-\u058f]{26,}")


@dataclass(frozen=True, slots=True)
class Pdf:
    """The text of a PDF. facts: "12 pages, 38,114 characters". gaps: which pages lack what, and a
    remedy; "" if nothing is missing."""

    text: str
    facts: str
    gaps: str


def is_pdf(data: bytes) -> bool:
    """Whether data is a PDF, perhaps a damaged one."""
    return data.lstrip(_BLANK).startswith(b"%PDF-")


def read_pdf(
    data: bytes,
    shown: str,
    *,
    limit: int,
    timeout: float = TIMEOUT,
) -> Pdf:
    """The text of the PDF in `data`; `shown` names it in errors.

    At most `limit` bytes of text. Raises UsageError: no reader installed, encrypted, damaged,
    without pages or text, too slow, too large.
    """
    data = data.lstrip(_BLANK)  # its offsets count from its mark
    text = extract("pdf", data, shown, limit=limit, timeout=timeout)
    return _judge(text, shown)


def _judge(text: str, shown: str) -> Pdf:
    """Join pages to one text, with an empty line between them."""
    pages = [page.partition(_MARK) for page in text.split(_PAGE)[:-1]]  # each page ends with it
    if not pages:
        raise UsageError(f"{shown} has no pages", "is the file damaged?")
    texts: list[str] = []
    silent, broken, odd, joined, unread = list[int](), list[int](), list[int](), list[int](), 0
    for n, (page, mark, count) in enumerate(pages, 1):
        plain = page.strip()
        if mark and not count:
            broken.append(n)
        elif not plain:
            silent.append(n)
        else:
            texts.append(plain)
            if holes := int(count or 0) or _meaningless(_BULLET.sub("", plain)):
                odd.append(n)
                unread += holes
            elif 4 * (long := sum(map(len, _LONG.findall(plain)))) > len(plain) and long > 100:
                joined.append(n)
    if broken and not texts:
        raise UsageError(f"{shown}: {_pages(broken)} could not be read", "is it damaged?")
    number = amount(len(pages), "page")
    if not texts:
        why = "a scan? recognise its text first, for example with ocrmypdf"
        raise UsageError(f"{shown} has {number} without text", why)
    gaps = []
    if silent:
        gaps.append(f"{_pages(silent)} gave no text (a scan? ocrmypdf recognises it)")
    if broken:
        gaps.append(f"{_pages(broken)} could not be read (damaged?)")
    if odd:
        has = "has" if len(odd) == 1 else "have"
        characters = amount(unread, "character")
        gaps.append(f"{_pages(odd)} {has} {characters} that cannot be identified")
    if joined:
        gaps.append(f"words run together on {_pages(joined)}")
    if odd or joined:
        gaps.append(_WAY_OUT)
    text = "\n\n".join(texts)
    return Pdf(text, f"{number}, {amount(len(text), 'character')}", "; ".join(gaps))


def _meaningless(text: str) -> int:
    """How many characters cannot be real text: controls, U+FFFD, private-use and undefined
    characters, and pypdf's signs for letters without a name. Planes of scripts and emoji that still
    grow do not count."""
    count = sum(names[0].count("/") for names in _NAMES.finditer(text))
    for sign, times in Counter(text).items():
        kind = unicodedata.category(sign)
        undefined = kind == "Cn" and (sign < "\U0001f000" or ord(sign) & 0xFFFE == 0xFFFE)
        unwritten = kind in ("Cc", "Co") and sign not in "\t\n\r\x85"
        nameless = sign == _SQUARE and 4 * times > len(text)  # fewer are check boxes
        if undefined or unwritten or nameless or sign == "\ufffd":
            count += times
    return count


def _pages(numbers: Sequence[int]) -> str:
    """ "page 4", "pages 4, 7 and 9", "23 pages (4, 7, 9, 12, ...)"."""
    if len(numbers) == 1:
        return f"page {numbers[0]:,}"
    if len(numbers) <= 5:
        return f"pages {', '.join(f'{n:,}' for n in numbers[:-1])} and {numbers[-1]:,}"
    return f"{len(numbers):,} pages ({', '.join(f'{n:,}' for n in numbers[:4])}, ...)"


def pdf(data: bytes, write: Callable[[str], object]) -> str:
    """See `child.Child`. A form feed ends each page."""
    import logging
    from io import BytesIO

    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    logging.disable()
    coded = 0
    known: dict[int, bool] = {}

    def seen(text: str, _cm: object, _tm: object, font: Any, _size: object) -> None:
        nonlocal coded
        if font is not None and id(font) not in known:
            known[id(font)] = _coded(font)
        if font is not None and known[id(font)]:
            coded += sum(not sign.isspace() for sign in text)

    try:
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return "is encrypted: save a copy without a password first"
        for page in reader.pages:
            coded = 0
            known.clear()
            try:
                _fill_in(page.get("/Resources"), set())
                text = page.extract_text(visitor_text=seen)
                if not text.strip() and (contents := page.get_contents()) is not None:
                    contents.get_data()  # a damaged or oversized page looks like an empty one
            except MemoryError:
                raise
            except Exception:  # a damaged page can raise anything
                text = _MARK
            else:
                text = text.replace(_PAGE, "\ufffd").replace(_MARK, "\ufffd")
                text += f"{_MARK}{coded}" if coded else ""
            write(text + _PAGE)
    except DependencyError:
        return "is encrypted with AES: pip install cryptography reads it if it needs no password"
    return ""


def _fill_in(resources: Any, done: set[int]) -> None:
    """If a font's table maps a letter to nothing, map it to U+FFFD, because pypdf would omit it."""
    from pypdf.generic import DecodedStreamObject, NameObject

    resources = resources.get_object() if resources is not None else None
    if not isinstance(resources, dict) or id(resources) in done:
        return
    done.add(id(resources))
    for font in _parts(resources, "/Font"):
        table = font.get("/ToUnicode")
        if hasattr(table, "get_data") and _EMPTY.search(data := table.get_data()):
            filled = DecodedStreamObject()
            filled.set_data(_EMPTY.sub(rb"\1<FFFD>", data))
            font[NameObject("/ToUnicode")] = filled
    for form in _parts(resources, "/XObject"):
        _fill_in(form.get("/Resources"), done)


def _parts(resources: Any, kind: str) -> list[Any]:
    found = resources.get(kind)
    found = found.get_object() if found is not None else None
    parts = [part.get_object() for part in found.values()] if isinstance(found, dict) else []
    return [part for part in parts if isinstance(part, dict)]


def _coded(font: Any) -> bool:
    """Whether a font does not identify its letters: pypdf then returns the numbers of shapes."""
    unicode, encoding = font.get("/ToUnicode"), font.get("/Encoding")
    if hasattr(unicode, "get_data") and _MAPPED.search(unicode.get_data()):
        return False
    named = isinstance(encoding, str) and _LETTERS.fullmatch(encoding)
    return font.get("/Subtype") == "/Type0" and not named


# -- HTML and Word files -------------------------------------------------------------------------

ZIP = b"PK\x03\x04"
_CHARSET = re.compile(rb"<meta[^>]+charset=[\"']?([\w-]+)", re.I)

_HTML = re.compile(rb"(\xef\xbb\xbf)?(\s|<\?xml[^>]*>|<!--.*?-->)*<(!doctype )?html", re.I | re.S)
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
    return _HTML.match(data[:4096]) is not None


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


def markup(data: bytes, write: Callable[[str], object]) -> str:
    """See `child.Child`; data: a Word file, or HTML in UTF-8."""
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
    serve({"pdf": pdf, "markup": markup})

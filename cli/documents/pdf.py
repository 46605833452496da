"""The text of a PDF, page by page, by pypdf in a child process (`extract`)."""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minikv.cli.documents.extract import extract, serve
from minikv.cli.documents.loaders import TIMEOUT
from minikv.errors import UsageError

MAGIC = b"%PDF-"

# How the child ends a page on its standard output. A page's mark is followed by the number of its
# characters in fonts that do not say which letters they have; by nothing, if the page is broken.
_PAGE, _MARK = "\f", "\0"

NEAR = 1024
"""Bytes at a file's begin in which readers of PDFs look for the mark, and at its end for the end's.
"""
_BEGIN = re.compile(rb"%PDF-\d\.\d\d?\s")
_BLANK = b"\xef\xbb\xbf \t\r\n"  # may come before the mark

# The bullets that word processors take from a font of signs: for private use, but known.
_BULLET = re.compile("^[ \t]*[\uf000-\uf0ff](?=\\s)", re.MULTILINE)
# No one sees these. They are odd within a word of a script that sets spaces between words.
_WITHIN = re.compile(
    "(?<=[A-Za-z\u00c0-\u058f])[\u200b\ufeff\U000e0000-\U000e007f]+(?=[A-Za-z\u00c0-\u058f])"
)
# What pypdf gives for a letter without a name. Before a word, it is a box to tick.
_SQUARE = "\u25a1"
_SQUARES = re.compile(rf"\S{_SQUARE}")
_MAPPED = re.compile(rb"beginbf(char|range)\s*<")
_EMPTY = re.compile(rb"(<\w+>\s*)<\s*>")
# The encodings of composite fonts that stand for letters by themselves, and that pypdf knows.
_LETTERS = re.compile(
    r"/(Uni\w+-(UCS2|UTF16)|90ms-RKSJ|GB-EUC|GBpc-EUC|GBK|GBK2K|ETen-B5|ETenms-B5)(-HW)?-[HV]"
)
_NUMBERED = re.compile(r"/\D{0,20}\d{1,6}")
# Words of scripts that set spaces between words, too long to be one.
_LONG = re.compile("[A-Za-z\u00c0-\u058f]{26,}")


@dataclass(frozen=True, slots=True)
class Pdf:
    """The text of a PDF. Pages count from 1: `silent` gave no text, `broken` could not be read.
    `coded` and `odd` map a page to a count of its characters: those in fonts that do not say which
    letters they have, or else those that mean nothing. On pages in `joined` words run together."""

    text: str
    pages: int
    silent: tuple[int, ...]
    broken: tuple[int, ...]
    coded: Mapping[int, int]
    odd: Mapping[int, int]
    joined: tuple[int, ...] = ()

    @property
    def facts(self) -> str:
        """ "12 pages, 38,114 characters"."""
        return f"{_pages(self.pages)}, {len(self.text):,} characters"

    @property
    def gaps(self) -> str:
        """What is missing on which pages, and what would help; "" where all is well."""
        parts = []
        if self.silent:
            parts.append(f"{_listed(self.silent)} gave no text (a scan? ocrmypdf recognises it)")
        if self.broken:
            parts.append(f"{_listed(self.broken)} could not be read (damaged?)")
        for pages, what in (
            (self.coded, "in fonts that do not say which letters they have"),
            (self.odd, "without a meaning"),
        ):
            if pages:
                has = "has" if len(pages) == 1 else "have"
                count = sum(pages.values())
                said = f"{count:,} character{'' if count == 1 else 's'}"
                parts.append(f"{_listed(tuple(pages))} {has} {said} {what}")
        if self.joined:
            parts.append(f"words run together on {_listed(self.joined)}")
        if self.coded or self.odd or self.joined:
            parts.append(_way_out())
        return "; ".join(parts)


def _way_out() -> str:
    other = "recognise the text instead (ocrmypdf --force-ocr)"
    if shutil.which("pdftotext") is None:
        return f"try pdftotext (in poppler-utils), or {other}"
    return f'try pdftotext: [loaders] ".pdf" = "pdftotext {{path}} -" in config.toml, or {other}'


def is_pdf(data: bytes) -> bool:
    """Whether data may be a PDF. The mark may stand behind something else (as the header of a
    response) if objects follow, and then a PDF's end or what no text has."""
    return is_surely_pdf(data) or (_begin(data) is not None and b"%%EOF" in data[-NEAR:])


def is_surely_pdf(data: bytes) -> bool:
    """Whether data is a PDF, perhaps a damaged one, and not a text that quotes one."""
    if data.lstrip(_BLANK).startswith(MAGIC):
        return True
    begin = _begin(data)
    if begin is None or b"stream" not in data:
        return False
    try:
        return "\0" in data[begin:].decode()
    except UnicodeDecodeError:
        return True


def _begin(data: bytes) -> int | None:
    """Where in data the mark stands that objects follow."""
    found = _BEGIN.search(data[: NEAR + 16])
    if found is None or found.start() > NEAR or b" obj" not in data:
        return None
    return found.start()


def _bare(data: bytes) -> bytes:
    """The PDF without what stands before its mark: its offsets count from there."""
    return data[_begin(data) or 0 :].lstrip(_BLANK)


def read_pdf(
    data: bytes,
    shown: str,
    *,
    limit: int,
    timeout: float = TIMEOUT,
    stopped: Callable[[], bool] | None = None,
) -> Pdf:
    """The text of the PDF in `data`; `shown` names it in errors.

    At most `limit` bytes of text. Raises UsageError: no reader installed, encrypted, damaged,
    without pages or text, too slow, too large; Interrupted once `stopped()` is true.
    """
    module = "minikv.cli.documents.pdf"
    text = extract(module, _bare(data), shown, limit=limit, timeout=timeout, stopped=stopped)
    return _judge(text, shown)


def _judge(text: str, shown: str) -> Pdf:
    """Pages to one text, with an empty line between them."""
    pages = [page.partition(_MARK) for page in text.split(_PAGE)[:-1]]  # each page ends with it
    if not pages:
        raise UsageError(f"{shown} has no pages", "is the file damaged?")
    texts, silent, broken, joined = [], [], [], []
    coded: dict[int, int] = {}
    odd: dict[int, int] = {}
    for n, (page, mark, count) in enumerate(pages, 1):
        if mark and not count:
            broken.append(n)
        elif not (plain := page.strip()):
            silent.append(n)
        else:
            texts.append(plain)
            if mark:
                coded[n] = int(count)
            elif holes := _meaningless(_BULLET.sub("", plain)):
                odd[n] = holes
            elif 4 * (long := sum(map(len, _LONG.findall(plain)))) > len(plain) and long > 100:
                joined.append(n)
    if not texts:
        why = "a scan? recognise its text first, for example with ocrmypdf"
        if broken:
            raise UsageError(f"{shown}: {_listed(broken)} could not be read", "is it damaged?")
        raise UsageError(f"{shown} has {_pages(len(pages))} and no text in them", why)
    counts = len(pages), tuple(silent), tuple(broken), coded, odd, tuple(joined)
    return Pdf("\n\n".join(texts), *counts)


def _meaningless(text: str) -> int:
    """How many characters no text has: controls, U+FFFD, those for private use, and those that no
    standard defines. Planes of scripts and emoji that still grow are left out."""
    count = sum(map(len, _WITHIN.findall(text)))
    for sign, times in Counter(text).items():
        kind = unicodedata.category(sign)
        undefined = kind == "Cn" and (sign < "\U0001f000" or ord(sign) & 0xFFFE == 0xFFFE)
        unwritten = kind in ("Cc", "Co") and sign not in "\t\n\r\x85"
        if undefined or unwritten or sign == "\ufffd":
            count += times
    words = text.split()
    unnamed = [word for word in words if _SQUARES.search(word)]
    if 10 * len(unnamed) > len(words):
        count += sum(word.count(_SQUARE) for word in unnamed)
    return count


def _pages(count: int) -> str:
    return f"{count:,} page{'' if count == 1 else 's'}"


def _listed(numbers: Sequence[int]) -> str:
    """ "page 4", "pages 4, 7 and 9", "23 pages (4, 7, 9, 12, ...)"."""
    if len(numbers) == 1:
        return f"page {numbers[0]:,}"
    if len(numbers) <= 5:
        return f"pages {', '.join(f'{n:,}' for n in numbers[:-1])} and {numbers[-1]:,}"
    return f"{len(numbers):,} pages ({', '.join(f'{n:,}' for n in numbers[:4])}, ...)"


def child(data: bytes, write: Callable[[str], object]) -> str:
    """See `extract.Child`. A form feed ends each page."""
    import logging
    from io import BytesIO

    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    logging.disable()
    try:
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return "is encrypted: save a copy without a password first"
        for page in reader.pages:
            coded = _Coded()
            try:
                _fill_in(page.get("/Resources"), set())
                text = page.extract_text(visitor_text=coded)
                if not text.strip() and (contents := page.get_contents()) is not None:
                    contents.get_data()  # a damaged or oversized page passes for an empty one
            except MemoryError:
                raise
            except Exception:  # a damaged page can raise anything
                text = _MARK
            else:
                text = text.replace(_PAGE, "\ufffd").replace(_MARK, "\ufffd")
                if coded.count:
                    text += f"{_MARK}{coded.count}"
            write(text + _PAGE)
    except DependencyError:
        return "is encrypted with AES: pip install cryptography reads it if it needs no password"
    return ""


def _fill_in(resources: Any, done: set[int]) -> None:
    """Where a font's table maps to nothing, map to U+FFFD: pypdf would leave the letter out."""
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


class _Coded:
    """Counts the characters of a page in fonts that do not say which letters they have: pypdf then
    gives the numbers or names of their shapes."""

    def __init__(self) -> None:
        self.count = 0
        self._known: dict[int, re.Pattern[str] | None] = {}

    def __call__(self, text: str, _cm: object, _tm: object, font: Any, _size: object) -> None:
        if font is not None and text.strip():
            if id(font) not in self._known:
                self._known[id(font)] = _unsaid(font)
            if (pattern := self._known[id(font)]) is not None:
                self.count += len(pattern.findall(text))


def _unsaid(font: Any) -> re.Pattern[str] | None:
    """What stands in a font's text for letters that it does not name; None if it names all."""
    unicode = font.get("/ToUnicode")
    if hasattr(unicode, "get_data") and _MAPPED.search(unicode.get_data()):
        return None
    encoding = font.get("/Encoding")
    if font.get("/Subtype") == "/Type0":
        named = isinstance(encoding, str) and _LETTERS.fullmatch(encoding)
        return None if named else re.compile(r"\S")
    differences = encoding.get("/Differences", ()) if isinstance(encoding, Mapping) else ()
    # pypdf writes a name that stands for no letter, as /g12, into the text.
    names = sorted(
        (n for n in differences if isinstance(n, str) and _NUMBERED.fullmatch(n)), key=len
    )
    return re.compile("|".join(map(re.escape, reversed(names)))) if names else None


if __name__ == "__main__":
    serve(child)

"""The text of a PDF, page by page, by pypdf in a child process.

A PDF is a program for a large parser, which has no limits of its own. So a child process with
bounded memory, CPU time and output runs it.
"""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import signal
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minikv.cli.documents.loaders import Output, TooMuch, TooSlow, run
from minikv.errors import Interrupted, UsageError

MAGIC = b"%PDF-"
TIMEOUT = 120.0
"""Seconds that one document may take."""

MEMORY = 1 << 30
"""Bytes of address space of the child."""

# How the child ends a page on its standard output. Behind the mark in a page stands how many of its
# characters are in fonts that do not say which letters they have; nothing, if the page is broken.
_PAGE, _MARK = "\f", "\0"
_REFUSED = 3  # exit code of our child when it says why

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


@dataclass(frozen=True, slots=True)
class Pdf:
    """The text of a PDF. Pages count from 1: `silent` gave no text, `broken` could not be read.
    `coded` and `odd` map a page to a count of its characters: those in fonts that do not say which
    letters they have, or else those that mean nothing."""

    text: str
    pages: int
    silent: tuple[int, ...]
    broken: tuple[int, ...]
    coded: Mapping[int, int]
    odd: Mapping[int, int]

    @property
    def facts(self) -> str:
        """ "12 pages, 38,114 characters"."""
        return f"{_pages(self.pages)}, {len(self.text):,} characters"

    @property
    def gaps(self) -> str:
        """ "page 4 gave no text (a scan?)", or "" where every page gave text with a meaning."""
        parts = []
        if self.silent:
            parts.append(f"{_listed(self.silent)} gave no text (a scan?)")
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
        if self.coded or self.odd:
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
    # -P: nothing is imported from the directory that the user happens to be in.
    limits = (str(MEMORY), str(int(timeout) + 1))
    arguments = (sys.executable, "-P", "-m", "minikv.cli.documents.pdf", *limits)
    try:
        output = run(arguments, _bare(data), limit=limit, timeout=timeout, stopped=stopped)
    except Interrupted:
        raise Interrupted(f"stopped reading {shown}", "nothing was added") from None
    except TooSlow:
        raise _too_slow(shown, timeout) from None
    except TooMuch:
        raise UsageError(
            f"{shown} holds more than {limit >> 20} MiB of text",
            "no supported model can read that much text",
        ) from None
    except OSError as error:
        raise UsageError(f"{shown}: pypdf cannot be run: {error.strerror}") from None
    if output.code:
        raise _failure(output, shown, timeout)
    return _judge(output.data.decode("utf-8", "replace"), shown)


def _failure(output: Output, shown: str, timeout: float) -> UsageError:
    if output.code == -signal.SIGXCPU:  # the limit on CPU time
        return _too_slow(shown, timeout)
    if output.code == _REFUSED:
        what, _, hint = output.said.partition(": ")
        return UsageError(f"{shown} {what}", hint)
    said = f": {output.said}" if output.said else ""
    return UsageError(f"{shown}: pypdf cannot read this PDF{said}", "is the file damaged?")


def _too_slow(shown: str, timeout: float) -> UsageError:
    return UsageError(
        f"{shown} took more than {timeout:.0f} s to read", "extract its text with another program"
    )


def _judge(text: str, shown: str) -> Pdf:
    """Pages to one text, with an empty line between them."""
    pages = [page.partition(_MARK) for page in text.split(_PAGE)[:-1]]  # each page ends with it
    if not pages:
        raise UsageError(f"{shown} has no pages", "is the file damaged?")
    texts, silent, broken = [], [], []
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
    if not texts:
        why = "a scan? recognise its text first, for example with ocrmypdf"
        if broken:
            raise UsageError(f"{shown}: {_listed(broken)} could not be read", "is it damaged?")
        raise UsageError(f"{shown} has {_pages(len(pages))} and no text in them", why)
    return Pdf("\n\n".join(texts), len(pages), tuple(silent), tuple(broken), coded, odd)


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
    """Write each page's text and a form feed. Returns why not, as "what: hint", or ""."""
    import logging
    from io import BytesIO

    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    logging.disable()
    sys.setrecursionlimit(1000)
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
    except MemoryError:
        return f"needs more than {MEMORY >> 20} MiB to read: extract its text with another program"
    except RecursionError:
        return "is nested too deeply: is the file damaged?"
    except Exception as error:  # pypdf raises its own errors, and any other on odd files
        return f"cannot be read ({type(error).__name__}): is the file damaged?"
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


def _main() -> None:
    """Its arguments: bytes of address space, and seconds of processor time."""
    memory, seconds = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = sys.stdout.buffer
    why = child(sys.stdin.buffer.read(), lambda text: out.write(_utf8(text)))
    out.flush()
    if why:
        sys.stderr.write(why)
        raise SystemExit(_REFUSED)


def _utf8(text: str) -> bytes:
    """UTF-8, with surrogate pairs joined and lone surrogates replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


if __name__ == "__main__":
    _main()

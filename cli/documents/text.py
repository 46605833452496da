"""Reads one document from a file, a pipe or bytes. Anything that cannot be read is reported.

`named` finds the files of a directory or a pattern.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import os
import select
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.transcript import Source
from minikv.cli.documents.child import extract
from minikv.cli.documents.parsers import ZIP, as_utf8, is_html, is_pdf, is_word, read_pdf
from minikv.cli.paths import opened
from minikv.cli.screen.text import clean
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.transcript import Document


def source_of(path: str) -> Source | None:
    """The present state of a regular file; None for anything else, or if it cannot be read."""
    if os.path.abspath(path).startswith(("/dev/", "/proc/")):
        return None  # a stream, whose name means something else in the next process
    try:
        with opened(path, links=True) as file:
            facts = os.fstat(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return None
    return Source(os.path.abspath(path), facts.st_size, facts.st_mtime_ns, digest)


def changes(documents: Iterable[Document]) -> list[str]:
    """A line for each document whose file has changed since it was read."""
    lines = []
    for document in documents:
        state = document.source and _state(document.source)
        if state:
            lines.append(f"{document.name} {state}; this chat keeps the text as it was")
    return lines


def _state(source: Source) -> str:
    """How a file has changed, in words; "" if it has not."""
    try:
        facts = os.stat(source.path)
    except (FileNotFoundError, NotADirectoryError):
        return "is no longer there"
    except OSError:
        return "can no longer be read"
    if (facts.st_size, facts.st_mtime_ns) == (source.size, source.mtime_ns):
        return ""
    now = source_of(source.path)
    if now is None:
        return "can no longer be read"
    return "" if now.sha256 == source.sha256 else "was changed since it was read"


MAX_BYTES = 32 << 20

_MAGIC = (
    (b"\x7fELF", "a program", ""),
    (
        b"\xd0\xcf\x11\xe0",
        "an Office file of the old kind or with a password",
        "save it as .docx, without a password",
    ),
    (
        ZIP,
        "a zip archive or office file",
        'extract its text first: pandoc -t plain FILE | minikv ask "QUESTION"',
    ),
    (b"\x1f\x8b", "gzip-compressed", "unpack it first: gunzip -c FILE | minikv ask ..."),
    (b"\x89PNG", "a PNG image", ""),
    (b"\xff\xd8\xff", "a JPEG image", ""),
)
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:"
# Control characters that occur in plain text: tab, newlines, form feed, backspace, ESC.
_TEXT_CONTROLS = frozenset(b"\t\n\r\f\v\b\x1b")
SAMPLE = 1 << 16
"""Bytes at the beginning that distinguish text from binary data."""

_HTML = (".html", ".htm", ".xhtml")
_NAMELESS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")


@dataclass(frozen=True, slots=True)
class Text:
    """A document's text. name: the one that the model sees. note: a warning to show, or "". facts:
    its size, such as "12 pages, 38,114 characters". source: the file that it was read from."""

    text: str
    name: str | None
    note: str = ""
    facts: str = ""
    source: Source | None = None


def read_file(path: str) -> Text:
    """The text of a regular file or a pipe: plain, a PDF, a Word file or HTML. Raises UsageError
    with the reason and what to do."""
    shown = one_line(path) or "''"
    found = read_bytes(_content(path, shown), shown)
    # The name becomes part of the prompt: one line, no control characters.
    name = None if path.startswith(_NAMELESS) else one_line(Path(path).name)
    return replace(found, name=name, source=source_of(path))


def one_line(name: str) -> str | None:
    """A file name that the model may see; None if nothing of the name is left."""
    return " ".join(clean(name).split()) or None


def read_bytes(data: bytes, shown: str) -> Text:
    """A nameless document from bytes. Errors as in `read_file`; `shown` names it in them, and its
    ending distinguishes HTML and Word files from text."""
    if len(data) > MAX_BYTES:
        raise too_large(shown)
    if is_pdf(data):
        pdf = read_pdf(data, shown, limit=MAX_BYTES)
        note = f"{shown}: {pdf.facts}; {pdf.gaps}" if pdf.gaps else ""
        return Text(pdf.text, None, note, pdf.facts)
    ending, kind = Path(shown).suffix.lower(), ""
    if is_word(data):
        kind = "a Word file"
    elif ending == ".docx":
        refuse_binary(data, shown)
        raise UsageError(f"{shown} is not a Word file", "is it damaged, or of another kind?")
    else:
        if is_html(data) or ending in _HTML:
            kind, data = "HTML", as_utf8(data)
        text = decode(data, shown)
        data = text.encode("utf-8", "replace")
    if kind:
        text = extract("markup", data, shown, limit=MAX_BYTES).strip()
        if not text:
            raise UsageError(f"{shown} has no text", "nothing was added")
    return Text(text, None, facts=f"{len(text):,} characters{kind and f' from {kind}'}")


def _content(path: str, shown: str) -> bytes:
    """The content of a regular file or a pipe, at most one byte over the limit. Raises
    UsageError."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait forever for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise UsageError(f"no such file: {shown}", _nearest(path)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {shown}: {reason}") from None
    try:
        facts = os.fstat(handle)
        if stat.S_ISDIR(facts.st_mode):
            raise UsageError(f"{shown} is a directory", "name a file")
        if stat.S_ISFIFO(facts.st_mode):
            return _drained(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{shown} is not a regular file", "pipe it: minikv ask QUESTION < ...")
        if facts.st_size > MAX_BYTES:
            raise too_large(shown)
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {shown}: {error.strerror}") from None
    finally:
        os.close(handle)


def _drained(handle: int) -> bytes:
    """The content of a pipe until its last writer closes it. Waits for a first writer."""
    poll, data = select.poll(), bytearray()
    poll.register(handle, select.POLLIN)
    while len(data) <= MAX_BYTES:
        poll.poll()
        try:
            piece = os.read(handle, SAMPLE)
        except BlockingIOError:
            continue
        if not piece:
            break
        data += piece
    return bytes(data)


def _nearest(path: str) -> str:
    """A hint about the file that was probably meant."""
    folder, name = os.path.split(path)
    try:
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.6)
    except (OSError, ValueError):
        return f"there is no directory {one_line(folder)}"
    if near:
        return f"did you mean {one_line(os.path.join(folder, near[0]))}?"
    return f"minikv looked in {one_line(os.path.abspath(folder))}"


def decode(data: bytes, name: str) -> str:
    """Bytes as text: UTF-8, or UTF-16/32 by their marks. Raises UsageError for data that is too
    large, binary, a PDF, a Git LFS pointer, empty or not valid in its encoding."""
    if len(data) > MAX_BYTES:
        raise too_large(name)
    refuse_binary(data, name)
    if data.startswith(_POINTER):
        raise UsageError(
            f"{name} is only a Git LFS pointer to the file", "run `git lfs pull` in its repository"
        )
    encoding = encoding_of(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        label = encoding.removesuffix("-sig").upper()
        # The UTF-8 codec with a mark counts from the end of the mark.
        marked = encoding == "utf-8-sig" and data.startswith(codecs.BOM_UTF8)
        at = error.start + 3 * marked
        raise UsageError(
            f"{name} is not valid {label}: byte {at:,} (0x{data[at]:02x})",
            f"`iconv -c -f {label} -t UTF-8 FILE` prints it without the invalid bytes",
        ) from None
    if not text.strip():
        raise UsageError(f"{name} is empty", "nothing was added")
    return text


def encoding_of(data: bytes) -> str:
    """UTF-16 or UTF-32 if data begins with one of their marks, otherwise UTF-8, with a mark or
    without."""
    # UTF-32's little-endian mark begins with UTF-16's, so it is tested first.
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8-sig"


def refuse_binary(data: bytes, name: str) -> None:
    """Raise UsageError for data that is not text, according to its beginning: a known mark, or too
    many control characters. A stray NUL is accepted."""
    if is_pdf(data):
        raise UsageError(f"{name} is a PDF, not text", "name it as a file")
    for magic, what, hint in _MAGIC:
        if data.startswith(magic):
            raise UsageError(f"{name} is {what}, not text", hint)
    if encoding_of(data) != "utf-8-sig":
        return
    sample, share = data[:SAMPLE], 0.1
    try:
        sample.decode()
    except UnicodeDecodeError as error:
        if error.start < len(sample) - 3:  # otherwise the end of the sample splits a character
            # Text in another encoding has almost no control characters; random bytes have 10 %.
            share = 0.02
    controls = sum(1 for byte in sample if byte < 32 and byte not in _TEXT_CONTROLS)
    if controls > share * len(sample):
        raise UsageError(
            f"{name} looks binary, not text", "UTF-16 text is recognised by its byte order mark"
        )


def is_binary(data: bytes) -> bool:
    """Whether a file that begins like this contains no readable text."""
    try:
        if not is_pdf(data):
            refuse_binary(data, "")
    except UsageError:
        return True
    return False


def too_large(name: str) -> UsageError:
    """The error for more than `MAX_BYTES`."""
    return UsageError(
        f"{name} is larger than {MAX_BYTES >> 20} MiB", "no supported model can read that much text"
    )

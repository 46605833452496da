"""The text of a PDF, page by page, by pypdf or else by pdftotext, in a child process.

A PDF is a program for a large parser. Neither parser has limits of its own, so a child process with
bounded memory, CPU time and output runs it.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minikv.cli.loaders import Output, TooMuch, TooSlow, run
from minikv.errors import Interrupted, UsageError

MAGIC = b"%PDF-"
TIMEOUT = 120.0
"""Seconds that one document may take."""

MEMORY = 1 << 30
"""Bytes of address space of the child."""

# How both parsers end a page on their standard output; and a page that pypdf failed on.
_PAGE, _BROKEN = "\f", "\0"
_REFUSED = 3  # exit code of our child when it says why


@dataclass(frozen=True, slots=True)
class Pdf:
    """The text of a PDF. Pages count from 1: `silent` gave no text, `broken` could not be read."""

    text: str
    pages: int
    silent: tuple[int, ...]
    broken: tuple[int, ...]

    @property
    def facts(self) -> str:
        """ "12 pages, 38,114 characters"."""
        return f"{_pages(self.pages)}, {len(self.text):,} characters"

    @property
    def gaps(self) -> str:
        """ "page 4 gave no text (a scan?)", or "" where every page gave some."""
        parts = []
        if self.silent:
            parts.append(f"{_listed(self.silent)} gave no text (a scan?)")
        if self.broken:
            parts.append(f"{_listed(self.broken)} could not be read (damaged?)")
        return "; ".join(parts)


def is_pdf(data: bytes) -> bool:
    """Whether data begins with the mark of a PDF; a BOM or white space may come before it."""
    return data.lstrip(b"\xef\xbb\xbf \t\r\n")[: len(MAGIC)] == MAGIC


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
    program, arguments = _reader(shown)
    try:
        output = run(arguments, data, limit=limit, timeout=timeout, memory=MEMORY, stopped=stopped)
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
        raise UsageError(f"{shown}: {program} cannot be run: {error.strerror}") from None
    if output.code:
        raise _failure(output, shown, program, timeout)
    return _judge(output.data.decode("utf-8", "replace"), shown)


def _reader(shown: str) -> tuple[str, Sequence[str]]:
    if sys.executable and importlib.util.find_spec("pypdf") is not None:
        # -P: nothing is imported from the directory that the user happens to be in.
        return "pypdf", (sys.executable, "-P", "-m", "minikv.cli.pdf")
    path = shutil.which("pdftotext")
    if path is not None:
        return "pdftotext", (path, "-enc", "UTF-8", "-", "-")
    raise UsageError(
        f"{shown} is a PDF, and nothing here reads PDFs",
        "pip install 'minikv[pdf]', or install pdftotext (in poppler-utils)",
    )


def _failure(output: Output, shown: str, program: str, timeout: float) -> UsageError:
    if output.code == -signal.SIGXCPU:  # the limit on CPU time
        return _too_slow(shown, timeout)
    if program == "pypdf" and output.code == _REFUSED:
        what, _, hint = output.said.partition(": ")
        return UsageError(f"{shown} {what}", hint)
    if "assword" in output.said:  # pdftotext's "Incorrect password"
        return UsageError(f"{shown} is encrypted", "save a copy without a password first")
    said = f": {output.said}" if output.said else ""
    return UsageError(f"{shown}: {program} cannot read this PDF{said}", "is the file damaged?")


def _too_slow(shown: str, timeout: float) -> UsageError:
    return UsageError(
        f"{shown} took more than {timeout:.0f} s to read", "extract its text with another program"
    )


def _judge(text: str, shown: str) -> Pdf:
    """Pages to one text, with an empty line between them."""
    pages = [page.strip() for page in text.split(_PAGE)[:-1]]  # each page ends with it
    if not pages:
        raise UsageError(f"{shown} has no pages", "is the file damaged?")
    broken = tuple(n for n, page in enumerate(pages, 1) if page == _BROKEN)
    silent = tuple(n for n, page in enumerate(pages, 1) if not page)
    whole = "\n\n".join(page for page in pages if page not in ("", _BROKEN))
    if not whole:
        why = "a scan? recognise its text first, for example with ocrmypdf"
        if broken:
            raise UsageError(f"{shown}: {_listed(broken)} could not be read", "is it damaged?")
        raise UsageError(f"{shown} has {_pages(len(pages))} and no text in them", why)
    return Pdf(whole, len(pages), silent, broken)


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
            try:
                text = page.extract_text()
                if not text.strip() and (contents := page.get_contents()) is not None:
                    contents.get_data()  # a damaged or oversized page passes for an empty one
            except MemoryError:
                raise
            except Exception:  # a damaged page can raise anything
                text = _BROKEN
            else:
                text = text.replace(_PAGE, "\n").replace(_BROKEN, "")
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


def _main() -> None:
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

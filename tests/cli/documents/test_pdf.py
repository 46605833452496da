"""PDFs, good, odd and hostile: the text of every page or one line that says why not."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import pypdf
import pytest
from refusals import refused

from minikv.cli.documents import child as child_process
from minikv.cli.documents import parsers
from minikv.cli.documents.child import run
from minikv.cli.documents.parsers import is_pdf, read_pdf
from minikv.cli.documents.parsers import pdf as child
from minikv.cli.documents.text import read_bytes, read_file
from minikv.errors import Interrupted, UsageError

LIMIT = 1 << 20
CATALOG = b"<< /Type /Catalog /Pages 2 0 R >>"


def assembled(*objects: bytes) -> bytes:
    """A PDF file of numbered objects, the first one its catalog."""
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    start, count = len(out), len(objects) + 1
    out += b"xref\n0 %d\n0000000000 65535 f \n%strailer\n" % (count, table)
    out += b"<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (count, start)
    return bytes(out)


def stream(data: bytes, entries: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), entries, data)


HELVETICA = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"


def document(
    *pages: str, drawn: Sequence[bytes] = (), font: bytes = HELVETICA, more: Sequence[bytes] = ()
) -> bytes:
    """One line of text per page; `drawn` replaces the first pages' whole content objects. `more`
    are objects for the font, numbered on from the last page's."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * n) for n in range(len(pages)))
    objects = [CATALOG, b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(pages)), font]
    for n, text in enumerate(pages):
        shown = b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % text.encode("cp1252") if text else b""
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * n),
            drawn[n] if n < len(drawn) else stream(shown),
        ]
    return assembled(*objects, *more)


def table(letters: dict[str, str], *, wide: bool) -> bytes:
    """A ToUnicode table: each character stands for a text."""
    rows = (
        b"<%0*X> <%s>\n" % (4 if wide else 2, ord(a), text.encode("utf-16-be").hex().encode())
        for a, text in letters.items()
    )
    return stream(b"%d beginbfchar\n%sendbfchar" % (len(letters), b"".join(rows)))


def composite(encoding: bytes) -> bytes:
    """A font of two bytes per character."""
    return (
        b"<< /Type /Font /Subtype /Type0 /BaseFont /ABCDEF+Arial /Encoding %s /DescendantFonts "
        b"[<< /Type /Font /Subtype /CIDFontType2 /BaseFont /ABCDEF+Arial /DW 500 /CIDSystemInfo "
        b"<< /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> >>] >>" % encoding
    )


def hexadecimal(text: str, *, shift: int = 0) -> bytes:
    """A page's content: `text` in two bytes per character, whose numbers are shifted."""
    codes = b"".join(b"%04X" % (ord(c) - shift) for c in text)
    return stream(b"BT /F1 12 Tf 72 720 Td <%s> Tj ET" % codes)


def encrypted(user: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(document("a secret")))
    writer.encrypt(user, "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def pages_of(data: bytes) -> list[str]:
    """What our child makes of a file, in this process; its reason is an error here."""
    written: list[str] = []
    why = child(data, written.append)
    assert not why, why
    return "".join(written).split("\f")[:-1]


# -- what is read ---------------------------------------------------------------------------
def test_the_text_of_every_page_and_what_was_missed(tmp_path: Path) -> None:
    """A whole PDF gives no warning and needs no file. A password for the owner alone does not
    matter."""
    path = tmp_path / "report.pdf"
    path.write_bytes(document("Hello café", "", "Third page"))
    found = read_file(str(path))
    assert (found.text, found.name) == ("Hello café\n\nThird page", "report.pdf")
    assert found.facts == "3 pages, 22 characters"
    missed = "page 2 gave no text (a scan? ocrmypdf recognises it)"
    assert found.note == f"{path}: 3 pages, 22 characters; {missed}"
    found = read_bytes(document("One page"), "standard input")
    assert (found.text, found.name, found.note) == ("One page", None, "")
    assert found.facts == "1 page, 8 characters"
    assert pages_of(encrypted("")) == ["a secret"]


def test_a_page_that_cannot_be_read_is_not_an_empty_one() -> None:
    broken = stream(b"this is not deflated", b"/Filter /FlateDecode")
    bomb = stream(zlib.compress(b"\0" * 100_000_000, 1), b"/Filter /FlateDecode")
    assert pages_of(document("", "", "fine", "", drawn=[bomb])) == ["\0", "", "fine", ""]
    assert pages_of(document("x", "fine", drawn=[broken]))[1] == "fine"


def test_pages_are_listed_as_long_as_they_are_few() -> None:
    made = parsers._judge("a\f\f\0\fb\f\f\f", "x.pdf")
    assert made.facts.startswith("6 pages, ")
    assert made.gaps == (
        "pages 2, 5 and 6 gave no text (a scan? ocrmypdf recognises it); "
        "page 3 could not be read (damaged?)"
    )
    many = parsers._judge("a\f" + "\f" * 9, "x.pdf").gaps
    assert many.startswith("9 pages (2, 3, 4, 5, ...) gave")


def test_pages_whose_words_run_together_are_named() -> None:
    good = "Donaudampfschifffahrtsgesellschaft and floccinaucinihilipilification, " + "more " * 40
    gaps = parsers._judge(f"{good}\f{good.replace(' ', '')}\f{'好的' * 99}\f", "x.pdf").gaps
    assert gaps.startswith("words run together on page 2; try pdftotext")


def test_marks_of_our_own_in_a_text_are_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\fb\0c\ud83d\ude00\udc00"
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda self, **more: text)
    assert pages_of(document("x")) == ["a\ufffdb\ufffdc\ud83d\ude00\udc00"]
    assert child_process.utf8("\ud83d\ude00 \udc00") == "😀 \ufffd".encode()


IDENTITY = composite(b"/Identity-H")
SHIFTED = hexadecimal("The end.", shift=29)
SHAPES = (
    b"<< /Type /Font /Subtype /Type3 /FontBBox [0 0 9 9] /FontMatrix [1 0 0 1 0 0] /CharProcs << >>"
    b"/FirstChar 97 /LastChar 99 /Widths [9 9 9] /Encoding << /Differences [97 %s] >> >>"
)
ODD = "that cannot be identified"


@pytest.mark.parametrize(
    ("page", "font", "letters", "text", "counted"),
    [
        # The table gives no character for "#", or one that no text has.
        ("of#ce", HELVETICA, {"#": "\0"}, "of\ufffdce", f"1 character {ODD}"),
        ("of#ce #", HELVETICA, {"#": "\ue000"}, "of\ue000ce \ue000", f"2 characters {ODD}"),
        ("of#ce", HELVETICA, {"#": "\uf0b7"}, "of\uf0b7ce", f"1 character {ODD}"),
        *(
            ("of#ce", HELVETICA, {"#": sign}, f"of{sign}ce", f"1 character {ODD}")
            for sign in "\ufdd0\U0001fffe\u0378\ufff0"
        ),
        ("of#ce con#rm", HELVETICA, {"#": ""}, "of\ufffdce con\ufffdrm", f"2 characters {ODD}"),
        ("Of#ce", HELVETICA, {"#": "\xad"}, "Of\xadce", ""),
        ("A# one", HELVETICA, {"#": "\u200b"}, "A\u200b one", ""),
        ("abc", SHAPES % b"/.notdef /.notdef /.notdef", None, "\u25a1" * 3, f"3 characters {ODD}"),
        ("# Yes #No", HELVETICA, {"#": "\u25a1"}, "\u25a1 Yes \u25a1No", ""),
        ("A# b c d e f g h i j", HELVETICA, {"#": "\u25a1"}, "A\u25a1 b", ""),
        # A bullet of the font Symbol, as word processors write it.
        ("# one", HELVETICA, {"#": "\uf0b7"}, "\uf0b7 one", ""),
        ("of#ce", HELVETICA, {"#": "ffi"}, "offfice", ""),
        # Numbers or names of shapes stand for letters.
        (SHIFTED, IDENTITY, None, "7KH\x03HQG\x11", f"8 characters {ODD}"),
        (SHIFTED, IDENTITY, {}, "7KH\x03HQG\x11", f"8 characters {ODD}"),
        (SHIFTED, composite(b"/Identity-V"), None, "7KH\x03HQG\x11", f"8 characters {ODD}"),
        (SHIFTED, composite(b"<< >>"), None, "\ufffd7\ufffdK", f"16 characters {ODD}"),
        ("abc", SHAPES % b"/g1 /g12 /g3", None, "/g1/g12/g3", f"3 characters {ODD}"),
        ("abc", SHAPES % b"/g1 /g12 /A", None, "/g1/g12A", ""),
        # These say which letters they have.
        (SHIFTED, IDENTITY, dict(zip("7KH\3QG\x11", "The nd.", strict=True)), "The", ""),
        (hexadecimal("The end."), composite(b"/UniJIS-UTF16-H"), None, "The end.", ""),
        ("abc", SHAPES % b"/X /Y /Z", None, "XYZ", ""),
    ],
)
def test_characters_that_mean_nothing_are_counted_in_one_note_a_page(
    page: str | bytes, font: bytes, letters: dict[str, str] | None, text: str, counted: str
) -> None:
    if letters is not None:
        font = font.removesuffix(b">>") + b"/ToUnicode 8 0 R >>"
    drawn, shown = ([page], "") if isinstance(page, bytes) else ([], page)
    more = [] if letters is None else [table(letters, wide=bool(drawn))]
    pages = pages_of(document(shown, "", drawn=drawn, font=font, more=more))
    found = parsers._judge("".join(f"{page}\f" for page in pages), "x.pdf")
    assert found.text.startswith(text)
    assert "page 2 gave no text" in found.gaps
    assert found.gaps.count("page 1") == bool(counted)
    assert counted in found.gaps
    assert ("pdftotext" in found.gaps and "ocrmypdf" in found.gaps) == bool(counted)


def test_a_letter_that_a_form_maps_to_nothing_is_not_left_out() -> None:
    """A form has fonts of its own; this one draws itself, too."""
    font = HELVETICA.removesuffix(b">>") + b"/ToUnicode 6 0 R >>"
    own = b"/Resources << /Font << /F1 7 0 R >> /XObject << /X1 5 0 R >> >>"
    form = stream(
        b"BT /F1 12 Tf 72 720 Td (of#ce) Tj ET",
        b"/Type /XObject /Subtype /Form /BBox [0 0 612 792] " + own,
    )
    page = (
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /XObject << /X1 5 0 R >> >> >>"
    )
    tree = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
    letters = table({"#": ""}, wide=False)
    (text,) = pages_of(assembled(CATALOG, tree, page, stream(b"q /X1 Do Q"), form, letters, font))
    assert text.strip() == "of\ufffdce"


@pytest.mark.parametrize(
    ("data", "yes"),
    [
        *((data, True) for data in (b"%PDF-1.7", b"\n%PDF-1.7", b"\xef\xbb\xbf%PDF-")),
        *((data, False) for data in (b"a %PDF- file", b"%%EOF", b"", b"x" + document("a"))),
    ],
)
def test_what_a_pdf_is(data: bytes, yes: bool) -> None:
    assert is_pdf(data) is yes


# -- what is refused ------------------------------------------------------------------------
TREE = [  # 2^25 pages
    b"<< /Type /Pages /Kids [%d 0 R %d 0 R] /Count %d >>" % (n + 3, n + 3, 2 ** (25 - n))
    for n in range(25)
]
NONE = b"<< /Type /Pages /Kids [] /Count 999999999 >>"
CIRCLE = b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"
DEEP = b"<<" + b"/A <<" * 5000 + b">>" * 5000 + b"/Type /Pages /Kids [] >>"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "only the mark": (b"%PDF-1.7 ...", "cannot be read"),
    "cut short": (document("some text here")[:-200], "cannot be read"),
    "no pages": (document(), "has no pages"),
    "a count of pages that are not there": (assembled(CATALOG, NONE), "has no pages"),
    "pages in a circle": (assembled(CATALOG, CIRCLE), "cannot be read"),
    "very many pages": (assembled(CATALOG, *TREE, b"<< /Type /Page >>"), "cannot be read"),
    "scans": (document("", ""), "has 2 pages without text"),
    "a scan of one page": (document(""), "has 1 page without text"),
    "nested deeply": (assembled(CATALOG, DEEP), ""),
}


@pytest.mark.parametrize(("data", "words"), HOSTILE.values(), ids=HOSTILE)
def test_odd_and_hostile_files_end_in_one_line(data: bytes, words: str) -> None:
    written: list[str] = []

    def read() -> None:
        # As `serve` and `read_pdf` put it together, without a process for each.
        why = child_process.attempt(child, data, written.append)
        if why:
            what, _, hint = why.partition(": ")
            assert hint
            raise UsageError(f"x.pdf {what}", hint)
        parsers._judge("".join(written), "x.pdf")

    refused(words, read)


def test_the_child_says_why_and_the_chat_tells_it() -> None:
    error = refused("^my.pdf is encrypted\n", read_pdf, encrypted("key"), "my.pdf", limit=LIMIT)
    assert (error.hint, error.exit_code) == ("save a copy without a password first", 2)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            r"printf 'first\nMemoryError \033[31mat\n' >&2; exit 1",
            "cannot be read: MemoryError [31mat",
        ),
        ("kill -XCPU $$", "took more than 120 s"),
        ("kill -SEGV $$", "cannot be read"),
    ],
)
def test_a_reader_that_dies_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    refused(f"^x.pdf {re.escape(message)}\n", read_pdf, document("x"), "x.pdf", limit=LIMIT)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("time", "x.pdf took more than"),
        ("text", "x.pdf gave more than"),
        # The second where the parser's own modules already fill that memory.
        ("memory", "needs more than|MemoryError"),
    ],
)
def test_what_a_reader_may_take_is_bounded(
    what: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = document("word " * 100)
    if what == "memory":
        large = zlib.compress(b"% comment\n" * 7_000_000, 1)
        data = document("", drawn=[stream(large, b"/Filter /FlateDecode")])
        monkeypatch.setattr(child_process, "MEMORY", 96 << 20)
    limit, timeout = 100 if what == "text" else LIMIT, 0.0 if what == "time" else 60.0
    refused(said, read_pdf, data, "x.pdf", limit=limit, timeout=timeout)


def test_ctrl_c_stops_the_reading() -> None:
    with pytest.raises(Interrupted, match=r"stopped reading x\.pdf"):
        read_pdf(document("x"), "x.pdf", limit=LIMIT, stopped=lambda: True)


# -- the child --------------------------------------------------------------------------------
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    hangs = ["/bin/sh", "-c", f"(sleep 1; touch {mark}) & wait"]
    refused("took more than 0 s", run, hangs, limit=LIMIT, timeout=0.3)
    time.sleep(1.2)
    assert not mark.exists()


def test_a_command_that_leaves_a_child_behind_is_not_waited_for() -> None:
    began = time.monotonic()
    output = run(["/bin/sh", "-c", "echo done; sleep 30 &"], limit=LIMIT, timeout=25)
    assert (output.code, output.data) == (0, b"done\n")
    assert time.monotonic() - began < 20


def test_large_input_and_output_do_not_block_each_other() -> None:
    data = os.urandom(1 << 20)
    assert run(["/bin/cat"], data, limit=len(data), timeout=60) == child_process.Output(0, data, "")
    refused("gave more than", run, ["/bin/cat"], data, limit=len(data) - 1, timeout=60)
    # A command that takes nothing of it is no error.
    assert run(["/bin/echo", "hi"], data, limit=9, timeout=60).data == b"hi\n"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files in memory on this system")
def test_no_document_is_written_to_a_disk() -> None:
    names = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)))"
    said = run([sys.executable, "-c", names], b"secret", limit=999, timeout=60).data.decode()
    assert said.count("/memfd:") == 3

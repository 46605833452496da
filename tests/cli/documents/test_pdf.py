"""PDFs, good, odd and hostile: the text of every page or one line that says why not."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pypdf
import pytest

from minikv.cli.documents import child as child_process
from minikv.cli.documents import parsers
from minikv.cli.documents.child import extract
from minikv.cli.documents.parsers import is_pdf, read_pdf
from minikv.cli.documents.parsers import pdf as child
from minikv.cli.documents.text import read_bytes, read_file
from minikv.errors import UsageError

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


def refused(act: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        act()
    assert "\n" not in str(caught.value) + caught.value.hint
    assert "\x1b" not in str(caught.value)
    return caught.value


def pages_of(data: bytes) -> list[str]:
    """What our child makes of a file, in this process; its reason is an error here."""
    written: list[str] = []
    why = child(data, written.append)
    assert not why, why
    return "".join(written).split("\f")[:-1]


# -- what is read ---------------------------------------------------------------------------


def test_the_text_of_every_page_and_what_was_missed(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(document("Hello café", "", "Third page"))
    found = read_file(str(path))
    assert found.text == "Hello café\n\nThird page"
    assert found.name == "report.pdf"
    assert found.facts == "3 pages, 22 characters"
    assert (
        found.note
        == f"{path}: 3 pages, 22 characters; page 2 gave no text (a scan? ocrmypdf recognises it)"
    )


def test_a_whole_pdf_gives_no_warning_and_needs_no_file() -> None:
    found = read_bytes(document("One page"), "standard input")
    assert (found.text, found.name, found.note) == ("One page", None, "")
    assert found.facts == "1 page, 8 characters"


def test_a_password_for_the_owner_alone_does_not_matter() -> None:
    assert pages_of(encrypted("")) == ["a secret"]


def test_a_page_that_cannot_be_read_is_not_an_empty_one() -> None:
    broken = stream(b"this is not deflated", b"/Filter /FlateDecode")
    bomb = stream(zlib.compress(b"\0" * 100_000_000, 1), b"/Filter /FlateDecode")
    pages = pages_of(document("", "", "fine", "", drawn=[bomb]))
    assert pages == ["\0", "", "fine", ""]
    assert pages_of(document("x", "fine", drawn=[broken]))[1] == "fine"


def test_pages_are_listed_as_long_as_they_are_few() -> None:
    text = "a\f\f\0\fb\f\f\f"
    made = parsers._judge(text, "x.pdf")
    assert made.facts.startswith("6 pages, ")
    assert made.gaps == (
        "pages 2, 5 and 6 gave no text (a scan? ocrmypdf recognises it); "
        "page 3 could not be read (damaged?)"
    )
    assert parsers._judge("a\f" + "\f" * 9, "x.pdf").gaps.startswith(
        "9 pages (2, 3, 4, 5, ...) gave"
    )


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
        (
            SHIFTED,
            IDENTITY,
            {"7": "T", "K": "h", "H": "e", "\3": " ", "Q": "n", "G": "d", "\x11": "."},
            "The",
            "",
        ),
        (hexadecimal("The end."), composite(b"/UniJIS-UTF16-H"), None, "The end.", ""),
        ("abc", SHAPES % b"/X /Y /Z", None, "XYZ", ""),
    ],
)
def test_characters_that_mean_nothing_are_counted_in_one_note_a_page(
    page: str | bytes, font: bytes, letters: dict[str, str] | None, text: str, counted: str
) -> None:
    if letters is not None:
        font = font.removesuffix(b">>") + b"/ToUnicode 8 0 R >>"
    wide = isinstance(page, bytes)
    data = document(
        "" if isinstance(page, bytes) else page,
        "",
        drawn=[page] if isinstance(page, bytes) else [],
        font=font,
        more=[table(letters, wide=wide)] if letters is not None else [],
    )
    found = parsers._judge("".join(f"{page}\f" for page in pages_of(data)), "x.pdf")
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


IS_PDF = {
    **dict.fromkeys([b"%PDF-1.7", b"\n%PDF-1.7", b"\xef\xbb\xbf%PDF-"], True),
    **dict.fromkeys([b"a %PDF- file", b"%%EOF", b"", b"x" + document("a")], False),
}


@pytest.mark.parametrize(("data", "yes"), IS_PDF.items())
def test_what_a_pdf_is(data: bytes, yes: bool) -> None:
    assert is_pdf(data) is yes


# -- what is refused ------------------------------------------------------------------------

TREE = [  # 2^25 pages
    b"<< /Type /Pages /Kids [%d 0 R %d 0 R] /Count %d >>" % (n + 3, n + 3, 2 ** (25 - n))
    for n in range(25)
]
HOSTILE: list[tuple[str, bytes, str]] = [
    ("only the mark", b"%PDF-1.7 ...", "cannot be read"),
    ("cut short", document("some text here")[:-200], "cannot be read"),
    ("no pages", document(), "has no pages"),
    (
        "a count of pages that are not there",
        assembled(CATALOG, b"<< /Type /Pages /Kids [] /Count 999999999 >>"),
        "has no pages",
    ),
    (
        "pages in a circle",
        assembled(CATALOG, b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"),
        "cannot be read",
    ),
    (
        "a tree of very many pages",
        assembled(CATALOG, *TREE, b"<< /Type /Page >>"),
        "cannot be read",
    ),
    ("scans", document("", ""), "has 2 pages without text"),
    ("a scan of one page", document(""), "has 1 page without text"),
    (
        "nested deeply",
        assembled(CATALOG, b"<<" + b"/A <<" * 5000 + b">>" * 5000 + b"/Type /Pages /Kids [] >>"),
        "",
    ),
]


@pytest.mark.parametrize(("data", "words"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
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

    assert words in str(refused(read))


def test_the_child_says_why_and_the_chat_tells_it() -> None:
    error = refused(lambda: read_pdf(encrypted("key"), "my.pdf", limit=LIMIT))
    assert str(error) == "my.pdf is encrypted"
    assert error.hint == "save a copy without a password first"
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            r"printf 'first\nMemoryError \033[31mat\n' >&2; exit 1",
            "x.pdf cannot be read: MemoryError [31mat",
        ),
        ("kill -XCPU $$", "x.pdf took more than 120 s"),
        ("kill -SEGV $$", "x.pdf cannot be read"),
    ],
)
def test_a_reader_that_dies_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, "python", script)))
    assert str(refused(lambda: read_pdf(document("x"), "x.pdf", limit=LIMIT))) == message


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
    limit, timeout, data = LIMIT, 60.0, document("word " * 100)
    if what == "memory":
        large = zlib.compress(b"% comment\n" * 7_000_000, 1)
        data = document("", drawn=[stream(large, b"/Filter /FlateDecode")])
        monkeypatch.setattr(child_process, "MEMORY", 96 << 20)
    elif what == "text":
        limit = 100
    else:
        timeout = 0.0
    error = refused(lambda: read_pdf(data, "x.pdf", limit=limit, timeout=timeout))
    assert re.search(said, str(error))


# -- the child --------------------------------------------------------------------------------


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def said_by(script: str, folder: Path, patch: pytest.MonkeyPatch, data: bytes, **how: Any) -> str:
    """The text of a document from a script in the place of the parser."""
    patch.setattr(sys, "executable", str(program(folder, "python", script)))
    return extract("pdf", data, "x.pdf", **{"limit": LIMIT} | how)


def test_a_child_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "alive"
    with pytest.raises(UsageError, match="took more than 0 s"):
        said_by(f"(sleep 1; touch {mark}) & wait", tmp_path, monkeypatch, b"", timeout=0.3)
    time.sleep(1.2)
    assert not mark.exists()


def test_large_input_and_output_do_not_block_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"12345678" * (1 << 17)
    assert said_by("cat", tmp_path, monkeypatch, data, limit=len(data)) == data.decode()
    with pytest.raises(UsageError, match="gave more than"):
        said_by("cat", tmp_path, monkeypatch, data, limit=len(data) - 1)
    # A child that takes nothing of it is no error.
    assert said_by("echo hi", tmp_path, monkeypatch, data) == "hi\n"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files in memory on this system")
def test_no_document_is_written_to_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "exec readlink /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2"
    said = said_by(names, tmp_path, monkeypatch, b"secret")
    assert said.count("/memfd:") == 3

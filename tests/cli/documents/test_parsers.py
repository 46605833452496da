"""PDFs, Word files and HTML, good, odd and hostile: their text, or one line that says why not."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pypdf
import pytest
from processes import scripted
from refusals import refused

from minikv.cli.documents import child, parsers
from minikv.cli.documents.child import extract
from minikv.cli.documents.named import read
from minikv.cli.documents.parsers import is_pdf, markup, pdf, read_pdf
from minikv.cli.documents.text import read_bytes, read_file
from minikv.cli.screen.terminal import Terminal
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


def text_of(parse: Callable[..., str], data: bytes) -> str:
    """What our child makes of a file, in this process. Its reason is an error here, as `serve` and
    `read_pdf` put it together."""
    written: list[str] = []
    if why := child.attempt(parse, data, written.append):
        what, _, hint = why.partition(": ")
        assert hint
        raise UsageError(f"x.pdf {what}", hint)
    return "".join(written)


def pages_of(data: bytes) -> list[str]:
    return text_of(pdf, data).split("\f")[:-1]


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


def test_a_page_that_cannot_be_read_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = stream(b"this is not deflated", b"/Filter /FlateDecode")
    bomb = stream(zlib.compress(b"\0" * 100_000_000, 1), b"/Filter /FlateDecode")
    assert pages_of(document("", "", "fine", "", drawn=[bomb])) == ["\0", "", "fine", ""]
    assert pages_of(document("x", "fine", drawn=[broken]))[1] == "fine"
    # Marks of our own in a text are only text.
    text = "a\fb\0c\ud83d\ude00\udc00"
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda self, **more: text)
    assert pages_of(document("x")) == ["a\ufffdb\ufffdc\ud83d\ude00\udc00"]
    assert child.utf8("\ud83d\ude00 \udc00") == "😀 \ufffd".encode()


def test_pages_are_listed_as_long_as_they_are_few() -> None:
    made = parsers._judge("a\f\f\0\fb\f\f\f", "x.pdf")
    assert made.facts.startswith("6 pages, ")
    assert made.gaps == (
        "pages 2, 5 and 6 gave no text (a scan? ocrmypdf recognises it); "
        "page 3 could not be read (damaged?)"
    )
    many = parsers._judge("a\f" + "\f" * 9, "x.pdf").gaps
    assert many.startswith("9 pages (2, 3, 4, 5, ...) gave")
    # Pages whose words run together are named.
    good = "Donaudampfschifffahrtsgesellschaft and floccinaucinihilipilification, " + "more " * 40
    gaps = parsers._judge(f"{good}\f{good.replace(' ', '')}\f{'好的' * 99}\f", "x.pdf").gaps
    assert gaps.startswith("words run together on page 2; try pdftotext")


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
    refused(words, lambda: parsers._judge(text_of(pdf, data), "x.pdf"))


def test_the_child_says_why_and_the_chat_tells_it() -> None:
    error = refused("^my.pdf is encrypted\n", read_pdf, encrypted("key"), "my.pdf", limit=LIMIT)
    assert (error.hint, error.exit_code) == ("save a copy without a password first", 2)


BROKE = r"printf 'first\nMemoryError \033[31mat\n' >&2; exit 1"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (BROKE, "cannot be read: MemoryError [31mat"),
        ("kill -XCPU $$", "took more than 120 s"),
        ("kill -SEGV $$", "cannot be read"),
    ],
)
def test_a_reader_that_dies_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    scripted(script, tmp_path, monkeypatch)
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
def test_what_a_reader_may_take(what: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = document("word " * 100)
    if what == "memory":
        large = zlib.compress(b"% comment\n" * 7_000_000, 1)
        data = document("", drawn=[stream(large, b"/Filter /FlateDecode")])
        monkeypatch.setattr(child, "MEMORY", 96 << 20)
    limit, timeout = 100 if what == "text" else LIMIT, 0.0 if what == "time" else 60.0
    refused(said, read_pdf, data, "x.pdf", limit=limit, timeout=timeout)


# -- the child --------------------------------------------------------------------------------
def said_by(script: str, folder: Path, patch: pytest.MonkeyPatch, data: bytes, **how: Any) -> str:
    """The text of a document from a script in the place of the parser."""
    scripted(script, folder, patch)
    return extract("pdf", data, "x.pdf", **{"limit": LIMIT} | how)


def test_a_child_is_killed_with_its_children_and_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "alive"
    hangs = f"(sleep 1; touch {mark}) & wait", tmp_path, monkeypatch, b""
    refused("took more than 0 s", said_by, *hangs, timeout=0.3)
    time.sleep(1.2)
    assert not mark.exists()
    # One that leaves a child behind is not waited for.
    began = time.monotonic()
    assert said_by("echo done; sleep 30 &", tmp_path, monkeypatch, b"", timeout=25) == "done\n"
    assert time.monotonic() - began < 20
    # Large input and output do not block each other.
    data = b"12345678" * (1 << 17)
    given = tmp_path, monkeypatch, data
    assert said_by("cat", *given, limit=len(data)) == data.decode()
    refused("gave more than", said_by, "cat", *given, limit=len(data) - 1)
    # A child that takes nothing of it is no error.
    assert said_by("echo hi", *given) == "hi\n"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files in memory on this system")
def test_no_document_is_written_to_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "exec readlink /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2"
    said = said_by(names, tmp_path, monkeypatch, b"secret")
    assert said.count("/memfd:") == 3


# -- Word files and HTML ----------------------------------------------------------------------
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def cells(*texts: str) -> str:
    return "<w:tr>" + "".join(f"<w:tc>{paragraph(x)}</w:tc>" for x in texts) + "</w:tr>"


def docx(body: str, before: str = "") -> bytes:
    """The smallest Word file around `body`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as parts:
        text = f'{before}<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
        parts.writestr("word/document.xml", text)
    return out.getvalue()


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<title>T</title><h1>Head</h1><p>one\n  two</p>end", "T\n\nHead\n\none two\n\nend"),
        ("a <b>b</b> <a href='https://x.org'>the link</a>.<br>next", "a b the link.\nnext"),
        ("x<script>a<b;'<p>'</script><style>p {}</style><noscript>on</noscript>y", "xy"),
        ("<svg><text>in a picture</text></svg>&eacute;&#128512;&lt;", "é😀<"),
        ("<ul><li>a<li><p>b</p><ol><li>c<li>d</ol></ul>e", "- a\n- b\n  1. c\n  2. d\n\ne"),
        ("<table><tr><th>k<th>v<tr><td><p>a</p><td></table>z", "k | v\na |\n\nz"),
        ("<tr><td><p>a</p><p>b</p></td><td><p>c</p></td></tr>", "a\n\nb | c"),
        ("p<pre>  x\n   y</pre>q", "p\n\n  x\n   y\n\nq"),
        ("</ul></li></script>a</td></pre>", "a"),
        ("<div>" * 10_000 + "deep", "deep"),
        ("<ul>" * 99 + "<li>deep", "- deep"),
        ("<ol start=5><li>a<li>b<li value=9>c<li>d</ol>", "5. a\n6. b\n9. c\n10. d"),
        ("1<sup>2</sup> H<sub>2</sub>O a<sup>[1]</sup>", "1^2 H_2O a[1]"),
    ],
)
def test_the_text_of_a_page(html: str, text: str) -> None:
    assert text_of(markup, html.encode()).strip() == text


def test_the_text_of_a_word_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = f"<w:tbl>{cells('k', 'v')}{cells('a', 'b &amp; c')}</w:tbl>"
    gone = "<w:p><w:del><w:r><w:delText>deleted</w:delText></w:r></w:del></w:p>"
    found = read_bytes(docx(paragraph("One") + table + gone + paragraph("Two")), "r.docx")
    assert found.text == "One\n\nk | v\na | b & c\n\nTwo"
    assert found.facts == f"{len(found.text)} characters from a Word file"
    with monkeypatch.context() as patch:  # without the extra, the line says what to install
        patch.setitem(sys.modules, "mammoth", None)
        assert "pip install 'minikv[docx]'" in child.attempt(markup, docx("x"), print)
    # A directory has its pages and Word files.
    (tmp_path / "a.docx").write_bytes(docx(paragraph("one")))
    (tmp_path / "b.html").write_text("<p>two")
    assert [text.text for text in read([str(tmp_path)], Terminal())[0]] == ["one", "two"]


@pytest.mark.parametrize(
    ("data", "name", "text"),
    [
        (b"\xef\xbb\xbf\n<!DOCTYPE HTML><p>a", "standard input", "a"),
        (b"<p>a", "x.HTM", "a"),
        (b"<html><meta charset='iso-8859-1'>caf\xe9", "x", "café"),
        ("<html>é".encode("utf-16"), "x.html", "é"),
        (b"<p>a text about <html>", "x.txt", "<p>a text about <html>"),
    ],
)
def test_what_is_read_as_a_page(data: bytes, name: str, text: str) -> None:
    found = read_bytes(data, name)
    assert (found.text, "from HTML" in found.facts) == (text, "<p>" not in text)


def bomb() -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as parts,
        parts.open("word/document.xml", "w") as part,
    ):
        for _ in range(300):
            part.write(bytes(1 << 20))
    return out.getvalue()


NESTED = "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in pairwise("abcdefghi"))
MANY = f'<!DOCTYPE x [<!ENTITY a "{"a" * 99}">{NESTED}]>'
OURS = '<!DOCTYPE x [<!ENTITY a SYSTEM "/etc/passwd">]>'
INSERTED = "<w:ins>" * 5000 + "</w:ins>" * 5000
DAMAGED, NOTHING = "is the file damaged?", "nothing was added"
REFUSED = {
    "cut short": (lambda: docx("x")[:-60], "cannot be read (BadZipFile)", DAMAGED),
    "no zip": (lambda: b"hello", "is not a Word file", "is it damaged, or of another kind?"),
    "old": (lambda: b"\xd0\xcf\x11\xe0" + bytes(99), "is an Office file of the old", "save it as"),
    "no XML": (lambda: docx("<w:p>"), "cannot be read (ExpatError)", DAMAGED),
    "zip bomb": (bomb, "unpacks to 300 MiB", "extract its text with another program"),
    "entities": (lambda: docx(paragraph("&i;"), MANY), "cannot be read (ExpatError)", DAMAGED),
    "a file of this machine": (lambda: docx(paragraph("&a;"), OURS), "has no text", NOTHING),
    "deep": (lambda: docx("<w:tbl><w:tr><w:tc>" * 3000), "cannot be read", DAMAGED),
    "nested": (lambda: docx(INSERTED), "cannot be read (RecursionError)", DAMAGED),
    "empty": (lambda: docx(""), "has no text", NOTHING),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_word_file_is_one_line(case: str) -> None:
    make, said, hint = REFUSED[case]
    error = refused(f"^r.docx {re.escape(said)}", read_bytes, make(), "r.docx")
    assert (error.hint.startswith(hint), error.exit_code) == (True, 2)

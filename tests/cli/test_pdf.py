"""PDFs, good, odd and hostile: the text of every page or one line that says why not; loaders."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pypdf
import pytest

from minikv.cli import documents, loaders, pdf
from minikv.cli.documents import read_bytes, read_file
from minikv.cli.loaders import TooMuch, TooSlow, command_for, run
from minikv.cli.pdf import child, is_pdf, read_pdf
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


def document(*pages: str, drawn: Sequence[bytes] = ()) -> bytes:
    """One line of text per page; `drawn` replaces the first pages' whole content objects."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * n) for n in range(len(pages)))
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    objects = [CATALOG, b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(pages)), font]
    for n, text in enumerate(pages):
        shown = b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % text.encode("cp1252") if text else b""
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * n),
            drawn[n] if n < len(drawn) else stream(shown),
        ]
    return assembled(*objects)


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
    assert found.note == f"{path}: 3 pages, 22 characters; page 2 gave no text (a scan?)"


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
    made = pdf._judge(text, "x.pdf")
    assert made.pages == 6
    assert made.gaps == (
        "pages 2, 5 and 6 gave no text (a scan?); page 3 could not be read (damaged?)"
    )
    assert pdf._judge("a\f" + "\f" * 9, "x.pdf").gaps.startswith("9 pages (2, 3, 4, 5, ...) gave")


def test_marks_of_our_own_in_a_text_are_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda self: "a\fb\0c\ud83d\ude00\udc00")
    assert pages_of(document("x")) == ["a\nbc\ud83d\ude00\udc00"]
    assert pdf._utf8("\ud83d\ude00 \udc00") == "😀 \ufffd".encode()


@pytest.mark.parametrize(
    ("data", "yes"),
    [
        (b"%PDF-1.7", True),
        (b"\n%PDF-1.7", True),
        (b"\xef\xbb\xbf%PDF-", True),
        (b"a %PDF- file", False),
        (b"", False),
    ],
)
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
    ("scans", document("", ""), "has 2 pages and no text in them"),
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
        # As `_main` and `read_pdf` put it together, without a process for each.
        why = child(data, written.append)
        if why:
            what, _, hint = why.partition(": ")
            assert hint
            raise UsageError(f"x.pdf {what}", hint)
        pdf._judge("".join(written), "x.pdf")

    assert words in str(refused(read))


def test_the_child_says_why_and_the_chat_tells_it() -> None:
    error = refused(lambda: read_pdf(encrypted("key"), "my.pdf", limit=LIMIT))
    assert str(error) == "my.pdf is encrypted"
    assert error.hint == "save a copy without a password first"
    assert error.exit_code == 2


def test_time_is_bounded() -> None:
    began = time.monotonic()
    error = refused(lambda: read_pdf(document("x"), "slow.pdf", limit=LIMIT, timeout=0.0))
    assert "slow.pdf took more than" in str(error)
    assert time.monotonic() - began < 60


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    large = stream(zlib.compress(b"% comment\n" * 7_000_000, 1), b"/Filter /FlateDecode")
    data = document("", drawn=[large])
    monkeypatch.setattr(pdf, "MEMORY", 96 << 20)
    error = refused(lambda: read_pdf(data, "large.pdf", limit=LIMIT))
    # The second where the parser's own modules already fill that memory.
    assert "needs more than" in str(error) or "MemoryError" in str(error)


def test_text_is_bounded() -> None:
    error = refused(lambda: read_pdf(document("word " * 100), "long.pdf", limit=100))
    assert "long.pdf holds more than" in str(error)


def test_ctrl_c_stops_the_reading() -> None:
    with pytest.raises(Interrupted, match=r"stopped reading x\.pdf"):
        read_pdf(document("x"), "x.pdf", limit=LIMIT, stopped=lambda: True)


# -- which program --------------------------------------------------------------------------


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def without_pypdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No pypdf; returns a folder that is the whole PATH but for the system's own."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pypdf" else find(name, *a)
    )
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_pdftotext_where_there_is_no_pypdf(without_pypdf: Path) -> None:
    program(
        without_pypdf,
        "pdftotext",
        r"""[ "$*" = "-enc UTF-8 - -" ] && /bin/cat >/dev/null && printf 'one\n\f\ftwo\n\f' """,
    )
    found = read_pdf(document("x") + b"%" * 300_000, "x.pdf", limit=LIMIT)
    assert (found.text, found.pages, found.silent) == ("one\n\ntwo", 3, (2,))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'Command Line Error: Incorrect password' >&2; exit 1", "x.pdf is encrypted"),
        (
            r"printf 'first\nSyntax \033[31mError: no xref\n' >&2; exit 1",
            "x.pdf: pdftotext cannot read this PDF: Syntax [31mError: no xref",
        ),
        ("kill -XCPU $$", "x.pdf took more than 120 s to read"),
        ("kill -SEGV $$", "x.pdf: pdftotext cannot read this PDF"),
    ],
)
def test_what_pdftotext_says(without_pypdf: Path, script: str, message: str) -> None:
    program(without_pypdf, "pdftotext", script)
    assert str(refused(lambda: read_pdf(document("x"), "x.pdf", limit=LIMIT))) == message


def test_without_a_reader_it_says_what_to_install(without_pypdf: Path) -> None:
    error = refused(lambda: read_pdf(document("x"), "x.pdf", limit=LIMIT))
    assert "nothing here reads PDFs" in str(error)
    assert "minikv[pdf]" in error.hint
    assert "pdftotext" in error.hint


# -- loaders --------------------------------------------------------------------------------


def test_the_longest_extension_wins_in_any_case() -> None:
    table = {".gz": "one", "tar.gz": "two", ".DOCX": "three", "": "four", ".": "five"}
    assert command_for("/a.docx/x.TAR.GZ", table) == "two"
    assert command_for("x.gz", table) == "one"
    assert command_for("x.Docx", table) == "three"
    assert command_for("docx", table) is None
    assert command_for("x.txt", table) is None


def test_a_loader_gets_one_argument_and_no_shell(tmp_path: Path) -> None:
    path = tmp_path / "-n $(touch hacked); 'x'.docx"
    path.write_bytes(b"PK\x03\x04 not text at all")
    script = program(tmp_path, "show", 'printf "%s|" "$#" "$@"')
    found = read_file(str(path), loaders={".docx": f"{script} -t 'two words' {{path}}"})
    assert found.text == f"3|-t|two words|{path}|"
    assert found.name == path.name
    assert found.facts == f"{len(found.text)} characters from show"
    assert not (tmp_path / "hacked").exists()


def test_a_relative_name_cannot_pass_for_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-rf.docx").write_text("x")
    assert read_file("-rf.docx", loaders={".docx": "/bin/echo {path}"}).text == (
        f"{tmp_path}/-rf.docx\n"
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program-here {path}", r"needs no-such-program-here, which is not installed"),
        ("cat", "does not say where {path} goes"),
        ("", "does not say where {path} goes"),
        ("cat '{path}", "cannot be read: No closing quotation"),
        (
            "/bin/sh -c 'printf \"one\\n\\033]0;two\\n\" >&2; exit 3' {path}",
            "sh failed with exit status 3: ]0;two",
        ),
        ("/bin/sh -c 'kill -TERM $$' {path}", "sh failed with signal 15"),
        ("/bin/sh -c 'exit 1' {path}", "sh failed with exit status 1"),
        ("/bin/true {path}", "is empty"),
        ("/bin/sh -c 'printf \"ok \\377 no\"' {path}", r"not valid UTF-8: byte 3 (0xff)"),
        ("/bin/sh -c 'head -c 4096 /dev/zero' {path}", "looks binary"),
    ],
)
def test_what_a_loader_does_wrong(tmp_path: Path, command: str, message: str) -> None:
    (tmp_path / "x.docx").write_text("x")
    error = refused(lambda: read_file(str(tmp_path / "x.docx"), loaders={".docx": command}))
    assert message in str(error)
    assert "x.docx" in str(error)


def test_a_loader_reads_no_directory_and_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.docx")
    error = refused(lambda: read_file(str(tmp_path / "x.docx"), loaders={".docx": "cat {path}"}))
    assert "not a regular file" in str(error)


def test_a_loaders_output_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", LIMIT)
    (tmp_path / "x.docx").write_text("x")
    command = "/bin/sh -c 'exec cat /dev/zero' {path}"
    error = refused(lambda: read_file(str(tmp_path / "x.docx"), loaders={".docx": command}))
    assert "sh printed more than 1 MiB" in str(error)


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    inner = f"sleep 2; touch {mark}"
    with pytest.raises(TooSlow):
        run(["/bin/sh", "-c", f"({inner}) & wait"], limit=LIMIT, timeout=0.3)
    time.sleep(2.5)
    assert not mark.exists()


def test_a_command_that_leaves_a_child_behind_is_not_waited_for() -> None:
    began = time.monotonic()
    output = run(["/bin/sh", "-c", "echo done; sleep 30 &"], limit=LIMIT, timeout=25)
    assert (output.code, output.data) == (0, b"done\n")
    assert time.monotonic() - began < 20


def test_large_input_and_output_do_not_block_each_other() -> None:
    data = os.urandom(1 << 20)
    assert run(["/bin/cat"], data, limit=len(data), timeout=60) == loaders.Output(0, data, "")
    with pytest.raises(TooMuch):
        run(["/bin/cat"], data, limit=len(data) - 1, timeout=60)
    # A command that takes nothing of it is no error.
    assert run(["/bin/echo", "hi"], data, limit=9, timeout=60).data == b"hi\n"


def test_the_cpu_and_memory_limits_reach_the_command() -> None:
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_AS)[0], r.getrlimit(r.RLIMIT_CPU)[0])"
    wait = f"import sys; sys.stdin.read(); {code}"
    output = run([sys.executable, "-c", wait], b"go", limit=99, timeout=40, memory=1 << 30)
    assert output.data == b"%d 41\n" % (1 << 30)

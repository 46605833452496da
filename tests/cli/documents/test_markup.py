"""Word files and HTML: their text, or one line that says why not."""

from __future__ import annotations

import io
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest

from minikv.cli.documents import child
from minikv.cli.documents.named import read
from minikv.cli.documents.parsers import markup
from minikv.cli.documents.text import read_bytes
from minikv.cli.screen.terminal import Terminal
from minikv.errors import UsageError

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


def as_text(data: bytes) -> str:
    """What the child makes of it, in this process; its reason is an error here."""
    written: list[str] = []
    if why := child.attempt(markup, data, written.append):
        raise UsageError(why)
    return "".join(written).strip()


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
    assert as_text(html.encode()) == text


def test_the_text_of_a_word_file() -> None:
    table = f"<w:tbl>{cells('k', 'v')}{cells('a', 'b &amp; c')}</w:tbl>"
    gone = "<w:p><w:del><w:r><w:delText>deleted</w:delText></w:r></w:del></w:p>"
    found = read_bytes(docx(paragraph("One") + table + gone + paragraph("Two")), "r.docx")
    assert found.text == "One\n\nk | v\na | b & c\n\nTwo"
    assert found.facts == f"{len(found.text)} characters from a Word file"


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
DAMAGED = "is the file damaged?"
REFUSED = {
    "cut short": (lambda: docx("x")[:-60], "cannot be read (BadZipFile)", DAMAGED),
    "no zip": (lambda: b"hello", "is not a Word file", "is it damaged, or of another kind?"),
    "old": (lambda: b"\xd0\xcf\x11\xe0" + bytes(99), "is an Office file of the old", "save it as"),
    "no XML": (lambda: docx("<w:p>"), "cannot be read (ExpatError)", DAMAGED),
    "zip bomb": (bomb, "unpacks to 300 MiB", "extract its text with another program"),
    "entities": (
        lambda: docx(paragraph("&i;"), f'<!DOCTYPE x [<!ENTITY a "{"a" * 99}">{NESTED}]>'),
        "cannot be read (ExpatError)",
        DAMAGED,
    ),
    "a file of this machine": (
        lambda: docx(paragraph("&a;"), '<!DOCTYPE x [<!ENTITY a SYSTEM "/etc/passwd">]>'),
        "has no text",
        "nothing was added",
    ),
    "deep": (lambda: docx("<w:tbl><w:tr><w:tc>" * 3000), "cannot be read", DAMAGED),
    "nested": (
        lambda: docx("<w:ins>" * 5000 + "</w:ins>" * 5000),
        "cannot be read (RecursionError)",
        DAMAGED,
    ),
    "empty": (lambda: docx(""), "has no text", "nothing was added"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_word_file_is_one_line(case: str) -> None:
    make, said, hint = REFUSED[case]
    with pytest.raises(UsageError) as error:
        read_bytes(make(), "r.docx")
    assert str(error.value).startswith(f"r.docx {said}")
    assert error.value.hint.startswith(hint)
    assert error.value.exit_code == 2


def test_without_the_extra_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mammoth", None)
    assert "pip install 'minikv[docx]'" in child.attempt(markup, docx("x"), print)


def test_a_directory_has_its_pages_and_word_files(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(docx(paragraph("one")))
    (tmp_path / "b.html").write_text("<p>two")
    assert [text.text for text in read([str(tmp_path)], Terminal())[0]] == ["one", "two"]

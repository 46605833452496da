"""Documents: what is read, what is refused, and that each refusal says why."""

from __future__ import annotations

import codecs
import os
import threading
from pathlib import Path

import pytest
from refusals import refused

from minikv.chat.transcript import Document
from minikv.cli.documents import text as documents
from minikv.cli.documents.text import Text, changes, decode, read_file, source_of


def write(folder: Path, data: bytes, name: str = "d.txt") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("plain\r\nlines\n", "utf-8"),
        ("héllo 世界 🎈", "utf-8"),
        ("marked", "utf-8-sig"),
        ("wide é", "utf-16-le"),
        ("wide é", "utf-16-be"),
        ("wider", "utf-32-le"),
        ("a NUL \x00 in a long enough text", "utf-8"),
        ("\x1b[31mred\x1b[0m text", "utf-8"),
        ("x", "utf-8"),
        ("<|eot_id|>[INST][bold]x[/bold]🎈👩‍👩‍👧", "utf-8"),
    ],
)
def test_text_is_read_as_it_is(tmp_path: Path, text: str, encoding: str) -> None:
    mark = "\ufeff" if encoding[-3:] in ("-le", "-be") else ""
    data = f"{mark}{text}".encode(encoding)
    found = read_file(write(tmp_path, data))
    assert (found.text, found.name, found.note) == (text, "d.txt", "")
    assert found.facts == f"{len(text)} characters"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "d.txt is empty"),
        (b" \n\t\n", "d.txt is empty"),
        (codecs.BOM_UTF8, "d.txt is empty"),
        (b"ok then \xff no", r"not valid UTF-8: byte 8 \(0xff\)"),
        (codecs.BOM_UTF8 + b"ok then \xe9.", r"not valid UTF-8: byte 11 \(0xe9\)"),
        (b"cut short \xe2\x82", r"not valid UTF-8: byte 10 \(0xe2\)"),
        (codecs.BOM_UTF16_LE + b"a\x00\x00\xd8b\x00", r"not valid UTF-16: byte 4 \(0x00\)"),
        (bytes(range(256)) * 4, "looks binary"),
        (b"\x00" * 100, "looks binary"),
        (b"\x7fELF\x02\x01", "a program"),
        (b"PK\x03\x04....", "zip archive"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 2\n", "Git LFS pointer"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    assert refused(match, read_file, write(tmp_path, data)).exit_code == 2


def test_missing_directory_device_and_unreadable(tmp_path: Path) -> None:
    refused("no such file", read_file, str(tmp_path / "nothing"))
    refused("is a directory", read_file, str(tmp_path))
    refused("not a regular file", read_file, "/dev/zero")
    refused("cannot read", read_file, "nul\x00byte")
    # A hostile file name is one clean line.
    found = read_file(write(tmp_path, b"text", "a\x1b]0;b\nc\u202ed.txt"))
    assert found.name == "a]0;b cd.txt"
    refused("", read_file, str(tmp_path / "no\x1bsuch\nfile"))


def piped(path: Path, *pieces: bytes) -> threading.Thread:
    """Someone who writes to a named pipe, a moment after it was opened for reading."""

    def write_all() -> None:
        with open(path, "wb", buffering=0) as pipe:
            for piece in pieces:
                pipe.write(piece)

    os.mkfifo(path)
    thread = threading.Thread(target=write_all, daemon=True)
    thread.start()
    return thread


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """That of a shell's command has no name."""
    pipe = tmp_path / "pipe.txt"
    writer = piped(pipe, b"first ", b"x" * 200_000, b" last")
    found = read_file(str(pipe))
    writer.join(60)
    assert (found.text, found.name) == ("first " + "x" * 200_000 + " last", "pipe.txt")
    reading, writing = os.pipe()
    os.write(writing, b"from a command")
    os.close(writing)
    assert read_file(f"/dev/fd/{reading}") == Text("from a command", None, facts="14 characters")
    os.close(reading)


@pytest.mark.parametrize(
    ("data", "binary"),
    [
        (b"plain text", False),
        ("wörter ".encode() * 50, False),
        (("ab" * 40 + "é").encode()[:-1], False),  # a sample that ends within a character
        (codecs.BOM_UTF16_LE + "wide".encode("utf-16-le"), False),
        (b"%PDF-1.7 " + bytes(range(32)) * 40, False),
        (b"caf\xe9, na\xefve and more of it", False),
        (bytes(range(256)) * 4, True),
        (b"\x00" * 100, True),
        (b"\x89PNG\r\n", True),
    ],
)
def test_a_sample_tells_binary_from_text(data: bytes, binary: bool) -> None:
    assert documents.is_binary(data) is binary


def test_the_size_limit_of_files_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("standard input is a PDF, not text", decode, b"%PDF-1.7 ...", "standard input")
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    assert read_file(write(tmp_path, b"0123456789")).text == "0123456789"
    refused(r"d\.txt is larger than", read_file, write(tmp_path, b"0123456789a"))
    refused("standard input is larger than", decode, b"0123456789a", "standard input")
    writer = piped(tmp_path / "pipe", b"0123456789a")  # one without an end is cut there
    refused(r"pipe is larger than", read_file, str(tmp_path / "pipe"))
    writer.join(60)


# -- the files that documents were read from -------------------------------------------------
def test_a_document_knows_the_file_that_it_was_read_from(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two")
    source = read_file(str(path)).source
    assert source is not None
    assert (source.path, source.size) == (str(path), 7)
    document = Document("one two", "a.txt", source)
    assert document == Document("one two", "a.txt")  # it says nothing about the text
    assert changes([document, Document("piped")]) == []
    os.utime(path, (1, 1))
    assert changes([document]) == []  # touched, with the same bytes
    path.write_text("one six")
    changed = "a.txt was changed since it was read; this chat keeps the text as it was"
    assert changes([document]) == [changed]
    path.unlink()
    path.mkdir()
    assert "can no longer be read" in changes([document])[0]
    path.rmdir()
    assert "is no longer there" in changes([document])[0]
    # What is no file has no source.
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nosuch", Path("/dev/null")):
        assert source_of(str(path)) is None
    assert source_of("a\0b") is None
    with open(__file__, "rb") as file:
        assert source_of(f"/dev/fd/{file.fileno()}") is None

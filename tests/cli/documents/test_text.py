"""Documents: what is read, what is refused, and that each refusal says why."""

from __future__ import annotations

import codecs
import os
import threading
from pathlib import Path

import pytest

from minikv.chat.transcript import Document
from minikv.cli.documents import text as documents
from minikv.cli.documents.text import Text, changes, decode, read_file, source_of
from minikv.errors import UsageError


def write(folder: Path, data: bytes, name: str = "d.txt") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain\r\nlines\n", "plain\r\nlines\n"),
        ("héllo 世界 🎈".encode(), "héllo 世界 🎈"),
        (codecs.BOM_UTF8 + b"marked", "marked"),
        (codecs.BOM_UTF16_LE + "wide é".encode("utf-16-le"), "wide é"),
        (codecs.BOM_UTF16_BE + "wide é".encode("utf-16-be"), "wide é"),
        (codecs.BOM_UTF32_LE + "wider".encode("utf-32-le"), "wider"),
        (b"a NUL \x00 in a long enough text", "a NUL \x00 in a long enough text"),
        (b"\x1b[31mred\x1b[0m text", "\x1b[31mred\x1b[0m text"),
        (b"x", "x"),
        (
            "<|eot_id|>[INST][bold]x[/bold]🎈👩‍👩‍👧".encode(),
            "<|eot_id|>[INST][bold]x[/bold]🎈👩‍👩‍👧",
        ),
    ],
)
def test_text_is_read_as_it_is(tmp_path: Path, data: bytes, text: str) -> None:
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
def test_what_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, data: bytes, match: str
) -> None:
    with pytest.raises(UsageError, match=match) as error:
        read_file(write(tmp_path, data))
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_missing_directory_device_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_file(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="is a directory"):
        read_file(str(tmp_path))
    with pytest.raises(UsageError, match="not a regular file"):
        read_file("/dev/zero")
    with pytest.raises(UsageError, match="cannot read"):
        read_file("nul\x00byte")


def piped(path: Path, *pieces: bytes) -> threading.Thread:
    """Someone who writes to a named pipe, a moment after it was opened for reading."""

    def write_all() -> None:
        with open(path, "wb", buffering=0) as pipe:
            for piece in pieces:
                pipe.write(piece)

    thread = threading.Thread(target=write_all, daemon=True)
    thread.start()
    return thread


def test_a_named_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    writer = piped(pipe, b"first ", b"x" * 200_000, b" last")
    found = read_file(str(pipe))
    writer.join(60)
    assert (found.text, found.name) == ("first " + "x" * 200_000 + " last", "pipe.txt")


def test_the_pipe_of_a_shells_command_has_no_name(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"from a command")
    os.close(writing)
    assert read_file(f"/dev/fd/{reading}") == Text("from a command", None, facts="14 characters")
    os.close(reading)


def test_a_pipe_without_an_end_is_cut_at_the_size_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    os.mkfifo(tmp_path / "pipe")
    writer = piped(tmp_path / "pipe", b"0123456789a")
    with pytest.raises(UsageError, match=r"pipe is larger than"):
        read_file(str(tmp_path / "pipe"))
    writer.join(60)


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


def test_the_size_limit_holds_for_files_and_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    assert read_file(write(tmp_path, b"0123456789")).text == "0123456789"
    with pytest.raises(UsageError, match=r"d\.txt is larger than"):
        read_file(write(tmp_path, b"0123456789a"))
    with pytest.raises(UsageError, match="standard input is larger than"):
        decode(b"0123456789a", "standard input")


def test_a_message_that_is_a_pdf_is_refused() -> None:
    with pytest.raises(UsageError, match="standard input is a PDF, not text"):
        decode(b"%PDF-1.7 ...", "standard input")


def test_a_hostile_file_name_is_one_clean_line(tmp_path: Path) -> None:
    found = read_file(write(tmp_path, b"text", "a\x1b]0;b\nc\u202ed.txt"))
    assert found.name == "a]0;b cd.txt"
    with pytest.raises(UsageError) as error:
        read_file(str(tmp_path / "no\x1bsuch\nfile"))
    assert "\x1b" not in str(error.value)


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
    assert changes([document]) == [
        "a.txt was changed since it was read; this chat keeps the text as it was"
    ]
    path.unlink()
    path.mkdir()
    assert "can no longer be read" in changes([document])[0]
    path.rmdir()
    assert "is no longer there" in changes([document])[0]


def test_what_is_no_file_has_no_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nosuch", Path("/dev/null")):
        assert source_of(str(path)) is None
    assert source_of("a\0b") is None
    with open(__file__, "rb") as file:
        assert source_of(f"/dev/fd/{file.fileno()}") is None

"""The files that documents were read from."""

from __future__ import annotations

import os
from pathlib import Path

from minikv.chat.transcript import Document
from minikv.cli.documents.text import changes, read_file, source_of


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
    assert "cannot be read any more" in changes([document])[0]
    path.rmdir()
    assert "is no longer there" in changes([document])[0]


def test_what_is_no_file_has_no_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nosuch", Path("/dev/null")):
        assert source_of(str(path)) is None
    assert source_of("a\0b") is None
    with open(__file__, "rb") as file:
        assert source_of(f"/dev/fd/{file.fileno()}") is None

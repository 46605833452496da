"""Lines from a pipe: where they begin and end, and that each is there before the next one comes."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace

import pytest

from minikv.cli.documents.named import PipedLines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("\ufeffone\n\ufefftwo\n", ["one", "\ufefftwo"]),
        ("one\rtwo\r\n\nthree\r", ["one", "two", "", "three"]),
        ("one\r\rtwo", ["one", "", "two"]),
        ("\n", [""]),
        ("\ufeff", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_where_lines_begin_and_end(
    monkeypatch: pytest.MonkeyPatch, text: str, lines: list[str], encoding: str
) -> None:
    data = io.BufferedReader(
        io.BytesIO(text.encode(encoding).replace(b"\xff\xfe" * 2, b"\xff\xfe"))
    )
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data))
    read = PipedLines()
    assert [read() for _ in lines] == lines
    for _ in range(2):
        with pytest.raises(EOFError):
            read()


def test_a_line_is_there_before_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in UTF-16, where a line's end has two bytes."""
    read, write = os.pipe()
    os.set_blocking(read, False)  # to read on would end the line
    with open(read, "rb") as stream, open(write, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        lines = PipedLines()
        for question in ("\ufeffone", "two"):
            pipe.write(f"{question}\r\n".encode("utf-16-le"))
            assert lines() == question.strip("\ufeff")
            assert stream.peek(1) == b""

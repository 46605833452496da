"""What was named as documents: directories, patterns, links, limits, addresses."""

from __future__ import annotations

import io
import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused
from tables import table
from terminals import Terminals

from minikv.cli.documents import named as sources
from minikv.cli.documents import text as documents
from minikv.cli.documents.named import piped_lines, read
from minikv.cli.screen.terminal import Terminal


def tree(root: Path, *names: str, data: bytes = b"") -> Path:
    """Files whose text is their own path, unless `data` says another."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data or name.encode())
    return root


def names(named: str | Path) -> list[str | None]:
    return [text.name for text in read([str(named)], Terminal())[0]]


def test_a_directory_is_its_text_files_sorted_and_named_from_there(tmp_path: Path) -> None:
    tree(tmp_path, "z.txt", "b/2.md", "b/10.md", "a.txt", "b/c/d.txt", ".git/config", ".env")
    tree(tmp_path, "x.bin", data=bytes(range(256)))
    tree(tmp_path, "empty.txt", data=b" \n")
    tree(tmp_path, "latin.txt", data=b"caf\xe9")
    texts, notes = read([str(tmp_path)], Terminal())
    assert [text.name for text in texts] == "a.txt b/10.md b/2.md b/c/d.txt z.txt".split()
    assert [text.text for text in texts] == [text.name for text in texts]
    assert notes == [
        f"{tmp_path}: 5 documents, in the order of their paths; skipped 2 hidden (.env, .git), "
        "1 binary (x.bin), 1 empty (empty.txt), 1 unreadable (latin.txt): "
        f"{tmp_path}/latin.txt is not valid UTF-8: byte 3 (0xe9); "
        "`iconv -c -f UTF-8 -t UTF-8 FILE` prints it without the invalid bytes",
        *(f"  {text.name}: {len(text.text)} characters" for text in texts),
    ]


def test_what_is_named_keeps_its_order(tmp_path: Path) -> None:
    tree(tmp_path, "d/2.txt", "d/1.txt", "z.txt")
    given = [str(tmp_path / "z.txt"), "-", str(tmp_path / "d")]
    texts, _ = read(given, Terminal(), lambda: b"piped")
    assert [text.name for text in texts] == ["z.txt", None, "1.txt", "2.txt"]
    assert texts[1].text == "piped"
    # A file whose name is a pattern is that file.
    tree(tmp_path, "a[1].txt", "a1.txt")
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_links_that_form_loops_do_not_hang(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.txt", "b/2.txt")
    for here in ("a", "b"):
        for there in ("a", "b"):
            (tmp_path / here / f"to-{there}").symlink_to(tmp_path / there)
    (tmp_path / "a" / "link.txt").symlink_to(tmp_path / "b" / "2.txt")
    texts, notes = read([str(tmp_path)], Terminal())
    assert [text.name for text in texts] == ["a/1.txt", "a/link.txt", "b/2.txt"]
    assert notes[0].endswith("skipped 4 linked (a/to-a, a/to-b, b/to-a, ...)")
    assert names(f"{tmp_path}/**/*.txt") == ["a/1.txt", "a/link.txt", "b/2.txt"]
    # A link that the user names is followed.
    assert names(tmp_path / "a" / "to-b") == ["2.txt"]


def test_what_is_special_is_skipped_and_hostile_names_are_one_clean_line(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "a\x1b]0;b\nc.txt")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    texts, notes = read([str(tmp_path)], Terminal())
    assert [text.name for text in texts] == ["a]0;b c.txt", "a.txt"]
    assert notes[0].endswith("skipped 1 special (pipe), 1 unreadable (gone.txt)")
    refused("no\\*", read, ["\x1bno*"], Terminal())


@table("""
    pattern      | expected
    *.txt        | a.txt b.txt
    ?.md         | c.md
    [ab].txt     | a.txt b.txt
    */*.txt      | sub/d.txt
    **           | a.txt b.txt c.md sub/d.txt sub/deep/e.txt
    **/*.txt     | a.txt b.txt sub/d.txt sub/deep/e.txt
    sub/**/*.txt | d.txt deep/e.txt
    **/deep/*    | sub/deep/e.txt
    .h*          | .hidden.txt
""")
def test_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, expected: str
) -> None:
    tree(tmp_path, "b.txt", "a.txt", "c.md", "sub/d.txt", "sub/deep/e.txt", ".hidden.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in (pattern, tmp_path / pattern, f"~/{pattern}"):
        assert names(named) == expected.split()


ADDRESS = "is an address, and minikv downloads no documents"


@pytest.mark.parametrize(
    ("named", "message", "hint"),
    [
        ("*.none", "no file matches *.none", "minikv looked in "),
        ("nothing/*.txt", "no file matches nothing/*.txt", "there is no directory "),
        ("**/*.none", "no file matches **/*.none", "minikv looked in "),
        ("folder*", "no file matches folder*", ""),
        ("folder", "no text in folder: it is empty", ""),
        ("other", "no text in other: all of it was skipped: 1 hidden (.hidden), 1 binary (x)", ""),
        ("nothing", "no such file: nothing", ""),
        ("no\nsuch/file", "no such file: no such/file", "there is no directory no such"),
        (
            "https://x.org/a b?c=1&d",
            f"https://x.org/a b?c=1&d {ADDRESS}",
            "curl -sL 'https://x.org/a b?c=1&d' | minikv ask \"QUESTION\", or save it to a file: "
            "curl -sLo FILE 'https://x.org/a b?c=1&d'",
        ),
        ("https://x.org/?q=1*", f"https://x.org/?q=1* {ADDRESS}", ""),  # with a wildcard, too
    ],
)
def test_what_means_nothing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, message: str, hint: str
) -> None:
    (tmp_path / "folder").mkdir()
    tree(tmp_path, "other/.hidden")
    tree(tmp_path, "other/x", data=bytes(256))
    monkeypatch.chdir(tmp_path)
    caught = refused("", read, [named], Terminal())
    assert str(caught) == message
    assert caught.hint.startswith(hint)


def test_too_many_or_too_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILES", 3)
    monkeypatch.setattr(sources, "MAX_LOOKED", 5)
    monkeypatch.setattr(sources, "LISTED", 2)
    tree(tmp_path, "1", "2", "3")
    assert len(names(tmp_path)) == len(names(tmp_path / "*")) == 3
    assert read([str(tmp_path)], Terminal())[1][2:] == ["  2: 1 characters", "  and 1 more"]
    for more, most in ((["4"], 3), (["5", "6"], 5)):
        tree(tmp_path, *more)
        for named in (tmp_path, tmp_path / "*", tmp_path / "**"):
            refused(f"means more than {most} files", names, named)
    # A limit on their size.
    for module in (documents, sources):
        monkeypatch.setattr(module, "MAX_BYTES", 100)
    folder = tree(tmp_path / "sized", "1", "2", data=b"x" * 50)
    tree(folder, "large", data=b"x" * 101)
    _, notes = read([str(folder)], Terminal())
    assert notes[0].endswith("skipped 1 too large (large)")
    tree(folder, "3")
    refused("is larger than", names, folder)


def test_a_chat_reads_a_piped_document_and_talks_on_the_terminal() -> None:
    main = Path(__file__).parents[2] / "support/fake_main.py"
    chat = [sys.executable, str(main), "0", "chat", "-", "--no-save"]
    command = ["sh", "-c", 'echo "piped text" | "$@"', "sh", *chat]
    with closing(Terminals(command, {"TERM": "dumb", "COLUMNS": "100"})) as terminal:
        terminal.prompt = "> "
        terminal.until("Ctrl-D leaves.")
        terminal.ready()
        terminal.type("/docs\r")
        assert "11 characters" in terminal.until("read with your next question")
        terminal.ready()
        terminal.type("q\r")
        terminal.until("without eviction")
        terminal.ready()
        terminal.type("/exit\r")
        assert terminal.code() == 0


# -- lines from a pipe -----------------------------------------------------------------------
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
    encoded = text.encode(encoding).replace(b"\xff\xfe" * 2, b"\xff\xfe")
    data = io.BufferedReader(io.BytesIO(encoded))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data))
    assert list(piped_lines()) == lines


def test_a_line_is_there_before_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in UTF-16, where a line's end has two bytes."""
    read, write = os.pipe()
    os.set_blocking(read, False)  # to read on would end the line
    with open(read, "rb") as stream, open(write, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        lines = piped_lines()
        for question in ("\ufeffone", "two"):
            pipe.write(f"{question}\r\n".encode("utf-16-le"))
            assert next(lines) == question.strip("\ufeff")
            assert stream.peek(1) == b""


def test_one_document_has_no_order(tmp_path: Path) -> None:
    _, notes = read([str(tree(tmp_path, "a.txt"))], Terminal())
    assert notes == [f"{tmp_path}: 1 document", "  a.txt: 5 characters"]

"""Which words of `minikv ask` are the question: the first, or the only one that names no file. The
rest is refused with a line to type."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from refusals import refused

from minikv.cli.chat.ask import sorted_out


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("report.txt", "notes.md", "my report.txt", "todo", "docs/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")


@pytest.mark.parametrize(
    "line",
    [
        "'What is it?' report.txt",
        "'What is it?'",
        "What",
        "What report.txt",
        "'report.txt is what?' notes.md - docs '*.md'",
        "- report.txt",
        "- -",
        "'What is it?' reprot.txt",  # reading it says that it is not there
        "'What is it?' reprot.txt notes.md",
        "'' report.txt",
        "'a\0b' report.txt",
        "'Does **this** match [anything]?' report.txt",
    ],
)
def test_the_first_word_is_the_question(line: str) -> None:
    question, *files = shlex.split(line)
    assert sorted_out(question, files) == (question, files, "")


@pytest.mark.parametrize(
    ("line", "question", "files"),
    [
        ("report.txt 'What is it?'", "What is it?", ["report.txt"]),
        ("report.txt Why", "Why", ["report.txt"]),
        ("report.txt Why?", "Why?", ["report.txt"]),
        ("'my report.txt' 'What is new in v1.2'", "What is new in v1.2", ["my report.txt"]),
        ("report.txt notes.md 'What is it?'", "What is it?", ["report.txt", "notes.md"]),
        ("report.txt 'What is it?' notes.md -", "What is it?", ["report.txt", "notes.md", "-"]),
        ("docs 'What is it?'", "What is it?", ["docs"]),
        ("'docs/*.txt' 'What is it?'", "What is it?", ["docs/*.txt"]),
        ("reprot.txt 'What is it?'", "What is it?", ["reprot.txt"]),
        ("reprot.txt What?", "What?", ["reprot.txt"]),
        ("reprot.txt notes.md Why", "Why", ["reprot.txt", "notes.md"]),
        ("report.txt nots.md 'Who is it'", "Who is it", ["report.txt", "nots.md"]),
    ],
)
def test_the_only_word_that_names_no_file_is_the_question(
    line: str, question: str, files: list[str]
) -> None:
    first, *others = shlex.split(line)
    found = sorted_out(first, others)
    assert found[:2] == (question, files)
    assert found[2] == f"read as minikv ask {shlex.join([question, *files])}"
    assert sorted_out(question, files) == (question, files, "")


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("report.txt", "QUESTION report.txt"),
        ("report.txt notes.md", "QUESTION report.txt notes.md"),
        ("report.txt -", "QUESTION report.txt -"),
        ("todo report.txt", "QUESTION todo report.txt"),
        ("report.txt nots.md", "QUESTION report.txt nots.md"),
        ("report.txt who knows", "'who knows' report.txt"),
        ("report.txt 'Who is it' 'And why'", "'Who is it And why' report.txt"),
        ("report.txt what is notes.md then", "'what is then' report.txt notes.md"),
        ("hello there", "'hello there' FILE"),
        ("Who notes", "'Who notes' FILE"),
        ("What is this about", "'What is this about' FILE"),
        ("What 'is it' report.txt", "'What is it' report.txt"),
        ("What is this about reprot.txt", "'What is this about' reprot.txt"),
        ("What is in docs about report.txt", "'What is in about' docs report.txt"),
        ("report.txt what is it", "'what is it' report.txt"),
        ("What is this about report.txt", "'What is this about' report.txt"),
        ("What is this docs/ notes.md -", "'What is this' docs/ notes.md -"),
        ("Who runs reprot.txt notes.md", "'Who runs' reprot.txt notes.md"),
        ("Summarise briefly report.txt", "'Summarise briefly' report.txt"),
        ("reprot.txt what is it?", "'what is it?' reprot.txt"),
        ("What is a 'b c' report.txt", "'What is a b c' report.txt"),
    ],
)
def test_the_rest_is_refused_with_the_line_to_type(line: str, typed: str) -> None:
    first, *others = shlex.split(line)
    words = shlex.split(typed)
    message = "there is no question" if "QUESTION" in words else "name no file"
    assert f"minikv ask {typed}" in refused(message, sorted_out, first, others).hint
    if "QUESTION" not in words:
        assert sorted_out(words[0], words[1:]) == (words[0], words[1:], "")

"""Which words of `minikv ask` are the question and which are files, where the question is not first
or not quoted.

What is not plain is refused with the line to type, because a wrong guess would answer another
question, or about another document.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Sequence

from minikv.cli.screen.text import clean
from minikv.errors import UsageError

_WORDS = 3  # an unquoted question has at least so many; of two, one may be a mistyped file
_PATH = re.compile(r"[/\\~]|\.\w{1,8}$")


def sorted_out(question: str, files: Sequence[str]) -> tuple[str, list[str], str]:
    """The question, the files, and a line that says how they were read if the question was not the
    first word alone. Raises UsageError."""
    words = [question, *files]
    if question == "-":
        return question, list(files), ""
    found = None
    if _named(question):
        found = _after_files(words)
    elif not all(map(_named, files)):
        found = _unquoted(words)
    if found is None:  # the first word is the question; a file that is not there is said later
        return question, list(files), ""
    question, named = found
    return question, named, f"read as {_line(question, named)}"


def _after_files(words: Sequence[str]) -> tuple[str, list[str]]:
    """The first word is a file: the question comes behind it."""
    named = [word for word in words if _named(word)]
    others = [word for word in words if not _named(word)]
    if not others:
        alone = "it is a file" if len(words) == 1 else "all of these are files"
        raise UsageError(
            f"there is no question: {alone}",
            f"{_line('QUESTION', named)}; a question that is the name of a file goes through "
            "`minikv ask -`",
        )
    if len(others) == 1 and not _path(others[0]):
        return others[0], named
    if len(others) >= _WORDS and words[: len(named)] == named and all(map(_bare, others)):
        return " ".join(others), named
    if any(map(_path, others)):
        missing = clean(next(filter(_path, others)))
        asked = " ".join(word for word in others if not _path(word)) or "QUESTION"
        raise UsageError(
            f"there is no file {missing!r}", f"the question goes first: {_line(asked)}"
        )
    raise UsageError(
        "it is not plain which words are the question",
        f"the question goes first, in quotes: {_line(' '.join(others), named)}",
    )


def _unquoted(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The first word is not a file, nor are all others. None: the first word is the question."""
    lead = next((i for i, word in enumerate(words) if not _bare(word)), len(words))
    rest = words[lead:]
    if lead >= _WORDS and rest and all(_named(word) and _file_like(word) for word in rest):
        return " ".join(words[:lead]), list(rest)
    end = len(words)
    while end and (_named(words[end - 1]) or _path(words[end - 1])):
        end -= 1
    spaced = [word for word in words if len(word.split()) > 1]
    if lead >= _WORDS or (lead > 1 and len(words) > 2 and not spaced):
        raise UsageError(
            f"there is no file {clean(words[1])!r}",
            f"a question of several words is quoted: {_line(' '.join(words[:end]), words[end:])}",
        )
    asked = [word for word in words if not _named(word) and not _path(word)]
    if _path(words[0]) and asked and (len(asked) == 1 or all(map(_bare, asked))):
        raise UsageError(
            f"there is no file {clean(words[0])!r}",
            f"the question goes first: {_line(' '.join(asked))}",
        )
    return None


def _named(word: str) -> bool:
    """Whether a word names something that is there."""
    path = os.path.expanduser(word)
    try:
        return word == "-" or os.path.lexists(path) or _matches(path)
    except ValueError:  # a NUL
        return False


def _matches(pattern: str) -> bool:
    """A question mark alone makes no pattern: a question has one."""
    return bool(re.search(r"[*\[]", pattern)) and next(glob.iglob(pattern), None) is not None


def _path(word: str) -> bool:
    """Whether a word that is not there looks like a path all the same."""
    return not _named(word) and len(word.split()) == 1 and bool(_PATH.search(word))


def _bare(word: str) -> bool:
    """Whether it is one word of a question."""
    return not _named(word) and len(word.split()) == 1 and not _PATH.search(word)


def _file_like(word: str) -> bool:
    """Whether a file is named as nothing else is: a word of a question may be the name of a
    directory."""
    return word == "-" or bool(_PATH.search(word) or re.search(r"[*\[]", word))


def _line(question: str, files: Sequence[str] = ("FILE",)) -> str:
    words = [question if question == "QUESTION" else shlex.quote(clean(question))]
    words += [file if file == "FILE" else shlex.quote(clean(file)) for file in files]
    return f"minikv ask {' '.join(words)}"

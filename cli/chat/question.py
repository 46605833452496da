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
    if question == "-" or (not _named(question) and all(map(_named, files))):
        return question, list(files), ""
    end = len(words)
    if _named(question) or _path(question):
        asked = [word for word in words if not _file(word)]
        named = [word for word in words if _file(word)]
    else:
        while _file(words[end - 1]):
            end -= 1
        asked, named = words[:end], words[end:]
    lead = next((n for n, word in enumerate(asked) if not _bare(word)), len(asked))
    joined = lead == len(asked) >= _WORDS
    if not asked:
        raise UsageError(
            "there is no question: every word names a file",
            f"{_line('QUESTION', named)}; a question that is the name of a file goes through "
            "`minikv ask -`",
        )
    if _named(question):
        plain = len(asked) == 1 or (joined and words[: len(named)] == named)
        plain = plain and all(map(_named, named))
    else:
        plain = joined and bool(named) and all(_named(word) and _like(word) for word in named)
        quoted = any(len(word.split()) > 1 for word in words)
        first = lead < 2 or (lead < _WORDS and (quoted or len(words) == 2))
        if not plain and not _path(question) and first:
            return question, list(files), ""  # a file that is not there is said when it is read
    if not plain:
        raise UsageError(
            "it is not plain which words are the question",
            f"the question goes first, in quotes: {_line(' '.join(asked), named)}",
        )
    question = " ".join(asked)
    return question, named, f"read as {_line(question, named)}"


def _named(word: str) -> bool:
    """Whether a word names something that is there. A question mark alone makes no pattern: a
    question has one."""
    path = os.path.expanduser(word)
    try:
        pattern = re.search(r"[*\[]", path) and next(glob.iglob(path), None) is not None
        return word == "-" or os.path.lexists(path) or bool(pattern)
    except ValueError:  # a NUL
        return False


def _path(word: str) -> bool:
    """Whether a word that is not there looks like a path all the same."""
    return not _named(word) and len(word.split()) == 1 and bool(_PATH.search(word))


def _file(word: str) -> bool:
    return _named(word) or _path(word)


def _bare(word: str) -> bool:
    """Whether it is one word of a question."""
    return not _file(word) and len(word.split()) == 1


def _like(word: str) -> bool:
    """Whether a file is named as nothing else is: a word of a question may be the name of a
    directory."""
    return word == "-" or bool(_PATH.search(word) or re.search(r"[*\[]", word))


def _line(question: str, files: Sequence[str]) -> str:
    words = [question if question == "QUESTION" else shlex.quote(clean(question))]
    return f"minikv ask {' '.join([*words, *(shlex.quote(clean(file)) for file in files)])}"

"""Reads the documents that a command names: files, directories, patterns and pipes.

A directory means the documents in it and below it, a pattern those that it matches, in the order of
their paths. Notes list them, and the files that were left out. A file that is named directly is
read or refused.
"""

from __future__ import annotations

import glob
import io
import os
import re
import select
import shlex
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from minikv.chat.report import amount
from minikv.cli.documents.parsers import ZIP
from minikv.cli.documents.text import (
    MAX_BYTES,
    SAMPLE,
    Text,
    encoding_of,
    is_binary,
    one_line,
    read_bytes,
    read_file,
    refuse_binary,
    too_large,
)
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Document


STDIN = "standard input"
_PATIENCE = 3.0  # seconds without input on a pipe before a line says that minikv waits for it


def read_stdin(terminal: Terminal) -> bytes:
    """The piped input, at most one byte over the size limit."""
    stream = sys.stdin.buffer
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        mode = 0  # not a real file: a test's buffer
    if stat.S_ISDIR(mode):
        raise UsageError("standard input is a directory")
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        ready, _, _ = select.select([stream], [], [], _PATIENCE)
        if not ready:
            terminal.say("reading standard input; `< /dev/null` if there is nothing to read")
    return stream.read(MAX_BYTES + 1)


def piped_lines() -> Iterator[str]:
    """The lines of standard input, without their ends, each as soon as it arrives; the encoding is
    detected as for a document. Raises UsageError if the first line is not text, or the last one
    ends within a character of UTF-16 or UTF-32."""
    given: Any = sys.stdin.buffer
    stream = given if isinstance(given, io.BufferedReader) else io.BufferedReader(given)
    start = stream.peek(1)
    refuse_binary(start, STDIN)
    encoding = encoding_of(start)
    # Invalid bytes become lone surrogates, which the session refuses by name.
    errors = "surrogateescape" if encoding == "utf-8-sig" else "surrogatepass"
    try:
        for line in io.TextIOWrapper(stream, encoding, errors):
            yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        what = f"{STDIN} is not valid {error.encoding.upper()}"
        raise UsageError(what, "it ends within a character: is it cut short?") from None


def piped_document(terminal: Terminal) -> bytes:
    """Standard input as a document, for a chat whose questions come from the terminal. Raises
    UsageError if there is no terminal."""
    if sys.stdin.isatty():
        return read_stdin(terminal)
    try:
        handle = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        raise UsageError(
            "standard input is the document, and there is no terminal to read questions from",
            'minikv ask "QUESTION" - takes a piped document',
        ) from None
    try:
        data = read_stdin(terminal)
        os.dup2(handle, 0)
    finally:
        os.close(handle)
    sys.stdin = os.fdopen(0, closefd=False)
    return data


MAX_FILES = 1000
"""The most files of one directory or pattern."""

MAX_LOOKED = 20_000
"""The most entries that are examined to find them."""

LISTED = 20
"""The most files of a directory with a line each in its notes."""

_SKIPPED = ("hidden", "binary", "empty", "too large", "linked", "special", "unreadable")
"""Why a file of a directory is not a document: "linked" is a directory behind a link, "special" a
device, pipe or socket."""

_MAGIC = re.compile(r"[*?\[]")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def read(
    names: Sequence[str], terminal: Terminal, stdin: Callable[[], bytes] | None = None
) -> tuple[list[Text], list[str]]:
    """All documents that `names` mean, in this order, and lines about the files that directories
    and patterns mean and leave out. "-" means the result of `stdin`, if given. The live line names
    the file that is being read. Raises UsageError for a name that means nothing."""
    texts: list[Text] = []
    notes: list[str] = []
    try:
        for name in names:
            path, said = os.path.expanduser(name), list[str]()
            if name == "-" and stdin is not None:
                found = [read_bytes(stdin(), STDIN)]
            elif os.path.isdir(path):
                found, said = _several(name, _below(path, name), terminal)
            elif _ADDRESS.match(path) and not os.path.lexists(path):
                address, typed = clean(name), shlex.quote(clean(name))
                raise UsageError(
                    f"{address} is an address, and minikv downloads no documents",
                    f'curl -sL {typed} | minikv ask "QUESTION", or save it to a file: '
                    f"curl -sLo FILE {typed}",
                )
            elif _MAGIC.search(path) and not os.path.lexists(path):
                found, said = _several(name, _matching(path, name), terminal)
            else:
                found = [_read(path, terminal)]
            texts += found
            notes += said
    finally:
        terminal.clear_status()
    return texts, notes


def _read(path: str, terminal: Terminal) -> Text:
    terminal.status(f"reading {path}")
    return read_file(path)


def opened(names: Sequence[str], terminal: Terminal, stdin: Callable[[], bytes]) -> list[Text]:
    """The documents that a command was started with. Notes about them are shown. Errors as in
    `read`."""
    texts, notes = read(names, terminal, stdin)
    for note in notes:
        terminal.note(note)
    return texts


def attach(session: ChatSession, texts: Iterable[Text], terminal: Terminal) -> list[Text]:
    """Put documents before the next question, and show their warnings. Returns those that were put
    there: a file whose text the chat already has is not.

    Because the model could not distinguish two documents with one name, the second becomes
    "report.txt (2)".
    """
    attached = []
    for text in texts:
        there = [*session.documents, *session.pending]
        if text.source is not None and _key(text) in map(_key, there):
            terminal.note(f"{text.name} is here already: it is read once")
            continue
        name, count, taken = text.name, 1, {document.name for document in there}
        while name is not None and name in taken:
            count += 1
            name = f"{text.name} ({count})"
        if text.note:
            terminal.warn(text.note)
        session.attach(text.text, name, text.source)
        attached.append(replace(text, name=name))
    return attached


def _key(text: Text | Document) -> tuple[str | None, str]:
    return text.source.path if text.source is not None else None, text.text


# -- directories and patterns ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file of a directory or pattern. name: its relative path. hidden: its name, or that of a
    directory that was not searched, begins with a dot."""

    path: str
    name: str
    hidden: bool = False


def _several(
    named: str, entries: Iterator[_Entry], terminal: Terminal
) -> tuple[list[Text], list[str]]:
    """The documents among `entries`, and notes. Raises UsageError if there is none."""
    shown = clean(named)
    texts: list[Text] = []
    left: dict[str, list[str]] = defaultdict(list)
    unreadable = ""
    size = 0
    for entry in sorted(entries, key=lambda entry: entry.name.split(os.sep)):
        why = "hidden" if entry.hidden else _unsuited(entry.path)
        if not why:
            if len(texts) == MAX_FILES:
                raise _too_many(shown, f"more than {MAX_FILES:,} files")
            try:
                text = _read(entry.path, terminal)
            except UsageError as error:
                why = "unreadable"
                unreadable = unreadable or f"{error}; {error.hint}".removesuffix("; ")
            else:
                size += len(text.text.encode("utf-8", "replace"))
                if size > MAX_BYTES:
                    raise too_large(shown)
                texts.append(replace(text, name=one_line(entry.name)))
        if why:
            left[why].append(clean(entry.name))
    skipped = ", ".join(f"{len(x):,} {why} ({_few(x)})" for why in _SKIPPED if (x := left[why]))
    if unreadable:
        skipped += f": {unreadable}"
    if not texts:
        reason = f"all of it was skipped: {skipped}" if skipped else "it is empty"
        raise UsageError(f"no text in {shown}: {reason}")
    order = ", in the order of their paths" if len(texts) > 1 else ""
    count = f"{amount(len(texts), 'document')}{order}"
    notes = [f"{shown}: {count}" + (f"; skipped {skipped}" if skipped else "")]
    notes += [f"  {text.name}: {text.facts}" for text in texts[:LISTED]]
    return texts, notes + [f"  and {len(texts) - LISTED:,} more"] * (len(texts) > LISTED)


def _few(names: Sequence[str]) -> str:
    """The first three."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _unsuited(path: str) -> str:
    """Why a file is not a document, in a word; "" if it may be one."""
    try:
        facts = os.stat(path)
        if stat.S_ISDIR(facts.st_mode):
            return "linked"
        if not stat.S_ISREG(facts.st_mode):
            return "special"
        if facts.st_size > MAX_BYTES:
            return "too large"
        with open(path, "rb") as file:
            start = file.read(SAMPLE)
    except OSError:
        return "unreadable"
    if not start.strip():
        return "empty"
    word = start.startswith(ZIP) and path.lower().endswith(".docx")
    return "binary" if is_binary(start) and not word else ""


def _below(folder: str, named: str) -> Iterator[_Entry]:
    """All files below a directory. Links to directories are not followed, because they may form a
    loop."""
    looked = 0
    for at, folders, files in os.walk(folder):
        looked += len(folders) + len(files)
        if looked > MAX_LOOKED:
            raise _too_many(clean(named), f"more than {MAX_LOOKED:,} files and directories")
        for name in (*files, *(n for n in folders if os.path.islink(os.path.join(at, n)))):
            path = os.path.join(at, name)
            yield _Entry(path, os.path.relpath(path, folder), name.startswith("."))
        for name in [n for n in folders if n.startswith(".")]:
            folders.remove(name)
            path = os.path.join(at, name)
            if not os.path.islink(path):
                yield _Entry(path, os.path.relpath(path, folder), hidden=True)


def _matching(pattern: str, named: str) -> Iterator[_Entry]:
    """The files that a pattern matches; ** stands for any directories. Raises UsageError."""
    parts = pattern.split(os.sep)
    first = next(i for i, part in enumerate(parts) if _MAGIC.search(part))
    base = os.sep.join(parts[:first]) or (os.sep if first else "")
    if "**" in parts:
        # glob would follow links, and never return from two that form loops.
        below = (entry for entry in _below(base or os.curdir, named) if not entry.hidden)
        found = [e for e in below if _fits(e.name.split(os.sep), parts[first:])]
    else:
        found = []
        for path in glob.iglob(pattern):
            if len(found) == MAX_LOOKED:
                raise _too_many(clean(named), f"more than {MAX_LOOKED:,} files")
            if not os.path.isdir(path):
                found.append(_Entry(path, os.path.relpath(path, base or os.curdir)))
    if not found:
        there = os.path.isdir(base or os.curdir)
        where = clean(os.path.abspath(base or os.curdir))
        raise UsageError(
            f"no file matches {clean(named)}",
            f"minikv looked in {where}" if there else f"there is no directory {where}",
        )
    yield from found


def _fits(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a path matches a pattern, both in parts."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_fits(parts[i:], wanted[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _fits(parts[1:], wanted[1:])


def _too_many(shown: str, what: str) -> UsageError:
    return UsageError(f"{shown} means {what}", "name fewer, for example with 'DIR/*.md'")

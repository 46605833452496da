"""The slash commands of a chat, in one table. /help, completion and "did you mean" use it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from minikv.chat.report import amount
from minikv.checks import guess
from minikv.cli.chat import answer_commands, compare, kept, settings_commands
from minikv.cli.chat.slash import Command, Context, Leave
from minikv.cli.documents import commands as documents
from minikv.cli.export import page as export
from minikv.cli.saved import commands as saved
from minikv.cli.screen import render
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

_GONE = {
    "show": "/set lists every setting; /policy and /system show theirs",
    "budget": "/set budget 256 changes it; /policy shows it",
    "kept top": 'the brightest words of /kept are those that most heads hold; /kept find "TEXT"',
    "add --replace": "`iconv -c -f UTF-8 -t UTF-8 FILE` prints a text without its invalid bytes",
}
"""Commands of earlier versions, with what to use instead."""
_WIDEST = 24
"""Columns of a command in /help; a longer one has its own line."""


def is_command(line: str) -> bool:
    """Whether a typed line is a command: a slash, but not two."""
    typed = line.lstrip(" \t")
    return typed.startswith("/") and not typed.startswith("//")


def literal(line: str) -> str:
    """The message in a line that is not a command: `//x` means `/x`."""
    return re.sub(r"\A([ \t]*)//", r"\1/", line)


def execute(context: Context, line: str) -> None:
    """Run a command line. Raises UsageError on an unknown command or argument, Leave on /exit."""
    word, _, rest = re.split(r"(\s+|\Z)", line.strip()[1:], maxsplit=1)
    command = _BY_WORD.get(word)
    for gone in (word, " ".join([word, *rest.split()[:1]])):
        if gone in _GONE:
            raise UsageError(f"/{gone} is gone", _GONE[gone])
    if command is None:
        near = guess(f"/{word}", names())
        raise UsageError(
            f"unknown command /{word}", f"{near}/help lists the commands; //{word} sends it as text"
        )
    try:
        arguments = [rest.strip()] * bool(rest.strip()) if command.raw else shlex.split(rest)
    except ValueError as error:
        hint = "put a text with ' in it in double quotes" if "'" in rest else ""
        raise UsageError(f"/{word}: {error}", hint) from None
    if arguments and not command.takes:
        raise UsageError(f"/{word} takes nothing, got {rest.strip()!r}")
    command.run(context, arguments)


def names() -> list[str]:
    """Every command with its slash, for completion."""
    return [f"/{word}" for word in _BY_WORD]


def following(session: ChatSession, words: Sequence[str]) -> list[str]:
    """The completions of the last of `words`; the first word is a command with its slash."""
    if len(words) == 1:
        return names()
    first, *before, word = words
    command = _BY_WORD.get(first.removeprefix("/"))
    follows = command.follows if command else ()
    if not isinstance(follows, tuple):
        return list(follows(session, before, word))
    return [one for one in follows if (word[:1] == "-" if one[0] == "-" else not before)]


def takes_files(first: str) -> bool:
    """Whether paths may follow a command with its slash."""
    command = _BY_WORD.get(first.removeprefix("/"))
    return command is not None and command.files


def _help(context: Context, arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise UsageError(f"/help takes one command, got {' '.join(arguments)!r}")
    if arguments:
        word = arguments[0].removeprefix("/")
        command = _BY_WORD.get(word)
        if command is None:
            raise UsageError(f"no command /{word}", "/help lists the commands")
        shown = [command]
    else:
        shown = list(COMMANDS)
    width = max(n for command in COMMANDS if (n := len(_usage(command))) <= _WIDEST)
    width = width if context.terminal.screen.width >= 3 * width else 2
    for command in shown:
        usage = _usage(command)
        if len(usage) > width:
            context.terminal.say(usage)
            usage = ""
        context.terminal.say(f"{usage.ljust(width)}  {command.help}")
    if not arguments:
        context.terminal.say(
            "Ctrl-C stops an answer, Ctrl-D leaves; //x sends /x as text; Alt-Enter or Ctrl-J is a "
            'new line, Ctrl-G your editor, Ctrl-R searches; """ begins and ends a block. Lines '
            "typed during an answer are sent after it; Ctrl-C drops them too"
        )


def _usage(command: Command) -> str:
    words = ", ".join(f"/{word}" for word in command.words)
    return f"{words} {command.takes}".rstrip()


def _exit(context: Context, arguments: list[str]) -> None:
    raise Leave


def _reset(context: Context, arguments: list[str], *, keep: bool = False) -> None:
    was = saved.left(context)
    context.session.reset(keep_documents=keep)
    count = len(context.session.pending)
    what = amount(count, "document") if count else "no documents"
    read = f"{what} will be read with your next question"
    context.terminal.say(f"new conversation; {read if keep else 'documents and cache are gone'}")
    if was:
        context.terminal.say(was)


def _stats(context: Context, arguments: list[str]) -> None:
    report, terminal = context.session.report, context.terminal
    if report is None:
        terminal.say("no turn yet")
        return
    drawn = kept.strips(context.session, terminal.screen.width)
    terminal.say(f"{render.stats(report)}\n\n{drawn}".rstrip())


def _after_help(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    return () if before else _BY_WORD


COMMANDS = (
    Command(("help", "?"), "[COMMAND]", "this list", _help, follows=_after_help),
    *documents.COMMANDS,
    *answer_commands.COMMANDS,
    Command(("stats",), "", "what the last turn cost, measured", _stats),
    *kept.COMMANDS,
    *compare.COMMANDS,
    *settings_commands.COMMANDS,
    *saved.COMMANDS,
    *export.COMMANDS,
    Command(
        ("clear",), "", "new conversation about the same documents", partial(_reset, keep=True)
    ),
    Command(("reset",), "", "new conversation without documents", _reset),
    Command(("exit", "quit", "bye"), "", "leave, as Ctrl-D does", _exit),
)
_BY_WORD = {word: command for command in COMMANDS for word in command.words}

"""The flags and arguments of `ask`, `chat` and `demo`, which are slow to import; the
docstring of each is its help. The other commands have theirs beside them.

`main` imports this only when one of them is typed, and a command imports what it runs only when it
runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from minikv.cli.settings import completion
from minikv.cli.settings.config import SAVED, Interface
from minikv.cli.settings.flags import Call, Only, alone, flag, json_flag
from minikv.settings import OUTPUT, Generation, Settings

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help="what to ask about: text, PDFs, .docx, HTML, directories, 'patterns'; - is stdin",
    ),
]


@dataclass(frozen=True, slots=True)
class Question:
    """What `minikv ask` is asked. go_on: behind the last `ask`."""

    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="the question; - reads the message from stdin")
    ]
    files: Files = None
    go_on: Annotated[
        bool,
        flag(
            "--continue",
            "ask behind the last `ask`, which is kept for that (see --remember)",
            letters=["-c"],
            rich_help_panel=SAVED,
        ),
    ] = False
    chat: Annotated[
        str | None,
        flag(
            "--chat",
            "ask in this saved chat, and save question and answer there",
            metavar="NAME",
            autocompletion=completion.saved,
            rich_help_panel=SAVED,
        ),
    ] = None
    as_json: Annotated[
        bool, json_flag("one JSON object: the answer and the figures of the turn")
    ] = False


@alone
def ask(
    call: Call,
    settings: Settings,
    generation: Generation,
    interface: Interface,
    asked: Question,
) -> None:
    """minikv ask "Who runs the mill?" report.txt --budget 256 --stats

    Ask one question. Without FILEs, piped text is the document; with FILEs, stdin is read only for
    `-`. As the QUESTION, `-` reads the whole message from stdin, as it is but for the line end that
    `echo` adds.
    """
    from minikv.cli.chat.ask import ask as run

    run(asked, settings, generation, interface, call)


@dataclass(frozen=True, slots=True)
class Talk:
    """How `minikv chat` begins. prompt: is asked before anything is typed. resume: a saved chat,
    "" the newest one; reread: without its cache."""

    files: Files = None
    prompt: Annotated[
        str | None, flag("--prompt", "ask this first", letters=["-p"], metavar="QUESTION")
    ] = None
    as_json: Annotated[
        bool,
        flag(
            "--json",
            "print a JSON object per turn, with its answer and figures; for piped questions",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    resume: Annotated[
        str | None,
        flag(
            "--resume",
            "continue a saved chat; without NAME, the last one",
            metavar="[NAME]",
            autocompletion=completion.saved,
        ),
    ] = None
    reread: Annotated[
        bool,
        flag(
            "--reread",
            "with --resume: do not load the saved cache; the next question reads everything again",
            rich_help_panel=SAVED,
        ),
    ] = False
    no_save: Annotated[bool, flag("--no-save", "do not save this chat", rich_help_panel=SAVED)] = (
        False
    )
    no_history: Annotated[
        bool,
        flag("--no-history", "do not store what is typed for later chats", rich_help_panel=SAVED),
    ] = False


@alone
def chat(
    call: Call,
    settings: Settings,
    generation: Generation,
    interface: Annotated[Interface, Only("encoding_errors chats_limit thoughts quiet plain debug")],
    asked: Talk,
) -> None:
    """minikv chat report.txt --budget 256

    Chat about documents. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. With a
    FILE, questions can be piped in, one per line. With `-` as FILE, the document is piped in.

    While an answer is written, the cache holds only the tokens that its question needs. For the
    next question they are chosen again from all that was read: see --reuse and --tier.
    """
    from minikv.cli.chat.command import chat as run

    run(asked, settings, generation, interface, call)


@alone
def demo(call: Call, interface: Annotated[Interface, Only("plain debug")]) -> None:
    """minikv demo

    Four questions about the bundled document: which tokens are kept, what that saves, a follow-up
    that goes wrong, and what to do about it. It needs no files. Enter continues, q leaves.
    """
    from minikv.cli.chat.demo import demo as run

    run(call.terminal, debug=interface.debug)

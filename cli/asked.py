"""What `ask`, `chat`, `eval` and `bench` are asked beside their settings: each field is a flag or
an argument. Loads nothing that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from minikv.cli.settings import flags
from minikv.cli.settings.config import SAVED
from minikv.cli.settings.flags import flag, json_flag
from minikv.settings import ADVANCED, CACHE, OUTPUT

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help="what to ask about: text, PDFs, .docx, HTML, directories, 'patterns'; - is stdin",
    ),
]


@dataclass(frozen=True, slots=True)
class Question:
    """What `minikv ask` is asked. go_on: continue the last `ask`."""

    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="the question; - reads the message from stdin")
    ]
    files: Files = None
    go_on: Annotated[
        bool,
        flag(
            "--continue -c",
            "continue the last `ask`, which is kept for that (see --remember)",
            SAVED,
        ),
    ] = False
    chat: Annotated[
        str | None,
        flag(
            "--chat",
            "ask in this saved chat, and save question and answer there",
            SAVED,
            metavar="NAME",
            autocompletion=flags.saved,
        ),
    ] = None
    as_json: Annotated[
        bool, json_flag("one JSON object: the answer and the figures of the turn")
    ] = False


@dataclass(frozen=True, slots=True)
class Talk:
    """How `minikv chat` begins. prompt: is asked before anything is typed. resume: a saved chat,
    "" the newest one; reread: without its cache."""

    files: Files = None
    prompt: Annotated[str | None, flag("--prompt -p", "ask this first", metavar="QUESTION")] = None
    as_json: Annotated[
        bool,
        flag(
            "--json",
            "print a JSON object per turn, with its answer and figures; for piped questions",
            OUTPUT,
        ),
    ] = False
    resume: Annotated[
        str | None,
        flag(
            "--resume",
            "continue a saved chat; without NAME, the last one",
            metavar="[NAME]",
            autocompletion=flags.saved,
        ),
    ] = None
    reread: Annotated[
        bool,
        flag(
            "--reread",
            "with --resume: do not load the saved cache; the next question reads everything again",
            SAVED,
        ),
    ] = False
    no_save: Annotated[bool, flag("--no-save", "do not save this chat", SAVED)] = False
    no_history: Annotated[
        bool, flag("--no-history", "do not store what is typed for later chats", SAVED)
    ] = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `minikv eval` is to do, as it was typed. Some strings are lists with commas."""

    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="texts, or records in the form of RULER"),
    ] = None
    tasks: Annotated[
        str,
        flag(
            "--tasks",
            "comma-separated; default: facts; with FILEs their answers, or the ppl of texts",
            autocompletion=flags.tasks,
        ),
    ] = ""
    length: Annotated[
        str, flag("--length", "tokens of a document; for needle a comma-separated list")
    ] = "2000"
    count: Annotated[int, flag("--count -n", "questions per task (needle: per place)")] = 40
    questions: Annotated[
        int,
        flag(
            "--questions",
            "questions of facts about each document, each asked as if it were the first",
            ADVANCED,
        ),
    ] = 1
    reuses: Annotated[
        str,
        flag(
            "--reuse",
            "what later questions of a chat are answered from, comma-separated: once (the "
            "tokens kept for the first one), refresh (all that was read, after reading it again), "
            "blind (the tokens kept before any question was seen), recall (all that was read)",
            CACHE,
        ),
    ] = "once"
    haystack: Annotated[
        Path | None,
        flag(
            "--haystack",
            "put the facts of needle and facts into parts of this text, each of --length "
            "tokens: a code, a word, a name and a place",
        ),
    ] = None
    needles: Annotated[
        list[str] | None,
        flag("--needle", "a fact for --haystack instead: 'SENTENCE | QUESTION | ANSWER'"),
    ] = None
    as_json: Annotated[Path | None, flag("--json", "write the results and all answers here")] = None


@dataclass(frozen=True, slots=True)
class Bench:
    """What `minikv bench` is to measure, as it was typed. Some strings are lists with commas."""

    question: Annotated[
        Literal["decode", "prefill", "all"],
        typer.Argument(
            metavar="decode|prefill|all",
            help="decode: the time of a step after a prompt; prefill: the time to read a prompt",
        ),
    ] = "all"
    shape: Annotated[
        str,
        flag(
            "--shape",
            "sizes of a network with random weights: llama-3-8b, tinyllama, s, ...; auto: "
            "llama-3-8b on a GPU, else s (160 million parameters)",
        ),
    ] = "auto"
    length: Annotated[str, flag("--length", "tokens of the prompt, comma-separated: 2048,8k")] = (
        "2048"
    )
    steps: Annotated[int, flag("--steps", "decode steps of a round; 0: 32, on a GPU 128")] = 0
    repeat: Annotated[int, flag("--repeat", "rounds; in each, every system is measured once")] = 3
    peer: Annotated[bool, flag("--peer/--no-peer", "also measure transformers, if installed")] = (
        True
    )
    as_json: Annotated[
        str | None,
        flag("--json", "write a JSON object to FILE; without FILE, to stdout", metavar="[FILE]"),
    ] = None

"""The command `minikv eval`, and what it is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from minikv.cli.settings import completion
from minikv.cli.settings.config import SETTINGS, Interface
from minikv.cli.settings.flags import MODEL, Call, Only, alone, list_of
from minikv.settings import ADVANCED, CACHE, Settings


@dataclass(frozen=True, slots=True)
class Asked:
    """What `minikv eval` is to do, as it was typed. Some strings are lists with commas."""

    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="texts, or records in the form of RULER"),
    ] = None
    tasks: Annotated[
        str,
        typer.Option(
            help="comma-separated; default: facts; with FILEs their answers, or the ppl of texts",
            autocompletion=completion.tasks,
        ),
    ] = ""
    length: Annotated[
        str, typer.Option(help="tokens of a document; for needle a comma-separated list")
    ] = "2000"
    count: Annotated[
        int, typer.Option("--count", "-n", help="questions per task (needle: per place)")
    ] = 40
    questions: Annotated[
        int,
        typer.Option(
            help="questions of facts about each document, each asked as if it were the first",
            rich_help_panel=ADVANCED,
        ),
    ] = 1
    reuses: Annotated[
        str,
        typer.Option(
            "--reuse",
            help="what later questions of a chat are answered from, comma-separated: once (the "
            "tokens kept for the first one), refresh (all that was read, after reading it again), "
            "blind (the tokens kept before any question was seen), recall (all that was read)",
            rich_help_panel=CACHE,
        ),
    ] = "once"
    haystack: Annotated[
        Path | None,
        typer.Option(
            help="put the facts of needle and facts into parts of this text, each of --length "
            "tokens: a code, a word, a name and a place"
        ),
    ] = None
    needles: Annotated[
        list[str] | None,
        typer.Option(
            "--needle", help="a fact for --haystack instead: 'SENTENCE | QUESTION | ANSWER'"
        ),
    ] = None
    as_json: Annotated[
        Path | None, typer.Option("--json", help="write the results and all answers here")
    ] = None


@alone
def app(
    call: Call,
    settings: Annotated[
        Settings,
        Only(
            f"{MODEL} keep_packed threads policy budget decode stride kv tier_dtype options seed",
            list_of("policy", "global-span,adakv,streaming"),
            list_of("budget", "128,256"),
            list_of("decode", "auto"),
            replace(SETTINGS["seed"], help="seed of the documents and of random draws"),
        ),
    ],
    interface: Annotated[Interface, Only("quiet debug")],
    asked: Asked,
) -> None:
    """minikv eval --tasks facts,needle --policy global-span,snapkv --budget 64,128,256

    Ask the same questions under every policy and budget, the full cache first. Tasks: needle,
    facts, followup (six questions in one chat), long (names, numbers, sentences, lists and passages
    to copy), agree (with the full cache's answer), kl (from the full cache), ppl (perplexity).
    FILEs are any texts, for ppl, kl and agree, or records (.jsonl) in the form of RULER: `input`,
    whose last line is the question, and `outputs`, the right answers.
    """
    from minikv.cli.eval.command import evaluate

    evaluate(asked, settings, call.terminal)

"""The command `minikv eval`."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from minikv.cli.eval.asked import Asked
from minikv.cli.measure import with_flags
from minikv.cli.settings.config import SETTINGS, Interface
from minikv.cli.settings.flags import MODEL, Call, Only, command, list_of
from minikv.settings import Settings

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


def evaluate(
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
    **asked: Any,
) -> None:
    from minikv.cli.eval.command import evaluate as run_evaluation

    run_evaluation(Asked(**asked), settings, call.terminal)


app.command(
    name="eval",
    help="minikv eval --tasks facts,needle --policy global-span,snapkv --budget 64,128,256\n\n"
    "Ask the same questions under every policy and budget, the full cache first. Tasks: needle, "
    "facts, followup (six questions in one chat), long (names, numbers, sentences, lists and "
    "passages to copy), agree (with the full cache's answer), kl (from the full cache), ppl "
    "(perplexity). FILEs are any texts, for ppl, kl and agree, or records (.jsonl) in the form of "
    "RULER: `input`, whose last line is the question, and `outputs`, the right answers.",
)(command(with_flags(evaluate, Asked)))

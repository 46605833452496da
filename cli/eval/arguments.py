"""The flags of `minikv eval`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from minikv.cli import completion
from minikv.cli.config import SETTINGS, Interface
from minikv.cli.flags import MODEL, Call, Only, command, list_of
from minikv.settings import ADVANCED, CACHE, OUTPUT, Settings

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(
    name="eval",
    help="minikv eval --tasks facts,needle --policy global-span,snapkv --budget 64,128,256\n\n"
    "Ask the same questions under every policy and budget, the full cache first. Tasks: needle, "
    "facts, followup (six questions in one chat), long (names, numbers, sentences, lists and "
    "passages to copy), agree (with the full cache's answer), kl (from the full cache), ppl "
    "(perplexity). FILEs are LongBench, LongBench v2 or RULER records (.json, .jsonl), asked with "
    "their official prompts, or any texts, for ppl, kl and agree.",
)
@command
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
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="LongBench or RULER records, or texts"),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="comma-separated; default: facts; of FILEs the answers, or the ppl of texts",
            autocompletion=completion.tasks,
        ),
    ] = "",
    length: Annotated[
        str, typer.Option(help="tokens of a document; for needle a comma-separated list")
    ] = "2000",
    count: Annotated[
        int, typer.Option("--count", "-n", help="questions per task (needle: per place)")
    ] = 40,
    questions: Annotated[
        int,
        typer.Option(
            help="questions of facts about each document, each asked as if it were the first",
            rich_help_panel=ADVANCED,
        ),
    ] = 1,
    reuses: Annotated[
        str,
        typer.Option(
            "--reuse",
            help="what later questions of a chat are answered from, comma-separated: once (the "
            "tokens kept for the first one), refresh (all that was read, after reading it again), "
            "blind (the tokens kept before any question was seen), recall (all that was read)",
            rich_help_panel=CACHE,
        ),
    ] = "once",
    truncate: Annotated[
        str,
        typer.Option(
            help="records of FILEs that are too long: none (skip and count them) or middle (cut "
            "the middle out, as LongBench does)",
            rich_help_panel=ADVANCED,
        ),
    ] = "none",
    haystack: Annotated[
        Path | None,
        typer.Option(
            help="put the facts of needle and facts into parts of this text, each of --length "
            "tokens: a code, a word, a name and a place"
        ),
    ] = None,
    needles: Annotated[
        list[str] | None,
        typer.Option(
            "--needle", help="a fact for --haystack instead: 'SENTENCE | QUESTION | ANSWER'"
        ),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="write the results and all answers here")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="write the results here", rich_help_panel=OUTPUT)
    ] = None,
    heat: Annotated[
        list[Path] | None,
        typer.Option(
            "--map",
            help="draw needle by depth and length here, .png or .svg",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="draw quality over budget here, .png or .svg", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    from minikv.cli.eval.command import Asked
    from minikv.cli.eval.command import evaluate as run_evaluation

    outputs = [("json", as_json), ("csv", csv), *(("map", path) for path in heat or [])]
    asked = Asked(
        tasks=tasks or ("" if files else "facts"),
        files=files or [],
        lengths=length,
        count=count,
        questions=questions,
        reuse=reuses,
        truncate=truncate,
        haystack=haystack,
        needles=needles or [],
        outputs=[(kind, path) for kind, path in [*outputs, ("plot", plot)] if path],
    )
    run_evaluation(asked, settings, call.terminal)

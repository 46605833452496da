"""The commands whose flags are many and whose modules are slow to import: `ask`, `chat`, `serve`,
`eval` and `bench`. The docstring of each is its help. The other commands have theirs beside them.

`main` imports this only when one of them is typed, and a command imports what it runs only when it
runs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from minikv.cli.asked import Bench, Evaluation, Question, Talk
from minikv.cli.settings.config import SETTINGS, Interface
from minikv.cli.settings.flags import MODEL, Call, Only, alone, flag, list_of
from minikv.errors import UsageError
from minikv.models import refuse_without_torch
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import ADVANCED, Generation, Settings, settings_of

_SERVED = (
    f"{MODEL} policy budget decode stride kv reuse tier tier_dtype remember "
    "fidelity options seed threads kernels"
)
"""The settings of a server: the others are of one conversation."""
_SERVED_TOKENS = replace(
    SETTINGS["max_tokens"],
    default=4096,
    help="longest answer, in tokens, to a request that sets no limit",
)
"""Clients that write files and long texts send no limit, and would not see where 512 cut them."""


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


@alone
def chat(
    call: Call,
    settings: Settings,
    generation: Generation,
    interface: Annotated[Interface, Only("thoughts quiet plain debug")],
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
def serve(
    call: Call,
    settings: Annotated[Settings, Only(_SERVED)],
    generation: Annotated[Generation, Only(" ".join(settings_of(Generation)), _SERVED_TOKENS)],
    interface: Annotated[Interface, Only("quiet debug")],
    host: Annotated[
        str, flag("--host", "the address to listen at; another than this machine's needs a key")
    ] = "127.0.0.1",
    port: Annotated[
        int, flag("--port", "the port; 0: any free one", min=0, max=65535, metavar="N")
    ] = 8080,
    key: Annotated[
        str,
        flag(
            "--api-key",
            "what requests must bring; the variable keeps it out of the list of processes",
            envvar="MINIKV_API_KEY",
            metavar="KEY",
        ),
    ] = "",
    queue: Annotated[
        int,
        flag(
            "--queue",
            "how many requests may wait while one is answered",
            min=0,
            metavar="N",
            panel=ADVANCED,
        ),
    ] = 8,
) -> None:
    """minikv serve --budget 512

    Answer requests as OpenAI's chat completions have them, one at a time. A conversation that comes
    again is continued from what is in memory, and a document from what is on disk. A request may
    name another policy and budget: its model is then NAME@adakv:512.
    """
    try:
        from minikv.cli.serve.command import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "minikv").partition(".")[0] == "minikv":
            raise
        raise UsageError(
            f"`minikv serve` needs the package {error.name}, which is not installed",
            "pip install 'minikv[serve]'",
        ) from None

    run(settings, generation, call, host=host, port=port, key=key, queue=queue)


@alone
def evaluate(
    call: Call,
    settings: Annotated[
        Settings,
        Only(
            f"{MODEL} threads policy budget decode stride kv tier_dtype options seed",
            list_of("policy", "global-span,adakv,streaming"),
            list_of("budget", "128,256"),
            list_of("decode", "auto"),
            replace(SETTINGS["seed"], help="seed of the documents and of random draws"),
        ),
    ],
    interface: Annotated[Interface, Only("quiet debug")],
    asked: Evaluation,
) -> None:
    """minikv eval --tasks facts,needle --policy global-span,snapkv --budget 64,128,256

    Ask the same questions under every policy and budget, the full cache first. Tasks: needle,
    facts, followup (six questions in one chat), long (names, numbers, sentences, lists and passages
    to copy), agree (with the full cache's answer), kl (from the full cache), ppl (perplexity).
    FILEs are any texts, for ppl, kl and agree, or records (.jsonl) in the form of RULER: `input`,
    whose last line is the question, and `outputs`, the right answers.
    """
    from minikv.cli.eval.command import evaluate as run

    run(asked, settings, call.terminal)


@alone
def bench(
    call: Call,
    settings: Annotated[
        Settings,
        Only(
            "device dtype weights policy budget decode kv kernels threads options",
            list_of("policy", DEFAULT_PROMPT),
            list_of("budget", "512"),
            list_of("decode", "auto"),
        ),
    ],
    interface: Annotated[Interface, Only("quiet debug")],
    asked: Bench,
) -> None:
    """minikv bench decode --shape tinyllama --length 2048,8k --policy adakv,h2o

    Measure decode steps and prompts on random weights of a given shape, in turns with the full
    cache and with transformers if it is installed. Of a step, also the share of its floor: the time
    in which this machine reads the bytes that the step must read.
    """
    refuse_without_torch()
    from minikv.cli.bench.speed import measure

    measure(asked, settings, call.terminal, ["minikv", *sys.argv[1:]])

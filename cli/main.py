"""The command line: flags in, the command's own module called inside a guard.

Nothing here imports torch: `--help`, `--version` and `policies` answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import minikv
from minikv.cli.bench.app import app as bench_app
from minikv.cli.failures import guard
from minikv.cli.terminal import Terminal, hush, open_streams
from minikv.errors import UsageError
from minikv.policies import DEFAULT_BUDGET, DEFAULT_PROMPT, find, prompt_names, step_names

_MODEL, _DOCS, _CACHE = "Model", "Documents", "KV cache"
_SAMPLING, _OUTPUT, _CHATS, _ADVANCED = "Sampling", "Output", "Saved chats", "Advanced"

app = typer.Typer(
    name="minikv",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help='echo "Velgate exports mostly salt." | minikv ask "What does Velgate export?"\n\n'
    "Chat with Llama and Mistral models over long documents, under a KV-cache budget. "
    "Without --model a small bundled model answers, so this runs anywhere.",
)
policies_app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(
    policies_app,
    name="policies",
    short_help="the eviction methods, one line each",
    help="minikv policies show adakv\n\nThe eviction methods, one line each.",
)
app.add_typer(
    bench_app,
    name="bench",
    short_help="how fast it is here, beside what the hardware allows",
    help="minikv bench decode --shape tinyllama --length 2048,8192\n\n"
    "Whole steps and prompts on random weights of a given shape, beside the full cache, "
    "transformers where it is installed, and what this machine's rates allow.",
)
config_app = typer.Typer(
    pretty_exceptions_enable=False, rich_markup_mode="rich", no_args_is_help=True
)
app.add_typer(
    config_app,
    name="config",
    short_help="settings from files and MINIKV_* variables",
    help="minikv config init\n\nSettings from files and MINIKV_* variables.",
)

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE]...", help="text files to ask about; - is standard input"),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="a directory or a hub id; the bundled model by default",
        rich_help_panel=_MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="commit, branch or tag of a hub model", rich_help_panel=_MODEL),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="never use the network", rich_help_panel=_MODEL)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N", rich_help_panel=_MODEL)]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="number format of the weights and the cache", rich_help_panel=_MODEL),
]
Weights = Annotated[
    Literal["auto", "plain", "int8", "int4", "int8+head", "int4+head"],
    typer.Option(
        help="what the matrices of the layers are kept in: auto and plain is the number format of "
        "--dtype, int8 and int4 take a half and a quarter of bfloat16's bytes, on a CPU; with "
        "+head what makes logits (a tied embedding, too) takes eight bits, as four lose too much "
        "there",
        rich_help_panel=_MODEL,
    ),
]
Kernels = Annotated[
    Literal["auto", "triton", "torch"],
    typer.Option(help="who computes attention", rich_help_panel=_ADVANCED),
]
Threads = Annotated[
    int,
    typer.Option(
        help="threads on a CPU; 0: as many as the process may use", rich_help_panel=_ADVANCED
    ),
]
EncodingErrors = Annotated[
    Literal["strict", "replace"],
    typer.Option(help="what invalid bytes in a document do", rich_help_panel=_DOCS),
]
System = Annotated[
    str,
    typer.Option("--system", "-S", help="system prompt, or @FILE", rich_help_panel=_DOCS),
]
PinSystem = Annotated[
    bool,
    typer.Option(
        "--pin-system", help="rows of the system prompt never leave", rich_help_panel=_CACHE
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help=f"what evicts when a prompt was read: {', '.join(prompt_names())}",
        rich_help_panel=_CACHE,
    ),
]
Decode = Annotated[
    str,
    typer.Option(
        help=f"what evicts while the answer is written: auto, {', '.join(step_names())}",
        rich_help_panel=_CACHE,
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        help="rows per KV head and layer (512), a share of the prompt (20%) or bytes over all "
        "layers (64MiB)",
        rich_help_panel=_CACHE,
    ),
]
Stride = Annotated[
    int,
    typer.Option(
        help="read prompts in blocks of so many rows under a step policy (--policy roco), with "
        "eviction after each; 0: whole",
        rich_help_panel=_CACHE,
    ),
]
Kv = Annotated[
    Literal["auto", "int8"],
    typer.Option(
        help="what keys and values are kept in: auto is the number format of --dtype, int8 takes "
        "about half of bfloat16",
        rich_help_panel=_CACHE,
    ),
]
Reuse = Annotated[
    Literal["auto", "refresh", "once", "blind"],
    typer.Option(
        help="what a later question finds: refresh reads everything again for it, once goes on "
        "with the cache of the first, blind evicts documents before a question is seen; auto: "
        "refresh under policies that look at the question, if it takes less than 3 s",
        rich_help_panel=_CACHE,
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        metavar="NAME=VALUE",
        help="a setting of the policy; `minikv policies show NAME`",
        rich_help_panel=_CACHE,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-n", help="longest answer", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        "--temp",
        "-t",
        help="0 always takes the likeliest token",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int, typer.Option(help="draw from the k likeliest; 0: off", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        help="draw from the likeliest that make up this mass; 1: off", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        help="draw from those at least this share as likely as the best; 0: off",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", "-s", help="every draw follows from it", rich_help_panel=_SAMPLING),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="one JSON object: the answer and what it cost", rich_help_panel=_OUTPUT
    ),
]
Stats = Annotated[
    bool,
    typer.Option("--stats", help="print what the turn cost, to stderr", rich_help_panel=_OUTPUT),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="answers and errors only", rich_help_panel=_OUTPUT),
]
Plain = Annotated[
    bool,
    typer.Option("--plain", help="no Markdown, colour or live lines", rich_help_panel=_OUTPUT),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="tracebacks for errors", rich_help_panel=_ADVANCED)
]


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(f"minikv {minikv.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif context.invoked_subcommand not in ("config", "doctor", "policies"):
        terminal = Terminal()
        with guard(terminal, debug=False):
            from minikv.cli import config

            made = config.load()
            for note in made.notes:
                terminal.warn(note)
            config.install(context, made)


@app.command(
    short_help="one question, one answer; made for pipes",
    help='minikv ask "Who runs the mill?" report.txt --budget 256 --stats\n\n'
    "Ask once. What is piped in is a document; `-` as the question reads the whole "
    "message from standard input, verbatim.",
)
def ask(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="the question; - reads the message from stdin")],
    files: Files = None,
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    threads: Threads = 0,
    policy: Policy = DEFAULT_PROMPT,
    budget: Budget = DEFAULT_BUDGET,
    decode: Decode = "auto",
    stride: Stride = 0,
    kv: Kv = "auto",
    reuse: Reuse = "auto",
    options: Options = None,
    system: System = "",
    pin_system: PinSystem = False,
    encoding_errors: EncodingErrors = "strict",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    as_json: Json = False,
    stats: Stats = False,
    quiet: Quiet = False,
    plain: Plain = False,
    kernels: Kernels = "auto",
    debug: Debug = False,
) -> None:
    terminal = Terminal(quiet=quiet, plain=plain)
    with guard(terminal, debug=debug):
        from minikv.cli.ask import ask as run_ask
        from minikv.cli.turn import Limits
        from minikv.loader import Settings

        _quiet_hub(terminal)
        run_ask(
            question,
            files or [],
            Settings(
                model=context.obj.model(model),
                policy=policy,
                budget=budget,
                decode=decode,
                device=device,
                dtype=dtype,
                weights=weights,
                threads=threads,
                kernels=kernels,
                seed=seed,
                options=_pairs(options),
                stride=stride,
                kv=kv,
                revision=revision,
                offline=offline,
                system=_system(system),
                pin_system=pin_system,
                reuse=reuse,
            ),
            Limits(max_tokens, temperature, top_k, top_p, min_p),
            terminal,
            errors=encoding_errors,
            as_json=as_json,
            stats=stats,
            loaders=context.obj.loaders,
        )


@app.command(
    short_help="questions and answers over documents, on a terminal",
    help="minikv chat report.txt --budget 256\n\n"
    "Talk over documents. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the "
    "commands. With FILEs, questions may be piped in, one per line.\n\n"
    "Most policies keep what one question needs. --reuse says what the next one finds, "
    "/refresh reads everything again for it.",
)
def chat(
    context: typer.Context,
    files: Files = None,
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    threads: Threads = 0,
    policy: Policy = DEFAULT_PROMPT,
    budget: Budget = DEFAULT_BUDGET,
    decode: Decode = "auto",
    stride: Stride = 0,
    kv: Kv = "auto",
    reuse: Reuse = "auto",
    options: Options = None,
    system: System = "",
    pin_system: PinSystem = False,
    encoding_errors: EncodingErrors = "strict",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[NAME]",
            help="go on with a saved chat; alone: the last",
            rich_help_panel=_CHATS,
        ),
    ] = None,
    reread: Annotated[
        bool,
        typer.Option(
            "--reread",
            help="with --resume: without its cache; the next question reads everything again",
            rich_help_panel=_CHATS,
        ),
    ] = False,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="do not save this chat", rich_help_panel=_CHATS)
    ] = False,
    no_history: Annotated[
        bool,
        typer.Option("--no-history", help="do not remember what is typed", rich_help_panel=_CHATS),
    ] = False,
    quiet: Quiet = False,
    plain: Plain = False,
    kernels: Kernels = "auto",
    debug: Debug = False,
) -> None:
    terminal = Terminal(quiet=quiet, plain=plain)
    with guard(terminal, debug=debug):
        from minikv.cli import config
        from minikv.cli.chat import chat as run_chat
        from minikv.cli.turn import Limits
        from minikv.loader import Settings

        _quiet_hub(terminal)
        run_chat(
            files or [],
            Settings(
                model=context.obj.model(model),
                policy=policy,
                budget=budget,
                decode=decode,
                device=device,
                dtype=dtype,
                weights=weights,
                threads=threads,
                kernels=kernels,
                seed=seed,
                options=_pairs(options),
                stride=stride,
                kv=kv,
                revision=revision,
                offline=offline,
                system=_system(system),
                pin_system=pin_system,
                reuse=reuse,
            ),
            Limits(max_tokens, temperature, top_k, top_p, min_p),
            terminal,
            errors=encoding_errors,
            resume=resume,
            reread=reread,
            save=not no_save,
            given=config.given(context),
            config=context.obj,
            history=not no_history,
            debug=debug,
        )


@app.command(
    name="eval",
    short_help="what each policy costs in quality, beside the full cache",
    help="minikv eval --tasks facts,needle --policy adakv,snapkv --budget 64,128,256\n\n"
    "Ask the same questions under every policy and budget, the full cache first. Tasks: needle, "
    "facts, followup (six questions in one chat), agree (with the full cache's answer), ppl, loss "
    "(attention lost). FILEs are LongBench or RULER records, in JSON lines.",
)
def evaluate(
    context: typer.Context,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="LongBench or RULER JSONL")
    ] = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="a list with commas; with FILEs none by default")
    ] = "",
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    threads: Threads = 0,
    policy: Annotated[
        str, typer.Option(help="a list with commas", rich_help_panel=_CACHE)
    ] = "adakv,snapkv,streaming",
    budget: Annotated[
        str, typer.Option(help="a list with commas", rich_help_panel=_CACHE)
    ] = "128,256",
    decode: Annotated[
        str, typer.Option(help="a list with commas", rich_help_panel=_CACHE)
    ] = "auto",
    stride: Stride = 0,
    kv: Kv = "auto",
    options: Options = None,
    length: Annotated[
        str, typer.Option(help="tokens of a document; needle takes a list with commas")
    ] = "2000",
    count: Annotated[
        int, typer.Option("--count", "-n", help="questions a task (needle: for each place)")
    ] = 40,
    seed: Annotated[int, typer.Option("--seed", "-s", help="other documents, other draws")] = 0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="write the results here", rich_help_panel=_OUTPUT)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="write the results here", rich_help_panel=_OUTPUT)
    ] = None,
    heat: Annotated[
        list[Path] | None,
        typer.Option("--map", help="a map of the needles, .png or .svg", rich_help_panel=_OUTPUT),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    terminal = Terminal(quiet=quiet)
    with guard(terminal, debug=debug):
        from minikv.cli.evaluation.command import evaluate as run_evaluation
        from minikv.loader import Settings

        _quiet_hub(terminal)
        run_evaluation(
            tasks or ("" if files else "facts"),
            files or [],
            policy,
            budget,
            length,
            count,
            Settings(
                model=context.obj.model(model),
                decode=decode,
                device=device,
                dtype=dtype,
                weights=weights,
                threads=threads,
                seed=seed,
                stride=stride,
                kv=kv,
                options=_pairs(options),
                revision=revision,
                offline=offline,
            ),
            [path for path in (as_json, csv, *(heat or [])) if path],
            terminal,
        )


@app.command(
    short_help="will it fit? from config.json alone",
    help="minikv plan --tokens 100k --budget 1024\n\n"
    "What weights and cache would need under several policies, beside the memory that is free. "
    "Reads config.json only.",
)
def plan(
    context: typer.Context,
    tokens: Annotated[str, typer.Option(help="length of the document: 8192, 100k, 32Ki")],
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    policy: Annotated[str, typer.Option(help="a list with commas", rich_help_panel=_CACHE)] = "",
    budget: Budget = DEFAULT_BUDGET,
    decode: Decode = "auto",
    stride: Stride = 0,
    kv: Kv = "auto",
    options: Options = None,
    max_tokens: MaxTokens = 512,
    memory: Annotated[str, typer.Option(help="that of another machine, as 24GiB")] = "",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    terminal = Terminal()
    with guard(terminal, debug=debug):
        from minikv.cli.plan import plan as run_plan

        _quiet_hub(terminal)
        run_plan(
            context.obj.model(model),
            tokens,
            terminal,
            policy=policy,
            budget=budget,
            decode=decode,
            stride=stride,
            options=_pairs(options),
            dtype=dtype,
            weights=weights,
            kv=kv,
            device=device,
            memory=memory,
            max_tokens=max_tokens,
            revision=revision,
            offline=offline,
            as_json=as_json,
        )


@app.command(
    short_help="what this machine offers, and a self-test",
    help="minikv doctor\n\n"
    "Versions, processor, memory, hub and terminal; then every policy on a tiny random model. "
    "Exit code 1 if a check failed.",
)
def doctor(offline: Offline = False, as_json: Json = False, debug: Debug = False) -> None:
    terminal = Terminal()
    with guard(terminal, debug=debug):
        from minikv.cli.doctor import doctor as run_doctor

        run_doctor(terminal, offline=offline, as_json=as_json)


@config_app.command(help="Which files are read, the strongest first.")
def path() -> None:
    terminal = Terminal()
    with guard(terminal, debug=False):
        from minikv.cli import config

        config.paths(terminal)


@config_app.command(help="Write a commented file with every key.")
def init() -> None:
    terminal = Terminal()
    with guard(terminal, debug=False):
        from minikv.cli import config

        config.init(terminal)


@config_app.command("show", help="Every setting, its value and where it came from.")
def show_config(as_json: Json = False) -> None:
    terminal = Terminal()
    with guard(terminal, debug=False):
        from minikv.cli import config

        made = config.load()
        for note in made.notes:
            terminal.warn(note)
        config.show(made, terminal, as_json=as_json)


@app.command(
    short_help="a page from an exported chat, without a model",
    help="minikv report chat.json -o report.html\n\n"
    "Make a report from what /export chat.json wrote in a chat. No model is needed.",
)
def report(
    source: Annotated[str, typer.Argument(metavar="CHAT.json")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="where to: .html, .md or .json")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that exists")] = False,
) -> None:
    terminal = Terminal()
    with guard(terminal, debug=False):
        from minikv.cli.export.command import report as write

        write(source, out, force, terminal)


@policies_app.callback(invoke_without_command=True)
def policies(context: typer.Context, as_json: Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    terminal = Terminal()
    with guard(terminal, debug=False):
        from minikv.cli import render
        from minikv.cli.ask import to_json
        from minikv.policies import POLICIES

        if as_json:
            terminal.data(to_json([render.policy_record(info) for info in POLICIES.values()]))
        else:
            terminal.data(render.policies_table())


@policies_app.command(help="minikv policies show adakv\n\nOne method: options, defaults, limits.")
def show(
    name: Annotated[str, typer.Argument(help="a name from `minikv policies`")],
    as_json: Json = False,
) -> None:
    terminal = Terminal()
    with guard(terminal, debug=False):
        from minikv.cli import render
        from minikv.cli.ask import to_json
        from minikv.policies import PARTS, POLICIES

        if name in PARTS and name not in POLICIES:
            part = PARTS[name]
            shown = to_json(render.part_record(part)) if as_json else render.part_card(part)
            terminal.data(shown)
            return
        info = POLICIES[name] if name in POLICIES else find(name)
        if as_json:
            terminal.data(to_json(render.policy_record(info)))
        else:
            terminal.data(render.policy_card(info))


def run() -> None:
    """The entry point: like `app()`, with one-line usage errors."""
    open_streams()
    try:
        code = app(args=_resume_alone(sys.argv[1:]), prog_name="minikv", standalone_mode=False)
    except typer.TyperException as error:
        command = " ".join(["minikv", *_command_words(sys.argv[1:])])
        message = error.format_message().replace(": Value error, ", ": ")  # from its validation
        Terminal().fail(message, f"`{command} --help` shows the usage")
        code = error.exit_code
    except typer.Abort:
        code = 130
    except OSError as error:  # from typer's own output, as of --help: ours is guarded
        Terminal().fail(f"cannot write the output: {error.strerror}")
        hush()
        code = 1
    sys.exit(code or 0)


def _resume_alone(arguments: list[str]) -> list[str]:
    """Options with an optional value: --resume without a name is the newest chat, and --json of
    bench without a file is standard output."""
    alone = {"--resume": "--resume="}
    if arguments[:1] == ["bench"]:
        alone["--json"] = "--json=-"
    return [
        alone[word]
        if word in alone and (i + 1 == len(arguments) or arguments[i + 1].startswith("-"))
        else word
        for i, word in enumerate(arguments)
    ]


_COMMANDS = ("ask", "chat", "policies", "eval", "report", "plan", "doctor", "config", "bench")


def _command_words(arguments: list[str]) -> list[str]:
    return arguments[:1] if arguments[:1] and arguments[0] in _COMMANDS else []


def _pairs(options: list[str] | None) -> dict[str, object]:
    from minikv.cli.commands import read_pairs

    return read_pairs(options or [])


def _system(text: str) -> str:
    """The system prompt; @FILE is read from that file."""
    if not text.startswith("@"):
        return text
    from minikv.cli.documents import read_file

    path = text[1:]
    if not path:
        raise UsageError("--system @ names no file")
    return read_file(str(Path(path).expanduser())).text.strip()


def _quiet_hub(terminal: Terminal) -> None:
    """Keep the hub library's bars off where there is no terminal; it reads this at its import."""
    if not terminal.live:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

"""`minikv plan`: will it fit? `forecast` computes the figures and the advice."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated

from minikv.cache.budget import Budget
from minikv.chat.report import amount, size
from minikv.checks import quoted
from minikv.cli.forecast import Forecast, Planner, Suggestion
from minikv.cli.screen.text import clean, grid
from minikv.cli.settings.config import Interface, worded
from minikv.cli.settings.flags import MODEL, Call, Only, alone, flag, json_flag, list_of, read_count
from minikv.errors import UsageError
from minikv.models import refuse_without_torch
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Generation, Settings

_CASES = (
    ("full", 0),
    (DEFAULT_PROMPT, 0),
    ("snapkv", 0),
    ("h2o", 0),
    ("streaming", 0),
    ("streaming", 32),
    ("roco", 32),
)
_OVERVIEW = (("full", 0), (DEFAULT_PROMPT, 0), ("roco", 32))
"""The policies and strides of a plan for several lengths."""

_LENGTHS = (4000, 16_000)
"""The lengths of a plan without --tokens, in addition to the model's whole context."""


@alone
def plan(
    call: Call,
    settings: Annotated[
        Settings,
        Only(
            f"{MODEL} policy budget decode stride kv tier options",
            list_of("policy", ""),
        ),
    ],
    generation: Annotated[Generation, Only("max_tokens")],
    interface: Annotated[Interface, Only("debug")],
    tokens: Annotated[
        str,
        flag(
            "--tokens",
            "length of the document: 8192, 100k, 32Ki; without it 4k, 16k and all that the model "
            "can read",
            metavar="N",
        ),
    ] = "",
    memory: Annotated[
        str, flag("--memory", "plan for another machine with this much memory", metavar="SIZE")
    ] = "",
    as_json: Annotated[
        bool,
        json_flag("the forecast as one JSON object: bytes for each policy, and suggested flags"),
    ] = False,
) -> None:
    """minikv plan -m meta-llama/Llama-3.1-8B-Instruct --memory 24GiB

    How much memory a model and its cache would need for a document of this length under several
    policies, how much is free, and flags with which it fits. Policies come from flags, not from
    minikv.toml or a variable. Downloads config.json only.
    """
    refuse_without_torch()
    given = Budget.size(memory) if memory else None
    if memory and given is None:
        raise UsageError(f"{quoted(memory)} is not a size", "for example --memory 24GiB")
    count = read_count(tokens, "--tokens") if tokens else _LENGTHS[0]
    cases = [(name.strip(), settings.stride) for name in settings.policy.split(",") if name.strip()]
    for name, _ in cases:  # a policy that the user named is refused, not shown with its error
        replace(settings, policy=name).eviction()
    if not cases:
        own = _CASES if tokens else _OVERVIEW
        cases = [
            (name, settings.stride or each) for name, each in own if each or not settings.stride
        ]
    planner = Planner(settings, given)
    lengths = [count]
    if not tokens:
        whole = max(planner.config.max_context - generation.max_tokens, 1)
        lengths = [*(length for length in _LENGTHS if length < whole), whole]
    made = [planner.forecast(length, cases, generation.max_tokens) for length in lengths]
    rows = [row for one in made for row in one.rows]
    if all(row.error and row.suffices for row in rows):
        raise UsageError(rows[0].error, "a larger --budget, or other policies")
    policy = next((name for name, stride in cases if name != "full" and not stride), DEFAULT_PROMPT)
    found = [planner.suggest(one, policy) for one in made]
    if as_json:
        records = [
            asdict(one) | {"suggestion": asdict(hint) if hint else None}
            for one, hint in zip(made, found, strict=True)
        ]
        call.terminal.data(json.dumps(records[0] if tokens else {"lengths": records}))
        return
    for note in made[0].notes:
        call.terminal.warn(worded(note))
    hints, width = [hint for hint in found if hint], call.terminal.columns
    text = shown(made, hints, width, whole=not tokens)
    call.terminal.data(text, fold=True)


# -- text -----------------------------------------------------------------------------------


def shown(
    made: Sequence[Forecast], suggestions: Sequence[Suggestion], width: int, *, whole: bool
) -> str:
    """The forecasts of one model as text, with tables of at most `width` columns if it is not 0.
    whole: the last one is for all that the model can read."""
    one, several = made[0], len(made) > 1
    lines = [f"{name:<10}{text}" for name, text in _facts(made, whole=whole)]
    for each in made:
        lines.append("")
        if several:
            every = " (the whole context)" if whole and each is made[-1] else ""
            lines.append(f"{amount(each.tokens, 'token')}{every}")
        lines += _table(each, width)
    least, most = size(one.workspace), size(made[-1].workspace)
    space = f"about {least}" if least == most else f"about {least} to {most}"
    foot = (
        "READING: the most KV at once while the prompt is read. WRITING: KV while the answer "
        f"is written. NEEDS: with the weights and {space} of work space."
    )
    lines += ["", foot]
    if suggestions:
        lines += ["", *(_advice(hint, one.model) for hint in suggestions)]
    return "\n".join(lines)


def _facts(made: Sequence[Forecast], *, whole: bool) -> Iterator[tuple[str, str]]:
    """(name, text) about the model, the machine, and facts that all policies share."""
    one = made[0]

    def each(text: Callable[[Forecast], str]) -> str:
        return ", ".join(map(text, made))

    yield "model", f"{one.model} · {one.family} · {_billions(one.parameters)} parameters"
    yield "weights", f"{size(one.weights)} in {one.dtype}{_kept(one.kept)}"
    context = f"{one.positions:,} positions"
    if not whole and one.suffices:
        context += f", enough for {amount(one.tokens, 'token')}"
    elif not whole:
        too_few = f"too few for {amount(one.tokens, 'token')} and an answer"
        context += f", {too_few}; eviction does not extend them"
    yield "context", context
    full = each(lambda made: f"{size(made.full)} for {made.tokens:,}")
    yield "cache", f"{size(one.token_bytes)} a token, {full} without eviction"
    free = "not known" if one.free is None else f"{size(one.free)} free"
    yield "memory", f"{free} ({one.memory})"
    *others, last = [f"{made.tokens:,}" for made in made]
    lengths = f"{', '.join(others)} or {last}" if others else last
    read = "1 token" if lengths == "1" else f"{lengths} tokens"
    room = one.positions > max(made.tokens for made in made)
    answer = f"write {one.answer:,}" if room else "no position left to write an answer"
    yield "plan", f"read {read}, {answer}; budget {one.budget}"
    if any(made.tier for made in made):
        tier = each(
            lambda made: f"{size(made.tier)} (in int8 {size(made.tier_int8)}) for {made.tokens:,}"
        )
        yield "tier", f"{tier}, which a later question reads; without it, all tokens again"
    if any(made.remembered for made in made):
        kept = each(lambda made: f"{size(made.remembered)} for {made.tokens:,}")
        yield "remember", f"{kept} on disk, so that the document is not read twice (--remember)"
    for tokens, row in ((one.tokens, row) for one in made for row in one.rows if row.again):
        read = f"{row.label} reads {amount(row.again, 'token')} more to score {tokens:,}"
        file = f"{size(row.file)} in a file and " if row.file else ""
        yield "scoring", f"{read}, and holds keys and values: {file}{size(row.ram)} of RAM"


def _advice(hint: Suggestion, model: str) -> str:
    """The command to type, or that nothing helps."""
    from minikv.chat.fitting import fit_words

    needs = f"needs {size(hint.needs)} of {size(hint.free)}"
    if not hint.fits:
        return (
            f"{amount(hint.tokens, 'token')} do not fit: {hint.flags or '--budget auto'} "
            f"still {needs}"
        )
    chosen = "" if model == "bundled" else f"-m {shlex.quote(clean(model))} "
    flags = f"{hint.flags} " if hint.flags else ""
    kept = fit_words(hint.rows or 0, hint.tokens)
    return f"{amount(hint.tokens, 'token')}: minikv chat {chosen}{flags}FILE ({needs}; {kept})"


def _table(made: Forecast, width: int) -> list[str]:
    """A line for each policy."""
    # If --budget auto evicts nothing, every policy is like full.
    rows = [row for row in made.rows if row.error or row.rows or row.policy == "full"]
    rows = rows or list(made.rows[:1])
    table, wrong = [("POLICY", "READING", "WRITING", "NEEDS", "FITS")], []
    for row in rows:
        known = "unknown" if row.fits is None else "yes" if row.fits else "no"
        fits = known if made.suffices else "no, context"
        if row.error:
            wrong.append(f"{row.label}: {row.error}")
        else:
            sizes = size(row.reading), size(row.writing), size(row.needs)
            table.append((row.label, *sizes, fits))
    return [*grid(table, "<>>><", width).split("\n"), *wrong]


def _kept(form: str) -> str:
    """The value of --weights as text, to put after the number format of the rest."""
    layers, _, head = form.partition("+")
    if layers not in ("plain", "int8", "int4"):
        return f", most of it in the file's {form}"
    return (
        "" if layers == "plain" else f", the layers in {layers}{', the head in int8' * bool(head)}"
    )


def _billions(count: int) -> str:
    for scale, sign in ((10**9, "B"), (10**6, "M")):
        if count >= scale:
            return f"{count / scale:.2f} {sign}"
    return f"{count:,}"

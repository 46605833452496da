"""`minikv plan`: will it fit? The figures are those of `forecast`."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.cli.forecast import Forecast, Row, forecast
from minikv.cli.terminal import Terminal
from minikv.cli.values import read_count
from minikv.errors import UsageError
from minikv.settings import Settings

_CASES = (
    ("full", 0),
    ("adakv", 0),
    ("snapkv", 0),
    ("h2o", 0),
    ("streaming", 0),
    ("streaming", 32),
    ("roco", 32),
)
_NARROW = 74  # columns below which a row of the table gets lines of its own


def plan(
    settings: Settings,
    tokens: str,
    terminal: Terminal,
    *,
    memory: str = "",
    max_tokens: int = 512,
    as_json: bool = False,
) -> None:
    """Print what each policy of the list `settings.policy` (with commas; "" is a selection) would
    need.

    `tokens` is "100k" or the like; `memory` ("24GiB") plans for another machine than this one.
    Raises UsageError, and ModelError where the model's configuration cannot be had.
    """
    count = read_count(tokens)
    stride = settings.stride
    room = read_bytes(memory) if memory else None
    names = [name.strip() for name in settings.policy.split(",") if name.strip()]
    cases = [(name, stride) for name in names]
    if not cases:
        cases = [(name, own) for name, own in _CASES if not stride or own]
        cases = [(name, stride or own) for name, own in cases]
    choices: list[EvictionConfig | UsageError] = []
    for name, every in cases:
        try:
            choices.append(replace(settings, policy=name, stride=every).eviction())
        except UsageError as error:
            if names:
                raise
            choices.append(error)  # a policy of the selection that does not go with the other flags
    made = forecast(settings, count, cases, choices, room=room, answer=max_tokens)
    failed = [row for row in made.rows if row.error]
    if len(failed) == len(made.rows):
        raise UsageError(failed[0].error, "a larger --budget, or other policies")
    if as_json:
        terminal.data(json.dumps(asdict(made)))
    else:
        for note in made.notes:
            terminal.warn(note)
        terminal.data(shown(made, shutil.get_terminal_size().columns))


def read_bytes(text: str) -> int:
    """ "24GiB" or "80GB" as bytes. Raises UsageError."""
    from minikv.cache.budget import Budget

    try:
        budget = Budget.parse(text)
    except UsageError:
        budget = None
    if budget is None or budget.unit != "bytes":
        raise UsageError(f"cannot read the memory size {text!r}", "for example --memory 24GiB")
    return int(budget.value)


# -- text -----------------------------------------------------------------------------------


def shown(made: Forecast, width: int) -> str:
    """The forecast for people, in lines of at most `width` characters where words allow."""
    context = f"{made.positions:,} positions, enough for {made.tokens:,} tokens"
    if not made.suffices:
        context = (
            f"{made.positions:,} positions, too few for {made.tokens:,} tokens; eviction does not "
            "extend them"
        )
    free = "not known" if made.free is None else f"{size(made.free)} free"
    facts = [
        ("model", f"{made.model} · {made.family} · {_billions(made.parameters)} parameters"),
        ("weights", f"{size(made.weights)} in {made.dtype}" + _kept(made.kept)),
        ("context", context),
        (
            "cache",
            f"{size(made.token_bytes)} a token, {size(made.full)} for {made.tokens:,} "
            "without eviction",
        ),
        ("memory", f"{free} ({made.memory})"),
        ("plan", f"read {made.tokens:,} tokens, write {made.answer:,}; budget {made.budget}"),
    ]
    lines = []
    for name, text in facts:
        lines += textwrap.wrap(f"{name:<9}{text}", max(width, 20), subsequent_indent=" " * 9)
    lines.append("")
    cells = [(row, _fits(row, made.suffices)) for row in made.rows]
    lines += _stacked(cells, width) if width < _NARROW else _table(cells, width)
    lines.append("")
    foot = (
        "READING: the most at once while the prompt is read. WRITING: the pool while the answer "
        f"is written. NEEDS: with the weights and about {size(made.workspace)} of work space."
    )
    lines += textwrap.wrap(foot, max(min(width, 80), 20))
    return "\n".join(lines)


def _table(rows: Sequence[tuple[Row, str]], width: int) -> list[str]:
    wide = max([len("POLICY"), *(len(row.label) for row, _ in rows)])
    lines = [f"{'POLICY':<{wide}}  {'KV READING':>11}  {'KV WRITING':>11}  {'NEEDS':>11}  FITS"]
    for row, fits in rows:
        if row.error:
            lines += textwrap.wrap(f"{row.label}: {row.error}", width, subsequent_indent="    ")
            continue
        cells = f"{size(row.reading):>11}  {size(row.writing):>11}  {size(row.needs):>11}  {fits}"
        lines.append(f"{row.label:<{wide}}  {cells}")
    return lines


def _stacked(rows: Sequence[tuple[Row, str]], width: int) -> list[str]:
    lines = []
    for row, fits in rows:
        cells = (
            f"KV reading {size(row.reading)}, writing {size(row.writing)}; needs "
            f"{size(row.needs)}, fits: {fits}"
        )
        text = f"{row.label}: {row.error or cells}"
        lines += textwrap.wrap(text, max(width, 20), subsequent_indent="  ")
    return lines


def _fits(row: Row, context: bool) -> str:
    if not context:
        return "no, context"
    return "unknown" if row.fits is None else "yes" if row.fits else "no"


def _kept(form: str) -> str:
    """What --weights says, after the number format of the rest."""
    layers, _, head = form.partition("+")
    if layers == "plain":
        return ""
    if layers == "int8":
        return ", the layers and the head in int8" if head else ", the layers in int8"
    return f", the layers in {layers}" + (", the head in int8" if head else "")


def _billions(count: int) -> str:
    for scale, sign in ((10**9, "B"), (10**6, "M")):
        if count >= scale:
            return f"{count / scale:.2f} {sign}"
    return f"{count:,}"

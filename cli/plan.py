"""`minikv plan`: will it fit? The figures are those of `forecast`, the advice is `suggestion`'s."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.checks import quoted
from minikv.cli.forecast import Forecast, Row, config_folder, forecast
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean, folded
from minikv.cli.suggestion import Suggestion, suggest
from minikv.cli.values import read_count
from minikv.errors import UsageError
from minikv.models import refuse_without_torch
from minikv.policies import DEFAULT_PROMPT
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
_OVERVIEW = (("full", 0), (DEFAULT_PROMPT, 0), ("roco", 32))
"""The cases of a plan for several lengths."""

_LENGTHS = (4000, 16_000)
"""Tokens that a plan without --tokens is for, beside the model's whole context."""

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
    need, and flags with which it fits.

    `tokens` is "100k" or the like, "" some lengths up to all that the model can read; `memory`
    ("24GiB") plans for another machine than this one.
    Raises UsageError, and ModelError where the model's configuration cannot be had. A model without
    enough positions is no error: the forecast says so.
    """
    refuse_without_torch()
    room = read_bytes(memory) if memory else None
    count = read_count(tokens) if tokens else _LENGTHS[0]
    names, cases = _cases(settings, _CASES if tokens else _OVERVIEW)
    choices = _choices(settings, cases, strict=bool(names))
    folder = config_folder(settings)

    def made_for(length: int) -> Forecast:
        return forecast(
            settings, length, cases, choices, room=room, answer=max_tokens, folder=folder
        )

    made = [made_for(count)]
    if not tokens:
        whole = max(made[0].positions - max_tokens, 1)
        lengths = [length for length in _LENGTHS if length < whole]
        made = [*(made if lengths else []), *map(made_for, [*lengths[1:], whole])]
    rows = [row for one in made for row in one.rows]
    if all(row.error and row.suffices for row in rows):
        raise UsageError(rows[0].error, "a larger --budget, or other policies")
    policy = next((name for name, stride in cases if name != "full" and not stride), DEFAULT_PROMPT)
    found = [suggest(settings, one, policy, room, folder) for one in made]
    if as_json:
        records = [
            asdict(one) | {"suggestion": asdict(hint) if hint else None}
            for one, hint in zip(made, found, strict=True)
        ]
        terminal.data(json.dumps(records[0] if tokens else {"lengths": records}))
        return
    for note in made[0].notes:
        terminal.warn(note)
    terminal.data(shown(made, [hint for hint in found if hint], _width(), whole=not tokens))


def _cases(
    settings: Settings, selection: Sequence[tuple[str, int]]
) -> tuple[list[str], list[tuple[str, int]]]:
    """The policies that the user named, and those to plan for, each with its stride."""
    stride = settings.stride
    names = [name.strip() for name in settings.policy.split(",") if name.strip()]
    if names:
        return names, [(name, stride) for name in names]
    own = [(name, own) for name, own in selection if not stride or own]
    return names, [(name, stride or own) for name, own in own]


def _choices(
    settings: Settings, cases: Sequence[tuple[str, int]], *, strict: bool
) -> list[EvictionConfig | UsageError]:
    """The settings of each case. Not `strict`: an error in its place, for a policy that does not go
    with the other flags."""
    choices: list[EvictionConfig | UsageError] = []
    for name, every in cases:
        try:
            choices.append(replace(settings, policy=name, stride=every).eviction())
        except UsageError as error:
            if strict:
                raise
            choices.append(error)
    return choices


def _width() -> int:
    return shutil.get_terminal_size().columns


def read_bytes(text: str) -> int:
    """ "24GiB" or "80GB" as bytes. Raises UsageError."""
    from minikv.cache.budget import Budget

    found = Budget.size(text)
    if found is None:
        raise UsageError(
            f"cannot read the memory size {quoted(text)}", "for example --memory 24GiB"
        )
    return found


# -- text -----------------------------------------------------------------------------------


def shown(
    made: Sequence[Forecast], suggestions: Sequence[Suggestion], width: int, *, whole: bool
) -> str:
    """The forecasts of one model for people, in lines of at most `width` characters where words
    allow. `whole`: the last is for all that the model can read."""
    one = made[0]
    free = "not known" if one.free is None else f"{size(one.free)} free"
    several = len(made) > 1
    *others, last = [f"{each.tokens:,}" for each in made]
    lengths = f"{', '.join(others)} or {last}" if others else last
    facts = [
        ("model", f"{one.model} · {one.family} · {_billions(one.parameters)} parameters"),
        ("weights", f"{size(one.weights)} in {one.dtype}" + _kept(one.kept)),
        *_disk(one.disk),
        ("context", _context(made, whole=whole)),
        ("cache", _cache(made)),
        ("memory", f"{free} ({one.memory})"),
        ("plan", f"read {lengths} tokens, write {one.answer:,}; budget {one.budget}"),
        *_auto(made),
        *_tier(made),
        *_scoring(made),
    ]
    lines = []
    for name, text in facts:
        lines += folded(f"{name:<9}{text}", max(width, 20), " " * 9, whole=True)
    for each in made:
        # Where --budget auto evicts nothing, every policy is as full.
        rows = [row for row in each.rows if row.error or row.rows or row.policy == "full"]
        cells = [(row, _fits(row, each.suffices)) for row in rows or each.rows[:1]]
        lines.append("")
        if several:
            every = " (the whole context)" if whole and each is made[-1] else ""
            lines.append(f"{each.tokens:,} tokens{every}")
        lines += _stacked(cells, width) if width < _NARROW else _table(cells, width)
    lines.append("")
    foot = (
        "READING: the most at once while the prompt is read. WRITING: the pool while the answer "
        f"is written. NEEDS: with the weights and {_workspace(made)} of work space."
    )
    lines += folded(foot, max(min(width, 80), 20), whole=True)
    if suggestions:
        lines.append("")
    for hint in suggestions:
        lines += folded(_advice(hint, one.model), max(width, 20), "  ", whole=True)
    return "\n".join(lines)


def _disk(packed: int) -> list[tuple[str, str]]:
    if not packed:
        return []
    return [("disk", f"{size(packed)} of packed weights, from the first start on (--keep-packed)")]


def _context(made: Sequence[Forecast], *, whole: bool) -> str:
    positions = f"{made[0].positions:,} positions"
    if whole:
        return positions
    if made[0].suffices:
        return f"{positions}, enough for {made[0].tokens:,} tokens"
    return f"{positions}, too few for {made[0].tokens:,} tokens; eviction does not extend them"


def _cache(made: Sequence[Forecast]) -> str:
    full = ", ".join(f"{size(each.full)} for {each.tokens:,}" for each in made)
    return f"{size(made[0].token_bytes)} a token, {full} without eviction"


def _auto(made: Sequence[Forecast]) -> list[tuple[str, str]]:
    """What --budget auto keeps, in the words that a chat begins with."""
    from minikv.chat.fitting import fit_words

    found = [
        (one, next((row for row in one.rows if row.policy != "full" and not row.error), None))
        for one in made
        if one.budget == "auto" and one.free is not None and one.suffices
    ]
    return [
        ("auto", f"{one.tokens:,} tokens: {fit_words(row.rows or 0, one.tokens)}")
        for one, row in found
        if row is not None and row.fits
    ]


def _tier(made: Sequence[Forecast]) -> list[tuple[str, str]]:
    """What all that was read takes, and what a later question costs with it and without."""
    tiers = [each.tier for each in made if each.tier is not None]
    if not tiers:
        return []
    ram = ", ".join(f"{size(tier.ram_same)} for {tier.again:,}" for tier in tiers)
    file = ", ".join(size(tier.same) for tier in tiers)
    half = ", ".join(size(tier.ram_int8) for tier in tiers)
    reads = ", ".join(f"{size(tier.same)} of keys and values for {tier.again:,}" for tier in tiers)
    return [
        ("tier", f"in RAM {ram}, in int8 {half}; in a file about {file}"),
        ("later", f"a later question reads {reads}; without a tier, all tokens again"),
    ]


def _scoring(made: Sequence[Forecast]) -> list[tuple[str, str]]:
    """What policies cost that read everything twice."""
    lines = []
    for at, row in enumerate(made[0].rows):
        each = [(one.tokens, one.rows[at]) for one in made if one.rows[at].again]
        if not each:
            continue
        read = ", ".join(
            f"{row.again:,} tokens more for {tokens:,} ({(tokens + row.again) / tokens:.1f} times)"
            for tokens, row in each
        )
        held = ", ".join(_held(row) for _, row in each)
        lines.append(("scoring", f"{row.label} reads {read}, and holds all keys and values {held}"))
    return lines


def _held(row: Row) -> str:
    """Where what is read twice is until it is scored, and what the other place would take."""
    if row.file:
        return f"in a file ({size(row.file)}), of which RAM has {size(row.ram)} at a time"
    return f"in RAM: {size(row.ram)} (with --tier file {size(row.file_ram)})"


def _workspace(made: Sequence[Forecast]) -> str:
    least, most = size(made[0].workspace), size(made[-1].workspace)
    return f"about {least}" if least == most else f"about {least} to {most}"


def _advice(hint: Suggestion, model: str) -> str:
    """What to type, or that nothing helps."""
    from minikv.chat.fitting import fit_words

    needs = f"needs {size(hint.needs)} of {size(hint.free)}"
    if not hint.fits:
        return f"{hint.tokens:,} tokens do not fit: {hint.flags or '--budget auto'} still {needs}"
    chosen = "" if model == "bundled" else f"-m {shlex.quote(clean(model))} "
    flags = f"{hint.flags} " if hint.flags else ""
    kept = fit_words(hint.rows or 0, hint.tokens)
    return f"{hint.tokens:,} tokens: minikv chat {chosen}{flags}FILE ({needs}; {kept})"


def _table(rows: Sequence[tuple[Row, str]], width: int) -> list[str]:
    wide = max([len("POLICY"), *(len(row.label) for row, _ in rows)])
    lines = [f"{'POLICY':<{wide}}  {'KV READING':>11}  {'KV WRITING':>11}  {'NEEDS':>11}  FITS"]
    for row, fits in rows:
        if row.error:
            lines += folded(f"{row.label}: {row.error}", width, "    ", whole=True)
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
        lines += folded(text, max(width, 20), "  ", whole=True)
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

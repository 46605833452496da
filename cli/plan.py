"""`minikv plan`: what a document of so many tokens will need, from config.json alone.

The figures for the cache come from the engine itself: a real `KVCache` begins the prompt on
torch's meta device, where tensors have sizes but no memory. What is only made during a prompt, and
the network's own work space, is added by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError
from minikv.settings import Settings

if TYPE_CHECKING:
    import torch

    from minikv.cache.kv_cache import KVCache
    from minikv.models.config import ModelConfig

_CASES = (
    ("full", 0),
    ("adakv", 0),
    ("snapkv", 0),
    ("h2o", 0),
    ("streaming", 0),
    ("streaming", 32),
    ("roco", 32),
)
_SCALES = {"": 1, "k": 10**3, "ki": 1 << 10, "m": 10**6, "mi": 1 << 20}
_MOST = 1 << 30  # tokens
_NARROW = 74  # columns below which a row of the table gets lines of its own
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. Bytes of the KV cache; `needs` adds weights and work space.

    reading: the most at once while the prompt is read. writing: the pool while the answer is
    written. held: what its rows hold at the end of the answer, what the policy stores about them
    included. fits: None where free memory is not known. `error` says why there are no figures.
    """

    policy: str
    decode: str
    stride: int
    rows: int | None = None
    reading: int = 0
    writing: int = 0
    held: int = 0
    needs: int = 0
    fits: bool | None = None
    error: str = ""

    @property
    def label(self) -> str:
        """What to type for it."""
        return f"{self.policy} --stride {self.stride}" if self.stride else self.policy


@dataclass(frozen=True, slots=True)
class Forecast:
    """A model, a prompt of `tokens` tokens and an answer of `answer`. Bytes.

    kept: what matrices are kept in, as --weights has it, or plain.
    workspace: an estimate of what the network itself needs at once, beside weights and cache.
    """

    model: str
    family: str
    dtype: str
    kept: str
    parameters: int
    weights: int
    positions: int
    suffices: bool
    tokens: int
    answer: int
    budget: str
    token_bytes: int
    full: int
    workspace: int
    loading: int  # the most that loading the weights holds at once
    memory: str
    free: int | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


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
            choices.append(error)  # one of the selection that the other flags do not suit
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


def read_count(text: str) -> int:
    """ "100k", "32Ki", "1.5M" or "8192" as a number of tokens. Raises UsageError."""
    found = re.fullmatch(r"([\d,_]*\d(?:\.\d+)?)\s*([kKmM]i?)?", text.strip())
    if found:
        number = Fraction(found[1].replace(",", "").replace("_", ""))
        number *= _SCALES[(found[2] or "").lower()]
        if number.denominator == 1 and 1 <= number <= _MOST:
            return int(number)
    raise UsageError(
        f"cannot read the number of tokens {text!r}", "for example --tokens 8192, 100k or 32Ki"
    )


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


def forecast(
    settings: Settings,
    tokens: int,
    cases: Sequence[tuple[str, int]],
    choices: Sequence[EvictionConfig | UsageError],
    *,
    room: int | None = None,
    answer: int = 512,
) -> Forecast:
    """The figures. `cases` are names and strides, `choices` what they were read to; an error
    among them becomes a row without figures. `room` is the memory of another machine. Raises
    ModelError."""
    import torch

    from minikv.models.config import ModelConfig
    from minikv.models.weights import (
        check_form,
        form_notes,
        free_memory,
        loading_bytes,
        weight_bytes,
    )

    folder = config_folder(settings.model, revision=settings.revision, offline=settings.offline)
    config = ModelConfig.from_folder(folder)
    notes = list(config.notes)
    where = _device(settings.device, here=room is None)
    form, dtype = settings.weights, settings.dtype
    packed = form not in ("auto", "plain")
    kind = _dtype(folder, "bfloat16" if packed and dtype == "auto" else dtype, where, notes)
    check_form(form, where, kind)
    notes += form_notes(config, form)
    weights = weight_bytes(config, kind, form)
    load = loading_bytes(config, kind, form)
    space = workspace(config, tokens, kind.itemsize, cuda=where.type == "cuda")
    if room is None:
        free = free_memory(where)
        place = torch.cuda.get_device_name(where) if where.type == "cuda" else "this machine"
    else:
        free, place = room, "as given"
    beside = weights + space, load
    rows = [
        _row(name, stride, choice, config, (kind, settings.kv), tokens, answer, beside, free)
        for (name, stride), choice in zip(cases, choices, strict=True)
    ]
    each = config.kv_row_bytes(kind.itemsize)
    windows = [min(tokens, window) if window else tokens for window in config.windows]
    return Forecast(
        model=settings.model or "bundled",
        family=config.family,
        dtype=str(kind).removeprefix("torch."),
        kept=form if packed else "plain",
        parameters=config.parameters,
        weights=weights,
        positions=config.max_context,
        suffices=tokens < config.max_context,
        tokens=tokens,
        answer=answer,
        budget=settings.budget,
        token_bytes=each,
        full=sum(windows) * each // config.layers,
        workspace=space,
        loading=load,
        memory=place,
        free=free,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _row(
    name: str,
    stride: int,
    eviction: EvictionConfig | UsageError,
    config: ModelConfig,
    kinds: tuple[torch.dtype, str],
    tokens: int,
    answer: int,
    beside: tuple[int, int],
    free: int | None,
) -> Row:
    """kinds: dtype and --kv; beside: bytes while it runs besides the cache, and at loading."""
    if isinstance(eviction, UsageError):
        return Row(name, "", stride, error=f"{eviction}; {eviction.hint}")
    try:
        kv = begun(eviction, config, kinds[0], tokens, answer, kinds[1])
    except UsageError as error:
        return Row(name, eviction.decode, stride, error=f"{error}; {error.hint}")
    reading, held = peak(kv, eviction, tokens), held_bytes(kv, eviction, tokens, answer)
    writing = kv.stats().allocated_bytes
    needs = max(beside[0] + max(reading, writing), beside[1])
    return Row(
        name,
        eviction.decode,
        stride,
        kv.stats().budget_rows,
        reading,
        writing,
        held,
        needs,
        None if free is None else needs <= free,
    )


def begun(
    eviction: EvictionConfig,
    config: ModelConfig,
    dtype: torch.dtype,
    tokens: int,
    answer: int,
    kept: str = "auto",
) -> KVCache:
    """The engine's cache at the beginning of a first prompt, without memory. `kept` is --kv.
    Raises UsageError."""
    import torch

    from minikv.cache.kv_cache import KVCache
    from minikv.cache.stats import Shape

    shape = Shape(
        config.layers,
        config.kv_heads,
        config.heads,
        config.head_dim,
        config.windows,
        config.max_context,
    )
    prompt, step, budget, stride = eviction.policies()
    kv = KVCache(
        shape,
        prompt,
        step,
        budget,
        dtype=dtype,
        device="meta",
        stride=stride,
        kv=torch.int8 if kept == "int8" else None,
    )
    kv.begin(tokens, min(answer, max(1, config.max_context - tokens)))
    return kv


def peak(kv: KVCache, eviction: EvictionConfig, tokens: int) -> int:
    """Bytes of KV cache that exist at once while the prompt is read, as the turn record counts."""
    from minikv.policies.base import ALL

    shape, arena, prompt, step = kv.shape, kv.arena, kv.prompt_policy, kv.step_policy
    scores = kv.stats().allocated_bytes - arena.nbytes  # of a step, one a row
    state = arena.row_nbytes(arena.extra)
    heads, reading = shape.kv_heads, kv.first
    if eviction.stride:
        # One layer at cap + stride rows, whose positions are counted in 64 bits.
        rows = kv.stats().budget_rows
        assert rows is not None
        wide = 2 * shape.head_dim * kv.dtype.itemsize + 8 + state
        return arena.nbytes + heads * (rows + eviction.stride) * wide + scores
    assert reading is not None
    totals = reading.plan.totals
    evicts = totals is not None and any(
        heads * _visible(tokens, window) > total
        for window, total in zip(shape.windows, totals, strict=True)
    )
    handed = step.observe if step is not None else 0
    observed = (prompt.evidence.observe if prompt is not None else 0) or handed
    scratch = 0
    if observed and (observed == ALL or evicts or handed):
        scratch = 4 * heads * tokens * (shape.heads // heads + 1)  # mass and squares, float32
        if observed != ALL:
            scratch += heads * tokens * state
    return reading.peak + scratch + scores


def held_bytes(kv: KVCache, eviction: EvictionConfig, tokens: int, steps: int) -> int:
    """Bytes of the rows held when `steps` tokens of the answer have been fed. Of layers with a
    sliding window an upper bound: rows slide out one by one."""
    shape, reading, rows = kv.shape, kv.first, kv.stats().budget_rows or 0
    totals = reading.plan.totals if reading is not None else None
    if eviction.stride:
        totals = [shape.kv_heads * rows] * shape.layers
    count = 0
    for layer, window in enumerate(shape.windows):
        seen = _visible(tokens, window)
        if eviction.stride and window is not None:  # rows leave when the next block begins
            seen = min(tokens, window - 1 + (tokens - 1) % eviction.stride + 1)
        after = shape.kv_heads * seen
        bound = max(after, shape.kv_heads * rows)
        if totals is not None:
            after, bound = min(totals[layer], after), totals[layer]
        if kv.step_policy is None:
            bound = after + shape.kv_heads * steps
        most = shape.kv_heads * _visible(tokens + steps, window)
        count += min(max(most, after), bound)
    return count * kv.arena.row_nbytes()


def workspace(config: ModelConfig, tokens: int, itemsize: int, *, cuda: bool) -> int:
    """About what the network needs at once to read, beside weights and cache: the residual stream
    in full, and of one chunk the widest intermediates, twice."""
    from minikv.models.llama import CPU_BYTES, CUDA_ROWS

    rows = min(tokens, CUDA_ROWS if cuda else CPU_BYTES // itemsize)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = 2 * (q + 2 * kv) + 2 * q
    chunk = rows * (2 * config.mlp + attention + 4 * config.hidden) * itemsize
    return tokens * config.hidden * itemsize + chunk + 4 * config.vocab


def _visible(tokens: int, window: int | None) -> int:
    """Rows of a head that the next token could still see."""
    return tokens if window is None else min(tokens, window - 1)


def config_folder(model: str | None, *, revision: str | None, offline: bool) -> Path:
    """Where config.json is: the directory, the hub's cache, or fetched alone. Raises ModelError."""
    from minikv.models import BUNDLED
    from minikv.models.hub import resolve

    if model is None:
        return BUNDLED
    if Path(model).expanduser().exists() or _HUB_ID.fullmatch(model) is None or ".." in model:
        return resolve(model, revision=revision, offline=True).folder
    return _fetched(model, revision, offline)


def _fetched(repo: str, revision: str | None, offline: bool) -> Path:
    import os

    from minikv.models.errors import ModelUnavailable

    offline = offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    import huggingface_hub
    from huggingface_hub import errors

    names = ("config.json", "params.json")
    try:
        for name in names:
            found = huggingface_hub.try_to_load_from_cache(repo, name, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
        if offline:
            raise ModelUnavailable(
                f"{repo} is not in the local cache, and offline mode is on",
                "run once without --offline; only config.json is fetched",
            )
        for name in names:
            try:
                path = huggingface_hub.hf_hub_download(repo, name, revision=revision)
            except errors.EntryNotFoundError as error:
                if isinstance(error, errors.LocalEntryNotFoundError):
                    raise
                continue
            return Path(path).parent
        raise ModelUnavailable(f"{repo} has no config.json: it holds no model")
    except ModelUnavailable:
        raise
    except errors.GatedRepoError:  # before RepositoryNotFoundError, which it is as well
        raise ModelUnavailable(
            f"{repo} is gated: its owner must grant you access",
            f"accept the terms at https://huggingface.co/{repo} and log in with `hf auth login`",
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise ModelUnavailable(
            f"{repo} not found on the hub (or private, or without such a revision)",
            "check the spelling; for a private model log in with `hf auth login`",
        ) from None
    except Exception as error:  # the HTTP library's own; its text may hold addresses with tokens
        raise ModelUnavailable(
            f"{repo}: config.json could not be fetched ({type(error).__name__})",
            "check the network; a directory with a config.json works without one",
        ) from None


def _device(name: str, *, here: bool) -> torch.device:
    """`here`: it must exist in this machine."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if here and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no CUDA device for {name!r}", "--memory 24GiB plans for another machine")
    return device


def _dtype(folder: Path, name: str, device: torch.device, notes: list[str]) -> torch.dtype:
    """What the loader would choose; from the configuration, as there may be no weights yet."""
    import torch

    from minikv.models.hub import read_json

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        return known[name]
    stored: object = None
    if (folder / "config.json").exists():
        raw = read_json(folder / "config.json")
        stored = raw.get("dtype", raw.get("torch_dtype"))
    if not isinstance(stored, str) or stored not in known:
        notes.append("the configuration names no number format: bfloat16 is assumed (--dtype)")
        stored = "bfloat16"
    if stored == "float16" and device.type == "cpu":
        stored = "float32"  # as the loader does
    return known[stored]


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

"""The figures of `minikv plan`: the memory that a document will need, from config.json alone.

The figures for the cache are those of `minikv.chat.fitting`, and what the network itself needs is
`minikv.loader.workspace`: a chat decides with both what `--budget auto` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.cache.stats import full_cache_bytes
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.wording import worded
from minikv.errors import ContextError, UsageError
from minikv.settings import Settings

if TYPE_CHECKING:
    import torch

    from minikv.cache.stats import Shape


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. Bytes of the KV cache; `needs` adds weights and work space.

    rows: the budget in tokens per head. reading: the most at once during prefill. writing: the
    memory allocated while the answer is written. held: the tokens held at the end of the answer,
    with the state of the policy. fits: with an eighth of the free memory to spare; None where it is
    not known. `error` says why there are no figures. again: tokens that are read once more before
    anything is evicted; ram: what is held in RAM for that, beside a GPU's memory or as a part of
    `reading`; file: what is in a file for that, 0 if there is none; file_ram: what `ram` is with a
    file. suffices: false if `error` is that too few positions are left for what the policy reads
    beside the document.
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
    again: int = 0
    ram: int = 0
    file: int = 0
    file_ram: int = 0
    suffices: bool = True

    @property
    def label(self) -> str:
        """The policy and its stride, as the user types them after --policy."""
        return f"{self.policy} --stride {self.stride}" if self.stride else self.policy


@dataclass(frozen=True, slots=True)
class TierForecast:
    """What a tier takes beside the cache, and what a later question costs with it. Bytes.

    same and int8: the rows of the document, by --tier-dtype; that much is also what a later
    question reads. ram_same and ram_int8: what RAM holds for it. again: tokens that a later
    question reads again without a tier.
    """

    same: int
    int8: int
    ram_same: int
    ram_int8: int
    again: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """A model, a prompt of `tokens` tokens and an answer of `answer`. Bytes.

    token_bytes and full: of a cache without eviction, as in the turn record.
    kept: what matrices are kept in, as --weights has it, or plain.
    workspace: an estimate of what the network itself needs at once, beside weights and cache.
    disk: of packed weights that the first start keeps; 0: none.
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
    disk: int = 0
    tier: TierForecast | None = None  # None where nothing is evicted that could be recalled


def forecast(
    settings: Settings,
    tokens: int,
    cases: Sequence[tuple[str, int]],
    choices: Sequence[EvictionConfig | UsageError],
    *,
    room: int | None = None,
    answer: int = 512,
    folder: Path | None = None,
) -> Forecast:
    """The figures. `cases` are policies and strides, `choices` their settings; an error among them
    becomes a row without figures. `room` is the memory of another machine in bytes, `folder` where
    config.json is, if it was looked up before. Raises ModelError."""
    import torch

    from minikv.cache.plan import PassCost, held_after, peak
    from minikv.chat.fitting import Machine, likely, tier_beside, too_much, usable
    from minikv.loader import shape_of, workspace
    from minikv.models.config import ModelConfig
    from minikv.models.packed import LEAST
    from minikv.models.weights import (
        check_form,
        form_notes,
        free_memory,
        loading_bytes,
        packed_bytes,
        weight_bytes,
    )

    folder = folder or config_folder(settings)
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
    disk = packed_bytes(config, form) if packed and where.type == "cpu" else 0
    if disk < LEAST or settings.keep_packed == "off":
        disk = 0

    def work_space(tokens: int, *, foresees: bool = False) -> int:
        cuda = where.type == "cuda"
        return workspace(config, tokens, kind.itemsize, cuda=cuda, packed=packed, foresees=foresees)

    space = work_space(tokens)
    if room is None:
        free = free_memory(where)
        place = torch.cuda.get_device_name(where) if where.type == "cuda" else "this machine"
    else:
        free, place = room, "as given"

    # What a chat will find free, where that is RAM.
    ram = None if free is None or where.type == "cuda" else max(0, free - weights)
    shape = shape_of(config)
    cached = torch.int8 if settings.kv == "int8" else kind

    def beside(tokens: int) -> int:
        dtype, cuda = settings.tier_dtype, where.type == "cuda"
        return tier_beside(shape, kind, tokens, settings.tier, dtype, cuda=cuda)

    ops = likely(settings.kernels, gpu=where.type == "cuda")
    machine = Machine(shape, kind, cached, work_space, beside, where.type == "cuda", ops)
    left = None if free is None else max(0, free - weights)

    def row(name: str, stride: int, eviction: EvictionConfig | UsageError) -> Row:
        if isinstance(eviction, UsageError):
            return Row(name, "", stride, error=worded(f"{eviction}; {eviction.hint}"))
        if eviction.budget.unit == "auto":
            eviction = eviction.under(machine.rows(eviction, tokens, answer, left))
        try:
            plan, setup = machine.plan(eviction, tokens, answer)
        except (UsageError, ContextError) as error:
            text, suffices = f"{error}; {error.hint}", not isinstance(error, ContextError)
            if not suffices and tokens == config.max_context:
                text = f"{tokens:,} tokens leave no position for an answer"
            elif not suffices and tokens > config.max_context:
                text = f"{tokens:,} tokens do not fit in {config.max_context:,} positions"
            return Row(name, eviction.decode, stride, error=worded(text), suffices=suffices)
        rules = setup.rules
        foresees = rules.evidence.predicted and plan.evicts_any
        if foresees:
            notes.append(f"{name} reads the prompt twice, which takes about twice the time")
        cost = PassCost.of(plan, setup, plan.repeats)
        in_file = cost.tokens > 0 and (
            settings.tier == "file" or (settings.tier == "auto" and bool(too_much(cost.ram, ram)))
        )
        found = peak(plan, setup, in_file=in_file)
        work = work_space(tokens, foresees=foresees)
        needs = max(
            weights + work + max(found.reading, found.writing) + machine.tier(rules, tokens), load
        )
        return Row(
            name,
            eviction.decode,
            stride,
            None if rules.budget is None else rules.budget_rows(tokens, shape, cached),
            found.reading,
            found.writing,
            held_after(plan, setup, answer),
            needs,
            None if left is None else needs <= weights + usable(left),
            again=cost.tokens,
            ram=cost.file_ram if in_file else cost.ram,
            file=cost.file if in_file else 0,
            file_ram=cost.file_ram,
        )

    rows = [row(*case, choice) for case, choice in zip(cases, choices, strict=True)]
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
        token_bytes=full_cache_bytes(shape, 1, kind.itemsize),
        full=full_cache_bytes(shape, tokens, kind.itemsize),
        workspace=space,
        loading=load,
        memory=place,
        free=free,
        rows=tuple(rows),
        notes=tuple(notes),
        disk=disk,
        tier=_tier(shape, kind, tokens, rows, gpu=where.type == "cuda"),
    )


def _tier(
    shape: Shape, dtype: torch.dtype, tokens: int, rows: Sequence[Row], *, gpu: bool
) -> TierForecast | None:
    from minikv.cache.tier_rows import RamRows, row_nbytes

    # What is read twice serves all questions, and is not recalled.
    if not any(row.rows is not None and not (row.error or row.again) for row in rows):
        return None
    same, int8 = (row_nbytes(shape, dtype, coded) for coded in (False, True))
    most = RamRows.room(tokens, shape.max_context) if gpu else tokens  # pinned memory is held whole
    return TierForecast(same * tokens, int8 * tokens, same * most, int8 * most, tokens)


def config_folder(settings: Settings) -> Path:
    """Where config.json is: the directory, the hub's cache, or fetched alone. Raises ModelError."""
    from minikv.models import BUNDLED
    from minikv.models.hub import configuration

    if settings.model is None:
        return BUNDLED
    return configuration(settings.model, revision=settings.revision, offline=settings.offline)


def _device(name: str, *, here: bool) -> torch.device:
    """The torch device of a flag. `here`: it must exist in this machine."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if here and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no CUDA device for {name!r}", "--memory 24GiB plans for another machine")
    return device


def _dtype(folder: Path, name: str, device: torch.device, notes: list[str]) -> torch.dtype:
    """The dtype that the loader would choose, from the configuration: the weights may not be here
    yet."""
    import torch

    from minikv.models.files import read_json

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

"""Computes the figures of `minikv plan`: the memory that a document will need, from config.json
alone.

The memory of the cache comes from `minikv.cache.plan.peak`, that of the network from
`minikv.loader.workspace`. A chat uses the same functions for `--budget auto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.report import amount
from minikv.cli.settings.config import worded
from minikv.errors import ContextError, UsageError
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings, settings_of

if TYPE_CHECKING:
    import torch

_BLOCKS = ("roco", 32)
"""The policy and stride that take the least memory while a prompt is read."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. Bytes of the KV cache; `needs` adds weights and work space.

    rows: the budget in tokens per head. reading: the most at once while the prompt is read.
    writing: the most while the answer is written. held: the tokens held at the end of the answer,
    with the state of the policy. fits: with an eighth of the free memory to spare; None if that is
    not known. error: why there are no figures. suffices: False if `error` says that too few
    positions are left for the texts that the policy reads in addition to the document. again:
    tokens that are read once more before anything is evicted; ram, file: the bytes held there for
    that.
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
    suffices: bool = True

    @property
    def label(self) -> str:
        """The policy and its stride, as typed after --policy."""
        return f"{self.policy} --stride {self.stride}" if self.stride else self.policy


@dataclass(frozen=True, slots=True)
class Forecast:
    """A model, a prompt of `tokens` tokens and an answer of `answer`. Bytes.

    token_bytes, full: of a cache without eviction, as in the turn record. kept: the format of the
    matrices: a value of --weights, or plain. workspace: an estimate of the network's memory in
    addition to weights and cache. loading: the most that loading the weights takes at once. tier,
    tier_int8: the tier for a later question, by --tier-dtype; 0 if nothing is evicted that could be
    recalled. remembered: the prompt on disk, for later chats.
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
    loading: int
    memory: str
    free: int | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    tier: int
    tier_int8: int
    remembered: int


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Flags for a document of `tokens` tokens. They need `needs` of `free` bytes, and keep `rows`
    tokens per head; None: all. If `fits` is false, no flags fit, and these need the least."""

    tokens: int
    fits: bool
    flags: str
    needs: int
    free: int
    rows: int | None


class Planner:
    """Plans for a model under some settings on a machine. The weights need not be here."""

    def __init__(
        self, settings: Settings, memory: int | None = None, folder: Path | None = None
    ) -> None:
        """memory: the memory of another machine in bytes. folder: where config.json is, if it was
        looked up before. Raises UsageError and ModelError."""
        import torch

        from minikv.chat.fitting import Machine, likely, tier_beside
        from minikv.loader import shape_of
        from minikv.models import BUNDLED, config_of, dtype_of, weights
        from minikv.models.hub import configuration

        self.settings, self.memory = settings, memory
        if folder is None and settings.model is not None:  # only this file is downloaded
            model, revision, offline = settings.model, settings.revision, settings.offline
            folder = configuration(model, revision=revision, offline=offline)
        self.folder = folder or BUNDLED
        self.config = config_of(self.folder)
        self.notes = list(self.config.notes)
        self.device = _device(settings.device, here=memory is None)
        self.gpu, form = self.device.type == "cuda", settings.weights
        self.packed = bool(weights.packed_forms(self.config, form))
        asked = settings.dtype == "auto" and form in ("auto", "plain")
        stored = _stored(self.folder, self.config.form, self.notes) if asked else None
        self.dtype = dtype_of(settings.dtype, stored, self.device, form)
        weights.check_form(form, self.device, self.dtype, self.config)
        self.notes += weights.form_notes(self.config, form)
        self.weights = weights.weight_bytes(self.config, self.dtype, form)
        self.loading = weights.loading_bytes(self.config, self.dtype, form)
        self.free = weights.free_memory(self.device) if memory is None else memory
        self.left = None if self.free is None else max(0, self.free - self.weights)
        self.shape = shape = shape_of(self.config)

        def beside(tokens: int) -> int:
            how = settings.tier, settings.tier_dtype
            return tier_beside(shape, self.dtype, tokens, *how, cuda=self.gpu)

        cached = torch.int8 if settings.kv == "int8" else self.dtype
        ops = likely(settings.kernels, shape, self.dtype, gpu=self.gpu)
        self.machine = Machine(shape, self.dtype, cached, self.work, beside, self.gpu, ops)

    def work(self, tokens: int) -> int:
        """Bytes that the network needs to read `tokens` tokens."""
        from minikv.loader import workspace

        how = {"cuda": self.gpu, "packed": self.packed}
        return workspace(self.config, tokens, self.dtype.itemsize, **how)

    def row(self, name: str, stride: int, tokens: int, answer: int) -> Row:
        """The figures of a policy and stride under the other settings. An error in the settings or
        in the plan gives a row without figures."""
        from minikv.cache.plan import PassCost, held_after, peak
        from minikv.chat.fitting import too_much, usable

        try:  # the policy may not fit the other settings
            choice = replace(self.settings, policy=name, stride=stride).eviction()
        except UsageError as error:
            return Row(name, "", stride, error=worded(f"{error}; {error.hint}"))
        machine, positions = self.machine, self.config.max_context
        if choice.budget.unit == "auto":
            choice = choice.under(machine.rows(choice, tokens, answer, self.left))
        try:
            plan, setup = machine.plan(choice, tokens, answer)
        except (UsageError, ContextError) as error:
            text, suffices = f"{error}; {error.hint}", not isinstance(error, ContextError)
            if not suffices and tokens == positions:
                text = f"{amount(tokens, 'token')} leave no position for an answer"
            elif not suffices and tokens > positions:
                text = f"{amount(tokens, 'token')} do not fit in {positions:,} positions"
            return Row(name, choice.decode, stride, error=worded(text), suffices=suffices)
        rules = setup.rules
        cost, tier = PassCost.of(plan, setup, plan.repeats), self.settings.tier
        short = tier == "auto" and bool(too_much(cost.ram, None if self.gpu else self.left))
        in_file = cost.tokens > 0 and (tier == "file" or short)
        found = peak(plan, setup, in_file=in_file)
        cache = max(found.reading, found.writing) + machine.tier(rules, tokens)
        needs = max(self.weights + self.work(tokens) + cache, self.loading)
        return Row(
            name,
            choice.decode,
            stride,
            None if rules.budget is None else rules.budget_rows(tokens, self.shape, machine.kv),
            found.reading,
            found.writing,
            held_after(plan, setup, answer),
            needs,
            None if self.left is None else needs <= self.weights + usable(self.left),
            again=cost.tokens,
            ram=cost.file_ram if in_file else cost.ram,
            file=cost.file if in_file else 0,
        )

    def forecast(
        self, tokens: int, cases: Sequence[tuple[str, int]], answer: int = 512
    ) -> Forecast:
        """The figures. cases: policies, each with its stride. An answer is at most as long as the
        document leaves positions."""
        import torch

        from minikv.cache.stats import full_cache_bytes
        from minikv.cache.tier_rows import row_nbytes
        from minikv.chat.store import LEAST

        answer = min(answer, max(1, self.config.max_context - tokens))
        rows = [self.row(*case, tokens, answer) for case in cases]
        same, int8 = (tokens * row_nbytes(self.shape, self.dtype, coded) for coded in (False, True))
        # A cache from a second pass serves all questions, so nothing is recalled.
        recalls = any(row.rows is not None and not (row.error or row.again) for row in rows)
        remembers = self.settings.remember != "off" and tokens >= LEAST
        form = self.settings.weights
        own = self.config.form if form == "auto" else form
        here = torch.cuda.get_device_name(self.device) if self.gpu and self.memory is None else ""
        return Forecast(
            model=self.settings.model or "bundled",
            family=self.config.family,
            dtype=str(self.dtype).removeprefix("torch."),
            kept=own if self.packed and own else "plain",
            parameters=self.config.parameters,
            weights=self.weights,
            positions=self.config.max_context,
            suffices=tokens < self.config.max_context,
            tokens=tokens,
            answer=answer,
            budget=self.settings.budget,
            token_bytes=full_cache_bytes(self.shape, 1, self.dtype.itemsize),
            full=full_cache_bytes(self.shape, tokens, self.dtype.itemsize),
            workspace=self.work(tokens),
            loading=self.loading,
            memory=here or ("this machine" if self.memory is None else "as given"),
            free=self.free,
            rows=tuple(rows),
            notes=tuple(dict.fromkeys(self.notes)),
            tier=same * recalls,
            tier_int8=int8 * recalls,
            remembered=remembers * (int8 if self.settings.tier_dtype == "int8" else same),
        )

    def suggest(self, made: Forecast, policy: str) -> Suggestion | None:
        """Flags with which the document of a forecast fits: with `policy`, or else with `_BLOCKS`,
        or, if neither fits, with smaller weights, the most exact first. `--budget auto` finds the
        largest budget. None if free memory is not known, if the model's context is too short, or if
        no forecast is possible."""
        from minikv.models.errors import UnusableSetting

        if made.free is None or not made.suffices:
            return None
        # Only the user's own value of --weights, if there is one.
        forms = ("auto", "int8", "int8+head", "int4", "int4+head")
        tries: list[tuple[Settings, Row]] = []
        for form in forms if self.settings.weights == "auto" else (self.settings.weights,):
            one = replace(self.settings, weights=form, budget="auto")
            try:  # the device may not support the weights
                planner = Planner(one, self.memory, self.folder)
            except UnusableSetting:
                continue
            for name, stride in ((policy, 0), _BLOCKS):
                chosen = replace(one, policy=name, stride=stride)
                if name != policy:
                    chosen = planner.settings = replace(chosen, options={})
                row = planner.row(name, stride, made.tokens, made.answer)
                if not row.error:
                    tries.append((chosen, row))
        if not tries:
            return None
        least = min(tries, key=lambda one: one[1].needs)
        best, row = next((one for one in tries if one[1].fits), least)
        fits = bool(row.fits)
        return Suggestion(made.tokens, fits, _flags(best), row.needs, made.free, row.rows)


def _flags(settings: Settings) -> str:
    """The flags to type, with the user's own revision, device, dtype and KV dtype."""
    parts, known = [], settings_of(Settings)
    for name in ("revision", "device", "dtype", "kv", "weights", "tier"):
        value = getattr(settings, name)
        if value and value != known[name].default:
            parts.append(f"{known[name].flag} {value}")
    if settings.policy != DEFAULT_PROMPT:
        parts.append(f"--policy {settings.policy}")
    if settings.stride:
        parts.append(f"--stride {settings.stride}")
    return " ".join(parts)


def _device(name: str, *, here: bool) -> torch.device:
    """The torch device of a flag. `here`: it must exist in this machine."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if here and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no CUDA device for {name!r}", "--memory 24GiB plans for another machine")
    return device


def _stored(folder: Path, form: str, notes: list[str]) -> torch.dtype | None:
    """The number format of the files according to the configuration, because the weights may not be
    here yet. None if they are quantised, in `form`."""
    import torch

    from minikv.models.checkpoint import DTYPES
    from minikv.models.files import read_json

    if form:
        return None
    if folder.is_file():
        from minikv.models.gguf import Gguf

        return Gguf(folder).checkpoint().dtype
    raw = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    named = getattr(torch, str(raw.get("dtype", raw.get("torch_dtype"))), None)
    if named in DTYPES.values():
        return named
    notes.append("the configuration names no number format: bfloat16 is assumed (--dtype)")
    return torch.bfloat16

"""Whole steps and whole prompts under every policy, in turns, so that all see the same machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from minikv.choice import Choice
from minikv.cli.bench import machine, models
from minikv.cli.bench.floors import Rates, decode_floor, middle, overhead, prefill_floor, ratio
from minikv.cli.bench.peer import installed
from minikv.cli.bench.worker import PeerError, Worker
from minikv.errors import ContextError
from minikv.models.llama import Llama
from minikv.stats import CacheStats

PEER = "transformers"
_WARM_STEPS = 3
_WARM_TOKENS = 512  # of a prompt that is not measured, on a CPU: a GPU is warmed with a whole one
_TWIN_STEPS = 3  # before a round: the cache goes to the device, two steps run, one is captured
_ATTENDED = 2048  # tokens at which a CPU's attention rate is measured; a GPU's: the prompt's own

Progress = Callable[[str, int, int], None]
"""(what, done, total) before every measured piece of work."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure. `spec` says which network; `formats` are values of --weights."""

    spec: models.Spec
    model: str
    choices: tuple[Choice, ...]
    lengths: tuple[int, ...]
    formats: tuple[str, ...] = ("auto",)
    repeat: int = 3
    steps: int = 32
    peer: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one length.

    times: seconds of a step (decode) or of the prompt (prefill), one per round. floor: the least
    they could be, in seconds. evict: what the policy adds to a step over the same cache without
    one, as a share, or to a prompt over the full cache's. vs_full, vs_peer: how many times as
    fast, by medians. step_bytes: read per step, weights and rows. peak: bytes at the high-water
    mark, other systems' weights and caches not counted. None: not measured.
    """

    kind: str
    model: str
    system: str
    length: int
    times: tuple[float, ...]
    policy: str = "-"
    decode: str = "-"
    budget: str = "-"
    stride: int = 0
    weights: str = "-"
    floor: float | None = None
    evict: float | None = None
    vs_full: float | None = None
    vs_peer: float | None = None
    step_bytes: dict[str, float] = field(default_factory=dict)
    kv: dict[str, float] = field(default_factory=dict)
    peak: int | None = None

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return middle(self.times)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return (self.length if self.kind == "prefill" else 1) / self.seconds

    @property
    def share(self) -> float | None:
        """The floor's part of the time: 1 would be the hardware's limit."""
        return None if self.floor is None else self.floor / self.seconds

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "kind": self.kind, "model": self.model, "system": self.system, "policy": self.policy,
            "decode": self.decode, "budget": self.budget, "stride": self.stride,
            "weights": self.weights, "length": self.length, "seconds": self.seconds,
            "tok_s": self.rate, "times": list(self.times), "floor_s": self.floor,
            "share_of_floor": self.share, "evict_share": self.evict, "vs_full": self.vs_full,
            "vs_transformers": self.vs_peer, "step_bytes": self.step_bytes, "kv_bytes": self.kv,
            "peak_bytes": self.peak,
        }  # fmt: skip


class _Seat:
    """A system that takes turns, and what was measured of it."""

    def __init__(self, system: models.Cached | Worker, name: str, weights: str = "-") -> None:
        self.system, self.name, self.weights = system, name, weights
        self.times: list[float] = []
        self.twin: models.Cached | None = None
        self.twin_times: list[float] = []
        self.stats: CacheStats | None = None
        self.peak: int | None = None

    @property
    def choice(self) -> Choice | None:
        return self.system.choice if isinstance(self.system, models.Cached) else None

    @property
    def label(self) -> str:
        """In a few words."""
        choice = self.choice
        if choice is None:
            return self.name
        return f"{choice.policy} {choice.budget}" if choice.evicts else choice.policy


class Bench:
    """Measures what is wanted; `rows` are complete for every length that was finished."""

    def __init__(self, wanted: Wanted, rates: Rates, progress: Progress | None = None) -> None:
        self.wanted, self.rates = wanted, rates
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.attending: dict[int, float] = {}  # tokens -> flops a second of torch's attention
        self._progress = progress or (lambda what, done, total: None)
        self._device = torch.device(wanted.spec.device)
        self._nets: dict[str, Llama] = {}
        self._worker: Worker | None = None

    def networks(self) -> dict[str, Llama]:
        """One per format of the weights, made when they are first needed."""
        for name in self.wanted.formats:
            if name not in self._nets:
                net = models.network(replace(self.wanted.spec, weights=name))
                dtype = str(net.dtype).removeprefix("torch.")  # of a model on disk, as it was read
                self.wanted = replace(self.wanted, spec=replace(self.wanted.spec, dtype=dtype))
                self._nets[name] = net
        return self._nets

    def check(self) -> None:
        """Raise ContextError for a length that the model cannot take."""
        net = next(iter(self.networks().values()))
        most = net.config.max_context - self._extra
        if max(self.wanted.lengths) > most:
            raise ContextError(
                f"--length {max(self.wanted.lengths):,} is more than the {most:,} tokens that this "
                "model takes beside the steps that are measured",
                "a smaller --length",
            )

    @property
    def _extra(self) -> int:
        """Steps that a decode run writes after a prompt."""
        return _WARM_STEPS + self.wanted.repeat * (_TWIN_STEPS + self.wanted.steps)

    # -- decode -----------------------------------------------------------------------------

    def decode(self, length: int) -> None:
        """Steps after a prompt of `length` tokens. Adds a row per system when all are measured."""
        wanted, seats = self.wanted, list[_Seat]()
        with self._seated(seats):
            total = len(seats) * (1 + wanted.repeat)
            ids = self._ids(length)
            for done, seat in enumerate(seats):
                self._progress(f"decode {length:,}: {seat.label} reads", done, total)
                self._read(seat, ids, [s for s in seats if s is not seat], keep=True)
                if isinstance(seat.system, models.Cached) and seat.system.choice.decode != "none":
                    seat.twin = seat.system.twin()
                seat.system.write(_WARM_STEPS)
            rows = [seat.system.step_rows() if isinstance(seat.system, models.Cached) else 0.0
                    for seat in seats]  # fmt: skip
            done = len(seats)
            for _ in range(wanted.repeat):
                for seat in seats:
                    self._progress(f"decode {length:,}: {seat.label}", done, total)
                    seat.system.write(_TWIN_STEPS)
                    seat.times.append(seat.system.write(wanted.steps))
                    if seat.twin is not None and isinstance(seat.system, models.Cached):
                        seat.twin.copy(seat.system, _TWIN_STEPS + wanted.steps)
                        seat.twin.write(_TWIN_STEPS)
                        seat.twin_times.append(seat.twin.write(wanted.steps))
                    done += 1
            self._add("decode", length, seats, rows)

    # -- prefill ----------------------------------------------------------------------------

    def prefill(self, length: int) -> None:
        """Prompts of `length` tokens, each from nothing."""
        wanted, seats = self.wanted, list[_Seat]()
        with self._seated(seats):
            total = len(seats) * (1 + wanted.repeat)
            ids = self._ids(length)
            warm = ids if self._device.type == "cuda" else ids[:_WARM_TOKENS]
            for done, seat in enumerate(seats):
                self._progress(f"prefill {length:,}: {seat.label} warms up", done, total)
                seat.system.read(warm)
            done = len(seats)
            for _ in range(wanted.repeat):
                for seat in seats:
                    self._progress(f"prefill {length:,}: {seat.label}", done, total)
                    seat.times.append(self._read(seat, ids, (), keep=False))
                    done += 1
            self._add("prefill", length, seats, [0.0] * len(seats))

    # -- the parts --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _seated(self, seats: list[_Seat]) -> Iterator[None]:
        """Inside, `seats` has every system, the full cache first and the peer last."""
        try:
            for weights, net in self.networks().items():
                seats += [
                    _Seat(models.Cached(net, choice, self.wanted.spec.kernels), "minikv", weights)
                    for choice in self.wanted.choices
                ]
            worker = self._peer()
            if worker is not None:
                seats.append(_Seat(worker, PEER))
            yield
        finally:
            for seat in seats:
                for system in (seat.system, seat.twin):
                    if isinstance(system, models.Cached):
                        system.close()
            seats.clear()
            models.settle(self._device)

    def _peer(self) -> Worker | None:
        if self.wanted.peer and self._worker is None:
            if not installed():
                self.notes.append(f"{PEER} is not installed: nothing to compare with")
            else:
                self._progress(f"starting {PEER}", 0, 0)
                try:
                    self._worker = Worker(PEER, self.wanted.spec, torch.get_num_threads())
                except PeerError as error:
                    self.notes.append(f"not compared: {error}")
            if self._worker is None:  # and do not try again
                self.wanted = replace(self.wanted, peer=False)
        return self._worker

    def close(self) -> None:
        """End other processes and give the networks back."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._nets.clear()
        models.settle(self._device)

    def _ids(self, length: int) -> list[int]:
        net = next(iter(self._nets.values()))
        return models.prompt(length, net.config.vocab)

    def _read(
        self, seat: _Seat, ids: list[int], others: Sequence[_Seat], *, keep: bool
    ) -> float:
        """Seconds; takes note of the memory. Unless the cache is kept, it is given back."""
        if isinstance(seat.system, Worker):
            seconds = seat.system.read(ids)
            seat.peak = seat.system.peak()
            return seconds
        machine.forget_peak(self._device)
        seconds = seat.system.read(ids, self._extra)
        seat.stats = seat.system.stats()
        peak = machine.peak(self._device)
        if peak is not None:
            nets = (net for net in self._nets.values() if net is not seat.system.net)
            peak -= sum(net.weight_bytes for net in nets)
            for other in others:
                for cache in (other.system, other.twin):
                    if isinstance(cache, models.Cached):
                        peak -= cache.stats().allocated_bytes
            seat.peak = peak
        if not keep:
            seat.system.close()
        return seconds

    def _add(
        self, kind: str, length: int, seats: Sequence[_Seat], step_rows: Sequence[float]
    ) -> None:
        """Rows of all seats, the first of which is the full cache."""
        for seat in seats:
            if isinstance(seat.system, models.Cached):
                news = (note for note in seat.system.notices if note not in self.notes)
                self.notes += news
        full = seats[0]
        peers = [seat for seat in seats if seat.name == PEER]
        for seat, read in zip(seats, step_rows, strict=True):
            base = next(s for s in seats if s.weights in (seat.weights, "-"))
            own = seat.choice
            evict = None
            if kind == "decode" and seat.twin_times:
                evict = overhead(seat.times, seat.twin_times)
            elif kind == "prefill" and own is not None and own.evicts:
                evict = overhead(seat.times, base.times)
            self.rows.append(Row(
                kind, self.wanted.model, seat.name, length, tuple(seat.times),
                policy="-" if own is None else own.policy,
                decode="-" if own is None else own.decode,
                budget="-" if own is None or not own.evicts else str(own.budget),
                stride=0 if own is None else own.stride, weights=seat.weights,
                floor=self._floor(kind, length, seat, read), evict=evict,
                vs_full=ratio(full.times, seat.times),
                vs_peer=ratio(peers[0].times, seat.times) if peers else None,
                step_bytes=self._step_bytes(seat, read) if kind == "decode" else {},
                kv=_kv(seat.stats), peak=seat.peak,
            ))  # fmt: skip

    def _step_bytes(self, seat: _Seat, rows: float) -> dict[str, float]:
        if not isinstance(seat.system, models.Cached):
            return {}
        return {"weights": models.step_bytes(seat.system.net), "kv": rows}

    def _floor(self, kind: str, length: int, seat: _Seat, rows: float) -> float | None:
        if not isinstance(seat.system, models.Cached):
            return None
        net, rates = seat.system.net, self.rates
        if kind == "decode":
            return decode_floor(models.step_bytes(net), rows, rates.stream)
        sizes = models.sizes_of(net.config)
        return prefill_floor(
            sizes.linear_flops(length), rates.product(str(net.dtype).removeprefix("torch.")),
            sizes.attention_flops(length), self._attending(net, length),
        )  # fmt: skip

    def _attending(self, net: Llama, length: int) -> float:
        """Flops a second of torch's own attention at this length, measured once."""
        tokens = length if self._device.type == "cuda" else min(length, _ATTENDED)
        if tokens not in self.attending:
            c = net.config
            self.attending[tokens] = machine.attention_rate(
                self._device, net.dtype, c.heads, c.kv_heads, c.head_dim, tokens
            )
        return self.attending[tokens]


def _kv(stats: CacheStats | None) -> dict[str, float]:
    """Bytes of the cache when the prompt had been read, and the rows that a head holds."""
    if stats is None:
        return {}
    return {
        "held": stats.held_bytes, "allocated": stats.allocated_bytes,
        "peak_prefill": stats.peak_bytes, "full": stats.full_bytes,
        "kept_mean": stats.kept_mean, "kept_max": stats.kept_max,
    }  # fmt: skip

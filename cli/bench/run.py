"""Whole steps and whole prompts under every policy, in turns, so that all see the same machine.

Where there is a deadline, a system that clearly cannot be measured before it is left out, and the
rounds after the first end early: a row has as many `times` as there were rounds. A note says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import machine, models
from minikv.cli.bench.deadline import Deadline, Guesses, Late
from minikv.cli.bench.floors import (
    Rates,
    decode_floor,
    overhead,
    prefill_floor,
    ratio,
    read_bound,
)
from minikv.cli.bench.peer import installed
from minikv.cli.bench.rows import Row, Seat, kept
from minikv.cli.bench.worker import PeerError, Worker
from minikv.errors import ContextError, MemoryShortError, MinikvError
from minikv.models.errors import ModelError
from minikv.models.llama import Llama

PEER = "transformers"
_WARM_STEPS = 3
_WARM_TOKENS = 512  # of a prompt that is not measured, on a CPU: a GPU is warmed with a whole one
_TWIN_STEPS = 3  # before a round: the cache goes to the device, two steps run, one is captured

Progress = Callable[[str, int, int], None]
"""(what, done, total) before every measured piece of work."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure. `spec` says which network; `formats` are values of --weights; `full_once`:
    the full cache under the first of them only."""

    spec: models.Spec
    model: str
    choices: tuple[EvictionConfig, ...]
    lengths: tuple[int, ...]
    formats: tuple[str, ...] = ("auto",)
    repeat: int = 3
    steps: int = 32
    peer: bool = True
    full_once: bool = False


@dataclass(frozen=True, slots=True)
class _First:
    """What the reading before the steps said of a prompt."""

    seconds: float
    stats: CacheStats | None
    peak: int | None


class Bench:
    """Measures what is wanted; `rows` are complete for every length that was finished."""

    def __init__(
        self,
        wanted: Wanted,
        rates: Rates,
        progress: Progress | None = None,
        *,
        deadline: Deadline | None = None,
        guesses: Guesses | None = None,
        lenient: bool = False,
    ) -> None:
        """`lenient`: a system that fails is left out with a note, and the others go on; another
        engine always is."""
        self.wanted, self.rates = wanted, rates
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.attending: dict[int, float] = {}  # tokens -> flops a second of torch's attention
        self.reading: dict[str, float] = {}  # weights -> bytes a second that they were read with
        self.deadline = deadline or Deadline()
        self.guesses = guesses or Guesses()
        self._lenient = lenient
        self._progress = progress or (lambda what, done, total: None)
        self._device = torch.device(wanted.spec.device)
        self._nets: dict[str, Llama] = {}
        self._worker: Worker | None = None

    def networks(self) -> dict[str, Llama]:
        """One per format of the weights, made when they are first needed."""
        for name in self.wanted.formats:
            if name in self._nets:
                continue
            try:
                net = models.network(replace(self.wanted.spec, weights=name))
            except (ModelError, MemoryShortError) as error:
                if not (self._lenient and self._nets):
                    raise
                # No such kernel in this build, or on this processor: the others are measured.
                self._note(f"weights {name}: {error}")
                left = tuple(form for form in self.wanted.formats if form != name)
                self.wanted = replace(self.wanted, formats=left)
                continue
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
        self._decode(length, {})

    def both(self, length: int) -> None:
        """Steps after a prompt, and prompts: the readings before the steps are the first round of
        the prompts, which takes a quarter of the time of three rounds away."""
        first: dict[str, _First] = {}
        self._decode(length, first, warm=True)
        self._prefill(length, first)

    def _decode(self, length: int, first: dict[str, _First], *, warm: bool = False) -> None:
        what = f"decode {length:,}"
        with self._seated(self.wanted.formats) as seats:
            total = len(seats) * (1 + self.wanted.repeat)
            ids, ready = self._ids(length), list[Seat]()

            def read(seat: Seat) -> None:
                if warm:
                    seat.system.read(self._warm(ids))
                others = [other for other in seats if other is not seat]
                seconds = self._read(seat, ids, others, keep=True)
                first[seat.label] = _First(seconds, seat.stats, seat.peak)
                if isinstance(seat.system, models.Cached) and seat.system.eviction.decode != "none":
                    seat.twin = seat.system.twin()
                self._learn("step", seat, length, seat.system.write(_WARM_STEPS))
                if isinstance(seat.system, models.Cached):
                    seat.rows = seat.system.step_rows()

            for done, seat in enumerate(seats):
                self._progress(f"{what}: {seat.label} reads", done, total)
                needs = self._guess("read", seat, length)
                needs += sum(self._round(each, length) for each in (*ready, seat))
                if self._begins(what, seat, needs) and self._turn(what, seat, read):
                    ready.append(seat)

            def write(seat: Seat) -> None:
                seat.system.write(_TWIN_STEPS)
                taken = seat.system.write(self.wanted.steps)
                if seat.twin is not None and isinstance(seat.system, models.Cached):
                    seat.twin.copy(seat.system, _TWIN_STEPS + self.wanted.steps)
                    seat.twin.write(_TWIN_STEPS)
                    seat.twin_times.append(seat.twin.write(self.wanted.steps))
                seat.times.append(taken)  # last: a turn counts when all of it was measured

            self._rounds("decode", length, ready, (len(seats), total), write)

    # -- prefill ----------------------------------------------------------------------------

    def prefill(self, length: int) -> None:
        """Prompts of `length` tokens, each from nothing."""
        self._prefill(length, None)

    def _prefill(self, length: int, first: dict[str, _First] | None) -> None:
        """`first`: a round that was measured already, under the first format of the weights."""
        what = f"prefill {length:,}"
        formats = self.wanted.formats
        with self._seated(formats if first is None else formats[:1]) as seats:
            total = len(seats) * (1 + self.wanted.repeat)
            ids, ready = self._ids(length), list[Seat]()
            for done, seat in enumerate(seats):
                if first is not None:
                    if seat.label in first:
                        had = first[seat.label]
                        seat.times, seat.stats, seat.peak = [had.seconds], had.stats, had.peak
                        ready.append(seat)
                    continue
                self._progress(f"{what}: {seat.label} warms up", done, total)
                needs = sum(self._guess("read", each, length) for each in (*ready, seat))
                if self._begins(what, seat, needs) and self._turn(
                    what, seat, lambda seat: seat.system.read(self._warm(ids))
                ):
                    ready.append(seat)

            def read(seat: Seat) -> None:
                seat.times.append(self._read(seat, ids, (), keep=False))

            self._rounds("prefill", length, ready, (len(seats), total), read)

    # -- the parts --------------------------------------------------------------------------

    def _rounds(
        self,
        kind: str,
        length: int,
        seats: list[Seat],
        far: tuple[int, int],
        work: Callable[[Seat], None],
    ) -> None:
        """Turns of all that are seated, as many rounds as are wanted and fit, the first in any
        case; then their rows. `far`: pieces of work that are done, of how many."""
        what, (done, total) = f"{kind} {length:,}", far
        rounds = min((len(seat.times) for seat in seats), default=0)
        done += rounds * len(seats)
        longest = sum(seat.times[0] for seat in seats) if rounds else 0.0
        turning = list(seats)
        try:
            for number in range(rounds, self.wanted.repeat):
                late = self.deadline.patience <= 0
                if late or (number and not self.deadline.fits(longest)):
                    self._note(f"{what}: {number} of {self.wanted.repeat} rounds, for time")
                    break
                began = self.deadline.now()
                if kind == "decode" and self._device.type == "cpu":
                    self._read_weights(seats)
                for seat in list(turning):
                    self._progress(f"{what}: {seat.label}", done, total)
                    done += 1
                    if not self._turn(what, seat, work):
                        turning.remove(seat)
                    if self.deadline.patience <= 0:
                        break
                longest = max(longest, self.deadline.now() - began)
        except KeyboardInterrupt:
            self._add(kind, length, seats)
            raise
        self._add(kind, length, seats)

    def _read_weights(self, seats: Sequence[Seat]) -> None:
        """The rate at which memory gives the weights themselves, the best of all rounds. It depends
        on where they lie and on what the machine does meanwhile, so that a buffer read before says
        too little."""
        for name in dict.fromkeys(seat.weights for seat in seats if seat.name != PEER):
            rate = models.reading_rate(self._nets[name])
            self.reading[name] = max(rate, self.reading.get(name, 0.0))

    @contextlib.contextmanager
    def _seated(self, formats: Sequence[str]) -> Iterator[list[Seat]]:
        """Every system under these formats of the weights: the full cache first, and the peer after
        the first format, which is what it is compared with before all."""
        seats: list[Seat] = []
        try:
            spec, nets = self.wanted.spec, self.networks()
            for weights in formats:
                if weights not in nets:
                    continue
                seats += [
                    Seat(
                        models.Cached(
                            nets[weights], choice, spec.kernels, spec.kv, self.deadline.check
                        ),
                        "minikv",
                        weights,
                    )
                    for choice in self.wanted.choices
                    if choice.evicts or weights == formats[0] or not self.wanted.full_once
                ]
                worker = self._peer() if weights == formats[0] else None
                if worker is not None:
                    seats.append(Seat(worker, PEER))
            yield seats
        finally:
            for seat in seats:
                seat.close()
            seats.clear()
            models.settle(self._device)

    def _begins(self, what: str, seat: Seat, needs: float) -> bool:
        """Whether there is time for it; a note if there is not."""
        try:
            self.deadline.require(needs)
        except Late as error:
            self._note(f"{what}, {seat.label}: {error}")
            return False
        return True

    def _turn(self, what: str, seat: Seat, work: Callable[[Seat], object]) -> bool:
        """Whether the seat could do it. What another engine cannot is noted, and so is what comes
        too late, and what fails where that is no reason to end."""
        try:
            if isinstance(seat.system, Worker) and not seat.system.alive:
                return False
            work(seat)
            return True
        except Late as error:
            self._note(f"{what}, {seat.label}: {error}")
        except (PeerError, MemoryShortError) as error:
            if not (self._lenient or isinstance(seat.system, Worker)):
                raise
            self._note(f"{what}, {seat.label}: {error}")
        except Exception as error:
            if not self._lenient or not machine.healthy(self._device):
                raise
            self._note(f"{what}, {seat.label}: {one_line(error)}")
        # Outside, so that nothing of what failed is held by its traceback.
        seat.close()
        if isinstance(seat.system, Worker) and not seat.system.alive:
            self._dismiss()
        models.settle(self._device)
        return False

    def _dismiss(self) -> None:
        """The peer has ended, and another one would as well."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            self.wanted = replace(self.wanted, peer=False)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _peer(self) -> Worker | None:
        if self.wanted.peer and self._worker is None:
            if not installed():
                self.notes.append(f"{PEER} is not installed: nothing to compare with")
            else:
                self._progress(f"starting {PEER}", 0, 0)
                try:
                    self._worker = Worker(
                        PEER, self.wanted.spec, torch.get_num_threads(), deadline=self.deadline
                    )
                except (PeerError, MemoryShortError, Late) as error:
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

    # -- what work takes ----------------------------------------------------------------------

    def _warm(self, ids: list[int]) -> list[int]:
        """A prompt that is not measured: on a GPU the same, on a CPU the beginning."""
        return ids if self._device.type == "cuda" else ids[:_WARM_TOKENS]

    def _bound(self, kind: str, seat: Seat, length: int) -> float:
        """Seconds that the machine's rates allow at best."""
        system = seat.system
        net = next(iter(self._nets.values())) if isinstance(system, Worker) else system.net
        sizes, item = models.sizes_of(net.config), net.dtype.itemsize
        if kind == "read":
            return read_bound(sizes, length, self.rates, str(net.dtype).removeprefix("torch."))
        grows = isinstance(system, Worker) or seat.full
        kv = length * 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * item if grows else 0
        return decode_floor(models.step_bytes(net), kv, self.rates.stream)

    def _learn(self, kind: str, seat: Seat, length: int, seconds: float) -> None:
        """For later guesses. On a GPU the first time of all compiles kernels and says nothing."""
        if self._device.type != "cuda" or seat.times:
            self.guesses.learn(kind, seat.label, seconds, self._bound(kind, seat, length))

    def _guess(self, kind: str, seat: Seat, length: int) -> float:
        return self.guesses.say(kind, seat.label, self._bound(kind, seat, length))

    def _round(self, seat: Seat, length: int) -> float:
        """Seconds of a round of steps."""
        judged = seat.eviction is not None and seat.eviction.decode != "none"
        steps = (_TWIN_STEPS + self.wanted.steps) * (2 if judged else 1)
        return steps * self._guess("step", seat, length)

    def _ids(self, length: int) -> list[int]:
        net = next(iter(self._nets.values()))
        return models.prompt(length, net.config.vocab)

    def _read(self, seat: Seat, ids: list[int], others: Sequence[Seat], *, keep: bool) -> float:
        """Seconds; takes note of the memory. Unless the cache is kept, it is given back."""
        if isinstance(seat.system, Worker):
            seconds = seat.system.read(ids)
            seat.peak = seat.system.peak()
            self._learn("read", seat, len(ids), seconds)
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
        self._learn("read", seat, len(ids), seconds)
        if not keep:
            seat.system.close()
        return seconds

    def _add(self, kind: str, length: int, seats: Sequence[Seat]) -> None:
        """Rows of all seats that were measured, the peer's last."""
        seats = [seat for seat in seats if seat.times]
        full = next((seat for seat in seats if seat.full), None)
        peers = [seat for seat in seats if seat.name == PEER]
        for seat in seats:
            if isinstance(seat.system, models.Cached):
                for notice in seat.system.notices:
                    self._note(notice)
                if seat.twin is not None and seat.twin.captured != seat.system.captured:
                    which = "with" if seat.twin.captured else "without"
                    self._note(
                        f"{kind} {length:,}, {seat.label}: steps {which} eviction were not "
                        "captured in a graph, the others were: what eviction adds is not known"
                    )
                    seat.twin_times.clear()
        for seat in sorted(seats, key=lambda seat: seat.name == PEER):
            base = next((s for s in seats if s.full and s.weights == seat.weights), None)
            own = seat.eviction
            evict = None
            if kind == "decode" and seat.twin_times:
                evict = _added(seat.times, seat.twin_times)
            elif kind == "prefill" and own is not None and own.evicts and base is not None:
                evict = _added(seat.times, base.times)
            self.rows.append(
                Row(
                    kind,
                    self.wanted.model,
                    seat.name,
                    length,
                    tuple(seat.times),
                    policy="-" if own is None else own.policy,
                    decode="-" if own is None else own.decode,
                    budget="-" if own is None or not own.evicts else str(own.budget),
                    stride=0 if own is None else own.stride,
                    weights=seat.weights,
                    kept_in="auto" if own is None else self.wanted.spec.kv,
                    floor=self._floor(kind, length, seat),
                    evict=evict,
                    vs_full=None if full is None else ratio(full.times, seat.times),
                    vs_peer=ratio(peers[0].times, seat.times) if peers else None,
                    step_bytes=self._step_bytes(seat) if kind == "decode" else {},
                    kv=kept(seat.stats),
                    peak=seat.peak,
                    stream=self._stream(seat) if kind == "decode" and own is not None else None,
                    captured=seat.system.captured
                    if kind == "decode" and isinstance(seat.system, models.Cached)
                    else None,
                )
            )

    def _step_bytes(self, seat: Seat) -> dict[str, float]:
        if not isinstance(seat.system, models.Cached):
            return {}
        return {"weights": models.step_bytes(seat.system.net), "kv": seat.rows}

    def _stream(self, seat: Seat) -> float:
        """Bytes a second that its steps could have."""
        return max(self.rates.stream, self.reading.get(seat.weights, 0.0))

    def _floor(self, kind: str, length: int, seat: Seat) -> float | None:
        if not isinstance(seat.system, models.Cached):
            return None
        net, rates = seat.system.net, self.rates
        if kind == "decode":
            return decode_floor(models.step_bytes(net), seat.rows, self._stream(seat))
        sizes = models.sizes_of(net.config)
        return prefill_floor(
            sizes.linear_flops(length),
            rates.product(str(net.dtype).removeprefix("torch.")),
            sizes.attention_flops(length),
            self._attending(net, length),
        )

    def _attending(self, net: Llama, length: int) -> float:
        """Flops a second that attention could have: on a GPU those of torch's own at this length,
        measured once; on a CPU, whose kernels leave torch's behind, those of a large product."""
        if self._device.type != "cuda":
            return self.rates.product(str(net.dtype).removeprefix("torch."))
        if length not in self.attending:
            c = net.config
            self.attending[length] = machine.attention_rate(
                self._device, net.dtype, c.heads, c.kv_heads, c.head_dim, length
            )
        return self.attending[length]


def one_line(error: BaseException) -> str:
    """An error in a line of at most 200 characters. Those that are not meant for users, and may be
    no more than an assertion, say what they are."""
    said = " ".join(str(error).split())
    if not isinstance(error, (MinikvError, ModelError)):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return said[:200]


def _added(ours: Sequence[float], base: Sequence[float]) -> float:
    """As `overhead`, over the rounds that both have had."""
    rounds = min(len(ours), len(base))
    return overhead(ours[:rounds], base[:rounds])

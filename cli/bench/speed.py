"""The time of decode steps and of prompts: systems in turns, so that they see one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minikv.chat.report import size
from minikv.cli.bench import machine, networks, systems
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.machine import Rates, Timing, number, percent
from minikv.cli.bench.systems import Cached, Transformers
from minikv.cli.measure import Results
from minikv.cli.screen.text import grid
from minikv.errors import ContextError
from minikv.models.llama import Llama

_WARM = 3  # steps before those that count: the cache goes to the device, one step is captured
_WARM_PROMPT = 512  # tokens of a prompt that does not count, on a CPU; on a GPU a whole one
_READ = 256 << 20  # bytes that are read before a turn on a CPU, to see how fast memory is then


@dataclass(slots=True, eq=False)
class Entry:
    """A system and its measurements. facts: of the cache after the prompt, and of a step."""

    system: Cached | Transformers
    times: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The system and what it runs under, in a few words."""
        facts = self.system.facts
        if facts["policy"] == "-":
            return str(facts["system"])
        decode, kv = facts["decode"], facts["kv"]
        step = f"+{decode}" if decode not in ("none", facts["policy"], "-") else ""
        parts = [facts["policy"] + step]
        parts += [x for x in (facts["budget"], facts["weights"]) if x not in ("auto", "-")]
        return " ".join([*parts, f"kv {kv}"] if kv != "auto" else parts)


class Run:
    """The networks of a run, and transformers beside them. `decode`: steps, else prompts."""

    def __init__(
        self, asked: Arguments, device: torch.device, rates: Rates, results: Results, decode: bool
    ) -> None:
        """Raises ModelError, MemoryShortError, and ContextError for a length that the model cannot
        take beside so many steps."""
        self.asked, self.device, self.rates, self.results = asked, device, rates, results
        self.decode, self.kind = decode, "decode" if decode else "prefill"
        self.steps = asked.steps or (128 if device.type == "cuda" else 32)
        self.room = 2 * _WARM + asked.repeat * (_WARM + self.steps)  # steps of a prompt
        random = asked.model is None
        spec = networks.Spec(
            networks.find(asked.shape) if random else None,
            None if random else Path(str(asked.model)),
            "bfloat16" if random and asked.dtype == "auto" else asked.dtype,
            str(device),
        )
        self.nets: dict[str, Llama] = {}
        self.stream, self.attention = rates.stream, 0.0
        for form in asked.formats():
            try:
                self.nets[form] = networks.network(replace(spec, weights=form))
            except Exception as error:
                if not self.nets:
                    raise
                results.fail(f"weights {form}", error)  # no such kernel on this processor
        net = next(iter(self.nets.values()))
        most = net.config.max_context - self.room
        if max(asked.lengths()) > most:
            raise ContextError(
                f"--length {max(asked.lengths()):,} is more than the {most:,} tokens that this "
                "model takes beside the steps that are measured",
                "a smaller --length",
            )
        self.sizes = net.config
        self.dtype = str(net.dtype).removeprefix("torch.")
        self.peer = self._peer(replace(spec, dtype=self.dtype)) if asked.peer else None
        results.record["wanted"] = {
            "model": asked.name,
            "random_weights": random,
            "dtype": self.dtype,
            "weights": list(self.nets),
            "kv": asked.kv,
            "kernels": asked.kernels,
            "repeat": asked.repeat,
            "steps": self.steps,
        }

    def _peer(self, spec: networks.Spec) -> Transformers | None:
        if not systems.installed():
            self.results.note(f"{systems.PEER} is not installed: nothing to compare with")
            return None
        try:
            return Transformers(spec)
        except Exception as error:
            self.results.note(f"not compared: {systems.PEER}: {error}")
            return None

    def measure(self, length: int) -> None:
        """Rows of every system behind prompts of one length, the full cache first. Raises
        UsageError for a budget that is too small."""
        ids = networks.prompt(length, self.sizes.vocab)
        every = [
            Entry(Cached(net, eviction, self.asked.kernels, self.asked.kv, form))
            for form, net in self.nets.items()
            for eviction in self.asked.evictions()
        ]
        if self.peer is not None:  # it is compared with the first weights
            every.insert(len(self.asked.evictions()), Entry(self.peer))
        entries, what = list(every), f"{self.kind} {length:,}"
        begin, turn = (self._read, self._write) if self.decode else (self._warm, self._read)
        try:
            self._each(f"{what}: beginning", entries, lambda entry: begin(entry, ids))
            for number in range(self.asked.repeat):
                title = f"{what}: round {number + 1} of {self.asked.repeat}"
                self._each(title, entries, lambda entry: turn(entry, ids))
        finally:
            measured = [entry for entry in every if entry.times]
            if measured:
                self.attention = 0.0 if self.decode else self._attention(length)
                timings = [self._timing(length, entry, measured) for entry in measured]
                self.results.record["rows"] += [timing.record() for timing in timings]
                title = f"{self.kind}, {self.asked.name}, {length:,} tokens"
                lines = [_line(*each) for each in zip(measured, timings, strict=True)]
                self.results.show(f"{title}\n{grid([_HEAD, *lines], '<>>>>>>')}")
            self.results.write()
            for entry in every:
                entry.system.close()
            machine.settle(self.device)

    def _each(self, what: str, entries: list[Entry], work: Callable[[Entry], None]) -> None:
        """A turn of every system. One that fails takes no more turns."""
        for index, entry in enumerate(list(entries)):
            self.results.progress(f"{what}, {entry.name}", index, len(entries))
            try:
                work(entry)
                continue
            except Exception as error:
                if isinstance(entry.system, Cached):
                    self.results.fail(f"{what}, {entry.name}", error)
                else:
                    self.results.note(f"{what}, {entry.name}: {error}")
            # Outside, so that nothing of what failed is held by its traceback.
            entries.remove(entry)
            entry.system.close()
            machine.settle(self.device)

    def _warm(self, entry: Entry, ids: list[int]) -> None:
        entry.system.read(ids if self.device.type == "cuda" else ids[:_WARM_PROMPT])
        entry.system.close()

    def _read(self, entry: Entry, ids: list[int]) -> None:
        system, seconds = entry.system, entry.system.read(ids, self.room)
        if isinstance(system, Cached):
            stats = system.stats()
            entry.facts["kv_bytes"] = {
                "held": stats.held_bytes,
                "allocated": stats.allocated_bytes,
                "full": stats.full_bytes,
                "kept_mean": stats.kept_mean,
                "kept_max": stats.kept_max,
            }
        if not self.decode:
            entry.times.append(seconds)
            system.close()
            return
        system.write(_WARM)
        if isinstance(system, Cached):
            entry.facts["step_bytes"] = system.step_bytes()

    def _write(self, entry: Entry, ids: list[int]) -> None:
        if self.device.type == "cpu":  # whose memory is faster at one time than at another
            self.stream = max(self.stream, machine.read_rate(_READ, 1))
        entry.system.write(_WARM)
        entry.times.append(entry.system.write(self.steps))

    def _attention(self, length: int) -> float:
        """Flops a second that attention could have: on a GPU those of torch's own at this length;
        on a CPU, whose kernels are faster than torch's, those of a large product."""
        if self.device.type != "cuda":
            return self.rates.product(self.dtype)
        heads = (self.sizes.heads, self.sizes.kv_heads, self.sizes.head_dim)
        return machine.attention_rate(self.device, getattr(torch, self.dtype), *heads, length)

    def _timing(self, length: int, entry: Entry, all_of: Sequence[Entry]) -> Timing:
        """What was measured of a system, beside the full cache and transformers.

        vs_full, vs_transformers: how many times as fast, by medians. step_bytes: weights and cache
        that a step reads; read_bytes_s: the rate from which its floor is computed; captured:
        whether it was one CUDA graph. kv_bytes: the cache after the prompt, with the tokens per
        head that it keeps.
        """
        system, seconds = entry.system, median(entry.times)

        def times_as_fast(**wanted: str) -> float | None:
            for other in all_of:
                if wanted.items() <= other.system.facts.items():
                    return median(other.times) / seconds
            return None

        facts: dict[str, Any] = {
            "kind": self.kind,
            "model": self.asked.name,
            "length": length,
            "tok_s": (1 if self.decode else length) / seconds,
            "vs_full": times_as_fast(policy="full", budget="-"),
            "vs_transformers": times_as_fast(system=systems.PEER),
            **system.facts,
            **{"step_bytes": {}, "kv_bytes": {}, "captured": None, "read_bytes_s": None},
            **entry.facts,
        }
        if not isinstance(system, Cached):
            return Timing(entry.times, None, facts)
        for notice in system.engine.notices:
            self.results.note(notice)
        if not self.decode:
            linear = networks.linear_flops(self.sizes, length) / self.rates.product(self.dtype)
            attention = networks.attention_flops(self.sizes, length) / self.attention
            return Timing(entry.times, linear + attention, facts)
        facts |= {"captured": system.engine.captured, "read_bytes_s": self.stream}
        return Timing(entry.times, sum(facts["step_bytes"].values()) / self.stream, facts)


_HEAD = ("system", "tok/s", "ms", "floor", "held", "x full", "x HF")


def _line(entry: Entry, timing: Timing) -> list[str]:
    """A row of the table."""
    facts, held = timing.facts, timing.facts["kv_bytes"].get("held")
    beside = (facts["vs_full"], facts["vs_transformers"])
    return [
        entry.name,
        number(facts["tok_s"]),
        number(1e3 * timing.seconds),
        percent(timing.share),
        "-" if held is None else size(int(held)),
        *("-" if times is None else f"{times:.2f}" for times in beside),
    ]


def measure(
    asked: Arguments, device: torch.device, rates: Rates, results: Results, *, decode: bool
) -> None:
    """Measure steps after prompts of every length, or the prompts, and add rows by length."""
    run = Run(asked, device, rates, results, decode)
    for length in asked.lengths():
        run.measure(length)

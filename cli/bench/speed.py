"""The time of decode steps and of prompts: systems in turns, so that they see one machine.

Whatever ends a run, what was measured by then is shown and written first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.cli.bench import machine, networks, systems
from minikv.cli.bench.asked import Asked
from minikv.cli.bench.systems import Cached, Transformers
from minikv.cli.measure import Results, choices
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import grid
from minikv.errors import ContextError, UsageError
from minikv.models.llama import Llama
from minikv.settings import Settings

_WARM = 3  # steps before those that count: the cache goes to the device, one step is captured
_WARM_PROMPT = 512  # tokens of a prompt that does not count, on a CPU; on a GPU a whole one
_READ = 256 << 20  # bytes that are read before a turn on a CPU, to see how fast memory is then
_LEGEND = """\
floor: share of what bandwidth measured in this run allows
x full, x HF: times as fast as the full cache, as transformers (sdpa)"""


def measure(asked: Asked, settings: Settings, terminal: Terminal, command: Sequence[str]) -> None:
    """Measure steps after prompts of every length, prompts, or both; `command` is for the record.
    Raises UsageError, ContextError, ModelError and MemoryShortError."""
    asked.check()
    evictions = choices(settings.policy, settings.budget, settings.decode, options=settings.options)
    record = {"command": " ".join(command), "complete": False, "rows": []}
    results = Results(terminal, asked.as_json, record)
    terminal.status("starting")
    device = machine.prepare(settings.device, settings.threads or 0)
    if settings.kernels == "triton" and device.type != "cuda":
        raise UsageError("no Triton kernels without a CUDA device", "use --kernels auto or torch")
    name = asked.folder or asked.shape.lower()
    if name == "auto":
        name = "llama-3-8b" if device.type == "cuda" else "s"
    sizes = None if asked.folder else networks.find(name)
    terminal.status("measuring the machine's bandwidth")
    rate, facts, made = machine.bandwidth(device), machine.facts(device), results.record
    made |= {"machine": facts, "versions": machine.versions(), "bandwidth": rate}
    results.show(machine.header(facts, rate, name))
    random = asked.folder is None
    spec = networks.Spec(
        sizes,
        None if random else Path(str(asked.folder)),
        "bfloat16" if random and settings.dtype == "auto" else settings.dtype,
        str(device),
    )
    try:
        run = Run(asked, settings, evictions, spec, rate, results)
        made["wanted"] |= {"model": name, "random_weights": random}
        for kind in ("decode", "prefill") if asked.question == "all" else (asked.question,):
            for length in asked.lengths():
                run.measure(kind, length)
        if results.failures:
            raise results.failures[0]
        made["complete"] = True
    finally:
        if made["rows"]:
            steps, dtype = (made["wanted"][one] for one in ("steps", "dtype"))
            rounds = f"medians of {asked.repeat} rounds in turns; {steps} steps a decode round"
            results.show(f"{rounds}; {dtype}\n{_LEGEND}")
            results.write(last=True)


@dataclass(slots=True, eq=False)
class Entry:
    """A system and its measurements. times: seconds, one a round. facts: of the cache after the
    prompt, and of a step."""

    system: Cached | Transformers
    times: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Run:
    """The networks of a run, and transformers beside them. `rate`: bytes a second."""

    def __init__(
        self,
        asked: Asked,
        settings: Settings,
        evictions: Sequence[EvictionConfig],
        spec: networks.Spec,
        rate: float,
        results: Results,
    ) -> None:
        """Raises ModelError, MemoryShortError, and ContextError for a length that the model cannot
        take beside so many steps."""
        self.asked, self.settings, self.evictions = asked, settings, evictions
        self.rate, self.results, self.device = rate, results, torch.device(spec.device)
        self.steps = asked.steps or (128 if self.device.type == "cuda" else 32)
        self.room = 2 * _WARM + asked.repeat * (_WARM + self.steps)  # steps of a prompt
        self.nets: dict[str, Llama] = {}
        for form in asked.weights():
            try:
                self.nets[form] = networks.network(replace(spec, weights=form))
            except Exception as error:
                if not self.nets:
                    raise
                results.fail(f"weights {form}", error)  # no such kernel on this processor
        net = next(iter(self.nets.values()))
        longest, most = max(asked.lengths()), net.config.max_context - self.room
        if longest > most:
            raise ContextError(
                f"--length {longest:,} is more than the {most:,} tokens that this model takes "
                "beside the steps that are measured",
                "a smaller --length",
            )
        self.vocab, dtype = net.config.vocab, str(net.dtype).removeprefix("torch.")
        self.peer = self._peer(replace(spec, dtype=dtype)) if asked.peer else None
        results.record["wanted"] = {
            "dtype": dtype,
            "weights": list(self.nets),
            "kv": settings.kv,
            "kernels": settings.kernels,
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

    def measure(self, kind: str, length: int) -> None:
        """Rows of every system for prompts of one length, the full cache first. kind: "decode" or
        "prefill"."""
        ids = networks.prompt(length, self.vocab)
        every = [
            Entry(Cached(net, eviction, self.settings.kernels, self.settings.kv, form))
            for form, net in self.nets.items()
            for eviction in self.evictions
        ]
        if self.peer is not None:  # it is compared with the first weights
            every.insert(len(self.evictions), Entry(self.peer))
        entries, what = list(every), f"{kind} {length:,}"
        if kind == "decode":
            begin, turn = self._read, self._write
        else:
            begin, turn = self._warm, self._prompt
        try:
            self._each(f"{what}: beginning", entries, lambda entry: begin(entry, ids))
            for number in range(self.asked.repeat):
                title = f"{what}: round {number + 1} of {self.asked.repeat}"
                self._each(title, entries, lambda entry: turn(entry, ids))
        finally:
            measured = [entry for entry in every if entry.times]
            if measured:
                rows = [self._row(kind, length, entry, measured) for entry in measured]
                self.results.record["rows"] += rows
                title = f"{kind}, {length:,} tokens"
                self.results.show(f"{title}\n{_table(rows, decode=kind == 'decode')}")
            self.results.write()
            for entry in every:
                entry.system.close()
            machine.settle(self.device)

    def _each(self, what: str, entries: list[Entry], work: Callable[[Entry], None]) -> None:
        """A turn of every system. One that fails takes no more turns."""
        for index, entry in enumerate(list(entries)):
            name = f"{what}, {entry.system.name}"
            self.results.progress(name, index, len(entries))
            try:
                work(entry)
                continue
            except Exception as error:
                if isinstance(entry.system, Cached):
                    self.results.fail(name, error)
                else:
                    self.results.note(f"{name}: {error}")
            # Outside, so that nothing of what failed is held by its traceback.
            entries.remove(entry)
            entry.system.close()
            machine.settle(self.device)

    def _warm(self, entry: Entry, ids: list[int]) -> None:
        entry.system.read(ids if self.device.type == "cuda" else ids[:_WARM_PROMPT])
        entry.system.close()

    def _prompt(self, entry: Entry, ids: list[int]) -> None:
        seconds = entry.system.read(ids, self.room)
        entry.times.append(seconds)
        entry.facts |= entry.system.held()
        entry.system.close()

    def _read(self, entry: Entry, ids: list[int]) -> None:
        entry.system.read(ids, self.room)
        entry.facts |= entry.system.held()
        entry.system.write(_WARM)
        if isinstance(entry.system, Cached):
            entry.facts["step_bytes"] = entry.system.step_bytes()

    def _write(self, entry: Entry, ids: list[int]) -> None:
        if self.device.type == "cpu":  # whose memory is faster at one time than at another
            self.rate = max(self.rate, machine.read_rate(_READ, 1))
        entry.system.write(_WARM)
        entry.times.append(entry.system.write(self.steps))

    def _row(self, kind: str, length: int, entry: Entry, all_of: Sequence[Entry]) -> dict[str, Any]:
        """What was measured of a system, for JSON.

        seconds: the median. floor_s: the time to read `step_bytes`, the weights and the cache that
        a step reads, at `read_bytes_s`. vs_full, vs_transformers: how many times as fast, by
        medians. captured: whether a step was one CUDA graph. kv_bytes: the cache after the prompt.
        """
        system, seconds = entry.system, median(entry.times)

        def times_as_fast(**wanted: str) -> float | None:
            for other in all_of:
                if wanted.items() <= other.system.facts.items():
                    return median(other.times) / seconds
            return None

        row: dict[str, Any] = {
            "kind": kind,
            "length": length,
            "name": system.name,
            **system.facts,
            "times": entry.times,
            "seconds": seconds,
            "tok_s": (length if kind == "prefill" else 1) / seconds,
            "vs_full": times_as_fast(policy="full", budget="-"),
            "vs_transformers": times_as_fast(system=systems.PEER),
            **{"kv_bytes": {}, "step_bytes": {}, "captured": None},
            **{"read_bytes_s": None, "floor_s": None},
            **entry.facts,
        }
        if isinstance(system, Cached):
            for notice in system.engine.notices:
                self.results.note(notice)
            if kind == "decode":
                floor = sum(row["step_bytes"].values()) / self.rate
                row |= {"captured": system.engine.captured, "read_bytes_s": self.rate}
                row["floor_s"] = floor
        return row


def _table(rows: Sequence[dict[str, Any]], *, decode: bool) -> str:
    floor = ["floor"] if decode else []
    lines = [["system", "tok/s", "ms", *floor, "held", "x full", "x HF"]]
    for row in rows:
        beside = (row["vs_full"], row["vs_transformers"])
        share = "-" if row["floor_s"] is None else f"{row['floor_s'] / row['seconds']:.0%}"
        lines.append(
            [
                row["name"],
                _number(row["tok_s"]),
                _number(1e3 * row["seconds"]),
                *([share] if decode else []),
                size(int(row["kv_bytes"]["held"])) if row["kv_bytes"] else "-",
                *("-" if times is None else f"{times:.2f}" for times in beside),
            ]
        )
    return grid(lines, "<" + ">" * (len(lines[0]) - 1))


def _number(value: float) -> str:
    """A number with three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"

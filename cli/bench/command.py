"""`minikv bench`: what is asked for is checked without torch, measured, shown and written.

What is measured is shown, and the file written anew, as soon as it is there; whatever ends a run,
what was measured by then is shown and written first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from minikv.cli.bench import place, shapes, show
from minikv.cli.bench.asked import Asked
from minikv.cli.bench.deadline import Deadline
from minikv.cli.bench.ending import Watch
from minikv.cli.terminal import Terminal
from minikv.errors import MinikvError, UsageError

if TYPE_CHECKING:
    import torch

    from minikv.cli.bench.everything import Done, Everything
    from minikv.cli.bench.floors import Rates
    from minikv.cli.bench.models import Spec
    from minikv.cli.bench.run import Wanted


class Record:
    """What a run is about and what it has measured, as --json writes it: "complete" is false until
    it has come to its own end."""

    def __init__(self, command: Sequence[str], terminal: Terminal, target: str | None) -> None:
        self.terminal, self.target = terminal, target
        self.made: dict[str, object] = {"command": " ".join(command), "complete": False}
        self.tables: list[str] = []
        self._shown = 0

    def show(self) -> None:
        """Print the tables that are new, unless stdout is for JSON."""
        self.terminal.clear_status()
        if self.target != show.STDOUT:
            for text in self.tables[self._shown :]:
                self.terminal.data(text + "\n")
        self._shown = len(self.tables)

    def save(self) -> None:
        """Print what is new and write what there is so far: a run that is killed loses nothing. A
        disk that is full now may not be so at the end."""
        self.show()
        if self.target is not None and self.target != show.STDOUT:
            try:
                show.write(self.made, Path(self.target))
            except UsageError as error:
                self.terminal.warn(str(error))

    def finish(self, *, complete: bool) -> None:
        """Print what is left and write the object. Raises UsageError."""
        self.made["complete"] = complete
        self.show()
        if self.target == show.STDOUT:
            self.terminal.data(json.dumps(self.made))
        elif self.target is not None:
            show.write(self.made, Path(self.target))
            self.terminal.note(f"written to {self.target}")


def measure(
    kind: str, asked: Asked, command: Sequence[str], terminal: Terminal, target: str | None
) -> None:
    """`bench decode` or `bench prefill`. Raises UsageError before torch is loaded where it can,
    ContextError, ModelError and MemoryShortError."""
    asked.check()
    show.check(target)
    choices, lengths = asked.choices(), asked.lengths()
    formats = asked.formats()
    terminal.status("starting")
    device = place.prepare(asked.device, asked.threads)
    if asked.kernels == "triton" and device.type != "cuda":
        raise UsageError("no Triton kernels without a CUDA device", "use --kernels auto or torch")
    from minikv.cli.bench import run

    wanted = run.Wanted(
        spec_of(asked, device),
        asked.model or asked.shape.lower(),
        choices,
        lengths,
        formats,
        asked.repeat,
        asked.steps or (128 if device.type == "cuda" else 32),
        asked.peer,
    )
    record = Record(command, terminal, target)
    rates = start(record, device, wanted.model, terminal)
    bench = run.Bench(wanted, rates, Pace(terminal))
    shown, done = 0, False

    def so_far() -> None:
        nonlocal shown
        if bench.rows[shown:]:
            record.tables.append(show.table(bench.rows[shown:]))
            shown = len(bench.rows)
        record.made |= {
            "wanted": describe(bench.wanted),
            "rows": [row.record() for row in bench.rows],
            "attention_flops_s": bench.attending,
            "notes": bench.notes,
        }

    try:
        bench.check()
        for length in wanted.lengths:
            bench.decode(length) if kind == "decode" else bench.prefill(length)
            so_far()
            record.save()
        done = True
    finally:
        bench.close()
        for note in bench.notes:
            terminal.warn(note)
        so_far()
        if bench.rows:
            record.tables.append(legend(bench.wanted))
        if done or bench.rows:
            record.finish(complete=done)


def start(record: Record, device: torch.device, model: str, terminal: Terminal) -> Rates:
    """Measure the machine and put it at the head of the record."""
    from minikv.cli.bench import machine

    terminal.status("measuring the machine's bandwidth and products")
    rates = machine.measure(device)
    facts = machine.facts(device)
    record.made |= {"machine": facts, "versions": machine.versions(), "rates": asdict(rates)}
    record.tables.append(show.header(facts, rates, model))
    record.show()
    return rates


class Pace:
    """Progress on stderr: what is measured now, how far, and how long it will take."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._began: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        """Before piece `done` of `total`; `what` begins with the name of the whole."""
        whole = what.partition(":")[0]
        began = self._began.setdefault(whole, perf_counter())
        if done >= total:
            self._terminal.status(what)
            return
        left = ""
        if done:
            minutes, rest = divmod(round((total - done) * (perf_counter() - began) / done), 60)
            left = f", about {minutes}:{rest:02d} left"
        self._terminal.status(f"{what}, {done + 1} of {total}{left}")


def legend(wanted: Wanted) -> str:
    """What the columns mean, and how they came about."""
    lines = [
        f"medians of {wanted.repeat} rounds in turns; {wanted.steps} steps a decode round; "
        f"{wanted.spec.dtype}",
        columns(wanted.peer),
    ]
    return "\n".join(lines)


def columns(peer: bool) -> str:
    """What the columns of rows mean."""
    lines = [
        "floor: share of what bandwidth and products measured in this run allow",
        "evict: a step over the same cache without a policy; a prompt over full's",
        "x full: times as fast as the full cache",
    ]
    if peer:
        lines.append("x HF: times as fast as transformers (sdpa), forward by forward")
    return "\n".join(lines)


def describe(wanted: Wanted) -> dict[str, object]:
    """For JSON: what was measured."""
    spec = wanted.spec
    return {
        "model": wanted.model,
        "random_weights": spec.folder is None,
        "dtype": spec.dtype,
        "weights": list(wanted.formats),
        "kv": spec.kv,
        "kernels": spec.kernels,
        "repeat": wanted.repeat,
        "steps": wanted.steps,
    }


def spec_of(asked: Asked, device: torch.device) -> Spec:
    """Which network. Random weights are bfloat16 unless another dtype is asked for."""
    from minikv.cli.bench.models import Spec

    if asked.model is not None:
        return Spec(
            None, Path(asked.model), asked.dtype, str(device), kernels=asked.kernels, kv=asked.kv
        )
    dtype = "bfloat16" if asked.dtype == "auto" else asked.dtype
    sizes = shapes.find(asked.shape)
    return Spec(sizes, None, dtype, str(device), kernels=asked.kernels, kv=asked.kv)


def measure_kernels(
    shape: str,
    lengths: tuple[int, ...],
    device_flag: str,
    kernels: str,
    threads: int,
    repeat: int,
    command: Sequence[str],
    terminal: Terminal,
    target: str | None,
) -> None:
    """`bench kernels`. Raises UsageError where the kernels that are wanted cannot run."""
    sizes = shapes.find(shape)
    place.check_threads(threads)
    show.check(target)
    terminal.status("starting")
    device = place.prepare(device_flag, threads)
    import torch

    from minikv.cli.bench import kernels as bench

    operations = bench.who(device, kernels, sizes.head_dim)
    record = Record(command, terminal, target)
    rates = start(record, device, f"{operations.name} kernels, heads of {shape},", terminal)
    timings, notes, done = list[bench.Timing](), list[str](), False
    pace = Pace(terminal)
    try:
        table = list(bench.cases(sizes, torch.bfloat16, lengths))
        for number, case in enumerate(table):
            pace(f"kernels: {case.name}, {case.case}", number, len(table))
            lacks = bench.missing(case, operations)
            if lacks:
                notes.append(f"{case.name}: no {', '.join(lacks)} in this version")
                continue
            timings.append(bench.timed(case, operations, device, rates, repeat))
        done = True
    finally:
        for note in dict.fromkeys(notes):
            terminal.warn(note)
        record.made |= {
            "shape": shape,
            "kernels": [timing.record() for timing in timings],
            "notes": notes,
        }
        if timings:
            record.tables.append(show.kernels_table(timings))
            record.finish(complete=done)


_MOST_MINUTES = 24 * 60
_GRACE, _WATCH = 0.10, 0.14  # of the time: what has begun is stopped, and then the process
_LEAST_WATCH = 15.0  # seconds, however few minutes: loading and giving back take some


def measure_all(
    device_flag: str,
    threads: int,
    repeat: int,
    peer: bool,
    full: bool,
    minutes: float,
    command: Sequence[str],
    terminal: Terminal,
    target: str | None,
) -> None:
    """`bench all`: what this machine can show, in so many minutes. Raises UsageError, and
    MinikvError when nothing at all could be measured."""
    began = perf_counter()
    place.check_threads(threads)
    show.check(target)
    if not 0 < minutes <= _MOST_MINUTES:
        raise UsageError(f"--minutes must be more than 0, at most {_MOST_MINUTES:,}")
    terminal.status("starting")
    device = place.prepare(device_flag, threads)
    from minikv.cli.bench import on_cpu, on_gpu
    from minikv.cli.bench.everything import Everything

    parts = on_gpu.PARTS if device.type == "cuda" else on_cpu.PARTS
    record = Record(command, terminal, target)
    rates = start(record, device, "the whole list", terminal)
    seconds = 60 * minutes
    deadline = Deadline(seconds - (perf_counter() - began), grace=_GRACE * seconds)
    everything = Everything(
        device, rates, Pace(terminal), repeat=repeat, peer=peer, deadline=deadline
    )
    listing = Listing(record, everything, began, minutes)
    watch = Watch(
        seconds - (perf_counter() - began) + max(_WATCH * seconds, _LEAST_WATCH), listing.cut
    )
    done = False
    try:
        everything.go(parts, full, listing.after)
        done = not everything.broken
    finally:
        watch.close()
        listing.close(complete=done)
    if not everything.measured:
        raise MinikvError("nothing could be measured", "the lines above say why")


class Listing:
    """Shows and writes `bench all` part by part."""

    def __init__(
        self, record: Record, everything: Everything, began: float, minutes: float
    ) -> None:
        self._record, self._every = record, everything
        self._began, self._minutes = began, minutes
        self._rows = self._timings = self._notes = 0  # that are shown

    def after(self, done: Done) -> None:
        """A part is done."""
        self._gather()
        self._record.save()
        self._warn()
        if done.state != "left out":
            self._record.terminal.note(f"{done.name}: {done.seconds:.0f} s")

    def close(self, *, complete: bool) -> None:
        """The end: the goals, whatever became of them."""
        self._gather()
        if self._every.rows:
            peer = any(row.vs_peer is not None for row in self._every.rows)
            self._record.tables.append(columns(peer))
        if self._every.goals and self._every.measured:
            self._record.tables.append(show.goals_table(self._every.goals))
        self._warn()
        if complete or self._every.measured:
            self._record.finish(complete=complete)

    def cut(self) -> int:
        """Time is over and something does not end. The status to end with."""
        self._every.notes.append(
            f"{self._every.now or 'the end'}: did not end in time, and the process was ended"
        )
        self.close(complete=False)
        return 0 if self._every.measured else 1

    def _gather(self) -> None:
        """What is new as tables, and everything for JSON."""
        every, record = self._every, self._record
        rows, timings = every.rows[self._rows :], every.timings[self._timings :]
        if rows:
            record.tables.append(show.table(rows))
        if timings:
            record.tables.append(show.kernels_table(timings))
        self._rows, self._timings = len(every.rows), len(every.timings)
        record.made |= every.record() | {
            "minutes": self._minutes,
            "seconds": perf_counter() - self._began,
        }

    def _warn(self) -> None:
        for note in self._every.notes[self._notes :]:
            self._record.terminal.warn(note)
        self._notes = len(self._every.notes)

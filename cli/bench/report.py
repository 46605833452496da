"""Results by the names that JSON uses, as tables of at most 80 columns and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from minikv.chat.report import size
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import grid
from minikv.cli.wording import worded
from minikv.errors import MinikvError, UsageError

STDOUT = "-"
"""The value of --json without a file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one length. None: not measured.

    times: seconds of a step (decode) or of the prompt (prefill), one per round. floor_s: the least
    that the hardware allows. evict: by how much longer a step takes than over the same cache
    without a policy (lower quartile, median, upper quartile of short turns). vs_full,
    vs_transformers: how many times as fast, by medians. step_bytes: weights and cache that a step
    reads; read_bytes_s: the rate from which its floor is computed; captured: whether it was one
    CUDA graph. kv_bytes: the cache after the prompt, with the tokens per head that it keeps.
    """

    kind: str
    model: str
    system: str
    length: int
    times: list[float]
    policy: str = "-"
    decode: str = "-"
    budget: str = "-"
    weights: str = "-"
    kv: str = "auto"
    floor_s: float | None = None
    evict: list[float] | None = None
    vs_full: float | None = None
    vs_transformers: float | None = None
    step_bytes: dict[str, float] = field(default_factory=dict)
    kv_bytes: dict[str, float] = field(default_factory=dict)
    captured: bool | None = None
    read_bytes_s: float | None = None

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return median(self.times)

    @property
    def tok_s(self) -> float:
        """Tokens a second."""
        return (self.length if self.kind == "prefill" else 1) / self.seconds

    @property
    def share_of_floor(self) -> float | None:
        """The floor's part of the time: 1 would be the hardware's limit."""
        return None if self.floor_s is None else self.floor_s / self.seconds

    @property
    def name(self) -> str:
        """The system and what it runs under, in a few words."""
        if self.system != "minikv":
            return self.system
        step = f"+{self.decode}" if self.decode not in ("none", self.policy, "-") else ""
        parts = [self.policy + step]
        parts += [x for x in (self.budget, self.weights) if x not in ("auto", "-")]
        return " ".join([*parts, f"kv {self.kv}"] if self.kv != "auto" else parts)

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        derived = {"seconds": self.seconds, "tok_s": self.tok_s}
        return asdict(self) | derived | {"share_of_floor": self.share_of_floor}


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel on one size of inputs. kernels: which kernels ran (triton, native or torch).
    floor_s: seconds at the machine's rates. captured: whether the calls were one CUDA graph."""

    kernel: str
    case: str
    kernels: str
    times: list[float]
    bytes: int
    flops: int
    floor_s: float
    captured: bool

    @property
    def seconds(self) -> float:
        """Median of a call."""
        return median(self.times)

    @property
    def share_of_floor(self) -> float:
        """The floor's part of the time."""
        return self.floor_s / self.seconds

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self) | {"seconds": self.seconds, "share_of_floor": self.share_of_floor}


class Report:
    """Shows results, and writes them to FILE as they come; "complete" is false until the end."""

    def __init__(self, command: Sequence[str], terminal: Terminal, target: str | None) -> None:
        """Raises UsageError for a file that cannot be written, before anything is measured."""
        if target not in (None, STDOUT):
            path = Path(str(target))
            if path.is_dir():
                hint = "--json takes a file, or nothing for stdout"
                raise UsageError(f"{target} is a directory", hint)
            if not path.absolute().parent.is_dir():
                raise UsageError(f"there is no directory {path.parent}")
        self.terminal, self.target = terminal, target
        self.record: dict[str, Any] = {"command": " ".join(command), "complete": False}
        self.record |= {"rows": [], "kernels": [], "notes": []}
        self.failures: list[Exception] = []  # of single systems; the others were measured
        self._began: dict[str, float] = {}

    def progress(self, what: str, done: int, total: int) -> None:
        """Before piece `done` of `total`; `what` begins with the name of the whole."""
        began = self._began.setdefault(what.partition(":")[0], perf_counter())
        far = f", {done + 1} of {total}"
        if done:
            minutes, rest = divmod(round((total - done) * (perf_counter() - began) / done), 60)
            far += f", about {minutes}:{rest:02d} left"
        self.terminal.status(what + far)

    def add(self, rows: Sequence[Row] = (), kernels: Sequence[Timing] = ()) -> None:
        """Show results and write the file: a run that is killed loses nothing."""
        self.record["rows"] += [row.record() for row in rows]
        self.record["kernels"] += [timing.record() for timing in kernels]
        if rows:
            self.show(table(rows))
        if kernels:
            self.show(kernels_table(kernels))
        if self.target != STDOUT:
            self._write()

    def note(self, text: str) -> None:
        """A line for the user, once."""
        if text not in self.record["notes"]:
            self.record["notes"].append(text)
            self.terminal.warn(text)

    def fail(self, what: str, error: Exception) -> None:
        """One system failed: the others are measured, and the first error ends the run."""
        self.note(f"{what}: {one_line(error)}")
        self.failures.append(error.with_traceback(None))  # a traceback keeps tensors alive

    def show(self, text: str) -> None:
        """Print a table, unless stdout is for JSON."""
        self.terminal.clear_status()
        if self.target != STDOUT:
            self.terminal.data(text + "\n")

    def close(self, *, complete: bool) -> None:
        """Write the whole object, if there is anything in it. Raises UsageError."""
        self.record["complete"] = complete
        if not (complete or self.record["rows"] or self.record["kernels"]):
            return
        if self.target == STDOUT:
            self.terminal.data(json.dumps(self.record))
        elif self.target is not None:
            self._write()
            self.terminal.note(f"written to {self.target}")

    def _write(self) -> None:
        if self.target is None:
            return
        try:
            Path(self.target).write_text(json.dumps(self.record, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {self.target}: {error.strerror}") from None


def one_line(error: BaseException) -> str:
    """An error in at most 200 characters. An error not meant for users begins with its type."""
    from minikv.models.errors import ModelError  # late: brings torch

    said = " ".join(worded(str(error)).split())
    if not isinstance(error, (MinikvError, ModelError)):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return said[:200]


# -- tables -----------------------------------------------------------------------------------


def header(facts: Mapping[str, object], rates: Mapping[str, Any], about: str) -> str:
    """The machine and its rates, three lines."""
    threads = facts["threads"]
    plural = "" if threads == 1 else "s"
    what = facts.get("gpu") or f"{facts['processor']}, {threads} thread{plural}"
    speeds = f"copy {_bytes(rates['copy'])}"
    if rates["read_1"] is not None:
        alone = _bytes(rates["read_1"])
        speeds = f"read {_bytes(rates['read'])}, {alone} with one thread · {speeds}"
    products = f"products {_flops(rates['matmul'])} bf16, {_flops(rates['matmul_fp32'])} fp32"
    return f"{about} on {what}\n{speeds}\n{products}"


LEGEND = """\
floor: share of what bandwidth and products measured in this run allow
evict: a step over the same cache without a policy, median of short turns
x full, x HF: times as fast as the full cache, as transformers (sdpa)"""


def table(rows: Sequence[Row]) -> str:
    """The rows of one length of a model, the full cache first."""
    lines = [["system", "tok/s", "ms", "floor", "evict", "held", "x full", "x HF"]]
    for row in rows:
        share, held = row.share_of_floor, row.kv_bytes.get("held")
        lines.append(
            [
                row.name,
                _number(row.tok_s),
                _number(1e3 * row.seconds),
                "-" if share is None else f"{share:.0%}",
                "-" if row.evict is None else f"{row.evict[1]:+.1%}",
                "-" if held is None else size(int(held)),
                *("-" if x is None else f"{x:.2f}" for x in (row.vs_full, row.vs_transformers)),
            ]
        )
    first = rows[0]
    title = f"{first.kind}, {first.model}, {first.length:,} tokens"
    return f"{title}\n{grid(lines, '<' + '>' * (len(lines[0]) - 1))}"


def kernels_table(timings: Sequence[Timing]) -> str:
    """A row per kernel and case."""
    lines = [["kernel", "case", "time", "moved", "rate", "floor"]]
    for t in timings:
        rate = _flops(t.flops / t.seconds) if t.flops else _bytes(t.bytes / t.seconds)
        moved = f"{t.flops / 1e9:,.1f} GFLOP" if t.flops else size(t.bytes)
        lines.append([t.kernel, t.case, _time(t.seconds), moved, rate, f"{t.share_of_floor:.0%}"])
    return grid(lines, "<<>>>>")


def _number(value: float) -> str:
    """A number with three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{_number(seconds / scale)} {unit}"
    return f"{_number(seconds / 1e-6)} us"


def _bytes(rate: float) -> str:
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"

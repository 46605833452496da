"""Results as tables of at most 80 columns, and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from minikv.chat.report import size
from minikv.cli.bench.floors import Rates
from minikv.cli.bench.results import Results, Row, Timing
from minikv.cli.export import files
from minikv.cli.tables import grid
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError

STDOUT = "-"
"""The value of --json without a file."""


class Report:
    """Shows results and writes them to FILE as they come; "complete" is false until the end."""

    def __init__(self, command: Sequence[str], terminal: Terminal, target: str | None) -> None:
        """Raises UsageError for a file that cannot be written, before anything is measured."""
        _check(target)
        self.terminal, self.target = terminal, target
        self.record: dict[str, Any] = {"command": " ".join(command), "complete": False}
        self._rows = self._kernels = self._notes = 0  # that are shown
        self._began: dict[str, float] = {}

    def machine(
        self, facts: dict[str, object], versions: Mapping[str, object], rates: Rates, about: str
    ) -> None:
        """Begin with the machine and its rates."""
        self.record |= {"machine": facts, "versions": versions, "rates": asdict(rates)}
        self.show(header(facts, rates, about))

    def progress(self, what: str, done: int, total: int) -> None:
        """Before piece `done` of `total`; `what` begins with the name of the whole."""
        began = self._began.setdefault(what.partition(":")[0], perf_counter())
        far = f", {done + 1} of {total}" if done < total else ""
        if far and done:
            minutes, rest = divmod(round((total - done) * (perf_counter() - began) / done), 60)
            far += f", about {minutes}:{rest:02d} left"
        self.terminal.status(what + far)

    def update(self, results: Results) -> None:
        """Show what is new, and write the file: a run that is killed loses nothing."""
        if rows := results.rows[self._rows :]:
            self.show(table(rows))
        if kernels := results.kernels[self._kernels :]:
            self.show(kernels_table(kernels))
        for note in results.notes[self._notes :]:
            self.terminal.warn(note)
        self._rows, self._kernels = len(results.rows), len(results.kernels)
        self._notes = len(results.notes)
        if self.target not in (None, STDOUT):
            try:
                self._write()
            except UsageError as error:  # a disk that is full now may have room at the end
                self.terminal.warn(str(error))

    def show(self, text: str) -> None:
        """Print a table, unless stdout is for JSON."""
        self.terminal.clear_status()
        if self.target != STDOUT:
            self.terminal.data(text + "\n")

    def close(self, *, complete: bool) -> None:
        """Write the whole object. Raises UsageError."""
        self.record["complete"] = complete
        if self.target == STDOUT:
            self.terminal.data(json.dumps(self.record))
        elif self.target is not None:
            self._write()
            self.terminal.note(f"written to {self.target}")

    def _write(self) -> None:
        """Replace the file in one step: a reader finds the old or the new one, never a part."""
        path = Path(str(self.target)).resolve()
        text = json.dumps(self.record, indent=1) + "\n"
        if path.exists() and not path.is_file():  # a pipe, a terminal: nothing to replace
            path.write_text(text)
            return
        mode = path.stat().st_mode & 0o777 if path.exists() else None
        files.write(path, text, force=True)
        if mode is not None:
            path.chmod(mode)


def _check(target: str | None) -> None:
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{target} is a directory", "--json takes a file, or nothing for stdout")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}")


# -- tables -----------------------------------------------------------------------------------


def header(facts: Mapping[str, object], rates: Rates, about: str) -> str:
    """The machine and its rates, three lines."""
    threads = facts["threads"]
    plural = "" if threads == 1 else "s"
    what = facts.get("gpu") or f"{facts['processor']}, {threads} thread{plural}"
    speeds = f"copy {_bytes(rates.copy)}"
    if rates.read_1 is not None:
        speeds = f"read {_bytes(rates.read)}, {_bytes(rates.read_1)} with one thread · {speeds}"
    products = f"products {_flops(rates.matmul)} bf16, {_flops(rates.matmul_fp32)} fp32"
    return f"{about} on {what}\n{speeds}\n{products}"


def table(rows: Sequence[Row]) -> str:
    """A block for every length of a model, with the full cache first."""
    blocks = []
    for kind, model, length in dict.fromkeys((r.kind, r.model, r.length) for r in rows):
        mine = [r for r in rows if (r.kind, r.model, r.length) == (kind, model, length)]
        blocks.append(f"{kind}, {model}, {length:,} tokens\n{_block(mine)}")
    return "\n\n".join(blocks)


def _block(rows: Sequence[Row]) -> str:
    lines = [["system", "tok/s", "ms", "floor", "evict", "held", "peak", "x full", "x HF"]]
    for row in rows:
        share = row.share_of_floor
        lines.append(
            [
                name(row),
                _number(row.tok_s),
                _number(1e3 * row.seconds),
                "-" if share is None else f"{share:.0%}",
                "-" if row.evict_share is None else f"{row.evict_share:+.1%}",
                _short(row.kv_bytes.get("held")),
                _short(row.peak_bytes),
                "-" if row.vs_full is None else f"{row.vs_full:.2f}",
                "-" if row.vs_transformers is None else f"{row.vs_transformers:.2f}",
            ]
        )
    if all(row.vs_transformers is None for row in rows):
        lines = [line[:-1] for line in lines]
    return grid(lines, "<" + ">" * (len(lines[0]) - 1))


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


def name(row: Row) -> str:
    """A system and what it runs under, in a few words."""
    if row.system != "minikv":
        return row.system
    parts = [row.policy]
    if row.decode not in ("none", row.policy, "-"):
        parts[0] += f"+{row.decode}"
    if row.stride:
        parts[0] += f"/{row.stride}"
    if row.budget != "-":
        parts.append(row.budget)
    if row.weights not in ("auto", "-"):
        parts.append(row.weights)
    if row.kv != "auto":
        parts.append(f"kv {row.kv}")
    return " ".join(parts)


def kernels_table(timings: Sequence[Timing]) -> str:
    """A row per kernel and case."""
    lines = [["kernel", "case", "time", "moved", "rate", "floor"]]
    for t in timings:
        rate = _flops(t.flops / t.seconds) if t.flops else _bytes(t.bytes / t.seconds)
        moved = f"{t.flops / 1e9:,.1f} GFLOP" if t.flops else size(t.bytes)
        lines.append([t.kernel, t.case, _time(t.seconds), moved, rate, f"{t.share_of_floor:.0%}"])
    return grid(lines, "<<>>>>")


def figure(value: float, unit: str) -> str:
    """A figure with its unit: %, x (times) or s."""
    if unit == "%":
        return f"{100 * value:.1f}%"
    return f"x{value:.2f}" if unit == "x" else f"{_number(value)} {unit}"


def _short(count: float | None) -> str:
    """Bytes in at most five characters: "986M", "1.2G"."""
    if count is None:
        return "-"
    for unit in "BKMG":
        if count < 999.5 or unit == "G":
            break
        count /= 1024
    return f"{count:.1f}{unit}" if count < 9.95 and unit != "B" else f"{count:.0f}{unit}"


def _number(value: float) -> str:
    """A number with three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _time(seconds: float) -> str:
    scale, unit = next(
        ((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us")
    )
    return f"{_number(seconds / scale)} {unit}"


def _bytes(rate: float) -> str:
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"

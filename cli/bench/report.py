"""Results as tables of at most 80 columns and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from minikv.cli.screen.progress import Live
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import grid
from minikv.cli.wording import worded
from minikv.errors import MinikvError, UsageError

STDOUT = "-"
"""The value of --json without a file."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a system or a kernel, one per round. floor_s: the least that the hardware allows,
    None if it is not known. facts: what the JSON has beside them, by its names."""

    times: Sequence[float]
    floor_s: float | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return median(self.times)

    @property
    def share(self) -> float | None:
        """The floor's part of the time: 1 would be the hardware's limit."""
        return None if self.floor_s is None else self.floor_s / self.seconds

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        times = {"times": list(self.times), "floor_s": self.floor_s, "seconds": self.seconds}
        return {**self.facts, **times, "share_of_floor": self.share}


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
        self._live, self._whole = Live(terminal, "", "parts"), ""

    def progress(self, what: str, done: int, total: int) -> None:
        """Before piece `done` of `total`; `what` begins with the name of the whole."""
        if self._whole != (whole := what.partition(":")[0]):
            self._whole = whole
            self._live.restart(what)
        self._live.label = what
        self._live(done, total)

    def add(self, part: str, timings: Sequence[Timing], table: str) -> None:
        """Show the table of some timings, and write the file: a run that is killed loses nothing.
        part: "rows" or "kernels"."""
        self.record[part] += [timing.record() for timing in timings]
        if timings:
            self.show(table)
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


def header(facts: Mapping[str, object], rates: Mapping[str, Any], about: str) -> str:
    """The machine and its rates, three lines."""
    threads = facts["threads"]
    plural = "" if threads == 1 else "s"
    what = facts.get("gpu") or f"{facts['processor']}, {threads} thread{plural}"
    speeds = f"copy {rate(rates['copy'])}"
    if rates["read_1"] is not None:
        alone = rate(rates["read_1"])
        speeds = f"read {rate(rates['read'])}, {alone} with one thread · {speeds}"
    products = f"products {flops(rates['matmul'])} bf16, {flops(rates['matmul_fp32'])} fp32"
    return f"{about} on {what}\n{speeds}\n{products}"


def table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns under their headings, the first to the left."""
    shown = grid([head, *lines], "<" + ">" * (len(head) - 1))
    return f"{title}\n{shown}" if title else shown


def number(value: float) -> str:
    """A number with three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """ "-" for None."""
    return "-" if share is None else f"{share:.0%}"


def rate(per_second: float) -> str:
    """Bytes a second."""
    if per_second >= 1e12:
        return f"{per_second / 1e12:.2f} TB/s"
    return f"{per_second / 1e9:.1f} GB/s"


def flops(per_second: float) -> str:
    """Floating point operations a second."""
    if per_second >= 1e13:
        return f"{per_second / 1e12:.0f} TFLOP/s"
    return f"{per_second / 1e9:,.0f} GFLOP/s"

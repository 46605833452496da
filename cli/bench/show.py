"""The measurements as a table of at most 80 columns, and as one JSON object."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.report import size
from minikv.cli.bench.floors import Goal, Rates
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.cli.bench.kernels import Timing
    from minikv.cli.bench.rows import Row

STDOUT = "-"
"""What --json is without a file."""


def header(facts: Mapping[str, object], rates: Rates, model: str) -> str:
    """The machine and its rates, two lines."""
    threads = facts["threads"]
    plural = "" if threads == 1 else "s"
    what = facts.get("gpu") or f"{facts['processor']}, {threads} thread{plural}"
    speeds = [f"copy {_bytes(rates.copy)}"]
    if not rates.on_gpu:
        alone = "" if rates.read_1 is None else f", {_bytes(rates.read_1)} with one thread"
        speeds.insert(0, f"read {_bytes(rates.read)}{alone}")
    products = f"products {_flops(rates.matmul)} bf16, {_flops(rates.matmul_fp32)} fp32"
    return f"{model} on {what}\n{' · '.join(speeds)}\n{products}"


def table(rows: Sequence[Row]) -> str:
    """A block for every length of a model, with the full cache first."""
    blocks = []
    for kind, model, length in dict.fromkeys((r.kind, r.model, r.length) for r in rows):
        mine = [r for r in rows if (r.kind, r.model, r.length) == (kind, model, length)]
        blocks.append(f"{kind}, {model}, {length:,} tokens\n{_block(mine)}")
    return "\n\n".join(blocks)


_HEADS = ("system", "tok/s", "ms", "floor", "evict", "held", "peak", "x full")


def _block(rows: Sequence[Row]) -> str:
    peer = any(row.vs_peer is not None for row in rows)
    lines = [[*_HEADS, "x HF"] if peer else list(_HEADS)]
    for row in rows:
        cells = [
            name(row),
            _number(row.rate),
            _number(1e3 * row.seconds),
            "-" if row.share is None else f"{row.share:.0%}",
            "-" if row.evict is None else f"{row.evict:+.1%}",
            _short(row.kv["held"]) if row.kv else "-",
            "-" if row.peak is None else _short(row.peak),
            _times(row.vs_full),
        ]
        lines.append([*cells, _times(row.vs_peer)] if peer else cells)
    return grid(lines, "<" + ">" * (len(lines[0]) - 1))


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _short(count: float) -> str:
    """Bytes in at most five characters: "986M", "1.2G"."""
    for unit in "BKMG":
        if count < 999.5 or unit == "G":
            break
        count /= 1024
    return f"{count:.1f}{unit}" if count < 9.95 and unit != "B" else f"{count:.0f}{unit}"


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
    if row.kept_in != "auto":
        parts.append(f"kv {row.kept_in}")
    return " ".join(parts)


def kernels_table(timings: Sequence[Timing]) -> str:
    """A row per kernel and case."""
    lines = [["kernel", "case", "time", "moved", "rate", "floor"]]
    for t in timings:
        rate = _flops(t.flops / t.seconds) if t.flops else _bytes(t.nbytes / t.seconds)
        moved = f"{t.flops / 1e9:,.1f} GFLOP" if t.flops else size(t.nbytes)
        lines.append([t.name, t.case, _time(t.seconds), moved, rate, f"{t.share:.0%}"])
    return grid(lines, "<<>>>>")


def goals_table(goals: Sequence[Goal]) -> str:
    """Each goal beside what was measured."""
    lines = [["goal", "measured", "wanted", "first", ""]]
    for goal in goals:
        lines.append(
            [
                goal.name,
                "-" if goal.measured is None else _figure(goal, goal.measured),
                _figure(goal, goal.goal),
                "-" if goal.first is None else _figure(goal, goal.first),
                goal.state
                + (f": {_cut(goal.note)}" if goal.measured is None and goal.note else ""),
            ]
        )
    return grid(lines, "<>>><")


def _cut(why: str, most: int = 24) -> str:
    """The beginning of a reason, which a note or JSON has whole."""
    return why if len(why) <= most else f"{why[: most - 1].rstrip()}…"


def grid(lines: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Columns of equal width with two spaces between them."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(sides))]
    return "\n".join(
        "  ".join(
            f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _figure(goal: Goal, value: float) -> str:
    if goal.unit == "%":
        return f"{100 * value:.1f}%"
    if goal.unit == "x":
        return f"x{value:.2f}"
    return f"{_number(value)} {goal.unit}"


def _number(value: float) -> str:
    """Three digits that say something."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{_number(seconds / scale)} {unit}"
    raise AssertionError


def _bytes(rate: float) -> str:
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"


# -- JSON -----------------------------------------------------------------------------------


def check(target: str | None) -> None:
    """Raise UsageError for a file that could not be written, before anything is measured."""
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{target} is a directory", "--json takes a file, or nothing for stdout")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}")


def write(record: Mapping[str, object], path: Path) -> None:
    """One object, indented; whoever reads the file finds the old one or the new one, whole. Raises
    UsageError."""
    text = json.dumps(record, indent=1) + "\n"
    try:
        if path.exists() and not path.is_file():  # a pipe, a terminal: nothing to replace
            path.write_text(text)
            return
        real = path.resolve()
        made, name = tempfile.mkstemp(prefix=f".{real.name}.", dir=real.parent)
        try:
            with os.fdopen(made, "w") as file:
                file.write(text)
            os.chmod(name, _mode(real))
            os.replace(name, real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _mode(path: Path) -> int:
    """Who may read and write a file: as before, or as any new one."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask

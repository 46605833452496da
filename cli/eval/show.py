"""Results for a terminal and for files: a table, CSV, JSON and a map of the task needle."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minikv.cli.eval.cells import Cell
from minikv.cli.eval.tasks import CHATS
from minikv.cli.screen import text
from minikv.errors import UsageError
from minikv.policies import default_step

_BAR = 30
_UNIT = {"ppl": "perplexity", "loss": "attention lost", "agree": "same as full"}
_MORE = {
    "agree": {"rouge_l": "ROUGE-L", "median_first_difference": "words before difference"},
    **{chat: {"same": "same as full", "all_right": "all right"} for chat in CHATS},
}
"""Further figures of a task, with their headings. Of `agree`: the mean ROUGE-L, and the median
number of equal words at the beginning of answers that differ. Of a chat: the share of answers equal
to the full cache's, and the share of chats without a wrong answer."""


def bar(done: int, total: int, seconds: float, what: str) -> str:
    """A progress bar with the time that is left at this pace. seconds: the time until now."""
    filled = _BAR * done // total
    line = f"{what}  [{'=' * filled}{' ' * (_BAR - filled)}] {done:,}/{total:,}"
    if done:
        minutes, rest = divmod(round((total - done) * seconds / done), 60)
        line += f"  {minutes}:{rest:02d} left"
    return line


def names(cells: Sequence[Cell]) -> list[str]:
    """A short name of each cell: its policy and budget. If the decode policy of any cell is not its
    policy's default, names include it. If the reuse of any cell is not "once", names include it."""
    with_decode = any(not c.stride and c.decode != default_step(c.policy) for c in cells)
    reused = any(c.reuse != "once" for c in cells)
    found = []
    for c in cells:
        name = c.policy + (f" /{c.stride}" if c.stride else "")
        if c.budget != "-":
            name += (f" with {c.decode}" if with_decode and not c.stride else "") + f" {c.budget}"
            name += f" {c.reuse}" if reused else ""
        found.append(name)
    return found


def table(cells: Sequence[Cell]) -> str:
    """One block per task, the full cache's row first."""
    blocks = []
    for title in dict.fromkeys(cell.title for cell in cells):
        mine = [cell for cell in cells if cell.title == title]
        task = mine[0].task
        more = _MORE.get(task, {})
        reused = any(cell.reuse != "once" for cell in mine)
        texts = ["policy", "decode", "budget", *(["reuse"] if reused else [])]
        head = [*texts, _UNIT.get(task, "score"), "95 %", "n", "held"]
        lines = [[*head, *more.values()]]
        for c in mine:
            interval = "-"
            if c.low is not None and c.high is not None:
                interval = f"{_figure(task, c.low)} to {_figure(task, c.high)}"
            lines.append(
                [
                    c.policy + (f" /{c.stride}" if c.stride else ""),
                    c.decode,
                    c.budget,
                    *([c.reuse if c.budget != "-" else "-"] if reused else []),
                    _figure(task, c.score),
                    interval,
                    str(c.n),
                    f"{c.held:.1%}",
                    *(_extra(c, key) for key in more),
                ]
            )
        sides = "<" * len(texts) + ">" * (len(head) + len(more) - len(texts))
        blocks.append(f"{title}\n{text.grid(lines, sides)}")
        if any(c.by_question for c in mine):
            blocks.append(_by_question("by question", mine, [c.by_question for c in mine]))
        if any(len(c.same_by_question) > 1 for c in mine):
            blocks.append(_by_question("same as full", mine, [c.same_by_question for c in mine]))
        if any(c.by_group for c in mine):
            blocks.append(_by_group(mine))
    return "\n\n".join(blocks)


def _figure(task: str, value: float) -> str:
    # z: no -0.0 after rounding
    return f"{value:z.3f}" if task == "ppl" else f"{100 * value:z.1f}%"


def _extra(cell: Cell, key: str) -> str:
    if key not in cell.more:
        return "-"
    value = cell.more[key]
    if key == "rouge_l":
        return f"{value:.3f}"
    return f"{value:g}" if cell.task == "agree" else f"{value:.1%}"


def _by_question(title: str, cells: Sequence[Cell], shares: Sequence[Sequence[float]]) -> str:
    longest = max(map(len, shares))
    called = names(cells)
    width = max(len(title), *map(text.cells, called))
    head = " ".join(f"{f'Q{i + 1}':>6}" for i in range(longest))
    lines = [f"{title:{width}} {head}"]
    for name, row in zip(called, shares, strict=True):
        lines.append(f"{text.padded(name, width)} " + " ".join(f"{100 * s:5.1f}%" for s in row))
    return "\n".join(lines)


def _by_group(cells: Sequence[Cell]) -> str:
    """A table with a column for each group of items. The heading has its number of questions."""
    groups = dict.fromkeys((name, n) for c in cells for name, _, n in c.by_group)
    lines = [["by group", *(f"{name} ({n:,})" for name, n in groups)]]
    for called, c in zip(names(cells), cells, strict=True):
        scores = {name: score for name, score, _ in c.by_group}
        lines.append([called, *(f"{100 * scores[name]:.1f}%" for name, _ in groups)])
    return text.grid(lines, "<" + ">" * len(groups))


def as_csv(cells: Sequence[Cell]) -> str:
    """One line per cell, after a line of headings."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    more = list(dict.fromkeys(key for keys in _MORE.values() for key in keys))
    head = ["task", "policy", "decode", "budget", "stride", "reuse", "n", "score", "low", "high"]
    writer.writerow([*head, "held", *more])
    for c in cells:
        writer.writerow(
            [
                c.title,
                c.policy,
                c.decode,
                c.budget,
                c.stride,
                c.reuse,
                c.n,
                f"{c.score:z.6f}",
                "" if c.low is None else f"{c.low:z.6f}",
                "" if c.high is None else f"{c.high:z.6f}",
                f"{c.held:.6f}",
                *(f"{c.more[key]:.6f}" if key in c.more else "" for key in more),
            ]
        )
    return out.getvalue()


def write(
    cells: Sequence[Cell],
    facts: dict[str, object],
    paths: Sequence[Path],
    items: dict[str, object] | None = None,
) -> None:
    """Write the results to each path in the format of its suffix: .json, .csv, or a map as .png or
    .svg. items: the questions and right answers by task, for JSON. Raises UsageError."""
    for path in paths:
        suffix = path.suffix.lower()
        try:
            if suffix == ".json":
                record = {
                    "facts": facts,
                    "cells": [cell.record() for cell in cells],
                    "items": items or {},
                }
                path.write_text(json.dumps(record, indent=1) + "\n")
            elif suffix == ".csv":
                path.write_text(as_csv(cells))
            else:
                _map(cells, path)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None


def check(paths: Sequence[Path], tasks: Sequence[str]) -> None:
    """Raise UsageError if the results of `tasks` cannot be written to all paths. Called before
    anything is measured."""
    for path in paths:
        if path.suffix.lower() not in (".json", ".csv") and not is_map(path):
            raise UsageError(f"cannot tell what to write to {path}", "use .json .csv .png or .svg")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"there is no directory {path.parent}")
        if is_map(path):
            if "needle" not in tasks:
                raise UsageError("there is nothing to map", "maps are made of the task needle")
            try:
                import matplotlib  # noqa: F401
            except ImportError:
                raise UsageError(
                    "a map needs matplotlib, which is not installed", "pip install 'minikv[plot]'"
                ) from None


def is_map(path: Path) -> bool:
    """Whether `write` makes a map there."""
    return path.suffix.lower() in (".png", ".svg")


def _map(cells: Sequence[Cell], path: Path) -> None:
    """Draw scores by depth and length of the needle task, one panel per policy and budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mine = [c for c in cells if c.by_place]
    lengths = sorted({place[1] for c in mine for place in c.by_place})
    depths = sorted({place[0] for c in mine for place in c.by_place})
    across = min(3, len(mine))
    down = -(-len(mine) // across)
    figure, axes = pyplot.subplots(
        down,
        across,
        squeeze=False,
        figsize=(3.4 * across + 0.8, 2.6 * down + 0.6),
        layout="constrained",
    )
    image: Any = None
    for axis, cell, name in zip(axes.flat, mine, names(mine), strict=False):
        found = {(d, n): score for d, n, score, _ in cell.by_place}
        shown = [[100 * found.get((d, n), float("nan")) for n in lengths] for d in depths]
        image = axis.imshow(shown, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for i, row in enumerate(shown):
            for j, value in enumerate(row):
                shade = "black" if value > 60 else "white"
                axis.text(j, i, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=8)
        axis.set_title(name, fontsize=10)
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=8)
        axis.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=8)
    for axis in axes.flat[len(mine) :]:
        axis.set_visible(False)
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the fact", fontsize=9)
    figure.colorbar(image, ax=axes, label="right answers, %", shrink=0.8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

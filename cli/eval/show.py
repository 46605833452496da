"""Results for a terminal and for files: a table, CSV, JSON and pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from importlib import util
from pathlib import Path

from minikv.cli.eval import pictures
from minikv.cli.eval.cells import Cell
from minikv.cli.eval.names import ANSWERED, CHATS
from minikv.cli.screen import text
from minikv.errors import UsageError
from minikv.policies import default_step

_UNIT = {"ppl": "perplexity", "agree": "same as full", "kl": "KL"}
_MORE = {
    "agree": {"tokens_before_difference": "tokens before difference"},
    **{
        chat: {"same": "same as full", "all_right": "all right"} for chat in CHATS if chat != "long"
    },
}
"""Further figures of a task, with their headings. Of `agree`: the mean number of tokens up to the
first that differs. Of a chat: the share of answers equal to the full cache's, and the share of
chats without a wrong answer."""
_HALF = 0.5  # of the questions, which the full cache must answer for a comparison to mean something

_PICTURES = (".png", ".svg")
_SUFFIXES = {"json": (".json",), "csv": (".csv",), "map": _PICTURES, "plot": _PICTURES}

Outputs = Sequence[tuple[str, Path]]
"""(kind, file): a flag's name without its dashes, and what it was given."""


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
        blocks.append("\n".join([title, _scores(mine), *_remarks(mine)]))
        if any(c.by_question for c in mine):
            blocks.append(_by_question("by question", mine, [c.by_question for c in mine]))
        if any(len(c.same_by_question) > 1 for c in mine):
            blocks.append(_by_question("same as full", mine, [c.same_by_question for c in mine]))
        if any(c.by_group for c in mine):
            blocks.append(_by_group(mine))
    return "\n\n".join(blocks)


def _remarks(cells: Sequence[Cell]) -> Iterator[str]:
    """What must be known before the figures are compared."""
    first = cells[0]
    if first.task in ANSWERED and first.score < _HALF:
        share = _figure(first.task, first.score)
        yield f"The full cache itself has {share}: the comparison means nothing with this model."
    if first.task == "kl":
        yield "KL is in nats a token, from the full cache."


def _scores(cells: Sequence[Cell]) -> str:
    task = cells[0].task
    known = {key for c in cells for key in c.more}
    more = {key: head for key, head in _MORE.get(task, {}).items() if key in known}
    reused = any(cell.reuse != "once" for cell in cells)
    beside = ["nats above full" if task == "ppl" else "against full", "95 %"]
    texts = ["policy", "decode", "budget", *(["reuse"] if reused else [])]
    paired = any("against" in c.more for c in cells)
    figures = [_UNIT.get(task, "score"), "95 %", *(beside if paired else []), "n", "held"]
    figures += more.values()
    lines = [[*texts, *figures]]
    for c in cells:
        line = [c.policy + (f" /{c.stride}" if c.stride else ""), c.decode, c.budget]
        line += [c.reuse if c.budget != "-" else "-"] if reused else []
        line += [_figure(task, c.score), _interval(task, c.low, c.high)]
        if paired and c.budget == "-":
            line += ["-", "-"]
        elif paired:
            nats = "nats" if task == "ppl" else task
            bounds = c.more.get("against_low"), c.more.get("against_high")
            line += [_figure(nats, c.more["against"], "+"), _interval(nats, *bounds, "+")]
        line += [str(c.n), f"{c.held:.1%}"]
        lines.append([*line, *(_extra(c, key) for key in more)])
    return text.grid(lines, "<" * len(texts) + ">" * len(figures))


def _interval(task: str, low: float | None, high: float | None, sign: str = "") -> str:
    if low is None or high is None:
        return "-"
    return f"{_figure(task, low, sign)} to {_figure(task, high, sign)}"


def _figure(task: str, value: float, sign: str = "") -> str:
    # z: no -0.0 after rounding
    if task in ("ppl", "nats", "kl"):
        return f"{value:{sign}z.{4 if task == 'kl' else 3}f}"
    return f"{100 * value:{sign}z.1f}%"


def _extra(cell: Cell, key: str) -> str:
    if key not in cell.more:
        return "-"
    value = cell.more[key]
    return f"{value:.1f}" if cell.task == "agree" else f"{value:.1%}"


def _by_question(title: str, cells: Sequence[Cell], shares: Sequence[Sequence[float]]) -> str:
    longest, called = max(map(len, shares)), names(cells)
    width = max(len(title), *map(text.cells, called))
    lines = [f"{title:{width}} " + " ".join(f"{f'Q{i + 1}':>6}" for i in range(longest))]
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
    further = dict.fromkeys(key for keys in _MORE.values() for key in keys)
    more = ["against", "against_low", "against_high", *further]
    texts = ["policy", "decode", "budget", "stride", "reuse", "n"]
    figures = ["score", "low", "high", "held"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["task", *texts, *figures, *more])
    for c in cells:
        values = [getattr(c, name) for name in figures] + [c.more.get(key) for key in more]
        shown = ["" if value is None else f"{value:z.6f}" for value in values]
        writer.writerow([c.title, *(getattr(c, name) for name in texts), *shown])
    return out.getvalue()


def check(outputs: Outputs, tasks: Sequence[str]) -> None:
    """Raise UsageError if the results of `tasks` cannot be written to all files. Called before
    anything is measured."""
    for kind, path in outputs:
        if path.suffix.lower() not in _SUFFIXES[kind]:
            hint = f"--{kind} writes {' or '.join(_SUFFIXES[kind])}"
            raise UsageError(f"cannot tell what to write to {path}", hint)
        if not path.absolute().parent.is_dir():
            raise UsageError(f"there is no directory {path.parent}")
        if kind == "map" and "needle" not in tasks:
            raise UsageError("there is nothing to map", "maps are made of the task needle")
        if kind in ("map", "plot") and not _has_matplotlib():
            raise UsageError(
                f"--{kind} needs matplotlib, which is not installed", "pip install 'minikv[plot]'"
            )


def _has_matplotlib() -> bool:
    return util.find_spec("matplotlib") is not None


def write(
    cells: Sequence[Cell],
    facts: dict[str, object],
    outputs: Outputs,
    items: dict[str, object] | None = None,
) -> list[Path]:
    """Write the results to each file; returns those written: a map needs a needle. items: the
    questions and right answers by task, for JSON. Raises UsageError."""
    written = []
    for kind, path in outputs:
        if kind == "map" and not any(cell.by_place for cell in cells):
            continue
        try:
            if kind == "json":
                record = {"facts": facts, "cells": [cell.record() for cell in cells]}
                path.write_text(json.dumps(record | {"items": items or {}}, indent=1) + "\n")
            elif kind == "csv":
                path.write_text(as_csv(cells))
            elif kind == "map":
                pictures.needle_map(cells, names(cells), path)
            else:
                pictures.plot(pictures.panels(cells), path)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        written.append(path)
    return written

"""Pictures, drawn by matplotlib: quality over budget, and needles by depth and length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minikv.chat.eviction_config import read_budget
from minikv.cli.eval.results import Cell, names
from minikv.policies import default_step

# The first six are Okabe and Ito's, which colour-blind people can tell apart. If there are more
# lines than colours, the others get dashes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#555555")
_DASHES = ("-", "--", ":", "-.")
_SEEN = {"once": "the question was seen", "blind": "the question was not seen"}

Point = tuple[str, float, float | None, float | None]
"""(budget, score, low, high): a score with its 95 % interval, None if there is none."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A diagram. lines: points by policy. level: the score without eviction. shares: scores are in
    0 to 1."""

    title: str
    lines: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    level: float | None = None
    shares: bool = True


def panels(cells: Iterable[Cell]) -> list[Panel]:
    """One panel for each task and each value of --reuse, with the full cache's score."""
    found: dict[tuple[str, str, str], dict[str, list[Point]]] = {}
    levels: dict[str, float] = {}
    for cell in cells:
        if cell.budget == "-":
            levels.setdefault(cell.title, cell.score)
            continue
        own = cell.stride or cell.decode == default_step(cell.policy)
        name = cell.policy + (f" /{cell.stride}" if cell.stride else "")
        lines = found.setdefault((cell.title, cell.task, cell.reuse), {})
        points = lines.setdefault(name if own else f"{name} with {cell.decode}", [])
        points.append((cell.budget, cell.score, cell.low, cell.high))
    told = any(reuse != "once" for *_, reuse in found)
    made = []
    for (title, task, reuse), lines in found.items():
        shares = task not in ("ppl", "kl")
        words = [title, *(["lower is better"] * (not shares)), *([_SEEN.get(reuse, reuse)] * told)]
        made.append(Panel(", ".join(words), lines, levels.get(title), shares))
    return made


def places(budgets: Iterable[str]) -> dict[str, float]:
    """The place of each budget on its axis: logarithmic, or, if one is bytes or a share, at equal
    distances."""
    read = {budget: read_budget(budget) for budget in budgets}
    ordered = sorted(read, key=lambda b: (read[b].unit, float(read[b].value)))
    if all(budget.isdigit() for budget in ordered):
        return {budget: math.log2(int(budget)) for budget in ordered}
    return {budget: float(i) for i, budget in enumerate(ordered)}


def quality(cells: Sequence[Cell], path: Path) -> None:
    """Draw quality over budget: a panel for each task and each value of --reuse."""
    plot(panels(cells), path)


def plot(panels: Sequence[Panel], path: Path) -> None:
    """Draw quality over budget: a panel for each task, a line for each policy."""
    every = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    figure, axes = _figure(len(panels), 2, (5.2, 3.6))
    for axis, panel in zip(axes, panels, strict=False):
        at = places({point[0] for points in panel.lines.values() for point in points})
        for name, points in panel.lines.items():
            i, drawn = every.index(name), sorted(points, key=lambda point: at[point[0]])
            # Intervals of several lines at one budget are drawn side by side.
            shift = 0.1 * ((i + 0.5) / len(every) - 0.5)
            bars = [  # never below 0: an end may be the score, but for rounding
                [0.0 if low is None else max(0.0, s - low) for _, s, low, _ in drawn],
                [0.0 if high is None else max(0.0, high - s) for _, s, _, high in drawn],
            ]
            axis.errorbar(
                [at[budget] + shift for budget, *_ in drawn],
                [score for _, score, *_ in drawn],
                yerr=bars,
                label=name,
                color=_COLOURS[i % len(_COLOURS)],
                linestyle=_DASHES[i // len(_COLOURS) % len(_DASHES)],
                elinewidth=0.6,
                marker="o",
                markersize=3,
            )
        if panel.level is not None:
            axis.axhline(panel.level, color="#999999", linestyle="--", label="full cache")
        if panel.shares:
            axis.set_ylim(0, 1.02)
            axis.yaxis.set_major_formatter("{x:.0%}")
        axis.set_title(panel.title, fontsize=10)
        axis.set_xticks(list(at.values()), list(at), fontsize=8)
        axis.set_xlabel("tokens per head" if all(map(str.isdigit, at)) else "budget", fontsize=9)
        axis.grid(axis="y", color="#e4e4e4")
    shown: dict[str, Any] = {}
    for axis in axes:
        shown |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5, fontsize=8)
    _save(figure, path)


def needle_map(cells: Sequence[Cell], path: Path) -> None:
    """Draw scores by depth and length of the needle task, a panel for each policy and budget."""
    mine = [(cell, name) for cell, name in zip(cells, names(cells), strict=True) if cell.by_place]
    lengths = sorted({place[1] for cell, _ in mine for place in cell.by_place})
    depths = sorted({place[0] for cell, _ in mine for place in cell.by_place})
    figure, axes = _figure(len(mine), 3, (3.6, 2.8))
    image: Any = None
    for axis, (cell, name) in zip(axes, mine, strict=False):
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
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the fact", fontsize=9)
    figure.colorbar(image, ax=axes, label="right answers, %", shrink=0.8)
    _save(figure, path)


def _figure(panels: int, most: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure with so many panels of a size in inches, at most `most` in a row."""
    from matplotlib.figure import Figure

    across = max(1, min(most, panels))
    down = max(1, -(-panels // across))
    figure = Figure(figsize=(size[0] * across, size[1] * down + 0.6), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes[:panels]


def _save(figure: Any, path: Path) -> None:
    """Write it; the same results are the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "minikv", "svg.fonttype": "none"}):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)

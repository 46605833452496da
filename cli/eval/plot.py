"""A picture of quality over budget: a panel for each task, a line for each policy, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from minikv.cache.budget import Budget
from minikv.chat.eviction_config import read_budget
from minikv.cli.eval.cells import Cell
from minikv.errors import UsageError
from minikv.policies import default_step

# The first six are Okabe and Ito's, which colour-blind people can tell apart. If there are more
# lines than colours, the others get dashes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#555555")
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
_WIDE, _HIGH, _LEFT, _TOP, _BELOW = 400, 240, 52, 34, 46  # a panel and its margins, in pixels
_LINE, _LETTER = 17, 6.4  # height of a line and width of a letter in the legend, in pixels


@dataclass(frozen=True, slots=True)
class Point:
    """A score at a budget. low and high: its 95 % interval, None if there is none."""

    budget: str
    score: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A policy's scores by budget."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """A diagram. level: the score without eviction. shares: scores are in 0 to 1."""

    title: str
    lines: tuple[Line, ...]
    level: float | None = None
    shares: bool = True


def check(path: Path) -> None:
    """Raise UsageError if `path` cannot be written. Called before anything is measured."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"cannot draw {path}", "--plot writes .svg")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}")


def write(cells: Sequence[Cell], path: Path) -> None:
    """Draw the cells and write the SVG. Raises UsageError."""
    try:
        path.write_text(drawn(panels(cells)))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def panels(cells: Iterable[Cell]) -> list[Panel]:
    """One panel for each task and each value of --reuse, with the full cache's score."""
    found: dict[tuple[str, str], dict[str, list[Cell]]] = {}
    levels: dict[str, float] = {}
    kinds: dict[str, str] = {}
    every = list(cells)
    for cell in every:
        kinds[cell.title] = cell.task
        if cell.budget == "-":
            levels.setdefault(cell.title, cell.score)
            continue
        lines = found.setdefault((cell.title, cell.reuse), {})
        lines.setdefault(_called(cell), []).append(cell)
    several = len({reuse for _, reuse in found}) > 1
    return [
        Panel(
            _headed(title, kinds[title], reuse if several or reuse != "once" else None),
            tuple(
                Line(name, tuple(Point(c.budget, c.score, c.low, c.high) for c in mine))
                for name, mine in lines.items()
            ),
            levels.get(title),
            kinds[title] != "ppl",
        )
        for (title, reuse), lines in found.items()
    ]


def _headed(title: str, kind: str, reuse: str | None) -> str:
    more = ["lower is better"] if kind in ("ppl", "loss") else []
    more += [_REUSE.get(reuse, reuse)] if reuse is not None else []
    return ", ".join([title, *more])


_REUSE = {"once": "the question was seen", "blind": "the question was not seen"}


def _called(cell: Cell) -> str:
    if cell.stride:
        return f"{cell.policy} /{cell.stride}"
    own = cell.decode == default_step(cell.policy)
    return cell.policy if own else f"{cell.policy} with {cell.decode}"


def drawn(panels: Sequence[Panel]) -> str:
    """The SVG. The axis of budgets is logarithmic if all are tokens per head. If one is bytes or a
    share, budgets have equal distances."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    across = min(2, max(1, len(panels)))
    down = -(-len(panels) // across)
    step_x, step_y = _LEFT + _WIDE + 24, _TOP + _HIGH + _BELOW
    columns = max(1, min(len(names), int(across * step_x / (_LETTER * _longest(names) + 44))))
    legend = _LINE * (-(-(len(names) + 1) // columns)) + 14
    width, height = across * step_x, down * step_y + legend
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" role="img" '
        'aria-labelledby="title">',
        '<title id="title">Quality over budget: '
        f"{escape('; '.join(panel.title for panel in panels))}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, panel in enumerate(panels):
        x, y = i % across * step_x + _LEFT, i // across * step_y + _TOP
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel, names), "</g>"]
    each = width / columns
    for i, name in enumerate([*names, "full cache"]):
        left, top = 16 + i % columns * each, down * step_y + _LINE * (i // columns) + 12
        look = _look(i) if i < len(names) else _FULL
        parts.append(f'<path d="M{left:.1f} {top} h26" {look}/>')
        parts.append(_text(left + 33, top + 4, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


_FULL = 'fill="none" stroke="#999999" stroke-width="1.4" stroke-dasharray="3 3"'


def _panel(panel: Panel, names: Sequence[str]) -> list[str]:
    budgets = _ordered({point.budget for line in panel.lines for point in line.points})
    at = _places(budgets)
    low, high, ticks = _scale(panel)

    def down(score: float) -> float:
        return _HIGH * (1 - (score - low) / (high - low))

    parts = [_text(0, -14, panel.title, size=13, weight="bold")]
    for tick in ticks:
        y = down(tick)
        parts.append(f'<path d="M0 {y:.1f} H{_WIDE}" stroke="#e4e4e4"/>')
        label = f"{100 * tick:.0f} %" if panel.shares else f"{tick:g}"
        parts.append(_text(-7, y + 4, label, anchor="end"))
    for budget in budgets:
        x = at[budget]
        parts.append(f'<path d="M{x:.1f} {_HIGH} v4" stroke="#666666"/>')
        parts.append(_text(x, _HIGH + 17, budget, anchor="middle"))
    unit = "tokens per head" if all(b.isdigit() for b in budgets) else "budget"
    parts.append(_text(_WIDE / 2, _HIGH + 33, unit, anchor="middle"))
    parts.append(f'<path d="M0 0 V{_HIGH} H{_WIDE}" fill="none" stroke="#666666"/>')
    if panel.level is not None:
        parts.append(f'<path d="M0 {down(panel.level):.1f} H{_WIDE}" {_FULL}/>')
    for line in panel.lines:
        parts += _line(line, names.index(line.name), len(names), at, down)
    return parts


def _line(
    line: Line, number: int, lines: int, at: Mapping[str, float], down: Callable[[float], float]
) -> list[str]:
    # Intervals of several lines at one budget are drawn side by side, at most 9 pixels from it.
    apart = min(2.2, 18 / max(1, lines - 1))
    shift = apart * (number - (lines - 1) / 2)
    points = sorted(line.points, key=lambda point: at[point.budget])
    places = [(at[p.budget] + shift, down(p.score)) for p in points]
    colour = _COLOURS[number % len(_COLOURS)]
    parts = [f"<g><title>{escape(_told(line))}</title>"]
    for (x, _), point in zip(places, points, strict=True):
        if point.low is not None and point.high is not None:
            ends = f"M{x:.1f} {down(point.low):.1f} V{down(point.high):.1f}"
            parts.append(f'<path d="{ends}" stroke="{colour}" stroke-opacity="0.35"/>')
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts.append(f'<path d="M{path}" {_look(number)}/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in places]
    return [*parts, "</g>"]


def _told(line: Line) -> str:
    return f"{line.name}: " + ", ".join(f"{p.score:.3g} at {p.budget}" for p in line.points)


def _look(number: int) -> str:
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    colour = _COLOURS[number % len(_COLOURS)]
    return f'fill="none" stroke="{colour}" stroke-width="1.6"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _scale(panel: Panel) -> tuple[float, float, list[float]]:
    """The axis of scores: (lowest, highest, ticks)."""
    if panel.shares:
        return 0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    scores = [p.score for line in panel.lines for p in line.points]
    scores += [] if panel.level is None else [panel.level]
    found = [x for x in scores if math.isfinite(x)] or [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(max(max(found) - min(found), 1e-3)))
    low = step * math.floor(min(found) / step)
    high = max(step * math.ceil(max(found) / step), low + step)
    return low, high, [low + i * step for i in range(round((high - low) / step) + 1)]


def _ordered(budgets: Iterable[str]) -> list[str]:
    def size(budget: str) -> tuple[str, float]:
        read: Budget = read_budget(budget)
        return read.unit, float(read.value)

    return sorted(budgets, key=size)


def _places(budgets: Sequence[str]) -> dict[str, float]:
    """The x coordinate of each budget, in pixels."""
    margin = 18
    if len(budgets) == 1:
        return {budgets[0]: _WIDE / 2}
    if all(budget.isdigit() for budget in budgets):
        logs = [math.log(int(budget)) for budget in budgets]
    else:
        logs = [float(i) for i in range(len(budgets))]
    across = (_WIDE - 2 * margin) / (logs[-1] - logs[0])
    return {b: margin + across * (x - logs[0]) for b, x in zip(budgets, logs, strict=True)}


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="#222222">{escape(text)}</text>'
    )


def _longest(names: Sequence[str]) -> int:
    return max(map(len, [*names, "full cache"]))

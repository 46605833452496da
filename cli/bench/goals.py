"""The goals of `minikv bench all`, and where each figure is found in the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from minikv.cli.bench.report import figure
from minikv.cli.bench.results import Results
from minikv.cli.tables import grid

STEPS = ("h2o", "tova", "roco", "hashevict")  # whose share of a step has a goal
BUDGETS = (1024, 4096)
JUDGES = {
    "snapkv": ("window", 0.01, 0.02),
    "nacl": ("NaCl's proxies", 0.07, 0.10),
    "h2o": ("all column sums", 0.35, 0.50),
    "streaming": ("selection and compaction alone", 0.01, 0.02),
}
"""Prompt policies: what they stand for, and what they may add to a prompt: goal, first."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and its goal. find(results) is None if it was not measured. better: "more" or
    "less"; first: an easier, first goal; unit: x (times), % or s."""

    name: str
    find: Callable[[Results], float | None]
    better: str
    goal: float
    first: float | None = None
    unit: str = "x"

    def record(self, results: Results, why: str) -> dict[str, Any]:
        """The goal and the figure for JSON. why: the reason if it was not measured."""
        measured, state = self.find(results), "not measured"
        if measured is not None:
            sign = 1 if self.better == "more" else -1
            met, near = (
                bound is not None and sign * measured >= sign * bound
                for bound in (self.goal, self.first)
            )
            state, why = "met" if met else "milestone" if near else "missed", ""
        return {
            "name": self.name,
            "measured": measured,
            "goal": self.goal,
            "first": self.first,
            "better": self.better,
            "unit": self.unit,
            "state": state,
            "note": why,
        }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Each goal beside what was measured."""
    lines = [["goal", "measured", "wanted", "first", ""]]
    for each in records:
        note = each["note"]
        why = f": {note if len(note) <= 24 else note[:23].rstrip() + '…'}" if note else ""
        cells = (
            "-" if each[key] is None else figure(each[key], each["unit"])
            for key in ("measured", "goal", "first")
        )
        lines.append([each["name"], *cells, each["state"] + why])
    return grid(lines, "<>>><")


def row(figure: str, kind: str, model: str, length: int, **more: str) -> Callable[[Results], Any]:
    """A function that finds a figure in minikv's newest row of this kind, model and length; `more`:
    further fields of the row and their values."""
    wanted = {"kind": kind, "model": model, "length": length, "system": "minikv", **more}

    def find(results: Results) -> Any:
        for row in reversed(results.rows):
            if all(getattr(row, name) == value for name, value in wanted.items()):
                return getattr(row, figure)
        return None

    return find


def _of(name: str, share: Callable[[Any], float | None]) -> Callable[[Results], float | None]:
    """A function that applies `share` to a figure that is not a row."""
    return lambda results: share(results.figures[name]) if name in results.figures else None


# -- a CPU ------------------------------------------------------------------------------------


def beside_peer(
    shape: str, length: int, decode: float, int8: float, prefill: float
) -> tuple[Goal, ...]:
    """Decode and prefill of a shape beside transformers, and what eviction adds to a step."""
    where = f"{shape} at {length:,}, adakv 512"

    def ours(figure: str, kind: str, weights: str = "auto") -> Callable[[Results], Any]:
        return row(figure, kind, shape, length, policy="adakv", weights=weights)

    return (
        Goal(f"decode, {where}", ours("vs_transformers", "decode"), "more", decode),
        Goal(f"decode int8, {where}", ours("vs_transformers", "decode", "int8"), "more", int8),
        Goal(f"prefill, {where}", ours("vs_transformers", "prefill"), "more", prefill),
        Goal(f"eviction per step, {where}", ours("evict_share", "decode"), "less", 0.02, unit="%"),
    )


def _resident(name: str) -> Callable[[Results], float | None]:
    def share(peaks: Any) -> float | None:
        both = name in peaks and "transformers" in peaks
        return peaks[name] / peaks["transformers"] if both else None

    return _of("peak_resident_8192", share)


_FLAT = _of("flat", lambda found: median(found["late_s"]) / median(found["early_s"]))
FLAT = (Goal("decode at 32k over decode at 2k, same budget", _FLAT, "less", 1.05),)
FIRST_TOKEN = (
    Goal(
        "first token of `minikv ask`, warm", _of("ask_first_token_s", median), "less", 4.0, unit="s"
    ),
)
RESIDENT = tuple(
    Goal(f"peak memory over transformers', s at 8,192, {name}", _resident(name), "less", 1.0)
    for name in ("minikv full", "minikv adakv 512")
)

# -- a GPU ------------------------------------------------------------------------------------

_8B = "llama-3-8b"


def _attention(results: Results, heads: str) -> Any:
    """The timing of attention over 32,768 tokens per head."""
    mine = (t for t in results.kernels if t.kernel == "ragged attention")
    return next((t for t in mine if t.case.startswith(f"32,768 {heads}")), None)


def _even(results: Results) -> float | None:
    found = _attention(results, "rows")
    return found.share_of_floor if found else None


def _uneven(results: Results) -> float | None:
    even, odd = _attention(results, "rows"), _attention(results, "mean")
    return odd.seconds / even.seconds if even and odd else None


def _over(found: Any) -> float | None:
    peak = found["peak_over_weights"]
    return None if peak is None else peak / found["bound"]


def _off(found: Any) -> float | None:
    held = found["allocator"]
    return abs(found["reported"] - held) / held if held else None


_STEP = row("share_of_floor", "decode", _8B, 1024, policy="full")
GPU_STEP = (Goal("decode step at 1k, of bytes over copy", _STEP, "more", 0.85, 0.75, "%"),)
GPU_KERNELS = (
    Goal("decode attention at 32k rows, of copy", _even, "more", 0.80, 0.65, "%"),
    Goal("uneven heads (4x) over even ones", _uneven, "less", 1.05, 1.15),
)
GPU_EVICTION = tuple(
    Goal(
        f"eviction per step, {step} {budget}",
        row("evict_share", "decode", _8B, 8192, decode=step, budget=str(budget)),
        "less",
        0.015 if step == "hashevict" else 0.01,
        0.03,
        "%",
    )
    for step in STEPS
    for budget in BUDGETS
)
GPU_SCORING = (
    *(
        Goal(
            f"prefill at {length:,}, of its floor",
            row("share_of_floor", "prefill", _8B, length, policy="full"),
            "more",
            0.80,
            0.70,
            "%",
        )
        for length in (8192, 32_768)
    ),
    *(
        Goal(
            f"scoring at 32k: {what}",
            row("evict_share", "prefill", _8B, 32_768, policy=name),
            "less",
            goal,
            first,
            "%",
        )
        for name, (what, goal, first) in JUDGES.items()
    ),
)
GPU_PEAK = (
    Goal("peak over weights at 32k, over its parts", _of("peak_32k", _over), "less", 1.05),
    Goal(
        "cache reported, off the allocator's figure by",
        _of("peak_32k", _off),
        "less",
        0.01,
        unit="%",
    ),
)

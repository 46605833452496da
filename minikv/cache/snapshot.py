"""The cache between two turns, to be restored later.

A copy contains only rows in use, and can be restored any number of times: everything in it is a
copy or never changes. A shared snapshot only serves to undo prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minikv.cache.arena import TABLES, Arena, Layout

_MOST = 1 << 40  # rows
_KEYS = {"free_slot": "hole"}  # names in JSON that differ, as in files of earlier versions


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the last prompt. lost: for each layer, the share of attention mass that fell on
    evicted rows (None: not measured). shaped: the prompt's question decided which rows stayed.
    learnt float32 [L, H, n]: what the step policy learnt of the queries of all prompts and answers
    (`StepPolicy.learn`); None: nothing. The end of an answer writes to it."""

    lost: tuple[float | None, ...] = ()
    shaped: bool = False
    learnt: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class State:
    """The state of a cache between two turns, without its rows and policies.

    position: tokens counted.
    turns: first position and end of each turn.
    pinned: positions below it are never evicted.
    rows: the budget in rows per head; None where there is none or it is not known yet.
    peak and evict_s: bytes and seconds of the last prompt.
    """

    position: int = 0
    turns: tuple[tuple[int, int], ...] = ()
    pinned: int = 0
    rows: int | None = None
    peak: int = 0
    evict_s: float = 0.0
    outcome: Outcome = Outcome()


@dataclass(frozen=True, slots=True, eq=False)
class SharedSnapshot:
    """A snapshot that refers to the cache's own rows, without a copy: a prompt writes to other
    memory. tier: how many rows the tier had."""

    state: State
    arena: Arena
    tier: int


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot:
    """A snapshot with a copy of the rows.

    layout and region: the arena's tables.
    columns: the rows in use, layer by layer and head by head, on the host.
    """

    state: State
    region: tuple[int, ...]
    layout: Layout
    columns: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the copied rows."""
        return sum(column.nbytes for column in self.columns.values())

    def record(self) -> dict[str, object]:
        """Everything except the columns, ready for JSON."""
        state, learnt = self.state, self.state.outcome.learnt
        return {
            "position": state.position,
            "turns": [list(turn) for turn in state.turns],
            "pinned": state.pinned,
            "rows": state.rows,
            "peak": state.peak,
            "evict_s": state.evict_s,
            "lost": list(state.outcome.lost),
            "shaped": state.outcome.shaped,
            **({} if learnt is None else {"learnt": learnt.tolist()}),
            "region": list(self.region),
            **{_KEYS.get(name, name): getattr(self.layout, name).tolist() for name in TABLES},
        }

    @staticmethod
    def read(record: Mapping[str, object], columns: Mapping[str, Tensor]) -> CacheSnapshot:
        """The reverse of `record`. Raises ValueError, TypeError or KeyError if no cache can have
        written the record or the columns."""
        try:
            tables = [torch.tensor(record[_KEYS.get(n, n)], dtype=torch.int64) for n in TABLES]
            learnt = record.get("learnt")
            learnt = None if learnt is None else torch.tensor(learnt, dtype=torch.float32)
        except RuntimeError as error:  # pragma: no cover - of more than 64 bits, in older torch
            raise ValueError(f"the layout is invalid: {error}") from None
        turns = [_of(turn, list) for turn in _of(record["turns"], list)]
        rows, lost = record["rows"], _of(record["lost"], list)
        state = State(
            position=_count(record["position"]),
            turns=tuple((_count(a), _count(b)) for a, b in turns),
            pinned=_count(record["pinned"]),
            rows=None if rows is None else _count(rows),
            peak=_count(record["peak"]),
            evict_s=float(_of(record["evict_s"], float, int)),
            outcome=Outcome(
                tuple(None if x is None else float(_of(x, float, int)) for x in lost),
                _of(record["shaped"], bool),
                learnt,
            ),
        )
        region = tuple(map(_count, _of(record["region"], list)))
        held = CacheSnapshot(state, region, Layout(*tables), dict(columns))
        held.check()
        return held

    def check(self) -> None:
        """Raise ValueError unless segments are inside their regions and do not overlap, and the
        columns have a value for every row in use."""
        layout, region = self.layout, self.region
        start, length, capacity = layout.start, layout.length, layout.capacity
        if start.dim() != 2 or len(region) != len(start) + 1 or region[0] != 0:
            raise ValueError("the layout is not by layers and heads")
        if any(getattr(layout, name).shape != start.shape for name in TABLES):
            raise ValueError("the layout's tables differ in size")
        if sorted(region) != list(region):
            raise ValueError("the layers' regions overlap")
        tables = [getattr(layout, name) for name in TABLES]
        if region[-1] > _MOST or any(((t < -1) | (t > _MOST)).any() for t in tables):
            raise ValueError("the layout has numbers that no cache has")  # sums of them could wrap
        first, end = torch.tensor(region[:-1]), torch.tensor(region[1:])
        after = torch.cat((start[:, 1:], end[:, None]), 1)
        apart = (start[:, 0] >= first).all() and (start + capacity <= after).all()
        if not apart or not ((length >= 0) & (length <= capacity) & (layout.cap >= 0)).all():
            raise ValueError("a head's rows are outside its segment")
        slot = layout.free_slot
        inside = (slot >= start) & (slot < start + length)
        if not ((slot == -1) | inside).all():
            raise ValueError("a free slot is outside its segment")
        learnt = self.state.outcome.learnt
        if learnt is not None and not (learnt.dim() == 3 and bool(learnt.isfinite().all())):
            raise ValueError("what the step policy learnt has numbers that no queries have")
        if any(len(column) != int(length.sum()) for column in self.columns.values()):
            raise ValueError("a column does not have a value for every row")
        if "pos" in self.columns:
            pos = self.columns["pos"]
            if not ((pos >= 0) & (pos < self.state.position)).all():
                raise ValueError("a row has a position that was not read")


def _of(value: object, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"not a {kinds[0].__name__}: {value!r:.40}")
    return value


def _count(value: object) -> int:
    count: int = _of(value, int)
    if not 0 <= count < 1 << 62:
        raise ValueError(f"not a count: {count}")
    return count

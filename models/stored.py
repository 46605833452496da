"""A matrix as a file stores it: plain, or quantised in groups of columns.

A reader of a format makes one `Stored` for each tensor; `models/weights.py` fills the
network from it. Nothing here holds more than the requested rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from minikv.models.config import OwnForm

Steps = tuple[Tensor, Tensor, Tensor | None]
"""(codes, scale float32 [n, groups], middle float32 [n, groups] or None) of some rows. For int4:
codes 0 to 15 in pairs (`paired`), and a value is scale * (code - 8) + middle. For int8: codes int8
[n, in], and a value is scale * code."""
PAIRED = 32


def paired(codes: Tensor) -> Tensor:
    """Codes 0 to 15, uint8 [n, in] -> uint8 [n, in / 2]: for each 32 columns, a byte has one of the
    first 16 in its lower four bits, and the 16th after it in the upper ones."""
    low, high = codes.view(len(codes), -1, 2, PAIRED // 2).unbind(2)
    return (low | high << 4).flatten(1)


def apart(pairs: Tensor) -> Tensor:
    """The inverse of `paired`."""
    pairs = pairs.view(len(pairs), -1, PAIRED // 2)
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix in a file, or another tensor in plain form.

    name, path, start: the tensor's name and offset in the file, for messages and the order of
    reading. shape: (out, in). size: the bytes to read. form: "plain", "int8" or "int4", the form
    that loses least. group: how many columns share a scale; None: a whole row. heads: the number of
    heads of a query or key matrix, if the file has the rows of each head in rotary pairs: (x0, y0,
    x1, y1, ...), here (x0, x1, ..., y0, y1, ...); 0: rows are in order.

    Subclasses implement `_rows`, which returns the rows from `start` to `end` in the order of the
    file, and, for rows whose codes can be kept, `_steps`.
    """

    name: str
    path: Path
    start: int
    shape: tuple[int, ...]
    size: int
    form: str = "plain"
    group: int | None = None
    heads: int = field(default=0, kw_only=True)

    def rows(self, start: int, end: int) -> Tensor:
        """The rows from `start` to `end`, [n, in], as numbers. Raises ModelError."""
        first, last, order = self._span(start, end)
        return self._rows(first, last)[order]

    def steps(self, start: int, end: int) -> Steps:
        """The codes of these rows; only for int4, and for int8 without a group. Raises
        ModelError."""
        first, last, order = self._span(start, end)
        codes, scale, middle = self._steps(first, last)
        return codes[order], scale[order], None if middle is None else middle[order]

    def _span(self, start: int, end: int) -> tuple[int, int, Tensor | slice]:
        """The range of rows in the file that contains these rows, and their indices in it."""
        if not self.heads:
            return start, end, slice(None)
        size = self.shape[0] // self.heads
        first, last = start // size * size, -(-end // size) * size
        order = torch.arange(last - first).view(-1, size // 2, 2).transpose(1, 2).flatten()
        return first, last, order[start - first : end - first]

    def _rows(self, start: int, end: int) -> Tensor:
        raise NotImplementedError

    def _steps(self, start: int, end: int) -> Steps:
        raise NotImplementedError


def together(forms: Iterable[tuple[str, int | None]]) -> tuple[str, int]:
    """The form of a matrix of several parts, each (form, group), and its group; 0: a whole row. If
    the forms differ, the one that loses least: plain if any part is plain, otherwise eight bits."""
    forms = list(forms)
    kinds = {form for form, _ in forms}
    form = kinds.pop() if len(kinds) == 1 else "plain" if "plain" in kinds else "int8"
    return form, gcd(*(group or 0 for _, group in forms))


_MATRICES = {
    "q, k, v": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "o": ("self_attn.o_proj",),
    "gate, up": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "down": ("mlp.down_proj",),
    "head": ("lm_head",),
    "embedding": ("model.embed_tokens",),
}
_MATRIX_OF = {f"{part}.weight": name for name, parts in _MATRICES.items() for part in parts}
_LAYER = re.compile(r"model\.layers\.\d+\.")


def own_forms(entries: Mapping[str, Stored], tied: bool | None) -> tuple[OwnForm, ...]:
    """The forms of a network's matrices in a checkpoint. tied: the head is the embedding."""
    groups: dict[tuple[str, str], list[tuple[str, int | None]]] = {}
    for name, entry in entries.items():
        layer = match[0] if (match := _LAYER.match(name)) else ""
        slot = _MATRIX_OF.get(name.removeprefix(layer))
        if slot is None or (tied and slot == "head"):
            continue
        form = entry.form
        if slot == "embedding":  # single rows of it are read
            form, slot = form.replace("int4", "int8"), "head" if tied else slot
        groups.setdefault((layer, slot), []).append((form, entry.group))
    found = Counter((slot, *together(forms)) for (_, slot), forms in groups.items())
    return tuple(OwnForm(*one, n) for one, n in found.items() if one[1] != "plain")


class Fused:
    """Matrices with the same input as one, beginning with the first part's rows."""

    def __init__(self, parts: Sequence[Stored]) -> None:
        self.parts = parts
        self.shape = torch.Size((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        self.size = sum(part.size for part in parts)
        self.form, self.group = together((part.form, part.group) for part in parts)

    def steps(self, start: int, end: int) -> Steps:
        """See `Stored`. Scales are repeated where a part's groups are larger than another's."""
        found = [part.steps(*rows) for part, *rows in self._spans(start, end)]
        groups = max(scale.shape[1] for _, scale, _ in found)

        def joined(values: Iterable[Tensor]) -> Tensor:
            times = ((value, groups // value.shape[1]) for value in values)
            return torch.cat([v if n == 1 else v.repeat_interleave(n, 1) for v, n in times])

        middles = [middle for *_, middle in found if middle is not None]
        return (
            torch.cat([codes for codes, *_ in found]),
            joined(scale for _, scale, _ in found),
            joined(middles) if middles else None,
        )

    def rows(self, start: int, end: int) -> Tensor:
        """See `Stored`."""
        return torch.cat([part.rows(*rows) for part, *rows in self._spans(start, end)])

    def _spans(self, start: int, end: int) -> Iterator[tuple[Stored, int, int]]:
        """The parts that contain some of these rows, and which of the parts' rows these are."""
        for part in self.parts:
            size = part.shape[0]
            if start < size and end > 0:
                yield part, max(start, 0), min(end, size)
            start, end = start - size, end - size

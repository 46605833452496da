"""The preallocated cache: a table whose rows are (layer, KV head, token) and whose columns travel
together.

Every (layer, head) owns a contiguous segment of `capacity` rows, of which the first `length` are
in use. The segments of a layer lie side by side in the layer's region. Keys are stored rotated, so
the order of rows is free, and `pos` keeps the truth about positions. A row that was evicted and
not yet overwritten is the head's `free_slot`: in use, but gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from minikv import kernels

_CORE = ("k", "v", "k_scale", "v_scale", "pos")


@dataclass(frozen=True, slots=True)
class Layout:
    """A copy of where everything lies: int64 [L, H] each, see `Arena`."""

    start: Tensor
    length: Tensor
    capacity: Tensor
    cap: Tensor
    free_slot: Tensor


class Arena:
    """Storage only: it never judges a row.

    columns: k, v [R, D]; with a `kv` of int8 their k_scale, v_scale [R] float32; pos [R] int32;
    and the policy's own [R].
    start, length, capacity, cap, free_slot: int64 [L, H] on the host: first row; rows in use; rows
    owned; rows that the head may keep; the evicted row's index into the columns, or -1.
    region: L + 1 row numbers, the first row of each layer, then R.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        extra: Mapping[str, torch.dtype],
        *,
        kv: torch.dtype | None = None,
        poison: bool = False,
    ) -> None:
        """`dtype` is the network's; `kv` what k and v are stored in, the same by default.

        `poison` fills new memory with NaN, so that a test sees any read of an unwritten row.
        """
        assert kv in (None, dtype, torch.int8)
        self.heads, self.device, self.poison, self.dtype = heads, device, poison, dtype
        self.coded = kv == torch.int8
        self.start = torch.zeros((layers, heads), dtype=torch.int64)
        self.length = torch.zeros_like(self.start)
        self.capacity = torch.zeros_like(self.start)
        self.cap = torch.zeros_like(self.start)
        self.free_slot = torch.full_like(self.start, -1)
        self.region = [0] * (layers + 1)
        self.columns: dict[str, Tensor] = {
            "k": torch.empty((0, head_dim), dtype=kv or dtype, device=device),
            "v": torch.empty((0, head_dim), dtype=kv or dtype, device=device),
            "pos": torch.empty(0, dtype=torch.int32, device=device),
        }
        for name in self.scales:
            self.columns[name] = torch.empty(0, dtype=torch.float32, device=device)
        self.declare(extra)

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the columns by which k and v are scaled."""
        return ("k_scale", "v_scale") if self.coded else ()

    def stored(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Keys and values [..., D] in the network's dtype, as the columns hold them."""
        if not self.coded:
            return {"k": k, "v": v}
        (k, k_scale), (v, v_scale) = kernels.to_codes(k), kernels.to_codes(v)
        return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}

    def read(self, name: str, index: Tensor) -> Tensor:
        """Keys ("k") or values ("v") of the rows `index` [...], [..., D] in the network's dtype."""
        rows = self.columns[name][index]
        if not self.coded:
            return rows
        return kernels.from_codes(rows, self.columns[f"{name}_scale"][index], self.dtype)

    def declare(self, extra: Mapping[str, torch.dtype]) -> None:
        """Have exactly these policy columns; one that is new starts at zero."""
        for name in self.extra:
            if name not in extra:
                del self.columns[name]
        for name, dtype in extra.items():
            if name not in self.columns:
                self.columns[name] = torch.zeros(self.rows, dtype=dtype, device=self.device)

    @property
    def extra(self) -> list[str]:
        """Names of the policy's columns."""
        return [name for name in self.columns if name not in _CORE]

    @property
    def rows(self) -> int:
        """R, the rows allocated."""
        return self.region[-1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, every column counted."""
        return sum(column.nbytes for column in self.columns.values())

    def row_nbytes(self, names: Sequence[str] | None = None) -> int:
        """Bytes of one row in the named columns, by default in all."""
        chosen = self.columns if names is None else {n: self.columns[n] for n in names}
        return sum(c.element_size() * (c.shape[1] if c.dim() > 1 else 1) for c in chosen.values())

    @property
    def held(self) -> Tensor:
        """int64 [L, H]: rows held, holes left out."""
        return self.length - (self.free_slot >= 0).to(torch.int64)

    def resize(self, rows: Sequence[int], capacity: Tensor | None = None) -> int:
        """Give layer i a region of rows[i] rows, and every head a segment of capacity[i, h] rows
        (by default as wide as it was). Rows keep their place in their segment. Returns the most
        bytes that were allocated at once.

        Columns move one after the other, so that only one of them exists twice at a time. If there
        is no memory for one, those before it move back, which takes no more than was there.
        """
        region = [0, *accumulate(rows)]
        owned = self.capacity if capacity is None else capacity
        if region == self.region and torch.equal(owned, self.capacity):
            return self.nbytes
        assert bool((self.length <= owned).all()), "a segment would lose rows"
        assert bool((owned.sum(1) <= torch.tensor(rows)).all()), "a region is too small"
        start = torch.tensor(region[:-1])[:, None] + owned.cumsum(1) - owned
        moved: list[str] = []
        peak = 0
        try:
            for name in self.columns:
                before = self.nbytes
                self._move(name, self.start, start, region[-1])
                moved.append(name)
                peak = max(peak, before + self.columns[name].nbytes)
        except BaseException:
            for name in moved:
                self._move(name, start, self.start, self.region[-1])
            raise
        self.free_slot = torch.where(
            self.free_slot >= 0, self.free_slot + start - self.start, self.free_slot
        )
        self.start, self.capacity, self.region = start, owned.clone(), region
        return peak

    def _move(self, name: str, old: Tensor, new: Tensor, rows: int) -> None:
        """Copy a column's rows in use from segments that began at old [L, H] to a column of `rows`
        rows, where they begin at new [L, H]."""
        source = self.columns[name]
        target = self._blank(source, rows)
        spans = zip(*(t.flatten().tolist() for t in (old, new, self.length)), strict=True)
        for a, b, count in spans:
            target[b : b + count] = source[a : a + count]
        self.columns[name] = target

    def _blank(self, like: Tensor, rows: int) -> Tensor:
        """A column as `like` with `rows` rows that nobody has written yet."""
        shape = (rows, *like.shape[1:])
        with torch.inference_mode(False):  # made in a forward, but also written outside of one
            blank = torch.empty(shape, dtype=like.dtype, device=self.device)
        if self.poison:
            real = blank.is_floating_point()
            blank.fill_(float("nan") if real else torch.iinfo(blank.dtype).max // 2)
        return blank

    def grown(self, capacity: Tensor) -> Arena:
        """A copy in which every head owns capacity [L, H] rows, not fewer than it holds."""
        every = [
            torch.arange(start, start + length)
            for start, length in zip(
                self.start.flatten().tolist(), self.length.flatten().tolist(), strict=True
            )
        ]
        free = torch.where(self.free_slot >= 0, self.free_slot - self.start, -1)
        return self._copied(every, capacity, free)

    def trimmed(self, sinks: int, pinned: int) -> Arena:
        """A copy in which no head holds more rows than its cap: the oldest have left, but for the
        first `sinks` positions and those below `pinned`."""
        kept = []
        tables = (self.start, self.length, self.cap, self.free_slot)
        for start, length, cap, free in zip(*(t.flatten().tolist() for t in tables), strict=True):
            rows = torch.arange(start, start + length)
            rows = rows[rows != free]
            pos = self.columns["pos"][rows.to(self.device)].to("cpu", torch.int64)
            age = torch.where(pos < max(sinks, pinned), pos + (1 << 40), pos)
            kept.append(rows[age.argsort(descending=True)[:cap].sort().values])
        capacity = torch.maximum(self.capacity, self.cap)
        return self._copied(kept, capacity, torch.full_like(self.free_slot, -1))

    def _copied(self, rows: list[Tensor], capacity: Tensor, free: Tensor) -> Arena:
        """A copy with the rows of each head, indices into the columns, in segments of capacity
        [L, H]; free [L, H]: which row of a segment is a free slot, or -1."""
        layers, heads = self.start.shape
        made = Arena.__new__(Arena)
        made.heads, made.device, made.poison = self.heads, self.device, self.poison
        made.dtype, made.coded = self.dtype, self.coded
        made.region = [0, *accumulate(capacity.sum(1).tolist())]
        first = torch.tensor(made.region[:-1], device=capacity.device)[:, None]
        made.start, made.capacity = first + capacity.cumsum(1) - capacity, capacity.clone()
        made.length = torch.tensor([len(r) for r in rows], device=capacity.device)
        made.length = made.length.view(layers, heads)
        made.cap = self.cap.clone()
        made.free_slot = torch.where(free >= 0, made.start + free, -1)
        source = torch.cat(rows).to(self.device)
        begins = made.start.flatten().tolist()
        spans = [torch.arange(b, b + len(r)) for b, r in zip(begins, rows, strict=True)]
        target = torch.cat(spans).to(self.device)
        made.columns = {}
        for name, column in self.columns.items():
            made.columns[name] = self._blank(column, made.region[-1])
            made.columns[name][target] = column[source]
        return made

    def lay(self, layer: int, capacity: Sequence[int]) -> None:
        """Divide a layer's region into segments; what they held is forgotten."""
        sizes = torch.tensor(list(capacity))
        assert int(sizes.sum()) <= self.region[layer + 1] - self.region[layer]
        self.capacity[layer] = sizes
        self.start[layer] = self.region[layer] + sizes.cumsum(0) - sizes
        self.length[layer] = 0
        self.free_slot[layer] = -1

    def segment(self, name: str, layer: int, head: int) -> Tensor:
        """The rows in use of one head: a view [length, ...] of a column."""
        begin = int(self.start[layer, head])
        return self.columns[name][begin : begin + int(self.length[layer, head])]

    def append(self, layer: int, head: int, rows: Mapping[str, Tensor]) -> None:
        """Copy rows [n, ...] of every column behind those in use."""
        count = len(rows["pos"])
        begin = int(self.start[layer, head] + self.length[layer, head])
        assert int(self.length[layer, head]) + count <= int(self.capacity[layer, head])
        for name, column in self.columns.items():
            column[begin : begin + count] = rows[name]
        self.length[layer, head] += count

    def index(self, layer: int) -> tuple[Tensor, Tensor]:
        """The rows held by a layer's heads: (index into the columns [H, N], live [H, N] bool).

        Padding points at a row of the same head that has been written, so that it is finite.
        """
        lists = []
        for head in range(self.heads):
            begin, free_slot = int(self.start[layer, head]), int(self.free_slot[layer, head])
            rows = torch.arange(begin, begin + int(self.length[layer, head]))
            lists.append(rows[rows != free_slot] if free_slot >= 0 else rows)
        most = max(len(rows) for rows in lists)
        index = torch.zeros((self.heads, most), dtype=torch.int64)
        live = torch.zeros((self.heads, most), dtype=torch.bool)
        for head, rows in enumerate(lists):
            index[head] = rows[0] if len(rows) else 0
            index[head, : len(rows)] = rows
            live[head, : len(rows)] = True
        return index.to(self.device), live.to(self.device)

    def whole(self, layer: int, name: str) -> Tensor | None:
        """A column as a view [H, N, ...], if the layer's heads are alike and without holes."""
        length, capacity = self.length[layer], self.capacity[layer]
        n, step = int(length[0]), int(capacity[0])
        alike = bool((length == n).all()) and bool((capacity == step).all())
        if not alike or bool((self.free_slot[layer] >= 0).any()):
            return None
        begin = int(self.start[layer, 0])
        rows = self.columns[name][begin : begin + self.heads * step]
        return rows.view(self.heads, step, *rows.shape[1:])[:, :n]

    def layout(self) -> Layout:
        """A copy of where everything lies."""
        return Layout(
            self.start.clone(),
            self.length.clone(),
            self.capacity.clone(),
            self.cap.clone(),
            self.free_slot.clone(),
        )

    def save(self, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
        """A copy of the rows in use of a layer, in the named columns."""
        begin, end = self._extent(layer)
        return {name: self.columns[name][begin:end].clone() for name in names}

    def restore(self, layout: Layout, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Go back to a layout, with the contents of the layers that were rewritten since."""
        self.start, self.length, self.capacity = layout.start, layout.length, layout.capacity
        self.cap, self.free_slot = layout.cap, layout.free_slot
        for layer, columns in saved.items():
            begin, end = self._extent(layer)
            for name, rows in columns.items():
                self.columns[name][begin:end] = rows

    def pack(self) -> dict[str, Tensor]:
        """A copy of all rows in use, layer by layer and head by head, on the host."""
        used = self._used().to(self.device)
        return {name: column[used].to("cpu") for name, column in self.columns.items()}

    def unpack(self, layout: Layout, region: Sequence[int], columns: Mapping[str, Tensor]) -> None:
        """Lay an empty arena out as the one was that `pack` was called of, and fill it."""
        assert self.rows == 0
        assert columns.keys() == self.columns.keys()
        self.region = list(region)
        self.start, self.length = layout.start.clone(), layout.length.clone()
        self.capacity, self.cap = layout.capacity.clone(), layout.cap.clone()
        self.free_slot = layout.free_slot.clone()
        used = self._used().to(self.device)
        for name, rows in columns.items():
            self.columns[name] = self._blank(self.columns[name], self.rows)
            self.columns[name][used] = rows.to(self.device)

    def _used(self) -> Tensor:
        """int64: the rows in use, as indices into the columns."""
        spans = zip(self.start.flatten().tolist(), self.length.flatten().tolist(), strict=True)
        return torch.cat([torch.arange(begin, begin + count) for begin, count in spans])

    def _extent(self, layer: int) -> tuple[int, int]:
        begin = self.region[layer]
        return begin, max(begin, int((self.start[layer] + self.length[layer]).max()))

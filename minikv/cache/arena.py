"""The storage of the cache: a table whose rows are (layer, KV head, token) and whose columns travel
together.

Every (layer, head) owns a contiguous segment of `capacity` rows, of which the first `length` are in
use. The segments of a layer are adjacent in the layer's region. Keys are stored rotated, so the
order of rows is free; the column `pos` has each row's position. A row that was evicted and is not
yet overwritten is the head's free slot: `length` counts it, but it is no longer held.

An arena never resizes in place. `fresh`, `sharing`, `grown` and `unpack` make another one,
and the old one stays valid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from minikv import kernels
from minikv.kernels.decode.plain import in_use
from minikv.kernels.dispatch import Kernels
from minikv.pages import large
from minikv.policies.selection import blocks

TABLES = ("start", "length", "capacity", "cap", "free_slot")
_CORE = ("k", "v", "k_scale", "v_scale", "pos")


@dataclass(frozen=True, slots=True)
class Layout:
    """A copy of an arena's tables on the host: int64 [L, H] each, see `Arena`."""

    start: Tensor
    length: Tensor
    capacity: Tensor
    cap: Tensor
    free_slot: Tensor

    @property
    def held(self) -> Tensor:
        """int64 [L, H]: rows held, free slots left out."""
        return self.length - (self.free_slot >= 0).to(torch.int64)


class Arena:
    """Stores rows. It never decides which rows leave.

    columns: k and v [R, D]; if `kv` is int8, their scales k_scale and v_scale, float32 [R]; pos,
    int32 [R]; and the policies' columns [R].

    The tables are int64 [L, H] on the device of the columns. start: the head's first row. length:
    rows in use. capacity: rows owned. cap: rows that the head may keep. free_slot: the index of the
    evicted row into the columns, or -1.

    region: L + 1 row numbers on the host: the first row of each layer, then R.
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
        rows: Sequence[int] = (),
        filled: int | None = None,
    ) -> None:
        """dtype: the network's. kv: the dtype that k and v are stored in: `dtype` (the default) or
        int8. extra: dtypes of the policies' columns. rows: the size of each layer's region; none by
        default. filled: how many of all rows will be written soon; all by default. If that is less
        than half, the memory is not in large pages, which unused rows would also occupy."""
        assert kv in (None, dtype, torch.int8)
        self.layers, self.heads, self.head_dim = layers, heads, head_dim
        self.device, self.dtype = device, dtype
        self.coded = kv == torch.int8
        self.region = [0, *accumulate(rows or [0] * layers)]
        self._sparse = filled is not None and 2 * filled < self.rows
        with torch.inference_mode(False):  # written inside and outside of a forward
            tables = torch.zeros((len(TABLES), layers, heads), dtype=torch.int64, device=device)
            self.start, self.length, self.capacity, self.cap, self.free_slot = tables.unbind()
            self.free_slot.fill_(-1)
        self.columns: dict[str, Tensor] = {
            "k": self._blank(kv or dtype, head_dim),
            "v": self._blank(kv or dtype, head_dim),
            "pos": self._blank(torch.int32),
        }
        for name in self.scales:
            self.columns[name] = self._blank(torch.float32)
        for name, kind in extra.items():
            self.columns[name] = self._blank(kind)

    def _blank(self, dtype: torch.dtype, *size: int) -> Tensor:
        """A new column [R, *size], not yet written."""
        with torch.inference_mode(False):
            made = torch.empty if self._sparse else large
            return made((self.rows, *size), dtype=dtype, device=self.device)

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the columns with the scales of k and v; none if these are not int8."""
        return ("k_scale", "v_scale") if self.coded else ()

    def stored(self, ops: Kernels, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Convert keys and values [..., D] from the network's dtype to what the columns hold: k and
        v, and for int8 also k_scale and v_scale [...]."""
        if not self.coded:
            return {"k": k, "v": v}
        found: dict[str, Tensor] = {}
        for name, x in (("k", k), ("v", v)):
            codes = found[name] = torch.empty_like(x, dtype=torch.int8)
            scale = found[f"{name}_scale"] = x.new_empty(x.shape[:-1], dtype=torch.float32)
            for some in blocks(len(x), x[:1].numel(), ops.block):
                codes[some], scale[some] = kernels.to_codes(x[some])
        return found

    def read(self, ops: Kernels, name: str, index: Tensor) -> Tensor:
        """Keys ("k") or values ("v") of the rows `index` [...]: [..., D] in the network's dtype."""
        if not self.coded:
            return self.columns[name][index]
        codes, scale = self.columns[name], self.columns[f"{name}_scale"]
        found = codes.new_empty((*index.shape, self.head_dim), dtype=self.dtype)
        for some in blocks(len(index), index[:1].numel() * self.head_dim, ops.block):
            found[some] = kernels.from_codes(codes[index[some]], scale[index[some]], self.dtype)
        return found

    def declare(self, extra: Mapping[str, torch.dtype], *, clear: Collection[str] = ()) -> None:
        """Make the policies' columns exactly `extra`. New columns, and those in `clear`, start at
        zero; the others keep their values. If memory runs out, nothing changes."""
        stays = [name for name in extra if name not in clear]
        columns = {name: c for name, c in self.columns.items() if name in _CORE or name in stays}
        for name, dtype in extra.items():
            if name not in columns:
                columns[name] = torch.zeros(self.rows, dtype=dtype, device=self.device)
        self.columns = columns

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
        """int64 [L, H] on the device: rows held, free slots left out."""
        return self.length - (self.free_slot >= 0).to(torch.int64)

    # -- other arenas -------------------------------------------------------------------------

    def fresh(
        self, rows: Sequence[int], extra: Mapping[str, torch.dtype], *, filled: int | None = None
    ) -> Arena:
        """An arena of the same kind that holds nothing: layer i's region has rows[i] rows. filled:
        as in the constructor."""
        return Arena(
            self.layers,
            self.heads,
            self.head_dim,
            self.dtype,
            self.device,
            extra,
            kv=torch.int8 if self.coded else None,
            rows=rows,
            filled=filled,
        )

    def sharing(self, extra: Mapping[str, torch.dtype]) -> Arena:
        """An arena with the same rows in the same memory, but with its own tables and its own
        policy columns, which are not yet written.

        A row that is written after those in use belongs to neither arena until a table counts it.
        """
        made = self.fresh([0] * self.layers, {})
        made.region = list(self.region)
        made._copy_tables(self)
        made.columns = {name: c for name, c in self.columns.items() if name in _CORE}
        made.columns |= {name: made._blank(kind) for name, kind in extra.items()}
        return made

    def grown(self, capacity: Tensor) -> Arena:
        """A copy in which head h of layer l owns capacity[l, h] rows, int64 [L, H]. Rows keep their
        place in their segment. Waits for the device."""
        assert bool((self.length <= capacity).all()), "a segment would lose rows"
        kinds = {name: self.columns[name].dtype for name in self.extra}
        made = self.fresh(capacity.sum(1).tolist(), kinds, filled=int(self.length.sum()))
        made.lay(capacity)
        made.length.copy_(self.length)
        made.cap.copy_(self.cap)
        moved = self.free_slot + made.start - self.start
        made.free_slot.copy_(torch.where(self.free_slot >= 0, moved, -1))
        before = self.layout()
        for layer in range(self.layers):  # one layer at a time, so that the copies stay small
            rows = _rows(before.start[layer], before.length[layer]).to(self.device)
            made._put(layer, self.columns, rows)
        return made

    def _put(self, layer: int, columns: Mapping[str, Tensor], rows: Tensor) -> None:
        """Fill the rows in use of a layer's heads, one after the other, with the `rows` of other
        columns."""
        into = _rows(self.start[layer], self.length[layer]).to(self.device)
        for name, column in columns.items():
            self.columns[name].index_copy_(0, into, column.index_select(0, rows))

    def take(self, other: Arena) -> bool:
        """Copy the rows and tables of `other` into the memory of this arena. Changes nothing and
        returns False if the two differ in regions, columns or dtypes. `other` may share columns
        with this arena."""
        mine, theirs = self.columns, other.columns
        alike = self.region == other.region and mine.keys() == theirs.keys()
        if not alike or any(mine[name].dtype != theirs[name].dtype for name in mine):
            return False
        for name, column in theirs.items():
            if column.data_ptr() != mine[name].data_ptr():
                mine[name].copy_(column)
        self._copy_tables(other)
        return True

    def _copy_tables(self, other: Arena | Layout) -> None:
        for name in TABLES:
            getattr(self, name).copy_(getattr(other, name))

    # -- rows -----------------------------------------------------------------------------

    def lay(self, capacity: Tensor) -> None:
        """Divide the regions into segments of capacity int64 [L, H] rows, which hold nothing."""
        first = torch.tensor(self.region[:-1], device=self.device)[:, None]
        self.capacity.copy_(capacity)
        self.start.copy_(first + capacity.cumsum(1) - capacity)
        self.length.zero_()
        self.free_slot.fill_(-1)

    def index(self, layer: int, most: int | None = None) -> tuple[Tensor, Tensor]:
        """The rows of a layer's heads: (index into the columns [H, N], live [H, N] bool).

        A free slot is not live. Padding points at the head's last row, or, if the head has no row,
        at one that may never have been written. N is `most`. By default it is the longest length,
        and finding that waits for the device.
        """
        if most is None:
            most = int(self.length[layer].max())
        index, live = in_use(self.start[layer], self.length[layer], most, self.rows)
        live &= index != self.free_slot[layer][:, None]
        return index, live

    def positions(self, index: Tensor, live: Tensor) -> Tensor:
        """int64 [H, N]: the positions of the rows that `index` returned; -1 where not live."""
        return self.columns["pos"][index].to(torch.int64).masked_fill(~live, -1)

    def count_from(self, layer: int, position: int) -> Tensor:
        """int64 []: how many rows a layer's heads hold from this position on."""
        begin, end = self.region[layer], self.region[layer + 1]
        row = torch.arange(begin, end, device=self.device)
        start, free_slot = self.start[layer][:, None], self.free_slot[layer][:, None]
        mine = (row >= start) & (row < start + self.length[layer][:, None]) & (row != free_slot)
        return (mine & (self.columns["pos"][begin:end] >= position)).sum()

    def cut(self, position: int) -> None:
        """Forget the rows from `position` on, in place; the others move to the front of
        their segments. Waits for the device."""
        for layer in range(self.layers):
            index, live = self.index(layer)
            keep = live & (self.columns["pos"][index] < position)
            self.length[layer] = keep.sum(1)
            if not torch.equal(keep, keep.cumprod(1).bool()):
                self._put(layer, self.columns, index[keep])
        self.free_slot.fill_(-1)

    # -- copies on the host -------------------------------------------------------------------

    def layout(self) -> Layout:
        """A copy of the tables on the host, in one transfer."""
        return Layout(*torch.stack([getattr(self, name) for name in TABLES]).cpu().unbind())

    def pack(self) -> dict[str, Tensor]:
        """A copy of all rows in use, layer by layer and head by head, on the host."""
        held = self.layout()
        used = _rows(held.start, held.length).to(self.device)
        return {name: column[used].to("cpu") for name, column in self.columns.items()}

    def unpack(self, layout: Layout, region: Sequence[int], columns: Mapping[str, Tensor]) -> Arena:
        """The reverse of `layout` and `pack`: an arena of the same kind with the same tables,
        regions and rows. columns: as `pack` returned them."""
        assert columns.keys() == self.columns.keys()
        sizes = [b - a for a, b in pairwise(region)]
        kinds = {name: columns[name].dtype for name in self.extra}
        made = self.fresh(sizes, kinds, filled=int(layout.length.sum()))
        made._copy_tables(layout)
        used = _rows(layout.start, layout.length).to(self.device)
        for name, rows in columns.items():
            made.columns[name][used] = rows.to(self.device)
        return made


def _rows(start: Tensor, length: Tensor) -> Tensor:
    """int64: the rows of heads with start and length [...], on the host, as indices into the
    columns."""
    spans = zip(start.flatten().tolist(), length.flatten().tolist(), strict=True)
    return torch.cat([torch.arange(begin, begin + count) for begin, count in spans])

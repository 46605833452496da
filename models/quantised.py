"""Reads quantised safetensors: which tensors make up a matrix, and how to decode its numbers.

In every form a matrix is a table of codes, a scale for each tile of them, and usually a zero point:
value = (code - zero) * scale. The forms differ in the names of these tensors (`_LAYOUTS`), in their
first axis, and in how codes are packed.

The tensors decide: a module is quantised if the file has its codes, whatever modules config.json
excludes, and the size of a tile follows from the shapes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

import torch
from torch import Tensor

from minikv.models.checkpoint import DTYPES, READ, SMALL, Checkpoint, Entry
from minikv.models.config import ModelConfig, Quantisation, Reader, quantised
from minikv.models.errors import CorruptModel, UnsupportedModel, quote
from minikv.models.files import parse_json
from minikv.models.linear import GROUPS, can_pack
from minikv.models.llama import Llama
from minikv.models.stored import Steps, Stored, own_forms, paired
from minikv.models.tensors import tensors_of
from minikv.pages import Pages

_IGNORED = re.compile(
    r"((in|out)put_(global_)?scale|(in|out)put_zero_point|(input_)?activation_scale|[kqv]_scale"
    r"|weight_shape|weight_format|weight\.(quant_map|nested_.*|quant_state\..*))"
)
"""Ends of names of tensors that are not needed, mostly scales of activations and of a cache."""
_QUANTISED = re.compile(
    r".+\.(qweight|qzeros|g_idx|weight_packed|weight_scale(_inv)?|weight_format|SCB"
    r"|weight\.(absmax|quant_map|nested_.*|quant_state\..*))"
)
"""Names of tensors in quantised models only."""
_TAIL = re.compile(r"(.+?)\.(weight(?:\..+)?|[^.]+)")  # a module, and the rest of a tensor's name


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a method stores a matrix: the ends of the tensors' names, and their layout.

    turned: the file has columns first. packed: the axis along which a word or a byte has several
    codes ("out" or "in"); "": none. order: the positions of the codes in a word, if not in order.
    """

    codes: str
    scale: str
    zero: str = ""
    tiles: str = ""
    turned: bool = False
    packed: str = ""
    order: tuple[int, ...] = ()


_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
_PACKED = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
_LAYOUTS = {
    "awq": (_Layout("qweight", "scales", "qzeros", turned=True, packed="out", order=_AWQ),),
    "gptq": (_Layout("qweight", "scales", "qzeros", "g_idx", turned=True, packed="in"),),
    "compressed-tensors": (
        _Layout(*_PACKED, packed="in"),
        _Layout("weight", "weight_scale", "weight_zero_point"),
    ),
    "fp8": (_Layout("weight", "weight_scale_inv"), _Layout("weight", "weight_scale")),
    "bitsandbytes": (
        _Layout("weight", "weight.absmax", packed="in", order=(1, 0)),
        _Layout("weight", "SCB"),
    ),
}


@dataclass(slots=True)
class _Part:
    """One tensor of a matrix, read by the matrix's rows. turned, packed, order: see `_Layout`.
    bits: of a packed code. table: the values of the codes. scales: each multiplies `size`
    consecutive numbers, even across rows, before `offset` is added (the absmax of bitsandbytes is
    itself quantised); None: there are none."""

    entry: Entry
    turned: bool = False
    packed: str = ""
    order: tuple[int, ...] = ()
    bits: int = 8
    table: Tensor | None = None
    scales: Tensor | None = None
    size: int = 256
    offset: float = 0.0
    _held: Tensor | None = field(default=None, init=False)

    def shape(self) -> tuple[int, ...]:
        """[rows, columns] in the matrix, with full words; a vector is a column."""
        shape = self.entry.shape if len(self.entry.shape) > 1 else (*self.entry.shape, 1, 1)[:2]
        rows, columns, *more = shape[::-1] if self.turned else shape
        per = {self.packed: self.per()}
        return (rows * per.get("out", 1), columns * per.get("in", 1), *more)

    def per(self) -> int:
        """How many codes a word or byte has."""
        return 8 * READ[self.entry.dtype].itemsize // self.bits

    def rows(self, start: int, end: int) -> Tensor:
        """The rows from `start` to `end`, with all columns of the last word."""
        if self.packed == "out":
            first, last = start // self.per(), ceil(end / self.per())
            made = self._unpacked(self._block(first, last).t()).t()
            return made[start - first * self.per() :][: end - start]
        made = self._block(start, end)
        made = self._unpacked(made) if self.packed else made
        made = made if self.table is None else self.table[made.int()]
        if self.scales is None:
            return made
        at = torch.arange(start * made.shape[1], end * made.shape[1]) // self.size
        return made * self.scales[at].view_as(made) + self.offset

    def _block(self, first: int, last: int) -> Tensor:
        """Rows of the file's tensor. A turned one is read whole, and stays in memory until its last
        row was read."""
        if not self.turned:
            return _read(self.entry, first, last)
        held = _read(self.entry) if self._held is None else self._held
        self._held = held if last < held.shape[1] else None
        return held[:, first:last].t()

    def _unpacked(self, words: Tensor) -> Tensor:
        """Codes uint8 [n, columns] of words [n, columns / per]; the lowest bits come first."""
        # Not contiguous(), which leaves a single row with a stride that `view` refuses.
        codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
        if self.order:
            codes = codes.view(len(codes), -1, len(self.order))[..., self.order].flatten(1)
        return codes


def _read(entry: Entry, first: int = 0, last: int | None = None) -> Tensor:
    """A tensor of a file, at least two-dimensional; or some of its rows."""
    if len(entry.shape) < 2:
        entry = replace(entry, shape=(*entry.shape, 1, 1)[:2])
    return entry.rows(first, entry.shape[0] if last is None else last)


@dataclass(slots=True)
class _Grid:
    """A table with one number for each tile of the matrix; a tile has `high` rows. plus and times:
    are applied to each number. empty: whether a number may be 0."""

    part: _Part
    high: int = 1
    plus: int = 0
    times: float = 1.0
    empty: bool = True

    def rows(self, start: int, end: int) -> Tensor:
        """float32 [end - start, tiles]. Raises CorruptModel."""
        first = start // self.high
        made = self.part.rows(first, ceil(end / self.high)).float()
        if not made.isfinite().all() or not (self.empty or made.all()):
            raise _bad(self.part.entry, "has a scale that is 0 or not a number")
        made = made if self.high == 1 else made[torch.arange(start, end) // self.high - first]
        return made.add(self.plus).mul_(self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix(Stored):
    """A quantised matrix. parts: its tensors, the codes first. form: "plain" if its codes cannot be
    kept; `why` then says why. middle: the zero point, if the file has none. wide: columns of a
    tile. tiles: the tile of each column."""

    parts: tuple[Entry, ...]
    codes: _Part
    scale: _Grid
    zero: _Grid | None
    middle: int
    wide: int
    tiles: Tensor
    why: str

    def _rows(self, start: int, end: int) -> Tensor:
        made = self.codes.rows(start, end)[:, : self.shape[1]].float()
        zero = self.middle if self.zero is None else self.zero.rows(start, end)[:, self.tiles]
        return (made - zero).mul_(self.scale.rows(start, end)[:, self.tiles])

    def _steps(self, start: int, end: int) -> Steps:
        """The int8 code -128 becomes -127, because the kernels of some processors cannot multiply
        -128."""
        codes, scale = self.codes.rows(start, end)[:, : self.shape[1]], self.scale.rows(start, end)
        if self.group is None:
            codes = codes if codes.dtype == torch.int8 else (codes ^ 128).view(torch.int8)
            return codes.clamp(min=-127), scale, None
        zero = self.middle if self.zero is None else self.zero.rows(start, end)
        each, middle = self.wide // self.group, scale * (8 - zero)
        return paired(codes), scale.repeat_interleave(each, 1), middle.repeat_interleave(each, 1)


def adopted(
    checkpoint: Checkpoint, config: ModelConfig, form: str
) -> tuple[Checkpoint, ModelConfig]:
    """The checkpoint with one entry for each quantised matrix, under its plain name, and the
    configuration with the forms in which they are kept. form: one of `linear.FORMS`. Raises
    CorruptModel or UnsupportedModel."""
    plain = {n: entry for n, entry in checkpoint.entries.items() if isinstance(entry, Entry)}
    if config.quantisation is None:
        _refuse_quantised(plain)
        return checkpoint, config
    if checkpoint.original:
        raise quantised(f"{config.form}, in Mistral's own layout")
    network = Llama(config, device="meta", room=Pages(torch.device("meta")).empty)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(network)}
    shapes["lm_head.weight"] = config.vocab, config.hidden
    made = stored(plain, config.quantisation, shapes)
    notes: list[str] = []
    if form == "auto" and config.stored:
        why = Counter(one.why for one in made.values() if isinstance(one, Matrix) and one.why)
        notes = [f"{count} matrices are unpacked: {reason}" for reason, count in why.items()]
    config = replace(config, stored=own_forms(made, config.tied), notes=(*config.notes, *notes))
    return Checkpoint(made, checkpoint.original), config


def stored(
    entries: Mapping[str, Entry], about: Quantisation, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Entry | Matrix]:
    """The tensors of a checkpoint, with one entry for each quantised matrix, under its plain name.
    shapes: those of the network's tensors. Raises CorruptModel or UnsupportedModel."""
    modules: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        match = _TAIL.fullmatch(name)
        module, tail = match.groups() if match else (name, "")
        modules.setdefault(module, {})[tail] = entry
    made: dict[str, Entry | Matrix] = {}
    for module, parts in modules.items():
        name = f"{module}.weight"
        layout = _layout(about.method, parts)
        if layout is not None and len(shapes.get(name, ())) == 2:
            matrix = made[name] = _matrix(name, parts, layout, about, shapes[name])
            parts = {tail: part for tail, part in parts.items() if part not in matrix.parts}
            bias = parts.get("bias")
            if bias is not None and f"{module}.bias" not in shapes and _is_zero(bias, matrix):
                del parts["bias"]  # some writers of GPTQ add zero biases
        for tail, entry in parts.items():
            name = f"{module}.{tail}" if tail else module
            if name in made:
                raise _bad(entry, "is there twice, plain and quantised")
            if not _IGNORED.fullmatch(tail):
                made[name] = entry
    return made


def _is_zero(bias: Entry, matrix: Matrix) -> bool:
    return bias.shape == matrix.shape[:1] and not _read(_checked(bias, *DTYPES)).any()


def _refuse_quantised(entries: Mapping[str, Entry]) -> None:
    """Raise UnsupportedModel for tensors that would be wrong without their scales."""
    for name, entry in entries.items():
        if entry.dtype in SMALL or _QUANTISED.fullmatch(name):
            raise UnsupportedModel(
                f"{entry.path.name}: {quote(name)} is quantised, and config.json does not say how",
                "use a repository whose config.json has a quantization_config, or an original one",
            )


def _layout(method: str, parts: Mapping[str, Entry]) -> _Layout | None:
    """How a module is stored; None if it is not quantised."""
    fitting = [
        layout
        for layout in _LAYOUTS[method]
        if layout.codes in parts and (layout.codes != "weight" or parts["weight"].dtype in SMALL)
    ]
    complete = (layout for layout in fitting if layout.scale in parts)
    return next(complete, fitting[0] if fitting else None)


def _matrix(
    name: str,
    parts: Mapping[str, Entry],
    layout: _Layout,
    about: Quantisation,
    shape: tuple[int, ...],
) -> Matrix:
    """A module's matrix. Raises CorruptModel or UnsupportedModel."""
    rows, columns = shape
    codes_in = parts[layout.codes]
    for tail in (layout.scale, layout.zero if layout.turned else layout.scale):
        if tail not in parts:
            raise _bad(codes_in, f"is quantised, but {tail} is missing")
    scales, zeros, order = parts[layout.scale], parts.get(layout.zero), parts.get(layout.tiles)
    four = layout.scale == "weight.absmax"  # bitsandbytes
    _checked(codes_in, *(("U8",) if four else ("I32",) if layout.packed else ("I8", "F8_E4M3")))
    if four:
        codes, scale, wide = _four_bits(parts, rows, columns)
    else:
        codes = _codes(codes_in, layout, rows, columns)
        part = _Part(_checked(scales, *DTYPES), layout.turned)
        high, wide = _tile(part, rows, columns, about)
        empty = layout.scale == "SCB"
        flag = parts.get("weight_format")
        if flag is not None and (flag.size != 1 or _read(_checked(flag, "U8")).any()):
            raise UnsupportedModel(f"{flag.path.name}: {quote(flag.name)} is not 0, rows in order")
        scale = _Grid(part, high, times=1 / 127 if empty else 1.0, empty=empty)
    zero = None
    if zeros is not None:
        axis = "out" if layout.packed else ""
        part = _Part(_checked(zeros, codes_in.dtype), layout.turned, axis, layout.order, codes.bits)
        tall, across = scale.part.shape()
        _must(part.shape() == (_full(tall, part, "out"), across), zeros, f"is not as {scales.name}")
        zero = _Grid(part, scale.high, about.zero)
    middle = 1 << (codes.bits - 1) if layout.packed and not four else 0
    straight = torch.arange(columns) // wide
    tiles = straight if order is None else _order(order, straight)
    whole = wide == columns and can_pack("int8", columns)
    if zero is not None and codes.bits == 8 and whole and (zero.rows(0, rows) == middle).all():
        zero = None
    form, why = "plain", ""  # why the matrix must be unpacked
    if codes.table is not None or codes_in.dtype == "F8_E4M3":
        why = about.kind
    elif not torch.equal(tiles, straight):
        why = "their columns are not in the order of groups (desc_act)"
    elif codes.bits == 4 and wide % 32:
        why = f"groups of {wide} columns"
    elif codes.bits == 4:
        form = "int4"
    elif whole and zero is None:
        form = "int8"
    else:
        why = "eight bits with groups or zero points"
    used = tuple(part for part in (codes_in, scales, zeros, order) if part is not None)
    return Matrix(
        name=name,
        path=codes_in.path,
        start=codes_in.start,
        shape=shape,
        size=sum(part.size for part in used),
        form=form,
        group=next(size for size in GROUPS if wide % size == 0) if form == "int4" else None,
        parts=used,
        codes=codes,
        scale=scale,
        zero=zero,
        middle=middle,
        wide=wide,
        tiles=tiles,
        why=why,
    )


def _order(entry: Entry, tiles: Tensor) -> Tensor:
    """The tile of each column, according to g_idx."""
    _must(entry.shape == tiles.shape, entry, f"does not have {len(tiles)} numbers")
    found = _read(_checked(entry, "I32"))[:, 0].long()
    last = int(tiles[-1])
    _must(int(found.min()) >= 0 and int(found.max()) <= last, entry, f"is not all 0 to {last}")
    return found


def _codes(entry: Entry, layout: _Layout, rows: int, columns: int) -> _Part:
    """The codes; the number of their bits follows from the shape."""
    for bits in (4, 8) if layout.packed else (8,):
        part = _Part(entry, layout.turned, layout.packed, layout.order, bits)
        if part.shape() == (_full(rows, part, "out"), _full(columns, part, "in")):
            return part
    raise _bad(entry, f"has the shape {list(entry.shape)}: no codes of [{rows}, {columns}]")


def _full(size: int, part: _Part, axis: str) -> int:
    """A size, rounded up to whole words if these are along `axis`."""
    per = part.per() if part.packed == axis else 1
    return ceil(size / per) * per


def _tile(part: _Part, rows: int, columns: int, about: Quantisation) -> tuple[int, int]:
    """How many rows and columns share a scale. Raises CorruptModel."""
    shape = part.shape()
    if shape == (1, 1):
        return rows, columns
    if about.block is not None:
        high, wide = about.block
    else:
        across = shape[1] if about.group is None else ceil(columns / about.group)
        high, wide = 1, ceil(columns / max(1, across))
    right = shape == (ceil(rows / high), ceil(columns / wide))
    whole = about.block is not None or columns % wide == 0
    what = f"has the shape {list(part.entry.shape)}: no scales of [{rows}, {columns}]"
    _must(right and whole, part.entry, f"{what} in tiles of [{high}, {wide}]")
    return high, wide


def _four_bits(parts: Mapping[str, Entry], rows: int, columns: int) -> tuple[_Part, _Grid, int]:
    """The codes and scales of bitsandbytes, and how many consecutive numbers share a scale. Its
    tensors are flat, and their sizes are in a JSON text."""
    entry, absmax = parts["weight"], parts["weight.absmax"]
    state = next((tail for tail in parts if ".quant_state." in tail), "weight.quant_state")
    twice = ("weight.nested_quant_map", "weight.nested_absmax") if absmax.dtype == "U8" else ()
    for tail in (state, "weight.quant_map", *twice):
        _must(tail in parts, entry, f"is quantised, but {tail} is missing")
    _must(parts[state].size < 1 << 16, parts[state], "is too large")
    text = bytes(_read(_checked(parts[state], "U8")).numpy())
    facts = Reader(parse_json(text, parts[state].name), f"{entry.path.name}: {parts[state].name}")
    size = facts.integer("blocksize", 1, 1 << 16)
    right = facts.raw.get("shape") == [rows, columns] and 2 * entry.size == rows * columns
    _must(right, entry, "is not what its quant_state says")
    if columns % size or columns % 2:
        raise UnsupportedModel(f"{entry.path.name}: blocks of {size} in rows of {columns} columns")
    count = rows * columns // size
    _must(absmax.shape == (count,), absmax, f"does not have {count} numbers")
    scales = _Part(replace(_checked(absmax, "F32", "U8"), shape=(rows, columns // size)))
    if twice:
        each = facts.integer("nested_blocksize", 1, 1 << 16, 256)
        offset = facts.number("nested_offset", -1e6, 1e6, 0.0)
        table, values = (_table(parts[twice[0]], 256), _table(parts[twice[1]], ceil(count / each)))
        scales = replace(scales, table=table, scales=values, size=each, offset=offset)
    table = _table(parts["weight.quant_map"], 16)
    codes = _Part(replace(entry, shape=(rows, columns // 2)), False, "in", (1, 0), 4, table)
    return codes, _Grid(scales), size


def _table(entry: Entry, size: int) -> Tensor:
    """A tensor of `size` numbers."""
    _must(_checked(entry, "F32").shape == (size,), entry, f"does not have {size} numbers")
    return _read(entry)[:, 0]


def _checked(entry: Entry, *dtypes: str) -> Entry:
    """The entry, if it has one of these dtypes. Raises UnsupportedModel."""
    if entry.dtype not in dtypes:
        raise UnsupportedModel(f"{entry.path.name}: {quote(entry.name)} is stored as {entry.dtype}")
    return entry


def _must(right: bool, entry: Entry, what: str) -> None:
    if not right:
        raise _bad(entry, what)


def _bad(entry: Entry, what: str) -> CorruptModel:
    return CorruptModel(f"{entry.path.name}: {quote(entry.name)} {what}")

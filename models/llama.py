"""The network of Llama, Mistral, Qwen2 and related models. It does not know how keys and values are
stored.

It computes layer by layer: all tokens go through layer i, in chunks of `rows` rows, before any
enters layer i + 1. The residual stream [T, hidden] is the only tensor of full length; keys and
values go to `kv.attend`. Matrices with the same input are stored as one (q, k, v; gate, up).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.models.config import ModelConfig
from minikv.models.linear import (
    Int4,
    Int4Product,
    Int8,
    Int8Product,
    Linear,
    Plain,
    RowsProduct,
    Scratch,
    UnpackInt4,
    row_product,
)
from minikv.models.linear_gpu import Int4OnGpu, Int8OnGpu, as_read
from minikv.models.rope import Rotary, rotate
from minikv.pages import Empty, Pages

# On a CPU a chunk is bounded in bytes: 512 rows of float32, 1,024 of bfloat16 (from 768 rows on,
# torch's attention there takes queries in blocks of 256 instead of 64, and reads faster).
CPU_BYTES, CUDA_ROWS = 2048, 2048


def chunk_rows(cuda: bool, itemsize: int, asked: int | None) -> int:
    """How many tokens of a prompt go through a layer together. itemsize: bytes per number. asked:
    `Ops.prompt_rows`, which applies to numbers of two bytes."""
    if asked is not None and itemsize == 2:
        return asked
    return CUDA_ROWS if cuda else CPU_BYTES // itemsize


@dataclass(slots=True)
class Layer:
    """The weights of one layer; matrices as [out, in]."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * D, hidden]
    out: Linear  # [hidden, heads * D]
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * mlp, hidden], gate first
    down: Linear  # [hidden, mlp]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's tensor belongs: rows `rows` of the attribute `slot` of `owner`, which is
    the network or a layer.

    kind: "weight" or "bias" if the attribute is a matrix, "" if it is a tensor.
    """

    owner: Llama | Layer
    slot: str
    kind: str
    rows: slice

    def whole(self) -> Tensor:
        """The whole tensor of which this place is a part."""
        part: object = getattr(self.owner, self.slot)
        if self.kind:
            assert isinstance(part, Plain), "packed weights have no places"
            part = part.weight if self.kind == "weight" else part.bias
        assert isinstance(part, Tensor)
        return part

    def tensor(self) -> Tensor:
        """The part itself, a contiguous view."""
        return self.whole()[self.rows]


Rest = Callable[[Tensor, Tensor], Tensor]
"""The rest of a layer for one token. Takes x [1, hidden] and the output of attention [1, heads *
D], and adds to x in place what follows in the layer. Returns the next layer's queries, keys and
values [1, (heads + 2 * kv_heads) * D], not rotated; for the last layer, x after the final norm [1,
hidden]."""

AllLayers = Callable[[Tensor, Tensor | None, Tensor, Tensor, object], Tensor]
"""All layers for one token. Takes x [1, hidden], the first layer's queries, keys and values [1,
(heads + 2 * kv_heads) * D], not rotated, or None if it was made with a `First`, cos and sin, and
the arena in the kernel's form (`Attend.step_arena`). Returns x after the final norm [1, hidden],
and overwrites x."""

First = Callable[[Tensor], Tensor]
"""Takes x [1, hidden] of one token, and returns the first layer's queries, keys and values [1,
(heads + 2 * kv_heads) * D], not rotated."""


class Ops(Protocol):
    """Kernels for a network: operations between matrix products, in one launch each, and products
    of few rows."""

    @property
    def products(self) -> bool:
        """Whether its products are faster than torch's."""
        ...

    @property
    def integer_prompts(self) -> bool:
        """Whether `int8_product` and `int4_product` are also faster for many rows."""
        ...

    @property
    def float_rows(self) -> int | None:
        """From how many bfloat16 rows on a product is faster in float32; None: never, as far as is
        known."""
        ...

    @property
    def prompt_rows(self) -> int | None:
        """The best chunk of a prompt in bfloat16, in rows; None: not known."""
        ...

    @property
    def unpack_int4(self) -> UnpackInt4 | None:
        """See `linear.UnpackInt4`. None: torch unpacks."""
        ...

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [t, hidden], after y [t, hidden] was added to it in place."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As `rope.rotate`."""
        ...

    def rotary_table(
        self, position: Tensor, inverse: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As `Rotary.table`, for one position int64 [] on the device."""
        ...

    def silu_mul(self, both: Tensor) -> Tensor:
        """silu(gate) * up, [t, mlp], of both [t, 2 * mlp], gate first. The result may be a view of
        both."""
        ...

    @property
    def rest(self) -> Callable[..., Rest | None] | None:
        """A function that makes a `Rest` from a layer's matrices (kernels/layer/rest_cpu.py and
        rest_gpu.py); it returns None for matrices that it does not support. None: there is none."""
        ...

    @property
    def layers(self) -> Callable[..., AllLayers | None] | None:
        """A function that makes an `AllLayers` from the `Rest` of each layer and a `First` or None
        (kernels/layer/layers_cpu.py), or returns None. None: there is none."""
        ...

    @property
    def normed_product(self) -> Callable[..., First | None] | None:
        """A function that makes a `First` from a matrix, a norm's weights and epsilon, or returns
        None. None: there is none."""
        ...

    @property
    def rows_product(self) -> Callable[..., RowsProduct | None] | None:
        """A function that makes a `RowsProduct` from a packed matrix
        (kernels/product/tiles_cpu.py), or returns None. None: there is none."""
        ...

    @property
    def int8_product(self) -> Int8Product | None:
        """See `linear.Int8Product`. None: torch multiplies."""
        ...

    @property
    def int4_product(self) -> Int4Product | None:
        """See `linear.Int4Product`. None: torch multiplies."""
        ...

    @property
    def w8a16_product(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """See `linear_gpu.Products`."""
        ...

    @property
    def w4a16_product(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """See `linear_gpu.Products`."""
        ...

    @property
    def unpack_int4_rows(self) -> Callable[[Tensor, Tensor, Tensor], None] | None:
        """See `linear_gpu.Products`."""
        ...

    def row_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `linear.RowProduct`."""
        ...


class Llama:
    """A decoder. It takes token ids and an `Attend`, returns logits, and keeps no state of a
    conversation.

    A new network has uninitialised weights, in memory from `room`; fill them through `tensors()` or
    `randomise()`. rows: how many rows go through a layer together. With gradients enabled, nothing
    is written in place and a forward is one chunk, so the same code can be trained. ops: kernels of
    the device that replace torch's operators, except with gradients; None by default, see `use`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rows: int | None = None,
        room: Empty | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self._given = rows
        self.rows = self._chunk(None)

        room = room or Pages(self.device).empty

        def new(*shape: int) -> Tensor:
            return room(shape, dtype)

        def matrix(rows: int, columns: int, bias: bool) -> Linear:
            return Plain(new(rows, columns), new(rows) if bias else None)

        c = config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.embedding: Tensor | Int8 | Int8OnGpu = new(c.vocab, c.hidden)
        self.layers = [
            Layer(
                attention_norm=new(c.hidden),
                qkv=matrix(q + 2 * kv, c.hidden, c.qkv_bias),
                out=matrix(c.hidden, q, c.o_bias),
                mlp_norm=new(c.hidden),
                gate_up=matrix(2 * c.mlp, c.hidden, c.mlp_bias),
                down=matrix(c.hidden, c.mlp, c.mlp_bias),
            )
            for _ in range(c.layers)
        ]
        self.norm = new(c.hidden)
        self.head: Linear = Plain(self.embedding if c.tied else new(c.vocab, c.hidden))
        self.rotary = Rotary(c.rope, c.head_dim, self.device)
        self.ops: Ops | None = None
        self._rests: list[Rest] = []  # one for each layer, or empty
        self._layers: AllLayers | None = None  # in place of attention and `Rest` of each layer
        self._first: First | None = None  # used before the first of them; None: `_qkv`
        self._scratch = Scratch()

    def use(self, ops: Ops | None) -> None:
        """Use the kernels `ops` from now on; None: torch. Call this again when a matrix or a norm
        is replaced, because kernels may keep references to the present ones."""
        self.ops = ops
        self.rows = self._chunk(None if ops is None else ops.prompt_rows)
        own = ops if ops is not None and ops.products else None
        inside = ((layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self.layers)
        for matrix in (self.head, *chain.from_iterable(inside)):
            if isinstance(matrix, Int8):
                matrix.product = own.int8_product if own else None
                matrix.many = own is not None and own.integer_prompts
                matrix.rows_product = _rows_product(own, matrix)
            elif isinstance(matrix, Plain):
                matrix.product = own.row_product if own else row_product
                matrix.float_rows = None if ops is None else ops.float_rows
            elif isinstance(matrix, Int4):
                matrix.product = own.int4_product if own else None
                matrix.many = own is not None and own.integer_prompts
                matrix.rows_product = _rows_product(own, matrix)
                matrix.unpack = None if ops is None else ops.unpack_int4
            elif isinstance(matrix, Int8OnGpu | Int4OnGpu):
                matrix.ops = ops
            if isinstance(matrix, Plain | Int8 | Int4):
                matrix.scratch = self._scratch
        self._rests = [] if own is None else self._all_rests(own)
        self._layers = self._first = None
        if own is not None and own.normed_product is not None and self._rests:
            layer = self.layers[0]
            qkv, eps = as_read(layer.qkv), self.config.norm_eps
            self._first = own.normed_product(qkv, layer.attention_norm, eps)
        if self._rests and own is not None and own.layers is not None:
            self._layers = own.layers(self._rests, self._first)

    def _chunk(self, asked: int | None) -> int:
        """The `rows` that were given to the constructor, else `chunk_rows`."""
        cuda = self.device.type == "cuda"
        return self._given or chunk_rows(cuda, self.dtype.itemsize, asked)

    def _all_rests(self, ops: Ops) -> list[Rest]:
        """A `Rest` for each layer; empty if `ops` has none for some layer."""
        found: list[Rest] = []
        for layer, after in zip(self.layers, [*self.layers[1:], None], strict=True):
            parts = [as_read(m) for m in (layer.out, layer.gate_up, layer.down)]
            following = None if after is None else as_read(after.qkv)
            if ops.rest is None or None in parts or (after is not None and following is None):
                return []
            norms = layer.mlp_norm, self.norm if after is None else after.attention_norm
            made = ops.rest(*parts, following, *norms, self.config.norm_eps)
            if made is None:
                return []
            found.append(made)
        return found

    def keep_head(self, made: Int8 | Int8OnGpu) -> None:
        """Use `made` as lm_head from now on, and also as the embedding if it is tied."""
        assert made.shape == (self.config.vocab, self.config.hidden)
        self.head = made
        if self.config.tied:
            self.embedding = made

    def places(self) -> Iterator[tuple[str, Place]]:
        """Where each tensor of a Hugging Face checkpoint belongs, by name. A tied lm_head is not
        listed. Only for a network whose matrices are plain.
        """
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        whole = slice(None)
        queries, keys, values = slice(0, q), slice(q, q + kv), slice(q + kv, None)
        gate, up = slice(0, c.mlp), slice(c.mlp, None)
        yield "model.embed_tokens.weight", Place(self, "embedding", "", whole)
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            yield at + "input_layernorm.weight", Place(layer, "attention_norm", "", whole)
            for kind in _kinds(layer.qkv):
                yield f"{at}self_attn.q_proj.{kind}", Place(layer, "qkv", kind, queries)
                yield f"{at}self_attn.k_proj.{kind}", Place(layer, "qkv", kind, keys)
                yield f"{at}self_attn.v_proj.{kind}", Place(layer, "qkv", kind, values)
            for kind in _kinds(layer.out):
                yield f"{at}self_attn.o_proj.{kind}", Place(layer, "out", kind, whole)
            yield at + "post_attention_layernorm.weight", Place(layer, "mlp_norm", "", whole)
            for kind in _kinds(layer.gate_up):
                yield f"{at}mlp.gate_proj.{kind}", Place(layer, "gate_up", kind, gate)
                yield f"{at}mlp.up_proj.{kind}", Place(layer, "gate_up", kind, up)
            for kind in _kinds(layer.down):
                yield f"{at}mlp.down_proj.{kind}", Place(layer, "down", kind, whole)
        yield "model.norm.weight", Place(self, "norm", "", whole)
        if not c.tied:
            yield "lm_head.weight", Place(self, "head", "weight", whole)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its name in a Hugging Face checkpoint, as a contiguous view, e.g. for
        saving. See `places`."""
        yield from ((name, place.tensor()) for name, place in self.places())

    def parameters(self) -> Iterator[Tensor]:
        """The tensors as they are stored, fused, each once: for an optimiser."""
        seen: set[tuple[int, str, str]] = set()
        for _, place in self.places():
            part = (id(place.owner), place.slot, place.kind)
            if part not in seen:
                seen.add(part)
                yield place.whole()

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device."""
        parts = [getattr(layer, name) for layer in self.layers for name in Layer.__slots__]
        if not self.config.tied:
            parts.append(self.head)
        return sum(part.nbytes for part in (self.embedding, self.norm, *parts))

    @torch.no_grad()
    def randomise(self, seed: int = 0, std: float = 0.02) -> Llama:
        """Fill the weights with seeded normal numbers, and the norms with one. For tests,
        benchmarks and training."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, tensor in self.tensors():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, std, generator=generator)
        return self

    @torch.inference_mode()
    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """Feed ids int64 [T], T >= 1. Returns the logits of the last token, float32 [V]."""
        return self.logits(self._stream(ids, kv, last=True))[0]

    def hidden(self, ids: Tensor, kv: Attend) -> Tensor:
        """Feed ids int64 [T]. Returns the state of every token after the final norm, [T,
        hidden]."""
        return self._stream(ids, kv, last=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """States [t, hidden] after the final norm -> logits, float32 [t, V]."""
        return self.head(hidden).float()

    def _stream(self, ids: Tensor, kv: Attend, *, last: bool) -> Tensor:
        """Run all layers and the final norm: [T, hidden]; with `last`, only the last token's row
        [1, hidden]."""
        count = ids.shape[0]
        assert count > 0, "a forward needs at least one token"
        grad = torch.is_grad_enabled()
        rows = count if grad else self.rows
        starts = range(0, count, rows)
        tables = [  # the same for all layers
            self._table(kv.position + lo if lo else kv.position, min(rows, count - lo))
            for lo in starts
        ]
        x = self._embed(ids.to(self.device))
        # One buffer for the widest intermediate. Allocated anew for each chunk, it would leave
        # holes in the heap, which count as resident memory.
        wide = None if grad else x.new_empty(min(rows, count), 2 * self.config.mlp)
        addend: Tensor | None = None  # in a step: what the next norm has to add to x
        watched = getattr(kv, "watch", None) is not None  # `watch` needs every layer's input
        rests = self._rests if last and count == 1 and not grad and not watched else []
        step_arena = getattr(kv, "step_arena", None) if rests and self._layers else None
        arena = None if step_arena is None else step_arena()
        if self._layers is not None and arena is not None:
            given = self._qkv(self.layers[0], x, None, kv) if self._first is None else None
            x = self._layers(x, given, *tables[0], arena)
            kv.advance(count)
            return x
        # In a step: the next layer's queries, keys and values, from `First` or `Rest`.
        ready = self._first(x) if rests and self._first is not None else None
        for index, layer in enumerate(self.layers):
            closing = last and index == len(self.layers) - 1
            for start, (cos, sin) in zip(starts, tables, strict=True):
                part = x[start : start + rows]
                qkv = self._qkv(layer, part, addend, kv) if ready is None else ready
                mixed = self._attend(index, qkv, cos, sin, kv)
                addend = None
                if rests:
                    ready = rests[index](part, mixed)
                    continue
                if closing:  # keys of all rows are needed, but output of only one
                    if start + rows < count:
                        continue
                    mixed, part = mixed[-1:], part[-1:]
                if self.ops is not None and wide is not None:
                    addend = self._fused(self.ops, layer, part, mixed, wide)
                    if count > 1:
                        part, addend = part.add_(addend), None
                else:
                    part = _add(part, mixed, layer.out, grad)
                    part = self._mlp(layer, part, wide)
                if grad or closing:
                    x = part
        kv.advance(count)
        if ready is not None:
            return ready
        if grad or last:
            return self._norm(x, addend, self.norm)
        for start in starts:
            part = x[start : start + rows]
            part.copy_(self._norm(part, addend, self.norm))
        return x

    def _table(self, start: int | Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Rotary.table`."""
        rotary, ops = self.rotary, None if torch.is_grad_enabled() else self.ops
        if ops is not None and isinstance(start, Tensor):
            return ops.rotary_table(start, rotary.inverse, rotary.scale, self.dtype)
        return rotary.table(start, count, self.dtype)

    def _norm(self, x: Tensor, y: Tensor | None, weight: Tensor) -> Tensor:
        """RMSNorm of x [t, hidden], after y (None: nothing) was added to x in place."""
        if torch.is_grad_enabled() or self.ops is None:
            assert y is None
            return _norm(x, weight, self.config.norm_eps)
        return self.ops.add_norm(x, y, weight, self.config.norm_eps)

    def _embed(self, ids: Tensor) -> Tensor:
        """Token ids [T] -> rows [T, hidden]."""
        if isinstance(self.embedding, Int8 | Int8OnGpu):
            return self.embedding.rows(ids)
        return F.embedding(ids, self.embedding)

    def _qkv(self, layer: Layer, x: Tensor, addend: Tensor | None, kv: Attend) -> Tensor:
        """Rows x [t, hidden], to which `addend` is added in place -> queries, keys and values
        [t, (heads + 2 * kv_heads) * D], not rotated."""
        normed = self._norm(x, addend, layer.attention_norm)
        watch = getattr(kv, "watch", None)
        if watch is not None:
            watch(normed)
        return layer.qkv(normed)

    def _attend(self, index: int, qkv: Tensor, cos: Tensor, sin: Tensor, kv: Attend) -> Tensor:
        """Queries, keys and values of t rows -> mixed values [t, heads * D]."""
        c, rows = self.config, len(qkv)
        ops = None if torch.is_grad_enabled() else self.ops
        qkv = qkv.view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        unrotated = getattr(kv, "attend_unrotated", None)
        if ops is not None and unrotated is not None:
            mixed: Tensor = unrotated(index, qkv[0], cos, sin)
        else:
            turning = c.heads + c.kv_heads
            qk = (rotate if ops is None else ops.rotate)(qkv[:, :turning], cos, sin)
            mixed = kv.attend(index, qk[:, : c.heads], qk[:, c.heads :], qkv[:, turning:])
        return mixed.reshape(rows, c.heads * c.head_dim)

    def _fused(self, ops: Ops, layer: Layer, x: Tensor, mixed: Tensor, wide: Tensor) -> Tensor:
        """With the kernels `ops`: add the projected output of attention to x in place; return what
        the MLP adds to x, [t, hidden]."""
        normed = ops.add_norm(x, layer.out(mixed), layer.mlp_norm, self.config.norm_eps)
        return layer.down(ops.silu_mul(layer.gate_up(normed, wide)))

    def _mlp(self, layer: Layer, x: Tensor, wide: Tensor | None) -> Tensor:
        """x + down(silu(gate) * up) of the normed rows x [t, hidden].

        Writes to x and to the buffer `wide` [>= t, 2 * mlp]. If `wide` is None (for gradients), it
        writes nothing in place.
        """
        width = self.config.mlp
        normed = _norm(x, layer.mlp_norm, self.config.norm_eps)
        both = layer.gate_up(normed, wide)
        if wide is None:
            mixed = F.silu(both[:, :width]) * both[:, width:]
        else:
            mixed = F.silu(both[:, :width], inplace=True).mul_(both[:, width:])
        return _add(x, mixed, layer.down, wide is None)


def _rows_product(ops: Ops | None, matrix: Int8 | Int4) -> RowsProduct | None:
    """The kernel that multiplies many rows by this packed matrix; None if there is none."""
    read = as_read(matrix)
    if ops is None or ops.rows_product is None or read is None:
        return None
    return ops.rows_product(read)


def _kinds(matrix: Linear) -> Iterator[str]:
    """ "weight", and "bias" if the matrix has one."""
    assert isinstance(matrix, Plain), "packed weights cannot be had one by one"
    yield "weight"
    if matrix.bias is not None:
        yield "bias"


def _add(x: Tensor, y: Tensor, matrix: Linear, grad: bool) -> Tensor:
    """x + matrix(y), written to x in place unless `grad`."""
    return x + matrix(y) if grad else x.add_(matrix(y))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, converted back before it is multiplied by the weight (in bfloat16 the
    order matters)."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.shape[0] == 1 and x.is_cpu and not torch.is_grad_enabled():
        # In a decode step: five small operators instead of ten.
        row = x[0].float()
        mean = torch.dot(row, row).item() / row.numel()
        return torch.mul(x, 1 / math.sqrt(mean + eps)).mul_(weight)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight

"""The network of Llama, Mistral, Qwen2 and related models. It does not know how keys and values are
stored.

It computes layer by layer: all tokens go through layer i, in chunks of `rows` rows, before any
token enters layer i + 1. The residual stream [T, hidden] is the only tensor of full length; keys
and values go to `kv.attend`. Matrices with the same input are stored as one (q, k, v; gate, up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.kernels.dispatch import Kernels
from minikv.models.config import ModelConfig
from minikv.models.linear import Int4, Int8, Linear, Plain, as_stored
from minikv.models.rope import Rotation
from minikv.pages import Empty, Pages

# On a CPU a chunk is limited in bytes: 512 rows of float32, 1,024 of bfloat16 (from 768 rows on,
# torch's attention uses blocks of 256 queries instead of 64, which is faster).
CPU_BYTES, CUDA_ROWS = 2048, 2048


def chunk_rows(cuda: bool, itemsize: int, asked: int | None) -> int:
    """How many tokens of a prompt go through a layer together. itemsize: bytes per number. asked:
    `Kernels.prompt_rows`, which applies to numbers of two bytes."""
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
    q_norm: Tensor | None = None  # [D] or [heads * D], see `ModelConfig.qk_norm`
    k_norm: Tensor | None = None


At = tuple[Sequence[tuple[Tensor, Tensor]], float | Tensor | None]
"""The tables for a chunk's positions: cosine and sine for each of `Rotation.kinds`, as
`Rotary.table` returns them; and the factor on queries."""
LayerTail = Callable[[Tensor, Tensor], Tensor]
"""The part of a layer after attention, for one token. Takes x [1, hidden] and the output of
attention [1, heads * D], and adds the rest of the layer to x in place. Returns the next layer's
queries, keys and values [1, (heads + 2 * kv_heads) * D], not rotated; for the last layer, x after
the final norm [1, hidden]."""


class Llama:
    """A decoder. It takes token ids and an `Attend`, returns logits, and stores nothing about a
    conversation.

    A new network has uninitialised weights, in memory from `room`; `minikv.models.tensors` names
    them. rows: how many rows go through a layer together. ops: the kernels, torch's until `use` is
    called. The forward pass writes in place, so the network cannot be trained.
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
        qkv, out, gate_up, down = c.matrices.values()
        normed = c.qk_sizes if c.qk_norm else ()
        self.embedding: Tensor | Int8 = new(c.vocab, c.hidden)
        self.layers = [
            Layer(
                *(new(c.hidden), matrix(*qkv), matrix(*out)),
                *(new(c.hidden), matrix(*gate_up), matrix(*down)),
                *map(new, normed),
            )
            for _ in range(c.layers)
        ]
        self.norm = new(c.hidden)
        self.head: Linear = Plain(self.embedding if c.tied else new(c.vocab, c.hidden))
        self.rotation = Rotation(c.ropes, c.head_dim, self.device, c.query_scale)
        self.ops = Kernels()
        self._tails: list[LayerTail] = []  # one for each layer, or empty
        self._first: Callable[[Tensor], Tensor] | None = None  # x -> the first layer's `_qkv`
        self._layers: Callable[..., Tensor] | None = None  # attention and tail of all layers

    def use(self, ops: Kernels | None) -> None:
        """Use the kernels `ops` from now on; None: torch. Call this again when a matrix or a norm
        is replaced, because kernels may keep references to the present ones."""
        self.ops = ops = ops or Kernels()
        self.rows = self._chunk(ops.prompt_rows)
        inside = ((layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self.layers)
        for matrix in (self.head, *chain.from_iterable(inside)):
            matrix.use(ops, self.dtype)
        self._tails = self._all_tails(ops)
        self._layers = self._first = None
        if self._tails and ops.normed_product is not None:
            layer = self.layers[0]
            qkv, eps = as_stored(layer.qkv), self.config.norm_eps
            self._first = ops.normed_product(qkv, layer.attention_norm, eps)
        if self._tails and self.config.qk_norm != "all" and ops.layers is not None:
            norms = [(layer.q_norm, layer.k_norm) for layer in self.layers]
            self._layers = ops.layers(self._tails, norms, self.rotation.kind)

    def _chunk(self, asked: int | None) -> int:
        """The constructor's `rows` if given, otherwise `chunk_rows`."""
        cuda = self.device.type == "cuda"
        return self._given or chunk_rows(cuda, self.dtype.itemsize, asked)

    def _all_tails(self, ops: Kernels) -> list[LayerTail]:
        """A `LayerTail` for each layer; empty if `ops` has none for some layer, or if the family's
        layers add scaled or normed outputs to x."""
        found: list[LayerTail] = []
        c, layer_tail = self.config, ops.layer_tail if ops.products else None
        if layer_tail is None or c.norm_after or c.residual_scale != 1.0:
            return found
        for layer, after in zip(self.layers, [*self.layers[1:], None], strict=True):
            parts = [as_stored(m) for m in (layer.out, layer.gate_up, layer.down)]
            following = None if after is None else as_stored(after.qkv)
            known = None not in parts and (after is None or following is not None)
            norms = layer.mlp_norm, self.norm if after is None else after.attention_norm
            made = layer_tail(*parts, following, *norms, c.norm_eps) if known else None
            if made is None:
                return []
            found.append(made)
        return found

    def keep_packed(self, slot: str, made: Int8 | Int4) -> None:
        """Use `made` as "head" or "embedding" from now on; as both if they are tied."""
        assert made.shape == (self.config.vocab, self.config.hidden)
        if slot == "head" or self.config.tied:
            self.head = made
        if slot == "embedding" or self.config.tied:
            assert isinstance(made, Int8)
            self.embedding = made

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device."""
        parts = [getattr(layer, name) for layer in self.layers for name in Layer.__slots__]
        if not self.config.tied:
            parts.append(self.head)
        parts += self.embedding, self.norm
        return sum(part.nbytes for part in parts if part is not None)

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
        found = self.head(hidden).float()
        return found if self.config.logits_scale == 1.0 else found.div_(self.config.logits_scale)

    def _stream(self, ids: Tensor, kv: Attend, *, last: bool) -> Tensor:
        """Run all layers and the final norm: [T, hidden]; with `last`, only the last token's row
        [1, hidden]."""
        count = ids.shape[0]
        assert count > 0, "a forward needs at least one token"
        x = self._embed(ids.to(self.device))
        step = self.fast_step(x, kv) if last and count == 1 else None
        if step is not None:
            kv.advance(count)
            return step
        starts = range(0, count, self.rows)
        chunks = [  # the same for all layers
            self._at(kv.position + lo if lo else kv.position, min(self.rows, count - lo))
            for lo in starts
        ]
        # One buffer for the widest intermediate. Allocated for each chunk, it would leave holes in
        # the heap, which count as resident memory.
        wide = x.new_empty(min(self.rows, count), 2 * self.config.mlp)
        for index in range(len(self.layers)):
            closing = last and index == len(self.layers) - 1
            x = self._layer(index, x, kv, chunks, wide, closing)
        kv.advance(count)
        if last:
            return self._norm(x, self.norm)
        for start in starts:
            part = x[start : start + self.rows]
            part.copy_(self._norm(part, self.norm))
        return x

    def _layer(
        self,
        index: int,
        x: Tensor,
        kv: Attend,
        chunks: list[At],
        wide: Tensor,
        closing: bool,
    ) -> Tensor:
        """Rows x [T, hidden] -> the input of the next layer, in place, chunk by chunk. closing:
        return only the last row, [1, hidden]; keys and values of all rows are still computed.

        chunks: the positions of each chunk. wide [>= t, 2 * mlp]: memory to write to."""
        layer = self.layers[index]
        for number, at in enumerate(chunks):
            part = x[number * self.rows : (number + 1) * self.rows]
            mixed = self._attend(index, self._qkv(layer, part, kv), at, kv)
            if closing:
                if number < len(chunks) - 1:
                    continue
                mixed, part = mixed[-1:], part[-1:]
            self._mlp(layer, part, layer.out(mixed), wide)
            del mixed  # before the next chunk's rows are made
        return part if closing else x

    def _mlp(self, layer: Layer, x: Tensor, mixed: Tensor, wide: Tensor) -> None:
        """Add to the rows x [t, hidden], in place, `mixed` and then the MLP of the normed rows."""
        c, eps, scale = self.config, self.config.norm_eps, self.config.residual_scale
        if c.norm_after:
            normed = x.add_(self._norm(mixed, layer.attention_norm))
        else:
            mixed = mixed if scale == 1.0 else mixed.mul_(scale)
            normed = self.ops.add_norm(x, mixed, layer.mlp_norm, eps)
        made = layer.down(self.ops.silu_mul(layer.gate_up(normed, wide)))
        x.add_(self._norm(made, layer.mlp_norm) if c.norm_after else made, alpha=scale)

    def fast_step(self, x: Tensor, kv: Attend) -> Tensor | None:
        """All layers for the row x [1, hidden] of one token, by kernels that compute the part after
        attention in one call, or all layers in one. Returns x after the final norm [1, hidden], and
        overwrites x. Returns None, without any effect, if there are no such kernels or `kv`
        has an `on_layer_input`."""
        if not self._tails or getattr(kv, "on_layer_input", None) is not None:
            return None
        at = self._at(kv.position, 1)
        step_arena = getattr(kv, "step_arena", None) if self._layers is not None else None
        arena = None if step_arena is None else step_arena()
        qkv = self._qkv(self.layers[0], x, kv) if self._first is None else self._first(x)
        if self._layers is not None and arena is not None:
            cos, sin = map(torch.cat, zip(*at[0], strict=True))
            return self._layers(x, qkv, cos, sin, 1.0 if at[1] is None else float(at[1]), arena)
        for index, tail in enumerate(self._tails):
            qkv = tail(x, self._attend(index, qkv, at, kv))
        return qkv

    def _at(self, start: int | Tensor, count: int) -> At:
        """The tables for `count` positions from `start` on. start: a number, or an int64 [] tensor
        on the device, which is not read back; then count must be 1."""
        angles = [
            self.ops.rotary_table(start, one.inverse, one.scale, self.dtype)
            if isinstance(start, Tensor)
            else one.table(start, count, self.dtype)
            for one in self.rotation.kinds
        ]
        return angles, self.rotation.query_scale(start, count)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of x [t, hidden]."""
        return self.ops.add_norm(x, None, weight, self.config.norm_eps)

    def _embed(self, ids: Tensor) -> Tensor:
        """Token ids [T] -> rows [T, hidden]."""
        if isinstance(self.embedding, Int8):
            x = self.embedding.rows(ids)
        else:
            x = F.embedding(ids, self.embedding)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x.mul_(scale)

    def _qkv(self, layer: Layer, x: Tensor, kv: Attend) -> Tensor:
        """Rows x [t, hidden] -> queries, keys and values [t, (heads + 2 * kv_heads) * D], not
        rotated."""
        normed = x if self.config.norm_after else self._norm(x, layer.attention_norm)
        on_layer_input = getattr(kv, "on_layer_input", None)
        if on_layer_input is not None:
            on_layer_input(normed)
        return layer.qkv(normed)

    def _attend(self, index: int, qkv: Tensor, at: At, kv: Attend) -> Tensor:
        """Queries, keys and values of t rows, which are overwritten -> mixed values [t, heads *
        D]."""
        c, rows = self.config, len(qkv)
        (angles, scale), layer, q = at, self.layers[index], c.heads * c.head_dim
        if layer.q_norm is not None and layer.k_norm is not None:
            for norm, part in (
                (layer.q_norm, qkv[:, :q]),
                (layer.k_norm, qkv[:, q : q + c.kv_heads * c.head_dim]),
            ):
                normed = self._norm(part.reshape(-1, len(norm)).contiguous(), norm)
                part.copy_(normed.view(part.shape))
        if scale is not None:
            qkv[:, :q].mul_(scale)
        cos, sin = angles[self.rotation.kind[index]]
        qkv = qkv.view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        unrotated = getattr(kv, "attend_unrotated", None)
        if unrotated is not None:
            mixed: Tensor = unrotated(index, qkv[0], cos, sin)
        else:
            turning = c.heads + c.kv_heads
            qk = self.ops.rotate(qkv[:, :turning], cos, sin)
            mixed = kv.attend(index, qk[:, : c.heads], qk[:, c.heads :], qkv[:, turning:])
        return mixed.reshape(rows, c.heads * c.head_dim)

"""The one network: Llama, Mistral, Qwen2 and their relatives, without a line about memory.

Layer-major: every row goes through layer i before any row enters layer i + 1, in chunks of `rows`
rows. The residual stream [T, hidden] is the only tensor of full length; keys and values belong to
`kv.attend`. Matrices that read the same input are stored as one (q, k, v; gate, up).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.attend import Attend
from minikv.models.config import ModelConfig
from minikv.models.rope import Rotary, rotate

# On a CPU a chunk is bounded in bytes: 512 rows of float32, 1,024 of bfloat16 (from 768 rows on,
# torch's attention there takes queries in blocks of 256 instead of 64, and reads faster).
CPU_BYTES, CUDA_ROWS = 2048, 2048


@dataclass(slots=True)
class Layer:
    """The weights of one layer; every matrix is [out, in]."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * D, hidden]
    qkv_bias: Tensor | None
    out: Tensor  # [hidden, heads * D]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * mlp, hidden], gate first
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, mlp]
    down_bias: Tensor | None


class Llama:
    """A decoder. Token ids and an `Attend` in, logits out; it keeps no state of its own.

    Born with uninitialised weights: fill them through `tensors()` or `randomise()`. `rows` is the
    chunk of rows inside a layer. With gradients enabled nothing is written in place and a forward
    is one chunk, so that the same code trains.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rows: int | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.rows = rows or (
            CUDA_ROWS if self.device.type == "cuda" else CPU_BYTES // dtype.itemsize
        )

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=self.device, dtype=dtype)

        c = config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.embedding = new(c.vocab, c.hidden)
        self.layers = [
            Layer(
                attention_norm=new(c.hidden),
                qkv=new(q + 2 * kv, c.hidden),
                qkv_bias=new(q + 2 * kv) if c.qkv_bias else None,
                out=new(c.hidden, q),
                out_bias=new(c.hidden) if c.o_bias else None,
                mlp_norm=new(c.hidden),
                gate_up=new(2 * c.mlp, c.hidden),
                gate_up_bias=new(2 * c.mlp) if c.mlp_bias else None,
                down=new(c.hidden, c.mlp),
                down_bias=new(c.hidden) if c.mlp_bias else None,
            )
            for _ in range(c.layers)
        ]
        self.norm = new(c.hidden)
        self.head = self.embedding if c.tied else new(c.vocab, c.hidden)
        self.rotary = Rotary(c.rope, c.head_dim, self.device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name in a Hugging Face checkpoint, as a contiguous view.

        The loader fills these, an exporter saves them. A tied head is not listed twice.
        """
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        yield "model.embed_tokens.weight", self.embedding
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            yield at + "input_layernorm.weight", layer.attention_norm
            for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
                if fused is not None:
                    yield f"{at}self_attn.q_proj.{kind}", fused[:q]
                    yield f"{at}self_attn.k_proj.{kind}", fused[q : q + kv]
                    yield f"{at}self_attn.v_proj.{kind}", fused[q + kv :]
            yield at + "self_attn.o_proj.weight", layer.out
            if layer.out_bias is not None:
                yield at + "self_attn.o_proj.bias", layer.out_bias
            yield at + "post_attention_layernorm.weight", layer.mlp_norm
            for kind, fused in (("weight", layer.gate_up), ("bias", layer.gate_up_bias)):
                if fused is not None:
                    yield f"{at}mlp.gate_proj.{kind}", fused[: c.mlp]
                    yield f"{at}mlp.up_proj.{kind}", fused[c.mlp :]
            yield at + "mlp.down_proj.weight", layer.down
            if layer.down_bias is not None:
                yield at + "mlp.down_proj.bias", layer.down_bias
        yield "model.norm.weight", self.norm
        if self.head is not self.embedding:
            yield "lm_head.weight", self.head

    def parameters(self) -> Iterator[Tensor]:
        """The tensors themselves, fused as they are stored: what an optimiser wants."""
        yield self.embedding
        for layer in self.layers:
            for name in Layer.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    yield tensor
        yield self.norm
        if self.head is not self.embedding:
            yield self.head

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device."""
        return sum(t.numel() * t.element_size() for t in self.parameters())

    @torch.no_grad()
    def randomise(self, seed: int = 0, std: float = 0.02) -> Llama:
        """Fill with normal numbers (norms: one), for tests, benchmarks and training. Seeded."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, tensor in self.tensors():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, std, generator=generator)
        return self

    @torch.inference_mode()
    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """Feed ids [T] (int64, T >= 1); logits of the last one, [V] float32."""
        return self.logits(self._stream(ids, kv, last=True)[0])

    def hidden(self, ids: Tensor, kv: Attend) -> Tensor:
        """Feed ids [T]; the state of every token after the final norm, [T, hidden]."""
        return self._stream(ids, kv, last=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] after the final norm -> [..., V] float32."""
        return F.linear(hidden, self.head).float()

    def _stream(self, ids: Tensor, kv: Attend, *, last: bool) -> Tensor:
        """All layers and the final norm; with `last` only the last token's row comes out."""
        count = ids.shape[0]
        assert count > 0, "a forward needs at least one token"
        grad = torch.is_grad_enabled()
        rows = count if grad else self.rows
        starts = range(0, count, rows)
        table = None
        if len(starts) == 1:  # one table serves all layers; otherwise one per chunk, to save memory
            table = self.rotary.table(kv.position, count, self.dtype)
        x = F.embedding(ids.to(self.device), self.embedding)
        # One buffer for the widest intermediate: freed and asked for again per chunk, it would
        # leave holes in the heap that count as resident memory.
        wide = None if grad else x.new_empty(min(rows, count), 2 * self.config.mlp)
        for index, layer in enumerate(self.layers):
            closing = last and index == len(self.layers) - 1
            for start in starts:
                part = x[start : start + rows]
                cos, sin = table or self.rotary.table(
                    kv.position + start, part.shape[0], self.dtype
                )
                mixed = self._attend(index, layer, part, cos, sin, kv)
                if closing:  # the keys of every row are needed, the output of one
                    if start + rows < count:
                        continue
                    mixed, part = mixed[-1:], part[-1:]
                part = _add(part, mixed, layer.out, layer.out_bias, grad)
                part = self._mlp(layer, part, wide)
                if grad or closing:
                    x = part
        kv.advance(count)
        if grad or last:
            return _norm(x, self.norm, self.config.norm_eps)
        for start in starts:
            part = x[start : start + rows]
            part.copy_(_norm(part, self.norm, self.config.norm_eps))
        return x

    def _attend(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, kv: Attend
    ) -> Tensor:
        """Rows x [t, hidden] -> mixed values [t, heads * D]."""
        c = self.config
        qkv = F.linear(_norm(x, layer.attention_norm, c.norm_eps), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(x.shape[0], c.heads + 2 * c.kv_heads, c.head_dim)
        turning = c.heads + c.kv_heads
        qk = rotate(qkv[:, :turning], cos, sin)
        mixed = kv.attend(index, qk[:, : c.heads], qk[:, c.heads :], qkv[:, turning:])
        return mixed.reshape(x.shape[0], c.heads * c.head_dim)

    def _mlp(self, layer: Layer, x: Tensor, wide: Tensor | None) -> Tensor:
        """x + down(silu(gate) * up) of the normed rows x [t, hidden].

        In place, over the buffer `wide` [>= t, 2 * mlp]; None (for gradients) writes nothing.
        """
        width = self.config.mlp
        normed = _norm(x, layer.mlp_norm, self.config.norm_eps)
        if wide is None:
            both = F.linear(normed, layer.gate_up, layer.gate_up_bias)
            mixed = F.silu(both[:, :width]) * both[:, width:]
        else:
            both = torch.mm(normed, layer.gate_up.t(), out=wide[: x.shape[0]])
            if layer.gate_up_bias is not None:
                both += layer.gate_up_bias
            mixed = F.silu(both[:, :width], inplace=True).mul_(both[:, width:])
        return _add(x, mixed, layer.down, layer.down_bias, wide is None)


def _add(x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None, grad: bool) -> Tensor:
    """x + y @ matrix.T + bias; into x itself unless `grad`."""
    if grad:
        return x + F.linear(y, matrix, bias)
    return x.add_(F.linear(y, matrix, bias))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, cast back before the weight is applied (the order matters in bf16)."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight

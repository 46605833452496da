"""Quantised matrices as other programs write them, and their values, worked by hand.

compressed-tensors is written by its own library. The others follow the published formulas, number
by number: AutoAWQ's and AutoGPTQ's packing loops, DeepSeek's blocks of FP8, bitsandbytes' tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by the ends of their names, and the matrix float32 [out, in]."""


@dataclass(frozen=True)
class Form:
    """A form of quantised weights: its quantization_config, how a matrix is written, and how the
    loader is to hold it ("int4", "int8" or "plain")."""

    config: Mapping[str, Any]
    write: Callable[[int, int, torch.Generator], Made]
    held: str
    name: str


def _packed(codes: Tensor, bits: int, order: range | tuple[int, ...] = ()) -> Tensor:
    """int32 words [n, columns / per] of codes [n, columns], as the loops of AutoGPTQ and AutoAWQ
    do it. order: the column of each place in a word."""
    per = 32 // bits
    order = order or range(per)
    words = torch.zeros(codes.shape[0], codes.shape[1] // per, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place in range(per):
            words[:, word] |= codes[:, word * per + order[place]].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _numbers(draw: torch.Generator, most: int, *shape: int, least: int = 0) -> Tensor:
    return torch.randint(least, most, shape, generator=draw)


def _steps(draw: torch.Generator, *shape: int, most: int = 16) -> Tensor:
    return ((torch.rand(shape, generator=draw) * 0.16 + 0.08) / most).half()


def awq(group: int) -> Callable[[int, int, torch.Generator], Made]:
    def write(rows: int, columns: int, draw: torch.Generator) -> Made:
        groups = columns // group
        codes, zeros = _numbers(draw, 16, columns, rows), _numbers(draw, 16, groups, rows)
        scales = _steps(draw, groups, rows)
        value = torch.empty(rows, columns)
        for column in range(columns):
            at = column // group
            value[:, column] = (codes[column] - zeros[at]).float() * scales[at].float()
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": _packed(codes, 4, order), "qzeros": _packed(zeros, 4, order)}
        return {**parts, "scales": scales}, value

    return write


def gptq(
    group: int, bits: int = 4, second: bool = False, shuffled: bool = False
) -> Callable[[int, int, torch.Generator], Made]:
    def write(rows: int, columns: int, draw: torch.Generator) -> Made:
        most, groups = 1 << bits, columns // group
        codes = _numbers(draw, most, columns, rows)
        zeros = _numbers(draw, most, groups, rows, least=1)
        scales = _steps(draw, groups, rows, most=most)
        order = torch.arange(columns) // group
        if shuffled:
            order = order[torch.randperm(columns, generator=draw)]
        value = torch.empty(rows, columns)
        for column in range(columns):
            at = int(order[column])
            value[:, column] = (codes[column] - zeros[at]).float() * scales[at].float()
        stored = zeros if second else zeros - 1
        parts = {"qweight": _packed(codes.t(), bits).t().contiguous(), "scales": scales}
        return {**parts, "qzeros": _packed(stored, bits), "g_idx": order.to(torch.int32)}, value

    return write


def fp8(block: int | None, scale: str = "weight_scale_inv") -> Callable[..., Made]:
    def write(rows: int, columns: int, draw: torch.Generator) -> Made:
        codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
        if block is None:
            parts = {"weight": codes, scale: torch.tensor(0.04), "activation_scale": torch.ones(1)}
            return parts, codes.float() * 0.04
        scales = torch.rand(-(-rows // block), -(-columns // block), generator=draw) * 0.05 + 0.01
        value = codes.float()
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                value[i * block : (i + 1) * block, j * block : (j + 1) * block] *= scales[i, j]
        return {"weight": codes, scale: scales}, value

    return write


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
FP4 = tuple(sign * x / 12 for sign in (1, -1) for x in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def four_bits(table: tuple[float, ...], kind: str, nested: bool) -> Callable[..., Made]:
    def write(rows: int, columns: int, draw: torch.Generator) -> Made:
        count, block = rows * columns, 32
        codes = _numbers(draw, 16, count)
        absmax = torch.rand(count // block, generator=draw) * 0.1 + 0.02
        about: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        about["shape"] = [rows, columns]
        parts = {"weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]}
        parts["weight.quant_map"] = torch.tensor(table)
        if nested:
            small = _numbers(draw, 256, count // block)
            map_ = torch.linspace(-1, 1, 256)
            each = torch.rand(-(-len(small) // 256), generator=draw) * 0.02
            about |= {"nested_blocksize": 256, "nested_offset": 0.06, "nested_dtype": "float32"}
            absmax = torch.stack([map_[one] * each[i // 256] for i, one in enumerate(small)]) + 0.06
            parts |= {"weight.absmax": small.to(torch.uint8), "weight.nested_quant_map": map_}
            parts["weight.nested_absmax"] = each
        else:
            parts["weight.absmax"] = absmax
        text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = text
        value = torch.tensor(table)[codes] * absmax.repeat_interleave(block)
        return parts, value.view(rows, columns)

    return write


def llm_int8(rows: int, columns: int, draw: torch.Generator) -> Made:
    codes = _numbers(draw, 128, rows, columns, least=-127).to(torch.int8)
    most = torch.rand(rows, generator=draw) * 0.2 + 0.1
    flag = torch.zeros((), dtype=torch.uint8)
    value = codes.float() * most[:, None] / 127
    return {"weight": codes, "SCB": most, "weight_format": flag}, value


def compressed(form: str, **weights: Any) -> Callable[..., Made]:
    """Quantised, written and read back by the library compressed-tensors."""

    def write(rows: int, columns: int, draw: torch.Generator) -> Made:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        weight = torch.randn(rows, columns, generator=draw) * 0.1
        if args.block_structure:
            high, wide = args.block_structure
            tall = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
            tiles = tall.unflatten(0, (-1, high)).unflatten(2, (-1, wide))
            tiles = tiles.transpose(1, 2).flatten(2)
        elif args.strategy == "group":
            tiles = weight.unflatten(1, (-1, args.group_size))
        else:
            tiles = weight[:, None] if args.strategy == "channel" else weight.view(1, 1, -1)
        scale, zero = calculate_qparams(tiles.amin(2), tiles.amax(2), args)
        given = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
        codec = BaseCompressor.get_value_from_registry(form)
        parts = codec.compress(given, scheme)
        value = codec.decompress(parts, scheme)["weight"].float()
        return {tail: part.contiguous() for tail, part in parts.items()}, value

    return write


def _ct(form: str, held: str, name: str, **weights: Any) -> Form:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    config |= {"ignore": ["lm_head", "re:.*norm.*"], "quantization_status": "compressed"}
    return Form(config, compressed(form, **weights), held, f"{name} (compressed-tensors)")


def _group(method: str, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": group, **more}


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_BNB4 = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
_NF4 = {**_BNB4, "bnb_4bit_quant_type": "nf4"}
_GPTQ_2, _ORDERED = _group("gptq", checkpoint_format="gptq_v2"), _group("gptq", desc_act=True)
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 48]}
_BY_TENSOR = {**_FP8, "weight_block_size": None, "activation_scheme": "static"}
FORMS: dict[str, Form] = {
    "awq": Form(_group("awq", version="gemm"), awq(32), "int4", "int4 (AWQ)"),
    "awq 16": Form(_group("awq", 16), awq(16), "plain", "int4 (AWQ)"),
    "gptq": Form(_group("gptq", 64, desc_act=False), gptq(64), "int4", "int4 (GPTQ)"),
    "gptq v2": Form(_GPTQ_2, gptq(32, second=True), "int4", "int4 (GPTQ)"),
    "gptq desc_act": Form(_ORDERED, gptq(32, shuffled=True), "plain", "int4 (GPTQ)"),
    "gptq 8": Form({**_group("gptq"), "bits": 8}, gptq(32, 8), "plain", "int8 (GPTQ)"),
    "fp8 blocks": Form(_FP8, fp8(48), "plain", "float8 (FP8)"),
    "fp8 tensor": Form(_BY_TENSOR, fp8(None), "plain", "float8 (FP8)"),
    "fp8 scale": Form(_BY_TENSOR, fp8(None, "weight_scale"), "plain", "float8 (FP8)"),
    "nf4": Form(_NF4, four_bits(NF4, "nf4", nested=False), "plain", "nf4 (bitsandbytes)"),
    "nf4 nested": Form(_NF4, four_bits(NF4, "nf4", nested=True), "plain", "nf4 (bitsandbytes)"),
    "fp4": Form(_BNB4, four_bits(FP4, "fp4", nested=False), "plain", "fp4 (bitsandbytes)"),
    "llm.int8": Form({"load_in_8bit": True}, llm_int8, "int8", "int8 (bitsandbytes)"),
    "ct int4": _ct("pack-quantized", "int4", "int4", **_INT4),
    "ct int4 zeros": _ct("pack-quantized", "int4", "int4", **_INT4, symmetric=False),
    "ct int4 channel": _ct("pack-quantized", "int4", "int4", **{**_INT8, "num_bits": 4}),
    "ct packed int8": _ct("pack-quantized", "int8", "int8", **_INT8),
    "ct packed int8 zeros": _ct("pack-quantized", "plain", "int8", **_INT8, symmetric=False),
    "ct int8": _ct("int-quantized", "int8", "int8", **_INT8),
    "ct int8 zeros": _ct("int-quantized", "plain", "int8", **_INT8, symmetric=False),
    "ct int8 tensor": _ct("int-quantized", "int8", "int8", **{**_INT8, "strategy": "tensor"}),
    "ct float8": _ct("float-quantized", "plain", "float8", **_FLOAT8, strategy="channel"),
    "ct float8 tensor": _ct("naive-quantized", "plain", "float8", **_FLOAT8, strategy="tensor"),
    "ct float8 blocks": _ct(
        "float-quantized", "plain", "float8", **_FLOAT8, strategy="block", block_structure=[32, 32]
    ),
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def folders(into: Path, form: Form) -> tuple[Path, Path]:
    """A model folder whose layers have this form, and one with the same values as float32."""
    made, plain = (tiny.write(into / name, **SIZES) for name in ("quantised", "plain"))
    values = load_file(plain / "model.safetensors")
    parts, draw = dict(values), torch.Generator().manual_seed(7)
    for name in sorted(name for name in values if "_proj" in name):
        tensors, values[name] = form.write(*parts.pop(name).shape, draw)
        parts |= {name.removesuffix("weight") + tail: part for tail, part in tensors.items()}
    save_file(parts, made / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return made, plain

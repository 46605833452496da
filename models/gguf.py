"""Reads a GGUF file: its metadata, where its tensors are, and its quantised matrices.

The header is checked before anything is read or allocated by it. Matrices of four bits in groups of
32 are taken as they are. The package `gguf` is the specification, and what tests compare with; it
is not used here, because it trusts the file and computes with one thread.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minikv.models.checkpoint import Checkpoint, Entry, read_exactly
from minikv.models.config import ModelConfig, OwnForm, OwnSampling, from_keys
from minikv.models.errors import CorruptModel, UnsupportedModel, quote
from minikv.models.files import TENSOR_LIMIT, open_regular, refuse_text
from minikv.models.split_patterns import CUTS, Cuts
from minikv.models.stored import Steps, Stored, apart, together
from minikv.models.templates import ChatTemplate
from minikv.models.tokenizer import Tokenizer
from minikv.models.tokenizer_json import JsonVocabulary, byte_level, joined, pieces_of_words

HEADER_LIMIT, ITEMS_LIMIT, PAIRS_LIMIT = 64 << 20, 1 << 21, 1 << 16
"""The largest header in bytes, and the most items of an array and pairs of the metadata. The
largest real headers have a third of it."""
_USUAL = 8 << 20  # bytes of the file that are read first

_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_LENGTH = struct.Struct("<Q").unpack_from
_STRING, _ARRAY = 8, 9
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of tensor: its name, the weights of a block and its bytes, and the form (`Stored`)."""

    name: str
    weights: int
    bytes: int
    form: str = "plain"


KINDS: Mapping[int, Kind] = {
    **{0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 30: Kind("BF16", 1, 2)},
    **{2: Kind("Q4_0", 32, 18, "int4"), 3: Kind("Q4_1", 32, 20, "int4")},
    **{6: Kind("Q5_0", 32, 22, "int8"), 7: Kind("Q5_1", 32, 24, "int8")},
    **{8: Kind("Q8_0", 32, 34, "int8"), 12: Kind("Q4_K", 256, 144, "int4")},
    **{13: Kind("Q5_K", 256, 176, "int8"), 14: Kind("Q6_K", 256, 210, "int8")},
    20: Kind("IQ4_NL", 32, 18, "int8"),
}
"""The types that are read. Those that are int4 are four bits with a scale and an offset for 32
columns; the others are read as they are and kept in eight bits by row."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """family: its model_type, a key of `config.FAMILIES`. other: a key of the metadata, and the
    model_type of files that have it. paired: whether the rows of queries and keys are in rotary
    pairs. up: which matrix ffn_up is."""

    family: str
    other: tuple[str, str] = ("", "")
    paired: bool = False
    up: str = "mlp.up_proj"


_WINDOW, _BETA = "attention.sliding_window", "attention.temperature_scale"
ARCHITECTURES = {
    "llama": _Architecture("llama", (_WINDOW, "mistral"), paired=True),
    "mistral3": _Architecture("mistral", (_BETA, "ministral3"), paired=True),
    "granite": _Architecture("granite", paired=True),
    "smollm3": _Architecture("smollm3", paired=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "phi3": _Architecture("phi3", up="mlp.gate_up_proj"),
    "olmo2": _Architecture("olmo2", (_WINDOW, "olmo3")),
}
_KEYS = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": _WINDOW,
    "num_experts": "expert_count",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "rope_scaling": "rope.scaling",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    _BETA: "llama_4_scaling_beta",
}
_TABLES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MATRICES = {
    "q, k, v": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "o": ("attn_output",),
    "gate, up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix, a `Stored`."""

    name: str
    path: Path
    start: int
    shape: tuple[int, ...]
    kind: Kind

    @property
    def form(self) -> str:
        """See `Stored`."""
        return self.kind.form

    @property
    def group(self) -> int:
        """See `Stored`."""
        return 16 if self.kind.name == "Q6_K" else 32

    @property
    def _row(self) -> int:
        return self.shape[1] // self.kind.weights * self.kind.bytes

    @property
    def size(self) -> int:
        """See `Stored`."""
        return self.shape[0] * self._row

    def _read(self, start: int, end: int) -> Tensor:
        """The blocks of these rows, uint8 [n, blocks of a row, bytes of a block]."""
        with open_regular(self.path) as file:
            file.seek(self.start + start * self._row)
            data = read_exactly(file, (end - start) * self._row, self.path)
        found = torch.frombuffer(data, dtype=torch.uint8)
        return found.view(end - start, -1, self.kind.bytes)

    def rows(self, start: int, end: int) -> Tensor:
        """See `Stored`."""
        codes, scale, least = self._decoded(start, end)
        codes = apart(codes) if self.form == "int4" else codes
        wide = codes.view(*scale.shape, -1).float().mul_(scale[..., None])
        return (wide if least is None else wide.add_(least[..., None])).flatten(1)

    def steps(self, start: int, end: int) -> Steps:
        """See `Stored`."""
        codes, scale, least = self._decoded(start, end)
        assert least is not None
        return codes, scale, least.add_(scale, alpha=8)

    def _decoded(self, start: int, end: int) -> Steps:
        """Codes, as `Steps` has them, and scale and least [n, groups], float32: code * scale +
        least."""
        codes, scale, least = _DECODERS[self.kind.name](self._read(start, end))
        least = None if least is None else least.flatten(1)
        return codes.reshape(end - start, -1), scale.flatten(1), least


def _split(data: Tensor, sizes: tuple[int, int]) -> Tensor:
    """[..., n] -> [..., *sizes]."""
    return data.reshape(*data.shape[:-1], *sizes)


def _halves(blocks: Tensor, start: int, count: int) -> tuple[Tensor, ...]:
    """Numbers of float16 in each block, as float32 [n, blocks, 1] each."""
    part = blocks[..., start : start + 2 * count].contiguous()
    return torch.split(part.view(torch.float16).float(), 1, -1)


def _nibbles(data: Tensor) -> Tensor:
    """The lower and then the upper four bits of all bytes [..., b]: [..., 2, b]."""
    return torch.stack((data & 15, data >> 4), -2)


def _bits(data: Tensor, count: int, width: int = 1) -> Tensor:
    """`count` fields of `width` bits of all bytes [..., b], the lowest first: [..., count, b]."""
    fields = [data >> (width * n) & ((1 << width) - 1) for n in range(count)]
    return torch.stack(fields, -2)


def _q4(blocks: Tensor) -> Steps:
    (scale,) = _halves(blocks, 0, 1)
    return blocks[..., 2:], scale, -8 * scale


def _q4_1(blocks: Tensor) -> Steps:
    return blocks[..., 4:], *_halves(blocks, 0, 2)  # type: ignore[return-value]


def _fifth(blocks: Tensor, start: int) -> Tensor:
    """Codes of five bits: 32 upper ones, and then bytes of nibbles."""
    upper = _bits(blocks[..., start : start + 4], 8).transpose(-1, -2).flatten(-2)
    return _nibbles(blocks[..., start + 4 :]).flatten(-2) | upper << 4


def _q5(blocks: Tensor) -> Steps:
    (scale,) = _halves(blocks, 0, 1)
    return _fifth(blocks, 2), scale, -16 * scale


def _q5_1(blocks: Tensor) -> Steps:
    return _fifth(blocks, 4), *_halves(blocks, 0, 2)  # type: ignore[return-value]


def _q8(blocks: Tensor) -> Steps:
    return blocks[..., 2:].view(torch.int8), *_halves(blocks, 0, 1), None  # type: ignore[return-value]


def _scales_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and least value of the eight groups of a block: two float16 multiply numbers of six
    bits."""
    scale, offset = _halves(blocks, 0, 2)
    low, mid, high = _split(blocks[..., 4:16], (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    offsets = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), -1)
    return scale * scales, -offset * offsets


def _q4_k(blocks: Tensor) -> Steps:
    # The lower four bits of 32 bytes are a group, and the upper ones the next.
    first, second = torch.split(_split(blocks[..., 16:], (4, 32)), 16, -1)
    both = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
    return torch.stack(both, -2), *_scales_k(blocks)


def _q5_k(blocks: Tensor) -> Steps:
    codes = _nibbles(_split(blocks[..., 48:], (4, 32))).flatten(-3, -2)
    return codes | _bits(blocks[..., 16:48], 8) << 4, *_scales_k(blocks)


def _q6_k(blocks: Tensor) -> Steps:
    low = _split(_nibbles(_split(blocks[..., :128], (2, 64))).flatten(-2), (4, 32))
    high = _bits(_split(blocks[..., 128:192], (2, 32)), 4, 2)
    (scale,) = _halves(blocks, 208, 1)
    scale = scale * blocks[..., 192:208].view(torch.int8)
    return low | high << 4, scale, -32 * scale


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4(blocks: Tensor) -> Steps:
    values = torch.tensor(_IQ4, dtype=torch.int8)[_nibbles(blocks[..., 2:]).int()]
    return values, *_halves(blocks, 0, 1), None  # type: ignore[return-value]


_DECODERS: Mapping[str, Callable[[Tensor], Steps]] = {
    **{"Q4_0": _q4, "Q4_1": _q4_1, "Q5_0": _q5, "Q5_1": _q5_1, "Q8_0": _q8},
    **{"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4},
}


class Gguf:
    """One file. metadata: its pairs; an array is a list. tensors: by the names in the file."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises CorruptModel, UnsupportedModel or ModelUnavailable."""
        self.path = path
        with open_regular(path) as file:
            self._size = os.fstat(file.fileno()).st_size
            self._data = read_exactly(file, min(self._size, _USUAL), path)
            try:
                self.metadata, self.tensors = self._header()
            except (struct.error, IndexError):
                more = min(self._size, HEADER_LIMIT) - len(self._data)
                self._data += read_exactly(file, more, path)
                self.metadata, self.tensors = self._whole_header()
            finally:
                self._data = bytearray()

    def _whole_header(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        try:
            return self._header()
        except (struct.error, IndexError):
            raise self._bad("truncated, or its header is damaged") from None

    def _bad(self, what: str, hint: str = "download the file again") -> CorruptModel:
        return CorruptModel(f"{quote(self.path.name)[1:-1]}: {what}", hint)

    # -- the header -------------------------------------------------------------------------

    def _header(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        if self._data[:4] != b"GGUF":
            refuse_text(bytes(self._data[:1024]), self.path.name)
            raise self._bad("not a GGUF file")
        self._at, self._items = 4, 0
        version = self._number("<I")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path.name}: version {version} of GGUF is not read")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        if not 1 <= tensors <= TENSOR_LIMIT or pairs > PAIRS_LIMIT:
            raise self._bad(f"claims {tensors:,} tensors and {pairs:,} metadata")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in metadata:
                raise self._bad(f"{quote(key)} is given twice")
            metadata[key] = self._value(self._number("<I"), key)
        return metadata, self._places(tensors, metadata)

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        start = self._at + 8
        self._at = start + _LENGTH(self._data, self._at)[0]
        if self._at > len(self._data):
            raise IndexError
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            raise self._bad("a text in its header is not UTF-8") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number("<" + _NUMBERS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise self._bad(f"{quote(key)} has the unknown type {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        one = _NUMBERS.get(inner, "Q")  # of a text its length
        least = count * struct.calcsize("<" + one)
        known = inner == _STRING or inner in _NUMBERS
        self._items += count
        if not known or self._items > ITEMS_LIMIT:
            raise self._bad(f"{quote(key)} claims {count:,} items of type {inner}")
        if least > len(self._data) - self._at:
            raise IndexError
        if inner == _STRING:
            return [self._text() for _ in range(count)]
        self._at += least
        return list(struct.unpack_from(f"<{count}{one}", self._data, self._at - least))

    def _places(self, count: int, metadata: Mapping[str, Any]) -> dict[str, Stored]:
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 20 or align & (align - 1):
            raise self._bad(f"general.alignment is {quote(align)}")
        found = {}
        for _ in range(count):
            name = self._text()
            dimensions = self._number("<I")
            if not 1 <= dimensions <= 4 or _NAME.fullmatch(name) is None or name in found:
                raise self._bad(f"{quote(name)} is no tensor name, or twice, or badly shaped")
            shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
            found[name] = (shape, *struct.unpack_from("<IQ", self._data, self._at))
            self._at += 12
        base = -(-self._at // align) * align
        tensors: dict[str, Stored] = {}
        spans = []
        for name, (shape, number, offset) in found.items():
            where, kind = quote(name), KINDS.get(number)
            if kind is None:
                raise UnsupportedModel(
                    f"{self.path.name}: {where} is of type {_OTHER_TYPES.get(number, number)}",
                    f"minikv reads {', '.join(one.name for one in KINDS.values())}",
                )
            if not all(0 < size < 2**40 for size in shape) or shape[-1] % kind.weights:
                raise self._bad(f"{where} of {kind.name} has the shape {list(shape)}")
            start = base + offset
            end = start + prod(shape) // kind.weights * kind.bytes
            if offset % align or end > self._size:
                raise self._bad(f"{where} is not aligned, or ends beyond the file (truncated?)")
            spans.append((start, end, where))
            if kind.form == "plain":
                tensors[name] = Entry(name, kind.name, shape, self.path, start, end)
            elif len(shape) != 2:
                raise self._bad(f"{where} of {kind.name} is not a matrix")
            else:
                tensors[name] = Blocks(name, self.path, start, shape, kind)
        for (_, end, one), (start, _, two) in pairwise(sorted(spans)):
            if start < end:
                raise self._bad(f"{one} and {two} overlap")
        return tensors

    # -- what a folder has in files of its own ----------------------------------------------

    def config(self) -> ModelConfig:
        """The model's configuration. Raises CorruptModel or UnsupportedModel."""
        data, tensors = self.metadata, self.tensors
        name = data.get("general.architecture")
        about = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if about is None:
            raise UnsupportedModel(
                f"{self.path.name}: unsupported architecture {quote(name)}",
                f"minikv runs GGUF files of {', '.join(ARCHITECTURES)}",
            )
        if data.get("split.count", 0) not in (0, 1):
            raise UnsupportedModel(
                f"{self.path.name} is one of {quote(data['split.count'])} parts of a model",
                "join them with llama-gguf-split",
            )
        prefix = f"{name}."
        names = {own: prefix + key for own, key in _KEYS.items()}
        given = {key: data.get(key) for key in names.values()}
        for own in ("sliding_window", "num_experts"):
            given[names[own]] = given[names[own]] or None  # 0: there are none
        given[names["rope_scaling"]] = self._scaling(prefix)
        key, family = about.other
        given["model_type"] = family if data.get(prefix + key) else about.family
        slides = data.get(f"{prefix}{_WINDOW}_pattern")
        if given[names["sliding_window"]] and isinstance(slides, list):
            kinds = "full_attention", "sliding_attention"
            given["layer_types"] = [kinds[bool(one)] for one in slides]
        table = tensors.get("token_embd.weight")
        given["vocab_size"] = None if table is None else table.shape[0]
        config = from_keys(given, self.path.name, names)
        for key in ("rope.dimension_count", "attention.value_length"):
            if data.get(prefix + key, config.head_dim) != config.head_dim:
                raise UnsupportedModel(
                    f"{self.path.name}: {prefix}{key} {quote(data[prefix + key])} is not "
                    f"the {config.head_dim} of a head"
                )
        ids = (data.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        first = "blk.0."
        return replace(
            config,
            rope=replace(config.rope, factors=self._factors(config.head_dim // 2)),
            tied="output.weight" not in tensors,
            qkv_bias=f"{first}attn_q.bias" in tensors,
            o_bias=f"{first}attn_output.bias" in tensors,
            mlp_bias=f"{first}ffn_down.bias" in tensors,
            stop_ids=tuple(sorted({id for id in ids if isinstance(id, int)})),
            own=OwnSampling(why="a GGUF file says nothing about sampling"),
            form=self.form,
            stored=self._own_forms(config.layers),
        )

    def _scaling(self, prefix: str) -> dict[str, Any] | None:
        """The rotary scaling as config.json has it."""
        data = self.metadata
        found = {own: data[prefix + key] for key, own in _SCALING.items() if prefix + key in data}
        if "rope_factors_long.weight" in self.tensors:
            found["rope_type"] = "longrope"
        kind = found.get("rope_type", "none")
        if kind == "yarn":
            return {"mscale": 1.0, **found} if "mscale_all_dim" in found else found
        return {"rope_type": kind, "factor": found.get("factor")} if kind != "none" else None

    def _factors(self, count: int) -> tuple[float, ...]:
        """By what each rotary frequency is divided; () if the file does not say it."""
        entry = self.tensors.get(_FACTORS)
        if entry is None:
            return ()
        if not isinstance(entry, Entry) or entry.dtype != "F32" or entry.shape != (count,):
            raise self._bad(f"{_FACTORS} is not of {count} numbers")
        with open_regular(self.path) as file:
            file.seek(entry.start)
            found = torch.frombuffer(read_exactly(file, entry.size, self.path), dtype=torch.float32)
        if not bool(((found > 0) & (found < 1e9)).all()):
            raise self._bad(f"{_FACTORS} has numbers that are no factors")
        return tuple(found.tolist())

    @property
    def form(self) -> str:
        """What the file's form is called ("Q4_K_M"); "" if no matrix is quantised."""
        quantised = Counter(
            one.kind.name for one in self.tensors.values() if isinstance(one, Blocks)
        )
        if not quantised:
            return ""
        number = self.metadata.get("general.file_type")
        names = dict(enumerate(_FILE_TYPES))
        known = names.get(number, "") if isinstance(number, int) else ""
        return known or quantised.most_common(1)[0][0]

    def _own_forms(self, layers: int) -> tuple[OwnForm, ...]:
        def form_of(*names: str) -> tuple[str, int]:
            parts = [self.tensors[name] for name in names if name in self.tensors]
            stored = [part for part in parts if not isinstance(part, Entry)]
            if len(stored) < len(parts) or not stored:
                return "plain", 0
            return together((part.form, part.group) for part in stored)

        found: Counter[tuple[str, str, int]] = Counter()
        for layer in range(layers):
            for matrix, parts in _MATRICES.items():
                names = (f"blk.{layer}.{part}.weight" for part in parts)
                found[matrix, *form_of(*names)] += 1
        if "output.weight" in self.tensors:
            found["head", *form_of("output.weight")] += 1
        table, group = form_of("token_embd.weight")
        slot = "embedding" if "output.weight" in self.tensors else "head"
        found[slot, table.replace("int4", "int8"), group] += 1
        return tuple(OwnForm(*one, n) for one, n in found.items() if one[1] != "plain")

    def checkpoint(self) -> Checkpoint:
        """The tensors by their Hugging Face names."""
        about, entries = ARCHITECTURES[self.metadata["general.architecture"]], {}
        inside = {**_TENSORS, "ffn_up": about.up}
        for name, entry in self.tensors.items():
            match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
            if match and (own := (_TABLES if match[1] is None else inside).get(match[2])):
                layer = "" if match[1] is None else f"model.layers.{match[1]}."
                name = f"{layer}{own}.{match[3]}"
            if name in entries:
                raise self._bad(f"{quote(name)} is there under two names")
            if name != _FACTORS:
                entries[name] = entry
        return Checkpoint(entries, about.paired)

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """The tokenizer. Raises CorruptModel or UnsupportedModel."""
        pieces, kinds = self._pieces()
        named = {}
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            id = self._told(f"{key}_token_id")
            if isinstance(id, int) and 0 <= id < len(pieces) and kinds[id] != _UNUSED:
                named[f"{role}_token"] = pieces[id]
        vocab: dict[str, int] = {}
        for id, piece in enumerate(pieces):
            if kinds[id] != _UNUSED:
                vocab.setdefault(piece, id)
        added = [
            (piece, id, kinds[id] != _USER)
            for piece, id in vocab.items()
            if kinds[id] in (_UNKNOWN, _CONTROL, _USER) and piece
        ]
        words = self._told("model") == "llama"
        if words:
            merges = joined(self._by_score(vocab), vocab)
            prefix = bool(self._told("add_space_prefix", True))
            made = pieces_of_words(vocab, merges, added, named.get("unk_token"), prefix)
        else:
            cuts = self._cuts()
            made = byte_level(
                vocab, self._texts("merges"), cuts.patterns, added, cuts.whole, cuts.composes
            )
        vocabulary = JsonVocabulary(made, self.path.name)
        return Tokenizer(
            vocabulary,
            named=named,
            special=[text for text, id, _ in added if kinds[id] == _CONTROL],
            edges=vocabulary.edges,
            stop_ids=config.stop_ids,
            starts_with_bos=bool(self._told("add_bos_token", words)),
        )

    def _told(self, key: str, default: object = None) -> Any:
        """What the file says about its tokenizer."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def _texts(self, key: str) -> list[str]:
        found = self._told(key)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self._bad(f"has no complete tokenizer (tokenizer.ggml.{key})", "use another file")
        return found

    def _pieces(self) -> tuple[list[str], list[int]]:
        """The tokens and their types."""
        pieces = self._texts("tokens")
        kinds = self._told("token_type", [_NORMAL] * len(pieces))
        if not isinstance(kinds, list) or len(kinds) != len(pieces) or not pieces:
            raise self._bad("tokenizer.ggml.token_type does not fit the tokens")
        return pieces, kinds

    def _cuts(self) -> Cuts:
        model, pre = self._told("model"), self._told("pre", "default")
        if model != "gpt2":
            raise UnsupportedModel(f"{self.path.name}: the tokenizer is {quote(model)}")
        if not isinstance(pre, str) or pre not in CUTS:
            raise UnsupportedModel(
                f"{self.path.name}: the pre-tokenizer {quote(pre)} is not known",
                f"minikv knows {', '.join(CUTS)}",
            )
        return CUTS[pre]

    def _by_score(self, vocab: Mapping[str, int]) -> list[str]:
        """The pieces that sentencepiece joins: those with the largest score first."""
        scores, (pieces, kinds) = self._told("scores"), self._pieces()
        real = isinstance(scores, list) and all(isinstance(one, float) for one in scores)
        if not real or len(scores) != len(pieces):
            raise self._bad("tokenizer.ggml.scores does not fit the tokens")
        normal = (p for p, id in vocab.items() if kinds[id] == _NORMAL and len(p) <= _LONGEST)
        return sorted(normal, key=lambda piece: -scores[vocab[piece]])

    def template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """The chat format: the file's own, or a built-in one. Raises CorruptModel and others."""
        key = "tokenizer.chat_template"
        own = self.metadata.get(key)
        others = [name.removeprefix(f"{key}.") for name in self.metadata if f"{key}." in name]
        found = (own, f"the template of {self.path.name}") if isinstance(own, str) else None
        return ChatTemplate.chosen(found, others, tokenizer, self.path)


_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = range(1, 6)
_LONGEST = 64  # characters of a piece
_FILE_TYPES = (
    *("", "", "Q4_0", "Q4_1", "", "", "", "Q8_0", "Q5_0", "Q5_1", "", "", "", ""),
    *("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
)
"""What files are called by their general.file_type."""
_OTHER_TYPES = {
    **{10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}

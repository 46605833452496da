"""Reads a GGUF file: its metadata, and where its tensors are. `blocks.py` decodes them.

The header is checked before anything is read or allocated according to it. The package `gguf` is
the specification, with which tests compare; it is not used here, because it trusts the file and
computes with one thread.
"""

from __future__ import annotations

import io
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from minikv.models.blocks import KINDS, Blocks
from minikv.models.checkpoint import Checkpoint, Entry, hub_name, renamed
from minikv.models.config import ModelConfig, OwnSampling, from_keys
from minikv.models.errors import CorruptModel, UnsupportedModel, quote
from minikv.models.files import TENSOR_LIMIT, open_regular, refuse_text, unreadable
from minikv.models.split_patterns import CUTS, Cuts
from minikv.models.stored import Stored, own_forms
from minikv.models.templates import ChatTemplate
from minikv.models.tokenizer import Tokenizer
from minikv.models.tokenizer_json import JsonVocabulary, byte_level, joined, pieces_of_words

HEADER_LIMIT, ITEMS_LIMIT, PAIRS_LIMIT = 48 << 20, 1 << 20, 1 << 16
"""The largest header in bytes, and the most items of all arrays and pairs of the metadata. A
vocabulary of 262,144 tokens with scores and types has three quarters of the items."""

_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


@dataclass(frozen=True, slots=True)
class _Architecture:
    """family: its model_type, a key of `config.FAMILIES`. other: a metadata key, and the model_type
    of files with that key. paired: whether the rows of queries and keys are in rotary pairs. up:
    which matrix ffn_up is."""

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
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
_FACTORS = "rope_freqs.weight"


class Gguf:
    """One file. metadata: its pairs; an array is a list. tensors: by their names in the file."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises CorruptModel, UnsupportedModel or ModelUnavailable."""
        self.path = path
        with open_regular(path) as file:
            self._size = os.fstat(file.fileno()).st_size
            self._end, self._at, self._items = min(self._size, HEADER_LIMIT), 0, 0
            self._file = io.BufferedReader(file, 1 << 16)  # type: ignore[type-var]
            try:
                self.metadata, self.tensors = self._header()
            except (EOFError, struct.error):
                raise self._bad("truncated, or its header is damaged") from None
            except OSError as error:
                raise unreadable(path, error) from None

    def _bad(self, what: str, hint: str = "download the file again") -> CorruptModel:
        return CorruptModel(f"{quote(self.path.name)[1:-1]}: {what}", hint)

    # -- the header -------------------------------------------------------------------------

    def _header(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        first = self._file.peek(1024)[:1024]
        if first[:4] != b"GGUF":
            refuse_text(first, self.path.name)
            raise self._bad("not a GGUF file")
        self._take(4)
        version = self._number("<I")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path.name}: version {version} of GGUF is not read")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        if not 1 <= tensors <= TENSOR_LIMIT or pairs > PAIRS_LIMIT:
            raise self._bad(f"claims {tensors:,} tensors and {pairs:,} metadata")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            (key,) = self._read_texts(1)
            if key in metadata:
                raise self._bad(f"{quote(key)} is given twice")
            metadata[key] = self._value(self._number("<I"), key)
        return metadata, self._places(tensors, metadata)

    def _take(self, count: int) -> bytes:
        """The next bytes of the header."""
        self._at += count
        if self._at > self._end:
            raise EOFError
        return self._file.read(count)

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _read_texts(self, count: int) -> list[str]:
        """The next texts. There may be half a million, so the loop calls no functions of ours."""
        found, read, at, end = [], self._file.read, self._at, self._end
        try:
            for _ in range(count):
                length = int.from_bytes(read(8), "little")
                at += 8 + length
                if at > end:
                    raise EOFError
                found.append(read(length).decode())
        except UnicodeDecodeError:
            raise self._bad("a text in its header is not UTF-8") from None
        self._at = at
        return found

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number("<" + _NUMBERS[kind])
        if kind == _STRING:
            return self._read_texts(1)[0]
        if kind != _ARRAY:
            raise self._bad(f"{quote(key)} has the unknown type {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        self._items += count
        if not (inner == _STRING or inner in _NUMBERS) or self._items > ITEMS_LIMIT:
            raise self._bad(f"{quote(key)} claims {count:,} items of type {inner}")
        if inner == _STRING:
            return self._read_texts(count)
        form = f"<{count}{_NUMBERS[inner]}"
        return list(struct.unpack(form, self._take(struct.calcsize(form))))

    def _places(self, count: int, metadata: Mapping[str, Any]) -> dict[str, Stored]:
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 20 or align & (align - 1):
            raise self._bad(f"general.alignment is {quote(align)}")
        found = {}
        for _ in range(count):
            (name,) = self._read_texts(1)
            dimensions = self._number("<I")
            if not 1 <= dimensions <= 4 or _NAME.fullmatch(name) is None or name in found:
                raise self._bad(f"{quote(name)} has a bad shape, is no name or occurs twice")
            shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
            found[name] = shape, self._number("<I"), self._number("<Q")
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
                tensors[name] = Entry(name, self.path, start, shape, end - start, dtype=kind.name)
            elif len(shape) != 2:
                raise self._bad(f"{where} of {kind.name} is not a matrix")
            else:
                tensors[name] = Blocks.at(name, self.path, start, shape, kind)
        for (_, end, one), (start, _, two) in pairwise(sorted(spans)):
            if start < end:
                raise self._bad(f"{one} and {two} overlap")
        return tensors

    # -- what a folder has in separate files -------------------------------------------------

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
            given[names[own]] = given[names[own]] or None  # 0 means none
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
        first, tied = "blk.0.", "output.weight" not in tensors
        return replace(
            config,
            rope=replace(config.rope, factors=self._factors(config.head_dim // 2)),
            tied=tied,
            qkv_bias=f"{first}attn_q.bias" in tensors,
            o_bias=f"{first}attn_output.bias" in tensors,
            mlp_bias=f"{first}ffn_down.bias" in tensors,
            stop_ids=tuple(sorted({id for id in ids if isinstance(id, int)})),
            own=OwnSampling(why="a GGUF file says nothing about sampling"),
            form=self._form(),
            stored=own_forms(self.checkpoint().entries, tied),
        )

    def _scaling(self, prefix: str) -> dict[str, Any] | None:
        """The rotary scaling in the form of config.json."""
        data = self.metadata
        found = {own: data[prefix + key] for key, own in _SCALING.items() if prefix + key in data}
        if "rope_factors_long.weight" in self.tensors:
            found["rope_type"] = "longrope"
        kind = found.get("rope_type", "none")
        if kind == "yarn":
            return {"mscale": 1.0, **found} if "mscale_all_dim" in found else found
        return {"rope_type": kind, "factor": found.get("factor")} if kind != "none" else None

    def _factors(self, count: int) -> tuple[float, ...]:
        """The divisor of each rotary frequency; () if the file has none."""
        entry = self.tensors.get(_FACTORS)
        if entry is None:
            return ()
        if not isinstance(entry, Entry) or entry.dtype != "F32" or entry.shape != (count,):
            raise self._bad(f"{_FACTORS} does not have {count} numbers")
        found = entry.rows(0, count)
        if not bool(((found > 0) & (found < 1e9)).all()):
            raise self._bad(f"{_FACTORS} has numbers that cannot be factors")
        return tuple(found.tolist())

    def _form(self) -> str:
        """The name of the file's form ("Q4_K_M"); "" if no matrix is quantised."""
        kinds = Counter(one.kind.name for one in self.tensors.values() if isinstance(one, Blocks))
        number = self.metadata.get("general.file_type")
        known = _FILE_TYPES.get(number, "") if isinstance(number, int) else ""
        return (known or kinds.most_common(1)[0][0]) if kinds else ""

    def checkpoint(self) -> Checkpoint:
        """The tensors by their Hugging Face names."""
        about = ARCHITECTURES[self.metadata["general.architecture"]]
        names = {**_TENSORS, "ffn_up": about.up}
        weights = {name: one for name, one in self.tensors.items() if name != _FACTORS}
        return Checkpoint(renamed(weights, lambda n: hub_name(n, "blk", names)), about.paired)

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """The tokenizer. Raises CorruptModel or UnsupportedModel."""
        pieces = self._texts("tokens")
        kinds = self._told("token_type", [_NORMAL] * len(pieces))
        if not isinstance(kinds, list) or len(kinds) != len(pieces) or not pieces:
            raise self._bad("tokenizer.ggml.token_type does not fit the tokens")
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
            merges = joined(self._by_score(vocab, kinds), vocab)
            prefix = bool(self._told("add_space_prefix", True))
            made = pieces_of_words(vocab, merges, added, named.get("unk_token"), prefix)
        else:
            cuts = self._cuts()
            made = byte_level(
                vocab, self._texts("merges"), cuts.patterns, added, cuts.whole, cuts.composes
            )
        return Tokenizer(
            JsonVocabulary(made, self.path.name),
            named=named,
            special=[text for text, id, _ in added if kinds[id] == _CONTROL],
            stop_ids=config.stop_ids,
            starts_with_bos=bool(self._told("add_bos_token", words)),
        )

    def _told(self, key: str, default: object = None) -> Any:
        """A value of the tokenizer's metadata."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def _texts(self, key: str) -> list[str]:
        found = self._told(key)
        if not isinstance(found, list) or {*map(type, found)} - {str}:
            raise self._bad(f"has no complete tokenizer (tokenizer.ggml.{key})", "use another file")
        return found

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

    def _by_score(self, vocab: Mapping[str, int], kinds: list[int]) -> list[str]:
        """The pieces that sentencepiece joins, those with the largest score first."""
        scores = self._told("scores")
        real = isinstance(scores, list) and all(isinstance(one, float) for one in scores)
        if not real or len(scores) != len(kinds):
            raise self._bad("tokenizer.ggml.scores does not fit the tokens")
        normal = (p for p, id in vocab.items() if kinds[id] == _NORMAL and len(p) <= _LONGEST)
        return sorted(normal, key=lambda piece: -scores[vocab[piece]])

    def template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """The chat format: the file's own, or a built-in one. Raises ModelError."""
        own = self.metadata.get("tokenizer.chat_template")
        found = (own, f"the template of {self.path.name}") if isinstance(own, str) else None
        return ChatTemplate.chosen(found, tokenizer, self.path)


_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = range(1, 6)
_LONGEST = 64  # characters of a piece
_FILE_TYPES = {
    **{2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 14: "Q4_K_S", 15: "Q4_K_M"},
    **{16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
}
"""Names of forms by general.file_type."""
_OTHER_TYPES = {
    **{10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}

"""Finds the tensors in a model folder's safetensors files, and where their bytes are.

The header of each file is checked here before any data is read. Two layouts are supported: Hugging
Face's, and Mistral's `consolidated` one, in which query and key rows are stored in rotary pairs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from minikv.models.errors import CorruptModel, UnsupportedModel, quote
from minikv.models.files import (
    INDEX,
    SINGLE,
    TENSOR_LIMIT,
    open_regular,
    parse_json,
    refuse_missing,
    refuse_text,
    unreadable,
    weight_files,
    weight_map,
)
from minikv.models.stored import Stored

HEADER_LIMIT = 16 * 2**20  # bytes
STAGING = 32 * 2**20
"""How many bytes are read at a time."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

READ = {
    **DTYPES,
    **{"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn},
}
"""The dtypes of plain weights, and of all tensors that are read."""
_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8},
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
SMALL = frozenset(name for name, bits in _BITS.items() if bits <= 8 and name != "BOOL")
"""dtypes of quantised weights only."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_COMPUTED = re.compile(
    r"(.+\.)?(rotary_(pos_)?emb\.\w+|rope\.freqs|freqs_(cis|cos|sin)|(cos|sin)_cached)"
)
"""Tables of the rotary embedding. Some programs store them; this network computes them."""


@dataclass(frozen=True, slots=True)
class Entry(Stored):
    """A tensor with plain numbers in the file. dtype: its name in safetensors."""

    dtype: str = field(kw_only=True)

    def _rows(self, start: int, end: int) -> Tensor:
        made = torch.empty((end - start, *self.shape[1:]), dtype=READ[self.dtype])
        with open_regular(self.path) as file:
            file.seek(self.start + start * (self.size // max(1, self.shape[0])))
            read_into(file, memory(made), self.path)
        return made


def read_header(path: Path) -> dict[str, Entry]:
    """Read and check the header of a safetensors file. Returns its tensors by name. Raises
    CorruptModel.

    The tensors must cover the data exactly: no overlap, no hole, nothing before or after.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = read_exactly(file, min(size, 8) or 8, path)
        length = int.from_bytes(first, "little")
        if length > HEADER_LIMIT or size < 8:
            first += read_exactly(file, max(0, min(size - 8, 1024)), path)
            refuse_text(bytes(first), path.name)
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise CorruptModel(
                f"{path.name}: truncated, or not safetensors (header {length}, file {size} bytes)",
                "download the file again",
            )
        raw = parse_json(bytes(read_exactly(file, length, path)), path.name)
    metadata = raw.pop("__metadata__", None)
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if metadata is not None and not texts:
        raise CorruptModel(f"{path.name}: __metadata__ is not a table of strings")
    if not raw:
        raise CorruptModel(f"{path.name}: holds no tensors")
    if len(raw) > TENSOR_LIMIT:
        raise CorruptModel(f"{path.name}: {len(raw)} tensors; at most {TENSOR_LIMIT} are read")
    base = 8 + length
    entries = {name: _entry(name, facts, path, base) for name, facts in raw.items()}
    _check_cover(sorted(entries.values(), key=lambda e: (e.start, e.size)), base, size, path)
    return entries


def _entry(name: str, facts: Any, path: Path, base: int) -> Entry:
    where = f"{path.name}: {quote(name)}"
    if _NAME.fullmatch(name) is None:
        raise CorruptModel(f"{where} is not a tensor name")
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise CorruptModel(f"{where}: must have dtype, shape and data_offsets")
    dtype, shape, span = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CorruptModel(f"{where}: unknown dtype {quote(dtype)}")
    if not _counts(shape) or len(shape) > 8:
        raise CorruptModel(f"{where}: bad shape {quote(shape)}")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise CorruptModel(f"{where}: bad data_offsets {quote(span)}")
    if prod((_BITS[dtype], *shape)) != 8 * (span[1] - span[0]):
        raise CorruptModel(f"{where}: {quote(shape)} of {dtype} does not fill {quote(span)}")
    return Entry(name, path, base + span[0], tuple(shape), span[1] - span[0], dtype=dtype)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**62 for n in value
    )


def _check_cover(entries: list[Entry], base: int, size: int, path: Path) -> None:
    if entries[0].start != base:
        raise CorruptModel(f"{path.name}: a hole before {quote(entries[0].name)}")
    for one, two in pairwise(entries):
        if two.start != (end := one.start + one.size):
            what = "overlap" if two.start < end else "have a hole between them"
            raise CorruptModel(f"{path.name}: {quote(one.name)} and {quote(two.name)} {what}")
    end = entries[-1].start + entries[-1].size
    if end != size:
        what = "is truncated" if size < end else "has bytes after the last tensor"
        raise CorruptModel(
            f"{path.name} {what}: {size} bytes, expected {end}", "download the file again"
        )


def memory(tensor: Tensor) -> memoryview:
    """The writable memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_exactly(file: BinaryIO, count: int, path: Path) -> bytearray:
    """The next bytes of a file. Raises CorruptModel or ModelUnavailable."""
    data = bytearray(count)
    read_into(file, memoryview(data), path)
    return data


def read_into(
    file: BinaryIO, into: memoryview, path: Path, tell: Callable[[int], None] | None = None
) -> None:
    """Fill `into` from the file. tell(count) is called with the bytes of each read. Raises
    CorruptModel or ModelUnavailable."""
    done = 0
    while done < len(into):
        try:
            got = file.readinto(into[done : done + STAGING])  # type: ignore[attr-defined]
        except OSError as error:
            raise unreadable(path, error) from None
        if not got:
            raise CorruptModel(f"{path.name} is truncated", "download the file again")
        done += got
        if tell is not None:
            tell(got)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a model folder, by their Hugging Face names, except those that the network
    computes. Keeps no file open."""

    entries: Mapping[str, Stored]
    original: bool
    """Whether query and key rows are in rotary pairs (Mistral's own layout)."""

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Find and check the weight files of `folder`.

        Shards are preferred to a single file, and that to Mistral's layout. Raises CorruptModel,
        UnsupportedModel or ModelUnavailable.
        """
        folder = Path(folder)
        try:
            index, files = weight_files([path.name for path in folder.iterdir()])
        except OSError as error:
            raise unreadable(folder, error) from None
        original = index != INDEX and files != [SINGLE]
        entries: Mapping[str, Stored]
        if index:
            entries = _sharded(folder, folder / index)
        else:
            entries = _together(read_header(folder / name) for name in files)
        if not entries:
            raise CorruptModel("the weight files hold no weights")
        if any(_WRAPPED.match(name) for name in entries):
            entries = renamed(entries, _text_name)
        if original:
            entries = renamed(entries, lambda name: hub_name(name, "layers", _ORIGINAL_NAMES))
        return cls(entries, original)

    @property
    def dtype(self) -> torch.dtype:
        """The storage dtype of most of the weights, by bytes; bfloat16 if some matrices are
        quantised. Raises UnsupportedModel if no dtype is supported."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.entries.values():
            if not isinstance(entry, Entry):
                return torch.bfloat16
            dtype = DTYPES.get(entry.dtype)
            if dtype is not None:
                sizes[dtype] = sizes.get(dtype, 0) + entry.size
        if not sizes:
            where = f"{entry.path.name}: {quote(entry.name)}"
            raise UnsupportedModel(f"{where} is stored as {getattr(entry, 'dtype', '?')}")
        return max(sizes, key=lambda dtype: sizes[dtype])


_WRAPPED = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?(lm_head\.)?")
_OTHER_PART = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


def _text_name(name: str) -> str:
    """The name of a text model's tensor without the prefix of the model that wraps it."""
    if _OTHER_PART.match(name):
        return ""
    return _WRAPPED.sub(lambda match: match[1] or "model.", name, count=1)


def renamed(entries: Mapping[str, Stored], rename: Callable[[str], str]) -> dict[str, Stored]:
    """The tensors under other names; "" leaves one out. Raises CorruptModel."""
    made: dict[str, Stored] = {}
    for name, entry in entries.items():
        new = rename(name)
        if new in made:
            raise CorruptModel(f"{entry.path.name}: {quote(name)} is there twice, under two names")
        if new:
            made[new] = entry
    return made


def _sharded(folder: Path, index: Path) -> dict[str, Entry]:
    """The tensors of all shards, which must be exactly those in the index."""
    mapping = {n: file for n, file in weight_map(index).items() if not _COMPUTED.fullmatch(n)}
    refuse_missing(index, mapping.values())
    entries = _together(read_header(folder / name) for name in sorted(set(mapping.values())))
    found = {name: entry.path.name for name, entry in entries.items()}
    for name in mapping | found:
        if (said := mapping.get(name, "no file")) != (real := found.get(name, "no file")):
            raise CorruptModel(
                f"{index.name} says that {quote(name)} is in {said}, and it is in {real}",
                "the index and the files do not belong together: download them again",
            )
    return entries


def _together(headers: Iterable[dict[str, Entry]]) -> dict[str, Entry]:
    """The tensors of all files, except those that the network computes."""
    entries: dict[str, Entry] = {}
    for header in headers:
        for name, entry in header.items():
            if _COMPUTED.fullmatch(name):
                continue
            if name in entries:
                raise CorruptModel(
                    f"{quote(name)} is both in {entries[name].path.name} and {entry.path.name}",
                    "model-parallel shards and left-over files are not supported",
                )
            entries[name] = entry
    return entries


_ORIGINAL_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def hub_name(name: str, layer: str, names: Mapping[str, str]) -> str:
    """Hugging Face's name for a tensor of another layout. layer: the word before a layer's number.
    names: those of the modules. An unknown name stays; `load_network` refuses it later."""
    match = re.fullmatch(rf"(?:{layer}\.(\d+)\.)?(.+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    inside = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{inside}{names[match[2]]}.{match[3]}"


def same(one: Entry, two: Entry) -> bool:
    """Whether two stored tensors are equal, bit for bit. Reads both in pieces."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    with open_regular(one.path) as a, open_regular(two.path) as b:
        a.seek(one.start)
        b.seek(two.start)
        left = one.size
        while left:
            count = min(left, STAGING)
            if read_exactly(a, count, one.path) != read_exactly(b, count, two.path):
                return False
            left -= count
    return True

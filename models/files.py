"""Chooses which files of a model's folder are read, and reads them safely."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from minikv.models.errors import (
    CorruptModel,
    ModelError,
    ModelUnavailable,
    UnsupportedModel,
    quote,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ORIGINAL_INDEX = "consolidated.safetensors.index.json"
ORIGINAL = re.compile(r"consolidated[A-Za-z0-9._-]*\.safetensors")
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,242}\.safetensors")
"""A file name without a folder, of at most 255 bytes. The real path is not checked, because the
hub's cache consists of links into blobs/."""

JSON_LIMITS = {
    "tokenizer.json": 64 << 20,
    "tekken.json": 40 << 20,
    "model.safetensors.index.json": 16 << 20,
    "consolidated.safetensors.index.json": 16 << 20,
    "tokenizer_config.json": 8 << 20,
    "added_tokens.json": 8 << 20,
}
"""The limits for JSON files in bytes; 1 MiB for any other name. Real files have at most about half
of that."""
TENSOR_LIMIT, _SHARD_LIMIT = 100_000, 4096
"""The most tensors and files of a model. The largest real models have a tenth of that."""
_CONTAINERS, _ITEMS, _PAIRS = 1_000_000, 3_000_000, 1_000_000
"""The most lists and objects, commas, and colons of one file. In memory, a list or an item of one
takes some tens of bytes, and a pair of an object up to 350. The largest real vocabularies have half
as many lists and items, and six tenths as many pairs."""

CONFIGS = ("config.json", "params.json")
NO_CONFIG = "the repository has no config.json: it holds no model"
SETTINGS = ("config.json", "generation_config.json", "params.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
TOKENIZER = (
    *(*_TOKENIZERS, "tekken.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
"""The files that are read besides weights. Digests of a model depend on their order."""
_SHARD = r"model-\d+-of-\d+\.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5")


def wanted_files(given: Iterable[str]) -> list[str]:
    """The files of a repository that minikv reads. given: all its files.

    Only top-level files. If both layouts of the weights exist, the Hugging Face one; never pickles.
    Raises ModelUnavailable or UnsupportedModel if nothing can be loaded.
    """
    present = {name for name in given if "/" not in name}
    index, files = weight_files(present)
    wanted = present & {*SETTINGS, *TOKENIZER, index, *files}
    if not wanted & {*CONFIGS}:
        raise ModelUnavailable(NO_CONFIG)
    if wanted & {*_TOKENIZERS}:
        wanted -= {"tekken.json"}  # 15 MB, needed only if there is no other
    else:
        wanted |= {name for name in present if re.fullmatch(r"tokenizer\.model\.v\w+", name)}
    return sorted(wanted)


def weight_files(names: Collection[str]) -> tuple[str, list[str]]:
    """The index of the weights in a folder with these file names, "" if there is none, and the
    files with weights, as far as names tell. Raises ModelUnavailable or UnsupportedModel."""
    original = sorted(name for name in names if ORIGINAL.fullmatch(name))
    if INDEX in names:
        # Shards may have unusual names. Reading the index reveals a missing one.
        other = {name for name in names if SHARD_NAME.fullmatch(name)} - {*original, SINGLE}
        return INDEX, [name for name in names if re.fullmatch(_SHARD, name)] or [*other]
    if SINGLE in names:
        return "", [SINGLE]
    if not original:
        raise no_weights(names)
    return ORIGINAL_INDEX if ORIGINAL_INDEX in names else "", original


def is_gguf(name: str) -> bool:
    """Whether a file of this name is a GGUF file."""
    return name.lower().endswith(".gguf")


def gguf_of(names: Iterable[str], form: str) -> str:
    """The GGUF file of a repository whose name ends in a form, such as Q4_K_M. Raises
    ModelUnavailable."""
    files = sorted(name for name in names if is_gguf(name) and "/" not in name)
    end = re.compile(rf"(.*[-._])?{re.escape(form)}(\.gguf)?", re.IGNORECASE)
    found = [name for name in files if end.fullmatch(name.removesuffix(".gguf"))]
    if len(found) == 1:
        return found[0]
    few = ", ".join(quote(name, 60) for name in files[:8]) or "none"
    raise ModelUnavailable(
        f"{len(found) or 'no'} GGUF files end in {quote(form)}", f"the repository has: {few}"
    )


def no_weights(names: Collection[str]) -> ModelError:
    """The error for a folder with these file names, which has weights in an unsupported format or
    none at all."""
    bad = sorted(name for name in names if name.lower().endswith(_PICKLED))
    weights = [n for n in bad if n.lower() != "training_args.bin"]
    shards = sorted(name for name in names if re.fullmatch(_SHARD, name))
    if shards:
        return ModelUnavailable(
            f"{_and_more(shards)} hold weights, but {INDEX} is missing",
            "download it too: it says which tensor is in which file",
        )
    if weights:
        name = weights[0]
        if all(map(is_gguf, weights)):
            form = re.search(r"(?i)[-._]((?:iq|q|f|bf)\d\w*)\.gguf$", name)
            return ModelUnavailable(
                f"the weights are in {len(weights)} GGUF files, such as {quote(name)}",
                f"name one by its form: owner/name:{form[1] if form else 'Q4_K_M'}, or by its path",
            )
        if name.lower().endswith((".msgpack", ".h5")):
            why = "Flax and TensorFlow weights are not supported"
        else:
            why = "pickled weights are refused, because loading them can run code"
        return UnsupportedModel(
            f"{quote(name)}: {why}", "use a repository that has .safetensors files"
        )
    return ModelUnavailable("no weights found: neither model.safetensors nor an index of shards")


def unfinished(folder: Path) -> str:
    """The first broken link among the files that minikv reads; "" if there is none. It belongs to
    an unfinished download."""
    with contextlib.suppress(ModelError, OSError):
        wanted = wanted_files(os.listdir(folder))
        return next((name for name in wanted if not os.path.exists(folder / name)), "")
    return ""


def missing_files(folder: Path) -> str:
    """The first file that `folder` lacks for a complete model; "" if it lacks none. Checks names,
    not contents."""

    def has(name: str) -> bool:
        return os.path.exists(folder / name)

    if lacks := unfinished(folder):
        return lacks
    if not any(map(has, CONFIGS)):
        return "config.json"
    names = (*_TOKENIZERS, "tekken.json")
    if not any(map(has, names)) and not any(folder.glob("tokenizer.model.v*")):
        return "tokenizer.json"
    try:
        index, _ = weight_files(os.listdir(folder))
    except ModelError:
        return SINGLE
    try:
        shards = set(weight_map(folder / index).values()) if index else set[str]()
    except ModelError:
        return ""  # the file exists; loading it reports what is wrong with it
    return next((name for name in sorted(shards) if not has(name)), "")


def weight_map(path: Path) -> dict[str, str]:
    """Read an index file: the file name of the shard of each tensor, by tensor name. Raises
    CorruptModel."""
    mapping = read_json(path).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CorruptModel(f"{path.name}: weight_map is missing or empty")
    if len(mapping) > TENSOR_LIMIT:
        raise CorruptModel(f"{path.name}: more than {TENSOR_LIMIT:,} tensors are not read")
    for tensor, shard in mapping.items():
        if not isinstance(shard, str) or SHARD_NAME.fullmatch(shard) is None:
            raise CorruptModel(
                f"{path.name}: {quote(shard)} (for {quote(tensor)}) is not a plain shard name"
            )
    if len(set(mapping.values())) > _SHARD_LIMIT:
        raise CorruptModel(f"{path.name}: more than {_SHARD_LIMIT:,} files are not read")
    return mapping


def refuse_missing(index: Path, shards: Iterable[str]) -> None:
    """Raise ModelUnavailable if a file that an index names is not in the same folder. The message
    mentions weight files there that the index does not name."""
    named, folder = set(shards), index.parent
    missing = sorted(name for name in named if not os.path.exists(folder / name))
    if not missing:
        return
    other = sorted(
        name
        for name in os.listdir(folder)
        if name not in named
        and name.endswith(".safetensors")
        and not name.startswith("adapter")
        and (ORIGINAL.fullmatch(name) is not None) == (index.name == ORIGINAL_INDEX)
        and os.path.exists(folder / name)
    )
    if not other:
        raise ModelUnavailable(
            f"{missing[0]} is missing ({len(missing)} of {len(named)} shards are)",
            "complete the download",
        )
    raise ModelUnavailable(
        f"{index.name} does not fit the files here: it names {_and_more(missing)}, which are "
        f"missing, and not {_and_more(other)}, which are here",
        f"if {SINGLE} is the whole model, delete the index; if not, complete the download"
        if other == [SINGLE]
        else "get the index that belongs to these files, or the files that belong to the index",
    )


def _and_more(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"{quote(names[0])[1:-1]}{more}"


_AGAIN = "download the file again; `hf download NAME` fetches a whole model"
_POINTER = re.compile(r"version https?://(git-lfs|hawser|git-media)\b|# xet version ")
_PAGE = re.compile(r"(?is)\s*(<!--.*?-->\s*)*<(!doctype|html|head|body|\?xml|error)\b")


def refuse_stand_in(data: bytes, name: str) -> None:
    """Raise CorruptModel if a file is one of the stand-ins that some downloads leave. data: at
    least its first bytes."""
    first = _beginning(data[:1024])
    if _POINTER.match(first):
        raise CorruptModel(
            f"{name} is a Git LFS pointer, not the file itself",
            "`git clone` fetched no large files: run `git lfs pull` there, or `hf download NAME`",
        )
    # A chat template may itself begin with tags that it writes. But no template writes a doctype,
    # and the scripts of a web page may contain double braces.
    tags = "<!doctype" not in first.lower() and re.search(rb"\{[{%]", data) is not None
    if _PAGE.match(first) and not (name.endswith(".jinja") and tags):
        raise CorruptModel(
            f"{name} is a web page, not the file that should have been downloaded", _AGAIN
        )


def refuse_text(data: bytes, name: str) -> None:
    """Raise CorruptModel if a file of weights begins like a text. data: at least its first
    bytes."""
    refuse_stand_in(data, name)
    text = _beginning(data[:512])
    if text and all(sign.isprintable() or sign.isspace() for sign in text):
        said = quote(" ".join(text.split())[:60])
        raise CorruptModel(f"{name} contains text instead of weights: {said}", _AGAIN)


def _beginning(data: bytes) -> str:
    """The first bytes of a file as text, without a character that is cut off at their end. Invalid
    bytes become surrogates."""
    return codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode(data)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file (links are followed), unbuffered. Raises ModelUnavailable, CorruptModel.

    Devices and pipes are refused, because reading them could block forever.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise ModelUnavailable(f"{quote(path.name)} is missing from {path.parent}") from None
    except OSError as error:
        raise ModelUnavailable(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptModel(f"{path} is not a regular file")
    return open(fd, "rb", buffering=0)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a regular UTF-8 file. `JSON_LIMITS` limits its size.

    Raises ModelUnavailable; and CorruptModel, which names the file, for invalid JSON, NaN, a
    duplicate key, or a top level that is not an object.
    """
    return parse_json(read_bytes(path, JSON_LIMITS.get(path.name, 1 << 20)), path.name)


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises ModelUnavailable or CorruptModel."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptModel(f"{path.name}: {size:,} bytes; at most {limit:,} are read")
        try:
            data = file.read(limit + 1) or b""
        except OSError as error:
            raise unreadable(path, error) from None
    refuse_stand_in(data, path.name)
    return data


def unreadable(path: Path, error: OSError) -> ModelUnavailable:
    """The error if the system cannot read a file or a folder of a model."""
    return ModelUnavailable(
        f"{quote(path.name)[1:-1]} cannot be read: {error.strerror}",
        "the disk or network drive with the file does not respond properly",
    )


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """`read_json` for bytes that were already read. name: of the file, for messages."""
    containers = data.count(b"{") + data.count(b"[")
    items, pairs = data.count(b","), data.count(b":")
    if containers > _CONTAINERS or items > _ITEMS or pairs > _PAIRS:
        raise CorruptModel(
            f"{name}: {containers:,} lists and objects, {items:,} items and {pairs:,} pairs: no "
            "model has that many"
        )
    try:
        text = data.decode("utf-8-sig")
        del data  # usually the last reference: parsing takes much memory, and only `text` is needed
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptModel(f"{name}: not valid JSON ({quote(what)[1:-1]})", _AGAIN) from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{name}: expected a JSON object, got {type(value).__name__}", _AGAIN)
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {quote(twice)} is given twice")
    return made


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")

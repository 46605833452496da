"""Reads safetensors files into a network's tensors: every tensor exactly once, without memory maps.

Each tensor is read directly into its place, so peak memory is one copy of the weights and a small
staging buffer. A matrix that is to be packed is packed as soon as its last part was read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from minikv.models.checkpoint import (
    DTYPES,
    STAGING,
    Checkpoint,
    Entry,
    read_into,
    same,
)
from minikv.models.config import ModelConfig
from minikv.models.errors import (
    CorruptModel,
    ModelTooLarge,
    UnsupportedModel,
    UnusableSetting,
    quote,
)
from minikv.models.hub import (
    open_regular,
)
from minikv.models.limits import address_space
from minikv.models.linear import (
    FORMS,
    TORCH,
    Int4,
    Int8,
    Linear,
    Packing,
    Plain,
    fits_int8,
    kept_bytes,
    lacks,
    packed_blocks,
    packing_bytes,
    packs,
    split,
    suits,
)
from minikv.models.linear_gpu import Int4OnGpu, Int8OnGpu, kept_on
from minikv.models.llama import Layer, Llama, Place
from minikv.pages import Empty, Pages

_PackedMatrix = Int8 | Int4 | Int8OnGpu | Int4OnGpu


class Kept(Protocol):
    """Kept packed matrices: `packed.Packed`."""

    def fill(self, name: str, matrix: Int8 | Int4) -> bool:
        """Read the tensors of an empty matrix, with its bias. Returns False if they are not
        kept."""
        ...


def load_network(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    form: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    packing: Packing = TORCH,
    packed: Kept | None = None,
) -> Llama:
    """A network with the checkpoint's weights.

    dtype: None: the storage dtype. form: one of `linear.FORMS`, for the matrices of the layers;
    int8 and int4 need bfloat16. Embedding and lm_head stay plain unless the form ends in "+head":
    then lm_head is packed a block at a time as it is read, and a tied embedding is the same packed
    matrix. If rows of a matrix cannot be packed, it stays plain, and the result's `config.notes`
    say so.

    progress(done, total): called with the bytes read from the files, first with 0; its exceptions
    end the loading. packing: the functions that pack to int8 and int4. packed: kept packed
    matrices; these are neither read from the checkpoint nor packed.

    The result's `config.tied` says whether lm_head is tied: only if the file says so and `lm_head`
    is absent or equal to the embedding; `config.notes` says if the file is wrong. Raises
    CorruptModel and UnsupportedModel; also UnusableSetting and ModelTooLarge, before anything is
    allocated.
    """
    assert sys.byteorder == "little", "safetensors are little-endian"
    entries = dict(checkpoint.entries)
    dtype = dtype or checkpoint.dtype
    device = torch.device(device)
    check_form(form, device, dtype)
    head = entries.get("lm_head.weight")
    if config.tied and head is not None:
        embedding = entries.get("model.embed_tokens.weight")
        if embedding is not None and same(head, embedding):
            del entries["lm_head.weight"]
        else:
            note = "tie_word_embeddings is set, but lm_head differs from the embedding: not tied"
            config = replace(config, tied=False, notes=(*config.notes, note))
    _check_room(config, device, dtype, form)
    notes = (*config.notes, *form_notes(config, form))
    config = replace(config, notes=notes)
    with torch.inference_mode(False):
        # A network without memory. Memory is allocated for one tensor after the other.
        network = Llama(config, device=device, dtype=dtype, room=Pages(torch.device("meta")).empty)
    places = dict(network.places())
    _account(entries, places)
    done = 0
    total = sum(entries[name].end - entries[name].start for name in places)

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    tell(0)
    layers, logits = split(form)
    room = Pages(device).empty
    small = (
        ""
        if logits == "auto" or not fits_int8(config.hidden)
        else ("embedding" if config.tied else "head")
    )
    at = {id(layer): f"layers.{i}" for i, layer in enumerate(network.layers)}
    with torch.inference_mode(False), torch.no_grad():
        # One buffer for all tensors: buffers of different sizes would leave holes in the heap.
        staging = torch.empty(STAGING, dtype=torch.uint8)
        passing: Tensor | None = None  # memory for a matrix until it is packed

        def read(names: list[str]) -> None:
            for name in names:
                with open_regular(entries[name].path) as file:
                    heads = _pairs(name, config) if checkpoint.original else 0
                    _fill(file, entries[name], places[name].tensor(), heads, staging, tell)

        for names in _together_read(entries, places):
            owner, slot = places[names[0]].owner, places[names[0]].slot
            if isinstance(owner, Layer):
                part, where, kind = getattr(owner, slot), f"{at[id(owner)]}.{slot}", layers
            else:
                part, where, kind = network.head, "head", "int8" if slot == small else "plain"
            made = _empty(part, kind, room, packing, device)
            if made is None:
                _allocate(owner, slot, room)
                read(names)
                continue
            if packed is not None and isinstance(made, Int8 | Int4) and packed.fill(where, made):
                tell(sum(entries[name].end - entries[name].start for name in names))
            elif where == "head":
                _pack_head(made, entries[names[0]], dtype, tell)
            else:
                if passing is None:
                    passing = _passing(config, dtype)
                weight = passing[: made.shape.numel()].view(made.shape)
                setattr(owner, slot, Plain(weight, made.bias))
                read(names)
                made.pack(0, weight)
            if isinstance(owner, Layer):
                setattr(owner, slot, made)
            else:
                assert isinstance(made, Int8 | Int8OnGpu)
                network.keep_head(made)
        if config.tied and isinstance(network.embedding, Tensor):
            network.head = Plain(network.embedding)
    return network


def _empty(
    part: Linear | Tensor, form: str, room: Empty, packing: Packing, device: torch.device
) -> _PackedMatrix | None:
    """An empty packed matrix for `part`, a plain one without memory; None if `part` stays plain."""
    if not isinstance(part, Plain) or not suits(form, part.shape[1]):
        return None
    bias = None if part.bias is None else room(part.bias.shape, part.bias.dtype)
    made = kept_on(device, Plain(part.weight, bias), form, room, packing)
    assert isinstance(made, _PackedMatrix)
    return made


def _passing(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Memory for the largest matrix of a layer. Each matrix is read into it before it is packed, so
    that the system maps this memory only once."""
    largest = max(rows * columns for rows, columns in matrices(config).values())
    return Pages(torch.device("cpu")).empty((largest,), dtype)


def _together_read(entries: dict[str, Entry], places: dict[str, Place]) -> list[list[str]]:
    """The names in the order of the files, grouped by the tensor of the network that they fill. So
    only one matrix at a time is not packed yet, wherever its parts are."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name in sorted(places, key=lambda name: (entries[name].path, entries[name].start)):
        groups.setdefault((id(places[name].owner), places[name].slot), []).append(name)
    return list(groups.values())


def _allocate(owner: Llama | Layer, slot: str, room: Empty) -> None:
    """Allocate memory for a tensor or a matrix that has none."""

    def new(like: Tensor) -> Tensor:
        # Not empty_like, which imports sympy for tensors on the meta device: 35 MB, 0.3 seconds.
        return room(like.shape, like.dtype)

    part = getattr(owner, slot)
    if isinstance(part, Plain):
        bias = None if part.bias is None else new(part.bias)
        setattr(owner, slot, Plain(new(part.weight), bias))
    else:
        setattr(owner, slot, new(part))


def check_form(form: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UnusableSetting if weights cannot have this form with this device and dtype."""
    if form not in FORMS:
        raise UnusableSetting(f"unknown weights {form!r}", f"use {', '.join(FORMS)}")
    if not packs(form):
        return
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise UnusableSetting(
            f'`weights="{form}"` needs bfloat16 beside it, not {name}',
            'use `dtype="auto"`, or `weights="auto"`',
        )
    missing = next(filter(None, map(lacks, packs(form))), "") if device.type == "cpu" else ""
    if missing:
        raise UnusableSetting(f'`weights="{form}"`: {missing}', 'use `weights="auto"`')


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of the matrices of a layer, as the network stores them, by name."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q, k, v": (q + 2 * kv, config.hidden),
        "o": (config.hidden, q),
        "gate, up": (2 * config.mlp, config.hidden),
        "down": (config.hidden, config.mlp),
    }


def weight_bytes(config: ModelConfig, dtype: torch.dtype, form: str) -> int:
    """Bytes that the weights take on the device. A tied lm_head is counted once."""
    layers, logits = split(form)

    def saved(rows: int, columns: int, name: str) -> int:
        return rows * columns * dtype.itemsize - kept_bytes(rows, columns, name, dtype.itemsize)

    inside = sum(saved(*shape, layers) for shape in matrices(config).values())
    head = saved(config.vocab, config.hidden, logits)
    return config.parameters * dtype.itemsize - config.layers * inside - head


def packed_bytes(config: ModelConfig, form: str) -> int:
    """Bytes of all matrices that `form` packs, as on disk (`packed.Packed`)."""
    layers, logits = split(form)

    def kept(rows: int, columns: int, kind: str) -> int:
        return kept_bytes(rows, columns, kind, 2) if suits(kind, columns) else 0

    inside = sum(kept(*shape, layers) for shape in matrices(config).values())
    return config.layers * inside + kept(config.vocab, config.hidden, logits)


def form_notes(config: ModelConfig, form: str) -> list[str]:
    """Messages about matrices that `form` cannot pack, one for each packed form."""
    layers, logits = split(form)
    notes = []
    for kind in packs(form):
        shapes = matrices(config) if kind == layers else {}
        if kind == logits:
            shapes |= {"head": (config.vocab, config.hidden)}
        unpacked = [
            f"{name} (rows of {columns})"
            for name, (rows, columns) in shapes.items()
            if kept_bytes(rows, columns, kind, 2) == 2 * rows * columns
        ]
        unit = "a multiple of 16" if kind == "int8" else "a multiple of 32"
        if unpacked:
            notes.append(f"{kind} needs rows of {unit}: {', '.join(unpacked)} stay in bfloat16")
    return notes


def _account(entries: dict[str, Entry], places: dict[str, Place]) -> None:
    """Check that the checkpoint has exactly the expected tensors, with their shapes and an allowed
    dtype. Raises CorruptModel or UnsupportedModel."""
    missing = [name for name in places if name not in entries]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "config.json says that the head is not tied" if missing == ["lm_head.weight"] else ""
        raise CorruptModel(f"the weights lack {missing[0]}{more}", hint)
    for name, entry in entries.items():
        if name not in places:
            raise CorruptModel(f"{entry.path.name}: unexpected tensor {quote(entry.name)}")
        if entry.dtype not in DTYPES:
            raise UnsupportedModel(
                f"{entry.path.name}: {quote(entry.name)} is stored as {entry.dtype}",
                "use a bfloat16, float16 or float32 repository",
            )
        wants = tuple(places[name].tensor().shape)
        if entry.shape != wants:
            raise CorruptModel(
                f"{entry.path.name}: {quote(entry.name)} has shape {list(entry.shape)}, "
                f"the configuration means {list(wants)}"
            )


def _pairs(name: str, config: ModelConfig) -> int:
    """How many heads the tensor has whose rows must be reordered from rotary pairs; 0: none."""
    if ".q_proj." in name:
        return config.heads
    return config.kv_heads if ".k_proj." in name else 0


def _fill(
    file: BinaryIO,
    entry: Entry,
    place: Tensor,
    pair_heads: int,
    staging: Tensor,
    tell: Callable[[int], None],
) -> None:
    """Read one tensor into `place`, and convert its dtype, device and row order. Conversion goes
    through pieces that fit `staging`, a tensor of bytes. pair_heads: see `_pairs`."""
    file.seek(entry.start)
    stored = DTYPES[entry.dtype]
    if place.device.type == "cpu" and place.dtype == stored and not pair_heads:
        read_into(file, _bytes(place), entry.path, tell)
        return
    if pair_heads:
        # Rows of a head: (x0, y0, x1, y1, ...) in the file, (x0, x1, ..., y0, y1, ...) here.
        whole = torch.empty(entry.shape, dtype=stored)
        read_into(file, _bytes(whole), entry.path, tell)
        half = entry.shape[0] // pair_heads // 2
        rest = entry.shape[1:]
        whole = whole.view(pair_heads, half, 2, *rest).transpose(1, 2)
        place.view(pair_heads, 2, half, *rest).copy_(whole)
        return
    flat, pieces = place.view(-1), staging.view(stored)
    for start in range(0, flat.numel(), pieces.numel()):
        part = flat[start : start + pieces.numel()]
        source = pieces[: part.numel()]
        read_into(file, _bytes(source), entry.path, tell)
        part.copy_(source)


def _bytes(tensor: Tensor) -> memoryview:
    """The writable memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _pack_head(
    made: _PackedMatrix, entry: Entry, dtype: torch.dtype, tell: Callable[[int], None]
) -> None:
    """Read and pack lm_head a block of rows at a time, so that it never exists as a whole in
    `dtype`."""
    with open_regular(entry.path) as file:
        file.seek(entry.start)
        for start, end in packed_blocks(made.shape):
            part = torch.empty(end - start, made.shape[1], dtype=DTYPES[entry.dtype])
            read_into(file, _bytes(part), entry.path, tell)
            made.pack(start, part.to(dtype))


def _check_room(config: ModelConfig, device: torch.device, dtype: torch.dtype, form: str) -> None:
    """Raise ModelTooLarge if the weights do not fit, with arguments that would."""
    needs = loading_bytes(config, dtype, form)
    free = free_memory(device)
    if free is None or needs <= free:
        return
    options = [('dtype="bfloat16"', torch.bfloat16, "auto")] * (dtype == torch.float32)
    other = "" if dtype == torch.bfloat16 else 'dtype="auto", '  # packed weights are bfloat16's
    for name in ("int8", "int4"):
        # Suggest packing lm_head, too, only if packing the layers is not enough.
        fits = loading_bytes(config, torch.bfloat16, name) <= min(free, needs - 1)
        name += "" if fits else "+head"
        options.append((f'{other}weights="{name}"', torch.bfloat16, name))
    fitting = [
        f"`{arguments}` would need {_shown(size)}"
        for arguments, kind, name in options
        if (size := loading_bytes(config, kind, name)) < needs
        and size <= free
        and not (device.type == "cpu" and any(map(lacks, packs(name))))
    ]
    where = "GPU memory" if device.type == "cuda" else "memory"
    raise ModelTooLarge(
        f"the weights need {_shown(needs)} of {where}, {_shown(free)} are free",
        "; ".join([*fitting, "or a smaller model"])
        if fitting
        else "use a smaller model, or free memory",
    )


def _shown(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 // 10 else f"{size >> 20} MiB"


def loading_bytes(config: ModelConfig, dtype: torch.dtype, form: str) -> int:
    """The peak of bytes while loading: the weights, a staging buffer, and the matrix that is being
    packed (of lm_head a block)."""
    plain = 0
    if packs(form):
        sizes = matrices(config).values()
        plain = max(rows * columns for rows, columns in sizes) * dtype.itemsize
        plain += packing_bytes(max(columns for _, columns in sizes))
    return weight_bytes(config, dtype, form) + STAGING + plain


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free: int | None = None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        table = {line.split(":")[0]: line.split(":")[1].split()[0] for line in lines if ":" in line}
        free = int(table["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    known = (free, _cgroup_free(Path("/sys/fs/cgroup")), address_space())
    return min((one for one in known if one is not None), default=None)


def _cgroup_free(root: Path) -> int | None:
    """Bytes left under a container's memory limit (cgroup v2), with inactive file cache counted as
    free; None without a limit."""
    try:
        limit = int((root / "memory.max").read_text())  # "max" without a limit
        used = int((root / "memory.current").read_text())
        pairs = (line.split() for line in (root / "memory.stat").read_text().splitlines())
        cache = {key: int(value) for key, value in pairs}.get("inactive_file", 0)
    except (OSError, ValueError):
        return None
    return max(limit - used + cache, 0)

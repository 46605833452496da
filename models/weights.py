"""Reads safetensors files into a network's tensors: every tensor exactly once, without memory maps.

A tensor is read directly into its final memory, or some rows at a time, which are converted or
packed. So peak memory is one copy of the weights and some rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from minikv.models.blocks import Blocks
from minikv.models.checkpoint import DTYPES, STAGING, Checkpoint, Entry, memory, read_into, same
from minikv.models.config import ModelConfig, OwnForm
from minikv.models.errors import (
    CorruptModel,
    ModelTooLarge,
    UnsupportedModel,
    UnusableSetting,
    quote,
)
from minikv.models.files import open_regular
from minikv.models.limits import address_space
from minikv.models.linear import (
    FORMS,
    TORCH,
    Int4,
    Int8,
    Packing,
    Plain,
    blocks,
    can_pack,
    kept,
    kept_bytes,
    lacks,
    packing_bytes,
    split,
)
from minikv.models.llama import Layer, Llama
from minikv.models.quantised import adopted
from minikv.models.stored import Fused, Stored
from minikv.models.tensors import Place, places_of
from minikv.pages import Pages

TAKEN = 1 << 20
"""How many weights are read at a time, if they are converted or packed."""


def load_network(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    form: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    packing: Packing = TORCH,
) -> Llama:
    """A network with the checkpoint's weights.

    dtype: None: the storage dtype. form: one of `linear.FORMS`, for the matrices of the layers;
    int8 and int4 need bfloat16. Embedding and lm_head keep their stored form unless `form` ends in
    "+head": then lm_head is packed a block at a time as it is read, and a tied embedding is the
    same packed matrix. If rows of a matrix cannot be packed, it stays plain, and the result's
    `config.notes` say so. Quantised matrices of the checkpoint keep their form with "auto"; with
    another form they are unpacked, and packed again.

    progress(done, total): called with the bytes read from the files, first with 0; its exceptions
    end the loading. packing: the kernels that pack to int8 and int4.

    The result's `config.tied` says whether lm_head is tied: only if the file says so and `lm_head`
    is absent or equal to the embedding; `config.notes` says if the file is wrong. Raises
    CorruptModel and UnsupportedModel; also UnusableSetting and ModelTooLarge, before anything is
    allocated.
    """
    assert sys.byteorder == "little", "safetensors are little-endian"
    if config.tied is None:
        config = replace(config, tied="lm_head.weight" not in checkpoint.entries)
    checkpoint, config = adopted(checkpoint, config, form)
    entries = dict(checkpoint.entries)
    dtype = dtype or checkpoint.dtype
    device = torch.device(device)
    check_form(form, device, dtype, config)
    head = entries.get("lm_head.weight")
    if config.tied and head is not None:
        embedding = entries.get("model.embed_tokens.weight")
        alike = isinstance(head, Entry) and isinstance(embedding, Entry) and same(head, embedding)
        if alike:
            del entries["lm_head.weight"]
        else:
            note = "tie_word_embeddings is set, but lm_head differs from the embedding: not tied"
            config = replace(config, tied=False, notes=(*config.notes, note))
    _check_room(config, device, dtype, form)
    notes = (*config.notes, *form_notes(config, form))
    config = replace(config, notes=notes)
    with torch.inference_mode(False), torch.no_grad():
        # A network without memory. Memory is allocated for one tensor after another.
        network = Llama(config, device=device, dtype=dtype, room=Pages(torch.device("meta")).empty)
        places = dict(places_of(network))
        _account(entries, places)
        if checkpoint.original:
            heads = {".q_proj.": config.heads, ".k_proj.": config.kv_heads}
            for name, part in product(places, heads):
                if part in name:
                    entries[name] = replace(entries[name], heads=heads[part])
        # In the order of the files, grouped by what the tensors fill in the network. So only one
        # matrix at a time is incomplete, wherever its parts are.
        groups: dict[tuple[int, str], list[_Part]] = {}
        for name in sorted(places, key=lambda name: (entries[name].path, entries[name].start)):
            place = places[name]
            groups.setdefault((id(place.owner), place.slot), []).append((entries[name], place))
        total = sum(entries[name].size for name in places)
        filling = _Filling(network, form, packing, progress, total)
        for parts in groups.values():
            filling.fill(parts)
        if config.tied and isinstance(network.embedding, Tensor):
            network.head = Plain(network.embedding)
    return network


_Part = tuple[Stored, Place]


class _Filling:
    """Fills a network that has no memory, one tensor or matrix after another."""

    def __init__(
        self,
        network: Llama,
        form: str,
        packing: Packing,
        progress: Callable[[int, int], None] | None,
        total: int,
    ) -> None:
        """total: the bytes that will be read."""
        self.network, self.progress = network, progress
        self.layers, self.logits = split(form)
        self.packing = packing if network.device.type == "cpu" else None
        self.room = Pages(network.device).empty
        self.done, self.total = 0, total
        self.tell(0)

    def tell(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)

    def fill(self, parts: list[_Part]) -> None:
        """Read a tensor or a matrix from its parts in the files, and pack it if `form` says so.

        Memory is not allocated with empty_like, which imports sympy for tensors on the meta device:
        35 MB, 0.3 seconds."""
        owner, slot = parts[0][1].owner, parts[0][1].slot
        empty = getattr(owner, slot)
        if isinstance(empty, Plain) and empty.bias is not None:
            empty.bias = self.room(empty.bias.shape, empty.bias.dtype)
            self._read([part for part in parts if part[1].bias])
        weights = sorted(
            (part for part in parts if not part[1].bias),
            key=lambda part: part[1].rows.start or 0,  # in the matrix's order, not the file's
        )
        found = [entry for entry, _ in weights]
        made = self._packed(owner, slot, Fused(found)) if len(found[0].shape) == 2 else None
        if made is None:
            if isinstance(empty, Plain):
                empty.weight = self.room(empty.shape, empty.weight.dtype)
            else:
                setattr(owner, slot, self.room(empty.shape, empty.dtype))
            self._read(weights)
            return
        # Rows of four bits are packed in whole tiles.
        whole = all(part.shape[0] % made.tile == 0 for part in found[:-1])
        # The columns that share a scale in the file must be a multiple of these.
        group = made.group if isinstance(made, Int4) else made.shape[1]
        at = 0
        for one in found if whole else [Fused(found)]:
            raw = one if isinstance(one, Blocks) and made.takes_blocks(one.kind.number) else None
            alike = one.form == made.form and not (one.group or 0) % group
            # Threads wait for each other after every piece, so pieces of blocks are larger.
            for start, end in blocks(torch.Size(one.shape), TAKEN if raw is None else 4 * TAKEN):
                if raw is not None:
                    made.pack(at + start, raw.blocks(start, end), raw.kind.number)
                elif alike:
                    made.fill(at + start, *one.steps(start, end))
                else:
                    made.pack(at + start, one.rows(start, end))
                self._tell_rows(one, start, end)
            at += one.shape[0]
        if isinstance(owner, Layer):
            setattr(owner, slot, made)
        else:
            self.network.keep_packed(slot, made)

    def _tell_rows(self, part: Fused | Stored, start: int, end: int) -> None:
        rows = part.shape[0]
        self.tell(part.size * end // rows - part.size * start // rows)

    def _packed(self, owner: Llama | Layer, slot: str, stored: Fused) -> Int8 | Int4 | None:
        """An empty packed matrix for a plain one without memory; None if it stays plain."""
        part, asked = getattr(owner, slot), self.layers
        if owner is self.network:
            last = slot == "head" or (slot == "embedding" and self.network.config.tied)
            asked = self.logits if last or self.logits == "plain" else "auto"
        form = stored.form if asked == "auto" else asked
        group = stored.group if form == stored.form else 0
        if slot == "embedding":
            part, form = Plain(part), form.replace("int4", "int8")  # single rows are taken of it
        made = kept(part, form, self.room, self.packing, group)
        return made if isinstance(made, Int8 | Int4) else None

    def _read(self, parts: list[_Part]) -> None:
        for part, place in parts:
            into = place.tensor()
            same = isinstance(part, Entry) and into.dtype == DTYPES[part.dtype] and not part.heads
            if same and into.device.type == "cpu":
                with open_regular(part.path) as file:
                    file.seek(part.start)
                    read_into(file, memory(into), part.path, self.tell)
                continue
            for start, end in blocks(torch.Size((*into.shape, 1)[:2]), TAKEN):
                into[start:end] = part.rows(start, end)
                self._tell_rows(part, start, end)


def check_form(form: str, device: torch.device, dtype: torch.dtype, config: ModelConfig) -> None:
    """Raise UnusableSetting if weights cannot have this form with this device and dtype. config:
    the model's; "auto" means its own forms."""
    if form not in FORMS:
        raise UnusableSetting(f"unknown weights {form!r}", f"use {', '.join(FORMS)}")
    if not (forms := packed_forms(config, form)):
        return
    other = 'use `weights="plain"`' if config.stored else 'use `weights="auto"`'
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise UnusableSetting(
            f'`weights="{form}"` needs bfloat16 for the rest, not {name}',
            f'{other}, or `dtype="auto"`',
        )
    missing = next(filter(None, map(lacks, forms)), "") if device.type == "cpu" else ""
    if missing:
        raise UnusableSetting(f'`weights="{form}"`: {missing}', other)


def _shapes(config: ModelConfig, form: str) -> Iterator[tuple[int, int, OwnForm]]:
    """(rows, columns, form) of all matrices that are packed or should be packed with `form`."""
    layers, logits = split(form)
    table = config.vocab, config.hidden
    asked = {name: (*size[:2], layers, config.layers) for name, size in config.matrices.items()}
    asked["head"] = *table, logits, 1
    if not config.tied:
        asked["embedding"] = *table, "plain" if form == "plain" else "auto", 1
    for name, (rows, columns, kind, count) in asked.items():
        own = [one for one in config.stored if one.matrix == name]
        if kind != "auto" and {(one.form, one.count) for one in own} != {(kind, count)}:
            own = [OwnForm(name, kind, 0, count)]
        for one in own:
            if one.form in ("int8", "int4"):
                yield rows, columns, one


def packed_forms(config: ModelConfig, form: str) -> tuple[str, ...]:
    """The packed forms that a model has with `form`, each once."""
    return tuple(dict.fromkeys(one.form for _, _, one in _shapes(config, form)))


def weight_bytes(config: ModelConfig, dtype: torch.dtype, form: str) -> int:
    """Bytes that the weights take on the device. A tied lm_head is counted once."""
    size = dtype.itemsize
    return config.parameters * size - sum(
        one.count * (rows * columns * size - kept_bytes(rows, columns, one.form, size, one.group))
        for rows, columns, one in _shapes(config, form)
    )


def form_notes(config: ModelConfig, form: str) -> list[str]:
    """Messages about matrices that `form` cannot pack, one for each packed form, and about those
    that are quantised a second time."""
    notes = []
    own = [{one.form for one in config.stored if (one.matrix == "head") == head} for head in (0, 1)]
    asked = [form for form, has in zip(split(form), own, strict=True) if has and {form} != has]
    new = {*asked, *(split(form)[:1] if config.form and not own[0] else ())} - {"auto"}
    if new:
        again = f" and quantised again, to {' and '.join(sorted(new))}" if new != {"plain"} else ""
        notes.append(f'the file\'s {config.form} is unpacked{again}; `weights="auto"` keeps it')
    for kind in packed_forms(config, form):
        unpacked = [
            f"{one.matrix} (rows of {columns})"
            for _, columns, one in _shapes(config, form)
            if one.form == kind and not can_pack(kind, columns, one.group)
        ]
        unit = "a multiple of 16" if kind == "int8" else "a multiple of 32"
        if unpacked:
            notes.append(f"{kind} needs rows of {unit}: {', '.join(unpacked)} stay in bfloat16")
    return notes


def _account(entries: Mapping[str, Stored], places: dict[str, Place]) -> None:
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
        if isinstance(entry, Entry) and entry.dtype not in DTYPES:
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


def _check_room(config: ModelConfig, device: torch.device, dtype: torch.dtype, form: str) -> None:
    """Raise ModelTooLarge if the weights do not fit, with arguments that would."""
    needs = loading_bytes(config, dtype, form)
    free = free_memory(device)
    if free is None or needs <= free:
        return
    options = [('dtype="bfloat16"', torch.bfloat16, "auto")] * (dtype == torch.float32)
    other = "" if dtype == torch.bfloat16 else 'dtype="auto", '  # packed weights need bfloat16
    for name in ("int8", "int4"):
        # Suggest packing lm_head too only if packing the layers is not enough.
        fits = loading_bytes(config, torch.bfloat16, name) <= min(free, needs - 1)
        name += "" if fits else "+head"
        options.append((f'{other}weights="{name}"', torch.bfloat16, name))
    fitting = [
        f"`{arguments}` would need {_shown(size)}"
        for arguments, kind, name in options
        if (size := loading_bytes(config, kind, name)) < needs
        and size <= free
        and not (device.type == "cpu" and any(map(lacks, split(name))))
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
    """The peak of bytes while loading: the weights, and the rows that are read and packed."""
    widest = max(columns for _, columns, _ in config.matrices.values())
    packing = packing_bytes(widest) if packed_forms(config, form) else 0
    return weight_bytes(config, dtype, form) + STAGING + packing


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

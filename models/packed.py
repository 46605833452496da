"""Stores packed weights on disk, so that the next start reads them instead of packing again.

A file has the packed matrices of one model in one form, as safetensors; plain weights are read from
the model's own files. The file's name is a hash of the model's files and of everything else that
the packed numbers depend on, so a changed model has another name. The last tensor holds the CRC-32
of each other tensor. So a damaged file is detected when it is read, and is then replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from minikv.models import packed_files
from minikv.models.checkpoint import Checkpoint, Entry, header_of, memory, read_into
from minikv.models.config import ModelConfig
from minikv.models.errors import ModelError
from minikv.models.files import open_regular
from minikv.models.hub import Progress
from minikv.models.linear import Int4, Int8, half_tile
from minikv.models.llama import Llama
from minikv.models.packed_files import FORMAT

LEAST = 64 << 20
"""The fewest bytes of packed weights that are stored; fewer are packed in less than a second."""
SPARE = 1 << 30
"""How many bytes of the disk must stay free."""
PIECE = 4 << 20
"""How many bytes are read at a time: so few that they are still in the processor's cache for the
checksum."""
CHECKS = "checksums"

_PAGE = 4096  # bytes
_SAMPLES = 64  # pages of each file of the model that are hashed
_DTYPES = {torch.int8: "I8", torch.uint8: "U8", torch.bfloat16: "BF16"}


class Packed:
    """The stored packed weights of one model in one form. `fill` reads them; `keep` writes them if
    weights had to be packed.

    name: the model's, as the user gave it. form: one of `linear.FORMS`. If reading or writing is
    not possible, `progress.say` receives a line, and no error is raised. Exceptions in `progress`
    end the loading.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        checkpoint: Checkpoint,
        config: ModelConfig,
        form: str,
        progress: Progress | None,
    ) -> None:
        self._about = {"format": FORMAT, "model": known_as(name, folder)}
        self._about["folder"] = os.path.realpath(folder)
        self._progress = progress
        self._entries: dict[str, tuple[Entry, int]] = {}  # with their checksums
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        self._packs = False  # whether a matrix had to be packed
        try:
            store = packed_files.store()
            self._path = store / f"{key(checkpoint, config, form)}-{form}.safetensors"
        except (OSError, ModelError) as error:
            self._say(f"packed weights are neither read nor kept: {_why(error)}")
            return
        packed_files.clear()
        try:
            self._path.stat()  # raises FileNotFoundError; `open_regular` would raise ModelError
            self._file = open_regular(self._path)
            self._entries = _checked(self._file, self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._say(f"the packed weights that were kept cannot be read: {_why(error)}")
            self.close()
        except (ModelError, ValueError) as error:
            self._damaged(error)

    def fill(self, name: str, matrix: Int8 | Int4) -> bool:
        """Read the tensors of an empty matrix. Returns False if they are not stored, so that the
        matrix must be packed."""
        if self._file is not None:
            try:
                for part, tensor in matrix.parts().items():
                    self._read(f"{name}.{part}", tensor)
                return True
            except (ModelError, KeyError, ValueError) as error:
                self._damaged(error)
        self._packs = True
        return False

    def _read(self, name: str, place: Tensor) -> None:
        """Read one tensor into `place` and check it. Raises ModelError, KeyError or
        ValueError."""
        assert self._file is not None
        entry, right = self._entries[name]
        if entry.shape != tuple(place.shape) or entry.dtype != _DTYPES[place.dtype]:
            raise ValueError(f"{name} has another shape")
        self._file.seek(entry.start)
        check = 0
        for piece in _pieces(place):
            read_into(self._file, piece, entry.path)
            check = zlib.crc32(piece, check)
        if check != right:
            raise ValueError(f"{name} has another checksum")

    def _damaged(self, error: Exception) -> None:
        self.close()
        self._say(f"the packed weights that were kept are damaged ({_why(error)}): packing again")

    def _say(self, line: str) -> None:
        if self._progress is not None:
            self._progress.say(line)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def keep(self, network: Llama) -> None:
        """If a matrix was packed, write all packed matrices."""
        self.close()
        if self._path is None or not self._packs:
            return
        parts = dict(_parts(network))
        needs = sum(part.nbytes for part in parts.values())
        if needs < LEAST:
            return
        try:
            why = self._write(self._path, parts, needs)
        except OSError as error:
            why = _why(error)
        if why:
            self._say(f"the packed weights are not kept, and the next start packs again: {why}")

    def _write(self, path: Path, parts: Mapping[str, Tensor], needs: int) -> str:
        """Write the file. Returns "", or why nothing was written. Raises OSError."""
        folder = path.parent
        packed_files.make(folder)
        free = shutil.disk_usage(folder).free
        if free < needs + SPARE:
            return f"they take {_gib(needs)}, and {_gib(free)} of the disk are free ({folder})"
        self._say(
            f"keeping the packed weights for the next start: {_gib(needs)} in {folder}, "
            f'{_gib(free)} free (`keep_packed="off"` keeps none)'
        )
        part = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.part")
        try:
            new = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(new, "wb") as file:
                write(file, parts, self._about, self._progress)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return ""


def key(checkpoint: Checkpoint, config: ModelConfig, form: str) -> str:
    """A hash of everything that the packed numbers depend on. For the model's files it includes
    names, sizes, samples, both times (of modification and of status change) and inode numbers. So a
    file that was replaced has another key, even if its modification time is the same. Raises
    OSError or ModelError."""
    layout = ""
    if form.startswith("int4"):  # which depends on the processor
        half = half_tile()
        torchs = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
        layout = torchs if half is None else f"tiles of {2 * half}"
    digest = hashlib.sha256(f"{FORMAT}\n{form}\n{layout}\n".encode())
    facts = (checkpoint.original, config.heads, config.kv_heads)
    digest.update(f"{facts} {config.tied}\n".encode())
    for path in sorted({entry.path for entry in checkpoint.entries.values()}):
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            times = f"{about.st_mtime_ns} {about.st_ctime_ns}"
            # Not st_dev, which on some file systems changes with every boot.
            digest.update(f"{path.name} {about.st_size} {times} {about.st_ino}\n".encode())
            for i in range(_SAMPLES):
                file.seek(max(0, about.st_size - _PAGE) * i // (_SAMPLES - 1))
                digest.update(file.read(_PAGE))
    return digest.hexdigest()[:32]


def known_as(name: str, folder: Path) -> str:
    """A name that identifies the model: the hub id, or the real path of a directory, which the user
    may have named "." or "./model"."""
    place = os.path.realpath(folder)
    return place if os.path.realpath(os.path.expanduser(name)) == place else name


def _checked(file: BinaryIO, path: Path) -> dict[str, tuple[Entry, int]]:
    """The tensors of an open file and their checksums, by name. Raises OSError, ModelError or
    ValueError."""
    about = os.fstat(file.fileno())
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise ValueError("others may write to it")
    entries = header_of(file, path)
    last = entries.pop(CHECKS, None)
    if last is None or last.size != 4 * len(entries):
        raise ValueError("it has no checksums")
    file.seek(last.start)
    checks = memoryview(file.read(last.size)).cast("I")
    return {name: (entries[name], check) for name, check in zip(entries, checks, strict=True)}


def write(
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, str],
    progress: Progress | None,
) -> None:
    """Write tensors to a new file as safetensors, with their checksums in the last tensor. about:
    metadata. Raises OSError."""
    header: dict[str, object] = {"__metadata__": dict(about)}
    kinds = {name: (_DTYPES[t.dtype], list(t.shape), t.nbytes) for name, t in tensors.items()}
    kinds[CHECKS] = ("U32", [len(tensors)], 4 * len(tensors))
    total = end = 0
    for name, (kind, shape, size) in kinds.items():
        total, end = end, end + size  # in the end, `total` is that of the weights
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [total, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    checks, done = [], 0
    for tensor in tensors.values():
        check = 0
        for piece in _pieces(tensor):
            if progress is not None:
                progress.packed_weights(done, total)
            check = zlib.crc32(piece, check)
            file.write(piece)
            done += len(piece)
        checks.append(check)
    if progress is not None:
        progress.packed_weights(done, total)
    file.write(b"".join(check.to_bytes(4, "little") for check in checks))


def _parts(network: Llama) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all packed matrices, by the names with which `fill` reads them."""
    owners = [(f"layers.{i}.", layer, layer.__slots__) for i, layer in enumerate(network.layers)]
    for prefix, owner, slots in (*owners, ("", network, ("head",))):
        for slot in slots:
            if isinstance(matrix := getattr(owner, slot), Int8 | Int4):
                for part, tensor in matrix.parts().items():
                    yield f"{prefix}{slot}.{part}", tensor


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a contiguous tensor, in pieces of `PIECE` bytes."""
    data = memory(tensor)
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


def _why(error: Exception) -> str:
    """The reason for an error, in a few words."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

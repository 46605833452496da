"""Finds a model's folder by its name, and reads its files safely.

A directory is used in place. A hub id (owner/name) is looked up in the local cache first, then on
the network, and only the files that minikv reads are downloaded. No code from a model is executed.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

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
    "model.safetensors.index.json": 16 << 20,
    "consolidated.safetensors.index.json": 16 << 20,
    "tokenizer_config.json": 8 << 20,
    "added_tokens.json": 8 << 20,
}
"""The largest JSON files that are read, in bytes; 1 MiB for any other. Real files have at most
about half of it."""
_JSON_LIMIT = 1 << 20
TENSOR_LIMIT, _SHARD_LIMIT = 100_000, 4096
"""The most tensors and files of a model. The largest real ones have a tenth of it."""
_CONTAINERS, _ITEMS, _PAIRS = 1_000_000, 3_000_000, 1_000_000
"""The most lists and objects, commas, and colons of one file. When a file is parsed, a list or an
item of one takes some tens of bytes, and a pair of an object up to 350. The largest real
vocabularies have half as many lists and items, and six tenths as many pairs."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHECKSUM = re.compile(r"[0-9a-fA-F]{1,128}")
_REVISION = re.compile(r"[\w][\w./+-]{0,254}", re.ASCII)
_TEXT_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "params.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "tekken.json",
    }
)
_CONFIGS = ("config.json", "params.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_SHARD = r"model-\d+-of-\d+\.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are. revision: the commit of a hub model; None for a directory."""

    name: str
    folder: Path
    revision: str | None


class Progress(Protocol):
    """Gets the progress of loading a model. Sizes are in bytes.

    The methods of one object are never called at the same time, but `download` is called from other
    threads. An exception of a method ends the loading and reaches the caller unchanged.
    """

    def planned(self, files: int, size: int, free: int | None) -> None:
        """Called before a download. files and size: what it will fetch. free: bytes free on the
        cache's disk, None if not known."""

    def download(self, done: int, total: int) -> None: ...
    def weights(self, done: int, total: int) -> None: ...
    def packed_weights(self, done: int, total: int) -> None:
        """How much of the packed weights has been written to disk."""

    def say(self, line: str) -> None:
        """A message for the user, in one line."""


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Source:
    """Find `model`: an existing directory, or a hub id (cache first, then network).

    With `offline` (or HF_HUB_OFFLINE=1) the network is not used. With `progress`, a download is
    refused before it begins if the cache's disk has no room for it. Raises ModelUnavailable or
    UnsupportedModel.
    """
    found = _named(model, revision)
    if isinstance(found, Path):
        if lacks := unfinished(found):
            raise ModelUnavailable(
                f"{lacks} in {quote(os.fspath(model))} is a link to a file that is not there",
                "complete the download",
            )
        return Source(os.fspath(model), found, None)
    return _from_hub(found, revision, _offline(offline), progress)


def configuration(model: str | Path, *, revision: str | None = None, offline: bool = False) -> Path:
    """The folder with the config.json (or params.json) of `model`. No other file of a hub model is
    downloaded. Raises ModelUnavailable or UnsupportedModel."""
    found = _named(model, revision)
    if isinstance(found, Path):
        return found
    hub = _hub(found, _offline(offline))
    folder = _cached(hub, found, revision)
    if folder is not None:
        return folder
    at = _at(revision)
    if _offline(offline):
        raise ModelUnavailable(
            f"{found}{at} is not in the local cache, and offline mode is on",
            "run once without `offline=True` (and without HF_HUB_OFFLINE); "
            "only config.json is fetched",
        )
    with _told(found, revision), _checked(found):
        # This request is sent once. The library repeats the next one for half a minute.
        info = hub.HfApi().model_info(found, revision=revision)
        names = {sibling.rfilename for sibling in info.siblings or ()}
        wanted = next((name for name in _CONFIGS if name in names), None)
        if wanted is None:
            raise no_weights(names) if any(map(_is_gguf, names)) else _no_config()
        return Path(hub.hf_hub_download(found, wanted, revision=revision)).parent


def _named(model: str | Path, revision: str | None) -> Path | str:
    """The existing directory or the hub id that `model` names. Raises ModelUnavailable or
    UnsupportedModel."""
    text = os.fspath(model)
    try:
        folder = Path(text).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; no home directory
        why = getattr(error, "strerror", None) or str(error)
        raise ModelUnavailable(f"model {quote(text)} not found: {why}") from None
    if text and is_folder:
        _refuse_gguf(folder)
        return folder
    if text and exists:
        if _is_gguf(folder.name):
            raise gguf(folder.name)
        raise ModelUnavailable(
            f"{quote(text)} is a file, not a model", "give the directory that holds config.json"
        )
    if isinstance(model, Path) or _HUB_ID.fullmatch(text) is None or _is_pathlike(text):
        raise ModelUnavailable(
            f"model {quote(text)} not found: no such directory",
            "give a directory, or a hub id such as meta-llama/Llama-3.1-8B-Instruct",
        )
    if revision is not None and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise ModelUnavailable(
            f"{quote(revision)} is not a revision", "give a branch, tag or full commit hash"
        )
    return text


def _offline(asked: bool) -> bool:
    """Whether the network must not be used, because of the caller or HF_HUB_OFFLINE."""
    return asked or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _refuse_gguf(folder: Path) -> None:
    """Raise UnsupportedModel for a directory that has a GGUF file and no configuration."""
    if any((folder / name).exists() for name in _CONFIGS):
        return
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if _is_gguf(name):
                raise gguf(name)


def gguf(name: str) -> UnsupportedModel:
    """The error for a GGUF file, if there are no weights of another kind."""
    return UnsupportedModel(
        f"{quote(name)} is a GGUF file, which minikv does not read",
        "use the model that it was made from, in the repository with the .safetensors files; "
        '`weights="int4"` makes that small while it is loaded',
    )


def _is_pathlike(text: str) -> bool:
    return text.startswith((".", "~", "/")) or "\\" in text or ".." in text


def _from_hub(repo: str, revision: str | None, offline: bool, progress: Progress | None) -> Source:
    hub = _hub(repo, offline)
    folder = _snapshot(hub, repo, revision)
    if folder is not None and not missing_files(folder):
        return Source(repo, folder, folder.name)
    at = _at(revision)
    if offline:
        lacks = missing_files(folder) if folder is not None else ""
        state = (
            f"only partly in the local cache ({lacks} missing)"
            if lacks
            else ("not in the local cache")
        )
        raise ModelUnavailable(
            f"{repo}{at} is {state}, and offline mode is on",
            "run once without `offline=True` (and without HF_HUB_OFFLINE) to download it",
        )
    watched = None if progress is None else _Watched(progress)
    try:
        folder = _download(hub, repo, revision, watched)
    except ModelError:
        if watched is not None and watched.stopped is not None:
            raise watched.stopped from None  # `progress` raised it; the hub did not fail
        raise
    lacks = missing_files(folder)
    if lacks:
        raise ModelUnavailable(f"{repo}{at} has no {quote(lacks)}", "it is not a complete model")
    return Source(repo, folder, folder.name)


def _hub(repo: str, offline: bool) -> Any:
    """The module huggingface_hub. Raises ModelUnavailable if it cannot be imported."""
    if offline and "huggingface_hub" not in sys.modules:
        # The library reads this once, when it is first imported. It is an additional safeguard:
        # when offline, this module only looks into the cache anyway.
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import huggingface_hub
    except ImportError as error:  # an installation without its dependencies
        raise ModelUnavailable(f"{repo}: huggingface-hub is not usable: {error}") from None
    return huggingface_hub


def _at(revision: str | None) -> str:
    return f" at revision {quote(revision)}" if revision else ""


def _cached(hub: Any, repo: str, revision: str | None) -> Path | None:
    """The model's folder in the cache, complete or not; None if there is none. Does not use the
    network."""
    for name in _CONFIGS:
        found = hub.try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _snapshot(hub: Any, repo: str, revision: str | None) -> Path | None:
    """`_cached`, if the folder has the name of a commit, which is shown and stored."""
    folder = _cached(hub, repo, revision)
    return folder if folder is not None and _COMMIT.fullmatch(folder.name) else None


def _download(hub: Any, repo: str, revision: str | None, watched: _Watched | None) -> Path:
    with _told(repo, revision), _checked(repo):
        # The hub sends sizes only on request, and only `progress` needs them.
        options = {} if watched is None else {"files_metadata": True}
        info = hub.HfApi().model_info(repo, revision=revision, **options)
        wanted = wanted_files([sibling.rfilename for sibling in info.siblings or ()])
        bars = {}
        if watched is not None:
            watched.plan(*_to_fetch(hub, repo, info, wanted), Path(hub.constants.HF_HUB_CACHE))
            bars = {"tqdm_class": watched.bar(hub)}
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=wanted, **bars))


_DOWNLOADING = threading.Lock()


@contextlib.contextmanager
def _checked(repo: str) -> Iterator[None]:
    """Within this context, the hub's library makes no path of what the hub sends, unless it is
    hexadecimal. Raises CorruptModel there, and ModelUnavailable for a library with other functions.

    The library takes the hub's word for the commit and for each file's checksum, and makes names of
    files and folders of them. It also notes which files do not exist, under a name that cannot be
    checked here; without a folder, it does not.
    """
    from huggingface_hub import file_download, hf_api

    try:
        metadata, info = file_download._get_metadata_or_catch_error, hf_api.HfApi.repo_info
    except AttributeError:
        raise ModelUnavailable(
            f"{repo}: minikv cannot check what this version of huggingface-hub downloads",
            "install the version in minikv's constraints.txt, or give a directory",
        ) from None

    def checked_metadata(**asked: Any) -> Any:
        answer = metadata(**{**asked, "storage_folder": None})
        _, checksum, commit, *_ = answer
        _check_name(repo, "commit", commit, _COMMIT)
        _check_name(repo, "checksum", checksum, _CHECKSUM)
        return answer

    def checked_info(*args: Any, **asked: Any) -> Any:
        answer = info(*args, **asked)
        _check_name(repo, "commit", answer.sha, _COMMIT)
        return answer

    with _DOWNLOADING:  # the library is changed for all threads
        file_download._get_metadata_or_catch_error = checked_metadata
        hf_api.HfApi.repo_info = checked_info  # type: ignore[method-assign]
        try:
            yield
        finally:
            file_download._get_metadata_or_catch_error = metadata
            hf_api.HfApi.repo_info = info  # type: ignore[method-assign]


def _check_name(repo: str, what: str, name: object, wanted: re.Pattern[str]) -> None:
    """Raise CorruptModel if the hub sent a name of another form. None: it sent none."""
    if name is not None and not (isinstance(name, str) and wanted.fullmatch(name)):
        raise CorruptModel(
            f"{repo}: the hub sent a {what} that is not hexadecimal: {quote(name)}",
            "nothing was written under that name; check HF_ENDPOINT, and who answers there",
        )


@contextlib.contextmanager
def _told(repo: str, revision: str | None) -> Iterator[None]:
    """Within this context, errors of the hub's library become ModelUnavailable."""
    from huggingface_hub import errors

    at = _at(revision)
    # GatedRepoError is a RepositoryNotFoundError, and most are HfHubHTTPError: the order matters.
    try:
        yield
    except errors.GatedRepoError:
        raise ModelUnavailable(
            f"{repo} is gated: its owner must grant you access",
            f"accept the terms at https://huggingface.co/{repo} and log in with `hf auth login`",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelUnavailable(
            f"{repo} has no revision {quote(revision)}", "give a branch, tag or full commit hash"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelUnavailable(
            f"{repo} not found: no such directory here, and no such model on the hub (or private)",
            "check the spelling; for a private model log in with `hf auth login`",
        ) from None
    except errors.DisabledRepoError:
        raise ModelUnavailable(f"{repo} was disabled on the hub") from None
    except errors.HFValidationError:
        raise ModelUnavailable(f"{quote(repo)} is not a valid hub id", "owner/name") from None
    except errors.OfflineModeIsEnabled:
        raise ModelUnavailable(
            f"{repo}{at} is not in the local cache, and offline mode is on",
            "unset HF_HUB_OFFLINE to download it",
        ) from None
    except errors.EntryNotFoundError as error:
        if not isinstance(error, errors.LocalEntryNotFoundError):
            raise ModelUnavailable(
                f"{repo}{at}: a file vanished from the hub during the download", "try again"
            ) from None
        raise ModelUnavailable(
            f"{repo}{at}: the hub cannot be reached, and the local cache does not have all of it",
            "check the network; finished files are kept, and a model directory works without one",
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        raise ModelUnavailable(
            f"{repo}{at}: the hub answered with HTTP status {status or 'unknown'}",
            "try again later; finished files are kept",
        ) from None
    except ModelError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelUnavailable(
                f"{repo}{at}: the disk is full", "free space, or set HF_HOME to another disk"
            ) from None
        raise _unreachable(repo, at, error) from None
    except Exception as error:  # the HTTP library's own errors, which depend on its version
        raise _unreachable(repo, at, error) from None


def _unreachable(repo: str, at: str, error: Exception) -> ModelUnavailable:
    # The error's own text is left out: it may contain addresses with access tokens.
    return ModelUnavailable(
        f"{repo}{at}: the download failed ({type(error).__name__})",
        "check the network; finished files are kept, and a model directory works without one",
    )


class _Watched:
    """Reports one download to a Progress: bytes summed over all files and threads."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.total = 0
        self.done = 0
        self.stopped: BaseException | None = None
        self._lock = threading.Lock()

    def plan(self, files: int, size: int, cache: Path) -> None:
        """Announce the download. Raises ModelUnavailable if the disk of `cache` is too small."""
        free = _free_disk(cache)
        gib = 2**30
        if free is not None and size > free:
            raise ModelUnavailable(
                f"the download takes {size / gib:.1f} GiB in {files} files, and only "
                f"{free / gib:.1f} GiB are free on the disk of {cache}",
                "free space, or set HF_HOME to a directory on another disk",
            )
        self.total = size
        if files:
            self._call(lambda: self.progress.planned(files, size, free))

    def count(self, done: float) -> None:
        """Called when a progress bar of the library is at `done` bytes."""
        with self._lock:
            if done <= self.done:
                return  # it has a bar for bytes received and one for bytes written: take the larger
            self.done = int(done)
            total = max(self.total, self.done)
            self._call(lambda: self.progress.download(self.done, total))

    def _call(self, tell: Callable[[], None]) -> None:
        if self.stopped is not None:
            raise self.stopped  # `progress` raised in another thread: stop this one, too
        try:
            tell()
        except BaseException as error:
            self.stopped = error
            raise

    def bar(self, hub: Any) -> type:
        """A progress bar class for the library that draws nothing and calls `count`."""
        watched = self

        class Bar(hub.utils.tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.counts = kwargs.get("unit") == "B"  # the other bar counts files
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> None:
                with watched._lock:
                    self.n += n or 0
                if self.counts:
                    watched.count(self.n)

        return Bar


def _to_fetch(hub: Any, repo: str, info: Any, wanted: list[str]) -> tuple[int, int]:
    """How many of the wanted files are not in the cache, and their bytes as far as the hub states
    them."""
    root = Path(hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    files = size = 0
    for sibling in info.siblings or ():
        if sibling.rfilename not in wanted:
            continue
        large = getattr(sibling, "lfs", None)
        blob = getattr(large, "sha256", None) or getattr(sibling, "blob_id", None)
        if blob and _CHECKSUM.fullmatch(blob) and (root / "blobs" / blob).exists():
            continue
        files += 1
        size += getattr(sibling, "size", None) or 0
    return files, size


def _free_disk(folder: Path) -> int | None:
    """Bytes free on the disk where `folder` is or will be; None if the system does not say."""
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def wanted_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that minikv reads. names: all its files.

    Only top-level files, and additional chat templates. If both layouts of the weights exist, the
    Hugging Face one; never pickles. Raises ModelUnavailable or UnsupportedModel if nothing can be
    loaded.
    """
    present = {name for name in names if "/" not in name}
    wanted = present & _TEXT_FILES
    shards = {name for name in present if re.fullmatch(_SHARD, name)}
    original = {name for name in present if ORIGINAL.fullmatch(name)}
    if INDEX in present:
        # Shards may have unusual names. A missing one is found when the index is read.
        other = {n for n in present if SHARD_NAME.fullmatch(n)} - original - {SINGLE}
        wanted |= {INDEX} | (shards or other)
    elif SINGLE in present:
        wanted |= {SINGLE}
    elif original:
        wanted |= original | (present & {ORIGINAL_INDEX})
    else:
        raise no_weights(present)
    if not wanted & {*_CONFIGS}:
        raise _no_config()
    if not wanted & {"tokenizer.json", "tokenizer.model"}:
        wanted |= {name for name in present if re.fullmatch(r"tokenizer\.model\.v\w+", name)}
    wanted |= {n for n in names if re.fullmatch(r"additional_chat_templates/[\w.-]+\.jinja", n)}
    return sorted(wanted)


def _no_config() -> ModelUnavailable:
    return ModelUnavailable("the repository has no config.json: it holds no model")


def no_weights(names: Collection[str]) -> ModelError:
    """The error for a folder with these file names: it has weights in an unsupported format, or
    none at all."""
    bad = sorted(name for name in names if name.lower().endswith(_PICKLED))
    weights = [n for n in bad if n.lower() != "training_args.bin"]
    shards = sorted(name for name in names if re.fullmatch(_SHARD, name))
    if shards:
        return ModelUnavailable(
            f"{_and_more(shards)} hold weights, but {INDEX} is missing",
            "download it, too: it says which file holds what",
        )
    if weights:
        name = weights[0]
        if all(map(_is_gguf, weights)):
            return gguf(name)
        if name.lower().endswith((".msgpack", ".h5")):
            why = "Flax and TensorFlow weights are not supported"
        else:
            why = "pickled weights are refused, because loading them can run code"
        return UnsupportedModel(
            f"{quote(name)}: {why}", "use a repository that has .safetensors files"
        )
    return ModelUnavailable("no weights found: neither model.safetensors nor an index of shards")


def model_files(folder: Path) -> list[str]:
    """The names of the files in `folder` that minikv reads, also of links to files that are not
    there. Raises ModelError if there is no model."""
    try:
        names = [
            path.relative_to(folder).as_posix()
            for parent in (folder, folder / "additional_chat_templates")
            if parent.is_dir()
            for path in parent.iterdir()
        ]
    except OSError as error:
        raise unreadable(folder, error) from None
    return wanted_files(names)


def unfinished(folder: Path) -> str:
    """The first link to a file that is not there, among the files that minikv reads; "" if there is
    none. Such a file is a part of the model, and its download did not end."""
    with contextlib.suppress(ModelError):
        return next((n for n in model_files(folder) if not os.path.exists(folder / n)), "")
    return ""


def missing_files(folder: Path) -> str:
    """The first file that `folder` lacks for a complete model; "" if it lacks none. Checks names,
    not contents."""

    def has(name: str) -> bool:
        return os.path.exists(folder / name)

    if lacks := unfinished(folder):
        return lacks
    if not (has("config.json") or has("params.json")):
        return "config.json"
    names = (*_TOKENIZERS, "tekken.json")
    if not any(map(has, names)) and not any(folder.glob("tokenizer.model.v*")):
        return "tokenizer.json"
    for index in (INDEX, ORIGINAL_INDEX):
        if has(index):
            try:
                shards = weight_map(folder / index).values()
            except ModelError:
                return ""  # the file exists; loading it reports what is wrong with it
            return next((name for name in sorted(set(shards)) if not has(name)), "")
        if index == INDEX and has(SINGLE):
            return ""
    if any(ORIGINAL.fullmatch(path.name) for path in folder.iterdir()):
        return ""
    return SINGLE


def weight_map(path: Path) -> dict[str, str]:
    """Read an index file: the file name of the shard of each tensor, by tensor name. Raises
    CorruptModel."""
    data = read_bytes(path, JSON_LIMITS.get(path.name, _JSON_LIMIT))
    if data.count(b":") > TENSOR_LIMIT + 1000:
        raise CorruptModel(f"{path.name}: more than {TENSOR_LIMIT:,} tensors are not read")
    mapping = parse_json(data, path.name).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CorruptModel(f"{path.name}: weight_map is missing or empty")
    for tensor, shard in mapping.items():
        if not isinstance(shard, str) or SHARD_NAME.fullmatch(shard) is None:
            raise CorruptModel(
                f"{path.name}: {quote(shard)} (for {quote(tensor)}) is not a plain shard name"
            )
    if len(set(mapping.values())) > _SHARD_LIMIT:
        raise CorruptModel(f"{path.name}: more than {_SHARD_LIMIT:,} files are not read")
    return mapping


def refuse_missing(index: Path, shards: Iterable[str]) -> None:
    """Raise ModelUnavailable if a file that an index names is not beside it. The message says
    whether other files are, which it does not name."""
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
_STAND_INS = (
    (
        re.compile(rb"version https?://(git-lfs|hawser|git-media)\b|# xet version "),
        "is a Git LFS pointer, not the file that it stands for",
        "`git clone` fetched no large files: run `git lfs pull` there, or `hf download NAME`",
    ),
    (
        re.compile(rb"(/|(\.\./)*\.git/)annex/objects/|outs:\s+- md5:"),
        "is a git-annex or DVC pointer, not the file that it stands for",
        "run `git annex get` or `dvc pull` there, or `hf download NAME`",
    ),
    (
        re.compile(
            rb"\s*(<!--.*?-->\s*)*<(!doctype|html|head|body|\?xml|error)\b",
            re.IGNORECASE | re.DOTALL,
        ),
        "is a web page, not the file that was to be downloaded",
        _AGAIN,
    ),
)


def refuse_stand_in(data: bytes, name: str) -> None:
    """Raise CorruptModel if a file holds what some downloads leave in its place. data: at least its
    first bytes."""
    first = _beginning(data[:1024]).encode("utf-8", "surrogateescape")
    for pattern, what, hint in _STAND_INS:
        if pattern.match(first) and not (name.endswith(".jinja") and _is_template(first, data)):
            raise CorruptModel(f"{name} {what}", hint)


def _is_template(first: bytes, data: bytes) -> bool:
    """Whether tags at the beginning of a file are those that its chat template writes. No template
    writes a doctype, and the scripts of a web page may have two braces."""
    return b"<!doctype" not in first.lower() and re.search(rb"\{[{%]", data) is not None


def refuse_text(data: bytes, name: str) -> None:
    """Raise CorruptModel if a file of weights begins as a text. data: at least its first bytes."""
    refuse_stand_in(data, name)
    text = _beginning(data[:512])
    if text and all(sign.isprintable() or sign.isspace() for sign in text):
        said = quote(" ".join(text.split())[:60])
        raise CorruptModel(f"{name} holds a text in place of the weights: {said}", _AGAIN)


def _beginning(data: bytes) -> str:
    """The first bytes of a file as text, but for a character that is cut at their end. What is not
    valid becomes surrogates."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding, errors = ("utf-16", "replace") if wide else ("utf-8-sig", "surrogateescape")
    return codecs.getincrementaldecoder(encoding)(errors).decode(data)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file (links are followed), unbuffered. Raises ModelUnavailable, CorruptModel.

    Devices and pipes are refused, because reading them could block for ever.
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

    Raises CorruptModel, which names the file, also for NaN, a duplicate key, or a top level that is
    not an object; and ModelUnavailable.
    """
    return parse_json(read_bytes(path, JSON_LIMITS.get(path.name, _JSON_LIMIT)), path.name)


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
        "the disk or the network drive that it is on does not answer as it should",
    )


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """`read_json` for bytes that were already read. name: of the file, for messages."""
    containers = data.count(b"{") + data.count(b"[")
    items, pairs = data.count(b","), data.count(b":")
    if containers > _CONTAINERS or items > _ITEMS or pairs > _PAIRS:
        raise CorruptModel(
            f"{name}: {containers:,} lists and objects, {items:,} items and {pairs:,} pairs: no "
            "model has so many"
        )
    try:
        text = data.decode("utf-8-sig")
        del data  # usually the last reference: `text` is enough, and parsing takes much memory
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptModel(f"{name}: not valid JSON ({quote(what)[1:-1]})", _AGAIN) from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{name}: expected a JSON object, got {type(value).__name__}", _AGAIN)
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"key {quote(key)} is given twice")
        made[key] = value
    return made


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")

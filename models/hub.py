"""Finds a model's folder by its name.

A directory or a GGUF file is used in place. A hub id (owner/name) is looked up in the local cache
first, then on the network, and only the files that minikv reads are downloaded. No code from a
model is executed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from minikv.models import places
from minikv.models.errors import CorruptModel, ModelError, ModelUnavailable, quote
from minikv.models.files import (
    CONFIGS,
    NO_CONFIG,
    gguf_of,
    is_gguf,
    missing_files,
    no_weights,
    unfinished,
    wanted_files,
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}(:[\w.-]{1,64})?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHECKSUM = re.compile(r"[0-9a-fA-F]{1,128}")
_PATHLIKE = re.compile(r"[.~/]|.*(\\|\.\.)", re.DOTALL)
_REVISION = re.compile(r"[\w][\w./+-]{0,254}", re.ASCII)
_NETWORK = "check the network; finished files are kept, and a model directory needs no network"
_FAILURES = (
    # Errors of huggingface_hub with message and hint. A GatedRepoError is a
    # RepositoryNotFoundError, and most are HfHubHTTPError: the order matters.
    (
        "GatedRepoError",
        "{repo} is gated: its owner must grant you access",
        "accept the terms at https://huggingface.co/{repo} and log in with `hf auth login`",
    ),
    (
        "RevisionNotFoundError",
        "{repo} has no revision {revision}",
        "give a branch, tag or full commit hash",
    ),
    (
        "RepositoryNotFoundError",
        "{repo} not found: no such directory here, and no such model on the hub (or private)",
        "check the spelling; for a private model log in with `hf auth login`",
    ),
    ("DisabledRepoError", "{repo} was disabled on the hub", ""),
    ("HFValidationError", "{name} is not a valid hub id", "owner/name"),
    (
        "OfflineModeIsEnabled",
        "{repo}{at} is not in the local cache, and offline mode is on",
        "unset HF_HUB_OFFLINE to download it",
    ),
    (
        "LocalEntryNotFoundError",
        "{repo}{at}: the hub cannot be reached, and the local cache does not have all of it",
        _NETWORK,
    ),
    (
        "EntryNotFoundError",
        "{repo}{at}: a file vanished from the hub during the download",
        "try again",
    ),
    (
        "HfHubHTTPError",
        "{repo}{at}: the hub answered with HTTP status {status}",
        "try again later; finished files are kept",
    ),
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are. revision: the commit of a hub model; None for a directory."""

    name: str
    folder: Path
    revision: str | None


class Progress(Protocol):
    """Receives the progress of loading a model. Sizes are in bytes.

    The methods of one object are never called at the same time, but `download` is called from other
    threads. An exception in a method ends the loading and reaches the caller unchanged.
    """

    def planned(self, files: int, size: int, free: int | None) -> None:
        """Called before a download of `files` files and `size` bytes. free: bytes free on the
        cache's disk, None if not known."""

    def download(self, done: int, total: int) -> None: ...
    def weights(self, done: int, total: int) -> None: ...
    def say(self, line: str) -> None:
        """A message for the user, in one line."""


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Source:
    """Find `model`: an existing directory or GGUF file, a GGUF file of another program (`places`),
    or a hub id (cache first, then network), which may end with the form of a GGUF file:
    owner/name:Q4_K_M.

    With `offline` (or HF_HUB_OFFLINE=1) the network is not used. With `progress`, a download is
    refused beforehand if the cache's disk has no room for it. Raises ModelUnavailable or
    UnsupportedModel.
    """
    found = _named(model, revision)
    if isinstance(found, Path):
        if found.is_dir() and (lacks := unfinished(found)):
            raise ModelUnavailable(
                f"{lacks} in {quote(os.fspath(model))} is a link to a missing file",
                "complete the download",
            )
        return Source(os.fspath(model), found, None)
    return _from_hub(found, revision, _offline(offline), progress)


def configuration(model: str | Path, *, revision: str | None = None, offline: bool = False) -> Path:
    """The folder with the config.json (or params.json) of `model`. No other file of a hub model is
    downloaded. Raises ModelUnavailable or UnsupportedModel."""
    found, offline = _named(model, revision), _offline(offline)
    if isinstance(found, Path):
        return found
    hub = _hub(found, offline)
    folder = _cached(hub, found, revision)
    if folder is not None:
        return folder
    if ":" in found:
        raise ModelUnavailable(
            f"{found} is not in the local cache, and its sizes are in the file itself",
            f"`minikv models pull {found}` fetches it",
        )
    if offline:
        state, why = "not in the local cache", "; only config.json is fetched"
        raise _not_cached(found, revision, state, why)
    with _checked(found, revision):
        # This request is sent once. The library repeats the next one for half a minute.
        info = hub.HfApi().model_info(found, revision=revision)
        names = {sibling.rfilename for sibling in info.siblings or ()}
        wanted = next((name for name in CONFIGS if name in names), None)
        if wanted is None:
            raise no_weights(names) if any(map(is_gguf, names)) else ModelUnavailable(NO_CONFIG)
        return Path(hub.hf_hub_download(found, wanted, revision=revision)).parent


def _named(model: str | Path, revision: str | None) -> Path | str:
    """The existing directory or file, or the hub id that `model` names. Raises ModelUnavailable or
    UnsupportedModel."""
    text = os.fspath(model)
    if text.startswith(places.OLLAMA):
        return places.in_ollama(text)
    try:
        folder = Path(text).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # the name is too long, or there is no home directory
        why = getattr(error, "strerror", None) or str(error)
        raise ModelUnavailable(f"model {quote(text)} not found: {why}") from None
    if text and is_folder:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(folder))
        files = [name for name in names if is_gguf(name)]
        if not files or any((folder / one).exists() for one in CONFIGS):
            return folder
        if len(files) > 1:
            raise ModelUnavailable(
                f"{quote(text)} holds {len(files)} GGUF files, such as {quote(files[0])}",
                "give the path of one of them",
            )
        return folder / files[0]
    if text and exists:
        if is_gguf(folder.name) and folder.is_file():
            return folder
        raise ModelUnavailable(
            f"{quote(text)} is a file, not a model",
            "give a .gguf file, or the directory that holds config.json",
        )
    if (short := places.packaged(text)) is not None:
        return short
    if isinstance(model, Path) or _HUB_ID.fullmatch(text) is None or _PATHLIKE.match(text):
        raise ModelUnavailable(
            f"model {quote(text)} not found: it is no {'file' if is_gguf(text) else 'directory'} "
            "here, and no hub id",
            "give a directory, a .gguf file, or a hub id such as meta-llama/Llama-3.1-8B-Instruct",
        )
    if revision is not None and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise ModelUnavailable(
            f"{quote(revision)} is not a revision", "give a branch, tag or full commit hash"
        )
    return text


def _offline(asked: bool) -> bool:
    """Whether the network must not be used, because of the caller or HF_HUB_OFFLINE."""
    return asked or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _from_hub(repo: str, revision: str | None, offline: bool, progress: Progress | None) -> Source:
    hub = _hub(repo, offline)
    folder, lacks = _cached(hub, repo, revision), ""
    # A folder without the name of a commit is not used: the commit is shown and stored.
    if folder is not None and _COMMIT.fullmatch(_commit(folder)):
        lacks = "" if ":" in repo else missing_files(folder)
        if not lacks:
            return Source(repo, folder, _commit(folder))
    if offline:
        partly = f"only partly in the local cache ({lacks} missing)"
        state = partly if lacks else "not in the local cache"
        raise _not_cached(repo, revision, state, " to download it")
    watched = None if progress is None else _Watched(progress)
    try:
        folder = _download(hub, repo, revision, watched)
    except ModelError:
        if watched is not None and watched.stopped is not None:
            raise watched.stopped from None  # `progress` raised this; the hub did not fail
        raise
    if ":" not in repo and (lacks := missing_files(folder)):
        raise ModelUnavailable(
            f"{repo}{_at(revision)} has no {quote(lacks)}", "it is not a complete model"
        )
    return Source(repo, folder, _commit(folder))


def _commit(found: Path) -> str:
    """The revision of a snapshot in the hub's cache, or of a file in one."""
    return found.name if _COMMIT.fullmatch(found.name) else found.parent.name


def _not_cached(repo: str, revision: str | None, state: str, why: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"{repo}{_at(revision)} is {state}, and offline mode is on",
        f"run once without `offline=True` (and without HF_HUB_OFFLINE){why}",
    )


def _hub(repo: str, offline: bool) -> Any:
    """The module huggingface_hub. Raises ModelUnavailable if it cannot be imported."""
    if offline and "huggingface_hub" not in sys.modules:
        # The library reads this once, when first imported. It is an additional safeguard: offline,
        # this module uses only the cache anyway.
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import huggingface_hub
    except ImportError as error:  # an installation without its dependencies
        raise ModelUnavailable(f"{repo}: huggingface-hub is not usable: {error}") from None
    return huggingface_hub


def _at(revision: str | None) -> str:
    return f" at revision {quote(revision)}" if revision else ""


def _cached(hub: Any, repo: str, revision: str | None) -> Path | None:
    """The model's folder in the cache, complete or not, or its GGUF file; None if there is none.
    Does not use the network."""
    repo, _, form = repo.partition(":")
    if form:
        root = Path(hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
        commit = revision or "main"
        with contextlib.suppress(OSError):
            commit = (root / "refs" / commit).read_text().strip()
        folder = root / "snapshots" / commit
        with contextlib.suppress(OSError, ModelError):
            return folder / gguf_of(os.listdir(folder), form)
        return None
    for name in CONFIGS:
        found = hub.try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _download(hub: Any, repo: str, revision: str | None, watched: _Watched | None) -> Path:
    repo, _, form = repo.partition(":")
    with _checked(repo, revision):
        # The hub sends sizes only on request, and only `progress` needs them.
        options = {} if watched is None else {"files_metadata": True}
        info = hub.HfApi().model_info(repo, revision=revision, **options)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        wanted = [gguf_of(names, form)] if form else wanted_files(names)
        bars = {}
        if watched is not None:
            watched.plan(*_to_fetch(hub, repo, info, wanted), Path(hub.constants.HF_HUB_CACHE))
            bars = {"tqdm_class": watched.bar(hub)}
        found = hub.snapshot_download(repo, revision=revision, allow_patterns=wanted, **bars)
        return Path(found, wanted[0] if form else "")


_DOWNLOADING = threading.Lock()


@contextlib.contextmanager
def _checked(repo: str, revision: str | None) -> Iterator[None]:
    """Within this context, the hub's library makes paths only from hexadecimal names that the hub
    sends. Raises CorruptModel for other names, and ModelUnavailable if the library has other
    functions, or for any of its errors.

    The library trusts the commit and checksums from the hub, and uses them as names of files and
    folders. It also records which files do not exist, under a name that cannot be checked here;
    without a folder, it does not.
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
        except ModelError:
            raise
        except Exception as error:  # also errors of the HTTP library, which depend on its version
            raise _failure(repo, revision, error) from None
        finally:
            file_download._get_metadata_or_catch_error = metadata
            hf_api.HfApi.repo_info = info  # type: ignore[method-assign]


def _check_name(repo: str, what: str, name: object, wanted: re.Pattern[str]) -> None:
    """Raise CorruptModel if the hub sent a name that does not match `wanted`. name: None if it sent
    none."""
    if name is not None and not (isinstance(name, str) and wanted.fullmatch(name)):
        raise CorruptModel(
            f"{repo}: the hub sent a {what} that is not hexadecimal: {quote(name)}",
            "nothing was written under that name; check HF_ENDPOINT, and who answers there",
        )


def _failure(repo: str, revision: str | None, error: Exception) -> ModelUnavailable:
    from huggingface_hub import errors

    at = _at(revision)
    status = getattr(getattr(error, "response", None), "status_code", None) or "unknown"
    words = {"repo": repo, "name": quote(repo), "at": at, "status": status}
    words["revision"] = quote(revision)
    for name, message, hint in _FAILURES:
        if isinstance(error, getattr(errors, name)):
            return ModelUnavailable(message.format(**words), hint.format(**words))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelUnavailable(
            f"{repo}{at}: the disk is full", "free space, or set HF_HOME to another disk"
        )
    # The error's own text is left out: it may contain addresses with access tokens.
    return ModelUnavailable(f"{repo}{at}: the download failed ({type(error).__name__})", _NETWORK)


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
        free, gib = None, 2**30
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(next(filter(Path.exists, (cache, *cache.parents)))).free
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
                return  # one bar counts bytes received, one bytes written: take the larger
            self.done = int(done)
            total = max(self.total, self.done)
            self._call(lambda: self.progress.download(self.done, total))

    def _call(self, tell: Callable[[], None]) -> None:
        if self.stopped is not None:
            raise self.stopped  # `progress` raised in another thread: stop this one too
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

"""`minikv models`: lists the models on this disk, downloads and removes those of the Hugging Face
cache."""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from minikv.chat.report import size
from minikv.checks import guess
from minikv.cli.failures import Interrupts
from minikv.cli.screen.progress import Loading
from minikv.cli.screen.text import clean, cut, grid
from minikv.cli.settings.config import BUNDLED
from minikv.cli.settings.flags import Call, Only, Yes, command, group
from minikv.errors import UsageError
from minikv.models import places
from minikv.settings import Settings


@dataclass(frozen=True, slots=True)
class Model:
    """A model on this disk. state: "ready", or why it cannot be loaded. bytes: of its files.
    form: that of quantised weights; "" if they are plain."""

    name: str
    bytes: int
    state: str
    folder: str
    form: str = ""


models = group(
    "minikv models pull HuggingFaceTB/SmolLM2-135M-Instruct\n\n"
    "The bundled model and those in the Hugging Face cache, with their sizes. Then the aliases, "
    "which `minikv config set aliases.NAME MODEL` sets."
)


@models.callback(invoke_without_command=True)
@command
def listed(call: Call) -> None:
    terminal = call.terminal
    from minikv.models import BUNDLED as FOLDER

    weights = sum(
        p.stat().st_size for p in FOLDER.iterdir() if p.suffix in (".safetensors", ".json")
    )
    repos, found = _cached(), [Model(BUNDLED, weights, "ready", str(FOLDER))]
    for repo in sorted(repos, key=lambda repo: str(repo.repo_id).lower()):
        found += _ggufs(repo) or [_model(repo)]
    found += [_read(name, path) for name, path in places.listed()]
    lines = [("NAME", "SIZE", "FORM", "STATE")]
    for one in found:
        form = clean(one.form) or "-"
        lines.append((clean(one.name), size(one.bytes), form, clean(one.state)))
    table = grid(lines, "<><<").split("\n")
    width = terminal.columns
    terminal.data("\n".join(cut(line, width) if width else line for line in table))
    for name, model in call.config.aliases.items():
        terminal.note(f"alias {clean(name)} = {clean(model)}")
    if not repos:
        terminal.note(f"no models in {_cache()}; minikv models pull NAME fetches one")


@models.command()
@command
def pull(
    call: Call,
    name: Annotated[str, typer.Argument(help="a hub id, as owner/name, or an alias")],
    settings: Annotated[Settings, Only("revision")],
) -> None:
    """Download the files of a model that minikv reads, and print its folder."""
    terminal, name = call.terminal, call.config.model(name) or name
    if name == BUNDLED:
        raise UsageError("the bundled model is a part of minikv", "it need not be downloaded")
    if Path(name).expanduser().exists():
        raise UsageError(f"{name!r} is here already", f"minikv chat -m {name}")
    from minikv.models.hub import resolve

    loading = Loading(terminal)
    with terminal.silent(), Interrupts().stopping(loading.cancel):
        terminal.status(f"looking for {name}")
        source = resolve(name, revision=settings.revision, progress=loading)
    terminal.data(str(source.folder))
    repo = next((repo for repo in _cached() if repo.repo_id == name), None)
    if repo is not None:
        one = _model(repo)
        terminal.note(f"{one.name}: {size(one.bytes)}, {one.state}")


@models.command("rm")
@command
def remove(
    call: Call, names: Annotated[list[str], typer.Argument(metavar="NAME")], yes: Yes = False
) -> None:
    """Remove models from the Hugging Face cache."""
    terminal, names = call.terminal, list(dict.fromkeys(names))
    here: dict[str, tuple[Path, int]] = {}  # the path to remove, and its bytes
    for repo in _cached():
        here[repo.repo_id] = repo.repo_path, repo.size_on_disk
        here |= {one.name: (Path(one.folder), one.bytes) for one in _ggufs(repo)}
    for name in names:
        if name == BUNDLED:
            raise UsageError("the bundled model is a part of minikv and cannot be removed")
        if name not in here:
            raise UsageError(
                f"no model {name!r} in the cache", f"{guess(name, here)}`minikv models` lists them"
            )
    total = sum(here[name][1] for name in names)
    what = names[0] if len(names) == 1 else f"{len(names):,} models"
    if not terminal.confirmed(f"remove {what}, {size(total)}?", yes=yes):
        terminal.say("nothing was removed")
        return
    for name in names:
        place, _ = here[name]
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            _remove_file(place)
        if place.exists():
            raise UsageError(f"{name} could not be removed", f"remove {place} by hand")
        terminal.note(f"removed {name}")


def _remove_file(link: Path) -> None:
    """Remove a GGUF file of the cache in all revisions, and its model if it was the last one."""
    from minikv.models.files import is_gguf

    repo = link.parents[2]
    links = list(repo.glob(f"snapshots/*/{link.name}"))
    blobs = {path.resolve() for path in links}
    with contextlib.suppress(OSError):
        for path in links:
            path.unlink()
        for blob in blobs - {path.resolve() for path in repo.glob("snapshots/*/*")}:
            blob.unlink(missing_ok=True)
    if not any(is_gguf(path.name) for path in repo.glob("snapshots/*/*")):
        shutil.rmtree(repo, ignore_errors=True)


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _cached() -> list[Any]:
    """The models in the cache, as huggingface_hub describes them."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        info = scan_cache_dir(_cache())
    except (CacheNotFound, ValueError):  # no cache yet, or a file instead of a folder
        return []
    return [repo for repo in info.repos if repo.repo_type == "model"]


def _latest(repo: Any) -> Any:
    """The default revision of a model of the cache, or else its newest; None if it has none."""
    return max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified), default=None)


def _model(repo: Any) -> Model:
    """A model of the cache; its state is that of the default revision."""
    latest = _latest(repo)
    folder = repo.repo_path if latest is None else latest.snapshot_path
    return _read(repo.repo_id, folder, repo.size_on_disk)


def _ggufs(repo: Any) -> list[Model]:
    """The GGUF files of a model of the cache, by the names for -m; none if it has files of another
    kind."""
    from minikv.models.files import CONFIGS, is_gguf

    latest = _latest(repo)
    files = [] if latest is None else sorted(latest.files, key=lambda one: str(one.file_name))
    if any(one.file_name in CONFIGS for one in files):
        return []
    named = [one.file_path for one in files if is_gguf(one.file_name)]
    forms = [re.split("[-.]", path.stem)[-1] for path in named]
    return [
        _read(f"{repo.repo_id}:{form if forms.count(form) == 1 else path.stem}", path)
        for form, path in zip(forms, named, strict=True)
    ]


def _read(name: str, path: Path, nbytes: int | None = None) -> Model:
    """The model in a folder or a GGUF file. nbytes: its size; None: that of the file."""
    from minikv.models import config_of
    from minikv.models.errors import ModelError
    from minikv.models.files import missing_files

    form = ""
    try:
        if path.is_dir() and (lacks := missing_files(path)):
            state = f"{lacks} is missing"
        else:
            form, state = config_of(path).form, "ready"
    except OSError as error:
        state = f"cannot be read: {error.strerror}"
    except ModelError as error:
        state = f"not supported: {error}"
    return Model(name, path.stat().st_size if nbytes is None else nbytes, state, str(path), form)

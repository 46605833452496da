"""`minikv verify`: compare the files of a model with their checksums.

A file of the hub's cache is compared with the hub's own checksum, the bundled model with the one it
was shipped with. For a directory the first run records checksums, and later runs compare. Loading
does not do this: it would take longer than the loading itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from minikv.chat.report import size
from minikv.cli.config import BUNDLED, short
from minikv.cli.interrupt import Interrupts
from minikv.cli.paths import digests_folder
from minikv.cli.progress import Live
from minikv.cli.saved.files import opened, private, write
from minikv.cli.tables import grid
from minikv.cli.terminal import Terminal, clean
from minikv.errors import Interrupted, UsageError
from minikv.models import refuse_without_torch
from minikv.models.digests import Digest, digest, names, shipped, stated
from minikv.models.errors import ModelError, ModelUnavailable

_FORMAT = 1
_LIMIT = 4 << 20  # bytes of a record
_GOOD = ("ok", "recorded", "unrecorded")
_WORDS = {
    "ok": "as {by} it",
    "recorded": "the next run compares with it",
    "unrecorded": "nothing is recorded while another file is not as it should be",
    "differs": "not as {by} it",
    "missing": "not there",
    "new": "was not there when this directory was recorded",
    "unlinked": "put in the place of the hub's own file, which is a link",
}
_BY = {"hub": "the hub has", "minikv": "minikv ships", "record": "the record has"}


@dataclass(frozen=True, slots=True)
class File:
    """The result for one file. `state`: ok, recorded, unrecorded, differs, missing, new, unlinked
    (a file of its own among links into the hub's cache), or unreadable. `by`: where the expected
    checksum comes from: hub, minikv, record, or "". `expected` and `found` are checksums of the
    kind `kind`: sha256, or git's."""

    name: str
    state: str
    bytes: int | None
    by: str
    kind: str
    expected: str | None
    found: str | None
    why: str = ""


def verify(
    model: str | None,
    revision: str | None,
    terminal: Terminal,
    *,
    record: bool = False,
    as_json: bool = False,
) -> None:
    """Print a line per file. Exits with code 1 if one is not as it should be. `record`: record the
    checksums of a directory again. Raises ModelError, UsageError, Interrupted."""
    from minikv.models import BUNDLED as FOLDER
    from minikv.models.hub import Source, on_disk

    if model is None or model == BUNDLED:
        source = Source(BUNDLED, FOLDER, None)
    else:
        found = on_disk(model, revision=revision)
        if found is None:
            raise ModelUnavailable(
                f"{model} is not on this disk", f"minikv models pull {model} fetches it"
            )
        source = found
    folder = source.folder
    own = source.name == BUNDLED and folder == FOLDER
    files = compared(folder, own, record, terminal)
    bad = [one for one in files if one.state not in _GOOD]
    if as_json:
        told = {"model": source.name, "folder": str(folder), "ok": not bad}
        terminal.data(json.dumps({**told, "files": [asdict(one) for one in files]}))
    else:
        terminal.data(grid([_line(one) for one in files], "<<><"))
    if not bad:
        return
    count = f"{len(bad)} of {len(files)} files {'is' if len(bad) == 1 else 'are'}"
    if source.revision is not None:
        hint = f"minikv models rm {source.name}, then minikv models pull {source.name}"
    elif own:
        hint = "install minikv again"
    else:
        hint = "copy the files again; if you changed them yourself, --record takes them as they are"
    terminal.fail(f"{count} not as it should be", hint)
    raise typer.Exit(1)


def compared(folder: Path, own: bool, record: bool, terminal: Terminal) -> list[File]:
    """The result for every file. Checksums that are known nowhere are recorded. own: the folder is
    the bundled model's. Raises ModelError, UsageError, Interrupted."""
    expected: dict[str, tuple[str, Digest]] = {}
    present = names(folder)
    if own:
        expected = {name: ("minikv", one) for name, one in shipped(folder).items()}
    else:
        for name in present:
            if (one := stated(folder, name)) is not None:
                expected[name] = ("hub", one)
    unstated = [name for name in present if name not in expected]
    # A snapshot of the cache has links alone; a directory may have some of its own.
    linked = folder.parent.name == "snapshots" and any(by == "hub" for by, _ in expected.values())
    kept: dict[str, Digest] | None = None
    if unstated and not own and not linked:
        kept = None if record else _recorded(folder)
        expected |= {
            name: ("record", one) for name, one in (kept or {}).items() if name not in expected
        }
    every = sorted({*present, *expected})
    total = sum(_bytes(folder / name) or 0 for name in every)
    live, done, stopped = Live(terminal, "verifying", "B"), 0, False

    def cancel() -> None:
        nonlocal stopped
        stopped = True

    def tell(count: int) -> None:
        nonlocal done
        done += count
        live(done, total)
        if stopped:
            raise Interrupted("stopped verifying", "nothing was recorded")

    unknown = "unlinked" if linked else "new" if kept is not None or own else "recorded"
    try:
        with Interrupts().stopping(cancel):
            files = [_checked(folder, name, expected.get(name), unknown, tell) for name in every]
    finally:
        live.finish()
    if any(one.state == "recorded" for one in files):
        if any(one.state not in _GOOD for one in files):
            return [_unrecorded(one) for one in files]
        _refuse_damaged(folder)
        _write_record(folder, files)
    return files


def _unrecorded(one: File) -> File:
    return replace(one, state="unrecorded") if one.state == "recorded" else one


def _checked(
    folder: Path,
    name: str,
    expected: tuple[str, Digest] | None,
    unknown: str,
    tell: Callable[[int], None],
) -> File:
    """The result for one file. unknown: its state if no checksum is `expected`."""
    by, wanted = expected or ("", Digest("sha256", ""))
    stored = _bytes(folder / name)
    goal = wanted.value or None
    if stored is None:
        return File(name, "missing", None, by, wanted.kind, goal, None)
    try:
        found = digest(folder / name, wanted.kind, tell)
    except ModelError as error:
        return File(name, "unreadable", stored, by, wanted.kind, goal, None, str(error))
    if expected is not None:
        state = "ok" if found == wanted else "differs"
    else:
        state = unknown
    return File(name, state, stored, by, found.kind, goal, found.value)


def _bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _line(one: File) -> tuple[str, str, str, str]:
    words = one.why or _WORDS[one.state].format(by=_BY.get(one.by, ""))
    if one.state == "differs":
        assert one.expected is not None
        assert one.found is not None
        words += f": {one.expected[:12]}... there, {one.found[:12]}... here"
    stored = "-" if one.bytes is None else size(one.bytes)
    return one.state, clean(one.name), stored, clean(words)


def _refuse_damaged(folder: Path) -> None:
    """Raise ModelError for a directory that cannot be a model: its checksums are not recorded."""
    refuse_without_torch()
    from minikv.models.checkpoint import Checkpoint
    from minikv.models.config import ModelConfig

    ModelConfig.from_folder(folder)
    Checkpoint.open(folder)


# -- the record of a directory ----------------------------------------------------------------


def _record_file(folder: Path) -> Path:
    key = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return digests_folder() / f"{key[:24]}.json"


def _recorded(folder: Path) -> dict[str, Digest] | None:
    """The recorded name and checksum of every file of a directory; None if it was never recorded.
    Raises UsageError if the record is damaged."""
    path = _record_file(folder)
    try:
        with opened(path) as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ValueError("too large")
        raw: Any = json.loads(data)
        if raw["format"] != _FORMAT:
            raise ValueError("another format")
        return {str(name): _read(one) for name, one in raw["files"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it is damaged"
        raise UsageError(
            f"the record of {clean(str(folder))} cannot be read: {why} ({short(path)})",
            "--record makes a new one, of the files as they are now",
        ) from None


def _read(one: Any) -> Digest:
    if not isinstance(one["sha256"], str) or len(one["sha256"]) != 64:
        raise ValueError("no checksum")
    return Digest("sha256", one["sha256"])


def _write_record(folder: Path, files: list[File]) -> None:
    path = _record_file(folder)
    found = {
        one.name: {"bytes": one.bytes, "sha256": one.found}
        for one in files
        if one.kind == "sha256" and one.found is not None and one.by != "hub"
    }
    record = {
        "format": _FORMAT,
        "folder": str(folder.resolve()),
        "recorded": time.strftime("%Y-%m-%d %H:%M:%S"),
        "files": found,
    }
    try:
        write(private(path.parent), path.name, json.dumps(record, indent=1).encode())
    except OSError as error:
        raise UsageError(
            f"the checksums cannot be recorded: {error.strerror} ({short(path)})",
            "free space there, or set MINIKV_HOME to another directory",
        ) from None

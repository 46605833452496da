"""Where a user's files are: under $MINIKV_HOME, else in the XDG directories.

The XDG directories are used on macOS, too, because minikv has always kept its files there.
"""

from __future__ import annotations

import os
from pathlib import Path

from minikv.checks import quoted
from minikv.errors import UsageError

HOME = "MINIKV_HOME"


def config_file() -> Path:
    """The user's configuration file. Raises UsageError if there is no home directory."""
    return _own("config.toml") or _under("user_config_path") / "config.toml"


def chats_folder() -> Path:
    """The directory of saved chats. Raises UsageError if there is no home directory."""
    return _own("chats") or _under("user_data_path") / "chats"


def history_file() -> Path:
    """What was typed in chats. Raises UsageError if there is no home directory."""
    return _own("history") or _under("user_state_path") / "history"


def cache_folder() -> Path:
    """What may be deleted at any time. Raises UsageError if there is no home directory."""
    return _own("cache") or _under("user_cache_path")


def _own(name: str) -> Path | None:
    home = os.environ.get(HOME)
    try:
        return Path(home).expanduser() / name if home else None
    except RuntimeError:
        raise UsageError(
            f"{HOME} names the home directory of a user who does not exist: {quoted(home or '')}",
            f"set {HOME} to a directory",
        ) from None


def _under(kind: str) -> Path:
    from platformdirs.unix import Unix

    try:
        found: Path = getattr(Unix("minikv"), kind)
    except RuntimeError:
        raise UsageError("there is no home directory", f"set {HOME} to a directory") from None
    return found

"""Flags and arguments that several commands have."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from minikv.cli.config import SAVED as SAVED
from minikv.cli.config import SETTINGS
from minikv.settings import Setting

MODEL = "model revision offline device dtype weights"
"""The settings that say which model is loaded, where and in which format."""

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE", help="what to ask about: text, PDFs, directories, 'patterns'; - is stdin"
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


def json(what: str) -> Any:
    """A switch --json; `what` says what it prints."""
    return typer.Option("--json", help=f"print {what}")


Json = Annotated[bool, json("one JSON object")]


def list_of(name: str, default: str) -> Setting:
    """A setting that takes several values."""
    return replace(SETTINGS[name], default=default, help="comma-separated list", test=None)

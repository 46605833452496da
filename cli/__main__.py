"""`python -m minikv.cli`, and the installed command."""

from __future__ import annotations

import gc
import os
import sys
import warnings


def run() -> None:
    """The entry point, quiet also when Ctrl-C comes while Python is still importing."""
    if os.environ.get("HOME") == "":  # libraries would take the root directory for a home
        del os.environ["HOME"]
    if not sys.warnoptions:  # what libraries tell developers is not for the screen of a chat
        warnings.simplefilter("ignore")
    gc.set_threshold(50_000)  # looking for garbage every 700 objects is 5 % of `--help`
    try:
        from minikv.cli.main import run as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    run()

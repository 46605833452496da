"""`python -m minikv.cli`, and the installed command."""

from __future__ import annotations

import gc
import os
import sys
import warnings


def run() -> None:
    """The entry point; prints no traceback even if Ctrl-C comes while Python is still importing."""
    if os.environ.get("HOME") == "":  # libraries would treat the root directory as home
        del os.environ["HOME"]
    if not sys.warnoptions:  # users should not see libraries' warnings for developers
        warnings.simplefilter("ignore")
    gc.set_threshold(50_000)  # collecting garbage every 700 objects takes 5 % of `--help`
    try:
        from minikv.cli.main import run as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    run()

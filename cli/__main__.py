"""`python -m minikv.cli`, and the installed command."""

from __future__ import annotations


def run() -> None:
    """The entry point, quiet also when Ctrl-C comes while Python is still importing."""
    try:
        from minikv.cli.main import run as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    run()

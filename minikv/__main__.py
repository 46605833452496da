"""`python -m minikv`, as the installed command."""

from __future__ import annotations

from minikv.cli.__main__ import run

if __name__ == "__main__":
    run()

"""`python -m minikv.cli`."""

from minikv.cli.main import run

run()

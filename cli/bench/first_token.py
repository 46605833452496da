"""Seconds from the start of `minikv ask` to its first token, on the bundled model, with its files
in the page cache."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

import torch

from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.floors import Rates
from minikv.cli.bench.results import Results
from minikv.errors import MinikvError

_COMMAND = (sys.executable, "-m", "minikv.cli", "ask", "What does Velgate export?", "-n", "1")


def measure(arguments: Arguments, device: torch.device, rates: Rates, results: Results) -> None:
    """The figure `ask_first_token_s`, a list of rounds, after a start that is not measured."""
    seconds: list[float] = []
    for number in range(arguments.repeat + 1):
        results.progress("start of minikv ask", number, arguments.repeat + 1)
        taken = _first_token()
        if number:
            seconds.append(taken)
            results.add(figures={"ask_first_token_s": list(seconds)})


def _first_token() -> float:
    began = perf_counter()
    with subprocess.Popen(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Velgate exports mostly salt.\n")
        process.stdin.close()
        try:
            if not process.stdout.read(1):
                raise MinikvError("minikv ask wrote no answer")
            return perf_counter() - began
        finally:
            process.kill()

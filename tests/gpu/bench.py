"""`minikv bench all` without the command line, which needs packages that a machine with a GPU may
lack, and reads the user's settings.

    python tests/gpu/bench.py --json FILE --minutes N [--part NAME ...]
    python tests/gpu/bench.py --json FILE --small          tries it without a GPU
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from plain_tree import linked

linked()

from minikv.cli.bench import command, signals
from minikv.cli.bench.arguments import Arguments
from minikv.cli.terminal import Terminal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--part", action="append", default=[])
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    terminal = Terminal()
    with signals.caught():
        if asked.small:  # the list of a CPU has other parts
            little = Arguments(
                shape="tinyllama", length="64", repeat=1, kernels="torch", as_json=asked.json
            )
            command.measure("kernels", little, sys.argv, terminal)
        else:
            all_of_it = Arguments(as_json=asked.json)
            command.measure_all(
                all_of_it, asked.minutes, asked.part, sys.argv, terminal, full=False
            )


if __name__ == "__main__":
    main()

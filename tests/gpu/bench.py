"""`minikv bench` without the command line, which needs packages that a machine with a GPU may lack,
and reads the user's settings.

    python tests/gpu/bench.py decode,prefill --json FILE [FIELD=VALUE ...]   fields of `Arguments`
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from plain_tree import linked

linked()

from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.command import measure
from minikv.cli.screen.terminal import Terminal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE")
    parser.add_argument("--json", required=True)
    asked = parser.parse_args()
    fields: dict[str, object] = dict(pair.split("=", 1) for pair in asked.fields)
    for name in ("repeat", "steps"):
        if name in fields:
            fields[name] = int(str(fields[name]))
    arguments = Arguments(peer=False, as_json=asked.json, **fields)  # type: ignore[arg-type]
    measure(asked.questions.split(","), arguments, sys.argv, Terminal())


if __name__ == "__main__":
    main()

"""`minikv bench` without the command line, which needs packages that a machine with a GPU may lack,
and reads the user's settings.

    python tests/gpu/bench.py decode --json FILE [FIELD=VALUE ...]  fields of `Asked` and `Settings`
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from plain_tree import linked

linked()

from minikv.cli.bench.asked import Asked
from minikv.cli.bench.speed import measure
from minikv.cli.screen.terminal import Terminal
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings


def read(question: str, fields: list[str]) -> tuple[Asked, Settings]:
    """What the words of the command line ask for."""
    given: dict[str, Any] = dict(pair.split("=", 1) for pair in fields)
    own = {name: given.pop(name) for name in ("shape", "length", "repeat") if name in given}
    own["repeat"] = int(own.get("repeat", 3))
    asked = Asked(question, peer=False, **own)  # type: ignore[arg-type]
    return asked, Settings(**{"policy": DEFAULT_PROMPT, "budget": "512", **given})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE")
    parser.add_argument("--json", required=True)
    words = parser.parse_args()
    asked, settings = read(words.question, words.fields)
    measure(replace(asked, as_json=words.json), settings, Terminal(), sys.argv)


if __name__ == "__main__":
    main()

"""Differences between policies over the same documents, from files of `minikv eval --json`.

    python docs/measurements/paired.py docs/measurements/results/stride*.json --base h2o
    python docs/measurements/paired.py docs/measurements/results/decode-default.json --base none

`--base` is a policy, a decode policy, or `full`. A row for each other policy with the same budget:
the mean of its documents minus the base's (shares; nats for ppl), the 95 % interval over documents
(Tango's for one answer each, else Student's), and how many documents only it and only the base has
right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from minikv.cli.eval import results
from minikv.cli.screen.text import grid

Cell = dict[str, Any]


def key(cell: Cell) -> tuple[str, ...]:
    """What two cells must have in common to be compared."""
    return cell["task"], cell["budget"], cell.get("reuse", "once")


def row(cell: Cell, base: Cell) -> list[str]:
    pairs = [a - b for a, b in zip(cell["by_item"], base["by_item"], strict=True)]
    shares = cell["task"] not in ("ppl", "kl")
    found = (results.of_differences if shares else results.of_means)([[x] for x in pairs])
    scale, digits = (100, 1) if shares else (1, 3)
    mean, low, high = (
        "-" if x is None else f"{scale * x:+z.{digits}f}" for x in (sum(pairs) / len(pairs), *found)
    )
    alone = f"{pairs.count(1.0)} : {pairs.count(-1.0)}" if shares else ""
    return [*key(cell)[:2], cell["policy"], cell["decode"], mean, f"{low} to {high}", alone]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--base", required=True)
    asked = parser.parse_args()
    cells = [cell for path in asked.files for cell in json.loads(path.read_text())["cells"]]
    lines = [["task", "budget", "policy", "decode", "difference", "95 %", "alone right"]]
    for cell in cells:
        for base in cells:
            named = asked.base in (base["policy"], base["decode"])
            alike = key(cell) == key(base) or base["policy"] == asked.base == "full"
            if named and alike and base is not cell and cell["budget"] != "-":
                lines.append(row(cell, base))
                break
    print(grid(lines, "<<<<>>>"))


if __name__ == "__main__":
    main()

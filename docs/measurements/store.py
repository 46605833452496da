"""How long `minikv ask` takes to its first token, from the shell: a document that was never read,
one that was read before, and what keeping it costs.

    python docs/measurements/store.py --shape s --tokens 8192,32768

A random model of the shape, written to disk before and in the file cache, as its document is. Every
`ask` is a process of its own, in turns: without a store, into an empty one, and again. Seconds are
medians of `--repeat` rounds, of wall time up to the first byte of the answer and of processor time
of the whole process; `inside` is what the record of the turn says (`time_s.first_token`), without
the start of Python and the loading of the model. `--profile FILE` writes where the last process
spent its time, as cProfile does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from peers import BUNDLED, export

from minikv.cli.bench import networks
from minikv.cli.screen.text import grid
from minikv.models.tokenizer import Tokenizer

WAYS = {"nothing kept": ["--remember", "off"], "read and kept": [], "read before": []}


def asked(home: Path, words: list[str], profile: str | None) -> tuple[float, float, float, int]:
    """Seconds to the first byte, of the processor, and inside; and tokens read."""
    run = [sys.executable, *(["-m", "cProfile", "-o", profile] if profile else [])]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    with subprocess.Popen(
        [*run, "-m", "minikv", "ask", "What is it about?", *words, "-n", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MINIKV_HOME": str(home)},
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        took = perf_counter() - began
        record = json.loads(first + process.stdout.read())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, worked, record["time_s"]["first_token"], record["tokens"]["prompt_new"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="s", help=", ".join(networks.SHAPES))
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--flags", default="--budget 512 --threads 0")
    parser.add_argument("--profile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, home, document = (Path(folder) / name for name in ("model", "home", "text.txt"))
        export(networks.Spec(networks.find(args.shape)), model)
        shutil.copy(BUNDLED / "chat_template.jinja", model)
        tokenizer = Tokenizer.from_folder(BUNDLED)
        ids = tokenizer.encode((BUNDLED / "sample.txt").read_text())
        lines = [
            ("tokens", "way", "first token s", "of the first", "processor s", "inside s", "read")
        ]
        for tokens in map(int, args.tokens.split(",")):
            many = (ids * (tokens // len(ids) + 1))[: tokens - 32]
            document.write_text(tokenizer.decode(many))
            words = [str(document), "-m", str(model), *args.flags.split()]
            found: dict[str, list[tuple[float, float, float, int]]] = {way: [] for way in WAYS}
            for _ in range(args.repeat):
                shutil.rmtree(home, ignore_errors=True)
                for way, flags in WAYS.items():
                    profile = args.profile if way == "read before" else None
                    found[way].append(asked(home, [*words, *flags], profile))
            whole = median(one[0] for one in found["nothing kept"])
            for way, runs in found.items():
                took, worked, inside, read = map(median, zip(*runs, strict=True))
                part = f"1/{whole / took:.0f}" if took < whole / 2 else f"{took / whole:.2f}"
                lines.append(
                    (
                        f"{tokens:,}",
                        way,
                        f"{took:.2f}",
                        part,
                        f"{worked:.2f}",
                        f"{inside:.2f}",
                        f"{read:,.0f}",
                    )
                )
        print(grid(lines, "><>>>>>"))


if __name__ == "__main__":
    main()

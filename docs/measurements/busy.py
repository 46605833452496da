"""Reading and writing beside a busy process, with threads that wait long and briefly.

    python docs/measurements/busy.py --json docs/measurements/busy.json

Each run is a process of its own, idle and beside one process that never waits; the kinds of waiting
take turns. GOMP_SPINCOUNT=300000 is what the OpenMP library does by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

SPINS = ("300000", "2000")
TOKENS, STEPS, READINGS = 2000, 32, 3


def measure() -> dict[str, float]:
    """Tokens per second of the bundled model, medians."""
    import minikv
    from minikv.chat.session import ChatSession
    from minikv.engine.sampling import Sampling

    chat: ChatSession = minikv.load(policy="adakv", budget=512, device="cpu")
    engine, vocab = chat.engine, chat.tokenizer.vocab
    ids = [3 + (7919 * i) % (vocab - 3) for i in range(TOKENS)]
    reading, writing = [], []
    for _ in range(READINGS):
        engine.reset()
        began = perf_counter()
        token = int(engine.prompt(ids, None, 2 * STEPS).argmax())
        reading.append(TOKENS / (perf_counter() - began))
        began = perf_counter()
        for _ in range(STEPS):
            token = engine.next(token, vocab, Sampling(), 0)
        writing.append(STEPS / (perf_counter() - began))
    return {"read": median(reading), "write": median(writing)}


def run(spins: str) -> dict[str, float]:
    """`measure` in a process that waits like this."""
    done = subprocess.run(
        [sys.executable, __file__, "--child"],
        env={**os.environ, "GOMP_SPINCOUNT": spins},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure()))
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(args.rounds):
        for spins in SPINS if number % 2 else SPINS[::-1]:
            one = found.setdefault(spins, {"idle": [], "busy": []})
            one["idle"].append(run(spins))
            beside = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                one["busy"].append(run(spins))
            finally:
                beside.kill()
                beside.wait()
    for spins, one in found.items():
        for what in ("read", "write"):
            idle, busy = (median(r[what] for r in one[how]) for how in ("idle", "busy"))
            print(f"{spins:>6} {what:5}: {idle:8,.0f} idle, {busy:8,.0f} busy, 1/{idle / busy:.1f}")
    if args.json:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How long a saved chat takes to open, beside reading its document again.

    OMP_NUM_THREADS=1 python docs/measurements/reopen.py

The bundled model, 4,000 tokens of the bundled document, adakv 256; medians of seven.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable


def milliseconds(act: Callable[[], object], times: int = 7) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ["MINIKV_HOME"] = home
        import minikv
        from minikv.cli.saved.keeper import Keeper
        from minikv.cli.screen.terminal import Terminal
        from minikv.models import BUNDLED

        session = minikv.load(budget=256)
        ids = session.tokenizer.encode((BUNDLED / "sample.txt").read_text())[:4000]
        text = session.tokenizer.decode(ids)

        def read(chat: minikv.ChatSession) -> None:
            chat.reset()
            chat.attach(text, "sample.txt")
            list(chat.ask("Who is the mayor?", 1))

        print(f"read    {milliseconds(lambda: read(session), 3):7.1f} ms")
        keeper = Keeper(Terminal())
        print(f"save    {milliseconds(lambda: keeper.save(session, 'one')):7.1f} ms")
        keeper.close()
        session.close()  # it holds the tier
        other = minikv.load(budget=256)

        def reopen() -> None:
            other.reset()  # it lets go of the tier
            keeper = Keeper(Terminal())
            keeper.load(other, "one")
            keeper.close()

        print(f"reopen  {milliseconds(reopen):7.1f} ms")
        twin = minikv.load(budget=256)
        read(twin)
        same = "".join(twin.ask("And where?", 4)) == "".join(other.ask("And where?", 4))
        print(f"the next answer is {'the same' if same else 'ANOTHER ONE'}")


if __name__ == "__main__":
    main()

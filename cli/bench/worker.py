"""A system in a process of its own, which takes its turns when it is told to.

    python -m minikv.cli.bench.worker

reads one JSON object per line from standard input and answers each with one: make, read, write,
peak. `Worker` is the other end. A process that is not asked anything waits and costs no time. It
ends when its standard input does, in the midst of work, too: whoever started it may be killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.cli.bench.deadline import Deadline, Late
from minikv.errors import MemoryShortError, MinikvError

if TYPE_CHECKING:
    from minikv.chat.eviction_config import EvictionConfig
    from minikv.cli.bench.models import Spec

_PATIENCE = 2.0  # seconds that a process may take to end when it is told to
_START = 120.0  # and to be ready, where there is a deadline


class PeerError(MinikvError):
    """The other system could not be measured; the rest goes on without it."""


class Worker:
    """The system `name` ("transformers", or "minikv" under a choice) in another process."""

    def __init__(
        self,
        name: str,
        spec: Spec,
        threads: int,
        choice: EvictionConfig | None = None,
        command: Sequence[str] = ("-m", "minikv.cli.bench.worker"),
        deadline: Deadline | None = None,
    ) -> None:
        """`command`: what this Python is to run, if not this module; it answers by `serve`. A
        process that has no answer at the end of the deadline's patience is killed, and what was
        asked of it raises Late."""
        self.name, self._deadline = name, deadline
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long-lived as the process
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C is for the process that shows results
        )
        try:
            self._ask(
                do="make",
                system=name,
                threads=threads,
                spec=_plain(spec),
                choice=None
                if choice is None
                else [choice.policy, choice.decode, str(choice.budget), choice.stride],
            )
        except BaseException:
            self.close()
            raise

    def read(self, ids: Sequence[int]) -> float:
        """Seconds for a prompt of as many random tokens as `ids` has."""
        return self._ask(do="read", tokens=len(ids))

    def write(self, steps: int) -> float:
        """Seconds for a step, mean over so many."""
        return self._ask(do="write", steps=steps)

    def peak(self) -> int:
        """Bytes at the high-water mark of the process (on a GPU: of its allocator)."""
        return int(self._ask(do="peak"))

    @property
    def alive(self) -> bool:
        """Whether the process can still be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        process = self._process
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(_PATIENCE if process.poll() is None else 0)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._said.close()

    def _ask(self, **message: object) -> float:
        """One question, one answer: a number. Raises PeerError, MemoryShortError, Late."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        patience = math.inf if self._deadline is None else self._deadline.patience
        if message["do"] == "make" and patience < math.inf:
            patience = min(patience, _START)
        # An answer is one short line: nothing of it waits in Python's buffer.
        if patience < math.inf and not select.select([stdout], [], [], patience)[0]:
            self._process.kill()
            self._process.wait()
            raise Late(f"{self.name} had no answer when its time was up")
        line = stdout.readline()
        if not line:
            code = self._process.wait()
            if code == -9:
                raise MemoryShortError(
                    f"{self.name} was killed, most likely for its memory",
                    "a smaller --shape or --length",
                )
            raise PeerError(f"{self.name} ended with status {code}{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            kind = MemoryShortError if answer["memory"] else PeerError
            raise kind(f"{self.name}: {answer['error']}")
        return float(answer["value"])

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""


def _plain(spec: Spec) -> dict[str, object]:
    made = asdict(spec)
    made["folder"] = None if spec.folder is None else str(spec.folder)
    return made


# -- the process itself ---------------------------------------------------------------------


class _Desk:
    """Makes a system and answers for it."""

    def __init__(self) -> None:
        self._system: Any = None
        self._spec: Any = None
        self._vocab = 0

    def answer(self, message: dict[str, Any]) -> float:
        import torch

        from minikv.cli.bench import machine, models

        if message["do"] == "make":
            return self._make(message)
        if message["do"] == "read":
            return float(self._system.read(models.prompt(message["tokens"], self._vocab)))
        if message["do"] == "write":
            return float(self._system.write(message["steps"]))
        found = machine.peak(torch.device(self._spec.device))
        if found is None:
            raise OSError("the system does not say how much memory a process has had")
        return found

    def _make(self, message: dict[str, Any]) -> float:
        import torch

        from minikv.chat.eviction_config import EvictionConfig
        from minikv.cli.bench import models, peer, place
        from minikv.cli.bench.shapes import Sizes

        raw = message["spec"]
        spec = models.Spec(**raw)
        spec = replace(
            spec,
            sizes=None if raw["sizes"] is None else Sizes(**raw["sizes"]),
            folder=None if raw["folder"] is None else Path(raw["folder"]),
        )
        torch.set_num_threads(message["threads"])
        place.enter(torch.device(spec.device))
        self._spec = spec
        if message["system"] == "transformers":
            made = peer.Transformers(spec)
            self._system, self._vocab = made, made.vocab
        elif message["choice"] is None:
            raise ValueError(f"{message['system']} is no system that can be measured")
        else:
            policy, decode, budget, stride = message["choice"]
            choice = EvictionConfig.read(policy, decode, budget, stride=stride)
            cached = models.Cached(models.network(spec), choice, spec.kernels, spec.kv)
            self._system, self._vocab = cached, cached.net.config.vocab
        return 0.0


def serve(answer: Callable[[dict[str, Any]], float]) -> None:
    """Answer every line until standard input ends, which ends the process at once."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # nobody waits for an answer any more

    threading.Thread(target=listen, daemon=True).start()
    while True:
        line = lines.get()
        try:
            reply: dict[str, object] = {"value": answer(json.loads(line))}
        except Exception as error:
            from minikv.cli.failures import explain

            reply = {
                "error": " ".join(f"{type(error).__name__}: {error}".split())[:300],
                "memory": explain(error).code == 4,
            }
        answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    serve(_Desk().answer)

"""The figures of a CPU: a model of 160 million parameters beside transformers, the same budget
early and late in a conversation, memory, and how soon a first answer begins."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

import torch

from minikv.choice import Choice
from minikv.cli.bench import models, run
from minikv.cli.bench.everything import FULL, OURS, Everything, Part
from minikv.cli.bench.floors import middle
from minikv.cli.bench.peer import installed
from minikv.cli.bench.worker import PeerError, Worker
from minikv.models.errors import ModelError

_ALONE = "transformers is not there to compare with"
_LONG, _TURN = 32_768, 2048  # tokens of a long conversation, and of each prompt in it


def _start(every: Everything) -> None:
    """Seconds from nothing to the first token of the bundled model, the second time."""
    command = [sys.executable, "-m", "minikv.cli", "ask", "What does Velgate export?", "-n", "1"]

    def first() -> float:
        began = perf_counter()
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"Velgate exports mostly salt.\n")
            process.stdin.close()
            if not process.stdout.read(1):
                raise PeerError("minikv ask wrote no answer")
            return perf_counter() - began

    every.progress("start of minikv ask", 0, 0)
    first()
    seconds = [first() for _ in range(every.repeat)]
    every.figures["ask_first_token_s"] = seconds
    every.want("first token of `minikv ask`, warm", middle(seconds), 4.0, at_least=False, unit="s")


def _against_peer(
    every: Everything, shape: str, length: int, decode: float, decode_int8: float, prefill: float
) -> None:
    """Decode and prefill of a shape beside transformers."""
    tokens = every.tokens(length)
    note = "" if installed() and every.peer else _ALONE
    for formats in (("auto",), ("int8",)):
        bench = every.bench(shape, (FULL, OURS), formats, peer=True)
        try:
            bench.networks()
        except ModelError as error:  # no such kernel in this build, or on this processor
            bench.close()
            every.notes.append(str(error))
            continue
        try:
            if formats == ("auto",):
                bench.prefill(tokens)
            bench.decode(tokens)
        finally:
            every.taken(bench)
    where, ours = f"{shape} at {length:,}, adakv 512", OURS[0]

    def figure(what: str, kind: str, weights: str = "auto") -> float | None:
        return every.figure(what, shape, kind, ours, tokens, weights)

    every.want(f"decode, {where}", figure("vs_peer", "decode"), decode, note=note)
    every.want(f"decode int8, {where}", figure("vs_peer", "decode", "int8"), decode_int8, note=note)
    every.want(f"prefill, {where}", figure("vs_peer", "prefill"), prefill, note=note)
    every.want(f"eviction per step, {where}", figure("evict", "decode"), 0.02, at_least=False,
               unit="%")


def _flat(every: Everything) -> None:
    """A step late in a long conversation beside one early in it, under the same budget.

    The conversation is read as prompts of 2,048 tokens, each of which ends with an eviction: that
    takes a sixteenth of the attention of one prompt of 32,768, and leaves as many rows.
    """
    net = models.network(every.spec("s"))
    choice = Choice.read(*OURS)
    turn, turns = every.tokens(_TURN), _LONG // _TURN
    early, late = models.Cached(net, choice), models.Cached(net, choice)
    ids = models.prompt(turn, net.config.vocab)
    for done in range(turns):
        every.progress("decode at 32,768: reads", done, turns)
        late.read(ids) if not done else late.go_on(ids)
    early.read(ids)
    steps = 4 if every.small else 32
    for system in (early, late):
        system.write(steps)
    times: tuple[list[float], list[float]] = ([], [])
    for done in range(2 * every.repeat):
        every.progress("decode at 2,048 and 32,768", done, 2 * every.repeat)
        for taken, system in zip(times, (early, late), strict=True):
            taken.append(system.write(steps))
    every.figures["flat"] = {
        "turn": turn, "turns": turns, "early_s": times[0], "late_s": times[1],
        "early_rows": early.stats().kept_mean, "late_rows": late.stats().kept_mean,
    }  # fmt: skip
    every.want(
        "decode at 32k over decode at 2k, same budget", middle(times[1]) / middle(times[0]), 1.05,
        at_least=False,
    )  # fmt: skip


def _resident(every: Everything, length: int, *, peer: bool) -> None:
    """Peak resident memory of a prompt and some steps, each system in a process of its own."""
    tokens = every.tokens(length)
    systems: list[tuple[str, Choice | None]] = [
        ("minikv full", Choice.read(*FULL)), ("minikv adakv 512", Choice.read(*OURS)),
    ]  # fmt: skip
    if peer and every.peer and installed():
        systems.append((run.PEER, None))
    peaks: dict[str, int] = {}
    for done, (name, choice) in enumerate(systems):
        every.progress(f"memory at {length:,}: {name}", done, len(systems))
        worker = Worker(
            "minikv" if choice else run.PEER, every.spec("s"), torch.get_num_threads(), choice
        )
        try:
            worker.read(range(tokens))
            worker.write(4)
            peaks[name] = worker.peak()
        finally:
            worker.close()
    every.figures[f"peak_resident_{length}"] = peaks
    if peer:
        base = peaks.get(run.PEER)
        for name in list(peaks)[:2]:
            every.want(
                f"peak memory over transformers', s at {length:,}, {name}",
                None if base is None else peaks[name] / base, 1.0, at_least=False,
                note=_ALONE,
            )  # fmt: skip


PARTS: tuple[Part, ...] = (
    Part("start", _start),
    Part("s at 2,048", lambda a: _against_peer(a, "s", 2048, 4.5, 6.0, 1.4)),
    Part("flat", _flat),
    Part("memory at 8,192", lambda a: _resident(a, 8192, peer=True)),
    Part("s at 8,192", lambda a: _against_peer(a, "s", 8192, 9.0, 12.0, 1.6)),
    Part("tinyllama at 1,024", lambda a: _against_peer(a, "tinyllama", 1024, 4.0, 6.0, 1.2), True),
    Part("tinyllama at 4,096", lambda a: _against_peer(a, "tinyllama", 4096, 6.0, 9.0, 1.3), True),
    Part("memory at 32,768", lambda a: _resident(a, 32_768, peer=False), True),
)

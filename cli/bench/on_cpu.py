"""The figures of a CPU: a model of 160 million parameters beside transformers, the same budget
early and late in a conversation, memory, and how soon a first answer begins."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from time import perf_counter

import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import models, run
from minikv.cli.bench.everything import FULL, OURS, Everything, Part
from minikv.cli.bench.floors import Goal, middle
from minikv.cli.bench.peer import installed
from minikv.cli.bench.worker import PeerError, Worker

_FIRST = "first token of `minikv ask`, warm"
_FLAT = "decode at 32k over decode at 2k, same budget"
_ALONE = "without transformers"
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
            try:
                if not process.stdout.read(1):
                    raise PeerError("minikv ask wrote no answer")
            except BaseException:
                process.kill()
                raise
            return perf_counter() - began

    every.progress("start of minikv ask", 0, 0)
    every.deadline.require(first())
    seconds = [first()]
    while len(seconds) < every.repeat and every.deadline.fits(max(seconds)):
        seconds.append(first())
    every.figures["ask_first_token_s"] = seconds
    every.reach(_FIRST, middle(seconds))


def _against(shape: str, length: int, decode: float, decode_int8: float, prefill: float) -> Part:
    """Decode and prefill of a shape beside transformers, with these goals."""
    where, ours = f"{shape} at {length:,}, adakv 512", OURS[0]
    goals = (
        Goal(f"decode, {where}", None, decode),
        Goal(f"decode int8, {where}", None, decode_int8),
        Goal(f"prefill, {where}", None, prefill),
        Goal(f"eviction per step, {where}", None, 0.02, at_least=False, unit="%"),
    )
    asked = (
        ("vs_peer", "decode", "auto"),
        ("vs_peer", "decode", "int8"),
        ("vs_peer", "prefill", "auto"),
        ("evict", "decode", "auto"),
    )

    def measure(every: Everything) -> None:
        tokens = every.tokens(length)
        bench = every.bench(shape, (FULL, OURS), ("auto", "int8", "int4"), peer=True)
        try:
            bench.both(tokens)
        finally:
            every.taken(bench)
            for goal, (what, kind, weights) in zip(goals, asked, strict=True):
                alone = what == "vs_peer" and not (installed() and every.peer)
                found = every.figure(what, shape, kind, ours, tokens, weights)
                every.reach(goal.name, found, _ALONE if alone else "")

    def cost(every: Everything) -> float:
        """The two that a goal compares must have read."""
        return (1 + every.peer) * every.reading(shape, length)

    return Part(f"{shape} at {length:,}", measure, goals, cost=cost)


def _flat(every: Everything) -> None:
    """A step late in a long conversation beside one early in it, under the same budget.

    The conversation is read as prompts of 2,048 tokens, each of which ends with an eviction: that
    takes a sixteenth of the attention of one prompt of 32,768, and leaves as many rows.
    """
    net = models.network(every.spec("s"))
    turn, turns = every.tokens(_TURN), _LONG // _TURN
    early, late = every.cached(net, OURS), every.cached(net, OURS)
    ids = models.prompt(turn, net.config.vocab)
    every.has_read("s", turn, early.read(ids))
    longest = 0.0
    for done in range(turns):
        every.progress("decode at 32,768: reads", done, turns)
        every.deadline.require((turns - done) * longest)
        longest = max(longest, late.go_on(ids) if done else late.read(ids))
    steps = 4 if every.small else 32
    for system in (early, late):
        system.write(steps)
    times: tuple[list[float], list[float]] = ([], [])
    for done in range(2 * every.repeat):
        if done and not every.deadline.fits(steps * (times[0][0] + times[1][0])):
            every.notes.append(f"decode at 32,768: {done} of {2 * every.repeat} rounds, for time")
            break
        every.progress("decode at 2,048 and 32,768", done, 2 * every.repeat)
        for taken, system in zip(times, (early, late), strict=True):
            taken.append(system.write(steps))
    every.figures["flat"] = {
        "turn": turn,
        "turns": turns,
        "early_s": times[0],
        "late_s": times[1],
        "early_rows": early.stats().kept_mean,
        "late_rows": late.stats().kept_mean,
    }
    every.reach(_FLAT, middle(times[1]) / middle(times[0]))


def _resident(length: int, *, peer: bool, slow: bool = False) -> Part:
    """Peak resident memory of a prompt and some steps, each system in a process of its own."""
    systems = ("minikv full", "minikv adakv 512")
    names = {name: f"peak memory over transformers', s at {length:,}, {name}" for name in systems}

    def measure(every: Everything) -> None:
        tokens, peaks = every.tokens(length), dict[str, int]()
        asked: list[tuple[str, EvictionConfig | None]] = [
            (systems[0], EvictionConfig.read(*FULL)),
            (systems[1], EvictionConfig.read(*OURS)),
        ]
        if peer and every.peer and installed():
            asked.insert(0, (run.PEER, None))
        every.figures[f"peak_resident_{length}"] = peaks
        for done, (name, choice) in enumerate(asked):
            every.progress(f"memory at {length:,}: {name}", done, len(asked))
            every.deadline.require(every.reading("s", length))
            worker = Worker(
                "minikv" if choice else run.PEER,
                every.spec("s"),
                torch.get_num_threads(),
                choice,
                deadline=every.deadline,
            )
            try:
                worker.read(range(tokens))
                worker.write(4)
                peaks[name] = worker.peak()
            finally:
                worker.close()
            if name in peaks and run.PEER in peaks and name != run.PEER:
                every.reach(names[name], peaks[name] / peaks[run.PEER])
        if peer and run.PEER not in peaks:
            for name in names.values():
                every.reach(name, None, _ALONE)

    def cost(every: Everything) -> float:
        return 2 * every.reading("s", length)

    goals = tuple(Goal(name, None, 1.0, at_least=False) for name in names.values())
    return Part(f"memory at {length:,}", measure, goals if peer else (), slow, cost)


def _flat_cost(every: Everything) -> float:
    return (1 + _LONG // _TURN) * every.reading("s", _TURN)


PARTS: tuple[Part, ...] = (
    _against("s", 2048, 4.5, 6.0, 1.4),
    Part("start", _start, (Goal(_FIRST, None, 4.0, at_least=False, unit="s"),)),
    Part("flat", _flat, (Goal(_FLAT, None, 1.05, at_least=False),), cost=_flat_cost),
    _against("s", 8192, 9.0, 12.0, 1.6),
    _resident(8192, peer=True),
    replace(_against("tinyllama", 1024, 4.0, 6.0, 1.2), slow=True),
    replace(_against("tinyllama", 4096, 6.0, 9.0, 1.3), slow=True),
    _resident(32_768, peer=False, slow=True),
)

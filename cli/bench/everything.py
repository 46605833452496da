"""`minikv bench all`: all measurements for this machine.

A list of parts, the most important first. Each runs in a process of its own, which is ended when
the time is up. If one part fails, the next ones still run.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from time import perf_counter

from minikv.cli.bench import goals, shapes, signals
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.device import prepare
from minikv.cli.bench.floors import Rates, prefill_floor
from minikv.cli.bench.goals import Goal
from minikv.cli.bench.report import Report, columns
from minikv.cli.bench.results import Results, one_line
from minikv.errors import MinikvError

_GRACE = 5.0  # seconds that a part has to send its results once it is told to end
_LATE = "the time limit ended it"


@dataclass(frozen=True, slots=True)
class Part:
    """Figures that are measured together: (question, arguments) of each, a question being a module
    of this folder and its function. `slow`: only with --full."""

    name: str
    work: tuple[tuple[str, Arguments], ...]
    goals: tuple[Goal, ...] = ()
    slow: bool = False

    def seconds(self, rates: Rates) -> float:
        """The least time in seconds: every prompt once, at half the rate of large products."""
        found = 0.0
        for question, arguments in self.work:
            if question not in ("first_token.measure", "kernels.measure"):
                sizes = shapes.find(arguments.shape)
                for tokens in arguments.lengths():
                    found += 2 * prefill_floor(sizes, tokens, rates.matmul, rates.matmul)
        return found


@dataclass(frozen=True, slots=True)
class Done:
    """How a part ended: measured, measured in part, left out, cut short or failed, and why."""

    name: str
    seconds: float
    state: str
    why: str = ""


def parts(base: Arguments, *, gpu: bool) -> tuple[Part, ...]:
    """The list for a GPU or a CPU. `base`: device, threads, rounds, and whether to measure
    transformers."""
    if gpu:
        big = replace(base, shape="llama-3-8b", budget="1024")
        step = replace(big, length="1024", budget="512")
        timed = replace(big, length="1024,8192,32768")
        budgets = ",".join(map(str, goals.BUDGETS))
        evicting = replace(
            big, length="8192", decode=",".join(goals.STEPS), budget=budgets, peer=False
        )
        scoring = replace(
            big, length="8192,32768", policy=",".join(goals.JUDGES), decode="none", peer=False
        )
        long = replace(big, decode="roco")
        return (
            Part("decode step", (("decode.measure", step),), goals.GPU_STEP),
            Part("kernels", (("kernels.measure", timed),), goals.GPU_KERNELS),
            Part("eviction", (("decode.measure", evicting),), goals.GPU_EVICTION),
            Part("scoring", (("prefill.measure", scoring),), goals.GPU_SCORING),
            Part("peak", (("long.measure_peak", replace(long, length="32768")),), goals.GPU_PEAK),
            Part("128k tokens", (("long.measure", replace(long, length="131072")),)),
            Part("512k tokens", (("long.measure", replace(long, length="524288")),)),
        )
    small = replace(base, shape="s", decode="roco")
    at_8k, at_32k = (replace(small, length=length) for length in ("8192", "32768"))
    return (
        _beside_peer(base, "s", 2048, goals.beside_peer("s", 2048, 4.5, 6.0, 1.4)),
        Part("start", (("first_token.measure", base),), goals.FIRST_TOKEN),
        Part("flat", (("flat.measure", small),), goals.FLAT),
        _beside_peer(base, "s", 8192, goals.beside_peer("s", 8192, 9.0, 12.0, 1.6)),
        Part("memory at 8,192", (("memory.measure", at_8k),), goals.RESIDENT),
        _slow(base, 1024, goals.beside_peer("tinyllama", 1024, 4.0, 6.0, 1.2)),
        _slow(base, 4096, goals.beside_peer("tinyllama", 4096, 6.0, 9.0, 1.3)),
        Part("memory at 32,768", (("memory.measure", replace(at_32k, peer=False)),), slow=True),
    )


def _beside_peer(base: Arguments, shape: str, length: int, wanted: tuple[Goal, ...]) -> Part:
    one = replace(base, shape=shape, length=str(length), decode="roco")
    packed = replace(one, weights="auto,int8,int4")
    work = (("decode.measure", packed), ("prefill.measure", one))
    return Part(f"{shape} at {length:,}", work, wanted)


def _slow(base: Arguments, length: int, wanted: tuple[Goal, ...]) -> Part:
    return replace(_beside_peer(base, "tinyllama", length, wanted), slow=True)


def run(wanted: Sequence[Part], rates: Rates, report: Report, until: float, *, full: bool) -> None:
    """Run every part in order until `until` (of `perf_counter`); show and write after each. Raises
    MinikvError if nothing could be measured."""
    results, done, complete = Results(report.progress), list[Done](), False
    began = perf_counter()

    def update() -> None:
        why = {each.name: each.why for each in done}
        report.record |= {
            "rows": [row.record() for row in results.rows],
            "kernels": [timing.record() for timing in results.kernels],
            "goals": [
                goal.record(results, why.get(part.name, "not reached"))
                for part in wanted
                for goal in part.goals
            ],
            "figures": results.figures,
            "notes": results.notes,
            "parts": [asdict(each) for each in done],
            "seconds": perf_counter() - began,
        }
        report.update(results)

    results.added = lambda *new: update()
    try:
        for part in wanted:
            at, said = perf_counter(), len(results.notes)
            state, why = "left out", _obstacle(part, rates, until - at, full=full)
            if not why:
                state, why = _measure(part, rates, results, until - at)
            if why:
                results.note(f"{part.name}: {why}")
            elif any(goal.find(results) is None for goal in part.goals):
                state, why = "measured in part", "; ".join(results.notes[said:])
            done.append(Done(part.name, perf_counter() - at, state, why))
            update()
            if state != "left out":
                report.terminal.note(f"{part.name}: {done[-1].seconds:.0f} s")
        complete = True
    finally:
        update()
        if results.rows:
            report.show(columns(any(row.vs_transformers is not None for row in results.rows)))
        if results.measured:
            report.show(goals.table(report.record["goals"]))
        if complete or results.measured:
            report.close(complete=complete)
    if not results.measured:
        raise MinikvError("nothing could be measured", "the lines above say why")


def _obstacle(part: Part, rates: Rates, left: float, *, full: bool) -> str:
    """Why a part cannot start; "" if it can."""
    if part.slow and not full:
        return "only with --full"
    if left <= 0:
        return "no time left"
    needs = part.seconds(rates)
    return f"needs about {needs:,.0f} s, {left:,.0f} s are left" if needs > left else ""


def _measure(part: Part, rates: Rates, results: Results, left: float) -> tuple[str, str]:
    """Run a part. Returns how it ended, and why. If it takes too long, its process is killed."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, part.work, rates))
    process.start()
    theirs.close()
    try:
        state, why = _received(pipe, results, left)
        if not state:
            state, why = "cut short", _LATE
        return state, why
    finally:
        process.terminate()  # of no consequence for one that has ended
        _received(pipe, results, _GRACE)
        process.kill()
        process.join()
        pipe.close()


def _received(pipe: Connection, results: Results, seconds: float) -> tuple[str, str]:
    """Receive the messages of a part for `seconds`. Returns its state, and why, once it ended."""
    until, state, why = perf_counter() + seconds, "", ""
    while not state and pipe.poll(max(0.0, until - perf_counter())):
        state, why = _receive(pipe, results)
    return state, why


def _receive(pipe: Connection, results: Results) -> tuple[str, str]:
    """Receive a message. Returns the state, and why, if it was the last one."""
    try:
        kind, *content = pipe.recv()
    except (EOFError, OSError):
        return "failed", "its process ended unexpectedly"
    if kind == "progress":
        results.progress(*content)
        return "", ""
    if kind == "results":
        rows, kernels, figures, notes = content
        for note in notes:
            results.note(note)
        results.add(rows, kernels, figures)
        return "", ""
    state, why = content
    return state, why


def _work(pipe: Connection, work: Sequence[tuple[str, Arguments]], rates: Rates) -> None:
    """A part, in its own process. Sends ("progress", what, done, total), ("results", rows, kernels,
    figures, notes) and at last ("end", state, why)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that shows results ends this one
    results = Results(lambda *where: pipe.send(("progress", *where)))
    results.added = lambda *new: pipe.send(("results", *new, results.notes))
    with signals.caught():
        state, why = "measured", ""
        try:
            for question, arguments in work:
                module, function = question.split(".")
                measure = getattr(import_module(f"minikv.cli.bench.{module}"), function)
                measure(arguments, prepare(arguments.device, arguments.threads), rates, results)
            if results.failures:
                state = "measured in part" if results.measured else "failed"
                why = one_line(results.failures[0])
        except KeyboardInterrupt:
            state, why = "cut short", _LATE
        except Exception as error:  # of whatever kind: the other parts say something too
            state, why = "failed", one_line(error)
        results.add()  # the last notes
        pipe.send(("end", state, why))

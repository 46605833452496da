"""`minikv bench`: what is asked for is checked without torch, measured, shown and written.

Whatever ends a run, what was measured by then is shown and written first.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any

from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.device import prepare
from minikv.cli.bench.report import Report, columns
from minikv.cli.bench.results import Results
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError

if TYPE_CHECKING:
    import torch

    from minikv.cli.bench.floors import Rates

_MOST_MINUTES = 24 * 60


def measure(
    question: str, arguments: Arguments, command: Sequence[str], terminal: Terminal
) -> None:
    """One question: decode, prefill or kernels. Raises UsageError, before torch is loaded where it
    can, ContextError, ModelError and MemoryShortError."""
    arguments.check()
    report = Report(command, terminal, arguments.as_json)
    terminal.status("starting")
    device = prepare(arguments.device, arguments.threads)
    about = arguments.name
    if question == "kernels":
        from minikv.cli.bench import kernels, shapes

        head_dim = shapes.find(arguments.shape).head_dim
        found = kernels.find(device, arguments.kernels, head_dim)
        about = f"{found.name} kernels, heads of {arguments.name},"
    elif arguments.kernels == "triton" and device.type != "cuda":
        raise UsageError("no Triton kernels without a CUDA device", "use --kernels auto or torch")
    rates = _machine(report, device, about)
    results, done = Results(report.progress), False

    def update() -> None:
        what, found = "kernels" if question == "kernels" else "rows", results.rows
        records = [each.record() for each in (results.kernels if what == "kernels" else found)]
        report.record |= results.facts | {what: records, "notes": results.notes}
        report.update(results)

    results.added = lambda *new: update()
    try:
        import_module(f"minikv.cli.bench.{question}").measure(arguments, device, rates, results)
        if results.failures:
            raise results.failures[0]
        done = True
    finally:
        update()
        if results.rows:
            report.show(_legend(results.facts["wanted"], arguments.peer))
        if done or results.measured:
            report.close(complete=done)


def measure_all(
    arguments: Arguments,
    minutes: float,
    only: Sequence[str],
    command: Sequence[str],
    terminal: Terminal,
    *,
    full: bool,
) -> None:
    """What this machine can show, in so many minutes; `only` parts with these names, if any are
    given. Raises UsageError, and MinikvError when nothing at all could be measured."""
    began = perf_counter()
    arguments.check()
    if not 0 < minutes <= _MOST_MINUTES:
        raise UsageError(f"--minutes must be more than 0, at most {_MOST_MINUTES:,}")
    report = Report(command, terminal, arguments.as_json)
    terminal.status("starting")
    device = prepare(arguments.device, arguments.threads)
    from minikv.cli.bench import everything, machine

    wanted = everything.parts(arguments, gpu=device.type == "cuda")
    if missing := set(only) - {part.name for part in wanted}:
        names = ", ".join(part.name for part in wanted)
        raise UsageError(f"no part is called {min(missing)!r}", f"parts: {names}")
    wanted = tuple(part for part in wanted if not only or part.name in only)
    rates = _machine(report, device, "the whole list")
    machine.settle(device)  # the memory is for the parts, which are other processes
    report.record["minutes"] = minutes
    everything.run(wanted, rates, report, began + 60 * minutes, full=full or bool(only))


def _machine(report: Report, device: torch.device, about: str) -> Rates:
    """Measure the machine and put it at the head of the report."""
    from minikv.cli.bench import machine

    report.terminal.status("measuring the machine's bandwidth and products")
    rates = machine.measure(device)
    report.machine(machine.facts(device), machine.versions(), rates, about)
    return rates


def _legend(wanted: Any, peer: bool) -> str:
    """How the figures came about, and what the columns mean."""
    return (
        f"medians of {wanted['repeat']} rounds in turns; {wanted['steps']} steps a decode round; "
        f"{wanted['dtype']}\n{columns(peer)}"
    )

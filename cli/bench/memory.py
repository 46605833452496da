"""Peak resident memory of a prompt and some steps, each system in a process of its own."""

from __future__ import annotations

import torch

from minikv.cli.bench import peer
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.floors import Rates
from minikv.cli.bench.results import Results
from minikv.cli.bench.turns import spec_of

_STEPS = 4


def measure(arguments: Arguments, device: torch.device, rates: Rates, results: Results) -> None:
    """Measure the figure `peak_resident_LENGTH`: bytes by system."""
    spec, threads = spec_of(arguments, device), torch.get_num_threads()
    (length,), peaks = arguments.lengths(), dict[str, int]()
    wanted: dict[str, tuple[object, ...]] = {}
    if arguments.peer and peer.installed():
        wanted[peer.NAME] = (peer.transformers, spec, threads)
    for eviction in arguments.evictions():
        name = f"minikv {eviction.policy}" + f" {eviction.budget}" * eviction.evicts
        wanted[name] = (peer.minikv, spec, threads, eviction)
    for done, (name, (make, *more)) in enumerate(wanted.items()):
        results.progress(f"memory at {length:,}: {name}", done, len(wanted))
        try:
            system = peer.Process(name, make, *more)  # type: ignore[arg-type]
            try:
                system.read(range(length))
                system.write(_STEPS)
                peaks[name] = system.peak()
            finally:
                system.close()
        except peer.PeerError as error:
            results.note(f"memory at {length:,}: {error}")
            continue
        results.add(figures={f"peak_resident_{length}": dict(peaks)})

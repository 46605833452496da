"""Every system of a run, in turns, so that all see the same machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import machine, models, peer, shapes
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.cached import Cached
from minikv.cli.bench.floors import Rates, ratio
from minikv.cli.bench.results import Results, Row
from minikv.errors import ContextError
from minikv.models.llama import Llama


@dataclass(slots=True, eq=False)
class Entry:
    """A system and its measurements. minikv's have `weights`, and, for steps under a decode policy,
    a `base`: the same cache without a policy."""

    system: Cached | peer.Process
    weights: str = "-"
    times: list[float] = field(default_factory=list)
    stats: CacheStats | None = None
    peak: int | None = None
    base: Cached | None = None
    base_times: list[float] = field(default_factory=list)

    @property
    def eviction(self) -> EvictionConfig | None:
        return self.system.eviction if isinstance(self.system, Cached) else None

    @property
    def full(self) -> bool:
        return self.eviction is not None and not self.eviction.evicts

    @property
    def label(self) -> str:
        """The name of the system, in a few words."""
        if not isinstance(self.system, Cached):
            return self.system.name
        eviction = self.system.eviction
        what = f"{eviction.policy} {eviction.budget}" if eviction.evicts else eviction.policy
        return what if self.weights == "auto" else f"{what} {self.weights}"

    def close(self) -> None:
        """Free the caches."""
        for system in (self.system, self.base):
            if isinstance(system, Cached):
                system.close()


class Run:
    """The networks of a run, and transformers in a process of its own."""

    def __init__(
        self, arguments: Arguments, device: torch.device, rates: Rates, results: Results
    ) -> None:
        """Raises ModelError, MemoryShortError, and ContextError for a length that the model cannot
        take beside so many steps."""
        self.device, self.rates, self.results = device, rates, results
        self.repeat, self.name = arguments.repeat, arguments.name
        self.steps = arguments.steps or (128 if device.type == "cuda" else 32)
        self.room = 3 + self.repeat * (3 + self.steps)  # steps after a prompt, warm-ups included
        self.evictions, self.spec = arguments.evictions(), spec_of(arguments, device)
        self.networks: dict[str, Llama] = {}
        for form in arguments.formats():
            try:
                self.networks[form] = models.network(replace(self.spec, weights=form))
            except Exception as error:
                if not self.networks:
                    raise
                results.fail(f"weights {form}", error)  # no such kernel on this processor
        net = next(iter(self.networks.values()))
        most = net.config.max_context - self.room
        if max(arguments.lengths()) > most:
            raise ContextError(
                f"--length {max(arguments.lengths()):,} is more than the {most:,} tokens that this "
                "model takes beside the steps that are measured",
                "a smaller --length",
            )
        self.sizes, self.dtype = models.sizes_of(net.config), str(net.dtype).removeprefix("torch.")
        self.spec = replace(self.spec, dtype=self.dtype)  # of a model on disk, as it was read
        self._peer = self._start_peer() if arguments.peer else None
        self.attention: dict[int, float] = {}  # tokens -> flops a second of torch's attention
        results.facts["attention_flops_s"] = self.attention
        results.facts["wanted"] = {
            "model": self.name,
            "random_weights": self.spec.folder is None,
            "dtype": self.dtype,
            "weights": list(self.networks),
            "kv": self.spec.kv,
            "kernels": self.spec.kernels,
            "repeat": self.repeat,
            "steps": self.steps,
        }

    def _start_peer(self) -> peer.Process | None:
        if not peer.installed():
            self.results.note(f"{peer.NAME} is not installed: nothing to compare with")
            return None
        self.results.progress(f"starting {peer.NAME}", 0, 0)
        try:
            return peer.Process(peer.NAME, peer.transformers, self.spec, torch.get_num_threads())
        except Exception as error:
            self.results.note(f"not compared: {error}")
            return None

    def close(self) -> None:
        """End the other process and give the networks back."""
        if self._peer is not None:
            self._peer.close()
        self.networks.clear()
        machine.settle(self.device)

    @contextlib.contextmanager
    def systems(self) -> Iterator[list[Entry]]:
        """All with empty caches, the full cache first, transformers after the first weights: that
        is what it is compared with. Raises UsageError for a budget that is too small."""
        spec, entries = self.spec, list[Entry]()
        try:
            for form, net in self.networks.items():
                entries += [
                    Entry(Cached(net, eviction, spec.kernels, spec.kv), form)
                    for eviction in self.evictions
                ]
            if self._peer is not None and self._peer.alive:
                entries.insert(len(self.evictions), Entry(self._peer))
            yield entries
        finally:
            for entry in entries:
                entry.close()
            entries.clear()
            machine.settle(self.device)

    def each(self, what: str, entries: list[Entry], work: Callable[[Entry], None]) -> None:
        """A turn of every system. One that fails takes no more turns."""
        for number, entry in enumerate(list(entries)):
            self.results.progress(f"{what}: {entry.label}", number, len(entries))
            try:
                work(entry)
                continue
            except Exception as error:
                if isinstance(entry.system, Cached):
                    self.results.fail(f"{what}, {entry.label}", error)
                else:
                    self.results.note(f"{what}, {error}")
            # Outside, so that nothing of what failed is held by its traceback.
            entries.remove(entry)
            entry.close()
            machine.settle(self.device)

    def prompt(self, length: int) -> list[int]:
        """Random ids."""
        return models.prompt(length, self.sizes.vocab)

    def read(self, entry: Entry, ids: list[int], others: Sequence[Entry] = ()) -> float:
        """Seconds of a prompt. Notes the memory it took, without what the `others` hold."""
        system = entry.system
        if not isinstance(system, Cached):
            seconds = system.read(ids)
            entry.peak = system.peak()
            return seconds
        machine.forget_peak(self.device)
        seconds = system.read(ids, self.room)
        entry.stats, entry.peak = system.stats(), machine.peak(self.device)
        if entry.peak is not None:
            nets = (net for net in self.networks.values() if net is not system.net)
            entry.peak -= sum(net.weight_bytes for net in nets)
            for cache in (c for other in others for c in (other.system, other.base)):
                if isinstance(cache, Cached) and cache is not system:
                    entry.peak -= cache.stats().allocated_bytes
        return seconds

    def row(self, kind: str, length: int, entry: Entry, entries: Sequence[Entry]) -> Row:
        """What was measured of it, beside the full cache and transformers."""
        full = next((e for e in entries if e.full and e.times), None)
        other = next((e for e in entries if e.eviction is None and e.times), None)
        if isinstance(entry.system, Cached):
            for notice in entry.system.notices:
                self.results.note(notice)
        made = Row(
            kind,
            self.name,
            "minikv" if isinstance(entry.system, Cached) else entry.system.name,
            length,
            entry.times,
            vs_full=None if full is None else ratio(full.times, entry.times),
            vs_transformers=None if other is None else ratio(other.times, entry.times),
            peak_bytes=entry.peak,
        )
        own, stats = entry.eviction, entry.stats
        if own is None or stats is None:
            return made
        return replace(
            made,
            policy=own.policy,
            decode=own.decode,
            budget=str(own.budget) if own.evicts else "-",
            stride=own.stride,
            weights=entry.weights,
            kv=self.spec.kv,
            kv_bytes={
                "held": stats.held_bytes,
                "allocated": stats.allocated_bytes,
                "peak_prefill": stats.peak_bytes,
                "full": stats.full_bytes,
                "kept_mean": stats.kept_mean,
                "kept_max": stats.kept_max,
            },
        )


def spec_of(arguments: Arguments, device: torch.device) -> models.Spec:
    """Which network. Random weights are bfloat16 unless another dtype is asked for."""
    folder = None if arguments.model is None else Path(arguments.model)
    random = folder is None
    return models.Spec(
        shapes.find(arguments.shape) if random else None,
        folder,
        "bfloat16" if random and arguments.dtype == "auto" else arguments.dtype,
        str(device),
        kernels=arguments.kernels,
        kv=arguments.kv,
    )

"""A system that takes turns, and the row that comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import models
from minikv.cli.bench.floors import middle
from minikv.cli.bench.worker import Worker


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one length.

    times: seconds of a step (decode) or of the prompt (prefill), one per round. floor: the least
    they could be, in seconds. evict: what the policy adds to a step over the same cache without
    one, as a share, or to a prompt over the full cache's. vs_full, vs_peer: how many times as
    fast, by medians. step_bytes: read per step, weights and rows. peak: bytes at the high-water
    mark, other systems' weights and caches not counted. kept_in: what keys and values are kept in.
    captured: whether a step was one CUDA graph. stream: bytes a second, which a step's floor is
    made with. None: not measured.
    """

    kind: str
    model: str
    system: str
    length: int
    times: tuple[float, ...]
    policy: str = "-"
    decode: str = "-"
    budget: str = "-"
    stride: int = 0
    weights: str = "-"
    kept_in: str = "auto"
    floor: float | None = None
    evict: float | None = None
    vs_full: float | None = None
    vs_peer: float | None = None
    step_bytes: dict[str, float] = field(default_factory=dict)
    kv: dict[str, float] = field(default_factory=dict)
    peak: int | None = None
    captured: bool | None = None
    stream: float | None = None

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return middle(self.times)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return (self.length if self.kind == "prefill" else 1) / self.seconds

    @property
    def share(self) -> float | None:
        """The floor's part of the time: 1 would be the hardware's limit."""
        return None if self.floor is None else self.floor / self.seconds

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "kind": self.kind,
            "model": self.model,
            "system": self.system,
            "policy": self.policy,
            "decode": self.decode,
            "budget": self.budget,
            "stride": self.stride,
            "weights": self.weights,
            "kv": self.kept_in,
            "length": self.length,
            "seconds": self.seconds,
            "tok_s": self.rate,
            "times": list(self.times),
            "floor_s": self.floor,
            "share_of_floor": self.share,
            "evict_share": self.evict,
            "vs_full": self.vs_full,
            "vs_transformers": self.vs_peer,
            "step_bytes": self.step_bytes,
            "kv_bytes": self.kv,
            "peak_bytes": self.peak,
            "captured": self.captured,
            "read_bytes_s": self.stream,
        }


class Seat:
    """A system that takes turns, and what was measured of it."""

    def __init__(self, system: models.Cached | Worker, name: str, weights: str = "-") -> None:
        self.system, self.name, self.weights = system, name, weights
        self.times: list[float] = []
        self.twin: models.Cached | None = None
        self.twin_times: list[float] = []
        self.rows = 0.0  # bytes of the cache that a step reads
        self.stats: CacheStats | None = None
        self.peak: int | None = None

    @property
    def eviction(self) -> EvictionConfig | None:
        return self.system.eviction if isinstance(self.system, models.Cached) else None

    @property
    def full(self) -> bool:
        return self.eviction is not None and not self.eviction.evicts

    @property
    def label(self) -> str:
        """In a few words."""
        choice = self.eviction
        if choice is None:
            return self.name
        what = f"{choice.policy} {choice.budget}" if choice.evicts else choice.policy
        return what if self.weights in ("auto", "-") else f"{what} {self.weights}"

    def close(self) -> None:
        """Give the caches back."""
        for system in (self.system, self.twin):
            if isinstance(system, models.Cached):
                system.close()


def kept(stats: CacheStats | None) -> dict[str, float]:
    """Bytes of the cache when the prompt had been read, and the rows that a head holds."""
    if stats is None:
        return {}
    return {
        "held": stats.held_bytes,
        "allocated": stats.allocated_bytes,
        "peak_prefill": stats.peak_bytes,
        "full": stats.full_bytes,
        "kept_mean": stats.kept_mean,
        "kept_max": stats.kept_max,
    }

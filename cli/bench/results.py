"""The results of a run, with the names that its JSON uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from minikv.cli.wording import worded
from minikv.errors import MinikvError


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one length.

    times: seconds of a step (decode) or of the prompt (prefill), one per round. floor_s: the least
    that the hardware allows. evict_share: the time that the policy adds, as a share of a step over
    the same cache without a policy, or of a prompt with the full cache. vs_full, vs_transformers:
    how many times as fast, by medians. step_bytes: weights and cache that a step reads. kv_bytes:
    the cache after the prompt, with the tokens per head that it keeps. kv: the number format of
    keys and values. peak_bytes: high-water mark, without other systems' weights and caches.
    captured: whether a step was one CUDA graph. read_bytes_s: the rate from which a step's floor is
    computed. None: not measured.
    """

    kind: str
    model: str
    system: str
    length: int
    times: list[float]
    policy: str = "-"
    decode: str = "-"
    budget: str = "-"
    stride: int = 0
    weights: str = "-"
    kv: str = "auto"
    floor_s: float | None = None
    evict_share: float | None = None
    vs_full: float | None = None
    vs_transformers: float | None = None
    step_bytes: dict[str, float] = field(default_factory=dict)
    kv_bytes: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    captured: bool | None = None
    read_bytes_s: float | None = None

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return median(self.times)

    @property
    def tok_s(self) -> float:
        """Tokens a second."""
        return (self.length if self.kind == "prefill" else 1) / self.seconds

    @property
    def share_of_floor(self) -> float | None:
        """The floor's part of the time: 1 would be the hardware's limit."""
        return None if self.floor_s is None else self.floor_s / self.seconds

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        derived = {"seconds": self.seconds, "tok_s": self.tok_s}
        return asdict(self) | derived | {"share_of_floor": self.share_of_floor}


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel on one size of inputs. kernels: which kernels ran (triton, native or torch).
    floor_s: seconds at the machine's rates. captured: whether the calls were one CUDA graph."""

    kernel: str
    case: str
    kernels: str
    times: list[float]
    bytes: int
    flops: int
    floor_s: float
    captured: bool

    @property
    def seconds(self) -> float:
        """Median of a call."""
        return median(self.times)

    @property
    def share_of_floor(self) -> float:
        """The floor's part of the time."""
        return self.floor_s / self.seconds

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self) | {"seconds": self.seconds, "share_of_floor": self.share_of_floor}


class Results:
    """The results so far. `added(rows, kernels, figures)` is called after every addition,
    `progress(what, done, total)` before every piece of work."""

    def __init__(
        self,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        added: Callable[..., None] = lambda rows, kernels, figures: None,
    ) -> None:
        self.progress, self.added = progress, added
        self.rows: list[Row] = []
        self.kernels: list[Timing] = []
        self.figures: dict[str, object] = {}
        self.notes: list[str] = []
        self.facts: dict[str, object] = {}  # about the run, for JSON
        self.failures: list[Exception] = []  # of single systems; the others were measured

    def add(
        self,
        rows: Sequence[Row] = (),
        kernels: Sequence[Timing] = (),
        figures: dict[str, object] | None = None,
    ) -> None:
        """Add results."""
        self.rows += rows
        self.kernels += kernels
        self.figures |= figures or {}
        self.added(rows, kernels, figures)

    def note(self, text: str) -> None:
        """A line for the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def fail(self, what: str, error: Exception) -> None:
        """One system failed: the others are measured, and the first error ends the run."""
        self.note(f"{what}: {one_line(error)}")
        self.failures.append(error.with_traceback(None))  # a traceback keeps tensors alive

    @property
    def measured(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.rows or self.kernels or self.figures)


def one_line(error: BaseException) -> str:
    """An error in at most 200 characters. An error not meant for users begins with its type."""
    from minikv.models.errors import ModelError  # late: brings torch

    said = " ".join(worded(str(error)).split())
    if not isinstance(error, (MinikvError, ModelError)):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return said[:200]

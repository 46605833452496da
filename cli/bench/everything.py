"""`minikv bench all`: every figure that this machine can show, each beside what it should be.

The parts are in `on_cpu` and `on_gpu`, the most telling first. The list of goals is whole from the
start; a part fills its own in. A part begins if what it needs at the least fits into the time that
is left, and whatever goes wrong in it is no reason to leave out the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import floors, kernels, machine, models, run, shapes
from minikv.cli.bench.deadline import Deadline, Guesses, Late
from minikv.cli.bench.floors import Goal, Rates
from minikv.cli.bench.rows import Row
from minikv.models.llama import Llama

Progress = Callable[[str, int, int], None]

FULL = ("full", "none", "512")
OURS = ("adakv", "roco", "512")
"""The baseline and the pair that the goals name: policy, decode policy, budget."""

_LABEL = f"{OURS[0]} {OURS[2]}"
_OPEN = "not reached"  # why there is no figure yet


@dataclass(frozen=True, slots=True)
class Part:
    """Some figures that are measured together, and the goals they belong to. `slow`: only with
    --full. `cost`: seconds that it takes at the least, as far as that can be known before."""

    name: str
    run: Callable[[Everything], None]
    goals: tuple[Goal, ...] = ()
    slow: bool = False
    cost: Callable[[Everything], float] = lambda every: 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a part: measured, left out or failed, and why."""

    name: str
    seconds: float
    state: str
    why: str = ""


class Everything:
    """What is measured so far: rows, kernels, goals, and figures that are neither."""

    def __init__(
        self,
        device: torch.device,
        rates: Rates,
        progress: Progress,
        *,
        repeat: int = 3,
        peer: bool = True,
        small: bool = False,
        deadline: Deadline | None = None,
    ) -> None:
        """`small` takes tiny networks and short prompts: to see that all parts run."""
        self.device, self.rates, self.repeat, self.peer = device, rates, repeat, peer
        self.small = small
        self.deadline, self.guesses = deadline or Deadline(), Guesses()
        self.rows: list[Row] = []
        self.timings: list[kernels.Timing] = []
        self.goals: list[Goal] = []
        self.figures: dict[str, object] = {}
        self.notes: list[str] = []
        self.parts: list[Done] = []
        self.now = ""  # the part that runs
        self.broken = False  # the GPU answers no more
        self.progress = progress

    @property
    def measured(self) -> bool:
        """Whether there is anything to show."""
        return (
            bool(self.rows or self.timings)
            or any(self.figures.values())
            or any(goal.measured is not None for goal in self.goals)
        )

    def go(
        self,
        parts: Sequence[Part],
        slow: bool = False,
        after: Callable[[Done], None] = lambda done: None,
    ) -> None:
        """Every part in order, as long as there is time; `after` each, what became of it."""
        self.goals = [replace(goal, note=_OPEN) for part in parts for goal in part.goals]
        for part in parts:
            began, state, why = self.deadline.now(), "left out", self._obstacle(part, slow)
            said = len(self.notes)
            if not why:
                self.now = part.name
                state, why = self._run(part)
                self.now = ""
            if why:
                self.notes.append(f"{part.name}: {why}")
            if self._explain(part, why or "; ".join(self.notes[said:])) and state == "measured":
                state = "measured in part"
            done = Done(part.name, self.deadline.now() - began, state, why)
            self.parts.append(done)
            after(done)

    def _explain(self, part: Part, why: str) -> bool:
        """Whether goals of a part have no figure; they say why, unless they do already."""
        mine = {goal.name for goal in part.goals}
        self.goals = [
            replace(goal, note=why or _OPEN) if goal.name in mine and goal.note == _OPEN else goal
            for goal in self.goals
        ]
        return any(goal.name in mine and goal.measured is None for goal in self.goals)

    def _obstacle(self, part: Part, slow: bool) -> str:
        """Why a part is not begun; nothing if it is."""
        if self.broken:
            return "the GPU answers no more, see above"
        if part.slow and not slow:
            return "only with --full"
        if self.deadline.left <= 0:
            return "no time left"
        try:
            self.deadline.require(part.cost(self))
        except Late as error:
            return str(error)
        return ""

    def _run(self, part: Part) -> tuple[str, str]:
        """How it ended, and why so."""
        state, why = "measured", ""
        try:
            part.run(self)
        except Late as error:
            state, why = "cut short", str(error)
        except Exception as error:  # of whatever kind: the other parts say something too
            state, why = "failed", run.one_line(error)
        try:  # only now is nothing held by a traceback
            models.settle(self.device)
        except RuntimeError as error:
            state, why = "failed", why or run.one_line(error)
        if not machine.healthy(self.device):
            self.broken, state = True, "failed"
            why = (
                f"{why or 'the GPU failed'}; after this the GPU answers no more: what would "
                "come next is missing because of it"
            )
        return state, why

    # -- what parts are made of ---------------------------------------------------------------

    def spec(self, shape: str, weights: str = "auto") -> models.Spec:
        """A random network in bfloat16."""
        sizes = shapes.find("tiny" if self.small else shape)
        return models.Spec(sizes, None, "bfloat16", str(self.device), weights)

    def tokens(self, count: int) -> int:
        """So many, or few where the parts are only tried."""
        return max(64, count // 64) if self.small else count

    def bench(
        self,
        shape: str,
        choices: Sequence[tuple[str, str, str]],
        formats: tuple[str, ...] = ("auto",),
        *,
        peer: bool = False,
    ) -> run.Bench:
        """Of a shape under policies, given as (policy, decode policy, budget); the full cache with
        the first format of the weights."""
        gpu = self.device.type == "cuda"
        wanted = run.Wanted(
            self.spec(shape),
            shape,
            tuple(EvictionConfig.read(*each) for each in choices),
            (),
            formats,
            self.repeat,
            4 if self.small else 128 if gpu else 32,
            peer and self.peer,
            full_once=True,
        )
        return run.Bench(
            wanted,
            self.rates,
            self.progress,
            deadline=self.deadline,
            guesses=self.guesses,
            lenient=True,
        )

    def cached(self, net: Llama, choice: tuple[str, str, str]) -> models.Cached:
        """A network under policies; what it does ends when the time is up."""
        return models.Cached(net, EvictionConfig.read(*choice), check=self.deadline.check)

    def reading(self, shape: str, length: int) -> float:
        """Seconds that a prompt of a shape takes, as far as can be told."""
        sizes = self.spec(shape).sizes
        assert sizes is not None
        bound = floors.read_bound(sizes, self.tokens(length), self.rates)
        return self.guesses.say("read", _LABEL, bound)

    def has_read(self, shape: str, tokens: int, seconds: float) -> None:
        """So long it took, for later guesses."""
        sizes = self.spec(shape).sizes
        assert sizes is not None
        self.guesses.learn("read", _LABEL, seconds, floors.read_bound(sizes, tokens, self.rates))

    def taken(self, bench: run.Bench) -> list[Row]:
        """Its rows, which are everything's from now on."""
        self.rows += bench.rows
        self.notes += [note for note in bench.notes if note not in self.notes]
        bench.close()
        return bench.rows

    def figure(
        self, what: str, model: str, kind: str, policy: str, length: int, weights: str = "auto"
    ) -> float | None:
        """`what` ("share", "evict", "vs_peer") of the newest row that is this one of minikv's."""
        wanted = (model, kind, policy, length, weights, "minikv")
        for row in reversed(self.rows):
            if (row.model, row.kind, row.policy, row.length, row.weights, row.system) == wanted:
                found: float | None = getattr(row, what)
                return found
        return None

    def reach(self, name: str, measured: float | None, note: str = "") -> None:
        """The figure of a goal; None: there is none, and `note` may say why."""
        at = next(i for i, goal in enumerate(self.goals) if goal.name == name)
        self.goals[at] = replace(
            self.goals[at], measured=measured, note=note or ("" if measured is not None else _OPEN)
        )

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "rows": [row.record() for row in self.rows],
            "kernels": [timing.record() for timing in self.timings],
            "goals": [goal.record() for goal in self.goals],
            "figures": dict(self.figures),
            "notes": list(self.notes),
            "parts": [asdict(done) for done in self.parts],
        }

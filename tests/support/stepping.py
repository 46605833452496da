"""A conversation led by two engines at once: one asks the host at every step, one asks nobody."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from small import VOCAB, engine, ids, network
from tape import Tape

from minikv import policies
from minikv.engine.capture import Eager
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling, pick
from minikv.kernels.dispatch import Kernels
from minikv.models.llama import Llama

GREEDY = Sampling()
STEPS = [name for name in policies.step_names() if name != "none"]


@dataclass
class Pair:
    """`there` steps through an `Eager`, `here` through the scheduler; both must always agree."""

    here: Engine
    there: Engine
    sampling: Sampling = GREEDY
    seed: int = 3
    token: int = 0
    drawn: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    def prompt(self, tokens: list[int], room: int = 256) -> None:
        here = self.here.kv
        one, two = (e.prompt(tokens, room=room) for e in (self.here, self.there))
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
        self.read += tokens
        how = VOCAB, self.sampling, self.seed, here.position, here.ops
        self.token = pick(one, *how, self.read)

    def write(self, steps: int, *, ahead: bool = True, forced: int | None = None) -> None:
        """So many tokens of an answer; `forced` seeds tokens that nobody drew."""
        others = ids(steps, forced) if forced is not None else None
        for i in range(steps):
            token = self.token if others is None else others[i]
            how = (token, VOCAB, self.sampling, self.seed)
            self.read.append(token)
            found = self.here.next(*how, recent=self.read)
            assert self.there.next(*how, ahead=ahead, recent=self.read) == found
            self.token = found
            self.drawn.append(found)
        assert self.there.notices == []

    def agree(self) -> None:
        """Every row that is held is in the same slot of both, and nothing else is held."""
        one, two = self.here.kv, self.there.kv
        assert one.position == two.position
        a, b = one.arena, two.arena
        for name in ("start", "length", "capacity", "cap", "free_slot"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        for layer in range(len(a.start)):
            index, live = a.index(layer)
            rows = index[live]
            assert torch.equal(a.columns["pos"][rows], b.columns["pos"][rows])
            for name, column in a.columns.items():
                other = b.columns[name][rows]
                torch.testing.assert_close(column[rows], other, rtol=1e-3, atol=1e-3)


def pair(
    capture: Eager,
    prompt: str = "full",
    step: str = "none",
    budget: int | None = None,
    *,
    net: Llama | None = None,
    sampling: Sampling = GREEDY,
    kv: torch.dtype | None = None,
    options: dict[str, object] | None = None,
) -> Pair:
    net = net or network(layers=2)
    given = {"kv": kv, "step_options": options}
    one, two = (engine(net, prompt, step, budget, each, **given) for each in (None, capture))
    if isinstance(capture, Tape):
        two.kv.use(Kernels())  # a tape hears torch alone, and nothing may read a value
    return Pair(one, two, sampling)

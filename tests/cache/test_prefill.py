"""The end of a prompt: whatever fails, the old arena is as it was; on the way nothing is asked of
the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import small
import torch
from layouts import Silent, empty, even, uneven
from pairwise import beside
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minikv import policies
from minikv.cache.arena import Arena, Layout
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Plan, Prefill
from minikv.cache.stats import Shape
from minikv.engine.engine import Engine


def contents(arena: Arena) -> list[object]:
    """Every table, and every column of the rows in use."""
    heads = itertools.product(range(arena.layers), range(arena.heads))
    tables = [getattr(arena.layout(), n).tolist() for n in Layout.__slots__]
    return [tables, [[arena.segment(n, *at).tolist() for n in arena.columns] for at in heads]]


class Fails(TorchDispatchMode):
    """The n-th tensor that is made raises MemoryError."""

    MADE = ("empty", "zeros", "full", "ones", "_to_copy", "cat", "clone", "index", "empty_like")

    def __init__(self, at: int) -> None:
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.MADE:
            self.left -= 1
            if self.left == 0:
                raise MemoryError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("prompt", "step", "budget", "windows"),
    [
        ("adakv", "roco", 40, None),
        ("full", "none", None, None),
        ("h2o", "h2o", 40, (None, 24)),
        ("full", "hashevict", 60, None),
    ],
)
def test_no_failure_changes_the_old_arena(
    prompt: str, step: str, budget: int | None, windows: tuple[int | None, ...] | None
) -> None:
    """Whichever allocation fails, in beginning, reading or ending a later prompt: position and
    rows are those of before, and the prompt can be read again."""
    net = small.network(layers=2, windows=windows)
    run, twin = (small.engine(net, prompt, step, budget) for _ in range(2))
    for each in (run, twin):
        each.prompt(small.ids(50), room=60)
        for token in small.ids(4):
            each.step(token)
    before, failed = contents(run.kv.arena), 0
    for at in itertools.chain(range(1, 60), itertools.count(60, 23)):
        try:
            with Fails(at):
                logits = run.prompt(small.ids(30, seed=1))
            break
        except MemoryError:
            failed += 1
            assert run.kv.position == 54
            assert not run.kv.reading
            assert contents(run.kv.arena) == before
    assert failed > 10
    assert torch.equal(logits, twin.prompt(small.ids(30, seed=1)))
    assert contents(run.kv.arena) == contents(twin.kv.arena)


CHOICES = [
    ("h2o", "roco"),
    ("h2o+ada", None),
    ("streaming", "roco"),
    ("full", "h2o"),
    ("snapkv", None),
    ("adakv", "roco"),
    ("nacl", "h2o"),
    ("adakv+pyramid+turns", None),
]


@pytest.mark.parametrize(
    ("name", "step", "before", "window"),
    [*beside(CHOICES, (empty, even, uneven), (None, 50))],
)
def test_no_layer_asks_the_device(
    name: str, step: str | None, before: Callable[[int, int], Layout], window: int | None
) -> None:
    """On a device without memory, every question for a value is an error."""
    ops, device = Silent(), torch.device("meta")
    chosen = policies.prompt_policy(name)
    stepper = policies.step_policy(step) if step else None
    columns = stepper.columns if stepper else {}
    arena = Arena(2, 3, 8, torch.float32, device, columns, rows=[400, 400])
    total = None if chosen is None else [120, 120]
    visible = [160, 160] if before is not empty else [150 if window else 180, 180]
    shares = name == "full" and before is even and window is None
    plan = Plan(30, 60, total, 0, 1, [400, 400], visible, shares)
    target = arena.sharing(columns) if shares else arena.fresh(plan.needed, columns)
    shape = Shape(2, 3, 6, 8, (window, None), 4096)
    held = before(2, 3)
    read = Prefill(shape, arena, held, target, chosen, stepper, plan, torch.float32, ops)
    for layer in range(2):
        for rows in (40, 20):
            q, k, v = (torch.empty((rows, n, 8), device="meta") for n in (6, 3, 3))
            read.stage(layer, q, k, v)
        read.finish(layer)
    assert ("segments" in ops.called) == (before is uneven)
    assert {"rows", "column"} <= {*ops.called}
    with pytest.raises(NotImplementedError):  # the end of the prompt asks
        read.complete()


def test_a_prompt_asks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tables where it begins, for lengths and losses where it ends."""
    asked = []
    cpu = Tensor.cpu

    def listen(self: Tensor) -> Tensor:
        asked.append(self.shape)
        return cpu(self)

    net = small.network(windows=(None, 24, 60))
    kv: KVCache = small.scheduler(net, "adakv", "roco", 40)
    run = Engine(net, kv)
    run.prompt(small.ids(50))
    run.step(1)
    kv.settle()
    monkeypatch.setattr(Tensor, "cpu", listen)
    run.prompt(small.ids(30))
    assert len(asked) == 2


def test_what_slides_out_of_a_window_is_not_kept_for_having_room() -> None:
    """The first prompt fits the window and leaves room behind its rows; the second does not."""
    net = small.network(windows=(70, None, 70))
    run = small.engine(net, "full", "none", None)
    run.prompt(small.ids(40), room=60)
    run.prompt(small.ids(20), room=1)
    assert run.kv.kept(0, 1).tolist() == [*range(60)]
    run.prompt(small.ids(20, seed=1), room=1)
    assert run.kv.kept(0, 1).tolist() == [*range(11, 80)]  # what the next token sees
    assert run.kv.kept(1, 1).tolist() == [*range(80)]

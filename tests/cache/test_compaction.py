"""The end of a prompt: what stays is written to another arena, and the old one is as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import small
import torch
from pairwise import beside
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minikv import policies
from minikv.cache.arena import Arena, Layout
from minikv.cache.compaction import append_rows, gather_survivors
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Plan, Prefill
from minikv.cache.stats import Shape
from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels

HEADS, SIZE = 3, 4


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def filled(rows: list[int], lengths: list[list[int]], kv: torch.dtype | None) -> Arena:
    """An arena whose every row in use says what it is."""
    like = Arena(len(rows), HEADS, SIZE, torch.float32, torch.device("cpu"), {}, kv=kv, poison=True)
    arena = like.fresh(rows, {"sum": torch.float32})
    arena.lay(torch.tensor([[r // HEADS] * HEADS for r in rows]))
    arena.length.copy_(torch.tensor(lengths))
    for column in arena.columns.values():
        made = torch.randint(-99, 99, column.shape, generator=random(len(column)))
        column.copy_(made)
    return arena


@pytest.mark.parametrize("kv", [None, torch.int8])
@pytest.mark.parametrize("before", [0, 7])
def test_survivors_are_copied_in_the_order_of_positions(
    before: int, kv: torch.dtype | None
) -> None:
    """Against one row at a time, by position; for heads that keep all, some and nothing."""
    old = filled([60, 60], [[7, 4, 6]] * 2, kv)
    old.free_slot[1, 2] = old.start[1, 2] + 3
    index, live = old.index(1, before)
    tokens = 9
    pos = torch.stack([torch.randperm(20, generator=random(h))[:before] for h in range(HEADS)])
    pos = pos.masked_fill(~live, -1)
    new = torch.arange(20, 20 + tokens).expand(HEADS, tokens)
    pos = torch.cat((pos, new), 1)
    keep = (torch.rand(pos.shape, generator=random(5)) < 0.6) & (pos >= 0)
    keep[0], keep[2] = pos[0] >= 0, False
    target = old.fresh([30, 60], {"sum": torch.float32})
    staged = old.stored(*torch.randn(2, HEADS, tokens, SIZE, generator=random(6)))
    extra = {"sum": torch.rand(pos.shape, generator=random(7))}
    sizes, caps = keep.sum(1) + torch.tensor([2, 0, 1]), torch.tensor([5, 6, 7])
    earlier = (old, index) if before else None
    gather_survivors(Kernels(), target, 1, keep, pos, caps, sizes, staged, extra, earlier)
    begin = 30
    for h in range(HEADS):
        rows = sorted(keep[h].nonzero().flatten().tolist(), key=lambda i: int(pos[h, i]))
        assert int(target.start[1, h]) == begin
        assert int(target.length[1, h]) == len(rows)
        for place, i in enumerate(rows, begin):
            assert int(target.columns["pos"][place]) == int(pos[h, i])
            assert target.columns["sum"][place] == extra["sum"][h, i]
            for name in ("k", "v", *target.scales):
                was = old.columns[name][index[h, i]] if i < before else staged[name][h, i - before]
                assert torch.equal(target.columns[name][place], was), name
        begin += int(sizes[h])
    assert target.capacity[1].tolist() == sizes.tolist()
    assert target.cap[1].tolist() == [5, 6, 7]
    assert target.free_slot[1].tolist() == [-1] * HEADS


@pytest.mark.parametrize("kv", [None, torch.int8])
def test_rows_are_written_behind_those_that_stay(kv: torch.dtype | None) -> None:
    """In memory that both arenas share; the old one holds what it held."""
    old = filled([60, 90], [[6] * HEADS] * 2, kv)
    held = {n: [old.segment(n, 1, h).clone() for h in range(HEADS)] for n in old.columns}
    target = old.sharing({"sum": torch.float32})
    assert target.columns["k"] is old.columns["k"]
    assert target.columns["sum"] is not old.columns["sum"]
    tokens = 5
    pos = torch.cat((old.columns["pos"][old.index(1)[0]], torch.arange(50, 55).expand(3, 5)), 1)
    staged = old.stored(*torch.randn(2, HEADS, tokens, SIZE, generator=random(6)))
    extra = {"sum": torch.rand(pos.shape, generator=random(7))}
    append_rows(Kernels(), target, 1, pos, torch.tensor([8, 9, 10]), staged, extra)
    for h in range(HEADS):
        for name, was in held.items():
            assert torch.equal(old.segment(name, 1, h), was[h])
            if name != "sum":
                assert torch.equal(target.segment(name, 1, h)[:6], was[h])
        for name in ("k", "v", *old.scales):
            assert torch.equal(target.segment(name, 1, h)[6:], staged[name][h])
        assert target.segment("pos", 1, h)[6:].tolist() == [*range(50, 55)]
        assert torch.equal(target.segment("sum", 1, h), extra["sum"][h])
    assert old.length[1].tolist() == [6] * HEADS
    assert target.length.tolist() == [[6] * HEADS, [11] * HEADS]
    assert target.cap[1].tolist() == [8, 9, 10]


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


def test_a_wider_copy_holds_the_same() -> None:
    old = filled([60, 90], [[6, 0, 20], [3, 4, 5]], torch.int8)
    old.free_slot[1, 1] = old.start[1, 1] + 2
    wide = old.grown(old.capacity + torch.tensor([[0, 3, 1], [7, 0, 2]]))
    assert wide.capacity.tolist() == [[20, 23, 21], [37, 30, 32]]
    for layer, h in itertools.product(range(2), range(HEADS)):
        for name in old.columns:
            assert torch.equal(wide.segment(name, layer, h), old.segment(name, layer, h))
    assert (wide.free_slot >= 0).sum() == 1
    assert int(wide.free_slot[1, 1]) == int(wide.start[1, 1]) + 2
    assert wide.region == [0, 64, 163]
    with pytest.raises(AssertionError):
        old.grown(torch.full_like(old.capacity, 5))


# -- nothing is read back -------------------------------------------------------------------------


class Silent(Kernels):
    """Kernels whose twins loop over counts on the host leave what they return unwritten, as those
    of a GPU look from the host; and the names of those that were called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def ragged_prefill(self, q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.called.append("segments")
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def gather_rows(self, *_: object) -> None:
        self.called.append("rows")

    def gather_column(self, *_: object) -> None:
        self.called.append("column")


def empty(layers: int, heads: int) -> Layout:
    """The tables on the host of an arena without rows."""
    none = torch.zeros((layers, heads), dtype=torch.int64)
    return Layout(none, none, none, none, none - 1)


def even(layers: int, heads: int) -> Layout:
    """Of heads that hold 20 of 130 rows each."""
    none = torch.zeros((layers, heads), dtype=torch.int64)
    start = (none + 130).cumsum(1) - 130
    return Layout(start, none + 20, none + 130, none + 20, none - 1)


def uneven(layers: int, heads: int) -> Layout:
    """Of heads that hold different numbers of rows, and one of them has a free slot."""
    tables = even(layers, heads)
    tables.length[:, 1] = 7
    tables.free_slot[:, 0] = 3
    return tables


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

"""The decode step: one at a time and launched ahead it fills the same slots and evicts the same
rows; nothing is asked of the device on the way; one that is not ended leaves no trace, and one that
fails drops the cache.

That a policy's kernels compute what its torch form says is tested in tests/kernels.
"""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any

import pytest
import torch
from faults import AtLine
from small import engine, ids, network
from stepping import STEPS, pair
from tape import NoWaiting, Tape
from torch import Tensor
from twins import contents
from views import kept

from minikv.cache import eviction
from minikv.cache.decode_step import DecodeStep
from minikv.engine.capture import Eager
from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels, TorchOnCPU, choose
from minikv.models.llama import Llama
from minikv.models.tensors import randomise
from minikv.policies.base import StepView
from minikv.policies.tova import Tova

FIRST = ("hashevict", "l2", "random", "streaming")  # these evict before attention


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads here have a few dozen rows: views need not be padded to 256."""
    monkeypatch.setattr(eviction, "_MULTIPLE", 16)


# -- whole steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_slots_and_victims_are_those_of_single_steps(step: str) -> None:
    """Heads that grow, heads that are full, uneven caps, holes that a prompt leaves, replays."""
    tape = Tape()
    run = pair(tape, "adakv", step, 44)
    run.prompt(ids(60))
    run.write(8)
    run.agree()
    run.prompt(ids(5, 1))
    run.write(8, forced=9)
    run.agree()
    assert tape.replayed > 4

    grown = pair(Eager(), "full", step, 40)
    grown.there.kv.pin(8)
    grown.here.kv.pin(8)
    grown.prompt(ids(36, 2))
    assert int((grown.there.kv.arena.length < grown.there.kv.arena.cap).sum()) > 0
    grown.write(12)
    grown.agree()


CODES: dict[str, Any] = {"kv": torch.int8}
SLIDING: dict[str, Any] = {"windows": (None, 16), "steps": 10}


@pytest.mark.parametrize(
    ("prompt", "step", "budget", "tokens", "more"),
    [
        *(("full", step, 24, 20, SLIDING) for step in STEPS),
        *(("adakv", step, 44, 60, CODES) for step in ("roco", "l2", "none")),
        ("adakv", "hashevict", 48, 70, CODES),
        ("snapkv+turns", "roco", 48, 70, CODES),
        *(("snapkv+turns", step, 48, 70, {}) for step in ("l2", "tova", "hashevict")),
        ("full", "tova", 24, 22, {"options": {"per_head": True}}),
        (
            "full",
            "none",
            None,
            12,
            {"room": 4, "steps": 10},
        ),  # it outgrows its segments
    ],
)
def test_windows_codes_rows_that_leave_last_and_options(
    prompt: str, step: str, budget: int, tokens: int, more: dict[str, Any]
) -> None:
    net = network(layers=2, windows=more.get("windows"))
    given = {name: more[name] for name in ("kv", "options") if name in more}
    run = pair(Tape(), prompt, step, budget, net=net, **given)
    run.prompt(ids(tokens), more.get("room", 256))
    run.write(more.get("steps", 8))
    run.agree()


@pytest.mark.parametrize(
    ("step", "where", "cap", "held"),
    [
        ("tova", (slice(None), 1), 37, [[40, 37, 40]] * 2),  # a head, while the others grow
        ("hashevict", 0, 36, [[36] * 3, [40] * 3]),  # a layer, by the query
    ],
)
def test_what_is_full_gives_up_rows_while_others_grow(
    step: str, where: Any, cap: int, held: list[list[int]]
) -> None:
    run = pair(Tape(), "full", step, 44)
    run.here.kv.use(Kernels() if step == "hashevict" else run.here.kv.ops)
    run.prompt(ids(36))
    for made in (run.here, run.there):
        made.kv.arena.cap[where] = cap
    run.write(4)
    assert run.here.kv.arena.held.tolist() == held
    run.agree()
    run.write(6)
    run.agree()


@pytest.mark.parametrize("step", ["none", *STEPS])
@pytest.mark.parametrize("marked", [False, True])
def test_a_step_asks_the_device_for_nothing(step: str, marked: bool) -> None:
    net = network(layers=2, windows=(None, 16))
    made = engine(net, "full", step, None if step == "none" else 24)
    made.prompt(ids(22))
    kv = made.kv
    marks = torch.zeros(kv.arena.rows, dtype=torch.bool) if marked else None
    decode = DecodeStep(kv.shape, kv.device, rotary=kv.rotary)
    arena = kv.arena if step != "none" else kv.arena.grown(kv.arena.capacity + 8)
    decode.open(arena, kv.rules.step, kv.position, leaves_last=marks, captured=True)
    with NoWaiting(), torch.inference_mode():
        for _ in range(4):
            made.network.forward(torch.tensor([5]), decode)
            decode.end()
    assert int(decode.eviction.position) == kv.position + 4


@pytest.mark.parametrize("step", [n for n in ("none", *STEPS) if n not in FIRST])
def test_a_step_that_is_not_ended_leaves_no_trace(step: str) -> None:
    """Its row belongs to no head; the next step takes its place."""
    made = engine(network(layers=2), "full", step, None if step == "none" else 24)
    made.prompt(ids(30 if step == "none" else 40))
    kv = made.kv
    _, held = contents(kv.arena)
    decode = kv.begin_step()
    made.network.forward(torch.tensor([5]), decode)
    assert int(decode.eviction.position) == kv.position
    assert contents(decode.eviction.arena)[1] == held


def test_a_new_row_inherits_nothing_from_the_row_it_overwrites() -> None:
    """Under HashEvict beside a prompt policy with a column of its own, which the kernel that writes
    rows by their codes may not know."""
    made = engine(network(layers=2), "kvzip", "hashevict", 48)
    (own,) = {*made.kv.arena.extra} - {"code"}
    made.prompt(ids(60))
    made.kv.arena.columns[own].fill_(7.0)
    first = made.kv.position
    for token in ids(6):
        made.step(token)
    columns = made.kv.arena.columns
    new = (columns["pos"] >= first) & (columns["pos"] < first + 6)
    assert int(new.sum()) == 6 * made.kv.arena.length.numel()
    assert not bool(columns[own][new].any())
    assert bool((columns[own][~new] == 7.0).any())


# -- what a policy is shown ----------------------------------------------------------------------


def test_a_policy_sees_the_rows_that_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither padding nor pinned rows, nor those that leave last while there are others, and none
    of a head that gives up nothing."""
    made = engine(network(layers=2), "full", "tova", 24)
    made.kv.use(Kernels())
    made.kv.pin(5)
    made.prompt(ids(24))
    made.kv.arena.cap[0, 1] = 30
    seen: list[StepView] = []
    score = Tova.score

    def listen(self: Tova, view: StepView) -> Tensor:
        seen.append(view)
        return score(self, view)

    monkeypatch.setattr(Tova, "score", listen)
    monkeypatch.setattr(made.kv, "_leaves_last", lambda arena: arena.columns["pos"] == 7)
    made.step(3)
    (view,) = seen
    assert (len(view.pos), view.layer, view.heads, view.count) == (6, 0, 3, 1)
    shown = [p for p in range(5, 25) if p != 7]
    assert sorted(view.pos[0].unique().tolist()) == [-1, *shown]
    assert bool((view.pos[1] == -1).all())
    assert view.keys(torch.tensor([2])).shape == (1, view.pos.shape[1], 8)
    assert sorted(view.pos[0][view.free[0]].tolist()) == shown[:-1]  # the newest row stays
    assert torch.equal(view.column("pos")[0].unique(), torch.arange(25, dtype=torch.int32))


# -- what kernels take over -----------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_stopped_at_any_line_counts_or_drops_the_cache(
    name: str, part: float
) -> None:
    """By an interrupt or for want of memory, in torch and with C kernels, with a sliding window; by
    day at some of the lines of one of the two. Either the step counts, and what follows is as if
    nothing had happened, or the cache is empty and serves the next conversation as a new one
    does."""
    net, tokens = network(layers=2, windows=(None, 16)), ids(5, seed=3)

    def begun(plain: bool) -> Engine:
        made = engine(net, "adakv", name, 40)
        if plain:
            made.kv.use(Kernels())
        made.prompt(ids(50))
        made.step(tokens[0])
        made.step(tokens[1])
        return made

    dropped, ways = 0, (False, True)
    for plain in ways if part == 1 else ways[STEPS.index(name) % 2 :][:1]:
        twin, counted = begun(plain), AtLine(0, KeyboardInterrupt())
        with counted:
            twin.step(tokens[2])
        want = [twin.step(token) for token in tokens[3:]]
        lines = range(1, counted.count + 1)
        for at in random.Random(0).sample(lines, math.ceil(part * len(lines))):
            errors = KeyboardInterrupt(), MemoryError()
            for error in errors if part == 1 else errors[at % 2 :][:1]:
                run = begun(plain)
                with contextlib.suppress(type(error)), AtLine(at, error):
                    run.step(tokens[2])
                run.kv.abandon()
                run.kv.settle()
                if run.kv.position == 0:
                    assert int(run.kv.arena.length.sum()) == 0
                    assert run.kv.reading is None
                    again = begun(plain)
                    run.prompt(ids(50))
                    for token in tokens[:2]:
                        run.step(token)
                    assert contents(run.kv.arena) == contents(again.kv.arena)
                    dropped += 1
                    continue
                if run.kv.position == 52:  # stopped before it began
                    run.step(tokens[2])
                after = [run.step(token) for token in tokens[3:]]
                assert torch.equal(torch.stack(after), torch.stack(want)), (at, error)
                assert contents(run.kv.arena) == contents(twin.kv.arena)
    assert dropped


@pytest.mark.parametrize(
    ("step", "layers", "windows", "budget"),
    [
        ("rkv", 2, (12, None), 40),
        ("rkv", 2, (20, None), 14),
        ("random", 5, None, 40),
        ("l2", 5, None, 40),
        ("tova", 5, None, 40),
    ],
)
def test_torch_alone_evicts_what_kernels_do(
    step: str, layers: int, windows: tuple[int | None, ...] | None, budget: int
) -> None:
    """One step at a time, with more layers than heads, and where rows slide out of a window between
    two evictions: every row of it, or now and then one of those that an eviction left."""
    net = network(layers=layers, windows=windows)
    runs = [engine(net, "full", step, budget) for _ in range(3)]
    runs[1].kv.use(Kernels())
    runs[2].kv.use(TorchOnCPU())
    for run in runs:
        run.prompt(ids(budget - 2))
    for token in ids(30):
        for run in runs:
            run.step(token)
            assert int(run.kv.arena.free_slot.min()) >= -1
        held, *others = (kept(run.kv) for run in runs)
        last = run.kv.position - 1
        assert others == [held, held]
        assert {rows[-1] for rows in held} == {last}
        if windows == (12, None):
            assert held[:3] == [[*range(last - 10, last + 1)]] * 3  # what the next token sees


def test_what_a_graph_reads_stays_where_it_is() -> None:
    """A later answer under caps of the same size: the policy's tables are written in place."""
    run = engine(network(layers=2), "snapkv+turns", "rkv", 60)
    held, keys = [], []
    for turn in range(3):
        run.prompt(ids(40 + turn, seed=turn))
        for _ in range(2):
            decode = run.kv.begin_step(captured=True)
            run.kv._stepping = False  # nothing is computed
            want = run.kv._leaves_last(run.kv._arena)
            assert torch.equal(decode.eviction.leaves_last, want)
            held.append((decode.eviction.leaves_last, decode.eviction.shown))
            keys.append(decode.key)
            run.kv.settle()
    assert keys[::2] == keys[1::2]


# -- a kernel that computes all layers ------------------------------------------------------------


@pytest.mark.parametrize("step", ["none", *STEPS])
def test_all_layers_are_computed_at_once_unless_a_policy_reads_each(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gets what is fixed while steps are open, once, and the first row is made room
    for."""
    run = engine(
        network(layers=2, windows=(None, 16)), "full", step, None if step == "none" else 24
    )
    run.prompt(ids(40))
    made: list[tuple[Any, ...]] = []

    def step_arena(*given: Any) -> tuple[Any, ...]:
        made.append(given)
        return given

    monkeypatch.setattr(run.kv.ops, "step_arena", step_arena)
    decode = run.kv.begin_step()
    found = decode.step_arena()
    if decode.eviction.queries is not None:  # they are read layer by layer
        assert found is None
        return
    assert (found is made[0]) == (decode.step_arena() is found) == (len(made) == 1)
    *_, logits, lse, rule, rows, free_slot = made[0]
    arena, policy = decode.eviction.arena, decode.eviction.policy
    assert free_slot is arena.free_slot
    evicts_first = policy is not None and policy.evict_first
    reads = policy is not None and not evicts_first
    assert [one for one in (logits, lse) if one is not None] == [*decode.eviction.scratch]
    assert (logits is not None) == (lse is not None) == reads
    by_query = step == "hashevict"
    assert (rule is policy) == (rows is not None) == by_query or policy is None
    assert bool((arena.free_slot >= 0).any()) == (evicts_first and not by_query)


@pytest.mark.parametrize(
    ("kv", "marked", "served"),
    [(None, False, True), (torch.int8, False, False), (None, True, False)],
)
def test_such_a_kernel_does_not_hash_codes_nor_rows_that_leave_last(
    kv: torch.dtype | None, marked: bool, served: bool
) -> None:
    """The C kernel takes rows of bfloat16 under HashEvict, but neither int8 nor marked ones."""
    net = randomise(Llama(network(layers=2).config, rows=32, dtype=torch.bfloat16), std=0.3)
    run = engine(net, "full", "hashevict", 44, kv=kv)
    run.prompt(ids(60))
    arena = run.kv.arena
    marks = torch.zeros(arena.rows, dtype=torch.bool) if marked else None
    ops = choose(run.kv.device, "auto", 8, torch.bfloat16)[0]
    if ops.name != "native":
        pytest.skip("no C compiler here")
    decode = DecodeStep(run.kv.shape, run.kv.device, ops)
    decode.open(arena, run.kv.rules.step, 60, leaves_last=marks)
    assert (decode.step_arena() is not None) == served


def test_without_such_a_kernel_or_if_it_refuses_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = engine(network(layers=2), "full", "streaming", 24)
    run.prompt(ids(40))
    for kernel in (None, lambda *given: None):
        monkeypatch.setattr(run.kv.ops, "step_arena", kernel)
        assert run.kv.step_arena() is None
        assert bool((run.kv.decode.eviction.arena.free_slot < 0).all())
    by_query = engine(network(layers=2), "full", "hashevict", 24)
    by_query.prompt(ids(40))
    monkeypatch.setattr(by_query.kv.ops, "step_arena", lambda *given: given)
    monkeypatch.setattr(by_query.kv.ops, "append_evict", {})
    assert by_query.kv.begin_step().step_arena() is None
    run.kv.begin(5)
    assert run.kv.step_arena() is None

"""Steps whose every decision is made on the device: the slots and victims of the host, and no value
asked for on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from small import ids, network
from stepping import STEPS, engine, pair
from tape import NoWaiting, Tape
from torch import Tensor

from minikv import kernels, policies
from minikv.cache import decode_step
from minikv.cache.decode_step import DecodeStep
from minikv.cache.step_kernels import fused
from minikv.engine.decode_loop import Eager
from minikv.policies.base import StepPolicy, StepView
from minikv.policies.tova import Tova

LAYERS, HEADS, GROUP, SIZE, WIDE = 2, 3, 2, 8, 24
NEWEST = 60


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads here have a few dozen rows: views need not be padded to 256."""
    monkeypatch.setattr(decode_step, "_WIDE", 16)


# -- the twins ------------------------------------------------------------------------------------


class Heads:
    """Uneven heads in shuffled slots, one of them under its cap, with NaN wherever nobody wrote."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.cap = torch.tensor([[20, 9, 14], [5, 22, 11]])
        self.length = self.cap + 1
        self.length[0, 2] -= 3
        sizes = (self.cap + 2).flatten()
        self.start = (3 + sizes.cumsum(0) - sizes).view(LAYERS, HEADS)
        self.rows = int(sizes.sum()) + 5
        self.pos = torch.full((self.rows,), 9999, dtype=torch.int32)
        self.k = torch.full((self.rows, SIZE), float("nan"))
        self.v, self.mean = self.k.clone(), torch.zeros(self.rows)
        self.logits = torch.full((LAYERS, HEADS, GROUP, WIDE), float("nan"))
        self.lse = torch.empty(LAYERS, HEADS, GROUP)
        self.used = torch.cat([torch.arange(s.start, s.stop) for s in self.segments()])
        for s in self.segments():
            old = torch.randperm(NEWEST)[: s.stop - s.start - 1]
            shuffled = torch.cat((old, torch.tensor([NEWEST])))[torch.randperm(len(old) + 1)]
            self.pos[s] = shuffled.int()
        self.k[self.used] = torch.randn(len(self.used), SIZE)
        self.v[self.used] = torch.randn(len(self.used), SIZE)
        self.q = torch.randn(LAYERS, HEADS, GROUP, SIZE) * 2

    def segments(self) -> list[slice]:
        ends = zip(self.start.flatten().tolist(), self.length.flatten().tolist(), strict=True)
        return [slice(begin, begin + count) for begin, count in ends]

    def attend(self) -> Tensor:
        """[L, H, G, D]; leaves logits and log-sum-exps."""
        return torch.stack(
            [
                kernels.ragged_attention(
                    self.q[i],
                    self.k,
                    self.v,
                    self.start[i],
                    self.length[i],
                    width=WIDE,
                    logits=self.logits[i],
                    lse=self.lse[i],
                )[0]
                for i in range(LAYERS)
            ]
        )

    def view(self, columns: Mapping[str, Tensor], pinned: int) -> tuple[StepView, Tensor, Tensor]:
        """What the scheduler would show of the heads that are over, their rows, and which."""
        over = (self.length > self.cap).nonzero()
        at = over[:, 0], over[:, 1]
        reach, count = torch.arange(WIDE), self.length[at][:, None]
        index = self.start[at][:, None] + torch.minimum(reach, count - 1)
        pos = self.pos[index].long()
        pos = pos.masked_fill((reach >= count) | (pos < pinned), -1)
        view = StepView(
            NEWEST + 1,
            pos,
            self.cap[at],
            *at,
            {n: c[index] for n, c in columns.items()},
            self.mean[index],
        )
        return view, index, over


def test_attention_over_ragged_segments_is_that_over_each_head_alone() -> None:
    heads = Heads()
    mixed = heads.attend()
    for i, s in enumerate(heads.segments()):
        layer, h = divmod(i, HEADS)
        q = heads.q[layer, h][None]
        want, p = kernels.decode_attention(q, heads.k[None, s], heads.v[None, s])
        torch.testing.assert_close(mixed[layer, h], want[0])
        logits, lse = heads.logits[layer, h], heads.lse[layer, h]
        torch.testing.assert_close((logits[:, : s.stop - s.start] - lse[:, None]).exp(), p[0])
        assert logits[:, s.stop - s.start :].isnan().all()


def test_a_head_without_rows_gives_zeros_and_a_window_hides_rows() -> None:
    heads = Heads()
    length = heads.length[0].clone()
    length[1] = 0
    logits = torch.full((HEADS, GROUP, WIDE), float("nan"))
    mixed, lse = kernels.ragged_attention(
        heads.q[0],
        heads.k,
        heads.v,
        heads.start[0],
        length,
        width=WIDE,
        pos=heads.pos,
        oldest=torch.tensor(20),
        logits=logits,
    )
    assert (mixed[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    rows = torch.arange(int(heads.start[0, 0]), int(heads.start[0, 0] + length[0]))
    seen = rows[heads.pos[rows] >= 20]
    assert 0 < len(seen) < len(rows)
    want, _ = kernels.decode_attention(heads.q[0, :1], heads.k[None, seen], heads.v[None, seen])
    torch.testing.assert_close(mixed[0], want[0])
    assert torch.equal((logits[0, 0, : len(rows)] == -torch.inf), heads.pos[rows] < 20)


def test_attention_and_appending_take_codes() -> None:
    heads = Heads()
    k, v, pos = heads.k.nan_to_num(), heads.v.nan_to_num(), heads.pos.clone()
    (ck, sk), (cv, sv) = kernels.to_codes(k), kernels.to_codes(v)
    key, value = torch.randn(2, HEADS, SIZE)
    slot = heads.start[0] + heads.length[0]
    column = torch.ones(heads.rows, dtype=torch.int64)
    kernels.append(
        key, value, slot, torch.tensor(77), ck, cv, pos, [column], k_scale=sk, v_scale=sv
    )
    assert (pos[slot] == 77).all()
    assert column[slot].sum() == 0
    assert column.sum() == heads.rows - HEADS
    got, _ = kernels.ragged_attention(
        heads.q[0], ck, cv, heads.start[0], heads.length[0] + 1, width=WIDE, k_scale=sk, v_scale=sv
    )
    k[slot], v[slot] = key, value
    want, _ = kernels.ragged_attention(
        heads.q[0], k, v, heads.start[0], heads.length[0] + 1, width=WIDE
    )
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.03)


FINISH: dict[str, Callable[..., None]] = {
    "h2o": lambda a, p, c, cap: kernels.h2o_step(
        *a, c["sum"], (cap.double() * p.share).long().clamp(min=1)
    ),
    "tova": lambda a, p, c, cap: kernels.tova_step(*a, layerwise=not p.per_head),
    "roco": lambda a, p, c, cap: kernels.roco_step(
        *a, c["sum"], c["squares"], c["count"], cap - (cap.double() * p.scope).long()
    ),
    "scissorhands": lambda a, p, c, cap: kernels.scissorhands_step(
        *a,
        [x for n, x in c.items() if n != "queries"],
        c["queries"],
        p.queries,
        torch.full((LAYERS,), 1 << 40),
    ),
}


def _columns(policy: StepPolicy, rows: int) -> dict[str, Tensor]:
    """Statistics as a long answer might have left them."""
    made: dict[str, Tensor] = {}
    for name, dtype in policy.columns.items():
        if name.startswith("below"):
            bits = min(32, policy.queries - 32 * int(name[5:]))  # type: ignore[attr-defined]
            made[name] = torch.randint(1 << bits, (rows,), dtype=dtype)
        else:
            made[name] = torch.rand(rows) * (30 if name in ("count", "queries") else 3)
    return made


@pytest.mark.parametrize("pinned", [0, 7])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h2o", {}),
        ("h2o", {"recent_share": 0.9}),
        ("tova", {}),
        ("tova", {"per_head": True}),
        ("roco", {}),
        ("roco", {"scope": 0.9}),
        ("scissorhands", {}),
        ("scissorhands", {"history": 40}),
        ("scissorhands", {"history": 64}),
    ],
)
def test_the_end_of_a_step_is_what_the_policy_says(
    name: str, options: dict[str, object], pinned: int
) -> None:
    heads = Heads()
    heads.attend()
    policy = policies.step_policy(name, options)
    assert policy is not None
    theirs = _columns(policy, heads.rows)
    mine = {n: c.clone() for n, c in theirs.items()}
    for i, s in enumerate(heads.segments()):
        logits = heads.logits[divmod(i, HEADS)][:, : s.stop - s.start]
        heads.mean[s] = (logits - heads.lse[divmod(i, HEADS)][:, None]).exp().mean(0)

    rows = kernels.Rows(
        heads.start,
        heads.length,
        heads.cap,
        heads.pos,
        torch.tensor(NEWEST),
        policy.sinks,
        policy.recent,
        pinned,
    )
    hole = torch.full_like(heads.cap, -7)
    before = {n: c.clone() for n, c in mine.items()}
    args = (heads.logits, heads.lse, rows)
    FINISH[name]((*args, torch.tensor(False), hole), policy, mine, heads.cap)
    assert (hole == -7).all()
    assert all(torch.equal(mine[n], before[n]) for n in mine)
    FINISH[name]((*args, torch.tensor(True), hole), policy, mine, heads.cap)

    policy.step(theirs, heads.mean, lambda: _lengths(heads))
    view, index, over = heads.view(theirs, pinned)
    want = torch.full_like(hole, -1)
    want[over[:, 0], over[:, 1]] = index.gather(1, policy.victims(view)[:, None])[:, 0]
    assert torch.equal(hole, want)
    for n, column in mine.items():
        torch.testing.assert_close(column[heads.used], theirs[n][heads.used])


def _lengths(heads: Heads) -> Tensor:
    seen = torch.zeros(heads.rows)
    for s in heads.segments():
        seen[s] = s.stop - s.start
    return seen


@pytest.mark.parametrize("bits", [8, 16, 64])
@pytest.mark.parametrize("with_key", [False, True])
def test_hashing_evicts_what_the_policy_evicts(bits: int, with_key: bool) -> None:
    heads, layer = Heads(), 1
    policy = policies.step_policy(
        "hashevict", {"bits": bits, "hash_with": "key" if with_key else "query"}
    )
    assert policy is not None
    code = policy.admit(layer, heads.k.nan_to_num())["code"]
    q, key, value = heads.q[layer], *torch.randn(2, HEADS, SIZE)
    # Head 0 grows, head 1 is full, head 2 has a hole.
    start, length = heads.start[layer], heads.length[layer]
    cap = length + torch.tensor([50, 0, 0])
    hole = torch.tensor([-1, -1, int(start[2]) + 2])
    rows = start[1] + torch.arange(int(length[1]))
    one = torch.tensor([1])
    view = StepView(
        NEWEST + 1,
        heads.pos[rows].long()[None],
        cap[1:2],
        one * layer,
        one,
        {"code": code[rows][None]},
        None,
        q[1:2],
        key[1:2, None],
    )
    victim = int(rows[policy.victims(view)[0]])
    k, v, pos = heads.k.clone(), heads.v.clone(), heads.pos.clone()
    spare = tuple(torch.zeros((HEADS, *c.shape[1:]), dtype=c.dtype) for c in (k, v, pos, code))
    kernels.hash_append(
        key[:, None] if with_key else q,
        key,
        value,
        policy.matrix(layer, key),  # type: ignore[attr-defined]
        start,
        length,
        cap,
        hole,
        torch.tensor(NEWEST + 1),
        k,
        v,
        pos,
        code.clone(),
        spare,
        width=WIDE,
        sinks=policy.sinks,
        recent=policy.recent,
        pinned=0,
    )
    assert hole.tolist() == [-1, victim, int(start[2]) + 2]
    for saved, column in zip(spare, (heads.k, heads.v, heads.pos, code), strict=True):
        assert torch.equal(saved[1], column[victim])
        assert not saved[[0, 2]].any()
    slots = torch.tensor([int(start[0] + length[0]), victim, int(start[2]) + 2])
    assert torch.equal(k[slots], key)
    assert torch.equal(v[slots], value)
    assert (pos[slots] == NEWEST + 1).all()
    others = torch.ones(heads.rows, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(pos[others], heads.pos[others])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("go", [False, True])
def test_the_next_newcomers_go_to_holes_or_behind_the_last_row(before: bool, go: bool) -> None:
    start = torch.tensor([[100, 200, 300, 400]])
    length, cap = torch.tensor([[7, 9, 9, 4]]), torch.tensor([[9, 9, 9, 9]])
    count, hole = length + 1, torch.tensor([[-1, -1, 304, -1]])
    position, slot = torch.tensor(50), torch.zeros_like(start)
    taken = torch.tensor([[False, False, True, True]])
    flag = torch.tensor(go)
    kernels.advance(flag, start, length, cap, hole, position, count, slot, taken, before=before)
    assert not flag
    assert int(position) == 50 + go
    assert length.tolist() == [[8, 10, 10, 5] if go else [7, 9, 9, 4]]
    grows = [1, not before, 0, 1]
    assert (count - length).tolist() == [grows]
    assert slot[0, 2] == 304
    assert slot[0, [0, 3]].tolist() == [100 + 7 + go, 400 + 4 + go]
    assert before or slot[0, 1] == 200 + 9 + go
    assert taken.tolist() == [[False, before, not go, not go]]


# -- whole steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_slots_and_victims_are_those_of_the_host(step: str) -> None:
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


@pytest.mark.parametrize("step", STEPS)
def test_windows_slide_on_the_device(step: str) -> None:
    run = pair(Tape(), "full", step, 24, net=network(layers=2, windows=(None, 16)))
    run.prompt(ids(20))
    run.write(10)
    run.agree()


@pytest.mark.parametrize("step", ["roco", "l2", "none"])
def test_codes_and_rows_that_leave_last(step: str) -> None:
    run = pair(Tape(), "adakv", step, 44, kv=torch.int8)
    run.prompt(ids(60))
    run.write(8)
    run.agree()
    if step != "none":
        run = pair(Tape(), "snapkv+turns", step, 48)
        run.prompt(ids(70))
        run.write(10)
        run.agree()


def test_tova_per_head_and_an_answer_that_outgrows_its_segments() -> None:
    run = pair(Tape(), "full", "tova", 24, options={"per_head": True})
    run.prompt(ids(22))
    run.write(8)
    run.agree()
    grown = pair(Tape())
    grown.prompt(ids(12), room=4)
    grown.write(10)
    grown.agree()


class Own(Tova):
    """A policy without a kernel that compares the heads which give up a row."""


def test_a_policy_without_a_kernel_sees_the_heads_that_give_up_a_row() -> None:
    run = pair(Eager(), "full", "tova", 44)
    own = Own(per_head=False, sinks=4, recent=1)
    for made in (run.here, run.there):
        made.kv.configure(made.kv.prompt_policy, own, made.kv.budget)
    run.prompt(ids(36))
    for made in (run.here, run.there):
        made.kv.arena.cap[:, 1] = 37  # full while the others of its layer grow
    run.write(10)
    run.agree()
    assert fused(own) is None


@pytest.mark.parametrize("step", ["none", *STEPS])
def test_a_step_asks_the_device_for_nothing(step: str) -> None:
    net = network(layers=2, windows=(None, 16))
    made = engine(net, None, "full", step, None if step == "none" else 24)
    made.prompt(ids(22))
    kv = made.kv
    state = DecodeStep(kv.shape, kv.device)
    assert state.takes(kv.arena, kv.step_policy, None)
    later = torch.zeros(kv.arena.rows, dtype=torch.bool)
    for marks in (None, later):  # with marks no policy has a kernel of its own
        if marks is not None and not state.takes(kv.arena, kv.step_policy, marks):
            continue
        state.load(kv.arena, kv.step_policy, kv.position, 0, marks)
        with NoWaiting(), torch.inference_mode():
            for _ in range(4):
                state.start()
                logits = made.network.forward(torch.tensor([5]), state)
                state.finish(torch.isfinite(logits).all())
            state.commit()
            state.drop()
        assert int(state.position) == kv.position + 4


@pytest.mark.parametrize("step", ["none", *STEPS])
def test_a_step_that_is_dropped_leaves_no_trace(step: str) -> None:
    made = engine(network(layers=2), None, "full", step, None if step == "none" else 24)
    made.prompt(ids(30 if step == "none" else 40))
    kv = made.kv
    state = DecodeStep(kv.shape, kv.device)
    state.load(kv.arena, kv.step_policy, kv.position, 0, None)
    held = _held(made.kv.arena)
    state.start()
    made.network.forward(torch.tensor([5]), state)
    state.finish(torch.tensor(True))
    state.drop()
    state.commit()
    state.unload(kv.arena)
    assert int(state.position) == kv.position
    after = _held(kv.arena)
    assert held.keys() == after.keys()
    for name, rows in held.items():
        assert torch.equal(rows, after[name]), name


def _held(arena: object) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for layer in range(len(arena.start)):  # type: ignore[attr-defined]
        index, live = arena.index(layer)  # type: ignore[attr-defined]
        for name, column in arena.columns.items():  # type: ignore[attr-defined]
            found[f"{name} {layer}"] = column[index[live]].clone()
    return found


def test_what_the_kernels_do_not_know_stays_with_the_host() -> None:
    net = network(layers=2)
    for prompt, step, kv in (
        ("snapkv+turns", "hashevict", None),
        ("snapkv+turns", "tova", None),
        ("adakv", "hashevict", torch.int8),
    ):
        run = pair(Eager(), prompt, step, 48, net=net, kv=kv)
        run.prompt(ids(70))
        assert not run.there._writer.takes()  # type: ignore[union-attr]
        run.write(2)
        run.agree()
    over = engine(net, None, "full", "roco", 40).kv
    over.begin(30)
    net.forward(torch.tensor(ids(30)), over)
    over.arena.cap -= 20  # as if a policy with a smaller budget had come since
    assert not DecodeStep.takes(over.arena, over.step_policy, None)

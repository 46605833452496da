"""Recall from a tier: a later prompt is answered, and evicted for, as if all were read anew."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import small
import torch
from faults import Allocations, Fault
from layouts import segment
from tiers import Runtime, tiered
from torch import Tensor
from twins import contents, on_cuda
from views import kept

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.cache.tier import Copies, Tier, TierSteps
from minikv.cache.tier_file import FileRows, Header
from minikv.cache.tier_rows import Memory, RamRows, columns_of
from minikv.engine.engine import Engine

# They need the queries of all tokens, or read everything twice.
UNSERVED = {"h2o", "expected", "ada-expected", "kvzip", "kvzip+"}
SERVED = sorted({*policies.prompt_names()} - {"full", *UNSERVED})


def rows_of(tier: Tier) -> list[dict[str, Tensor]]:
    """A copy of the columns of both layers, of 150 tokens."""
    return [{n: t.clone() for n, t in tier.rows.read(i, 150).items()} for i in range(2)]


def unchanged(tier: Tier, before: list[dict[str, Tensor]]) -> None:
    for now, then in zip(rows_of(tier), before, strict=True):
        assert now.keys() == then.keys()
        assert all(torch.equal(column, then[name]) for name, column in now.items())


def talk(run: Engine, turns: int, ids: list[int]) -> list[torch.Tensor]:
    """Questions of 9 tokens, each with an answer of 5 that is given; logits behind each
    question."""
    found, all_ids = [run.recall(ids)], list(ids)
    for turn in range(turns):
        answer = small.ids(5, seed=10 + turn)
        for token in answer:
            run.step(token)
        all_ids += answer + small.ids(9, seed=100 + turn)
        found.append(run.recall(all_ids))
        ids[:] = all_ids
    return found


@pytest.mark.parametrize("policy", SERVED)
@pytest.mark.parametrize("windows", [None, (None, 40)])
def test_recall_is_reading_anew(policy: str, windows: tuple[int | None, ...] | None) -> None:
    net = small.network(layers=2, windows=windows)
    generator = torch.Generator().manual_seed(3)
    for layer in net.layers:  # otherwise all tokens' inputs have the same length
        layer.attention_norm.normal_(std=2.0, generator=generator)
    run = tiered(small.engine(net, policy, "roco", 60))
    ids = small.ids(150)
    logits = talk(run, 3, ids)[-1]
    anew = small.engine(net, policy, "roco", 60)
    torch.testing.assert_close(logits, anew.prompt(ids, turn_tokens=14), atol=1e-4, rtol=1e-4)
    assert kept(run.kv) == kept(anew.kv)
    layers, heads = range(net.config.layers), range(net.config.kv_heads)
    for name, column in run.kv.arena.columns.items():
        other = anew.kv.arena.columns[name]
        for layer, head in itertools.product(layers, heads):
            mine = segment(run.kv.arena, name, layer, head)
            theirs = segment(anew.kv.arena, name, layer, head)
            torch.testing.assert_close(mine.float(), theirs.float(), atol=1e-4, rtol=1e-4)
        assert column.dtype == other.dtype


def test_only_the_queries_of_the_last_turn_choose() -> None:
    """A question shorter than the window: what the answer before it needed has no say, and the
    tokens before the question are not read once more."""
    net = small.network(layers=2)
    ids, answer, question = small.ids(150), small.ids(40, seed=1), small.ids(9, seed=2)
    run = tiered(small.engine(net, "adakv", "roco", 60))
    run.recall([*ids, *answer], begins=0)
    whole = [*ids, *answer, *question]
    kv, fed = run.kv, []
    begin, kv.recall = kv.recall, lambda *how: fed.append(begin(*how)) or fed[-1]  # type: ignore
    run.recall(whole, begins=len(whole) - len(question))
    assert fed == [len(whole) - len(question)]
    anew, wide = (small.engine(net, "adakv", "roco", 60) for _ in range(2))
    anew.prompt(whole, turn_tokens=len(question))
    wide.prompt(whole)
    assert kept(kv) == kept(anew.kv) != kept(wide.kv)


@pytest.mark.parametrize("coded", [False, True])
def test_a_staged_tier_is_the_same_as_one_that_is_the_staging_buffer(coded: bool) -> None:
    """With one staging buffer and with two; what int8 rounded is near."""
    net, found = small.network(layers=3), []
    for staged, copies in ((False, None), (True, None), (True, Log())):
        run = tiered(small.engine(net, "adakv", "roco", 60), coded=coded and staged, staged=staged)
        run.kv.tier._copies = copies or run.kv.tier._copies
        logits = talk(run, 3, small.ids(150))
        found.append((logits, kept(run.kv)))
    (exact, rows), (one, its), (two, others) = found
    assert all(map(torch.equal, one, two))
    assert its == others
    assert torch.equal(exact[0], one[0])  # the first prompt attends to what was not rounded
    for a, b in zip(exact, one, strict=True):
        assert (a - b).abs().max() <= coded * 0.25 * a.abs().max()
    assert coded or rows == its


def test_int8_rows_under_the_budget_come_from_the_exact_tier() -> None:
    net = small.network(layers=2)
    rules = Rules(policies.prompt_policy("adakv"), policies.step_policy("roco"), Budget.parse(60))
    run, anew = (Engine(net, small.over(net, rules, kv=torch.int8)) for _ in range(2))
    tiered(run)
    ids = small.ids(150)
    logits = talk(run, 2, ids)[-1]
    torch.testing.assert_close(logits, anew.prompt(ids), atol=1e-4, rtol=1e-4)


def test_pinned_rows_stay() -> None:
    run = tiered(small.engine(small.network(layers=2), "adakv", "roco", 60))
    run.kv.pin(12)
    talk(run, 2, small.ids(150))
    assert all({*range(12)} <= {*rows} for rows in kept(run.kv))


def test_no_failure_changes_the_tier_or_the_rows() -> None:
    """Whichever allocation of a recall fails: rows, position and tier are those of before, and the
    prompt can be read again with the same result."""
    net = small.network(layers=2)
    run, twin = (tiered(small.engine(net, "adakv", "roco", 60)) for _ in range(2))
    first = small.ids(120)
    for each in (run, twin):
        each.recall(list(first))
        for token in small.ids(4):
            each.step(token)
    whole = first + small.ids(4) + small.ids(30, seed=1)
    want = twin.recall(whole)
    tier = run.kv.tier
    before = contents(run.kv.arena)
    rows = [tier.rows.read(i, 120)["k"].clone() for i in range(2)]
    failed = 0
    for at in itertools.chain(range(1, 30), itertools.count(30, 43)):
        try:
            with Allocations(Fault("allocation", at)):
                logits = run.recall(whole)
            break
        except (MemoryError, RuntimeError):
            failed += 1
            assert (run.kv.position, tier.length, run.kv.reading) == (124, 120, None)
            assert contents(run.kv.arena) == before
            for i in range(2):
                assert torch.equal(tier.rows.read(i, 120)["k"], rows[i])
    assert failed > 10
    assert torch.equal(logits, want)


def test_memory_for_rows_grows_by_whole_steps_and_keeps_what_there_is() -> None:
    """A quarter more than needed, in steps of 1,024 rows, at most what can ever be needed, and
    never less than what is needed."""
    needed = (1, 819, 820, 1639, 1640)
    assert [RamRows.room(n, 10_000) for n in needed] == [1024, 1024, 2048, 2048, 3072]
    assert [RamRows.room(n, 1500) for n in (1, 1000, 1500, 1600)] == [1024, 1500, 1500, 1600]
    rows = RamRows(1, 2, {"k": (torch.float32, (4,))}, 10_000)
    rows.reserve(100)
    place = rows.read(0, 100)["k"]
    place[:] = torch.randn(100, 4)
    before = place.clone()
    rows.reserve(1024, 100)
    assert rows.read(0, 1024)["k"].data_ptr() == place.data_ptr()
    rows.reserve(1025, 100)
    assert rows.read(0, 1025)["k"].shape == (2, 1025, 4)
    assert torch.equal(rows.read(0, 100)["k"], before)


def test_memory_that_a_gpu_copies_from_is_exact_and_given_back() -> None:
    runtime = Runtime(10 << 20)
    rows = RamRows(2, 2, {"k": (torch.float32, (16,)), "v": (torch.float32, (16,))}, 50_000)
    rows.memory = Memory(torch.device("cpu"), runtime)
    rows._blank(0)
    assert runtime.held == {}
    rows.reserve(1025)
    rows.read(0, 1025)["k"][:] = 7.0
    assert sum(runtime.held.values()) == rows.nbytes > 0
    rows.reserve(5000, 1025)
    assert sum(runtime.held.values()) == rows.nbytes
    assert bool((rows.read(0, 1025)["k"] == 7.0).all())
    with pytest.raises(torch.OutOfMemoryError, match="cannot be pinned"):
        rows.reserve(50_000, 1025)
    del rows
    gc.collect()
    assert runtime.held == {}


# -- staging buffers: what is copied beside the computing, and in which order ---------------------

SHAPE = Shape(4, 2, 4, 8, (None,) * 4, 64)


class Log(Copies):
    """Writes down what is launched where; copies at once."""

    slots = 2

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inside = False
        self.marks = 0

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def mark(self) -> int:
        self.marks += 1
        self.lines.append(f"mark {self.marks}")
        return self.marks

    def wait(self, mark: int) -> None:
        self.lines.append(f"wait {mark}")

    def finish(self) -> None:
        self.lines.append("finish")


class LoggedRows(RamRows):
    def __init__(self, log: Log) -> None:
        super().__init__(4, 2, columns_of(SHAPE, torch.float32, False), 64)
        self.log = log

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        assert self.log.inside
        self.log.lines.append(f"in {layer}")
        return super().read(layer, count)

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        assert self.log.inside
        self.log.lines.append(f"out {layer}")
        super().write(layer, begin, columns)


@pytest.mark.parametrize("length", [0, 6])
def test_the_next_layer_comes_in_while_one_is_computed_with(length: int) -> None:
    """A buffer is not written while its rows go out, also in a first prompt, for which nothing
    comes in: the mark that a layer waits for is behind what went out of its buffer."""
    log = Log()
    rows = LoggedRows(log)
    rows.reserve(10)
    tier = Tier(SHAPE, torch.float32, torch.device("cpu"), rows=rows)
    tier._copies, tier._direct, tier.length = log, False, length
    tier.open(10)
    assert tier.staging(10) == (2 * 2 * 2 * 10 * 8 * 4, 0)
    for layer in range(4):
        key, value = tier.stage(layer, 10)
        log.lines.append(f"compute {layer}")
        tier.store(layer, key, value)
    tier.drop()
    assert log.lines == [
        line
        for line in (
            *("in 0", "mark 1", "wait 1", "in 1", "mark 2", "compute 0", "out 0"),
            *("wait 2", "in 2", "mark 3", "compute 1", "out 1"),  # in what "out 0" emptied
            *("wait 3", "in 3", "mark 4", "compute 2", "out 2"),
            *("wait 4", "compute 3", "out 3", "finish"),
        )
        if length or not line.startswith("in")
    ]


@pytest.mark.parametrize("in_file", [False, True])
def test_a_lent_tier_gives_its_rows_and_keeps_none(in_file: bool, tmp_path: Path) -> None:
    """Whatever is asked of it, the other chat's rows stay as they are."""
    net, ids, rows = small.network(layers=2), small.ids(150), None
    if in_file:
        columns = columns_of(small.shape(net), net.dtype, False)
        rows = FileRows.create(tmp_path / "tier.kv", Header(2, net.config.kv_heads, columns))
    run, other = tiered(small.engine(net, "adakv", "roco", 60), rows=rows), small.engine(net)
    run.recall(ids[:120])
    run.recall(ids)
    tier = run.kv.tier
    before = rows_of(tier)
    lent = Tier(tier.shape, tier.dtype, tier.device, rows=tier.rows, lent=True)
    other.kv.tier, lent.length = lent, 100
    asked = [*ids[:100], *small.ids(20, seed=3)]
    want = small.engine(net).prompt(asked)
    torch.testing.assert_close(other.recall(asked), want, atol=1e-4, rtol=1e-4)
    refusal = "another chat's tier cannot store this one's rows"
    assert (lent.length, str(lent.failed)) == (100, refusal)
    unchanged(tier, before)
    if rows is not None:
        rows.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("coded", [False, True])
def test_a_tier_on_a_gpu_answers_as_on_a_cpu(coded: bool) -> None:
    here = small.network(layers=3)
    ids, answer, question = small.ids(150), small.ids(5, seed=1), small.ids(9, seed=2)
    found = []
    for net in (here, on_cuda(here)):
        run = tiered(small.engine(net, "adakv", "roco", 60), coded=coded)
        first = run.recall(ids)
        for token in answer:
            run.step(token)
        found.append([t.cpu() for t in (first, run.recall([*ids, *answer, *question]))])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


# -- steps over the whole tier --------------------------------------------------------------------


@pytest.mark.parametrize("windows", [None, (None, 40), (40, 100)])
@pytest.mark.parametrize(("coded", "staged"), [(False, False), (False, True), (True, True)])
def test_steps_are_those_of_a_cache_without_eviction(
    windows: tuple[int | None, ...] | None, coded: bool, staged: bool
) -> None:
    net = small.network(layers=2, windows=windows)
    run = tiered(small.engine(net, "adakv", "roco", 60), coded=coded, staged=staged)
    ids, more = small.ids(150), small.ids(90, seed=4)
    run.recall(list(ids))
    tier = run.kv.tier
    before = rows_of(tier)
    dense = small.Dense(net)
    want = [dense.prompt(ids), *(dense.step(token) for token in more)]
    steps = TierSteps(tier, 149, run.kv.ops)
    got = [net.forward(torch.tensor([token]), steps) for token in (ids[-1], *more)]
    assert steps.position == 240
    for a, b in zip(got, want, strict=True):
        if coded:
            assert (a - b).abs().max() < 0.5 * b.abs().max()
        else:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert tier.length == 150
    unchanged(tier, before)

"""That the counting is right, and what is launched. Run by test_launches.py in a process of
its own, which then launches on the stub and takes `stand_in.GPU` for a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import counting
import torch
from builds import builds
from counting import CHUNK, VOCAB, Bench, Case
from pairwise import some_by_day
from small import ids
from stand_in import GPU, StandIn, near

from minikv.cache.kv_cache import KVCache
from minikv.engine.capture import Eager
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.engine.warmup import warm
from minikv.kernels.evict import gather_gpu as gather
from minikv.models.linear import Plain


@pytest.fixture(autouse=True)
def _poison() -> None:
    """In place of the one that fills an arena's memory, which would count as a launch."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("stub"))
    with made.torch:
        yield made


def test_memory_is_shared_with_views_and_kinds_do_not_mix(bench: Bench) -> None:
    x = torch.zeros(4, 8, device=GPU)
    part = x[1:, 4:]
    part += 2
    assert isinstance(part, StandIn)
    assert part.device == x.device == GPU
    assert part.data_ptr() == x.data_ptr() + 4 * (8 + 4)
    assert near(x).sum() == 24
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4, 8)
    assert near(x + torch.tensor(1.0)).sum() == 56


@pytest.mark.parametrize("case", [Case("adakv", "roco"), Case("h2o", "hashevict", "windows")])
def test_the_answer_is_that_of_a_cpu(bench: Bench, case: Case) -> None:
    """Two turns in which rows leave, on the stand-in and with torch alone. In float32: rounded to
    bfloat16, the means of two rows may be equal in one and not in the other."""
    far = bench.engine(case, 2, torch.float32)
    kv = far.kv
    here = KVCache(kv.shape, kv.rules, dtype=kv.dtype, output=None, kernels="torch")
    net = bench.network(2, kv.shape.windows[0], torch.device("cpu"), kv.dtype)
    answers = []
    for engine in (far, Engine(net, here, Eager())):
        found = []
        for turn in range(2):
            token = counting.token_of(engine.prompt(ids(CHUNK + 20, turn)))
            for _ in range(8):
                token = engine.next(token, VOCAB, Sampling(), 0)
                found.append(token)
        answers.append(found)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 4


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_weights_are_those_that_they_stand_for(bench: Bench, form: str) -> None:
    """A prompt of many rows, one of few, and steps: as a CPU with the unpacked weights."""
    far = bench.engine(Case("full", "none", weights=form), 2)
    net = bench.network(2, None, torch.device("cpu"), far.kv.dtype)
    for mine, theirs in zip(net.layers, far.network.layers, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            matrix = getattr(theirs, name)
            assert matrix.nbytes < 0.6 * getattr(mine, name).nbytes
            setattr(mine, name, Plain(near(matrix.dense()).clone()))
    plain = Engine(net, KVCache(far.kv.shape, dtype=far.kv.dtype, kernels="torch"), Eager())
    for count in (CHUNK + 20, 7):
        ours, theirs = far.prompt(ids(count, count)), plain.prompt(ids(count, count))
        error = (near(ours).float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 0.15, (count, float(error))  # rounding; other weights would be 1.4


def test_launches_arrive_with_their_grid(bench: Bench) -> None:
    """The driver refuses what a GPU would refuse."""
    count = torch.ones(8, dtype=torch.int64, device=GPU)
    index, values, out = count[:, None], torch.zeros(2, 9, device=GPU), torch.zeros(8, device=GPU)
    both, to = [row[:8, None] for row in values], [out, out]
    with bench.counted() as found:
        gather.gather_columns(index, count, count - 1, both, to, 1)
    assert found["triton", "columns"] == 1
    builds = bench.launches.builds.copy()
    gather.gather_columns(index, count, count - 1, [row[1:, None] for row in values], to, 1)
    assert bench.launches.builds == builds, "values of another alignment are another build"
    given = index, count, count, tuple(both), tuple(to)
    with pytest.raises(RuntimeError, match="a launch that no GPU takes"):
        gather._columns[(1, 70000)](*given, 1, 1, BN=1024, num_warps=4)


def test_choosing_among_the_rows_of_a_long_document_compiles_nothing(bench: Bench) -> None:
    """After the warm-up, whose prompts are short."""
    bench.launches.forget()
    engine = bench.engine(Case("adakv", "roco"), 1)
    warm(engine.kv, engine.network)
    assert engine.kv.notice is None
    before, rows = bench.launches.builds.copy(), 5000
    pos = torch.arange(rows, device=GPU).expand(8, rows)
    counts = torch.ones(8, dtype=torch.int64, device=GPU)
    ops = engine.kv.ops
    key = ops.order_key(pos.to(torch.float32), pos, pos >= 0)
    ops.wanted(key, counts.sum(), 8)
    ops.best(key, counts, 1)
    ops.best(key, counts, 1, pos >= 0)
    assert dict(bench.launches.builds - before) == {}


WINDOWS, INT4 = Case("full", "none", "windows"), Case("full", "none", weights="int4")
SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05)
FILTERED, KVZIP = Case("full", "none", sampling=SAMPLING), Case("kvzip", "none")
INT8, BLOCKS = Case("snapkv", "roco", "int8"), Case("roco", "roco", stride=16)
LAUNCHES = {
    Case("full", "none"): "7 9 0 0 + 1 18 1 2, 6 0 0 0 + 3 19 0 1, 8 29 0 0 + 1 19 1 3",
    WINDOWS: "7 11 0 0 + 1 18 1 2, 6 1 0 0 + 3 38 0 1, 9 40 0 0 + 1 19 1 3",
    INT4: "11 9 0 0 + 1 15 1 2, 6 0 0 0 + 3 19 0 1, 12 29 0 0 + 1 16 1 3",
    FILTERED: "7 9 0 0 + 1 18 1 2, 6 0 0 0 + 3 51 0 1, 8 29 0 0 + 1 19 1 3",
    Case("global-span", "h2o"): "8 133 0 0 + 2 94 1 3, 6 0 0 0 + 4 18 0 1, 13 183 0 0 + 1 95 1 4",
    Case("adakv", "roco"): "14 49 0 0 + 2 20 1 2, 6 0 0 0 + 4 18 0 1, 18 90 0 0 + 1 21 1 3",
    INT8: "14 75 0 0 + 2 20 1 2, 6 0 0 0 + 4 18 0 1, 18 135 0 0 + 1 21 1 3",
    Case("snapkv", "hashevict"): "13 36 1 0 + 2 20 1 2, 6 0 0 0 + 3 23 0 1, 16 65 0 0 + 2 22 1 3",
    KVZIP: "12 89 48 16 + 3 121 -30 3, 6 0 0 0 + 3 19 0 1, 17 187 48 16 + 2 122 -30 4",
    Case("defensive", "tova"): "13 69 0 0 + 2 20 1 2, 6 0 0 0 + 4 67 0 1, 18 90 0 0 + 1 21 1 3",
    BLOCKS: "12 587 0 0 + 1 20 1 2, 6 0 0 0 + 4 18 0 1, 13 756 0 0 + 1 21 1 3",
}
"""A first prompt, a step and a later prompt, of the kinds that `counting.py` counts. A difference
is a mistake, or the point of a change."""


@pytest.mark.parametrize(("case", "told"), LAUNCHES.items())
def test_what_is_launched(bench: Bench, case: Case, told: str) -> None:
    assert ", ".join(counting.rows(bench, case).values()) == told


DAILY = [Case("snapkv", "hashevict"), Case("snapkv", "roco")]


@pytest.mark.parametrize("case", some_by_day(counting.every_case(), DAILY.__contains__), ids=str)
def test_no_kernel_is_compiled_in_the_middle_of_a_turn(bench: Bench, case: Case) -> None:
    """What prompts and steps launch was compiled while the model was loaded."""
    assert counting.late(bench, case) == {}


def test_every_kernel_was_launched_here(bench: Bench) -> None:
    """So the compile gate's list of kernels is whole."""
    launched = {name for name, count in bench.launches.total().items() if count}
    assert launched == {build.kernel for build in builds().values()}

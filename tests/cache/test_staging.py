"""The staging buffers: what is copied beside the computing, and in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest
import small
import torch
from tiers import tiered
from torch import Tensor

from minikv.cache.staging import Staging
from minikv.cache.stats import Shape
from minikv.cache.tier_rows import RamRows, columns_of, copy_heads

SHAPE = Shape(4, 2, 4, 8, (None,) * 4, 64)


class Log:
    """`Copies` that writes down what is launched where; it copies at once."""

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


def test_the_next_layer_comes_in_while_one_is_computed_with() -> None:
    log = Log()
    rows = LoggedRows(log)
    rows.reserve(10)
    staging = Staging(rows, SHAPE, torch.float32, torch.device("cpu"), 10, 6, copies=log)
    assert staging.nbytes == 2 * 2 * 2 * 10 * 8 * 4
    for layer in range(4):
        key, value = staging.layer(layer)
        log.lines.append(f"compute {layer}")
        staging.store(layer, key, value)
    staging.close()
    assert log.lines == [
        *("in 0", "mark 1", "wait 1", "in 1", "mark 2", "compute 0", "out 0"),
        *("wait 2", "in 2", "mark 3", "compute 1", "out 1"),  # in the buffer that "out 0" emptied
        *("wait 3", "in 3", "mark 4", "compute 2", "out 2"),
        *("wait 4", "compute 3", "out 3", "finish"),
    ]


def test_a_buffer_is_not_written_while_its_rows_go_out() -> None:
    """Also in a first prompt, for which nothing comes in."""
    log = Log()
    rows = LoggedRows(log)
    rows.reserve(10)
    staging = Staging(rows, SHAPE, torch.float32, torch.device("cpu"), 10, 0, copies=log)
    for layer in range(3):
        staging.store(layer, *staging.layer(layer))
    lines = log.lines
    assert "in 0" not in lines
    # The mark that layer 2 waits for is behind what went out of its buffer, layer 0's.
    assert lines.index("out 0") < lines.index("mark 3") < lines.index("wait 3")


@pytest.mark.parametrize("coded", [False, True])
def test_two_buffers_compute_what_one_does(coded: bool) -> None:
    net, ids = small.network(layers=3), small.ids(150)
    found = []
    for copies in (None, Log()):
        run = tiered(small.engine(net, "adakv", "roco", 60), coded=coded, staged=True)
        assert run.kv.tier is not None
        run.kv.tier._copies = copies
        logits = [run.recall(ids)]
        for token in small.ids(5, seed=1):
            run.step(token)
        logits.append(run.recall([*ids, *small.ids(5, seed=1), *small.ids(9, seed=2)]))
        held = [
            run.kv.kept(layer, head).tolist()
            for layer in range(3)
            for head in range(run.kv.shape.kv_heads)
        ]
        found.append((logits, held))
    for one, two in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, two)
    assert found[0][1] == found[1][1]


def test_heads_are_copied_one_by_one() -> None:
    rows = torch.arange(48.0).view(2, 4, 6)
    into = torch.zeros(2, 9, 6)
    copy_heads(into[:, 2:6], rows, wait=True)
    assert torch.equal(into[:, 2:6], rows)
    assert not into[:, :2].any()
    assert not into[:, 6:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("coded", [False, True])
def test_a_tier_on_a_gpu_answers_as_on_a_cpu(coded: bool) -> None:
    from minikv.models.llama import Llama

    here = small.network(layers=3)
    there = Llama(here.config, rows=here.rows, device="cuda")
    for (_, mine), (_, theirs) in zip(there.tensors(), here.tensors(), strict=True):
        mine.copy_(theirs)
    ids, answer, question = small.ids(150), small.ids(5, seed=1), small.ids(9, seed=2)
    found = []
    for net in (here, there):
        run = tiered(small.engine(net, "adakv", "roco", 60), coded=coded)
        first = run.recall(ids)
        for token in answer:
            run.step(token)
        found.append([t.cpu() for t in (first, run.recall([*ids, *answer, *question]))])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)

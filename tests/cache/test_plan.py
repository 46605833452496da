"""What a prompt is planned under: rows that stay, and where they have room."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from layouts import HEADS, SIZE, filled, segment
from measured import CHUNK, measured
from pairwise import some_by_day
from torch import Tensor

from minikv.cache.arena import Layout
from minikv.cache.kv_cache import KVCache
from minikv.cache.plan import Prompt, RowsBefore, Setup, held_after, peak, plan_prompt
from minikv.cache.stats import Shape
from minikv.cache.tier import Tier
from minikv.cache.tier_file import FileRows, Header
from minikv.cache.tier_rows import columns_of
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import Machine, likely
from minikv.engine.engine import Engine
from minikv.kernels.dispatch import GPU_BLOCK, TorchOnCPU
from minikv.models.rope import RopeConfig, Rotation
from minikv.policies.base import Wording


@pytest.mark.parametrize(
    ("capacity", "tokens", "policy", "stride", "stays"),
    [
        (60, 20, "full", 0, True),  # 30 + 20 + 10
        (59, 20, "full", 0, False),
        (119, 20, "full", 0, True),
        (120, 20, "full", 0, False),  # more memory than twice what is needed is given back
        (60, 20, "snapkv", 0, False),  # rows leave
        (60, 5, "snapkv", 0, True),
        (60, 5, "tova", 8, False),
        (60, 5, "snapkv+global", 0, False),
    ],
)
def test_a_later_prompt_that_fits_behind_the_rows_of_before_stays_there(
    capacity: int, tokens: int, policy: str, stride: int, stays: bool
) -> None:
    """Behind 30 rows in each head, one beside the other."""
    shape, full = Shape(2, 2, 4, 8, (None, None), 1000), torch.full((2, 2), 30)
    start, room = torch.arange(4).view(2, 2) * capacity, torch.full((2, 2), capacity)
    before = RowsBefore(Layout(start, full, room, full, full * 0 - 1), [60] * 2, 4 * capacity)
    budget = None if policy == "full" else 40
    step = "auto" if stride else "none"
    rules = EvictionConfig.read(policy, step, budget or "auto", stride=stride).rules()
    turns = [(0, 30 + tokens)]
    prompt = Prompt(position=30, tokens=tokens, rows=budget, room=10, turns=turns)
    setup = Setup(shape, rules, torch.float32, torch.float32)
    assert plan_prompt(prompt, setup, before).shares == stays


def test_rows_before_are_those_that_the_first_token_after_the_prompt_sees() -> None:
    """Of a layer whose window slides by then; of the others all that are held."""
    arena = filled([60, 60], [[10, 20, 5], [10, 20, 5]], None)
    for layer in range(2):
        for head, count in enumerate((10, 20, 5)):
            segment(arena, "pos", layer, head).copy_(torch.arange(20, 20 + count))
    arena.free_slot[:, 1] = arena.start[:, 1] + 19  # position 39
    shape = Shape(2, HEADS, HEADS, SIZE, (None, 50), 1000)
    for tokens, seen in ((9, 34), (31, 8 + 17 + 3), (41, 7), (60, 0)):
        found = RowsBefore.read(shape, arena, 40, tokens)
        assert found.seen == [34, seen]
        assert torch.equal(found.held.held, arena.held)
        for name in ("start", "length", "capacity", "cap", "free_slot"):
            assert torch.equal(getattr(found.held, name), getattr(arena, name))


def test_an_arena_without_rows_has_tables_of_nothing() -> None:
    """No head has a row, nor a free slot."""
    shape = Shape(2, 2, 4, 8, (None, 50), 1000)
    before = RowsBefore.read(shape, filled([0, 0], [[0] * HEADS] * 2, None), 0, 5)
    assert before.seen == [0, 0]
    for name in ("start", "length", "capacity", "cap", "held"):
        assert getattr(before.held, name).tolist() == [[0, 0]] * 2
    assert before.held.free_slot.tolist() == [[-1, -1]] * 2


# -- memory: measured, but for a chunk's output twice, <= planned <= 1.05 x measured ---------------


@pytest.mark.parametrize("windows", [None, (None, 30, None)], ids=["", "windows"])
@pytest.mark.parametrize(
    ("policy", "step", "stride"),
    [
        ("full", "none", 0),
        ("snapkv", "none", 0),
        ("snapkv", "roco", 0),
        ("full", "roco", 0),
        ("snapkv+global", "none", 0),
        ("snapkv+global", "roco", 0),
        ("full", "tova", 8),
    ],
)
def test_what_is_held_after_an_answer_is_what_was_planned(
    policy: str, step: str, stride: int, windows: tuple[int | None, ...] | None
) -> None:
    """Of windows an upper bound."""
    net = small.network(windows=windows)
    budget = None if policy == "full" and step == "none" else 40
    run = small.engine(net, policy, step, budget, stride=stride)
    setup = Setup(run.kv.shape, run.kv.rules, torch.float32, torch.float32)
    given = Prompt(position=0, tokens=100, rows=budget, room=10, turns=[(0, 100)])
    made = plan_prompt(given, setup, RowsBefore.none(setup.shape))
    run.prompt(small.ids(100))
    for steps in range(3):
        held = int(run.kv.arena.held.sum()) * run.kv.rules.row_nbytes(run.kv.shape, run.kv.kv)
        planned = held_after(made, setup, steps)
        assert held == planned if windows is None else held <= planned
        run.step(5)


NOTHING = (None, None)
SLIDING = (None, 500)
FEW = ((1, 8), (1, 2), (2, 2))
BFLOAT16 = [(name, (8, 1)) for name in ("dropkv", "kvzip+", "l2", "expected", "ada-pyramid")]
BFLOAT16 += [(name, (2, 4)) for name in ("kvzip", "snapkv+critical")]
Case = tuple[Any, ...]
CASES: list[Case] = [
    ("full", "none", 0, None, NOTHING),
    ("adakv", "roco", 0, None, NOTHING),
    ("streaming", "none", 0, None, NOTHING),
    ("h2o", "none", 0, None, NOTHING),
    ("nacl", "h2o", 0, None, NOTHING),
    ("kvcrush", "none", 0, None, NOTHING),
    ("keydiff", "none", 0, None, NOTHING),
    ("expected", "none", 0, None, NOTHING),
    ("dropkv", "none", 0, None, NOTHING),
    ("snapkv+critical", "none", 0, None, NOTHING),
    ("snapkv+global", "none", 0, None, NOTHING),
    ("kvzip", "none", 0, None, NOTHING),
    ("kvzip", "h2o", 0, torch.int8, NOTHING),
    ("kvzip", "h2o", 0, None, SLIDING),
    ("global-span+uniform", "none", 0, None, NOTHING),
    ("defensive+global", "none", 0, None, NOTHING),
    ("defensive", "none", 0, None, NOTHING, (1, 8)),
    ("adakv", "hashevict", 0, None, NOTHING),
    ("full", "scissorhands", 0, None, NOTHING),
    ("roco", "auto", 16, None, NOTHING),
    ("roco", "auto", 32, None, NOTHING),
    ("h2o", "auto", 8, None, NOTHING),
    ("hashevict", "auto", 32, None, NOTHING),  # it works with more than attention does
    ("full", "none", 0, torch.int8, NOTHING),
    ("adakv", "none", 0, torch.int8, NOTHING),
    ("adakv", "none", 0, None, SLIDING),
    ("full", "none", 0, None, SLIDING),
    # Other heads: KV heads, and query heads for each.
    ("global-span", "h2o", 0, None, NOTHING, (8, 4)),
    ("global-span+uniform", "none", 0, None, NOTHING, (4, 2), 1200),  # many rows, as a view
    *(("global-span", "h2o", 0, kv, NOTHING, few) for kv in (None, torch.int8) for few in FEW),
    *(
        (name, "none", 0, torch.int8, NOTHING, few)
        for name in ("adakv", "global-span+uniform")
        for few in FEW
    ),
    # Many heads with one query head each, and few with four.
    ("expected+critical", "none", 0, None, NOTHING, (8, 1)),
    ("kvzip+critical", "none", 0, None, NOTHING, (2, 4)),
    ("l2+global", "none", 0, None, NOTHING, (8, 1)),  # earlier keys are listed, and joined
    ("dropkv", "none", 0, torch.int8, NOTHING, (2, 4)),
    *((name, "none", 0, None, NOTHING, heads, 300, torch.bfloat16) for name, heads in BFLOAT16),
    ("global-span", "none", 0, torch.int8, NOTHING, (8, 1), 300, torch.bfloat16),
    ("snapkv", "l2", 0, None, NOTHING, (8, 1), 300, torch.bfloat16),  # no copy of keys in float32
    ("kvzip", "rkv", 0, None, NOTHING, (2, 4), 300, torch.bfloat16),  # its columns start empty
    ("l2+span", "roco", 0, None, NOTHING, (8, 1)),  # what `Span` keeps for all layers
    ("expected", "none", 0, None, NOTHING, (8, 4)),  # covariances are the most
]


def cache(
    policy: str,
    decode: str,
    stride: int,
    kv: torch.dtype | None,
    windows: tuple[int | None, ...],
    heads: tuple[int, int] = (4, 2),
    budget: int = 300,
    dtype: torch.dtype = torch.float32,
) -> KVCache:
    """Heads wide enough that small change does not count."""
    rules = EvictionConfig.read(policy, decode, budget, stride=stride).rules()
    weights = torch.randn(*heads, 64, 64 * math.prod(heads)).to(dtype)
    shape = Shape(len(windows), heads[0], math.prod(heads), 64, windows, 1 << 16)
    rotary = Rotation((RopeConfig(),) * len(windows), 64)
    made = KVCache(shape, rules, dtype=dtype, kv=kv, output=lambda _: weights, rotary=rotary)
    made.ops.block = 1 << 12
    made.words = Wording((1,) * 8, (2,) * 8, (3,) * 4)
    return made


def keeps_its_promise(kv: KVCache, most: int, beside: int = 0) -> None:
    """The record of the last prompt, against what was measured, without a chunk's own output.
    beside: bytes of a tier in RAM, which is counted apart."""
    planned = kv.peak + beside
    chunk = 2 * CHUNK * kv.shape.heads * kv.shape.head_dim * 4
    assert most - chunk <= planned <= 1.05 * most, planned / most


def in_file(kv: KVCache, path: Path, *, coded: bool = False) -> FileRows:
    columns = columns_of(kv.shape, kv.dtype, coded)
    return FileRows.create(path, Header(kv.shape.layers, kv.shape.kv_heads, columns))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id="-".join(map(str, (*case[:4], case[4][1], *case[5:]))),
            marks=[pytest.mark.soak] * (case[2] in (8, 16)),  # many blocks take seconds
        )
        for case in CASES
    ],
)
def test_no_more_exists_at_once_than_planned_and_hardly_less(case: Case) -> None:
    """Of a first prompt and of a later one."""
    kv = cache(*case)
    for turn, tokens in enumerate((1600, 1200)):
        begin = partial(kv.begin, tokens, 20)
        keeps_its_promise(kv, measured(kv, begin, tokens, turn))


@pytest.mark.parametrize(("heads", "block"), [((4, 2), 1 << 12), ((8, 4), GPU_BLOCK)])
def test_products_that_torch_makes_are_planned_too(heads: tuple[int, int], block: int) -> None:
    """Without a compiler: all but what the attention of one head works with, its keys in float32
    and its logits twice."""
    kv = cache("global-span+uniform", "none", 0, None, NOTHING, heads)
    kv.use(TorchOnCPU())
    kv.ops.block = block
    tokens, (queries, size) = 1600, (heads[1] * 32, 64)  # of a head
    most = measured(kv, partial(kv.begin, tokens, 20), tokens, 0)
    assert most - 4 * tokens * (size + 2 * queries) <= kv.peak <= most


@pytest.mark.parametrize(
    ("policy", "windows"),
    some_by_day(
        [("kvzip", SLIDING), ("kvzip+uniform", (None,) * 6)], lambda case: case[0] == "kvzip"
    ),
)
def test_what_is_scored_in_a_file_is_planned_too(
    tmp_path: Path, policy: str, windows: tuple[int | None, ...]
) -> None:
    kv = cache(policy, "none", 0, None, windows)
    rows = in_file(kv, tmp_path / "rows.kv")
    kv.scoring_tier = Tier(kv.shape, kv.dtype, kv.device, rows=rows)
    for turn, tokens in enumerate((1600, 1200)):
        keeps_its_promise(kv, measured(kv, partial(kv.begin, tokens, 20), tokens, turn))
    rows.close()


@pytest.mark.parametrize(
    ("kind", "coded", "policy", "decode", "windows"),
    [
        ("ram", False, "adakv", "roco", NOTHING),
        ("ram", True, "snapkv", "none", SLIDING),
        ("file", False, "snapkv", "none", SLIDING),
        ("file", True, "adakv", "roco", NOTHING),
    ],
)
def test_a_recall_is_planned_too(
    tmp_path: Path, kind: str, coded: bool, policy: str, decode: str, windows: tuple[Any, ...]
) -> None:
    kv = cache(policy, decode, 0, None, windows)
    rows = in_file(kv, tmp_path / "rows.kv", coded=coded) if kind == "file" else None
    kv.tier = tier = Tier(kv.shape, kv.dtype, kv.device, coded=coded, rows=rows)
    for turn, (begins, tokens) in enumerate(((0, 1600), (1600, 2800))):
        tier.rows.reserve(tokens, begins)  # a tier that grows takes that before the prompt
        fed = tokens - min(begins, tokens - kv.observed(tokens, begins))
        begin, outside, beside = partial(kv.recall, tokens, 20, begins), list[Tensor](), 0
        if rows is None:
            for layer in range(len(windows)):
                outside += tier.rows.read(layer, tokens).values()
            beside = tier.rows.nbytes
        keeps_its_promise(kv, measured(kv, begin, fed, turn, outside) + beside, beside=beside)
    if rows is not None:
        rows.close()


@pytest.mark.parametrize("step", ["h2o", "roco", "tova", "hashevict", "scissorhands"])
@pytest.mark.parametrize("policy", ["snapkv", "snapkv+turns"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_what_steps_work_with_is_planned(policy: str, step: str, kernels: str) -> None:
    """By `Machine`, which `minikv plan` and `budget="auto"` ask, with the cache's own kernels."""
    eviction = EvictionConfig.read(policy, step, 600)
    net = small.network(layers=2, heads=4, kv_heads=2, head_dim=16)
    kv = KVCache(small.shape(net), eviction.rules(), kernels=kernels)
    run = Engine(net, kv)
    run.prompt(small.ids(900))
    for token in small.ids(3):
        run.step(token)
    for ops in (kv.ops, likely(kernels, kv.shape, kv.dtype, gpu=False)):
        machine = Machine(kv.shape, kv.dtype, kv.kv, lambda tokens: 0, ops=ops)
        found = peak(*machine.plan(eviction, 900, 3))
        assert kv.decode.nbytes <= found.writing - found.rows <= 1.05 * kv.decode.nbytes

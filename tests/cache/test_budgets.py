"""Budgets to the row, for every policy: what is handed out, and what a cache then holds."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pairwise import covering, pairwise
from small import COMPOSITIONS, VOCAB, Walk, ids, least, network, over, parts, spell
from views import build

from minikv import policies
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.capture import Eager
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.errors import UsageError
from minikv.policies import registry
from minikv.policies.base import PromptView
from minikv.policies.parts import Candidates, smallest_budget

PROMPTS = [name for name in policies.prompt_names() if name != "full"]
COMPOSED = [*PROMPTS, "h2o+ada+pyramid", "kvcrush(adakv)", "snapkv+critical+turns", "l2+nacl+ada"]


@pytest.mark.parametrize("name", [n for n in COMPOSED if "global" not in parts(n)])
@pytest.mark.parametrize("layers", [1, 2, 5, 32])
def test_layers_sum_to_the_budget(name: str, layers: int) -> None:
    """Every integer budget up to 130 and some up to 4,096, for several lengths of a prompt."""
    policy = build(name)
    smallest = smallest_budget(policy, None)
    for budget in (*range(smallest, 130), *range(130, 4097, 61)):
        for most in (budget, budget + 1, 2 * budget, 5000, 1 << 20):
            rows = policy.layer_rows(layers, budget, most, smallest)
            assert len(rows) == layers
            assert sum(rows) == layers * budget
            assert min(rows) >= smallest
            assert max(rows) <= max(most, budget)


@pytest.mark.parametrize("name", COMPOSED)
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_heads_sum_to_the_layers_total(name: str, data: st.DataObject) -> None:
    """Whatever the scores and the free rows: exact, and no head gets more than it has."""
    policy = build(name)
    heads, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 120))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    scores = torch.rand(heads, rows, generator=generator)
    if data.draw(st.booleans()):
        scores = (scores * 4).floor()  # many ties
    free = torch.rand(heads, rows, generator=generator) < data.draw(st.floats(0.05, 1.0))
    total = data.draw(st.integers(0, heads * rows))
    pos = torch.arange(rows).expand(heads, rows)
    view = PromptView(0, rows, pos, 0, None, None, lambda: pos, lambda: pos)
    found = Candidates(view, policy.scorer, scores, free)
    counts = policy.heads.share(found, torch.tensor(total), total).tolist()
    assert sum(counts) == min(total, int(free.sum()))
    assert all(0 <= n <= m for n, m in zip(counts, free.sum(1).tolist(), strict=True))


OWN_ROUNDING = ("rounding", "line", "protect_newest", "skip")
"""Options under which a release's drift, its missing protection or its whole layers are wanted."""


def values(option: policies.Option) -> st.SearchStrategy[object]:
    """Its default every other time, else any value that a short conversation can bear."""
    default = option.default
    some: st.SearchStrategy[object]
    if isinstance(default, bool):
        some = st.booleans()
    elif option.choices:
        some = st.sampled_from(option.choices)
    elif isinstance(default, int):
        few = st.integers(int(option.low), int(option.low) + 36)
        some = few.map(lambda n: n | 1) if option.odd else few
    else:
        some = st.sampled_from([option.low, default, option.high])
    return st.one_of(st.just(default), some)


@st.composite
def choices(draw: st.DrawFn, part: str = "", step: str = "", pinned: int = 0) -> EvictionConfig:
    """What a user may ask for: any composition (with `part`) beside any step policy (or `step`), or
    a step policy that reads in blocks, with any named options, on a budget that is enough beside
    so many pins. An option that is left out may have one default for the prompt, another for the
    answer."""
    step = step or draw(st.sampled_from(policies.step_names()))
    stride = 0
    if part or step == "none" or not draw(st.booleans()):
        fitting = [w for w in COMPOSITIONS if not part or part in parts("+".join(w))]
        words = draw(st.sampled_from([("full",), *fitting] if not part else fitting))
        name = spell(words, draw(st.integers(0, len(words) - 1)))
    else:
        name, stride = step, draw(st.sampled_from([1, 4, 16, 64]))
    info = None if stride else policies.find(name)
    takes = [*(info.prompt_options if info else ()), *policies.find(step, step=True).step_options]
    given = {
        o.name: draw(values(o))
        for o in takes
        if o.name not in OWN_ROUNDING and draw(st.integers(0, 3))
    }
    decode = "auto" if stride else step
    try:
        rows = enough(EvictionConfig.read(name, decode, 1, given, stride=stride), pinned)
    except UsageError:  # options that contradict each other
        given = {}
        rows = enough(EvictionConfig.read(name, decode, 1, given, stride=stride), pinned)
    return EvictionConfig.read(name, decode, rows + draw(st.integers(0, 40)), given, stride=stride)


def enough(eviction: EvictionConfig, pinned: int) -> int:
    """Rows per head that are enough to the row: pins among the sinks need none of their own."""
    rules = eviction.rules()
    prompt, step = rules.prompt, rules.step
    sinks = max(prompt.evidence.sinks if prompt else 0, step.sinks if step else 0)
    return least(eviction, max(0, pinned - sinks))


PINNED = 6
FEW = 2  # pins among the sinks
WINDOWS = [(None, None), (20, None), (None, 70)]


def run(data: st.DataObject, part: str, step: str) -> None:
    """Two or three prompts with answers between them, some under another choice than the first."""
    draw = data.draw
    pinned = draw(st.sampled_from([0, FEW, PINNED]))
    choice = draw(choices(part, step, pinned))
    walk = Walk(choice, windows=draw(st.sampled_from(WINDOWS)), pinned=pinned)
    for turn in range(draw(st.integers(2, 3))):
        if turn and draw(st.booleans()):
            walk.configure(draw(choices(pinned=pinned)))
        walk.prompt(ids(draw(st.integers(1, 120)), seed=turn))
        for token in ids(draw(st.integers(0, 9)), seed=10 + turn):
            walk.step(token)


BRIEF = settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking takes minutes
)
LONG = settings(BRIEF, max_examples=440, derandomize=False, print_blob=True)
STEPS = policies.step_names()
PARTS = (*registry.SCORERS, *registry.OTHER_PARTS)


@pytest.mark.parametrize(
    "how", [BRIEF, pytest.param(LONG, marks=pytest.mark.soak)], ids=["", "many"]
)
@pytest.mark.parametrize(
    ("part", "step"), [*((part, "") for part in PARTS), *(("", step) for step in STEPS)]
)
def test_walks(part: str, step: str, how: settings) -> None:
    """Invariant 2, for all that is registered: see `Walk`. At night about 10,000 walks."""
    how(given(st.data())(lambda data: run(data, part, step)))()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(name, part, marks=[] if i % 2 == bool(part) else [pytest.mark.soak])
        for i, name in enumerate(w[0] for w in COMPOSITIONS if len(w) == 1)
        for part in ("", "+pyramid")
    ],
)
def test_the_smallest_budget_is_enough_at_every_extreme(name: str, part: str) -> None:
    """Whatever one of its options says, and beside pins: what is protected fits the budget."""
    info, pins = policies.find(name + part), itertools.cycle((0, 9, 9, 0))
    for option in info.prompt_options:
        if option.low is None or option.name in ("seed", "temperature", *OWN_ROUNDING):
            continue
        most = 31 if isinstance(option.default, int) else option.high
        for value in (option.low, most):
            given = {option.name: value if isinstance(option.default, float) else int(value)}
            rows = least(EvictionConfig.read(info.name, "none", 1, given))
            pinned = next(pins)
            walk = Walk(EvictionConfig.read(info.name, "none", rows + pinned, given), pinned=pinned)
            walk.prompt(ids(100))


@pytest.mark.parametrize(
    ("name", "step", "pinned", "spare"),
    covering(
        (name, step, pinned, spare)
        for name in ("h2o+ada+pyramid", "l2+ada", "tova+ada+turns")
        for step in STEPS
        for pinned in (FEW, PINNED)
        for spare in (0, 1)
        if step != "none"
    ),
)
def test_pinned_rows_stay_where_heads_have_little_else(
    name: str, step: str, pinned: int, spare: int
) -> None:
    """However few rows an adaptive budget gives a head, one beside the pins may be overwritten."""
    given = {"alpha": 0.0} | ({"recent_share": 0.0} if name.startswith("h2o") else {})
    rows = enough(EvictionConfig.read(name, step, 1, given), pinned)
    walk = Walk(EvictionConfig.read(name, step, rows + spare, given), pinned=pinned)
    for turn in range(2):
        walk.prompt(ids(90, seed=10 * pinned + spare + turn))
        for token in ids(9, seed=5 + spare):
            walk.step(token)


@pytest.mark.parametrize("capture", [None, Eager()], ids=["host", "device"])
@pytest.mark.parametrize(
    ("seed", "pinned", "layer", "head", "before", "after"),
    [(1, 0, 2, 0, [0, 1], [0]), (9, 2, 2, 2, [0, 1, 3], [0, 1])],
)
def test_a_head_that_has_nothing_but_sinks_keeps_its_pins_and_its_first_row(
    seed: int,
    pinned: int,
    layer: int,
    head: int,
    before: list[int],
    after: list[int],
    capture: Eager | None,
) -> None:
    """H2O has no sinks of its own, StreamingLLM has four: a head may be left with fewer rows."""
    net, given = network(seed=seed), {"alpha": 0.0, "recent_share": 0.0}
    kv = over(net, EvictionConfig.read("h2o+ada", "streaming", 5, given).rules())
    kv.pin(pinned)
    engine = Engine(net, kv, capture)
    engine.prompt(ids(100, seed=seed))
    assert kv.kept(layer, head).tolist() == before
    token = 5
    for position in range(100, 104):
        token = engine.next(token, VOCAB, Sampling(), seed)
        assert kv.kept(layer, head).tolist() == [*after, position]


OTHERS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in STEPS),
    ("hashevict", {"bits": 8}),
    ("hashevict", {"seed": 5}),
    ("scissorhands", {"history": 16}),
]


def others() -> dict[tuple[int, int], list[int]]:
    """(a policy of `OTHERS`, stride) -> some of those before it; each pair comes, with a stride or
    without, and each policy comes before any stride and after it."""
    after = [i for i, (name, _) in enumerate(OTHERS) if name != "none"]
    found: dict[tuple[int, int], list[int]] = {}
    for other, stride, first in pairwise(after, (0, 8), range(len(OTHERS))):
        found.setdefault((other, stride), []).append(first)
    return found


@pytest.mark.parametrize(("other", "stride", "before"), [(*k, v) for k, v in others().items()])
def test_another_policy_finds_true_columns(other: int, stride: int, before: list[int]) -> None:
    """After any other policy, or the same with other options: what it knows of old rows is right,
    or nothing. The prompt between them is one token."""
    step, given = OTHERS[other]
    name, decode = (step, "auto") if stride else ("adakv", step)
    choice = EvictionConfig.read(name, decode, 64, given, stride=stride)
    for first, options in (OTHERS[i] for i in before):
        start = EvictionConfig.read("h2o" if first == "h2o" else "adakv", first, 64, options)
        walk = Walk(start, windows=(None,))
        walk.prompt(ids(90))
        walk.step(1)
        walk.configure(choice)
        walk.prompt([2])
        walk.step(3)


def test_every_part_is_in_a_composition() -> None:
    assert {part for words in COMPOSITIONS for part in parts("+".join(words))} == set(PARTS)

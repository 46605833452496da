"""What the papers promise of their methods, and what random draws must look like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from small import Dense, engine, ids, network, scheduler, victims
from torch import Tensor

from minikv import policies
from minikv.cache.budget import Budget
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.engine import Engine
from minikv.errors import UsageError
from minikv.policies.base import Evidence, PromptPolicy, PromptView, Scorer, StepView
from minikv.policies.counter_rng import gumbel, uniform
from minikv.policies.hashevict import codes, ones, projection
from minikv.policies.kvcrush import anchor
from minikv.policies.scissorhands import ScissorHands
from minikv.policies.selection import ranked
from minikv.policies.tova import layer_mean


def build(name: str, options: Mapping[str, object] | None = None) -> PromptPolicy:
    made = policies.prompt_policy(name, options)
    assert made is not None
    return made


def view(mass: Tensor, observed: int = 1, layer: int = 0) -> PromptView:
    """A first prompt of N tokens, of whose queries `observed` gave mass [H, G, N]."""
    heads, _, rows = mass.shape
    pos = torch.arange(rows).expand(heads, rows)
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(heads, rows, 8, generator=generator)
    return PromptView(layer, rows, pos, observed, mass, mass.mean(1) ** 2, lambda: key, lambda: key)


def choose(policy: PromptPolicy, seen: PromptView, total: int) -> Tensor:
    """bool [H, N] of the rows that stay, as a prompt asks for them."""
    return policy.keep(seen, total)


class Spy(Scorer):
    """Another scorer, whose scores are written down."""

    def __init__(self, of: Scorer, seen: list[Tensor]) -> None:
        self.of, self.seen = of, seen

    @property
    def evidence(self) -> Evidence:
        return self.of.evidence

    def protected(self, view: PromptView) -> Tensor:
        return self.of.protected(view)

    def score(self, view: PromptView) -> Tensor:
        self.seen.append(self.of.score(view))
        return self.seen[-1]


def random_mass(heads: int = 3, group: int = 2, rows: int = 120, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(heads, group, rows, generator=generator) ** 6


# -- draws ----------------------------------------------------------------------------------


def test_uniform_is_uniform_and_keyed() -> None:
    n = 40_000
    draws = uniform(1, 2, torch.arange(n))
    counts = torch.histc(draws, 20, 0.0, 1.0)
    chi = float(((counts - n / 20) ** 2 / (n / 20)).sum())
    assert chi < 43.8  # 19 degrees of freedom, p = 0.001
    assert float(draws.min()) > 0.0
    assert float(draws.max()) < 1.0
    for other in (uniform(2, 2, torch.arange(n)), uniform(1, 3, torch.arange(n)), draws.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack((draws, other)))[0, 1])) < 0.02
    assert torch.equal(uniform(1, 2, torch.arange(n))[77], uniform(1, 2, torch.tensor(77)))


def test_gumbel_top_k_draws_without_replacement() -> None:
    """The first of two is drawn with p, and the second as successive draws would."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    trials = 20_000
    keys = p.log() + gumbel(9, torch.arange(trials)[:, None], torch.arange(4))
    order = keys.argsort(1, descending=True)[:, :2]
    first = torch.bincount(order[:, 0], minlength=4) / trials
    assert torch.allclose(first, p, atol=0.012)
    both = torch.bincount(order.flatten(), minlength=4) / trials
    want = [
        float(p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i)) for i in range(4)
    ]
    assert torch.allclose(both, torch.tensor(want), atol=0.012)


def test_random_takes_every_row_alike() -> None:
    step = policies.step_policy("random", {"sinks": 2, "recent": 3})
    assert step is not None
    rows, trials = 25, 4000
    pos = torch.arange(rows).expand(trials, rows)
    heads = torch.arange(trials)
    first = victims(
        step, StepView(rows, pos, torch.full((trials,), rows), heads // 50, heads % 50, {})
    )
    counts = torch.bincount(first, minlength=rows).float()
    assert counts[:2].sum() == 0
    assert counts[-3:].sum() == 0
    free = counts[2:-3]
    chi = float(((free - trials / 20) ** 2 / (trials / 20)).sum())
    assert chi < 43.8  # 19 degrees of freedom, p = 0.001


def test_draws_repeat_with_the_seed_and_differ_between_layers() -> None:
    mass = random_mass()
    a, b, c, d = (
        choose(build("nacl", {"seed": seed}), view(mass, 32, layer), 3 * 60)
        for seed, layer in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a, d)


# -- NaCl -----------------------------------------------------------------------------------


def test_nacl_draws_a_share_and_keeps_its_sizes() -> None:
    mass = random_mass()
    for share in (0.0, 0.35, 1.0):
        kept = choose(build("nacl", {"random": share}), view(mass, 32), 3 * 60)
        assert kept.sum(1).tolist() == [60] * 3
        assert bool(kept[:, :4].all())
        assert bool(kept[:, -32:].all())
        best = choose(build("nacl", {"random": 0.0}), view(mass, 32), 3 * 60)
        same = int((kept & best).sum())
        assert same == 180 if share == 0 else same < 180


def test_nacl_draws_in_proportion_to_the_score() -> None:
    """Inclusion of a row when one is drawn: its share of the scores; even when it is hot."""
    weight = torch.cat((torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(1)))
    wanted = {1.0: weight[:4] / 10, 1e6: torch.full((4,), 0.25)}
    for temperature, want in wanted.items():
        policy = build(
            "nacl", {"proxies": 1, "sinks": 0, "random": 1.0, "temperature": temperature}
        )
        counts = torch.zeros(4)
        trials = 300
        for layer in range(trials):
            mass = weight.expand(40, 1, 5)
            counts += choose(policy, view(mass, 1, layer), 40 * 2)[:, :4].sum(0)
        n = trials * 40
        chi = float(((counts - n * want) ** 2 / (n * want)).sum())
        assert chi < 16.3, temperature  # 3 degrees of freedom, p = 0.001


def test_proxies_that_are_all_queries_are_h2o() -> None:
    """N1: the same scores, so the same rows, if both protect the same."""
    net = network()
    kept = []
    for name, options in (
        ("nacl", {"proxies": 90, "sinks": 0, "random": 0.0}),
        ("h2o", {"window": 1}),
    ):
        run = engine(net, name, "none", 91, prompt_options=options)
        seen: list[Tensor] = []
        policy = run.kv.prompt_policy
        assert policy is not None
        scorer = Spy(policy.scorer, seen)
        run.kv.configure(replace(policy, scorer=scorer), None, run.kv.budget)
        run.prompt(ids(90))
        run.prompt(ids(9, seed=1))
        kept.append(seen[0] if seen else torch.empty(0))
    assert kept[0].shape[1] == 99
    # The second prompt of 9 has 9 queries in both cases.
    assert torch.allclose(kept[0], kept[1], rtol=1e-4, atol=1e-6)


def test_h2o_columns_sum_to_the_queries() -> None:
    """H1: every query gives one unit of attention, and nothing was evicted before."""
    net = network()
    run = engine(net, "h2o", "h2o", 1000)
    run.prompt(ids(70))
    for token in range(5):
        run.step(token)
    run.prompt(ids(20, seed=2))
    for layer in range(3):
        index, live = run.kv.arena.index(layer)
        sums = run.kv.arena.columns["sum"][index].masked_fill(~live, 0.0).sum(1)
        assert torch.allclose(sums, torch.full_like(sums, 5.0 + 90.0 - 0.0), rtol=1e-4)


# -- KVCrush --------------------------------------------------------------------------------


def test_kvcrush_without_representatives_is_its_base() -> None:
    mass = random_mass()
    for base in ("snapkv", "tova", "l2"):
        sinks = {} if base != "snapkv" else {"sinks": 0}
        crushed = build(f"kvcrush({base})", {"ratio": 0.0} | sinks)
        assert torch.equal(
            choose(crushed, view(mass, 32), 180), choose(build(base), view(mass, 32), 180)
        )


@pytest.mark.parametrize("kind", ["mean", "inv_mean", "alternate", "random", "zeros", "ones"])
@pytest.mark.parametrize("total", [3 * 37, 3 * 44, 3 * 119])
def test_kvcrush_keeps_its_sizes(kind: str, total: int) -> None:
    mass = random_mass()
    kept = choose(build("kvcrush", {"anchor": kind}), view(mass, 32), total)
    assert kept.sum(1).tolist() == [total // 3] * 3
    assert bool(kept[:, -32:].all())
    assert bool(kept[:, :4].all())


def test_kvcrush_anchors() -> None:
    marks = torch.tensor([True, False])  # what most rows have
    assert anchor("mean", marks, 0, 0).tolist() == [True, False]
    assert anchor("inv_mean", marks, 0, 0).tolist() == [False, True]
    assert anchor("zeros", marks, 0, 0).tolist() == [False, False]
    assert anchor("ones", marks, 0, 0).tolist() == [True, True]
    assert anchor("alternate", marks, 0, 0).tolist() == [False, True]
    drawn = torch.stack([anchor("random", marks, 0, layer) for layer in range(400)])
    assert 0.4 < float(drawn.float().mean()) < 0.6


def test_kvcrush_takes_the_nearest_and_the_farthest() -> None:
    """Of the rows that go, sorted by marks and then by position, the first and the last stay."""
    heads, rows = 2, 40
    mass = random_mass(heads, 1, rows)
    policy = build("kvcrush(tova)", {"anchor": "zeros", "ratio": 0.5, "per_head": True})
    seen = view(mass)
    kept = choose(policy, seen, heads * 9)
    scores = mass.mean(1)
    marks = torch.zeros(heads, rows, dtype=torch.int64)
    for h in range(heads):
        marks[h, scores[h, : rows - 1].topk((rows - 1) // 2).indices] = 1
    distance = marks.sum(0)
    for h in range(heads):
        best = set(scores[h, : rows - 1].topk(4).indices.tolist())
        rest = sorted(set(range(rows - 1)) - best, key=lambda j: (int(distance[j]), j))
        picks = {rest[round(i * (len(rest) - 1) / 3)] for i in range(4)}
        assert set(kept[h].nonzero().flatten().tolist()) == best | picks | {rows - 1}


@pytest.mark.parametrize("kind", ["zeros", "ones", "mean"])
def test_kvcrush_with_a_bit_per_query_head(kind: str) -> None:
    """H * G bits, each the better half of one query head's own attention."""
    heads, group, rows = 2, 3, 40
    mass = random_mass(heads, group, rows)
    options = {"anchor": kind, "ratio": 0.5, "per_head": True, "bits": "query"}
    kept = choose(build("kvcrush(tova)", options), view(mass), heads * 9)
    bits = torch.zeros(heads * group, rows, dtype=torch.bool)
    for h in range(heads):
        for g in range(group):
            half = mass[h, g, : rows - 1].topk((rows - 1) // 2).indices
            bits[h * group + g, half] = True
    goal = bits[:, : rows - 1].float().mean(1) > 0.5 if kind == "mean" else kind == "ones"
    goal = torch.as_tensor(goal).expand(heads * group)
    distance = (bits != goal[:, None]).sum(0)
    scores = mass.mean(1)
    for h in range(heads):
        sure = set(scores[h, : rows - 1].topk(4).indices.tolist())
        rest = sorted(set(range(rows - 1)) - sure, key=lambda j: (int(distance[j]), j))
        picks = {rest[round(i * (len(rest) - 1) / 3)] for i in range(4)}
        assert set(kept[h].nonzero().flatten().tolist()) == sure | picks | {rows - 1}
    alone = choose(build("kvcrush(tova)", options | {"bits": "kv"}), view(mass), heads * 9)
    assert not torch.equal(kept, alone)


# -- TOVA, ScissorHands ---------------------------------------------------------------------


def test_tova_judges_a_layer_as_one() -> None:
    values = torch.tensor([[1.0, 2.0, 0.0], [3.0, 5.0, 9.0], [7.0, 7.0, 7.0]])
    pos = torch.tensor([[0, 1, -1], [1, 0, 2], [0, 1, 2]])
    layer = torch.tensor([0, 0, 1])
    mean = layer_mean(values, pos, layer)
    assert mean[0, :2].tolist() == [3.0, 2.5]
    assert mean[1].tolist() == [2.5, 3.0, 9.0]
    assert mean[2].tolist() == [7.0] * 3


def test_tova_keeps_the_heads_of_a_layer_alike() -> None:
    net = network()
    run = engine(net, "tova", "tova", 40)
    run.prompt(ids(100))
    for token in range(30):
        run.step(token)
    for layer in range(3):
        held = [run.kv.kept(layer, h).tolist() for h in range(3)]
        assert held[0] == held[1] == held[2]
        assert len(held[0]) == 40
        assert held[0][-1] == run.kv.position - 1


@pytest.mark.parametrize("window", [5, 32, 40, 64, 100])
def test_scissorhands_counts_the_last_queries(window: int) -> None:
    """C1: the shift register against an explicit recount, rows joining along the way."""
    step = ScissorHands(sinks=4, recent=10, history=window)
    rows, generator = 12, torch.Generator().manual_seed(5)
    columns = {name: torch.zeros(rows, dtype=dtype) for name, dtype in step.columns.items()}
    history: list[Tensor] = []
    for i in range(130):
        p = torch.rand(rows, generator=generator)
        seen = torch.full((rows,), 2.0)
        if i == 60:  # row 3 is overwritten by a newcomer
            for column in columns.values():
                column[3] = 0
            for bits in history:
                bits[3] = False
        step.update(columns, p, lambda seen=seen: seen)  # type: ignore[misc]
        history.append(p < 0.5)
        want = torch.stack(history[-window:]).sum(0)
        words = [column for name, column in columns.items() if name != "queries"]
        assert torch.stack([ones(word) for word in words]).sum(0).tolist() == want.tolist()
    assert columns["queries"][0] == min(130, window)
    assert columns["queries"][3] == min(70, window)


def test_scissorhands_takes_uniform_attention_for_enough() -> None:
    """C2: exactly a uniform share is not below it, for any number of rows."""
    step = ScissorHands(sinks=4, recent=10, history=50)
    for rows in range(1, 400):
        columns = {name: torch.zeros(rows, dtype=dtype) for name, dtype in step.columns.items()}
        seen = torch.full((rows,), float(rows))
        step.update(columns, torch.full((rows,), 1.0 / rows), lambda seen=seen: seen)  # type: ignore[misc]
        assert int(columns["below0"].sum()) == 0, rows


@pytest.mark.parametrize(("tokens", "history"), [(90, 400), (90, 20), (12, 400)])
def test_scissorhands_counts_a_prompts_last_queries(tokens: int, history: int) -> None:
    """Every one of them for itself, and a row only from its own query on."""
    net = network()
    options: dict[str, object] = {"history": history}
    run = engine(net, "full", "scissorhands", 512, step_options=options)
    run.prompt(ids(tokens))
    dense = Dense(net)
    plain = dense.kv.attend

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.cat([k for k, _ in seen_keys[layer]] + [k]).transpose(0, 1)
        first = rows.shape[1] - len(q)
        query = q.view(len(q), 3, -1, 8).permute(1, 2, 0, 3)
        logits = query @ rows[:, None].transpose(2, 3) * 8**-0.5
        at = torch.arange(first, rows.shape[1])
        hidden = torch.arange(rows.shape[1]) > at[:, None]
        seen_p[layer].append(logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(1))
        seen_keys[layer].append((k, v))
        return plain(layer, q, k, v)

    seen_keys: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    seen_p: list[list[Tensor]] = [[], [], []]
    dense.kv.attend = attend  # type: ignore[method-assign]
    dense.prompt(ids(tokens))
    last = min(32, history, tokens)
    arena = run.kv.arena
    for layer in range(3):
        below = torch.zeros(3, tokens)
        for i in range(tokens - last, tokens):
            chunk = next(p for p in seen_p[layer] if p.shape[-1] > i)
            p = chunk[:, i - (chunk.shape[-1] - chunk.shape[1])]
            below[:, : i + 1] += p[:, : i + 1] < 1.0 / (i + 1)
        for head in range(3):
            order = arena.segment("pos", layer, head).long()
            words = [arena.segment(n, layer, head) for n in arena.extra if n != "queries"]
            found = torch.stack([ones(word.long()) for word in words]).sum(0)
            assert found.tolist() == below[head, order].long().tolist()
            able = (tokens - order).clamp(max=last)
            assert arena.segment("queries", layer, head).long().tolist() == able.tolist()


# -- HashEvict ------------------------------------------------------------------------------


def test_simhash_law() -> None:
    """L1: the distance of two codes is binomial, with the angle's share of pi."""
    bits, size, trials = 32, 64, 400
    angle = math.pi / 3
    distances = []
    for seed in range(trials):
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.linalg.qr(torch.randn(size, 2, generator=generator))[0].T
        c = math.cos(angle) * a + math.sin(angle) * b
        both = codes(torch.stack((a, c)), projection(seed, 0, size, bits))
        distances.append(float(ones(both[0] ^ both[1])))
    found = torch.tensor(distances)
    p = angle / math.pi
    assert abs(float(found.mean()) - bits * p) < 4 * math.sqrt(bits * p * (1 - p) / trials)
    assert 0.8 < float(found.var()) / (bits * p * (1 - p)) < 1.25


@pytest.mark.parametrize("bits", [4, 15, 16, 31, 32])
def test_hashevict_evicts_the_antipode_and_spares_the_twin(bits: int) -> None:
    """L2: codes ignore scale; -q is the farthest a key can be, q the nearest."""
    step = policies.step_policy("hashevict", {"sinks": 0, "recent": 0, "bits": bits})
    assert step is not None
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 1, 16, generator=generator)
    keys = torch.randn(9, 16, generator=generator)
    keys[4], keys[7] = -3.0 * query[0, 0], 0.1 * query[0, 0]
    code = step.init_state(0, keys)["code"]
    assert torch.equal(code, step.init_state(0, 5.0 * keys)["code"])
    zero, pos = torch.zeros(1, dtype=torch.int64), torch.arange(9)[None]
    order = []
    for _ in range(9):
        seen = StepView(
            9, pos, torch.tensor([9]), zero, zero, {"code": code[None]}, query=query, layer_index=0
        )
        victim = int(victims(step, seen))
        order.append(victim)
        pos = pos.clone()
        pos[0, victim] = -1
    assert order[0] == 4 or bits == 4
    assert order[-1] == 7 or bits == 4
    assert sorted(order) == list(range(9))


def test_ones_counts_bits() -> None:
    numbers = [0, 1, 0xFFFFFFFF, 0x80000000, 0x12345678, 0xDEADBEEF]
    assert ones(torch.tensor(numbers)).tolist() == [n.bit_count() for n in numbers]


# -- composition ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("snapkv+ada", ("snapkv", "ada")),
        ("adakv+pyramid", ("snapkv", "pyramid", "ada")),
        ("h2o+adakv+pyramidkv", ("h2o", "pyramid", "ada")),
        ("kvcrush(h2o)", ("h2o", "kvcrush")),
        ("kvcrush(h2o) + ada", ("h2o", "ada", "kvcrush")),
        ("kvcrush(h2o+ada)+turns", ("h2o", "ada", "kvcrush", "turns")),
        ("kvcrush(proxies)", ("proxies", "kvcrush")),
        ("nacl+critical", ("proxies", "draw", "critical")),
        ("kvcrush+critical", ("snapkv", "kvcrush", "critical")),
        ("kvcrush(adakv)", ("snapkv", "ada", "kvcrush")),
        ("l2+nacl", ("l2", "draw")),
    ],
)
def test_names_compose(name: str, parts: tuple[str, ...]) -> None:
    assert policies.find(name).parts == parts
    assert build(name).name == name


def test_preset_names_are_rows_of_the_same_table() -> None:
    mass = random_mass()
    for preset, spelled in (("adakv", "snapkv+ada"), ("kvcrush", "kvcrush(snapkv)")):
        assert torch.equal(
            choose(build(preset), view(mass, 32), 200), choose(build(spelled), view(mass, 32), 200)
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h2o+snapkv", "'snapkv' also says what a row is worth"),
        ("foo+ada", "'foo' does not say what a row is worth"),
        ("full+ada", "'full' does not say"),
        ("h2o+adaa", "'adaa' is no part"),
        ("nacl+kvcrush", "draw and kvcrush answer the same question"),
        ("kvcrush()", "unknown policy"),
        ("h2o+", "'' is no part"),
        ("+", "'' does not say"),
    ],
)
def test_what_cannot_be_composed_is_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        policies.find(name)
    assert says in str(refused.value)


# -- pins -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["adakv", "streaming", "nacl", "l2", "h2o"])
@pytest.mark.parametrize("step", ["roco", "h2o", "tova", "streaming", "hashevict"])
def test_pinned_rows_never_leave(policy: str, step: str) -> None:
    net = network()
    run = engine(net, policy, step, 64)
    run.kv.pin(20)
    for turn in range(3):
        run.prompt(ids(80, seed=turn))
        for token in range(6):
            run.step(token)
        for layer in range(3):
            for head in range(3):
                held = run.kv.kept(layer, head).tolist()
                assert held[:20] == list(range(20))
                assert len(held) <= 64 or policy == "adakv"
    run.reset()
    run.prompt(ids(80))
    assert any(run.kv.kept(0, h).tolist()[:20] != list(range(20)) for h in range(3))


def test_pins_beyond_the_budget_are_refused() -> None:
    run = engine(network(), "adakv", "roco", 64)
    with pytest.raises(UsageError) as refused:
        run.kv.pin(40)
    assert "too small beside 40 pinned ones" in str(refused.value)
    assert "is 73 rows" in refused.value.hint
    run.kv.pin(31)
    run.prompt(ids(200))


def test_the_ends_of_turns_are_preferred() -> None:
    """Both ends of every prompt stay, ahead of better rows, within the budget."""
    net = network()
    run = engine(net, "snapkv+turns", "none", 80, prompt_options={"edge": 5, "window": 8})
    begins = []
    for turn in range(3):
        begins.append(run.kv.position)
        run.prompt(ids(90, seed=turn))
        run.step(1)
    ends = [b + 90 for b in begins]
    for layer in range(3):
        for head in range(3):
            held = set(run.kv.kept(layer, head).tolist())
            assert len(held) == 81
            for begin, end in zip(begins, ends, strict=True):
                assert set(range(begin, begin + 5)) <= held
                assert set(range(end - 5, end)) <= held


@pytest.mark.parametrize("step", ["roco", "h2o", "tova", "hashevict", "streaming", "random"])
def test_the_ends_of_turns_stay_while_an_answer_is_written(step: str) -> None:
    net = network()
    run = engine(net, "snapkv+turns", step, 60, prompt_options={"edge": 5, "window": 8})
    for turn in range(2):
        run.prompt(ids(90, seed=turn))
        for token in range(30):
            run.step(token)
    edges = {*range(5), *range(85, 90), *range(120, 125), *range(205, 210)}
    for layer in range(3):
        for head in range(3):
            assert edges <= set(run.kv.kept(layer, head).tolist())


def test_the_ends_of_turns_give_way_where_nothing_else_is_left() -> None:
    run = engine(network(), "snapkv+turns", "roco", 40, prompt_options={"edge": 200, "window": 8})
    run.prompt(ids(300))
    for token in range(60):
        run.step(token)
    assert {len(run.kv.kept(i, h)) for i in range(3) for h in range(3)} <= {40, 41}


def test_values_weigh_the_same_way_over_any_scorer() -> None:
    """Rows of ten times the value stay under CriticalKV, whatever the sign of the scores."""
    generator = torch.Generator().manual_seed(0)
    mass = random_mass(2, 2, 60)
    value = torch.randn(2, 60, 8, generator=generator)
    heavy = torch.arange(60) % 2 == 0
    value[:, heavy] *= 10.0
    matrix = torch.randn(2, 2, 8, 16, generator=generator)
    seen = replace(view(mass), value=lambda: value, output=lambda: matrix)
    for base in ("tova", "h2o", "l2", "keydiff", "streaming", "random"):
        options = {"by_score": 0.0}
        kept = choose(build(f"{base}+critical", options), seen, 2 * 30)
        plain = choose(build(base), seen, 2 * 30)
        more = kept[:, heavy].sum() - plain[:, heavy].sum()
        assert int(more) >= 4, base


def test_a_draw_follows_ranks_where_scores_are_no_weights() -> None:
    """Better rows are drawn more often although a norm's scores are negative."""
    mass = random_mass(1, 1, 60)
    seen = view(mass)
    order = (-seen.key().norm(dim=-1))[0].argsort(descending=True)
    hits = torch.zeros(60)
    for seed in range(300):
        options = {"random": 1.0, "seed": seed, "sinks": 0, "recent": 0}
        hits += choose(build("l2+draw", options), seen, 15)[0]
    assert float(hits[order[:15]].sum()) > 2.0 * float(hits[order[-15:]].sum())


def test_ranks() -> None:
    scores = torch.tensor([[-3.0, -1.0, -1.0, 9.0]])
    free = torch.tensor([[True, True, True, False]])
    ranks = ranked(scores, torch.tensor([[5, 7, 6, 8]]), free)
    assert ranks[0, :3].tolist() == pytest.approx([1 / 3, 1.0, 2 / 3])


@pytest.mark.parametrize("name", ["l2+ada", "keydiff+ada", "h2o+ada", "expected+ada"])
def test_no_head_is_left_nothing(name: str) -> None:
    options: dict[str, object] = {"alpha": 0.0}
    options |= {"recent_share": 0.0} if "h2o" in name else {"sinks": 0, "recent": 0}
    for seed in range(4):
        run = engine(network(seed=seed), name, "none", 4, prompt_options=options)
        run.prompt(ids(80))
        sizes = [[len(run.kv.kept(layer, h)) for h in range(3)] for layer in range(3)]
        assert [sum(row) for row in sizes] == [12] * 3
        assert min(map(min, sizes)) >= 1


def test_h2o_keeps_the_newest_half() -> None:
    """As in the paper, at the prompt as well; `window` sets a number instead."""
    for options, newest in (({}, 30), ({"recent_share": 0.25}, 15), ({"window": 7}, 7)):
        run = engine(network(), "h2o", "none", 60, prompt_options=options)
        run.prompt(ids(200))
        for layer in range(3):
            for head in range(3):
                kept = run.kv.kept(layer, head)
                assert len(kept) == 60
                assert kept[-newest:].tolist() == list(range(200 - newest, 200))


@pytest.mark.parametrize(
    ("pair", "stride"),
    [
        (("pyramidkv", "roco"), 0),
        (("ada-pyramid", "h2o"), 0),
        (("snapkv+turns", "tova"), 0),
        (("full", "roco"), 16),
        (("full", "h2o"), 16),
        (("full", "streaming"), 16),
        (("full", "hashevict"), 16),
        (("full", "l2"), 16),
        (("full", "random"), 16),
    ],
)
def test_pinned_rows_stay_in_every_layout(pair: tuple[str, str], stride: int) -> None:
    """Budgets by layer, and prompts in blocks, count what is pinned; too little is refused."""
    net = network()
    for budget in range(20, 130, 6):
        kv = scheduler(net, pair[0], pair[1], 128)
        prompt, step, _, _ = EvictionConfig.read(*pair).policies()
        try:
            kv.configure(prompt, step, Budget.parse(budget), stride)
            kv.pin(20)
            run = Engine(net, kv)
            run.prompt(ids(200))
        except UsageError:
            assert budget < 120
            continue
        for token in range(20):
            run.step(token)
        run.prompt(ids(60, seed=4))
        for layer in range(3):
            for head in range(3):
                assert set(range(20)) <= set(kv.kept(layer, head).tolist())


def test_preferred_rows_do_not_break_a_small_budget() -> None:
    run = engine(network(), "adakv+turns", "none", 20, prompt_options={"edge": 30, "window": 8})
    run.prompt(ids(200))
    for layer in range(3):
        assert sum(len(run.kv.kept(layer, h)) for h in range(3)) == 60

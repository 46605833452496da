"""Kept sets against numbers computed with the authors' released code.

data/parity.json names, per case, repository, commit and file; the tensors hold numbers only.
Everything runs through the scheduler, on a network of one layer that is its keys and queries.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import ids, network, over, victims
from spy import Spy
from torch import Tensor
from views import asked, build, kept, rule

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.engine.engine import Engine
from minikv.kernels.layer.plain import rotate
from minikv.models.rope import RopeConfig, Rotary, Rotation
from minikv.policies import kvcrush
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.parts import Candidates

DATA = Path(__file__).parents[1] / "data"
CASES = {case["id"]: case for case in json.loads((DATA / "parity.json").read_text())}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(DATA / "parity.safetensors")


def of(policy: str) -> list[str]:
    found = [name for name, case in CASES.items() if case["policy"] == policy]
    return [name for name in found if not name.startswith(("kvpress", "easykv_prefill"))]


def like(start: str) -> list[str]:
    return [name for name in CASES if name.startswith(start)]


def opened(name: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A case's parameters, and its tensors by their role."""
    case = CASES[name]
    return case["params"], {role: tensors[name] for role, name in case["tensors"].items()}


def ragged(flat: Tensor, lengths: Tensor) -> list[list[int]]:
    return [part.tolist() for part in flat.split(lengths.tolist())]


def one_layer(
    heads: int,
    group: int,
    size: int,
    prompt: object,
    step: object,
    budget: int,
    layers: int = 1,
    kernels: str = "auto",
) -> KVCache:
    shape = Shape(layers, heads, heads * group, size, (None,) * layers, 1 << 20)
    return KVCache(shape, Rules(prompt, step, Budget.parse(budget)), kernels=kernels)  # type: ignore[arg-type]


def feed(kv: KVCache, query: Tensor, key: Tensor, value: Tensor | None = None) -> list[list[int]]:
    """Read a prompt of rows query [N, H, d], key and value [N, Hk, d] in every layer; the kept
    sets. value: if None, the keys."""
    kv.begin(len(key))
    rows = query, key, key if value is None else value
    for layer in range(kv.shape.layers):
        for lo in range(0, len(key), 64):
            kv.attend(layer, *(x[lo : lo + 64] for x in rows))
    kv.end(len(key))
    return kept(kv)


def follow(kv: KVCache, query: Tensor, key: Tensor, victims: list[list[int]]) -> None:
    """Write an answer token by token; in every head exactly the given victims must leave."""
    held = [set(rows) for rows in kept(kv)]
    for step, gone in enumerate(victims):
        at = kv.position
        kv.attend(0, query[at : at + 1], key[at : at + 1], key[at : at + 1])
        kv.end(1)
        for head, victim in enumerate(gone):
            held[head] = (held[head] | {at}) - {victim}
        assert [set(rows) for rows in kept(kv)] == held, f"step {step}"


SAME = ("kernel", "pooling", "alpha", "normalize", "beta")
OFFICIAL = {"rounding": "official"}
WINDOWED: dict[str, dict[str, object]] = {
    "snapkv": {},
    "adakv": OFFICIAL,
    "pyramid": {"line": "factory"},
    "ada-pyramid": OFFICIAL | {"line": "official"},
}
"""Of each kind of case: how the release computes."""


@pytest.mark.parametrize("name", [n for p in WINDOWED for n in of(p) if "budgets" not in n])
def test_attention_of_the_last_window(name: str, tensors: dict[str, Tensor]) -> None:
    """What stays; and the pooled scores themselves, to 2e-4, where the case has them."""
    params, data = opened(name, tensors)
    kind = CASES[name]["policy"]
    names = {"window": "W", "group": "group_reduce"} | {name: name for name in SAME}
    given = {ours: params[of] for ours, of in names.items() if of in params} | WINDOWED[kind]
    made, scores = build({"pyramid": "pyramidkv"}.get(kind, kind), given), list[Tensor]()
    policy = replace(made, scorer=Spy(made.scorer, lambda view, found: scores.append(found)))
    n, w, layers = params["N"], params["W"], params.get("L", 1)
    heads, group, size, key = params["Hk"], params["G"], params["d"], data["k"].transpose(0, 1)
    query = torch.zeros(n, heads * group, size)
    query[-w:] = data["q_window"].transpose(0, 1)
    kv = one_layer(heads, group, size, policy, None, params["B"], layers)
    kept = feed(kv, query, key)
    assert kept == ragged(data["expected_kept"], data["expected_kept_len"].flatten())
    if kind == "adakv":
        assert [len(rows) for rows in kept] == data["expected_budget"].tolist()
    if kind in ("snapkv", "adakv"):
        if not scores:  # all rows fit, and nothing was scored
            feed(one_layer(heads, group, size, policy, None, n - 1), query, key)
        want = data["expected_score"] / (w if params["window_reduce"] == "sum" else 1)
        torch.testing.assert_close(scores[0][:, : n - w], want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("name", of("streaming"))
def test_streaming(name: str, tensors: dict[str, Tensor]) -> None:
    params, data = opened(name, tensors)
    given = {"sinks": params["start"]}
    both = build("streaming", given), rule("streaming", given)
    kv = one_layer(2, 2, 4, *both, params["start"] + params["recent"])
    want = ragged(data["expected_kept"], data["expected_kept_len"])
    for (kind, count), rows in zip(data["events"].tolist(), want, strict=True):
        if kind != 1:
            kv.begin(count)
        for n in [count] if kind != 1 else [1] * count:
            kv.attend(0, torch.randn(n, 4, 4), torch.randn(n, 2, 4), torch.randn(n, 2, 4))
            kv.end(n)
        if kind == 2 and count > params["recent"]:
            continue  # the release does not trim after a later block; ours always ends at B
        assert kept(kv) == [rows] * 2


@pytest.mark.parametrize("name", like("pyramid_budgets"))
def test_pyramid_budgets(name: str, tensors: dict[str, Tensor]) -> None:
    """What a layer may hold beyond the prompt says nothing: nothing is evicted there."""
    _, data = opened(name, tensors)
    want = data["expected_budget"] if "expected_budget" in data else data["expected_capacity"]
    for layers, tokens, budget, window, beta in data["problem"].tolist():
        given = {"beta": beta, "line": "factory" if name.endswith("factory") else "official"}
        spread = build("pyramidkv", given | {"window": window})
        made = torch.tensor(spread.layer_rows(layers, budget, tokens, 1)).clamp(max=tokens)
        assert made.tolist() == want[:layers].clamp(max=tokens).tolist()
        want = want[layers:]
        exact = build("pyramidkv", {"beta": beta, "window": window})
        line = exact.layer_rows(layers, budget, tokens, 1)
        assert sum(line) == layers * budget
        assert line == sorted(line, reverse=True)
        assert max(line) <= max(tokens, budget)


@pytest.mark.parametrize("name", [*of("nacl"), *like("h2o_prefill"), "l2_one_shot"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_what_a_prompt_keeps(kernels: str, name: str, tensors: dict[str, Tensor]) -> None:
    """By attention summed over queries: NaCl without its draw, and H2O; and by the keys' norm."""
    params, data = opened(name, tensors)
    heads, size, key = params.get("Hk", params.get("H")), params["d"], data["k"].transpose(0, 1)
    query = data["q"].transpose(0, 1) if "q" in data else torch.zeros(params["N"], heads, size)
    if CASES[name]["policy"] == "nacl":
        given = {"proxies": params["proxies"], "sinks": params["sinks"], "random": 0.0}
        query[-params["proxies"] :] = data["q_proxy"].transpose(0, 1)
        policy = build("nacl", given)
    elif name == "l2_one_shot":
        query, policy = torch.randn_like(key), build("l2", {"sinks": 0, "recent": 0})
    else:
        policy = build("h2o", {"window": params["W"]})
    group = params.get("G", 1)
    kv = one_layer(heads, group, size, policy, None, params["B"], kernels=kernels)
    want = ragged(data["expected_kept"], data["expected_kept_len"])
    assert feed(kv, query, key) == want


Named = tuple[str, dict[str, object]]
"""A policy and its options."""


def written(name: str, p: dict[str, Any]) -> tuple[Named | None, Named, int]:
    """The prompt policy, step policy and budget of a case in which an answer is written.

    EasyKV exempts the prompt and counts b over the answer: here the prompt's P rows are sinks, the
    cap is P + b, and `scope` is chosen so that as many rows are saved, int(0.3 b)."""
    kind = name.removeprefix("easykv_decode_")
    if kind != name:
        sinks, cap = p["P"], p["P"] + p["b"]
        saved, recent = int(0.3 * p["b"]) + sinks, p["recent"]
        options: dict[str, tuple[str, dict[str, object]]] = {
            "roco": ("roco", {"recent": 10, "scope": (saved + 0.5) / cap}),
            "h2o": ("h2o", {"recent_share": (recent + 0.5) / cap}),
            "tova_head": ("tova", {"per_head": True, "protect_newest": False}),
            "recency": ("streaming", {}),
        }
        policy, given = options[kind]
        return None, (policy, given | {"sinks": sinks}), cap
    if name.startswith("hashevict"):
        given = {name: p[name] for name in ("bits", "sinks", "recent", "hash_with")}
        return None, ("hashevict", given), p["C"]
    if name == "l2_trace":
        return None, ("l2", {"sinks": p["sinks"], "recent": p["recent"]}), p["C"]
    if name == "h2o_decode_mha":
        share = {"recent_share": p["recent"] / p["B"]}
        return ("h2o", {"window": p["recent"]}), ("h2o", share), p["B"]
    free: dict[str, object] = {"protect_newest": False}
    return ("tova", free), ("tova", free), p["B"]


@pytest.mark.parametrize(
    "name",
    [
        *like("easykv_decode"),
        *("h2o_decode_mha", "tova_one_shot", "tova_trace", "l2_trace"),
        *("hashevict_key_b8", "hashevict_key_b16_filling"),
    ],
)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_an_answer_loses_the_rows_that_the_release_loses(
    kernels: str, name: str, tensors: dict[str, Tensor]
) -> None:
    """After a prompt, token by token. Of H2O the sums, which run on from the prompt's, too."""
    params, data = opened(name, tensors)
    prompt, (policy, given), budget = written(name, params)
    step = rule(policy, given)
    if policy == "hashevict":
        step.matrices[0] = data["R"]  # type: ignore[attr-defined]
    heads, group = params.get("Hk", params.get("H")), params.get("G", 2)
    first = params["P"] if "P" in params else params["N"]
    kv = one_layer(
        heads, group, params["d"], build(*prompt) if prompt else None, step, budget, kernels=kernels
    )
    key = data["k"].transpose(0, 1).contiguous()
    query = torch.randn(len(key), heads * group, params["d"])
    query = data["q"].transpose(0, 1) if "q" in data else query

    def rows(role: str) -> list[list[int]]:
        """Of each head; TOVA's are the same in all."""
        lengths = data.get(f"{role}_len")
        alike = [data[role].tolist()] * heads
        return alike if lengths is None else ragged(data[role], lengths)

    read = feed(kv, query[:first], key[:first])
    if prompt:
        assert read == rows("expected_kept_after_prefill")
    gone = data["victims"]
    follow(kv, query, key, (gone if gone.dim() > 1 else gone[:, None].expand(-1, heads)).tolist())
    assert kept(kv) == rows("expected_final_kept")
    if policy == "roco":
        assert int((gone >= 0).sum()) == 2 * (params["steps"] - params["b"])
    if policy == "h2o" and prompt:
        index, live = kv.arena.index(0)
        sums, pos = kv.arena.columns["sum"][index], kv.arena.columns["pos"][index]
        mine = [sums[h, live[h]][pos[h, live[h]].argsort()] for h in range(heads)]
        want = data["expected_final_acc"].flatten()
        torch.testing.assert_close(torch.cat(mine), want, rtol=2e-4, atol=1e-6)


def test_hashevict_ties(tensors: dict[str, Tensor]) -> None:
    """The release takes the lowest slot, ours the oldest row: of the release's state, always one of
    its candidates, and where there is one candidate, the same."""
    params, data = opened("hashevict_key_b8_ties", tensors)
    given = {name: params[name] for name in ("bits", "sinks", "recent", "hash_with")}
    step = rule("hashevict", given)
    step.matrices[0] = data["R"]  # type: ignore[attr-defined]
    first, heads = params["P"], params["Hk"]
    slots = [[*range(first), *[-1] * (params["C"] - first)] for _ in range(heads)]
    single = 0
    for i, gone in enumerate(data["victims"].tolist()):
        at = first + i
        for h, victim in enumerate(gone):
            if victim >= 0:
                pos = torch.tensor([slots[h]])
                code = step.of_key(0, data["k"][None, None, h, slots[h]])["code"][0, 0]
                key = data["k"][h, at][None, None]
                view = asked(step, at, pos, {"code": code[None]}, key=key)
                mine = int(victims(step, view))
                far = data["expected_distance"][i, h]
                free = (pos[0] >= params["sinks"]) & (pos[0] < at - params["recent"])
                assert bool(free[mine])
                assert int(far[mine]) == int(far[free].max())
                if int(data["n_tied"][i, h]) == 1:
                    single += 1
                    assert slots[h][mine] == victim
            slots[h][int(data["victim_slots"][i, h])] = at
    assert single > 10


def kvpress(name: str) -> tuple[str, dict[str, object]]:
    """The policy and its options that a case of that library stands for."""
    params = CASES[name]["params"]
    kind = CASES[name]["policy"]
    window = {"window": params.get("window", 0), "kernel": params.get("kernel", 1)}
    snap: dict[str, object] = window | {"pooling": "avg"}
    observed: dict[str, object] = {"average": True, "recent_share": 0.0}
    free: dict[str, object] = {"sinks": 0, "recent": 0}
    if kind.startswith("expected"):
        theirs = {"sinks": "n_sink", "future": "n_future_positions"}
        theirs |= {"covariance": "use_covariance", "value_norm": "use_vnorm"}
        return "expected", {"recent": 0} | {name: params[of] for name, of in theirs.items()}
    if kind.startswith("adakv_floor"):
        floor = {"alloc": "floor", "alpha": params["alpha"]}
        if "snapkv" in kind:
            return "adakv", snap | floor
        return "h2o+ada", observed | floor
    return {
        "snapkv": ("snapkv", snap),
        "tova": ("tova", {}),
        "h2o": ("h2o", observed),
        "l2": ("l2", free),
        "streaming": ("streaming", {"sinks": params.get("n_sink")}),
        "keydiff": ("keydiff", free),
        "critical_snapkv": ("snapkv+critical", snap),
        "critical_observed": ("h2o+critical", observed),
    }[kind]  # type: ignore[return-value]


@pytest.mark.parametrize("name", like("kvpress_r"))
def test_kvpress(name: str, tensors: dict[str, Tensor]) -> None:
    params, data = opened(name, tensors)
    heads, group, size = params["Hk"], params["G"], params["d"]
    policy, given = kvpress(name)
    key = data["k"].transpose(0, 1)
    query = data["q"].transpose(0, 1) if "q" in data else torch.randn(len(key), heads * group, size)
    value = data["v"].transpose(0, 1) if "v" in data else None
    rope = RopeConfig(theta=10_000.0)
    if "q_prerope" in data:
        query = rotate(
            data["q_prerope"].transpose(0, 1), *Rotary(rope, size).table(0, len(key), key.dtype)
        )
    shape = Shape(1, heads, heads * group, size, (None,), 1 << 20)
    kv = KVCache(
        shape,
        Rules(policies.prompt_policy(policy, given), None, Budget.parse(params["n_kept"])),
        output=lambda layer: data["w_o"].view(heads, group, size, -1),
        rotary=Rotation((rope,), size),
    )
    want = ragged(data["expected_kept"], data["expected_kept_len"])
    assert feed(kv, query, key, value) == want


def test_kvpress_pyramid_budgets(tensors: dict[str, Tensor]) -> None:
    _, data = opened("kvpress_pyramid_budgets", tensors)
    want = data["expected_budget"]
    from minikv.policies.pyramidkv import _kvpress

    for tokens, ratio, window, layers, beta in data["problem"].tolist():
        size = tokens * (1 - ratio)
        made = _kvpress(int(layers), size, int(tokens), int(beta), int(window))
        assert made == want[: int(layers)].tolist()
        want = want[int(layers) :]


class Marks(Scorer):
    """Attention as it is."""

    evidence = Evidence(observe=1)

    def score(self, view: PromptView) -> Tensor:
        assert view.mass is not None
        return view.mass[:, 0]


@pytest.mark.parametrize("name", like("kvcrush_block"))
def test_kvcrush_selects_what_the_release_does(
    name: str, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`select` itself: a block of the release is a row here, and its bits, one per token of a
    block, are those of as many KV heads.

    The release marks the better half of all tokens, ours of each head's rows. So a head with few
    marks lacks rows without one, and a head with many has rows that no block stands for, or, where
    the anchor is the majority, has bits and anchor turned round. A head that has all blocks is
    asked; what the base policy keeps there is every block that is no candidate.
    """
    params, data = opened(name, tensors)
    blocks, size = params["blocks"], params["block_size"]
    marks = data["expected_bits"].bool().T.clone()  # [block_size, blocks]
    kind = {"alternating": "alternate"}.get(params["anchor"], params["anchor"])
    if kind == "mean":
        marks[2 * marks.sum(1) > blocks] ^= True
    if kind == "random":  # another generator
        monkeypatch.setattr(kvcrush, "anchor", lambda *rest: data["anchor"].bool())
    ones = marks.sum(1)
    extra = max(0, 2 * int(ones.max()) - blocks)
    mass = torch.cat((marks.float(), torch.zeros(size, extra)), 1)
    free = torch.zeros(size, blocks + extra, dtype=torch.bool)
    for h in range(size):
        least = max(blocks, 2 * int(ones[h])) if 2 * ones[h] >= blocks else 2 * int(ones[h])
        order = mass[h].argsort(descending=True, stable=True)
        free[h, order[:least]] = True
    asked = int((2 * ones >= blocks).nonzero()[0])
    assert bool(free[asked, :blocks].all())
    scores = torch.ones_like(mass)
    scores[asked, data["candidates"].long()] = 0.0
    pos = torch.arange(blocks + extra).expand(size, -1)
    view = PromptView(0, blocks + extra, pos, 1, mass[:, None], mass, lambda: mass, lambda: mass)
    count = int(free[asked].sum()) - params["candidates"] + params["budget_blocks"]
    selector = kvcrush.KVCrush(
        ratio=params["budget_blocks"] / count, seed=0, bits="query", anchor=kind, ranks="step"
    )
    counts = torch.tensor([count if h == asked else 0 for h in range(size)])
    chosen = selector.select(Candidates(view, Marks(), scores, free), counts, count)
    found = chosen[asked] & (scores[asked] == 0.0)
    assert found.nonzero().flatten().tolist() == sorted(data["expected_retained"].tolist())
    assert int(chosen.sum()) == count


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_expected_attention_is_a_share_of_the_rows_that_compete(epsilon: float) -> None:
    """The mean over a group's query heads sums to 1 over the rows behind the sinks; `epsilon` is
    added to it, and the length of the value multiplies both."""
    found: list[tuple[Tensor, Tensor]] = []
    for long in (False, True):
        made = build("expected", {"value_norm": long, "epsilon": epsilon})
        spy = Spy(made.scorer, lambda view, scores: found.append((scores, view.value())))
        net = network(layers=1)
        rules = Rules(replace(made, scorer=spy), None, Budget.parse(20))
        Engine(net, over(net, rules)).prompt(ids(60))
    (share, value), (scores, _) = found
    torch.testing.assert_close(share.sum(1), torch.ones(3))
    assert bool((share[:, :4] == 0).all())
    torch.testing.assert_close(scores, (share + epsilon) * value.norm(dim=-1))

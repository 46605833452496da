"""No part of any policy reads a value back from the device, or sends it one, within a layer.

The device is torch's `meta`, which has no memory: a question for a value fails there by itself.
What only makes the host wait on a GPU is refused by name. The walk is made from the registry, so
that a new policy or option is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from layouts import Silent, empty, uneven
from small import FAMILIES, PAIRS, by_day, config, ids, network, scheduler
from tape import NoWaiting
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from twins import on_cuda

from minikv import policies
from minikv.cache.arena import Arena
from minikv.cache.block_prefill import BlockPrefill
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.plan import Plan, RowsBefore, Setup
from minikv.cache.prefill import Prefill
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.engine.engine import Engine
from minikv.models.llama import Llama
from minikv.models.rope import RopeConfig, Rotation
from minikv.policies import Option, Value, registry
from minikv.policies.options import options_of
from minikv.policies.parts import policy_columns

FAR = torch.device("meta")
ROWS = Budget.parse(120)
LAYERS, HEADS, GROUP, SIZE, HIDDEN = 1, 3, 2, 8, 16


class _Operations(NoWaiting):
    """Refuses what needs a value of the device, and copies that the host waits for."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.device == FAR for t in given):
            self.check(func, args)
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if any(t.device == FAR for t in (*given, *made)):
            name, near = func.overloadpacket.__name__, [t for t in given if t.device != FAR]
            sent = [t for t in near if t.dim()]  # a number alone travels with the call
            if name in ("_to_copy", "copy_"):
                sent = [] if (kwargs or {}).get("non_blocking") else near
            assert not sent, f"{name} sends values to the device"
        return out


class _Made(TorchFunctionMode):
    """A tensor that is made of numbers is copied to its device, which no operation shows."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            assert out.device != FAR, "numbers of the host are made a tensor of the device"
        return out


def without_waiting() -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(_Made())
    stack.enter_context(_Operations())
    return stack


def far(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=FAR)


MASK = far(3, 4, dtype=torch.bool)
ROTATION = Rotation((RopeConfig(query_beta=0.1, original=20),) * LAYERS, SIZE, FAR)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: int(x.sum()),
        lambda x: x.tolist(),
        lambda x: x[0].cpu(),
        lambda x: x[MASK],
        lambda x: MASK.nonzero(),
        lambda x: bool(MASK.any()),
        lambda x: torch.unique(x),
        lambda x: x.masked_fill_(MASK, 1.0) if MASK.any() else x,
        lambda x: x.__setitem__(MASK, 1.0),
        lambda x: torch.bincount(x[0].long()),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: torch.as_tensor(3, device=x.device),
        lambda x: torch.zeros(4).to(x.device),
        lambda x: x[0].copy_(torch.zeros(4)),
        lambda x: x[:, torch.tensor([0, 1])],
        lambda x: torch.tensor(3).to(x.device),
    ],
)
def test_what_would_wait_is_refused(ask: Callable[[Tensor], object]) -> None:
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), without_waiting():
        ask(far(3, 4))


def test_what_does_not_wait_is_let_through() -> None:
    with without_waiting():
        x = far(3, 4)
        x[:, 1:] = torch.where(MASK, x, 0.0)[:, 1:].masked_fill(MASK[:, 1:], 2.0)
        x = x.gather(1, torch.zeros_like(x, dtype=torch.int64)) + torch.tensor(2.0)
        torch.zeros(4).to(FAR, non_blocking=True)
        assert torch.tensor([1, 2]).tolist() == [1, 2]


# -- every policy and option ----------------------------------------------------------------------


def others(option: Option) -> list[Value]:
    """Values of an option that may take another way through the code than its default."""
    if option.choices:
        return [c for c in option.choices if c != option.default]
    if isinstance(option.default, bool):
        return [not option.default]
    if isinstance(option.default, int):
        return [option.low] if option.low not in (None, option.default) else []
    return [0.123456789 + (option.low or 0)]  # more digits than are counted


def case(name: str, options: Mapping[str, object], *, night: bool = False) -> Any:
    """A policy and options of it, with a name for the test's report."""
    label = "-".join((name, *(f"{k}={v}" for k, v in options.items())))
    return pytest.param(name, options, id=label, marks=[pytest.mark.soak] * night)


def number(option: Option) -> bool:
    """By day a number has its default: hardly one chooses another way through the code."""
    return not option.choices and not isinstance(option.default, bool)


def walk(names: Sequence[str]) -> list[Any]:
    """Policies as they are by default; and each option of a part, the first time that the part
    comes, at each other value."""
    found, seen = [], set()
    for name in names:
        found.append(case(name, {}))
        new = [part for part in policies.find(name).parts if part not in seen]
        seen.update(new)
        for option in (option for part in new for option in options_of(part)):
            night = number(option)
            found += [case(name, {option.name: value}, night=night) for value in others(option)]
    return found


# After the methods, what they do not bring together.
MIXED = ["snapkv+critical", "l2+critical+turns", "nacl+critical", "l2+nacl", "h2o+ada+kvcrush"]
MIXED += ["l2+ada+kvcrush+critical", "tova+pyramid+nacl", "snapkv+global", "snapkv+uniform"]
PROMPTS = walk([*policies.prompt_names(), *MIXED])
STEPS = [
    case(name, given | ({"window": 1} if "buffer" in given and name in ("rkv", "vase") else {}))
    for name in policies.step_names()
    for given, night in (
        ({}, False),
        *(({o.name: v}, number(o)) for o in registry.method(name).step_options for v in others(o)),
    )
]


def test_the_walk_takes_every_part() -> None:
    walked = {part for p in PROMPTS for part in policies.find(p.values[0]).parts}
    assert walked == {*registry.parts()}


def read(
    prompt: str, options: Mapping[str, object], step: str, own: Mapping[str, object], before: bool
) -> None:
    """A layer of a prompt; `before`: into a cache of uneven heads with free slots."""
    rules = Rules(policies.prompt_policy(prompt, options), policies.step_policy(step, own), ROWS)
    turns = [(0, 30), (30, 90)] if before else [(0, 60)]
    totals = None if rules.prompt is None else [120] * LAYERS
    pool = 120 if rules.shares_layers else None
    given = {"turns": turns, "totals": totals, "needed": [400] * LAYERS, "pool": pool}
    layer(Prefill, rules, None, before, (60,), given)


def layer(
    kind: type[Prefill] | type[BlockPrefill],
    rules: Rules,
    window: int | None,
    before: bool,
    chunks: tuple[int, ...],
    planned: dict[str, Any],
) -> None:
    """A layer of a prompt of 60 tokens, which come in chunks."""
    columns = policy_columns(rules.prompt, rules.step)
    arena = Arena(LAYERS, HEADS, SIZE, torch.float32, FAR, columns, rows=[400] * LAYERS)
    shape = Shape(LAYERS, HEADS, HEADS * GROUP, SIZE, (window,) * LAYERS, 4096)
    dtypes, output = (torch.float32,) * 2, lambda layer: far(HEADS, GROUP, SIZE, HIDDEN)
    setup = Setup(shape, rules, *dtypes, Silent(), output, ROTATION)
    held = RowsBefore(uneven(LAYERS, HEADS) if before else empty(LAYERS, HEADS), [])
    usual = {"position": 30 * before, "tokens": 60, "before": held, "spare": 1}
    plan = Plan(**usual, visible=[160] * LAYERS, **planned)
    one = kind(setup, plan, arena, arena.fresh(plan.needed, columns))
    with without_waiting():
        for size in chunks:
            one.stage(0, *(far(size, n, SIZE) for n in (HEADS * GROUP, HEADS, HEADS)))
        one.finish(0)


@pytest.mark.parametrize(("name", "options"), PROMPTS)
def test_the_end_of_a_prompt(name: str, options: dict[str, object]) -> None:
    read(name, options, "none", {}, True)


@pytest.mark.parametrize(("name", "options"), [case(n, {}) for n in policies.prompt_names()])
def test_the_end_of_a_first_prompt(name: str, options: dict[str, object]) -> None:
    read(name, options, "none", {}, False)


@pytest.mark.parametrize(("name", "options"), STEPS)
def test_the_columns_of_a_step_policy(name: str, options: dict[str, object]) -> None:
    read("snapkv", {"window": 4}, name, options, True)
    read("full", {}, name, options, False)


BLOCKS = [case(*p.values, night=p.values[1] != {}) for p in STEPS if p.values[0] != "none"]


@pytest.mark.parametrize(("name", "options"), BLOCKS)
def test_blocks(name: str, options: dict[str, object]) -> None:
    """A prompt in blocks: behind others; with the defaults also into an empty cache, with a
    window."""
    rules = Rules(None, policies.step_policy(name, options), ROWS, 16)
    for window, before in [(None, True), (30, False)][: 2 - bool(options)]:
        given = {"rows": 40, "floor": 40, "needed": [HEADS * 41] * LAYERS}
        layer(BlockPrefill, rules, window, before, (32, 28), given)


# -- on a GPU ---------------------------------------------------------------------------------


class _Nothing:
    """`Attend` of a step that a graph captures, without rows."""

    position = far(dtype=torch.int64)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)

    def advance(self, tokens: int) -> None:
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family(family: str) -> None:
    """What depends on the position is made of the one on the device."""
    net, token = Llama(config(**FAMILIES[family]), device=FAR), far(1, dtype=torch.int64)
    with without_waiting():
        assert net.forward(token, _Nothing()).device == FAR


def strictly(method: Callable[..., object]) -> Callable[..., object]:
    """A method during which whatever makes the host wait is an error."""

    def run(*args: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("prompt", "step"), by_day(PAIRS))
def test_three_prompts_on_a_gpu(prompt: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts into an empty cache, behind an answer, and behind another."""
    net = on_cuda(network(layers=2, head_dim=16))
    like = scheduler(net, prompt, step, None if prompt == "full" and step == "none" else 72)
    kv = KVCache(like.shape, like.rules, device="cuda", output=like.output, rotary=net.rotation)
    made = Engine(net, kv, None)
    for method in ("stage", "finish"):
        monkeypatch.setattr(Prefill, method, strictly(getattr(Prefill, method)))
    for turn in range(3):
        made.prompt(ids(70, turn))
        for token in ids(5, 9 + turn):
            made.step(token)
    assert kv.position == 3 * 75

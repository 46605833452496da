"""A small random network and its caches, for tests of the core."""

from __future__ import annotations

import torch

from minikv import policies
from minikv.attend import DenseAttend
from minikv.budget import Budget
from minikv.engine import Engine
from minikv.models.config import ModelConfig
from minikv.models.llama import Llama
from minikv.models.rope import RopeConfig
from minikv.scheduler import Scheduler
from minikv.stats import Shape

VOCAB = 97
# Every prompt policy alone and with its own step policy; every step policy alone and with adakv.
PAIRS = list(dict.fromkeys([
    *((p, s) for p in policies.prompt_names() for s in ("none", policies.default_step(p))),
    *((p, s) for p in ("full", "adakv") for s in policies.step_names()),
    ("h2o+ada+pyramid", "h2o"), ("kvcrush(h2o)", "roco"), ("l2+nacl+pyramid", "tova"),
    ("snapkv+critical+turns", "scissorhands"),
]))  # fmt: skip


def network(
    *,
    layers: int = 3,
    heads: int = 6,
    kv_heads: int = 3,
    head_dim: int = 8,
    windows: tuple[int | None, ...] | None = None,
    rows: int = 16,
    max_context: int = 4096,
    seed: int = 0,
) -> Llama:
    """Random weights large enough that attention is far from uniform."""
    config = ModelConfig(
        family="llama", layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        hidden=48, mlp=64, vocab=VOCAB, norm_eps=1e-5, rope=RopeConfig(theta=1e4),
        max_context=max_context, windows=windows or (None,) * layers,
    )  # fmt: skip
    return Llama(config, rows=rows).randomise(seed, std=0.3)


def shape(net: Llama) -> Shape:
    c = net.config
    return Shape(c.layers, c.kv_heads, c.heads, c.head_dim, c.windows, c.max_context)


def scheduler(
    net: Llama,
    prompt: str = "full",
    step: str = "none",
    budget: int | str | None = 64,
    *,
    poison: bool = True,
    prompt_options: dict[str, object] | None = None,
    step_options: dict[str, object] | None = None,
) -> Scheduler:
    """A scheduler whose arena is born full of NaN."""
    c = net.config
    return Scheduler(
        shape(net),
        policies.prompt_policy(prompt, prompt_options),
        policies.step_policy(step, step_options),
        Budget.parse(budget) if budget is not None else None,
        dtype=net.dtype,
        output=lambda layer: net.layers[layer].out.T.unflatten(0, (c.kv_heads, -1, c.head_dim)),
        rotary=net.rotary.inverse,
        poison=poison,
    )


def engine(net: Llama, *args: object, **kwargs: object) -> Engine:
    return Engine(net, scheduler(net, *args, **kwargs))  # type: ignore[arg-type]


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


class Dense:
    """An engine over `DenseAttend`: the oracle."""

    def __init__(self, net: Llama) -> None:
        self.net, self.kv = net, DenseAttend(net.config.windows)

    def prompt(self, tokens: list[int]) -> torch.Tensor:
        self.kv.begin(len(tokens))
        return self.net.forward(torch.tensor(tokens), self.kv)

    def step(self, token: int) -> torch.Tensor:
        return self.net.forward(torch.tensor([token]), self.kv)

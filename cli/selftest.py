"""The self-test of `minikv doctor`: every pair of policies on a tiny network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.wording import worded
from minikv.policies import prompt_names, step_names

if TYPE_CHECKING:
    from minikv.cache.kv_cache import KVCache
    from minikv.models.llama import Llama

_STRIDE = 8


def run(progress: Callable[[str], None]) -> tuple[int, list[str]]:
    """Test every pair, and every decode policy also with a stride. Returns how many were tested,
    and a line for each that failed."""
    cases = [(prompt, step, 0) for prompt in prompt_names() for step in step_names()]
    cases += [(step, "auto", _STRIDE) for step in step_names() if step != "none"]
    bad: list[str] = []
    with one_thread():
        net = tiny()
        for i, (policy, decode, stride) in enumerate(cases):
            progress(f"testing policies  {i}/{len(cases)}")
            wrong = attempt(net, policy, decode, stride)
            if wrong:
                label = f"--stride {stride}" if stride else f"then {decode}"
                bad.append(f"{policy}, {label}: {wrong}")
    return len(cases), bad


def tiny() -> Llama:
    """A random network of two layers, with weights large enough that attention is not uniform."""
    from minikv.models.config import ModelConfig
    from minikv.models.llama import Llama
    from minikv.models.rope import RopeConfig

    config = ModelConfig(
        family="llama",
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=32,
        mlp=48,
        vocab=64,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        max_context=4096,
        windows=(None, None),
    )
    return Llama(config, rows=64).randomise(0, std=0.3)


def attempt(net: Llama, policy: str, decode: str, stride: int) -> str:
    """Two turns of reading and writing. Returns what went wrong, or ""."""
    try:
        return _attempt(net, policy, decode, stride)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(worded(str(error)).split())}"


def _attempt(net: Llama, policy: str, decode: str, stride: int) -> str:
    import torch

    from minikv.cache.attend import DenseAttend
    from minikv.cache.kv_cache import KVCache
    from minikv.engine.engine import Engine
    from minikv.engine.sampling import Sampling
    from minikv.loader import output_of, shape_of

    c = net.config
    rows = EvictionConfig.read(policy, decode, stride=stride).least_rows() + stride + 8
    rules = EvictionConfig.read(policy, decode, rows, stride=stride).rules()
    step = rules.step
    kv = KVCache(shape_of(c), rules, rotary=net.rotation, output=output_of(net))
    engine = Engine(net, kv)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(c.vocab, (rows + 64,), generator=generator).tolist()
    for turn, (count, steps) in enumerate(((rows + 24, 4), (12, 3))):
        logits = engine.prompt(ids[:count], room=steps)
        if turn == 0 and not stride:
            dense = DenseAttend(c.windows)
            dense.begin(count)
            exact = net.forward(torch.tensor(ids[:count]), dense)
            if not torch.allclose(logits, exact, rtol=1e-3, atol=1e-3):
                return "the prompt was not read exactly"
        if not bool(torch.isfinite(logits).all()):
            return "logits are not finite"
        most = kv.position if rules.prompt is None and not stride else 0
        token = int(logits.argmax())
        for fed in range(steps + 1):
            # A step policy that evicts several rows at once lets heads grow until then.
            grown = fed if step is None else min(fed, step.block - 1)
            wrong = _held(kv, (max(most, rows) if rules.budget else most) + grown)
            if wrong:
                return f"{wrong} (turn {turn + 1}, {fed} tokens written)"
            if fed < steps:
                token = engine.next(token, c.vocab, Sampling(), 0, ahead=False)
    return ""


def _held(kv: KVCache, bound: int) -> str:
    """What is wrong with the tokens held: at most `bound` per head on average."""
    heads = [(layer, head) for layer in range(kv.shape.layers) for head in range(kv.shape.kv_heads)]
    kept = [kv.kept(*place).tolist() for place in heads]
    policy, total, most = kv.rules.prompt, sum(map(len, kept)), bound * len(heads)
    for held in kept:
        if len(set(held)) != len(held) or not all(0 <= p < kv.position for p in held):
            return "positions are not unique"
        if (policy is None or policy.evidence.window) and kv.position - 1 not in held:
            return "the newest token is gone"
    return f"{total} tokens held, over the budget of {most}" if total > most else ""


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread: with matrices this small, more threads are slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

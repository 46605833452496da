"""Compiles the kernels of steps and prompts while the model is loaded, not during a turn."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch

from minikv.cache.arena import Arena
from minikv.cache.budget import Budget
from minikv.cache.decode_step import DecodeStep
from minikv.cache.kv_cache import KVCache
from minikv.engine.capture import Eager
from minikv.engine.decode_loop import DecodeLoop, Network
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.errors import NumericsError, UsageError
from minikv.kernels import Part, Queries, Segments
from minikv.kernels.attention import cudnn
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import ALL, Evidence
from minikv.policies.parts import smallest_budget

_ROWS = 4  # per head; compiled kernels do not depend on the number of rows
_LATER = (72, 24, 8, 3, 1)
"""Tokens of later prompts: one for each size of query tiles, and a prompt of one token, whose
matrix products may differ from those of a step."""
_LINES = (16, 32, 64, 128)  # queries times G: one for each size of query tiles
_OBSERVED = (1, 32, 64)  # last queries of a prompt: one for each tile of 16, 32 and 64
_FAR = 1 << 16  # rows of a head that are divided among several programs
_MANY = 1 << 14  # rows of a head that several programs search
_IDS = 16  # token ids below it are in every vocabulary


def warm(kv: KVCache, network: Network) -> None:
    """Compile all kernels by running steps and prompts on tiny caches with the same network, policy
    and kernels.

    It runs two steps of each kind, so that heads also evict a row, and a prompt that evicts
    followed by shorter ones, because tile sizes depend on the number of queries. `kv` itself is not
    touched, except that it is switched to the torch kernels if the kernels cannot be compiled
    (Triton needs a C compiler); `kv.notice` then says why.
    """
    try:
        _steps(kv)
        _talk(kv, network)
        slides = any(window is not None for window in kv.shape.windows)
        if kv.rules.evicts or slides:
            _tiles(kv)  # otherwise heads are even, and their rows are a plain block
        if kv.rules.prompt is not None:
            _choices(kv)
        whole = any(window is None for window in kv.shape.windows)
        if whole and not kv.rules.stride and kv.ops.prompt_rows is not None:
            heads = kv.shape.kv_heads, kv.shape.heads // kv.shape.kv_heads
            like = torch.empty((*heads, 0, kv.shape.head_dim), dtype=kv.dtype, device=kv.device)
            cudnn.make_plans(like)
    except torch.OutOfMemoryError:
        raise
    except NumericsError:  # the first turn reports it
        pass
    except Exception as error:  # a compiler may raise anything
        why = next(iter(str(error).splitlines()), "")[:200]
        kv.use(Kernels())
        kv.notice = f"the Triton kernels are not used: {type(error).__name__}: {why}"


def _steps(kv: KVCache) -> None:
    shape, step = kv.shape, kv.rules.step
    arena = Arena(
        shape.layers,
        shape.kv_heads,
        shape.head_dim,
        kv.dtype,
        kv.device,
        step.columns if step else {},
        kv=kv.kv,
        rows=[_ROWS * shape.kv_heads] * shape.layers,
    )
    arena.lay(torch.full_like(arena.capacity, _ROWS))
    arena.cap.fill_(1)
    decode = DecodeStep(shape, kv.device, kv.ops, kv.rotary)
    with torch.inference_mode():
        decode.open(arena, step, 0, captured=True)
        rows = shape.heads + 2 * shape.kv_heads
        qkv = torch.zeros((rows, shape.head_dim), dtype=kv.dtype, device=kv.device)
        still = torch.zeros((1, 1, shape.head_dim), dtype=kv.dtype, device=kv.device)
        for _ in range(2):
            for layer in range(shape.layers):
                decode.attend_unrotated(layer, qkv, still, still)
            decode.end()


def _talk(kv: KVCache, network: Network) -> None:
    """Run a short conversation: a prompt that evicts, some steps, and later prompts."""
    rows = smallest_budget(kv.rules.prompt, kv.rules.step) + kv.rules.stride
    small, tokens = None, 0
    while small is None:  # a policy with uneven budgets needs more rows
        tokens = 3 * rows + sum(_LATER)
        if tokens + sum(_LATER) + 3 > kv.shape.max_context:
            return
        try:
            small = _like(kv, rows)
            small.begin(tokens)
        except UsageError:
            small, rows = None, 2 * rows
    small.reset()
    engine = Engine(network, small, None)
    found = engine.prompt(_ids(tokens))
    loop = DecodeLoop(network, small, Eager(), [])
    for token, sampling in enumerate((Sampling(), Sampling(), Sampling(1.0))):
        loop.feed(token, len(found), sampling, 0, ahead=False)
    small.settle()
    for tokens in _LATER:
        engine.prompt(_ids(tokens))


def _tiles(kv: KVCache) -> None:
    """Run the kernels that attend to earlier rows and that sum attention to them: with every tile
    size, with few and many rows, and with rows as a view and as indices. Each head has one row."""
    shape, device = kv.shape, kv.device
    heads, group = shape.kv_heads, shape.heads // shape.kv_heads
    rows = torch.zeros((heads, shape.head_dim), dtype=kv.dtype, device=device)
    start = torch.arange(heads, device=device)
    length, slot, index = torch.ones_like(start), torch.full_like(start, -1), start[:, None]
    pos = torch.zeros(heads, dtype=torch.int32, device=device)
    seen = torch.zeros_like(index)
    evidence = kv.rules.prompt.evidence if kv.rules.prompt is not None else Evidence()
    each = evidence.each_query or (kv.rules.step is not None and kv.rules.step.prompt_history > 0)
    with torch.inference_mode():
        mixed = rows.view(heads, 1, 1, -1), torch.zeros((heads, 1, 1), device=device)
        for parts in (2, 4):  # more than two parts are merged in float32
            kv.ops.merge([mixed] * parts)
        sources: tuple[Part, ...] = (rows[:, None], seen), (rows, seen, index)
        for window in dict.fromkeys(shape.windows):
            for lines in _LINES:
                count = max(1, lines // group)
                q = rows.new_zeros((heads, group, count, shape.head_dim))
                at = torch.ones(count, dtype=torch.int64, device=device)
                for most in (1, _FAR):
                    earlier = Segments(rows, rows, start, length, most, pos)
                    kv.ops.ragged_prefill(q, earlier, slot, at, window)
                lse = torch.zeros((heads, group, count), device=device)
                for source in sources:
                    if each:
                        kv.ops.each_attention(
                            Queries(q, at, window, lse), (source,), slice(0, heads)
                        )
            mass, squares = (torch.zeros((heads, *n, 1), device=device) for n in ((group,), ()))
            for count in _observed(kv):
                q = rows.new_zeros((count, heads, group, shape.head_dim)).permute(1, 2, 0, 3)
                at = torch.ones(count, dtype=torch.int64, device=device)
                lse = torch.zeros((heads, group, count), device=device)
                for source in sources:
                    queries = Queries(q, at, window, lse)
                    kv.ops.add_attention_mass(mass, squares, queries, source)
                    if evidence.lengths:
                        kv.ops.peak_attention(queries, (source,), 0, at.float())


def _choices(kv: KVCache) -> None:
    """Run the kernels that choose among many rows of a head. `_talk` runs those for few."""
    heads, device = kv.shape.kv_heads, kv.device
    with torch.inference_mode():
        pos = torch.arange(_MANY, device=device).expand(heads, _MANY)
        key = kv.ops.order_key(pos.to(torch.float32), pos, pos >= 0)
        counts = torch.ones(heads, dtype=torch.int64, device=device)
        kv.ops.wanted(key, counts.sum(), heads)
        for also in (None, pos >= 0):
            kv.ops.best(key, counts, 1, also)


def _observed(kv: KVCache) -> list[int]:
    """Numbers of last queries to observe, one for each tile size that can occur: policies observe
    fewer queries of a short prompt."""
    evidence = kv.rules.prompt.evidence.observe if kv.rules.prompt is not None else 0
    most = max(evidence, kv.rules.step.observe if kv.rules.step is not None else 0)
    return [count for count in _OBSERVED if count // 2 < most] if evidence != ALL else []


def _ids(count: int) -> list[int]:
    return [i % _IDS for i in range(count)]


def _like(kv: KVCache, rows: int) -> KVCache:
    """An empty cache like `kv`, with a budget of `rows`."""
    small = KVCache(
        kv.shape,
        replace(kv.rules, budget=Budget("rows", Fraction(rows)) if kv.rules.evicts else None),
        dtype=kv.dtype,
        device=kv.device,
        kv=kv.kv,
        output=kv.output,
        rotary=kv.rotary,
        kernels="torch",
    )
    small.use(kv.ops)
    return small

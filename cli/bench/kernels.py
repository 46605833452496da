"""The time of each kernel, and the least time for the bytes it must move or the flops it must do.

There is one table of cases. The kernels are those that the cache would call: Triton's on a GPU,
those in C on a CPU, or the torch functions with `--kernels torch`. On a GPU, calls are captured in
a graph and rotate over inputs that its cache cannot hold, so that neither launches nor cached data
are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minikv.cli.bench import machine, shapes
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.floors import Rates
from minikv.cli.bench.machine import normal
from minikv.cli.bench.results import Results, Timing
from minikv.cli.bench.shapes import Sizes
from minikv.engine.decode_loop import captured
from minikv.errors import UsageError
from minikv.kernels import NewRow, Rows, dispatch
from minikv.kernels.product.matrix import Matrix
from minikv.policies.hashevict import HashEvict

Call = Callable[[Any], object]
"""A function of a table of kernels: it calls one operation, on inputs that it holds."""

_CPU_CACHE = 64 << 20  # bytes; no processor's cache is larger
_SETS = 64  # of inputs, at most
_CALLS, _SECONDS = 16, 0.02  # in one measurement, at least: calls on a GPU, time on a CPU


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one size of inputs.

    make(device, seed): a call with fresh inputs. nbytes: read and written at the least; flops: of
    its products, 0 where the floor is that of the bytes. needs: the operation, if it is one of the
    table, and the policy behind it, if it is one of a policy.
    """

    name: str
    case: str
    make: Callable[[torch.device, int], Call]
    nbytes: int
    flops: int = 0
    needs: str = ""

    def run(self, operations: Any, call: Call) -> object:
        """Run the operation on the inputs of `make`."""
        return call(operations)

    def is_missing(self, operations: Any) -> bool:
        """Whether these kernels do not have the operation."""
        name, _, policy = self.needs.partition(" ")
        if not name:
            return False
        found = getattr(operations, name)
        return found is None or (policy != "" and policy not in found)


def measure(arguments: Arguments, device: torch.device, rates: Rates, results: Results) -> None:
    """Every case of the shape and the lengths, which are tokens per head here."""
    sizes = shapes.find(arguments.shape)
    operations = find(device, arguments.kernels, sizes.head_dim)
    results.facts["shape"] = arguments.name
    table = list(cases(sizes, torch.bfloat16, arguments.lengths()))
    timings: list[Timing] = []
    try:
        for number, case in enumerate(table):
            what = f"{case.name}, {case.case}"
            results.progress(f"kernels: {what}", number, len(table))
            if case.is_missing(operations):
                results.note(f"{case.name}: {operations.name} has no {case.needs}")
                continue
            try:
                timings.append(timed(case, operations, device, rates, arguments.repeat))
            except Exception as error:  # one that does not compile says nothing about the others
                results.fail(what, error)
    finally:
        results.add(kernels=timings)


def find(device: torch.device, wanted: str, head_dim: int) -> dispatch.Kernels:
    """The kernels that run for bfloat16 heads of this size. `wanted`: the value of --kernels.
    Raises UsageError where other kernels than torch's are meant and cannot run."""
    found, reason = dispatch.choose(device, wanted, head_dim, torch.bfloat16)
    if wanted != "torch" and found.name == "torch":
        raise UsageError(
            reason or "the Triton kernels need a CUDA device, and torch sees none",
            "--kernels torch measures the torch functions",
        )
    return found


def timed(
    case: Case, operations: dispatch.Kernels, device: torch.device, rates: Rates, rounds: int
) -> Timing:
    """Seconds of a call in every round."""
    gpu = device.type == "cuda"
    cache = 2 * machine.l2_bytes(device) if gpu else _CPU_CACHE
    sets = [case.make(device, seed) for seed in range(min(_SETS, 1 + cache // max(case.nbytes, 1)))]

    def calls(count: int) -> Callable[[], None]:
        def run() -> None:
            for i in range(count):
                sets[i % len(sets)](operations)

        return run

    clock, replay = machine.Clock(device), None
    with torch.inference_mode():
        calls(len(sets))()  # compiles, and touches every page
        if gpu:
            count = -(-max(_CALLS, len(sets)) // len(sets)) * len(sets)
            replay = _captured(calls(count), device)
        else:
            count = max(1, min(1000, round(_SECONDS / max(clock(calls(1)), 1e-7))))
        times = clock.each(replay or calls(count), rounds)
    moved, done = case.nbytes / rates.stream, case.flops / rates.product("bfloat16")
    return Timing(
        case.name,
        case.case,
        operations.name,
        [seconds / count for seconds in times],
        case.nbytes,
        case.flops,
        max(moved, done),
        replay is not None,
    )


def _captured(run: Callable[[], None], device: torch.device) -> Callable[[], None] | None:
    """A graph of the calls; None if one of them waits for the device."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.device(device):
            return captured(run, stream)
    except RuntimeError:
        torch.cuda.synchronize(device)
        return None


# -- the table ------------------------------------------------------------------------------

_COLUMNS = {"h2o": 1, "roco": 3}
"""Numbers of float32 that a step policy reads and writes for every token."""


def cases(sizes: Sizes, dtype: torch.dtype, lengths: Sequence[int]) -> Iterator[Case]:
    """Every case for heads of these sizes with so many tokens each."""
    heads, group, item = sizes.kv_heads, sizes.heads // sizes.kv_heads, dtype.itemsize
    row = 2 * sizes.head_dim * item  # bytes of a key and a value
    for n in lengths:
        both, most = heads * n * row, uneven(heads, n)
        yield Case("sdpa decode", f"{n:,} rows", partial(_sdpa, sizes, dtype, n), both)
        for case, each, logits in (
            (f"{n:,} rows", [n] * heads, False),
            (f"{n:,} mean, {max(most) / n:.0f}x most", most, False),
            (f"{n:,} rows, logits", [n] * heads, True),
        ):
            written = heads * n * 4 * group if logits else 0
            make = partial(_ragged, sizes, dtype, each, logits)
            yield Case("ragged attention", case, make, both + written, 0, "ragged_attention")
    yield Case(
        "rotate, append",
        "1 row a head",
        partial(_rotate_append, sizes, dtype, lengths[0]),
        2 * (sizes.heads + 2 * heads) * row + heads * 4,
        needs="rotate_append",
    )
    for n in lengths:
        moved = heads * (n * (2 + 4) + 3 * row)
        make = partial(_hash_append, sizes, dtype, n)
        yield Case("hash append", f"{n:,} rows", make, moved, needs="append_evict hashevict")
    for n in lengths:
        for name, count in _COLUMNS.items():
            yield Case(
                f"{name} step",
                f"{n:,} rows, all layers",
                partial(_step, sizes, n, name, count),
                sizes.layers * heads * n * (4 * group + 4 + 8 * count),
                needs=f"evict {name}",
            )
    for n in lengths:
        every = sizes.layers * heads * n
        make = partial(_lowest, sizes, n)
        yield Case("lowest", f"{n:,} rows, all layers", make, every * (4 + 8), needs="lowest")
    for n in lengths:
        few = min(64, n)
        yield Case(
            "observe",
            f"{few} queries, {n:,} rows",
            partial(_observe, sizes, dtype, n, few),
            heads * n * row,
            needs="add_attention_mass",
        )
        yield Case(
            "column sums",
            f"{n:,} queries, causal",
            partial(_observe, sizes, dtype, n, n),
            heads * n * (sizes.head_dim * item + 4 * group + 4),
            2 * sizes.heads * sizes.head_dim * (n * (n + 1) // 2),
            "add_attention_mass",
        )
        new = min(256, n)
        yield Case(
            "segments attention",
            f"{new} new, {n:,} rows",
            partial(_segments, sizes, dtype, uneven(heads, n), new),
            heads * n * row,
            4 * sizes.heads * sizes.head_dim * n * new,
            "ragged_prefill",
        )
        yield Case(
            "gather rows",
            f"{n // 8:,} of {n:,} rows",
            partial(_gather, sizes, dtype, n),
            heads * (n // 8) * (2 * row + 8),
            needs="gather_rows",
        )
    turned = (sizes.heads + heads + 1) * sizes.head_dim
    for t in (1, min(2048, lengths[-1])):  # a step, and a chunk of a prompt
        for name, make, numbers in (
            ("add_norm", partial(_add_norm, sizes, dtype, t), 4 * sizes.hidden),
            ("rotate", partial(_rotate, sizes, dtype, t), 2 * turned),
            ("silu_mul", partial(_silu_mul, sizes, dtype, t), 3 * sizes.mlp),
        ):
            moved = t * numbers * item
            yield Case(name.replace("_", " "), f"{t:,} tokens", make, moved, needs=name)
    for case, top_p in (("all", 1.0), ("top_p 0.9", 0.9)):
        make = partial(_drawn, sizes, top_p)
        yield Case("draw", f"of {sizes.vocab:,}, {case}", make, sizes.vocab * 4, needs="drawn")
    moved = sizes.matrices // sizes.layers * item
    make = partial(_rest, sizes, dtype)
    yield Case("rest of a layer", "1 token", make, moved, needs="rest")


def uneven(heads: int, mean: int) -> list[int]:
    """Tokens of heads with this mean, of which the fullest has four times it (fewer, of a few
    heads: one head cannot have more than all)."""
    most = min(4 * mean, heads * mean - (heads - 1))
    rest, others = heads * mean - most, heads - 1
    if not others:
        return [mean]
    each = [rest // others + (1 if i < rest % others else 0) for i in range(others)]
    return [*each[: others // 2], most, *each[others // 2 :]]


def _sdpa(sizes: Sizes, dtype: torch.dtype, n: int, device: torch.device, seed: int) -> Call:
    """torch's own, where all heads have as much: a line to compare with, not a kernel of ours."""
    wide = (1, sizes.kv_heads, n, sizes.head_dim)
    q = normal(device, seed, dtype, 1, sizes.heads, 1, sizes.head_dim)
    k, v = (normal(device, seed + i, dtype, *wide) for i in (1, 2))
    return lambda ops: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _ragged(
    sizes: Sizes,
    dtype: torch.dtype,
    lengths: Sequence[int],
    logits: bool,
    device: torch.device,
    seed: int,
) -> Call:
    heads, group, width = sizes.kv_heads, sizes.heads // sizes.kv_heads, max(lengths)
    length = torch.tensor(lengths, device=device)
    start = length.cumsum(0) - length
    q = normal(device, seed, dtype, heads, group, sizes.head_dim)
    k, v = (normal(device, seed + i, dtype, sum(lengths), sizes.head_dim) for i in (1, 2))
    out = torch.empty((heads, group, width), device=device) if logits else None
    arrived = torch.zeros(heads, dtype=torch.int32, device=device)

    def call(ops: Any) -> object:
        return ops.ragged_attention(
            q, k, v, start, length, width=width, logits=out, arrived=arrived
        )

    return call


def _rotate_append(
    sizes: Sizes, dtype: torch.dtype, n: int, device: torch.device, seed: int
) -> Call:
    heads, size = sizes.kv_heads, sizes.head_dim
    qkv = normal(device, seed, dtype, sizes.heads + 2 * heads, size)
    cos, sin = normal(device, seed + 1, dtype, 2, 1, 1, size)
    k, v = (normal(device, seed + i, dtype, heads * n, size) for i in (2, 3))
    pos = torch.arange(n, device=device, dtype=torch.int32).repeat(heads)
    slot, position = torch.arange(heads, device=device) * n, torch.tensor(n, device=device)
    return lambda ops: ops.rotate_append(qkv, cos, sin, slot, position, k, v, pos, ())


def _hash_append(sizes: Sizes, dtype: torch.dtype, n: int, device: torch.device, seed: int) -> Call:
    heads, size, bits = sizes.kv_heads, sizes.head_dim, 16
    query = normal(device, seed, dtype, heads, sizes.heads // heads, size)
    key, value = (normal(device, seed + i, dtype, heads, size) for i in (1, 2))
    matrices = {0: normal(device, seed + 3, torch.float32, size, bits)}
    rule = HashEvict(sinks=4, recent=10, bits=bits, hash_with="query", seed=0, matrices=matrices)
    k, v = (normal(device, seed + i, dtype, heads * n, size) for i in (4, 5))
    pos = torch.arange(n, device=device, dtype=torch.int32).repeat(heads)
    code = torch.randint(1 << bits, (heads * n,), device=device).to(rule.columns["code"])
    start, full = torch.arange(heads, device=device) * n, torch.full((heads,), n, device=device)
    free_slot, position = torch.full_like(full, -1), torch.tensor(n, device=device)
    columns = {"k": k, "v": v, "pos": pos, "code": code}
    new = NewRow(
        0,
        query,
        key,
        value,
        start,
        full,
        full,
        free_slot,
        position,
        columns,
        width=n,
        pinned=0,
        shown=pos,
        arrived=torch.zeros(heads, dtype=torch.int32, device=device),
    )

    def call(ops: Any) -> None:
        free_slot.fill_(-1)  # so that a token has to leave in every call
        ops.append_evict["hashevict"](rule, new)

    return call


def _step(sizes: Sizes, n: int, name: str, count: int, device: torch.device, seed: int) -> Call:
    """All heads of all layers with n tokens, of which n - 1 may stay."""
    layers, heads, group = sizes.layers, sizes.kv_heads, sizes.heads // sizes.kv_heads
    logits = normal(device, seed, torch.float32, layers, heads, group, n)
    full = torch.full((layers, heads), n, device=device)
    start = (torch.arange(layers * heads, device=device) * n).view_as(full)
    pos = torch.arange(n, device=device, dtype=torch.int32).repeat(layers * heads)
    rows = Rows(start, full, full - 1, pos, torch.tensor(n - 1, device=device), 4, 10, 0)
    columns = [torch.ones(layers * heads * n, device=device) for _ in range(count)]
    given = logits.logsumexp(-1), rows, torch.full_like(full, -1), columns, full // 2
    # RoCo's kernel overwrites the logits. Its time does not depend on their values.
    return lambda ops: ops.evict[name](logits, *given)


def _lowest(sizes: Sizes, n: int, device: torch.device, seed: int) -> Call:
    heads = sizes.layers * sizes.kv_heads
    scores = normal(device, seed, torch.float32, heads, n)
    pos, start = (torch.arange(count, device=device) for count in (n, heads))
    pos, over = pos.repeat(heads, 1), torch.ones_like(start, dtype=torch.bool)
    return lambda ops: ops.lowest(scores, pos, start * n, over, torch.empty_like(start))


def _observe(
    sizes: Sizes, dtype: torch.dtype, n: int, queries: int, device: torch.device, seed: int
) -> Call:
    """A prompt of n tokens, of which the last `queries` look back."""
    heads, size = sizes.kv_heads, sizes.head_dim
    group = sizes.heads // heads
    q = normal(device, seed, dtype, queries, heads, group, size).permute(1, 2, 0, 3)
    k, at = normal(device, seed + 1, dtype, heads, n, size), torch.arange(n, device=device)
    # Any sums of exponentials will do for a clock, as long as nothing overflows.
    lse = torch.full((heads, group, queries), 20.0, device=device)
    mass, squares = (torch.zeros((heads, *x, n), device=device) for x in ((group,), ()))
    last = at[n - queries :]
    return lambda ops: ops.add_attention_mass(mass, squares, q, lse, last, k, at[None], None)


def _segments(
    sizes: Sizes,
    dtype: torch.dtype,
    lengths: Sequence[int],
    new: int,
    device: torch.device,
    seed: int,
) -> Call:
    """New tokens of a later prompt over the rows that earlier prompts left."""
    heads, size, width = sizes.kv_heads, sizes.head_dim, max(lengths)
    q = normal(device, seed, dtype, heads, sizes.heads // heads, new, size)
    k, v = (normal(device, seed + i, dtype, sum(lengths), size) for i in (1, 2))
    length = torch.tensor(lengths, device=device)
    start, free_slot = length.cumsum(0) - length, torch.full_like(length, -1)
    return lambda ops: ops.ragged_prefill(q, k, v, start, length, free_slot, width)


def _gather(sizes: Sizes, dtype: torch.dtype, n: int, device: torch.device, seed: int) -> Call:
    """An eighth of a prompt's tokens goes into the arena."""
    heads, size, stays = sizes.kv_heads, sizes.head_dim, n // 8
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.rand((heads, n), generator=generator, device=device).argsort(1)
    index = order[:, :stays].sort(1).values
    count = torch.full((heads,), stays, device=device)
    start = torch.arange(heads, device=device) * stays
    fresh = tuple(normal(device, seed + i, dtype, heads, n, size) for i in range(2))
    into = tuple(torch.zeros(heads * stays, size, dtype=dtype, device=device) for _ in fresh)
    pos = torch.arange(n, device=device).expand(heads, n)
    places = pos, torch.zeros(heads * stays, dtype=torch.int32, device=device)
    return lambda ops: ops.gather_rows(index, count, start, fresh, None, into, places, stays)


def _add_norm(sizes: Sizes, dtype: torch.dtype, t: int, device: torch.device, seed: int) -> Call:
    x, y = (normal(device, seed + i, dtype, t, sizes.hidden) for i in (0, 1))
    weight = normal(device, seed + 2, dtype, sizes.hidden)
    return lambda ops: ops.add_norm(x, y, weight, 1e-5)


def _rotate(sizes: Sizes, dtype: torch.dtype, t: int, device: torch.device, seed: int) -> Call:
    turned, size = sizes.heads + sizes.kv_heads, sizes.head_dim
    qkv = normal(device, seed, dtype, t, turned + sizes.kv_heads, size)
    cos, sin = (normal(device, seed + i, dtype, t, 1, size) for i in (1, 2))
    return lambda ops: ops.rotate(qkv[:, :turned], cos, sin)


def _silu_mul(sizes: Sizes, dtype: torch.dtype, t: int, device: torch.device, seed: int) -> Call:
    both = normal(device, seed, dtype, t, 2 * sizes.mlp)
    return lambda ops: ops.silu_mul(both)


def _drawn(sizes: Sizes, top_p: float, device: torch.device, seed: int) -> Call:
    """As `sampling.pick` draws, from logits as spread as a network's."""
    logits = 3 * normal(device, seed, torch.float32, sizes.vocab)
    point = torch.tensor(0.5, dtype=torch.float64, device=device)
    return lambda ops: ops.drawn(logits, 0.7, 0, top_p, 0.0, point)


def _rest(sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int) -> Call:
    """What follows attention in a layer, and the next one's queries, keys and values."""
    attended = sizes.heads * sizes.head_dim
    shapes = (
        (sizes.hidden, attended),
        (2 * sizes.mlp, sizes.hidden),
        (sizes.hidden, sizes.mlp),
        (attended + 2 * sizes.kv_heads * sizes.head_dim, sizes.hidden),
    )
    matrices = [
        Matrix(rows, columns, normal(device, seed + i, dtype, rows, columns).div_(columns**0.5))
        for i, (rows, columns) in enumerate(shapes)
    ]
    norms = [torch.ones(sizes.hidden, device=device, dtype=dtype) for _ in range(2)]
    x = normal(device, seed + 4, dtype, 1, sizes.hidden)
    mixed = normal(device, seed + 5, dtype, 1, attended)
    made: dict[str, Any] = {}

    def call(ops: Any) -> object:
        if not made:
            made["run"] = ops.rest(*matrices, *norms, 1e-5)
        return made["run"](x, mixed)

    return call

"""`minikv bench kernels`: each operation against the bytes it must move or the flops it must do.

One table of cases, a row per kernel. What runs is what the cache would call (`dispatch`): Triton's
kernels, on a CPU those in C, or their torch twins with `--kernels torch`. On a GPU calls are
captured in a graph and rotate over inputs that its cache cannot hold, so neither the launch nor
the last call's data is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cli.bench import machine
from minikv.cli.bench.floors import Rates, middle
from minikv.cli.bench.machine import normal
from minikv.cli.bench.shapes import Sizes
from minikv.engine.decode_loop import captured
from minikv.errors import UsageError
from minikv.kernels import Rows, dispatch

Inputs = dict[str, Any]

_CPU_CACHE = 64 << 20  # bytes that a processor's cache surely does not exceed
_SETS = 64  # of inputs, at most
_CALLS, _SECONDS = 16, 0.02  # in one measurement, at least: calls on a GPU, time on a CPU


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one size of inputs.

    make(device, seed): fresh inputs. run(operations, inputs): the call. nbytes: read and written
    at the least; flops: of its products, 0 where the floor is that of the bytes. needs: names of
    operations without which there is nothing to run.
    """

    name: str
    case: str
    make: Callable[[torch.device, int], Inputs]
    run: Callable[[Any, Inputs], object]
    nbytes: int
    flops: int = 0
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """A case, measured. `who` ran it: triton or torch. floor: seconds at the machine's rates."""

    name: str
    case: str
    who: str
    times: tuple[float, ...]
    nbytes: int
    flops: int
    floor: float
    captured: bool

    @property
    def seconds(self) -> float:
        """Median of a call."""
        return middle(self.times)

    @property
    def share(self) -> float:
        """The floor's part of the time."""
        return self.floor / self.seconds

    def record(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "kernel": self.name,
            "case": self.case,
            "kernels": self.who,
            "seconds": self.seconds,
            "times": list(self.times),
            "bytes": self.nbytes,
            "flops": self.flops,
            "floor_s": self.floor,
            "share_of_floor": self.share,
            "captured": self.captured,
        }


def who(device: torch.device, wanted: str, head_dim: int) -> dispatch.Kernels:
    """The kernels that run for bfloat16 heads of this size. Raises UsageError where Triton's are
    meant and cannot. `wanted`: the value of --kernels."""
    found, reason = dispatch.choose(device, wanted, head_dim, torch.bfloat16)
    if wanted != "torch" and found.name == "torch":
        raise UsageError(
            reason or "the Triton kernels need a CUDA device, and torch sees none",
            "--kernels torch measures their torch twins",
        )
    return found


def timed(
    case: Case, operations: dispatch.Kernels, device: torch.device, rates: Rates, rounds: int
) -> Timing:
    """Median seconds of a call."""
    gpu = device.type == "cuda"
    cache = 2 * machine.l2_bytes(device) if gpu else _CPU_CACHE
    sets = [case.make(device, seed) for seed in range(min(_SETS, 1 + cache // max(case.nbytes, 1)))]

    def calls(count: int) -> Callable[[], None]:
        def run() -> None:
            for i in range(count):
                case.run(operations, sets[i % len(sets)])

        return run

    clock = machine.Clock(device)
    with torch.inference_mode():
        calls(len(sets))()  # compiles, and touches every page
        if gpu:
            count = -(-max(_CALLS, len(sets)) // len(sets)) * len(sets)
            replay = _captured(calls(count), device)
            times = clock.each(replay or calls(count), rounds)
        else:
            replay = None
            once = clock(calls(1))
            count = max(1, min(1000, round(_SECONDS / max(once, 1e-7))))
            times = clock.each(calls(count), rounds)
    moved = case.nbytes / rates.stream
    done = case.flops / rates.product("bfloat16") if case.flops else 0.0
    return Timing(
        case.name,
        case.case,
        operations.name,
        tuple(t / count for t in times),
        case.nbytes,
        case.flops,
        max(moved, done),
        replay is not None,
    )


def _captured(run: Callable[[], None], device: torch.device) -> Callable[[], None] | None:
    """A graph of the calls; None where something in them waits for the device."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.device(device):
            return captured(run, stream)
    except RuntimeError:
        torch.cuda.synchronize(device)
        return None


def missing(case: Case, operations: dispatch.Kernels) -> list[str]:
    """Functions that this version does not have."""
    return [name for name in case.needs if not hasattr(operations, name)]


# -- the table ------------------------------------------------------------------------------


def cases(sizes: Sizes, dtype: torch.dtype, lengths: Sequence[int]) -> Iterator[Case]:
    """Every case for heads of these sizes and this many rows a head."""
    heads, group = sizes.kv_heads, sizes.heads // sizes.kv_heads
    row = 2 * sizes.head_dim * dtype.itemsize
    for n in lengths:
        yield Case("sdpa decode", f"{n:,} rows", _dense(sizes, dtype, n), _sdpa, heads * n * row)
        yield Case(
            "ragged attention",
            f"{n:,} rows",
            _ragged(sizes, dtype, [n] * heads),
            _attend,
            heads * n * row,
            needs=("ragged_attention",),
        )
        yield Case(
            "ragged attention",
            f"{n:,} mean, {max(uneven(heads, n)) / n:.0f}x most",
            _ragged(sizes, dtype, uneven(heads, n)),
            _attend,
            heads * n * row,
            needs=("ragged_attention",),
        )
        yield Case(
            "ragged attention",
            f"{n:,} rows, logits",
            _ragged(sizes, dtype, [n] * heads, logits=True),
            _attend,
            heads * n * (row + 4 * group),
            needs=("ragged_attention",),
        )
    first = lengths[0]
    yield Case(
        "append",
        "1 row a head",
        _newcomer(sizes, dtype, first),
        _append,
        heads * 2 * (row + 4),
        needs=("append",),
    )
    for n in lengths:
        yield Case(
            "hash append",
            f"{n:,} rows",
            _newcomer(sizes, dtype, n),
            _hash,
            heads * (n * (2 + 4) + 3 * row),
            needs=("hash_append",),
        )
    rows = sizes.layers * heads
    for n in lengths:
        for name, columns in _STEPS.items():
            yield Case(
                name.replace("_", " "),
                f"{n:,} rows, all layers",
                _judged(sizes, n, columns),
                _step(name),
                rows * n * (4 * group + 4 + 2 * sum(c.itemsize for c in columns)),
                needs=(name,),
            )
    for n in lengths:
        queries = min(64, n)
        yield Case(
            "observe",
            f"{queries} queries, {n:,} rows",
            _observed(sizes, dtype, n, queries),
            _observe,
            2 * heads * n * sizes.head_dim * dtype.itemsize,
            needs=("observe",),
        )
        yield Case(
            "column sums",
            f"{n:,} queries, causal",
            _observed(sizes, dtype, n, n),
            _columns,
            heads * n * (sizes.head_dim * dtype.itemsize + 4 * group + 4),
            2 * sizes.heads * sizes.head_dim * (n * (n + 1) // 2),
            needs=("add_attention_mass",),
        )
    for n in lengths:
        yield Case(
            "segments attention",
            f"{min(256, n)} new, {n:,} rows",
            _segments(sizes, dtype, uneven(heads, n), min(256, n)),
            _over,
            heads * n * row,
            4 * sizes.heads * sizes.head_dim * n * min(256, n),
            needs=("ragged_prefill",),
        )
        yield Case(
            "gather rows",
            f"{n // 8:,} of {n:,} rows",
            _kept(sizes, dtype, n),
            _gather,
            heads * (n // 8) * (2 * row + 8),
            needs=("gather_rows",),
        )
    turned, item = (sizes.heads + heads) * sizes.head_dim, dtype.itemsize
    for t in (1, min(2048, lengths[-1])):  # a step, and a chunk of a prompt
        between = _between(sizes, dtype, t)
        case = f"{t:,} tokens"
        yield Case(
            "add norm", case, between, _add_norm, 4 * t * sizes.hidden * item, needs=("add_norm",)
        )
        yield Case(
            "rotate",
            case,
            between,
            _rotate,
            2 * t * (turned + sizes.head_dim) * item,
            needs=("rotate",),
        )
        yield Case(
            "silu mul", case, between, _silu_mul, 3 * t * sizes.mlp * item, needs=("silu_mul",)
        )


_STEPS: dict[str, tuple[torch.dtype, ...]] = {
    "h2o_step": (torch.float32,),
    "tova_step": (),
    "roco_step": (torch.float32,) * 3,
    "scissorhands_step": (torch.int64, torch.int64, torch.float32),
}
"""Columns that a step policy reads and writes in every row."""


def uneven(heads: int, mean: int) -> list[int]:
    """Rows of heads with this mean of which the fullest has four times it (fewer, of a few heads:
    one head cannot have more than all)."""
    most = min(4 * mean, heads * mean - (heads - 1))
    rest, others = heads * mean - most, heads - 1
    if not others:
        return [mean]
    each = [rest // others + (1 if i < rest % others else 0) for i in range(others)]
    return [*each[: others // 2], most, *each[others // 2 :]]


def _dense(sizes: Sizes, dtype: torch.dtype, n: int) -> Callable[[torch.device, int], Inputs]:
    def make(device: torch.device, seed: int) -> Inputs:
        wide = (1, sizes.kv_heads, n, sizes.head_dim)
        return {
            "q": normal(device, seed, dtype, 1, sizes.heads, 1, sizes.head_dim),
            "k": normal(device, seed + 1, dtype, *wide),
            "v": normal(device, seed + 2, dtype, *wide),
        }

    return make


def _sdpa(operations: Any, i: Inputs) -> Tensor:
    """What torch offers where all heads are alike: a line to compare with, not a kernel of ours."""
    return F.scaled_dot_product_attention(i["q"], i["k"], i["v"], enable_gqa=True)


def _ragged(
    sizes: Sizes, dtype: torch.dtype, lengths: Sequence[int], *, logits: bool = False
) -> Callable[[torch.device, int], Inputs]:
    heads, group = sizes.kv_heads, sizes.heads // sizes.kv_heads

    def make(device: torch.device, seed: int) -> Inputs:
        length = torch.tensor(lengths, device=device)
        total, width = sum(lengths), max(lengths)
        made: Inputs = {
            "q": normal(device, seed, dtype, heads, group, sizes.head_dim),
            "k": normal(device, seed + 1, dtype, total, sizes.head_dim),
            "v": normal(device, seed + 2, dtype, total, sizes.head_dim),
            "start": length.cumsum(0) - length,
            "length": length,
            "width": width,
            "logits": None,
        }
        if logits:
            made["logits"] = torch.empty((heads, group, width), device=device)
        return made

    return make


def _attend(operations: Any, i: Inputs) -> object:
    return operations.ragged_attention(
        i["q"], i["k"], i["v"], i["start"], i["length"], width=i["width"], logits=i["logits"]
    )


def _newcomer(sizes: Sizes, dtype: torch.dtype, n: int) -> Callable[[torch.device, int], Inputs]:
    heads, group, bits = sizes.kv_heads, sizes.heads // sizes.kv_heads, 16

    def make(device: torch.device, seed: int) -> Inputs:
        wide = (heads, sizes.head_dim)
        reach = torch.arange(heads, device=device)
        cached = (heads * n, sizes.head_dim)
        code = torch.randint(-(1 << 15), 1 << 15, (heads * n,), device=device)
        return {
            "probe": normal(device, seed, dtype, heads, group, sizes.head_dim),
            "key": normal(device, seed + 1, dtype, *wide),
            "value": normal(device, seed + 2, dtype, *wide),
            "matrix": normal(device, seed + 3, torch.float32, sizes.head_dim, bits),
            "k": normal(device, seed + 4, dtype, *cached),
            "v": normal(device, seed + 5, dtype, *cached),
            "pos": torch.arange(n, device=device, dtype=torch.int32).repeat(heads),
            "code": code.to(torch.int16),
            "start": reach * n,
            "length": torch.full((heads,), n, device=device),
            "cap": torch.full((heads,), n, device=device),
            "hole": torch.full((heads,), -1, device=device),
            "position": torch.tensor(n, device=device),
            "slot": reach * n,
            "width": n,
            "spare": (
                torch.empty(wide, dtype=dtype, device=device),
                torch.empty(wide, dtype=dtype, device=device),
                torch.empty(heads, dtype=torch.int32, device=device),
                torch.empty(heads, dtype=torch.int16, device=device),
            ),
        }

    return make


def _between(sizes: Sizes, dtype: torch.dtype, t: int) -> Callable[[torch.device, int], Inputs]:
    """What t tokens are between the products of a layer."""
    turned, size = sizes.heads + sizes.kv_heads, sizes.head_dim

    def make(device: torch.device, seed: int) -> Inputs:
        return {
            "x": normal(device, seed, dtype, t, sizes.hidden),
            "y": normal(device, seed + 1, dtype, t, sizes.hidden),
            "weight": normal(device, seed + 2, dtype, sizes.hidden),
            "qkv": normal(device, seed + 3, dtype, t, turned + sizes.kv_heads, size),
            "turned": turned,
            "cos": normal(device, seed + 4, dtype, t, 1, size),
            "sin": normal(device, seed + 5, dtype, t, 1, size),
            "both": normal(device, seed + 6, dtype, t, 2 * sizes.mlp),
        }

    return make


def _add_norm(operations: Any, i: Inputs) -> Tensor:
    found: Tensor = operations.add_norm(i["x"], i["y"], i["weight"], 1e-5)
    return found


def _rotate(operations: Any, i: Inputs) -> Tensor:
    found: Tensor = operations.rotate(i["qkv"][:, : i["turned"]], i["cos"], i["sin"])
    return found


def _silu_mul(operations: Any, i: Inputs) -> Tensor:
    found: Tensor = operations.silu_mul(i["both"])
    return found


def _append(operations: Any, i: Inputs) -> None:
    operations.append(i["key"], i["value"], i["slot"], i["position"], i["k"], i["v"], i["pos"], ())


def _hash(operations: Any, i: Inputs) -> None:
    i["hole"].fill_(-1)  # so that somebody has to leave in every call
    operations.hash_append(
        i["probe"],
        i["key"],
        i["value"],
        i["matrix"],
        i["start"],
        i["length"],
        i["cap"],
        i["hole"],
        i["position"],
        i["k"],
        i["v"],
        i["pos"],
        i["code"],
        i["spare"],
        width=i["width"],
        sinks=4,
        recent=10,
        pinned=0,
    )


def _judged(
    sizes: Sizes, n: int, columns: Sequence[torch.dtype]
) -> Callable[[torch.device, int], Inputs]:
    """All heads of all layers with n rows, of which n - 1 may stay."""
    layers, heads, group = sizes.layers, sizes.kv_heads, sizes.heads // sizes.kv_heads

    def make(device: torch.device, seed: int) -> Inputs:
        logits = normal(device, seed, torch.float32, layers, heads, group, n)
        total = layers * heads * n
        full = torch.full((layers, heads), n, device=device)
        rows = Rows(
            (torch.arange(layers * heads, device=device) * n).view(layers, heads),
            full,
            full - 1,
            torch.arange(n, device=device, dtype=torch.int32).repeat(layers * heads),
            torch.tensor(n - 1, device=device),
            4,
            10,
            0,
        )
        return {
            "logits": logits,
            "lse": logits.logsumexp(-1),
            "rows": rows,
            "go": torch.tensor(True, device=device),
            "hole": torch.full_like(full, -1),
            "columns": [torch.ones(total, dtype=dtype, device=device) for dtype in columns],
            "half": full // 2,
            "window": torch.full((layers,), n, device=device),
        }

    return make


def _step(name: str) -> Callable[[Any, Inputs], None]:
    def run(operations: Any, i: Inputs) -> None:
        function, columns = getattr(operations, name), i["columns"]
        shared = (i["logits"], i["lse"], i["rows"], i["go"], i["hole"])
        if name == "h2o_step":
            function(*shared, columns[0], i["half"])
        elif name == "tova_step":
            function(*shared, layerwise=False)
        elif name == "roco_step":
            function(*shared, *columns, i["half"])
        else:
            function(*shared, columns[:2], columns[2], 64, i["window"])

    return run


def _observed(
    sizes: Sizes, dtype: torch.dtype, n: int, queries: int
) -> Callable[[torch.device, int], Inputs]:
    """A prompt of n tokens, of which the last `queries` look back."""
    heads, group = sizes.kv_heads, sizes.heads // sizes.kv_heads

    def make(device: torch.device, seed: int) -> Inputs:
        q = normal(device, seed, dtype, queries, heads, group, sizes.head_dim)
        at = torch.arange(n, device=device)
        return {
            "q": q,
            "head_first": q.permute(1, 2, 0, 3),
            "q_pos": at[n - queries :],
            "k": normal(device, seed + 1, dtype, heads, n, sizes.head_dim),
            "k_pos": at[None],
            # Any sums of exponentials will do for a clock, as long as nothing overflows.
            "lse": torch.full((heads, group, queries), 20.0, device=device),
            "mass": torch.zeros((heads, group, n), device=device),
            "squares": torch.zeros((heads, n), device=device),
        }

    return make


def _observe(operations: Any, i: Inputs) -> object:
    return operations.observe(i["q"], i["q_pos"], [(i["k"], i["k_pos"])], None)


def _columns(operations: Any, i: Inputs) -> None:
    operations.add_attention_mass(
        i["mass"], i["squares"], i["head_first"], i["lse"], i["q_pos"], i["k"], i["k_pos"], None
    )


def _segments(
    sizes: Sizes, dtype: torch.dtype, lengths: Sequence[int], rows: int
) -> Callable[[torch.device, int], Inputs]:
    """New rows of a later prompt over what earlier ones left."""
    ragged, heads = _ragged(sizes, dtype, lengths), sizes.kv_heads

    def make(device: torch.device, seed: int) -> Inputs:
        wide = (heads, sizes.heads // heads, rows, sizes.head_dim)
        hole = torch.full((heads,), -1, device=device)
        return ragged(device, seed) | {"new": normal(device, seed + 3, dtype, *wide), "hole": hole}

    return make


def _over(operations: Any, i: Inputs) -> object:
    return operations.ragged_prefill(
        i["new"], i["k"], i["v"], i["start"], i["length"], i["hole"], i["width"]
    )


def _kept(sizes: Sizes, dtype: torch.dtype, n: int) -> Callable[[torch.device, int], Inputs]:
    """An eighth of a prompt's rows goes into the arena."""
    heads, stays = sizes.kv_heads, n // 8

    def make(device: torch.device, seed: int) -> Inputs:
        fresh = (heads, n, sizes.head_dim)
        generator = torch.Generator(device).manual_seed(seed)
        order = torch.rand((heads, n), generator=generator, device=device).argsort(1)
        into = (heads * stays, sizes.head_dim)
        return {
            "index": order[:, :stays].sort(1).values,
            "most": stays,
            "count": torch.full((heads,), stays, device=device),
            "start": torch.arange(heads, device=device) * stays,
            "fresh": tuple(normal(device, seed + i, dtype, *fresh) for i in range(2)),
            "into": tuple(torch.zeros(into, dtype=dtype, device=device) for _ in range(2)),
        }

    return make


def _gather(operations: Any, i: Inputs) -> None:
    operations.gather_rows(
        i["index"], i["count"], i["start"], i["fresh"], None, i["into"], i["most"]
    )

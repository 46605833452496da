"""Single kernels on random inputs, for `figures.py` and `profiled.py`: one table of cases, with the
bytes that each must move at the least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels import NewRow, Queries, Rows, Segments
from minikv.kernels.product.matrix import Matrix
from minikv.models.config import ModelConfig
from minikv.policies.hashevict import HashEvict

Call = Callable[[Any], object]
"""A function of a table of kernels: it calls one operation, on inputs that it holds."""


class Draw:
    """Random inputs on a device, the same for the same seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self._generator = device, torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def range(self, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.arange(count, device=self.device, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one size of inputs. make(draw): a call with fresh inputs. nbytes: read and
    written at the least. needs: the operation, and the policy behind it, if it is one of a policy.
    """

    name: str
    case: str
    make: Callable[[Draw], Call]
    nbytes: int
    needs: str = ""

    def is_missing(self, operations: Any) -> bool:
        """Whether these kernels do not have the operation."""
        name, _, policy = self.needs.partition(" ")
        found = getattr(operations, name) if name else ()
        return found is None or (policy != "" and policy not in found)


# -- the table ------------------------------------------------------------------------------

_COLUMNS = {"h2o": 1, "roco": 3}
"""Numbers of float32 that a step policy reads and writes for every token."""


def cases(sizes: ModelConfig, lengths: Sequence[int]) -> Iterator[Case]:
    """Every case in bfloat16 for heads of these sizes with so many tokens each."""
    heads, group, item = sizes.kv_heads, sizes.heads // sizes.kv_heads, 2
    row, every = 2 * sizes.head_dim * item, sizes.layers * heads  # bytes of a key and a value
    for n in lengths:
        both, most, rows = heads * n * row, uneven(heads, n), f"{n:,} rows"
        few = min(64, n)
        yield Case("sdpa decode", rows, partial(_sdpa, sizes, n), both)
        for case, each, logits in (
            (rows, [n] * heads, False),
            (f"{n:,} mean, {max(most) / n:.0f}x most", most, False),
            (f"{rows}, logits", [n] * heads, True),
        ):
            moved = both + both // row * 4 * group * logits
            make = partial(_ragged, sizes, each, logits)
            yield Case("ragged attention", case, make, moved, "ragged_attention")
        make, moved = partial(_hash_append, sizes, n), heads * (n * (2 + 4) + 3 * row)
        yield Case("hash append", rows, make, moved, "append_evict hashevict")
        for name, columns in _COLUMNS.items():
            moved = every * n * (4 * group + 4 + 8 * columns)
            make = partial(_step, sizes, n, name, columns)
            yield Case(f"{name} step", f"{rows}, all layers", make, moved, f"evict {name}")
        make = partial(_lowest, sizes, n)
        yield Case("lowest", f"{rows}, all layers", make, every * n * (4 + 8), "lowest")
        make = partial(_observe, sizes, n, few)
        yield Case("observe", f"{few} queries, {rows}", make, both, "add_attention_mass")
    width = sizes.heads * sizes.head_dim
    numbers = sizes.hidden * (2 * width + 2 * heads * sizes.head_dim + 3 * sizes.mlp)
    yield Case("rest of a layer", "1 token", partial(_rest, sizes), numbers * item, "rest")


def uneven(heads: int, mean: int) -> list[int]:
    """Tokens of heads with this mean, of which the fullest has four times it (fewer, of a few
    heads: one head cannot have more than all)."""
    most = min(4 * mean, heads * mean - (heads - 1))
    rest, others = heads * mean - most, heads - 1
    if not others:
        return [mean]
    each = [rest // others + (1 if i < rest % others else 0) for i in range(others)]
    return [*each[: others // 2], most, *each[others // 2 :]]


def _sdpa(sizes: ModelConfig, n: int, draw: Draw) -> Call:
    """torch's own, where all heads have as much: a line to compare with, not a kernel of ours."""
    q = draw(1, sizes.heads, 1, sizes.head_dim)
    k, v = (draw(1, sizes.kv_heads, n, sizes.head_dim) for _ in range(2))
    return lambda ops: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _ragged(sizes: ModelConfig, lengths: Sequence[int], logits: bool, draw: Draw) -> Call:
    heads, group, width = sizes.kv_heads, sizes.heads // sizes.kv_heads, max(lengths)
    length = torch.tensor(lengths, device=draw.device)
    start = length.cumsum(0) - length
    q = draw(heads, group, sizes.head_dim)
    k, v = (draw(sum(lengths), sizes.head_dim) for _ in range(2))
    out = torch.empty((heads, group, width), device=draw.device) if logits else None
    arrived = torch.zeros(heads, dtype=torch.int32, device=draw.device)

    rows = Segments(k, v, start, length, width)
    return lambda ops: ops.ragged_attention(q, rows, out, arrived=arrived)


def _hash_append(sizes: ModelConfig, n: int, draw: Draw) -> Call:
    heads, size, bits = sizes.kv_heads, sizes.head_dim, 16
    matrices = {0: draw(size, bits, dtype=torch.float32)}
    rule = HashEvict(sinks=4, recent=10, bits=bits, hash_with="query", seed=0, matrices=matrices)
    pos = draw.range(n, torch.int32).repeat(heads)
    code = torch.randint(1 << bits, (heads * n,), device=draw.device).to(rule.columns["code"])
    start, full = draw.range(heads) * n, torch.full((heads,), n, device=draw.device)
    free_slot, position = torch.full_like(full, -1), torch.tensor(n, device=draw.device)
    columns = {"k": draw(heads * n, size), "v": draw(heads * n, size), "pos": pos, "code": code}
    q, k, v = draw(heads, sizes.heads // heads, size), draw(heads, size), draw(heads, size)
    arrived = torch.zeros(heads, dtype=torch.int32, device=draw.device)
    segments = (start, full, full, free_slot, position, columns)
    new = NewRow(0, q, k, v, *segments, n, 0, shown=pos, arrived=arrived)

    def call(ops: Any) -> None:
        free_slot.fill_(-1)  # so that a token has to leave in every call
        ops.append_evict["hashevict"](rule, new)

    return call


def _step(sizes: ModelConfig, n: int, name: str, count: int, draw: Draw) -> Call:
    """All heads of all layers with n tokens, of which n - 1 may stay."""
    layers, heads, group = sizes.layers, sizes.kv_heads, sizes.heads // sizes.kv_heads
    logits = draw(layers, heads, group, n, dtype=torch.float32)
    full = torch.full((layers, heads), n, device=draw.device)
    start = (draw.range(layers * heads) * n).view_as(full)
    pos = draw.range(n, torch.int32).repeat(layers * heads)
    rows = Rows(start, full, full - 1, pos, torch.tensor(n - 1, device=draw.device), 4, 10, 0)
    columns = [torch.ones(layers * heads * n, device=draw.device) for _ in range(count)]
    given = logits.logsumexp(-1), rows, torch.full_like(full, -1), columns, full // 2
    # RoCo's kernel overwrites the logits. Its time does not depend on their values.
    return lambda ops: ops.evict[name](logits, *given)


def _lowest(sizes: ModelConfig, n: int, draw: Draw) -> Call:
    heads = sizes.layers * sizes.kv_heads
    scores, start = draw(heads, n, dtype=torch.float32), draw.range(heads)
    pos, over = draw.range(n).repeat(heads, 1), torch.ones_like(start, dtype=torch.bool)
    return lambda ops: ops.lowest(scores, pos, start * n, over, torch.empty_like(start))


def _observe(sizes: ModelConfig, n: int, queries: int, draw: Draw) -> Call:
    """A prompt of n tokens, of which the last `queries` look back."""
    heads, size = sizes.kv_heads, sizes.head_dim
    group = sizes.heads // heads
    q, k = draw(queries, heads, group, size).permute(1, 2, 0, 3), draw(heads, n, size)
    at = draw.range(n)
    # Any sums of exponentials will do for a clock, as long as nothing overflows.
    lse = torch.full((heads, group, queries), 20.0, device=draw.device)
    mass, squares = (torch.zeros((heads, *x, n), device=draw.device) for x in ((group,), ()))
    asked = Queries(q, at[n - queries :], None, lse)
    return lambda ops: ops.add_attention_mass(mass, squares, asked, (k, at[None]))


def _rest(sizes: ModelConfig, draw: Draw) -> Call:
    """What follows attention in a layer, and the next one's queries, keys and values."""
    attended = sizes.heads * sizes.head_dim
    shapes = (
        (sizes.hidden, attended),
        (2 * sizes.mlp, sizes.hidden),
        (sizes.hidden, sizes.mlp),
        (attended + 2 * sizes.kv_heads * sizes.head_dim, sizes.hidden),
    )
    matrices = [Matrix(r, c, draw(r, c).div_(c**0.5)) for r, c in shapes]
    norms = [torch.ones_like(draw(sizes.hidden)) for _ in range(2)]
    x, mixed = draw(1, sizes.hidden), draw(1, attended)
    made: dict[str, Any] = {}

    def call(ops: Any) -> object:
        if not made:
            made["run"] = ops.rest(*matrices, *norms, 1e-5)
        return made["run"](x, mixed)

    return call

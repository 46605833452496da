"""HashEvict's rows in C, as torch chooses and writes them, on odd sizes, with NaN or absurd numbers
in every row that no head has and around every tensor."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product

import pytest
import step_oracle as twins
import torch
from guards import absurd, guarded, untouched
from pairwise import pairwise, some_by_day
from ragged import in_use
from torch import Tensor

from minikv.kernels.cpu import build
from minikv.kernels.cpu import hash_append as native

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")


Hashed = tuple[list[Tensor], dict[str, int]]
"""The tensors that the function takes, those of `undo_rows` last, and its numbers."""


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))


def hashed(seed: int, dtype: torch.dtype, bits: int, *, exact: bool) -> Hashed:
    """Heads with a free slot, heads that grow and heads that are full, one of them without a row.

    exact: entries of queries, keys and matrix are small whole numbers (of 2^-24 in float16: half of
    what it has below its normal numbers), so that every order of summing gives the same, often 0.
    Otherwise products are well away from 0.
    """
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, probes, size = pick.randint(1, 5), pick.randint(1, 7), pick.choice((5, 16, 64, 80, 129))
    length = torch.tensor([pick.choice((0, 1, 2, 19, 40, 77)) for _ in range(heads)])
    start = (length + 3).cumsum(0) - length
    rows = int(start[-1] + length[-1]) + 3
    cap, free_slot = length.clone(), torch.full((heads,), -1)
    for h in range(heads):
        kind = pick.choice(("free", "grows", "full", "full"))
        if kind == "grows":
            cap[h] += 1
        elif kind == "free" and length[h] > 0:
            free_slot[h] = start[h] + length[h] // 2
    used = in_use(start, length, rows)
    pos = torch.randperm(rows, generator=generator).to(torch.int32)
    # As `HashEvict.columns`: only a code of 64 bits has none to spare for the sign.
    wide = torch.int16 if bits < 16 else torch.int32 if bits < 32 else torch.int64
    while True:
        if exact:
            unit, most = (2.0**-24, 1500) if dtype == torch.float16 else (1.0, 4)
            whole = torch.randint(-most, most + 1, (heads, probes + 1, size), generator=generator)
            x = (whole * unit).to(dtype)
            matrix = torch.randint(-1, 2, (size, bits), generator=generator).float()
            break
        x = torch.randn(heads, probes + 1, size, generator=generator).to(dtype)
        matrix = torch.randn(size, bits, generator=generator)
        if bool(((x.double() @ matrix.double()).abs() > 1e-5).all()):
            break
    code = torch.randint(0, 1 << min(bits, 4), (rows,), generator=generator).to(wide)
    if bits == 64:
        code[::3] = -1 - code[::3]
    k, v = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    value = torch.randn(heads, size, generator=generator).to(dtype)
    k[~used] = v[~used] = math.nan
    code[~used], pos[~used] = absurd(wide), absurd(torch.int32)  # type: ignore[call-overload]
    undo_rows = [torch.full((heads, *t.shape[1:]), 3, dtype=t.dtype) for t in (k, v, pos, code)]
    given = [
        x[:, :-1].contiguous(),
        x[:, -1].contiguous(),
        value,
        matrix,
        start,
        length,
        cap,
        free_slot,
        torch.tensor(rows),
        k,
        v,
        pos,
        code,
        *undo_rows,
    ]
    numbers = {
        "width": int(length.max()) + 2,
        "sinks": pick.choice((0, 5, 10**6)),
        "recent": pick.choice((0, 1, rows // 3)),
        "pinned": pick.choice((0, 9)),
    }
    return given, numbers


def run_hash(function: Callable[..., None], case: Hashed) -> list[Tensor]:
    given, numbers = case
    mine = [guarded(t) for t in given]
    function(*mine[:13], tuple(mine[13:]), **numbers)
    assert all(untouched(t) for t in mine)
    return mine


CASES = (
    (torch.float32, torch.bfloat16, torch.float16),
    (1, 8, 15, 16, 31, 32, 63, 64),
    (True, False),
)


@pytest.mark.parametrize(
    ("dtype", "bits", "exact"),
    some_by_day(product(*CASES), {*pairwise(*CASES)}.__contains__),
)
def test_hash_append_as_the_twin(dtype: torch.dtype, bits: int, exact: bool) -> None:
    for seed in range(10):
        case = hashed(seed + 100 * bits, dtype, bits, exact=exact)
        want, got = run_hash(twins.hash_append, case), run_hash(native.hash_append, case)
        assert all(same(a, b) for a, b in zip(got, want, strict=True)), seed


def test_other_strides_and_dtypes_are_refused() -> None:
    given, numbers = hashed(1, torch.float32, 8, exact=True)
    turned = given[3].T.contiguous().T
    for at, wrong, why in ((3, turned, "a float32 matrix"), (7, given[7].int(), "int64 layouts")):
        mine = [*given]
        mine[at] = wrong
        with pytest.raises(AssertionError, match=f"contiguous CPU tensors: {why}"):
            native.hash_append(*mine[:13], tuple(mine[13:]), **numbers)  # type: ignore[call-arg, arg-type, misc]
    given, numbers = hashed(1, torch.float32, 8, exact=True)
    given[3] = torch.zeros(len(given[3]), 65)
    with pytest.raises(AssertionError, match="at most 64 bits"):
        native.hash_append(*given[:13], tuple(given[13:]), **numbers)  # type: ignore[call-arg, arg-type, misc]

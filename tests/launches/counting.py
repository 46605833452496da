"""What a prompt and a step launch on a GPU, counted without one.

    python tests/launches/counting.py [--json FILE]
    python tests/launches/counting.py --write      the table that tests/launches/ compares with
    python tests/launches/counting.py --late [CASE]  kernels that a turn compiles after the warm-up

The whole program runs as on a GPU, on a small network of random weights in bfloat16: the engine,
the cache, the policies, the host side of every Triton kernel, and Triton's own launcher. Launched
kernels do nothing (`stub_driver`); then the torch form of the kernel computes the result, so that
what follows is as it would be. Counted are, in this order,

    triton   launches of Triton kernels that arrive at the driver
    torch    operators of torch on tensors of the GPU, other than views and allocations. `topk` and
             `sort` count as what they launch; a few others (cumsum, logsumexp, index_put) launch
             more than the one that is counted. Flash attention is one
    sent     copies from the host to the GPU
    fetched  copies or values from the GPU; all but that of a step's token make the host wait

A row is a straight line through runs of different sizes. Of a step, `layer` is what one layer more
adds, and `beside` is the rest. Of a prompt, `layer` is what one layer more adds with one chunk, of
which `finish` chooses and moves the rows that stay; `chunk` is what one chunk more adds in a layer,
`beside` the rest of the first chunk and `beside_chunk` of each further one. The rest may be
negative: of the last layer only the last token is needed. `first` is a prompt into an empty cache,
`later` one behind an answer. There are 8 KV heads, which matters where code loops over heads.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import rest_twin
import small
import stand_in
import step_oracle
import stub_driver
import torch
from stand_in import GPU, Counts, near, uncounted
from torch import Tensor
from torch.utils._pytree import tree_leaves

from minikv import policies
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Prefill
from minikv.cache.stats import Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.capture import Eager
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.engine.warmup import warm
from minikv.kernels.dispatch import FORMS, Kernels, on_gpu
from minikv.models.linear import Plain, kept, unpack_int4_rows
from minikv.models.llama import Llama

Count = Counter[tuple[str, str]]

LAYERS = (1, 2)
HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 8, 16, 128
CHUNK = 64
WINDOW = 48
BUDGET = 40
KINDS = ("triton", "torch", "sent", "fetched")
PARTS = ("layer", "finish", "chunk", "beside", "beside_chunk")
"""Of a prompt's row."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is counted. kept: "int8" keys and values, or "windows": layers with a sliding window;
    options: of the policies; stride: with it, the step policy also reads the prompt; weights: how
    the matrices of the layers are kept, one of `linear.FORMS`; budget: rows per head; chunks: of
    the prompts that are compared with others of one chunk more."""

    policy: str
    decode: str
    kept: str = ""
    options: tuple[tuple[str, object], ...] = ()
    stride: int = 0
    weights: str = "auto"
    budget: int = BUDGET
    chunks: int = 1

    @property
    def name(self) -> str:
        """In the table."""
        pair = f"{self.policy} blocks" if self.stride else f"{self.policy}/{self.decode}"
        options = (f"{name}={value}" for name, value in self.options)
        weights = "" if self.weights == "auto" else f"{self.weights} weights"
        budget = "" if self.budget == BUDGET else f"budget {self.budget}"
        chunks = "" if self.chunks == 1 else f"{self.chunks} chunks"
        return " ".join((pair, *options, *filter(None, (self.kept, weights, budget, chunks))))


_LAUNCH = on_gpu()


class _Kernels(Kernels):
    """Triton's operations, of which each launches, and then is computed by its torch form."""

    name, products, block = _LAUNCH.name, _LAUNCH.products, _LAUNCH.block


_PACKED = SimpleNamespace(unpack_int4_rows=unpack_int4_rows)


def _torch_form(name: str) -> Callable[..., Any]:
    sources = (Kernels, step_oracle, _PACKED)
    return next(filter(None, (getattr(source, name, None) for source in sources)))


def _both(launch: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        out = launch(*args, **kwargs)
        with uncounted():
            found = compute(*near(args), **near(kwargs))
            for there, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(there, Tensor):
                    near(there).copy_(value)
        return out

    return run


@dataclass(frozen=True, slots=True)
class _Made:
    """A function of weights that launches, and then its twin computes."""

    launch: Callable[..., Any]
    compute: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        out = self.launch(*args)
        with uncounted():
            near(out).copy_(self.compute(*near(args)))
        return out


def _made(name: str) -> Callable[..., Any]:
    """Of an operation that makes a function of weights, or of such functions. None where the
    kernels do not take the weights."""
    make, twin = getattr(_LAUNCH, name), getattr(rest_twin, name)

    def made(*given: Any) -> Any:
        launch = make(*_parts(given, "launch"))
        return None if launch is None else _Made(launch, twin(*near(_parts(given, "compute"))))

    return made


def _parts(given: Any, name: str) -> Any:
    """`given`, and of each `_Made` in it the part `name`."""
    if isinstance(given, (list, tuple)):
        return type(given)(_parts(one, name) for one in given)
    return getattr(given, name) if isinstance(given, _Made) else given


_MAKERS = ("rest", "normed_product", "packed_row")
for _name in " ".join(row.names for row in FORMS if row.gpu).split():
    _launch = getattr(_LAUNCH, _name)
    if _name not in ("evict", "append_evict") and _launch is not getattr(Kernels, _name):
        _wrapped = _made(_name) if _name in _MAKERS else _both(_launch, _torch_form(_name))
        setattr(_Kernels, _name, staticmethod(_wrapped))
_Kernels.evict = {n: _both(kernel, step_oracle.EVICT[n]) for n, kernel in _LAUNCH.evict.items()}
_Kernels.append_evict = {
    n: _both(kernel, step_oracle.APPEND_EVICT[n]) for n, kernel in _LAUNCH.append_evict.items()
}


class Bench:
    """Makes engines and counts what they launch. One a process, which then launches on the stub.

    A count is by kind and name: ("triton", "split"), ("torch", "mm").
    """

    def __init__(self, folder: Path) -> None:
        self.launches = stub_driver.install(folder)
        stand_in.install()
        self.torch = Counts()
        self.finished: Count = Counter()
        self._nets: dict[tuple[int, int | None, torch.dtype, str], Llama] = {}
        finish = Prefill.finish

        def counted(prefill: Prefill, layer: int) -> None:
            with self.counted() as found:
                finish(prefill, layer)
            self.finished += found

        Prefill.finish = counted  # type: ignore[method-assign]

    @contextmanager
    def counted(self) -> Iterator[Count]:
        """The counter is complete when this ends."""
        found: Count = Counter()
        before = self._total()
        yield found
        found.update(self._total() - before)

    def _total(self) -> Count:
        found: Count = Counter()
        found.update({("triton", name): n for name, n in self.launches.total().items()})
        found.update({("torch", name): n for name, n in self.torch.operators.items()})
        found.update({("sent", ""): self.torch.sent, ("fetched", ""): self.torch.fetched})
        return found

    def engine(self, case: Case, layers: int, dtype: torch.dtype = torch.bfloat16) -> Engine:
        """An engine on the stand-in of a GPU."""
        net = self._net(layers, WINDOW if case.kept == "windows" else None, dtype, case.weights)
        shape = Shape(layers, KV_HEADS, HEADS, HEAD_DIM, net.config.windows, net.config.max_context)
        decode = "auto" if case.stride else case.decode
        eviction = EvictionConfig.read(
            case.policy, decode, case.budget, dict(case.options), 0, case.stride
        )
        kv = KVCache(
            shape,
            eviction.rules(),
            dtype=net.dtype,
            device=GPU,
            kv=torch.int8 if case.kept == "int8" else None,
            output=lambda i: net.layers[i].out.dense().T.unflatten(0, (KV_HEADS, -1, HEAD_DIM)),
            rotary=net.rotation,
            kernels="torch",
        )
        kv.use(_Kernels())
        net.use(kv.ops)
        return Engine(net, kv, Eager())

    def _net(
        self, layers: int, window: int | None, dtype: torch.dtype, weights: str = "auto"
    ) -> Llama:
        key = (layers, window, dtype, weights)
        if key not in self._nets:
            here, net = (self.network(layers, window, d, dtype) for d in (torch.device("cpu"), GPU))
            for (_, mine), (_, theirs) in zip(net.tensors(), here.tensors(), strict=True):
                mine.copy_(theirs)
            self._nets[key] = net if weights == "auto" else packed(net, weights)
        return self._nets[key]

    @staticmethod
    def network(layers: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Llama:
        """A network; on a CPU its weights are random."""
        config = small.config(
            (window,) * layers,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            hidden=HEADS * HEAD_DIM,
            mlp=512,
            vocab=VOCAB,
        )
        net = Llama(config, rows=CHUNK, dtype=dtype, device=device)
        return net.randomise(0, std=0.1) if device.type == "cpu" else net


def packed(net: Llama, form: str) -> Llama:
    """The network, with the matrices of its layers packed as on a GPU."""

    def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=GPU)

    for layer in net.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            plain = getattr(layer, name)
            assert isinstance(plain, Plain)
            setattr(layer, name, kept(plain, form, room, packing=None))
    return net


def ids(count: int, seed: int) -> list[int]:
    """Random token ids."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=made).tolist()


def step_row(bench: Bench, case: Case, sampling: Sampling | None) -> dict[str, Count]:
    """What a step of an answer launches, after others like it; without `sampling` one that the
    host waits for."""
    found = []
    for layers in LAYERS:
        engine = bench.engine(case, layers)
        token = token_of(engine.prompt(ids(CHUNK - 9, 0)))
        for _ in range(2):
            with bench.counted() as counted:
                if sampling is None:
                    token = token_of(engine.step(token))
                else:  # this step, and the next one ahead
                    token = engine.next(token, VOCAB, sampling, 0)
        assert not engine.notices, engine.notices
        found.append(counted)
    layer = _less(found[1], found[0])
    return {"layer": layer, "beside": _less(found[0], layer, LAYERS[0])}


def prompt_rows(bench: Bench, case: Case, *, whole: bool = True) -> list[dict[str, Count]]:
    """What a first prompt launches, and one behind it and a step. whole: also what one chunk more
    adds."""
    runs: dict[tuple[int, int], list[Count]] = {}
    ends: dict[tuple[int, int], list[Count]] = {}
    for layers in LAYERS:
        for chunks in (1, 2) if whole else (1,):
            key = layers, chunks
            runs[key], ends[key] = prompt_runs(bench, case, layers, case.chunks + chunks - 1)
    rows = []
    few, more = LAYERS
    for turn in range(2):
        n = {key: each[turn] for key, each in runs.items()}
        layer = _less(n[more, 1], n[few, 1])
        row = {
            "layer": layer,
            "finish": _less(ends[more, 1][turn], ends[few, 1][turn]),
            "beside": _less(n[few, 1], layer, few),
        }
        if whole:
            chunk = _less(_less(n[more, 2], n[more, 1]), _less(n[few, 2], n[few, 1]))
            row["chunk"] = chunk
            row["beside_chunk"] = _less(_less(n[few, 2], n[few, 1]), chunk, few)
        rows.append({part: row[part] for part in PARTS if part in row})
    return rows


def prompt_runs(
    bench: Bench, case: Case, layers: int, chunks: int
) -> tuple[list[Count], list[Count]]:
    """What a first prompt and a later one launch; and of that, what chooses and moves the rows."""
    engine = bench.engine(case, layers)
    runs, ends = [], []
    for turn in range(2):
        bench.finished.clear()
        with bench.counted() as counted:
            logits = engine.prompt(ids(chunks * CHUNK - 9, turn))
        runs.append(counted)
        ends.append(bench.finished.copy())
        engine.next(token_of(logits), VOCAB, Sampling(), 0, ahead=False)
    assert not engine.notices, engine.notices
    return runs, ends


def token_of(logits: Tensor) -> int:
    """The token of the largest logit."""
    with uncounted():
        return int(near(logits).argmax())


def _less(a: Count, b: Count, times: int = 1) -> Count:
    """a - times * b; a number may be negative."""
    return Counter({key: a[key] - times * b[key] for key in a | b if a[key] != times * b[key]})


# -- the table --------------------------------------------------------------------------------

TABLE = Path(__file__).with_name("table.json")
KEPT = ("", "int8", "windows")
SAMPLINGS = {
    "temperature": Sampling(temperature=0.8),
    "top_p": Sampling(temperature=0.8, top_p=0.9),
    "top_k top_p min_p": Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05),
    "repeat_penalty": Sampling(repeat_penalty=1.1),
    "waited for": None,
}
_EVERY_WAY = ("full", "snapkv")
"""Prompt policies that are counted in every way of keeping rows, and in prompts of two chunks."""
_ONE_CHUNK = (("full", "windows"), ("snapkv", "int8"))
"""Of them and ways of keeping rows: prompts of one chunk only. Each of these values meets two
chunks in another pair."""
_STEPS = ("none", "roco", "hashevict")
"""Step policies that are counted in every way of keeping rows."""

Row = dict[str, list[int]]
Rows = dict[str, Row]


_MANY_ROWS = 18  # chunks after which several programs search the rows of a layer


def step_cases() -> list[Case]:
    """Every step policy behind a prompt policy. A full cache is without both."""
    pairs = [("full" if name == "none" else "snapkv", name) for name in policies.step_names()]
    more = [Case("snapkv+turns", "roco")]  # some rows leave last
    more += [Case("full", "none", weights=form) for form in ("int8", "int4")]
    ways = ((*pair, kept) for kept in KEPT for pair in pairs)
    return [*(Case(*w) for w in ways if not w[2] or w[1] in _STEPS), *more]


def prompt_cases() -> list[Case]:
    """Every prompt policy; a step policy that notes what a prompt's queries see; and some that read
    it in blocks."""
    found = [Case(name, "none") for name in policies.prompt_names()]
    found += [Case(name, "none", kept) for name in _EVERY_WAY for kept in KEPT if kept]
    found += [Case("full", "none", weights=form) for form in ("int8", "int4")]
    found += [Case("snapkv", "roco"), Case("adakv", "none", chunks=_MANY_ROWS)]
    return [*found, *block_cases()]


def block_cases() -> list[Case]:
    """Step policies that read the prompt in blocks; one with so many rows that attention divides
    them."""
    names = "roco", "scissorhands", "hashevict", "rkv"
    found = [Case(name, name, stride=CHUNK // 4) for name in names]
    return [*found, Case("h2o", "h2o", stride=CHUNK // 4, budget=300)]


def steps(bench: Bench) -> Rows:
    """The table's part about steps: also of steps that sample, and of one that the
    host waits for."""
    found = {case.name: _kinds(step_row(bench, case, Sampling())) for case in step_cases()}
    for name, sampling in SAMPLINGS.items():
        found[f"full/none {name}"] = _kinds(step_row(bench, Case("full", "none"), sampling))
    return found


def prompts(bench: Bench) -> Rows:
    """The table's part about prompts."""
    found = {}
    for case in prompt_cases():
        two = case.policy in _EVERY_WAY and (case.policy, case.kept) not in _ONE_CHUNK
        first, later = prompt_rows(bench, case, whole=two)
        found |= {f"{case.name} first": _kinds(first), f"{case.name} later": _kinds(later)}
    return found


def _kinds(row: dict[str, Count]) -> Row:
    def sums(part: Count) -> list[int]:
        return [sum(n for (kind, _), n in part.items() if kind == wanted) for wanted in KINDS]

    return {name: sums(part) for name, part in row.items()}


def text(table: Mapping[str, object]) -> str:
    """The table as JSON, a row on a line."""
    parts = []
    for name, value in table.items():
        if isinstance(value, dict):
            rows = (f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
            parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


# -- kernels that are compiled in the middle of a turn ------------------------------------------


def late(bench: Bench, case: Case) -> dict[str, int]:
    """How many builds of which kernels are made by two turns after the warm-up. Prompts have one
    token, few, a chunk, and more than one."""
    bench.launches.forget()
    engine = bench.engine(case, LAYERS[-1])
    warm(engine.kv, engine.network)
    assert engine.kv.notice is None, engine.kv.notice
    before = bench.launches.builds.copy()
    for turn, tokens in enumerate((2 * CHUNK + 5, 1, 7, CHUNK, 3 * CHUNK - 1)):
        token = token_of(engine.prompt(ids(tokens, turn)))
        for _ in range(2):
            token = engine.next(token, VOCAB, Sampling(), 0)
    return dict(bench.launches.builds - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("what", nargs="*", help="with --late: cases, as POLICY/STEP")
    parser.add_argument("--json", type=Path, help="write here, too")
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--late", action="store_true", help="what is compiled after the warm-up")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        with bench.torch:
            found = lates(bench, asked.what) if asked.late else counted(bench)
    print(text(found), end="")
    if asked.json is not None:
        asked.json.write_text(text(found))
    if asked.write:
        TABLE.write_text(text(found))
    return 0


def lates(bench: Bench, names: Sequence[str]) -> dict[str, Any]:
    """`late` of these cases, or of every step policy."""
    cases = [Case(*name.split("/")) for name in names] or [*step_cases(), *block_cases()]
    return {"late": {case.name: late(bench, case) for case in cases}}


def counted(bench: Bench) -> dict[str, Any]:
    """The table."""
    found: dict[str, Any] = {"columns": list(KINDS)}
    kernels: dict[str, list[str]] = {}
    for part, count in (("steps", steps), ("prompts", prompts)):
        bench.launches.builds.clear()
        bench.launches.forget()
        found[part] = count(bench)
        kernels[part] = sorted(name.strip("_") for name in bench.launches.builds)
    return {**found, "kernels": kernels}


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Help as it is written."""


if __name__ == "__main__":
    sys.exit(main())

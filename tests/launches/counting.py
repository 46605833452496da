"""What a prompt and a step launch on a GPU, counted without one.

    python tests/launches/counting.py [POLICY/STEP ...]         by default every policy
    python tests/launches/counting.py --late [POLICY/STEP ...]  kernels that a turn compiles after
                                                                the warm-up

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

A row is a straight line through runs of one layer and of two: `layer` is what one layer more adds,
and `beside` is the rest, which may be negative: of a prompt's last layer only the last token is
needed. `first` is a prompt into an empty cache, `step` one of an answer, after others like it, and
`later` a prompt behind that answer, each of one chunk. There are 8 KV heads, which matters where
code loops over heads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import small
import stand_in
import step_oracle
import stub_driver
import tail_twin
import torch
from small import ids
from stand_in import GPU, Counts, near, uncounted
from torch import Tensor
from torch.utils._pytree import tree_leaves

from minikv import policies
from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.capture import Eager
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.engine.warmup import warm
from minikv.kernels.dispatch import FORMS, Kernels, on_gpu
from minikv.models.linear import Plain, kept, unpack_int4_rows
from minikv.models.llama import Llama
from minikv.models.tensors import randomise, tensors_of

Count = Counter[tuple[str, str]]
LAYERS = (1, 2)
HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 8, 16, 128
CHUNK = 64
WINDOW = 48
BUDGET = 40
GREEDY = Sampling()
KINDS = ("triton", "torch", "sent", "fetched")


@dataclass(frozen=True, slots=True)
class Case:
    """What is counted. kept: "int8" keys and values, or "windows": layers with a sliding window;
    stride: with it, the step policy also reads the prompt; weights: how the matrices of the layers
    are kept, one of `linear.FORMS`; sampling: of the answer's tokens."""

    policy: str
    decode: str
    kept: str = ""
    stride: int = 0
    weights: str = "auto"
    sampling: Sampling = GREEDY


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
        return _both(self.launch, self.compute)(*args)


def _made(name: str) -> Callable[..., Any]:
    """Of an operation that makes a function of weights, or of such functions. None where the
    kernels do not take the weights."""
    make, twin = getattr(_LAUNCH, name), getattr(tail_twin, name)

    def made(*given: Any) -> Any:
        launch = make(*_parts(given, "launch"))
        return None if launch is None else _Made(launch, twin(*near(_parts(given, "compute"))))

    return made


def _parts(given: Any, name: str) -> Any:
    """`given`, and of each `_Made` in it the part `name`."""
    if isinstance(given, (list, tuple)):
        return type(given)(_parts(one, name) for one in given)
    return getattr(given, name) if isinstance(given, _Made) else given


_MAKERS = ("layer_tail", "normed_product", "packed_row")
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
        self._nets: dict[tuple[int, int | None, torch.dtype, str], Llama] = {}

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
        eviction = EvictionConfig.read(case.policy, decode, BUDGET, {}, 0, case.stride)
        place: Any = {"dtype": net.dtype, "device": GPU, "rotary": net.rotation, "kernels": "torch"}
        kv = KVCache(
            shape,
            eviction.rules(),
            kv=torch.int8 if case.kept == "int8" else None,
            output=lambda i: net.layers[i].out.dense().T.unflatten(0, (KV_HEADS, -1, HEAD_DIM)),
            **place,
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
            for (_, mine), (_, theirs) in zip(tensors_of(net), tensors_of(here), strict=True):
                mine.copy_(theirs)
            self._nets[key] = net if weights == "auto" else packed(net, weights)
        return self._nets[key]

    @staticmethod
    def network(layers: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Llama:
        """A network; on a CPU its weights are random."""
        sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab": VOCAB}
        config = small.config((window,) * layers, hidden=HEADS * HEAD_DIM, mlp=512, **sizes)
        net = Llama(config, rows=CHUNK, dtype=dtype, device=device)
        return randomise(net, std=0.1) if device.type == "cpu" else net


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


def rows(bench: Bench, case: Case) -> dict[str, str]:
    """What a first prompt, a step and a later prompt launch: `layer` + `beside`, by `KINDS`."""
    few, more = (launched(bench, case, layers) for layers in LAYERS)
    found = {}
    for name, one in few.items():
        layer = _less(more[name], one)
        found[name] = f"{_kinds(layer)} + {_kinds(_less(one, layer, LAYERS[0]))}"
    return found


def launched(bench: Bench, case: Case, layers: int) -> dict[str, Count]:
    """The same with so many layers."""
    engine, found = bench.engine(case, layers), dict[str, Count]()
    with bench.counted() as found["first"]:
        logits = engine.prompt(ids(CHUNK - 9, 0))
    token = token_of(logits)
    for _ in range(2):
        with bench.counted() as found["step"]:  # this step, and the next one ahead
            token = engine.next(token, VOCAB, case.sampling, 0)
    with bench.counted() as found["later"]:
        engine.prompt(ids(CHUNK - 9, 1))
    assert not engine.notices, engine.notices
    return found


def token_of(logits: Tensor) -> int:
    """The token of the largest logit."""
    with uncounted():
        return int(near(logits).argmax())


def _less(a: Count, b: Count, times: int = 1) -> Count:
    """a - times * b; a number may be negative."""
    return Counter({key: a[key] - times * b[key] for key in a | b if a[key] != times * b[key]})


def every_case() -> list[Case]:
    """Every prompt policy; every step policy, behind a prompt policy; other ways to keep rows and
    weights; and some that read the prompt in blocks."""
    found = [Case(name, "none") for name in policies.prompt_names()]
    found += [Case("snapkv", name) for name in policies.step_names() if name != "none"]
    steps = "none", "roco", "hashevict"
    found += [Case("snapkv", name, kept) for name in steps for kept in ("int8", "windows")]
    found += [Case("full", "none", weights=form) for form in ("int8", "int4")]
    found.append(Case("snapkv+turns", "roco"))  # some rows leave last
    blocks = "h2o", "roco", "scissorhands", "hashevict", "rkv"
    return [*found, *(Case(name, name, stride=CHUNK // 4) for name in blocks)]


def _kinds(part: Count) -> str:
    sums = (sum(n for (kind, _), n in part.items() if kind == wanted) for wanted in KINDS)
    return " ".join(map(str, sums))


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="POLICY/STEP")
    parser.add_argument("--late", action="store_true", help="what is compiled after the warm-up")
    asked = parser.parse_args()
    cases = [Case(*name.split("/")) for name in asked.cases] or every_case()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        with bench.torch:
            for case in cases:
                found = late(bench, case) if asked.late else rows(bench, case)
                print(f"{case.policy}/{case.decode}{' in blocks' * bool(case.stride)}: {found}")


if __name__ == "__main__":
    main()

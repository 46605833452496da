"""`minikv doctor`: checks this machine and the hub, and tests every pair of policies on a tiny
network.

Each check is one line that begins with ok, warning or failed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.cli.screen.terminal import OutputError
from minikv.cli.settings.config import Interface, worded
from minikv.cli.settings.flags import Call, Only, alone
from minikv.models import refuse_without_torch
from minikv.policies import prompt_names, step_names
from minikv.settings import Settings

if TYPE_CHECKING:
    from minikv.cache.kv_cache import KVCache
    from minikv.models.llama import Llama

OK, WARNING, FAILED = "ok", "warning", "failed"
_PATIENCE = 5.0  # seconds to wait for the hub
_LITTLE = 5 << 30  # with fewer bytes of free disk, a model will hardly fit
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_SHOWN = 8  # failing pairs that are named
_STRIDE = 8  # of the self-test


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check. state: ok, warning or failed. hint: what to do."""

    state: str
    detail: str
    hint: str = ""


@alone
def doctor(
    call: Call,
    settings: Annotated[Settings, Only("offline")],
    interface: Annotated[Interface, Only("debug")],
) -> None:
    """minikv doctor

    Check versions, processor, memory, disk and hub, then test every policy on a tiny random model.
    Exit code 1 if a check failed.
    """
    refuse_without_torch()
    terminal, offline = call.terminal, settings.offline
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if offline:  # the hub library reads it once, when imported
        os.environ["HF_HUB_OFFLINE"] = "1"
    looks: Mapping[str, Callable[[], Check | list[Check]]] = {
        "versions": versions,
        "cpu": cpu,
        "gpu": gpu,
        "kernels": kernels,
        "memory": memory,
        "models": disk,
        "hub": lambda: hub(offline),
        "policies": lambda: policies(terminal.status),
    }
    bad = False
    for name, look in looks.items():
        try:
            found = look()
        except (BrokenPipeError, OutputError):
            raise
        except Exception as error:  # a check that raises an error has failed
            found = Check(FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}")
        terminal.clear_status()
        for check in found if isinstance(found, list) else [found]:
            bad = bad or check.state == FAILED
            terminal.data(line(name, check), fold=True)
    if bad:
        raise typer.Exit(1)


def line(name: str, check: Check) -> str:
    """A check as text; the hint has its own line."""
    hint = f"\n{'':9}{check.hint}" if check.hint else ""
    return f"{check.state:<8} {name:<9} {check.detail}{hint}"


# -- the machine ----------------------------------------------------------------------------


def versions() -> Check:
    """minikv, Python, and the libraries that compute."""
    import torch

    triton = _version("triton")
    lacks = torch.cuda.is_available() and triton is None
    parts = [
        f"minikv {minikv.__version__}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"triton {triton}" if triton else "no triton",
        f"tokenizers {_version('tokenizers')}",
        f"huggingface-hub {_version('huggingface-hub')}",
    ]
    hint = "pip install triton, for faster kernels on the GPU" if lacks else ""
    return Check(WARNING if lacks else OK, ", ".join(parts), hint)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu() -> Check:
    """The cores that this process may use, and their instructions for half precision."""
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = usable or os.cpu_count() or 1
    name, known = cpu_facts()
    has = [flag for flag in _FLAGS if flag in known]
    detail = (
        f"{name or platform.machine()}, {cores} usable core{'s' if cores > 1 else ''}, "
        f"{torch.get_num_threads()} threads; {', '.join(has) if has else 'instructions not known'}"
    )
    slow = bool(known) and not known & {"avx512_bf16", "amx_bf16", "bf16"}
    # In float32 a step would read twice as many bytes of weights.
    note = (
        "no products of bfloat16: prompts are multiplied in float32; answers are still written "
        "faster in bfloat16, which takes half the memory"
    )
    return Check(OK, detail, note if slow else "")


def cpu_facts(path: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    """The first processor's name and instructions, as far as the system reports them."""
    facts = dict[str, str]()
    with contextlib.suppress(OSError):
        for text in path.read_text(errors="replace").splitlines():
            key, _, value = text.partition(":")
            facts.setdefault(key.strip(), value.strip())
    return facts.get("model name", ""), {*facts.get("flags", facts.get("Features", "")).split()}


def gpu() -> list[Check]:
    """Every CUDA device, or a line that says there is none."""
    import torch

    if not torch.cuda.is_available():
        return [Check(OK, "none that torch can use; minikv runs on the CPU")]
    made = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        named = f"cuda:{index} {torch.cuda.get_device_name(index)}"
        room = f"{size(free)} of {size(total)} free"
        made.append(Check(OK, f"{named}, {room}, compute capability {major}.{minor}"))
    return made


def kernels() -> Check:
    """The kernels that a chat would use, and on a CPU the class of the processor, which decides
    that. The first time, this compiles the C kernels of a CPU."""
    import torch

    from minikv.cache.kv_cache import KVCache
    from minikv.cache.stats import Shape

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = KVCache(Shape(1, 1, 1, 64, (None,), 64), dtype=torch.bfloat16, device=device)
    who = {"triton": "Triton's", "native": "in C, compiled on this machine"}
    found = who.get(made.ops.name, "plain torch")
    if made.ops.choices:
        found = f"{found}; processor class {made.ops.choices}"
    if made.notice is None:
        return Check(OK, found)
    hint = "install gcc or clang" if "compiler" in made.notice else ""
    return Check(WARNING, f"{found}: {made.notice}", hint)


def memory() -> Check:
    """Free memory, within a container's limit."""
    import torch

    from minikv.models.weights import free_memory

    free = free_memory(torch.device("cpu"))
    if free is None:
        return Check(WARNING, "the system does not say how much is free")
    if free < 1 << 30:
        return Check(WARNING, f"{size(free)} free", "only small models will load")
    return Check(OK, f"{size(free)} free")


def disk() -> Check:
    """Where models are stored, and the free space there."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    there = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    hint = ""
    if not os.access(there, os.W_OK):
        hint = "not writable: set HF_HOME to a directory that is"
    elif free < _LITTLE:
        hint = "a 7B model takes about 15 GiB; `hf cache rm` or another HF_HOME makes room"
    new = "" if folder.exists() else ", does not exist yet"
    return Check(WARNING if hint else OK, f"{folder}{new}, {size(free)} free", hint)


# -- the hub --------------------------------------------------------------------------------


def hub(offline: bool) -> Check:
    """Whether the hub answers, and accepts the token if there is one. The token is never shown."""
    import huggingface_hub

    named = [n for n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(n)]
    known = huggingface_hub.get_token() is not None
    where = "no token; gated models need one (`hf auth login`)"
    if named or known:
        where = f"token {f'set by {named[0]}' if named else 'stored by `hf auth login`'}"
    if offline:
        return Check(OK, f"not contacted: offline; {where}")
    answer: list[str | Exception] = []

    def ask() -> None:
        try:
            hub = huggingface_hub.HfApi()
            if not known:
                hub.model_info("HuggingFaceTB/SmolLM2-135M-Instruct")
            answer.append(str(hub.whoami().get("name", "")) if known else "")
        except Exception as error:
            answer.append(error)

    # In a thread, because the library has no time limit for some waits.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if answer and isinstance(answer[0], str):
        said = f"the token works, as {answer[0]}" if known else "it answers"
        return Check(OK, f"{said}; {where}")
    status = getattr(getattr(answer[0], "response", None), "status_code", None) if answer else None
    if known and status in (401, 403):
        return Check(FAILED, f"it refuses the {where}", "`hf auth login` stores another")
    if status is not None:
        return Check(WARNING, f"it answers with HTTP status {status}; {where}", "try again later")
    # The error's own text is left out: it may contain addresses with tokens.
    return Check(WARNING, f"it could not be reached; models in the cache still work; {where}")


# -- the self-test --------------------------------------------------------------------------


def policies(progress: Callable[[str], None]) -> list[Check]:
    """Test every pair of policies on a tiny network, and every step policy also with a stride."""
    began = perf_counter()
    cases = [(prompt, step, 0) for prompt in prompt_names() for step in step_names()]
    cases += [(step, "auto", _STRIDE) for step in step_names() if step != "none"]
    bad: list[Check] = []
    with one_thread():
        net = tiny()
        for i, (policy, decode, stride) in enumerate(cases):
            progress(f"testing policies  {i}/{len(cases)}")
            if wrong := attempt(net, policy, decode, stride):
                label = f"--stride {stride}" if stride else f"then {decode}"
                bad.append(Check(FAILED, f"{policy}, {label}: {wrong}"))
    if bad:
        more = f"; {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        return [Check(FAILED, f"{len(bad)} of {len(cases)} pairs{more}"), *bad[:_SHOWN]]
    detail = (
        f"{len(cases)} pairs in {perf_counter() - began:.1f} s: reading exact, budget held, "
        "positions unique, logits finite"
    )
    return [Check(OK, detail)]


def tiny() -> Llama:
    """A random network of two layers, with weights large enough that attention is not uniform."""
    from minikv.models.config import ModelConfig
    from minikv.models.llama import Llama
    from minikv.models.rope import RopeConfig
    from minikv.models.tensors import randomise

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
    return randomise(Llama(config, rows=64), std=0.3)


def attempt(net: Llama, policy: str, decode: str, stride: int) -> str:
    """Read and write two turns. Returns "", or what went wrong."""
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
    """Check the tokens held: at most `bound` per head on average. Returns "", or what is wrong."""
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

"""`minikv doctor`: checks this machine and the hub, and lets the bundled model answer a question.

Each check is one line that begins with ok, warning or failed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

import minikv
from minikv.chat.report import amount, size
from minikv.cli.screen.terminal import OutputError
from minikv.cli.settings.config import Interface
from minikv.cli.settings.flags import Call, Only, alone
from minikv.models import refuse_without_torch
from minikv.settings import Settings

OK, WARNING, FAILED = "ok", "warning", "failed"
_PATIENCE = 5.0  # seconds to wait for the hub
_LITTLE = 5 << 30  # with fewer bytes of free disk, a model will hardly fit
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")

# The self-test: tokens per head, the part of the bundled document, and a question about it.
_BUDGET, _CHARACTERS, _QUESTION = 64, 3000, "Who leads Project Faithful Swallow?"
_TOLERANCE = 0.5  # of a logit: another order of sums may change the order of two likely tokens


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

    Check versions, processor, memory, disk and hub, then compare an answer of the bundled model
    with attention without a cache. Exit code 1 if a check failed.
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
        "self-test": self_test,
    }
    bad = False
    for name, look in looks.items():
        terminal.status(f"checking: {name}")
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


def self_test() -> Check:
    """Let the bundled model answer from a cache under the default policies, and compare each token
    of the answer with the logits of attention without a cache."""
    import torch

    from minikv.cache.attend import DenseAttend
    from minikv.models import BUNDLED

    began = perf_counter()
    with minikv.load(budget=_BUDGET, remember="off") as chat:
        chat.attach((BUNDLED / "sample.txt").read_text()[:_CHARACTERS])
        answer = "".join(chat.ask(_QUESTION, max_tokens=16))
        assert chat.report is not None
        tokens = chat.report.tokens
        net: Any = chat.engine.network
        ids = torch.tensor(chat.fed, device=net.device)
        dense = DenseAttend(net.config.windows)
        dense.begin(len(ids))
        with torch.inference_mode():
            logits = net.logits(net.hidden(ids, dense))[tokens.prompt_new - 1 : -1]
        written = logits.gather(1, ids[tokens.prompt_new :, None])[:, 0]
        worst = float((logits.amax(1) - written).max())
    detail = f"the bundled model answers {answer!r} from {tokens.kept_mean:.0f} of "
    detail += f"{amount(tokens.seen_total, 'token')} per head"
    if tokens.kept_mean > _BUDGET:
        return Check(FAILED, f"{detail}, over the budget of {_BUDGET}")
    if not worst < _TOLERANCE:
        return Check(FAILED, f"{detail}, unlike attention without a cache (off by {worst:.2g})")
    return Check(OK, f"{detail}, as without a cache; {perf_counter() - began:.1f} s")

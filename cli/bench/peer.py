"""A system in a process of its own, with its own threads, memory and allocator.

transformers is measured if it is installed. Only such a process imports it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from importlib import util
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import device, machine, models
from minikv.cli.bench.cached import Cached
from minikv.cli.failures import explain
from minikv.errors import MemoryShortError, MinikvError

NAME = "transformers"


class PeerError(MinikvError):
    """The other system could not be measured. The other measurements continue."""


class System(Protocol):
    """What a process measures: seconds of a prompt, and of a step, mean over so many."""

    device: torch.device
    vocab: int

    def read(self, ids: list[int]) -> float: ...
    def write(self, steps: int) -> float: ...


class Process:
    """The system that `make(*arguments)` returns, in another process. `make` is a function of a
    module: the process imports it."""

    def __init__(self, name: str, make: Callable[..., System], *arguments: object) -> None:
        """Raises PeerError and MemoryShortError, as every question does."""
        self.name = name
        context = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._ask("start", 0)
        except BaseException:
            self.close()
            raise

    def read(self, ids: Sequence[int]) -> float:
        """Seconds for a prompt of as many random tokens as `ids` has."""
        return self._ask("read", len(ids))

    def write(self, steps: int) -> float:
        """Seconds of a step, mean over so many."""
        return self._ask("write", steps)

    def peak(self) -> int:
        """Bytes at the high-water mark of the process (on a GPU: of its allocator)."""
        return int(self._ask("peak", 0))

    @property
    def alive(self) -> bool:
        """Whether the process can still be asked."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _ask(self, what: str, number: int) -> float:
        try:
            self._pipe.send((what, number))
            error, short, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            if code == -signal.SIGKILL:
                raise MemoryShortError(
                    f"{self.name} was killed, most likely for its memory",
                    "a smaller --shape or --length",
                ) from None
            raise PeerError(f"{self.name} ended with status {code}") from None
        if error:
            raise (MemoryShortError if short else PeerError)(f"{self.name}: {error}")
        return float(value)


def _serve(pipe: Connection, make: Callable[..., System], arguments: Sequence[object]) -> None:
    """Answer until the other end is closed: (error, whether memory was short, value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that shows results
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    system: System | None = None
    while True:
        try:
            what, number = pipe.recv()
        except EOFError:
            return
        try:
            value: float | None = 0.0
            if system is None:
                system = make(*arguments)
            elif what == "read":
                value = system.read(models.prompt(number, system.vocab))
            elif what == "write":
                value = system.write(number)
            else:
                value = machine.peak(system.device)
                if value is None:
                    raise OSError("the system does not say how much memory a process has had")
            pipe.send(("", False, value))
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            pipe.send((said, explain(error).code == 4, 0.0))


def minikv(spec: models.Spec, threads: int, eviction: EvictionConfig) -> Cached:
    """minikv as such a system."""
    device.prepare(spec.device, threads)
    return Cached(models.network(spec), eviction, spec.kernels, spec.kv)


def installed() -> bool:
    """Whether transformers is there."""
    return util.find_spec(NAME) is not None


def transformers(spec: models.Spec, threads: int) -> Transformers:
    """transformers as such a system."""
    device.prepare(spec.device, threads)
    return Transformers(spec)


class Transformers:
    """A Llama of transformers with torch's attention and a cache that grows.

    Its loop is only the forward pass and an argmax, without the overhead of `generate`: the
    comparison favours transformers.
    """

    def __init__(self, spec: models.Spec) -> None:
        library = importlib.import_module(NAME)
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        self.device, self.dtype = torch.device(spec.device), getattr(torch, spec.dtype)
        if spec.folder is not None:
            self.model: Any = library.AutoModelForCausalLM.from_pretrained(
                str(spec.folder),
                dtype=self.dtype,
                attn_implementation="sdpa",
                local_files_only=True,
            ).to(self.device)
        else:
            self.model = _random(library, spec)
        self.model.eval()
        self.vocab = int(self.model.config.vocab_size)
        self._clock = machine.Clock(self.device)
        self._new_cache = library.DynamicCache
        self._cache: Any = None
        self._token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)

    def read(self, ids: list[int]) -> float:
        """Seconds for a prompt into a new cache; logits of its last token only, as `generate` has
        them."""
        self._cache = self._new_cache(config=self.model.config)
        given = torch.tensor([ids], device=self.device)
        return self._clock(lambda: self._forward(given))

    def write(self, steps: int) -> float:
        """Seconds of a step, mean over so many; greedy, and the token stays on the device."""

        def run() -> None:
            for _ in range(steps):
                self._forward(self._token)

        return self._clock(run) / steps

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> None:
        made = self.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._token = made.logits[:, -1].argmax(-1, keepdim=True)


def _random(library: Any, spec: models.Spec) -> Any:
    """A model whose parameters are the tensors of minikv's own random network, not copies."""
    sizes = spec.sizes
    assert sizes is not None
    config = library.LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocab,
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=models.POSITIONS,
        tie_word_embeddings=sizes.tied,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": sizes.theta},
    )
    weights = dict(models.plain(spec).tensors())
    with torch.device("meta"):
        model = library.LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True, strict=not sizes.tied)
    if sizes.tied:
        model.tie_weights()
    # The angles are no weights: they were made on the meta device, which has no memory.
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    model.model.rotary_emb = llama.LlamaRotaryEmbedding(config=config).to(spec.device)
    return model

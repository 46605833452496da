"""The measured systems: minikv under one policy, and transformers if it is installed.
Only this file uses minikv's engine and imports transformers.

Each reads a prompt and writes tokens. `facts` has its configuration, for JSON.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import util
from types import MappingProxyType
from typing import Any

import torch

from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import networks
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.loader import output_of, shape_of
from minikv.models.llama import Llama

PEER = "transformers"
_GREEDY = Sampling()


class Cached:
    """A network under one policy: reads a prompt, writes tokens, and reports its cache."""

    def __init__(
        self,
        net: Llama,
        eviction: EvictionConfig,
        kernels: str = "auto",
        kv: str = "auto",
        weights: str = "auto",
    ) -> None:
        """`kernels`, `kv` and `weights` as the flags take them. Raises UsageError for a budget that
        is too small."""
        self.net, self.eviction, self.kv = net, eviction, kv
        budget = str(eviction.budget) if eviction.evicts else "-"
        self.facts: dict[str, Any] = {
            "system": "minikv",
            "policy": eviction.policy,
            "decode": eviction.decode,
            "budget": budget,
            "weights": weights,
            "kv": kv,
        }
        same = eviction.decode in ("none", eviction.policy)
        policies = eviction.policy if same else f"{eviction.policy}+{eviction.decode}"
        named = (policies, budget, weights, f"kv {kv}")
        self.name = " ".join(x for x in named if x not in ("-", "auto", "kv auto"))
        self.device, self.vocab = net.device, net.config.vocab
        self.engine = _engine(net, eviction, kernels, kv)
        self._clock = networks.Clock(net.device)
        self._token = 0

    def read(self, ids: list[int], room: int = 256) -> float:
        """Seconds to read a prompt into a new conversation; `room`: how many steps will follow."""
        self.engine.reset()
        return self.read_on(ids, room)

    def read_on(self, ids: list[int], room: int = 256) -> float:
        """Seconds to read a further prompt of the same conversation."""

        def run() -> None:
            self._token = int(self.engine.prompt(ids, room=room).argmax())

        return self._clock(run)

    def write(self, steps: int) -> float:
        """Seconds of a step, mean over `steps`. Greedy: each step is fed the last one's token."""

        def run() -> None:
            for i in range(steps):  # no further step is launched after the last
                self._token = self.engine.next(
                    self._token, self.vocab, _GREEDY, 0, ahead=i + 1 < steps
                )

        return self._clock(run) / steps

    def stats(self) -> CacheStats:
        """The statistics of the cache, counted from its tensors."""
        return self.engine.kv.stats()

    def held(self) -> dict[str, Any]:
        """Bytes of the cache, and its tokens per head, for JSON."""
        stats = self.stats()
        names = ("held_bytes", "allocated_bytes", "full_bytes", "kept_mean", "kept_max")
        return {"kv_bytes": {x.removesuffix("_bytes"): getattr(stats, x) for x in names}}

    def step_kv_bytes(self) -> float:
        """Bytes of keys and values that a step reads."""
        config, stats = self.net.config, self.stats()
        coded = 2 * (config.head_dim + torch.float32.itemsize)  # a byte a number, and a scale
        each = coded if self.kv == "int8" else stats.row_bytes
        return stats.kept_mean * config.layers * config.kv_heads * each

    def step_bytes(self) -> dict[str, float]:
        """Bytes of weights and cache that a step reads."""
        return {"weights": networks.step_bytes(self.net), "kv": self.step_kv_bytes()}

    def close(self) -> None:
        """Free the cache."""
        self.engine.reset()


def _engine(net: Llama, eviction: EvictionConfig, kernels: str, kept_in: str) -> Engine:
    kv = KVCache(
        shape_of(net.config),
        eviction.rules(),
        dtype=net.dtype,
        device=net.device,
        kv=torch.int8 if kept_in == "int8" else None,
        output=output_of(net),
        rotary=net.rotation,
        kernels=kernels,
    )
    net.use(kv.ops if kv.ops.name != "torch" else None)
    return Engine(net, kv)


def installed() -> bool:
    """Whether transformers is installed."""
    return util.find_spec(PEER) is not None


class Transformers:
    """A Llama of transformers with torch's attention and a cache that grows.

    Its loop is only the forward pass and an argmax, without the overhead of `generate`: the
    comparison favours transformers.
    """

    name = PEER
    facts: Mapping[str, Any] = MappingProxyType(
        {
            "system": PEER,
            **dict.fromkeys(("policy", "decode", "budget", "weights"), "-"),
            "kv": "auto",
        }
    )

    def __init__(self, spec: networks.Spec, net: Llama | None = None) -> None:
        """net: a random network whose tensors become the parameters; None: load or make them."""
        library = importlib.import_module(PEER)
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
            self.model = _random(library, spec, net or networks.plain(spec))
        self.model.eval()
        self.vocab = int(self.model.config.vocab_size)
        self._clock = networks.Clock(self.device)
        self._new_cache = library.DynamicCache
        self._cache: Any = None
        self._token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)

    def read(self, ids: list[int], room: int = 0) -> float:
        """Seconds for a prompt into a new cache; computes only the logits of the last token, as
        `generate` does."""
        self._cache = self._new_cache(config=self.model.config)
        given = torch.tensor([ids], device=self.device)
        return self._clock(lambda: self._forward(given))

    def write(self, steps: int) -> float:
        """Seconds of a step, mean over `steps`; greedy, and the token stays on the device."""

        def run() -> None:
            for _ in range(steps):
                self._forward(self._token)

        return self._clock(run) / steps

    def held(self) -> dict[str, Any]:
        """Nothing: its cache was not counted."""
        return {}

    def close(self) -> None:
        """Free the cache."""
        self._cache = None

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> None:
        made = self.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._token = made.logits[:, -1].argmax(-1, keepdim=True)


def _random(library: Any, spec: networks.Spec, net: Llama) -> Any:
    """A model whose parameters are the tensors of minikv's random network, without copies."""
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
        max_position_embeddings=networks.POSITIONS,
        tie_word_embeddings=sizes.tied,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope.theta},
    )
    with torch.device("meta"):
        model = library.LlamaForCausalLM(config)
    model.load_state_dict(dict(net.tensors()), assign=True, strict=not sizes.tied)
    if sizes.tied:
        model.tie_weights()
    # The angles are not weights: they were made on the meta device, without memory.
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    model.model.rotary_emb = llama.LlamaRotaryEmbedding(config=config).to(spec.device)
    return model

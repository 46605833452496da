"""transformers on the same weights, where it is installed.

minikv itself never imports it. Only a process that was started to measure it does (see `worker`),
so that its threads, its memory and its allocator are its own.
"""

from __future__ import annotations

import importlib
from importlib import util
from typing import Any

import torch

from minikv.cli.bench import machine, models
from minikv.errors import UsageError


def installed() -> bool:
    """Whether there is anything to compare with."""
    return util.find_spec("transformers") is not None


class Transformers:
    """A Llama of transformers with torch's attention and a cache that grows.

    Its loop is the bare forward and an argmax, without what `generate` adds around them: the
    comparison errs in its favour.
    """

    def __init__(self, spec: models.Spec) -> None:
        library = importlib.import_module("transformers")
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
        self.clock = machine.Clock(self.device)
        self._new_cache = library.DynamicCache
        self._cache: Any = None
        self._token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)

    def read(self, ids: list[int]) -> float:
        """Seconds for a prompt, into a new cache; logits of its last token only, as `generate`
        asks for them."""
        self._cache = self._new_cache(config=self.model.config)
        given = torch.tensor([ids], device=self.device)
        return self.clock(lambda: self._forward(given))

    def write(self, steps: int) -> float:
        """Seconds for a step, mean over so many; greedy, and the token stays on the device."""

        def run() -> None:
            for _ in range(steps):
                self._forward(self._token)

        return self.clock(run) / steps

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> None:
        made = self.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._token = made.logits[:, -1].argmax(-1, keepdim=True)


def _random(library: Any, spec: models.Spec) -> Any:
    """A model whose parameters are the tensors of minikv's own random network, not copies."""
    sizes = spec.sizes
    if sizes is None:
        raise UsageError("a random network needs sizes")
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
    device = torch.device(spec.device)
    with torch.device("meta"):
        model = library.LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True, strict=not sizes.tied)
    if sizes.tied:
        model.tie_weights()
    # The angles are no weights: they were made on the meta device, which has no memory.
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    model.model.rotary_emb = llama.LlamaRotaryEmbedding(config=config).to(device)
    return model

"""Random checkpoints on disk, written by transformers, with the oracle that wrote them.

One-dimensional weights (norms, biases) are randomised: transformers starts them at one and zero,
under which a dropped bias or norm would go unseen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FAMILIES = {
    **{"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2"},
    **{"ministral3": "Ministral3", "qwen3": "Qwen3", "granite": "Granite", "smollm3": "SmolLM3"},
    **{"phi3": "Phi3", "olmo2": "Olmo2", "olmo3": "Olmo3", "mistral3": "Mistral3"},
}
"""What the names of transformers' classes begin with."""


def _rope(kind: str, theta: float, original: int = 0, **more: Any) -> dict[str, Any]:
    length = {"original_max_position_embeddings": original} if original else {}
    return {"rope_type": kind, "rope_theta": theta, **length, **more}


_FULL = {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.4}
_BETA = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
ROPES: dict[str, dict[str, Any]] = {
    "default": _rope("default", 10_000.0),
    "theta": _rope("default", 500_000.0),
    "linear": _rope("linear", 10_000.0, factor=4.0),
    "dynamic": _rope("dynamic", 10_000.0, factor=2.0),
    "llama3": _rope("llama3", 500.0, 64, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": _rope("yarn", 1000.0, 64, factor=4.0),
    "yarn_full": _rope("yarn", 1000.0, 64, factor=4.0, truncate=False, **_FULL),
}
OWN_ROPES: dict[str, dict[str, Any]] = {
    "ministral3": _rope("yarn", 1000.0, 7, factor=16.0, **_BETA),
    "olmo3": {
        "full_attention": _rope("yarn", 1000.0, 16, factor=8.0),
        "sliding_attention": _rope("default", 1000.0),
    },
}
VISION = {
    "model_type": "pixtral",
    **{"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "head_dim": 12},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}


@dataclass(frozen=True)
class Spec:
    """One random model. Sizes are tiny but odd, so that a swapped axis shows."""

    family: str = "llama"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    hidden: int = 48
    rope: str = "default"
    tied: bool = False
    window: int | None = None
    bias: bool = False
    mlp_bias: bool = False
    small: bool = False  # weights near zero, where norm_eps matters
    layout: str = "hf"  # hf, sharded, original
    spelling: str = "v5"  # v5, v4: how config.json spells the rotary settings
    layers: int = 2
    vocab: int = 67
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = [self.family, f"{self.heads}-{self.kv_heads}", f"d{self.head_dim or 'auto'}"]
        parts += [self.rope, self.layout, self.spelling]
        parts += [n for n in ("tied", "bias", "mlp_bias", "small") if getattr(self, n)]
        if self.window:
            parts.append(f"w{self.window}")
        return "-".join(parts)


def classes(family: str) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
    """Of its configuration and its model. transformers takes seconds to import: not every process
    that collects the tests does it."""
    import transformers

    name = FAMILIES[family]
    role = "ConditionalGeneration" if family == "mistral3" else "CausalLM"
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}For{role}")


def build(spec: Spec) -> PreTrainedModel:
    """The oracle, in float32 with eager attention."""
    config_class, model_class = classes(spec.family)
    settings: dict[str, Any] = {
        "hidden_size": spec.hidden,
        "intermediate_size": 56,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "max_position_embeddings": 256,
        "rope_parameters": dict((ROPES | OWN_ROPES)[spec.rope]),
        "tie_word_embeddings": spec.tied,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    if spec.head_dim is not None:
        settings["head_dim"] = spec.head_dim
    if spec.family not in ("mistral", "ministral", "qwen2", "mistral3"):
        settings |= {"attention_bias": spec.bias, "mlp_bias": spec.mlp_bias}
        settings |= {"pad_token_id": 0}
    if spec.family in ("qwen2", "qwen3"):
        if spec.window:
            settings |= {"use_sliding_window": True, "max_window_layers": 1}
            settings["sliding_window"] = spec.window
    elif spec.family not in ("llama", "granite", "olmo2"):
        settings["sliding_window"] = spec.window
    settings |= dict(spec.extra)
    if spec.family == "mistral3":
        settings = {"text_config": settings, "vision_config": VISION}
        settings |= {"tie_word_embeddings": spec.tied, "attn_implementation": "eager"}
    torch.manual_seed(spec.seed)
    model = model_class(config_class(**settings)).eval()
    randomise(model, small=spec.small)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel, *, small: bool = False) -> None:
    """Every weight that transformers starts at a constant becomes random."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    if small:
        model.get_input_embeddings().weight.mul_(0.02)


def save(model: PreTrainedModel, spec: Spec, folder: Path) -> Path:
    """Write the checkpoint of `model` in the layout and spelling of `spec`; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="20KB" if spec.layout == "sharded" else "1GB")
    edit_json(folder / "config.json", lambda raw: _respell(raw, spec))
    if spec.layout == "original":
        _to_original(model, folder)
    return folder


def write(spec: Spec, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """`build` and `save`."""
    model = build(spec).to(dtype)
    save(model, spec, folder)
    return model


def edit_json(path: Path, change: Any) -> None:
    """Rewrite a JSON file; `change` edits the object in place or returns another one."""
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(change(raw) or raw))


def edit_tensors(path: Path, change: Any) -> None:
    """Rewrite a safetensors file; `change` edits the dict in place or returns another one."""
    tensors = load_file(path)
    made = change(tensors) or tensors
    save_file({name: t.contiguous() for name, t in made.items()}, path, {"format": "pt"})


def _respell(raw: dict[str, Any], spec: Spec) -> None:
    """transformers 5 writes rope_parameters and dtype; version 4 wrote these three keys."""
    if spec.spelling == "v5":
        return
    table = raw.pop("rope_parameters")
    raw["torch_dtype"] = raw.pop("dtype", "float32")
    raw["rope_theta"] = table.pop("rope_theta")
    kind = table.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **table}


_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
ORIGINAL = {
    **{f"self_attn.{name}_proj": f"attention.w{name}" for name in "qkvo"},
    **{f"mlp.{name}_proj": f"feed_forward.{own}" for name, own in _PARTS.items()},
    **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
}
TOP = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
PARAMS = {
    **{"dim": "hidden_size", "n_layers": "num_hidden_layers", "head_dim": "head_dim"},
    **{"hidden_dim": "intermediate_size", "n_heads": "num_attention_heads"},
    **{"n_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps"},
    **{"vocab_size": "vocab_size", "max_position_embeddings": "max_position_embeddings"},
}
"""The keys of params.json, and what they are called in config.json."""


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Half-split rows of a query or key matrix -> rotary pairs, as the original releases have."""
    size = rows.shape[0] // heads
    places = product(range(heads), range(size // 2), range(2))
    return rows[[h * size + pair + half * (size // 2) for h, pair, half in places]]


def _to_original(model: PreTrainedModel, folder: Path) -> None:
    """consolidated.safetensors and params.json instead of the Hugging Face files."""
    config = model.config
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, kind = name.rsplit(".", 1)
        if stem in TOP:
            tensors[f"{TOP[stem]}.{kind}"] = tensor
            continue
        match = re.fullmatch(r"model\.(layers\.\d+)\.(.+)", stem)
        assert match is not None
        if ".q_proj" in name:
            tensor = interleave(tensor, config.num_attention_heads)
        elif ".k_proj" in name:
            tensor = interleave(tensor, config.num_key_value_heads)
        tensors[f"{match[1]}.{ORIGINAL[match[2]]}.{kind}"] = tensor.contiguous()
    save_file(tensors, folder / "consolidated.safetensors")
    (folder / "model.safetensors").unlink()
    if config.rope_parameters["rope_type"] != "default":
        return  # params.json cannot say it: config.json stays
    params = {key: getattr(config, name) for key, name in PARAMS.items()}
    params["rope_theta"] = config.rope_parameters["rope_theta"]
    if getattr(config, "sliding_window", None):
        params["sliding_window"] = config.sliding_window
    if config.tie_word_embeddings:
        params["tied_embeddings"] = True
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink()

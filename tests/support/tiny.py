"""A model folder that loads in a moment: random weights, a token per byte, Llama 3's markers.

The network answers with small letters and never ends its turn by itself; each letter depends on
what the cache held, so that a row too many or too few changes the answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
LAYERS, HEADS, KV_HEADS, HEAD, CONTEXT = 3, 4, 2, 12, 2048
HIDDEN, MLP = HEADS * HEAD, 56
TEMPLATE = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    **{"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD},
    **{"max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    **{"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    **{"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32"},
}


def write(folder: Path, seed: int = 0, **sizes: int) -> Path:
    """Write the model's files; another `seed` is another model. sizes: other than in `CONFIG`."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: id for id, piece in enumerate([*CONTROL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    special = {"bos_token": CONTROL[0], "eos_token": CONTROL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    config = CONFIG | {"vocab_size": len(vocab)} | sizes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, vocab, seed), str(folder / "model.safetensors"))
    return folder


def _weights(config: dict[str, Any], vocab: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, mlp, head_dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    query, kv = (head_dim * config[f"num_{of}_heads"] for of in ("attention", "key_value"))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    weights = {
        "model.embed_tokens.weight": random(len(vocab), hidden),
        "model.norm.weight": 1 + random(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, *size in (
            *(("self_attn.q", query, hidden), ("self_attn.k", kv, hidden)),
            *(("self_attn.v", kv, hidden), ("self_attn.o", hidden, query)),
            *(("mlp.gate", mlp, hidden), ("mlp.up", mlp, hidden), ("mlp.down", hidden, mlp)),
        ):
            matrix = weights[f"{at}{name}_proj.weight"] = random(*size)
            if name == "self_attn.q":  # the first KV head's queries see less, and more sharply:
                matrix[: query // kv * head_dim] *= 6  # if much more, rounding chooses what stays
        for name in ("input", "post_attention"):
            weights[f"{at}{name}_layernorm.weight"] = 1 + random(hidden)
    head = torch.zeros(len(vocab), hidden)  # logits of 0, which the best of 26 others beats
    letters = [vocab[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]
    head[letters] = random(26, hidden)
    return {**weights, "lm_head.weight": head}

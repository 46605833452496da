"""A Llama of `peers.py --export` as GGUF, for llama.cpp.

    pip install gguf
    python docs/measurements/to_gguf.py DIR model.gguf --weights bf16   # or q8_0, q4_0

The vocabulary is made up, one word a token: what is measured is fed as numbers.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def named(name: str) -> str:
    """GGUF's name of a tensor."""
    stem = name.removesuffix(".weight")
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{found[1]}.{NAMES[found[2]]}.weight"
    return f"{NAMES[stem]}.weight"


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of every head in the order that llama.cpp rotates them: x0, y0, x1, y1, ..."""
    rows, columns = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def main() -> None:
    import gguf

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--weights", default="bf16", choices=("bf16", "q8_0", "q4_0"))
    args = parser.parse_args()
    config: dict[str, Any] = json.loads((args.folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    form = gguf.GGMLQuantizationType[args.weights.upper()]

    out = gguf.GGUFWriter(args.target, "llama")
    out.add_file_type(
        gguf.LlamaFileType[
            {"bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}[args.weights]
        ]
    )
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    size = config["vocab_size"]
    out.add_tokenizer_model("llama")
    out.add_token_list(["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(3, size))])
    out.add_token_scores([0.0] * size)
    out.add_token_types([2, 3, 3, *([1] * (size - 3))])
    for name, tensor in load_file(args.folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            tensor = in_pairs(tensor, heads if "q_proj" in name else kv_heads)
        values = tensor.float().numpy()
        if tensor.ndim == 1:
            out.add_tensor(named(name), values)
        else:
            stored = gguf.quants.quantize(np.ascontiguousarray(values), form)
            out.add_tensor(named(name), stored, raw_dtype=form)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    print(f"{args.target}: {args.target.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()

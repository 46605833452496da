"""A well-known model, as its config.json has it."""

from __future__ import annotations

import json
from typing import Any

LLAMA: dict[str, Any] = json.loads("""{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "tie_word_embeddings": false, "torch_dtype": "bfloat16"
}""")
"""What the config.json of Llama-3.1-8B-Instruct says about its shape."""

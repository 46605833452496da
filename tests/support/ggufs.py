"""Small GGUF files, written by the package `gguf`, which is also what says what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import vocabularies as v
from checkpoints import Spec, write
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, RopeScalingType, quants
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import load_file

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 of a block are, if not only at its beginning."""
NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv"},
    **{"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    **{"mlp.gate_up_proj": "ffn_up", "input_layernorm": "attn_norm"},
    "post_attention_layernorm": "ffn_norm",
}
AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""The norms of a family that has them after the blocks."""
ARCHITECTURES = {"mistral": "llama", "ministral3": "mistral3", "olmo3": "olmo2"}
"""What families are called in a file, if not as in config.json."""
PAIRED = {"llama", "mistral3", "granite", "smollm3"}


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random blocks of a quantised type, uint8 [rows, bytes], with small scales."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        scale = rng.normal(0, 0.01, (rows, columns // weights, 1)).astype(np.float16)
        made[..., at : at + 2] = scale.view(np.uint8)
    return made.reshape(rows, -1)


def dense(path: Path, name: str) -> np.ndarray[Any, Any]:
    """The values of a tensor, as the package reads them."""
    tensor = next(one for one in GGUFReader(path).tensors if one.name == name)
    return np.asarray(quants.dequantize(tensor.data, tensor.tensor_type))


def begun(path: Path, arch: str, raw: dict[str, Any], tokens: int) -> GGUFWriter:
    """A file with the metadata that a config.json means."""
    made = GGUFWriter(path, arch)
    for key, add in (
        ("num_hidden_layers", made.add_block_count),
        ("max_position_embeddings", made.add_context_length),
        ("hidden_size", made.add_embedding_length),
        ("intermediate_size", made.add_feed_forward_length),
        ("num_attention_heads", made.add_head_count),
        ("num_key_value_heads", made.add_head_count_kv),
        ("head_dim", made.add_key_length),
        ("head_dim", made.add_value_length),
        ("rms_norm_eps", made.add_layer_norm_rms_eps),
        ("sliding_window", made.add_sliding_window),
        ("embedding_multiplier", made.add_embedding_scale),
        ("attention_multiplier", made.add_attention_scale),
        ("residual_multiplier", made.add_residual_scale),
        ("logits_scaling", made.add_logit_scale),
    ):
        if raw.get(key):
            add(raw[key])
    rope = raw.get("rope_parameters", raw)
    rope = rope.get("full_attention", rope)
    made.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        made.add_rope_scaling_type(RopeScalingType.YARN)
        made.add_rope_scaling_factor(rope["factor"])
        made.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        made.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        made.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if raw.get("sliding_window") and "full_attention" in raw.get("layer_types", ()):
        slides = [kind == "sliding_attention" for kind in raw["layer_types"]]
        made.add_sliding_window_pattern(slides)
    words(made, tokens)
    return made


def words(made: GGUFWriter, tokens: int) -> None:
    """A vocabulary of bytes and two control tokens; the rest is unused."""
    letters = [chr(one) for one in range(33, 127)] + ["\u0120", "\u010a", "ab"]
    given = ["<|im_start|>", "<|im_end|>", *letters][:tokens]
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre("smollm")
    made.add_token_list(given + [f"[PAD{n}]" for n in range(tokens - len(given))])
    made.add_token_types([3, 3, *[1] * (len(given) - 2), *[5] * (tokens - len(given))])
    made.add_token_merges(["a b"])
    made.add_bos_token_id(0)
    made.add_eos_token_id(1)
    each = "<|im_start|>{{ m.content }}<|im_end|>"
    made.add_chat_template("{% for m in messages %}" + each + "{% endfor %}")


def closed(made: GGUFWriter) -> None:
    """Write what was added."""
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def model(folder: Path, spec: Spec, kinds: dict[str, str] | None = None) -> Path:
    """A random model as a folder, and the same as `folder`/model.gguf. kinds: a quantised type for
    the matrices with this in their names; then these have other values than in the folder."""
    write(spec, folder)
    raw = json.loads((folder / "config.json").read_text())
    path = folder / "model.gguf"
    arch = ARCHITECTURES.get(spec.family, spec.family)
    names = {**NAMES, **(AFTER if arch == "olmo2" else {})}
    made = begun(path, arch, raw, spec.vocab)
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}
    for name, value in load_file(folder / "model.safetensors").items():
        place, _, part = name.rpartition(".")
        layer = place.split(".")[2] if ".layers." in name else None
        own = place if layer is None else place.split(".", 3)[3]
        count = heads.get(own.rpartition(".")[2], 0) if arch in PAIRED else 0
        if count:  # as convert_hf_to_gguf.py does
            split = value.reshape(count, 2, value.shape[0] // count // 2, *value.shape[1:])
            value = split.swapaxes(1, 2).reshape(value.shape)
        name = f"{'' if layer is None else f'blk.{layer}.'}{names[own]}.{part}"
        kind = next((k for key, k in (kinds or {}).items() if key in name), "F32")
        if kind == "F32":
            made.add_tensor(name, value)
        elif kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
            number = GGMLQuantizationType[kind]
            made.add_tensor(name, quants.quantize(value, number), raw_dtype=number)
        else:
            data = blocks(kind, *value.shape, seed=len(name))
            made.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    closed(made)
    return path


def random_model(path: Path, sizes: dict[str, int], kind: Callable[[str, int], str]) -> None:
    """A Llama of random blocks in which layers share their numbers. sizes: of a config.json.
    kind(name, layer): the type of a matrix."""
    raw = {**sizes, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    made, hidden, mlp = begun(path, "llama", raw, raw["vocab_size"]), *[*sizes.values()][:2]
    kv = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    rows = {"attn_q": hidden, "attn_k": kv, "attn_v": kv, "attn_output": hidden}
    rows |= {"ffn_gate": mlp, "ffn_up": mlp, "ffn_down": hidden}
    ones, drawn = np.ones(hidden, np.float32), cache(blocks)

    def add(place: str, name: str, count: int, layer: int) -> None:
        one = kind(name, layer)
        data = drawn(one, count, mlp if name == "ffn_down" else hidden)
        made.add_tensor(f"{place}{name}.weight", data, raw_dtype=GGMLQuantizationType[one])

    made.add_tensor("output_norm.weight", ones)
    for name in ("token_embd", "output"):
        add("", name, sizes["vocab_size"], 0)
    for layer in range(sizes["num_hidden_layers"]):
        for name in ("attn_norm", "ffn_norm"):
            made.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, count in rows.items():
            add(f"blk.{layer}.", name, count, layer)
    closed(made)


def tokenizer(path: Path, version: str) -> Path:
    """A file with a published vocabulary, and no weights worth the name: a sentencepiece file of
    mistral_common, or "llama-bpe", the pieces of tekken under the tokens of Llama 3."""
    made = GGUFWriter(path, "llama")
    if version == "llama-bpe":
        data = v.byte_level_json(v.LLAMA_3, 4000)
        added = {one["content"]: one["id"] for one in data["added_tokens"]}
        ids = {**data["model"]["vocab"], **added}
        pieces = sorted(ids, key=lambda piece: ids[piece])
        made.add_tokenizer_model("gpt2")
        made.add_tokenizer_pre(version)
        made.add_token_types([3 if piece in added else 1 for piece in pieces])
        merges = data["model"]["merges"]
        made.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    else:
        model = v.vendor(version)
        pieces = [model.id_to_piece(id) for id in range(model.vocab_size())]
        unlike = ((2, model.is_unknown), (3, model.is_control), (6, model.is_byte))
        kinds = [next((k for k, of in unlike if of(id)), 1) for id in range(len(pieces))]
        made.add_tokenizer_model("llama")
        made.add_token_scores([model.get_score(id) for id in range(len(pieces))])
        made.add_token_types(kinds)
        made.add_bos_token_id(1)
        made.add_eos_token_id(2)
        made.add_unk_token_id(0)
    made.add_token_list(pieces)
    made.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    closed(made)
    return path

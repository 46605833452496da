"""config.json and params.json: what is read, what is refused, and with which exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loaded import refused
from transformers import GenerationConfig

from minikv.models.config import (
    FAMILIES,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_MLP,
    MAX_POSITIONS,
    MAX_VOCAB,
    ModelConfig,
    OwnSampling,
)
from minikv.models.rope import RopeConfig

Raw = dict[str, Any]
LLAMA: Raw = json.loads("""{
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 2
}""")
MISTRAL, QWEN, MINISTRAL = (
    LLAMA | {"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"]}
    for name in ("Mistral", "Qwen2", "Ministral")
)
OTHERS = {
    name: LLAMA | {"model_type": name, "architectures": [FAMILIES[name].architecture]}
    for name in ("qwen3", "granite", "smollm3", "phi3", "olmo2", "olmo3", "ministral3")
}
QWEN3, GRANITE, SMOLLM3, PHI3, OLMO2, OLMO3, MINISTRAL3 = OTHERS.values()
BETA = {
    **{"type": "yarn", "rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    **{"original_max_position_embeddings": 64, "max_position_embeddings": 512},
    "llama_4_scaling_beta": 0.1,
}
MISTRAL3 = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": MISTRAL,
    "vision_config": {"model_type": "pixtral"},
}
LAYERED = {"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
ROPE = {"rope_type": "default"}
PLAIN = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
HIGHER = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192} | HIGHER
PARAMS: Raw = json.loads("""{
    "dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 128, "n_heads": 4, "n_kv_heads": 2,
    "norm_eps": 1e-5, "vocab_size": 100, "rope_theta": 1e6
}""")


def read(folder: Path, raw: object, generation: str | None = None) -> ModelConfig:
    """The configuration of a folder with this text or object in its one file."""
    text = raw if isinstance(raw, str) else json.dumps(raw)
    name = "params.json" if isinstance(raw, dict) and "norm_eps" in raw else "config.json"
    for other in ("config.json", "params.json"):
        (folder / other).unlink(missing_ok=True)
    (folder / name).write_text(text)
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    return ModelConfig.from_folder(folder)


def changed(raw: Raw, changes: Raw) -> Raw:
    """`raw` with other values; the value "ABSENT" removes a key."""
    return {key: value for key, value in (raw | changes).items() if value != "ABSENT"}


def without(raw: Raw, *keys: str) -> Raw:
    return changed(raw, dict.fromkeys(keys, "ABSENT"))


def scaled(type: str, factor: float, key: str = "type", **more: Any) -> Raw:
    return {"rope_scaling": {key: type, "factor": factor, **more}}


def chunked(size: int, **more: Any) -> Raw:
    return {"dual_chunk_attention_config": {"chunk_size": size, **more}}


L3 = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
YARN = RopeConfig(kind="yarn", factor=4.0, original=512)
HALVED = replace(YARN, attention_factor=0.5)
UNROTATED = RopeConfig(kind="none")
SCALED = RopeConfig(1e4, "yarn", 16.0, original=64, mscale=1.0, mscale_all_dim=1.0, query_beta=0.1)
SLIDES = QWEN | {"use_sliding_window": True, "sliding_window": 7}
PATTERN = {"layer_types": ["full_attention", "sliding_attention"]}
SWAPPED = without(LLAMA3, "rope_type") | {"type": "llama3"}
LAST = {"low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 64}
CHUNKS = QWEN | {"max_position_embeddings": 32_768}  # as Qwen2.5-7B-Instruct-1M, but smaller
ORIGINAL = {"original_max_position_embeddings": 4096}
TYPE = "rope_type"
TWICE = RopeConfig(10_000.0, "llama3", 2.0, 1.0, 2.0, 64)
OWN_BASE = LLAMA3 | {"rope_theta": 5e5}
READ: list[tuple[Raw, Raw, Raw]] = [
    # the file, other values in it, what the configuration then says
    (LLAMA, {}, {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64}),
    (LLAMA, {}, {"mlp": 128, "vocab": 100, "rope": RopeConfig(theta=10_000.0), "stop_ids": (2,)}),
    (LLAMA, {}, {"tied": False, "qkv_bias": False, "o_bias": False, "mlp_bias": False}),
    (LLAMA, {"num_key_value_heads": "ABSENT"}, {"kv_heads": 4}),
    (LLAMA, {"num_key_value_heads": None}, {"kv_heads": 4}),
    (LLAMA, {"num_key_value_heads": 1}, {"kv_heads": 1}),
    (LLAMA, {"num_key_value_heads": 4}, {"kv_heads": 4}),
    (MISTRAL, {"num_key_value_heads": "ABSENT", "num_attention_heads": 16}, {"kv_heads": 8}),
    (LLAMA, {"rms_norm_eps": "ABSENT"}, {"norm_eps": 1e-6}),
    (LLAMA, {"rope_theta": "ABSENT"}, {"rope": RopeConfig(10_000.0)}),
    (LLAMA, {"max_position_embeddings": "ABSENT"}, {"max_context": 2048}),
    (LLAMA, {"eos_token_id": "ABSENT"}, {"stop_ids": ()}),
    (LLAMA, {"eos_token_id": [7, 3, 7]}, {"stop_ids": (3, 7)}),
    (LLAMA, {"eos_token_id": -1}, {"stop_ids": ()}),
    (LLAMA, {"head_dim": 32}, {"head_dim": 32}),
    (LLAMA, {"head_dim": None}, {"head_dim": 16}),
    (LLAMA, {"attention_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
    (LLAMA, {"mlp_bias": True}, {"qkv_bias": False, "mlp_bias": True}),
    (QWEN, {}, {"qkv_bias": True, "o_bias": False, "mlp_bias": False}),
    (LLAMA, {"tie_word_embeddings": True}, {"tied": True}),
    (LLAMA, {"model_type": None}, {"family": "llama"}),
    # windows
    (LLAMA, {"layer_types": ["full_attention"] * 2}, {"windows": (None, None)}),
    (MISTRAL, {}, {"windows": (4096, 4096)}),  # absent means 4096 in the configuration class
    (MISTRAL, {"sliding_window": None}, {"windows": (None, None)}),
    (MISTRAL, {"sliding_window": 7}, {"windows": (7, 7)}),
    (MINISTRAL, {"sliding_window": 7} | PATTERN, {"windows": (None, 7)}),
    (QWEN, {}, {"windows": (None, None)}),
    (QWEN, {"sliding_window": 7}, {"windows": (None, None)}),
    (SLIDES, {}, {"windows": (None, None)}),
    (SLIDES, {"max_window_layers": 0, "sliding_window": "ABSENT"}, {"windows": (4096, 4096)}),
    (SLIDES, {"max_window_layers": 0}, {"windows": (7, 7)}),
    (SLIDES, {"max_window_layers": 1}, {"windows": (None, 7)}),
    (SLIDES, {"max_window_layers": 2**31}, {"windows": (None, None)}),
    # every form of the rotary settings
    (LLAMA, {"rope_theta": "ABSENT", "rope_parameters": OWN_BASE}, {"rope": L3}),
    (LLAMA, {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope": L3}),
    (LLAMA, {"rope_theta": 5e5, "rope_scaling": SWAPPED}, {"rope": L3}),
    (LLAMA, {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}}, {"rope": L3}),
    (LLAMA, {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, {"rope": L3}),
    (LLAMA, {"rope_theta": 5e5, "rope_parameters": LLAMA3 | {"rope_theta": 500000}}, {"rope": L3}),
    (LLAMA, {"rope_theta": 5e5, "rope_parameters": LLAMA3, "rope_scaling": None}, {"rope": L3}),
    (LLAMA, scaled("yarn", 4.0), {"rope": YARN}),
    (LLAMA, scaled("yarn", 4.0, attention_factor=0.5), {"rope": HALVED}),
    (LLAMA, scaled("linear", 2.0, TYPE), {"rope": RopeConfig(kind="linear", factor=2.0)}),
    (LLAMA, scaled("dynamic", 2.0, TYPE), {"rope": RopeConfig(kind="dynamic", factor=2.0)}),
    (LLAMA, scaled("dynamic", 2.0, TYPE), {"max_context": 512}),
    (LLAMA, scaled("llama3", 2.0, TYPE, **LAST), {"rope": TWICE}),
    # what only some families have
    (QWEN3, {}, {"qk_norm": "head", "head_dim": 128, "windows": (None, None), "qkv_bias": False}),
    (QWEN3, {"head_dim": 16, "attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
    (QWEN3, {"use_sliding_window": True, "max_window_layers": 1}, {"windows": (None, 4096)}),
    (GRANITE, {"attention_multiplier": 0.25}, {"query_scale": 1.0, "residual_scale": 1.0}),
    (GRANITE, {"embedding_multiplier": 12, "mlp_bias": True}, {"embedding_scale": 12.0}),
    (GRANITE, {"logits_scaling": 8, "residual_multiplier": 0.22}, {"residual_scale": 0.22}),
    (GRANITE, {}, {"query_scale": 4.0, "logits_scale": 1.0, "tied": False}),
    (SMOLLM3, {"rope_theta": "ABSENT"}, {"rope": RopeConfig(2e6), "tied": True}),
    (SMOLLM3, {"no_rope_layers": [0, 1, 0]}, {"layer_ropes": (UNROTATED, RopeConfig())}),
    (SMOLLM3, {"no_rope_layer_interval": 2}, {"layer_ropes": (RopeConfig(), UNROTATED)}),
    (SMOLLM3, {"use_sliding_window": True, "sliding_window": 7} | PATTERN, {"windows": (None, 7)}),
    (PHI3, {"sliding_window": 7}, {"windows": (7, 7), "fused": True}),
    (PHI3, {"original_max_position_embeddings": 64}, {"windows": (None, None)}),
    (OLMO2, {}, {"qk_norm": "all", "norm_after": True, "windows": (None, None)}),
    (OLMO3, {"num_hidden_layers": 5}, {"windows": (*(4096,) * 3, None, 4096)}),
    (OLMO3, {"rope_parameters": LAYERED | PLAIN} | PATTERN, {"layer_ropes": (YARN, RopeConfig())}),
    (OLMO3, scaled("yarn", 4.0) | PATTERN, {"rope": YARN}),
    (MINISTRAL3, {"rope_parameters": BETA}, {"rope": SCALED, "kv_heads": 2, "head_dim": 128}),
    (MISTRAL3, {}, {"family": "mistral", "windows": (4096, 4096), "tied": None}),
    (MISTRAL3, {"tie_word_embeddings": True, "eos_token_id": 9}, {"tied": True, "stop_ids": (9,)}),
    (MISTRAL3, {"text_config": without(MISTRAL, "model_type")}, {"family": "mistral"}),
    (MISTRAL3, {"text_config": MINISTRAL3 | {"rope_parameters": BETA}}, {"family": "ministral3"}),
    (MISTRAL3, {"text_config": MINISTRAL3 | {"rope_parameters": BETA}}, {"rope": SCALED}),
    # dual chunk attention ends where it is no longer plain
    (CHUNKS, chunked(8192), {"max_context": 8192}),
    (CHUNKS, chunked(65536), {"max_context": 32_768}),
    (CHUNKS, {"dual_chunk_attention_config": None}, {"max_context": 32_768}),
    (CHUNKS, {"dual_chunk_attention_config": {}}, {"max_context": 32_768}),
    (CHUNKS, chunked(8192, **ORIGINAL), {"max_context": 4096}),
    (CHUNKS, chunked(8192, original_max_position_embeddings=16_384), {"max_context": 8192}),
    # params.json
    (PARAMS, {}, {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64}),
    (PARAMS, {}, {"mlp": 128, "vocab": 100, "rope": RopeConfig(theta=1e6), "norm_eps": 1e-5}),
    (PARAMS, {}, {"family": "llama", "windows": (None, None), "max_context": 32_768}),
    (PARAMS, {"n_kv_heads": 1, "tied_embeddings": True}, {"kv_heads": 1, "tied": True}),
    (PARAMS, {"n_kv_heads": "ABSENT"}, {"kv_heads": 4}),
    (PARAMS, {"max_seq_len": 700}, {"max_context": 700}),
    (PARAMS, {"max_position_embeddings": 900}, {"max_context": 900}),
    (PARAMS, {"max_position_embeddings": 900, "max_seq_len": 700}, {"max_context": 900}),
    (PARAMS, {"rope_theta": "ABSENT", "sliding_window": 4096}, {"windows": (4096, 4096)}),
    (PARAMS, {"rope_theta": "ABSENT", "sliding_window": 9}, {"rope": RopeConfig(theta=1e4)}),
    (PARAMS, {"n_layers": 4, "sliding_window": [None, 7]}, {"windows": (None, 7, None, 7)}),
    (PARAMS, {"sliding_window": 7}, {"family": "mistral"}),
    (PARAMS, {"head_dim": "ABSENT", "dim": 96}, {"head_dim": 24}),
    (PARAMS, {"head_dim": 16, "dim": 98}, {"head_dim": 16}),  # which four heads do not divide
]


@pytest.mark.parametrize(("raw", "changes", "wants"), READ)
def test_what_a_configuration_says(raw: Raw, changes: Raw, wants: Raw, tmp_path: Path) -> None:
    config = read(tmp_path, changed(raw, changes))
    assert {name: getattr(config, name) for name in wants} == wants


@pytest.mark.parametrize(
    ("raw", "changes", "note"),
    [
        (LLAMA, {}, ""),
        (LLAMA, {"pretraining_tp": 1}, ""),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp is ignored"),
        (LLAMA, {"auto_map": {"AutoConfig": "x.Y"}}, "auto_map is ignored"),
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "a--b.LlamaForCausalLM"}}, "auto_map is ig"),
        (MISTRAL3, {}, "only the text part"),
        (LLAMA, {"max_position_embeddings": None}, "no max_position_embeddings: assuming 2048"),
        (LLAMA, scaled("dynamic", 4.0), "dynamic rotary scaling"),
        (CHUNKS, chunked(8192), "limited to 8,192 of 32,"),
        (CHUNKS, chunked(65536), ""),
        (PARAMS, {}, "params.json has no max_seq_len: assuming 32768"),
        (PARAMS, {"max_seq_len": 700}, ""),
    ],
)
def test_what_is_ignored_or_assumed_is_said(
    raw: Raw, changes: Raw, note: str, tmp_path: Path
) -> None:
    notes = read(tmp_path, raw | changes).notes
    assert [note in found for found in notes] == ([True] if note else [])


@pytest.mark.parametrize(
    "text",
    ['{"eos_token_id": 5,}', "", "[]", '{"eos_token_id": "x"}', "\xff", '{"a": 1, "a": 2}', "NaN"],
)
def test_generation_config_adds_stop_ids_and_costs_a_note_if_broken(
    text: str, tmp_path: Path
) -> None:
    config = read(tmp_path, LLAMA, '{"eos_token_id": [128001, 128009]}')
    assert (config.stop_ids, config.notes) == ((2, 128001, 128009), ())
    config = read(tmp_path, LLAMA, text)
    assert config.stop_ids == (2,)
    assert ["generation_config.json" in note for note in config.notes] == [True]


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": None, "top_k": 5},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "temperature": None, "top_p": None, "top_k": None, "min_p": None},
        {"do_sample": True, "temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0.05},
    ],
)
def test_the_own_sampling_is_that_of_transformers(raw: Raw, tmp_path: Path) -> None:
    own = read(tmp_path, LLAMA, json.dumps(raw)).own
    theirs = GenerationConfig.from_pretrained(tmp_path)
    theirs.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    if theirs.do_sample:
        want = (theirs.temperature, theirs.top_k, theirs.top_p, theirs.min_p or 0.0)
        assert (own.temperature, own.top_k, own.top_p, own.min_p, own.why) == (*want, "")
    else:
        assert own == OwnSampling(why="generation_config.json does not ask for sampling")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key, values in {
            "do_sample": ("yes", 1, []),
            "temperature": ("hot", -1, 101, True, [1], 10**400),
            "top_k": (1.5, -1, 2**40, "50", False),
            "top_p": (1.1, -0.1, {}),
            "min_p": (2, "0.1"),
        }.items()
        for value in values
    ],
)
def test_one_strange_value_and_none_is_used(key: str, value: object, tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA, json.dumps({"do_sample": True, "top_k": 5, key: value}))
    assert config.own == OwnSampling(why=config.own.why)
    assert config.own.why.startswith(f"generation_config.json: {key} must be ")
    assert len(config.own.why) < 200
    assert config.notes == ()  # it matters to those alone who ask for it
    assert read(tmp_path, LLAMA, "{").own.why.startswith("generation_config.json: not valid")
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, LLAMA).own.why == "the model has no generation_config.json"


CT = "compressed-tensors"
BASES: dict[str, Callable[..., Raw]] = {
    **{
        name: lambda changes, raw=raw: changed(raw, changes)
        for name, raw in (
            *(("llama", LLAMA), ("mistral", MISTRAL), ("qwen", QWEN)),
            *(("params", PARAMS), ("mistral3", MISTRAL3)),
            *OTHERS.items(),
        )
    },
    "sliding": lambda changes: MISTRAL | {"layer_types": ["sliding_attention"] * 2} | changes,
    "quantised": lambda changes: LLAMA | {"quantization_config": changes},
    "compressed": lambda changes: BASES["quantised"]({"quant_method": CT} | changes),
    "packed": lambda changes: BASES["weights"]({"num_bits": 4}, changes),
    "weights": lambda weights, more={}: BASES["compressed"](
        {"format": "pack-quantized", "config_groups": {"a": {"weights": weights}}} | more
    ),
    "scaling": lambda changes: LLAMA | {"rope_scaling": changes},
    "nested": lambda changes: LLAMA | {"rope_parameters": changes},
    "llama3": lambda changes: LLAMA | {"rope_scaling": changed(LLAMA3, changes)},
}
GROUP = {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"a": 1}}
INT_8 = {"quant_method": CT, "format": "int-quantized", "config_groups": {"a": GROUP}}
# quantization_config, what the form is called, whether it is kept as the file has it.
QUANTISED: list[tuple[Raw, str, bool]] = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "int4 (AWQ)", True),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4 (GPTQ)", True),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8 (GPTQ)", False),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "float8 (FP8)", False),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4 (bitsandbytes)", False),
    ({"load_in_8bit": True}, "int8 (bitsandbytes)", True),
    (INT_8, "int8 (compressed-tensors)", True),
]


@pytest.mark.parametrize(("table", "name", "kept"), QUANTISED, ids=[q[1] for q in QUANTISED])
def test_the_form_of_quantised_files(table: Raw, name: str, kept: bool, tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA | {"quantization_config": table})
    assert (config.form, bool(config.stored)) == (name, kept)
    assert any("is unpacked" in note for note in config.notes) != kept
    activations = "input_activations" in json.dumps(table) or "FP8" in name
    assert any("quantises activations" in note for note in config.notes) == activations


# The file, other values in it, the exit code, a word of the message.
REFUSED = r"""
llama | {"model_type": "ABSENT", "architectures": "ABSENT"} | 6 | model_type
llama | {"model_type": 3} | 6 | model_type
llama | {"architectures": "x"} | 6 | architectures
llama | {"model_type": "\u001b[31mx"} | 3 | \x1b
llama | {"architectures": ["LlamaForSequenceClassification"]} | 3 | Sequence
llama | {"auto_map": {"AutoModelForCausalLM": "x.Y"}} | 3 | auto_map
llama | {"num_local_experts": 8} | 3 | num_local_experts
llama | {"vision_config": {"a": 1}} | 3 | vision_config
quantised | {"quant_method": "aqlm"} | 3 | aqlm: not supported
quantised | {"quant_method": "mxfp4"} | 3 | mxfp4
quantised | {"quant_method": ["awq"]} | 3 | awq
quantised | {"bits": 4} | 3 | ?
quantised | {"quant_method": "awq", "version": "gemv"} | 3 | awq, gemv
quantised | {"quant_method": "awq", "bits": 3} | 3 | awq, 3 bits
quantised | {"quant_method": "awq", "bits": "4"} | 6 | bits
quantised | {"quant_method": "awq", "group_size": 0} | 6 | group_size
quantised | {"quant_method": "awq", "group_size": -2} | 6 | group_size
quantised | {"quant_method": "awq", "group_size": 1e30} | 6 | group_size
quantised | {"quant_method": "gptq", "bits": 3} | 3 | gptq, 3 bits
quantised | {"quant_method": "gptq", "checkpoint_format": "marlin"} | 3 | gptq, marlin
quantised | {"quant_method": "gptq", "is_marlin_format": true} | 3 | gptq, marlin
quantised | {"quant_method": "gptq", "dynamic": {"+:.*up.*": {"bits": 8}}} | 3 | gptq, dynamic
quantised | {"load_in_4bit": true, "bnb_4bit_quant_type": "int2"} | 3 | bitsandbytes, int2
quantised | {"quant_method": "bitsandbytes"} | 3 | bitsandbytes, ?
quantised | {"load_in_4bit": "yes"} | 6 | load_in_4bit
quantised | {"quant_method": "fp8", "fmt": "e5m2"} | 3 | fp8, e5m2
quantised | {"quant_method": "fp8", "weight_block_size": [128]} | 6 | weight_block_size
quantised | {"quant_method": "fp8", "weight_block_size": [128, 0]} | 6 | weight_block_size
quantised | {"quant_method": "fp8", "weight_block_size": 128} | 6 | weight_block_size
compressed | {} | 3 | compressed-tensors, None
compressed | {"format": ["a"]} | 3 | compressed-tensors
compressed | {"format": "nvfp4-pack-quantized"} | 3 | nvfp4-pack-quantized
compressed | {"format": "mxfp4-pack-quantized"} | 3 | mxfp4-pack-quantized
compressed | {"format": "marlin-24"} | 3 | marlin-24
packed | {"config_groups": {}} | 3 | no config_groups
packed | {"config_groups": [1]} | 6 | config_groups
packed | {"sparsity_config": {"format": "sparse-24-bitmask"}} | 3 | sparsity_config
packed | {"transform_config": {"config_groups": {}}} | 3 | transform_config
packed | {"format": "mixed-precision"} | 3 | compressed-tensors, None
weights | {"num_bits": 2} | 3 | int2
weights | {"num_bits": [4]} | 3 | int[4]
weights | {"num_bits": 4, "type": "float"} | 3 | float4
weights | {"num_bits": 4, "group_size": 0} | 6 | group_size
llama | {"quantization_config": "yes"} | 6 | quantization_config
llama | {"hidden_act": "gelu"} | 3 | gelu
llama | {"rope_interleaved": true} | 3 | rope_interleaved
llama | {"partial_rotary_factor": 0.5} | 3 | partial_rotary_factor
llama | {"partial_rotary_factor": 2} | 3 | partial_rotary_factor
llama | {"num_attention_heads": 32, "num_key_value_heads": 5} | 6 | 5 KV
llama | {"num_attention_heads": 6} | 6 | multiple
llama | {"head_dim": 17} | 6 | head_dim
llama | {"vocab_size": true} | 6 | vocab_size
llama | {"vocab_size": 100.0} | 6 | vocab_size
llama | {"num_hidden_layers": "ABSENT"} | 6 | num_hidden_layers
llama | {"intermediate_size": "128"} | 6 | intermediate_size
llama | {"rope_theta": "500000"} | 6 | rope_theta
llama | {"rope_theta": 0} | 6 | rope_theta
llama | {"rms_norm_eps": -1e-05} | 6 | rms_norm_eps
llama | {"rms_norm_eps": []} | 6 | rms_norm_eps
llama | {"tie_word_embeddings": 1} | 6 | tie_word_embeddings
llama | {"eos_token_id": "</s>"} | 6 | eos_token_id
mistral | {"sliding_window": 0} | 6 | sliding_window
mistral | {"sliding_window": "4096"} | 6 | sliding_window
llama | {"sliding_window": 4096} | 3 | sliding_window
mistral | {"attention_bias": true} | 3 | bias
mistral | {"layer_types": ["full_attention"]} | 6 | layer_types
qwen | {"layer_types": ["chunked_attention", "chunked_attention"]} | 3 | chunked
mistral | {"layer_types": ["full_attention", "sliding_attention"]} | 3 | per-layer
scaling | {"rope_type": "bogus"} | 3 | bogus
scaling | {"type": "su", "factor": 2.0} | 3 | su
scaling | {"type": "longrope"} | 3 | longrope
scaling | {"rope_type": 3} | 3 | 3
scaling | {"rope_type": "linear", "type": "yarn", "factor": 2.0} | 6 | disagree
scaling | {"type": "linear", "factor": 2.0, "alpha": 1} | 3 | alpha
scaling | {"type": "linear", "factor": 2.0, "beta_fast": 32} | 3 | beta_fast
scaling | {"type": "linear"} | 6 | factor
scaling | {"type": "linear", "factor": "2"} | 6 | factor
llama | {"rope_scaling": "linear"} | 6 | rope_scaling
nested | {"full_attention": {"rope_type": "default"}} | 3 | per layer
llama3 | {"original_max_position_embeddings": "ABSENT"} | 6 | original
llama3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0} | 6 | high_freq_factor
scaling | {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 32} | 6 | beta_fast
llama | {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}} | 6 | theta above 1
nested | {"rope_type": "default", "rope_theta": 5e5} | 6 | disagree
qwen | {"dual_chunk_attention_config": 7} | 6 | dual_chunk
qwen | {"dual_chunk_attention_config": {"local_size": 512}} | 6 | chunk_size
llama | {"layer_types": ["sliding_attention", "sliding_attention"]} | 3 | sliding
qwen | {"layer_types": ["sliding_attention", "sliding_attention"]} | 6 | use_sliding_window is false
sliding | {"sliding_window": null} | 6 | sliding_window is off
nested | {"rope_type": "default", "partial_rotary_factor": 0.5} | 3 | partial_rotary_factor
qwen3 | {"mlp_bias": true} | 3 | mlp_bias
qwen3 | {"attention_bias": "yes"} | 6 | attention_bias
qwen3 | {"layer_types": ["sliding_attention", "sliding_attention"]} | 6 | use_sliding_window is
qwen3 | {"rope_scaling": {"type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}} | 3 | llama_4
granite | {"attention_multiplier": 0} | 6 | attention_multiplier
granite | {"residual_multiplier": -0.2} | 6 | residual_multiplier
granite | {"embedding_multiplier": []} | 6 | embedding_multiplier
granite | {"logits_scaling": "8"} | 6 | logits_scaling
granite | {"logits_scaling": true} | 6 | logits_scaling
granite | {"sliding_window": 5} | 3 | sliding_window
smollm3 | {"no_rope_layers": [1]} | 6 | a list of 2
smollm3 | {"no_rope_layers": [1, 2]} | 6 | 0 and 1
smollm3 | {"no_rope_layers": [true, false]} | 6 | 0 and 1
smollm3 | {"no_rope_layers": "10"} | 6 | no_rope_layers
smollm3 | {"no_rope_layer_interval": 0} | 6 | no_rope_layer_interval
smollm3 | {"use_sliding_window": true, "sliding_window": 8} | 3 | layer_types
smollm3 | {"tie_word_embeddings": "no"} | 6 | tie_word_embeddings
phi3 | {"rope_scaling": {"type": "longrope", "short_factor": [1]}} | 3 | longrope
phi3 | {"rope_scaling": {"type": "yarn", "factor": 2.0}} | 3 | yarn
phi3 | {"partial_rotary_factor": 0.75} | 3 | partial_rotary_factor
phi3 | {"attention_bias": true} | 3 | attention_bias
phi3 | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7} | 3 | per-layer
phi3 | {"sliding_window": -1} | 6 | sliding_window
olmo2 | {"mlp_bias": true} | 3 | mlp_bias
olmo2 | {"sliding_window": 7} | 3 | sliding_window
olmo3 | {"rope_parameters": {"full_attention": 3}} | 6 | full_attention
olmo3 | {"rope_parameters": {"full_attention": {}, "sliding_attention": {"type": 3}}} | 3 | base
olmo3 | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": \
    {"rope_theta": 5e5}}} | 3 | sliding_attention
olmo3 | {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}}} \
    | 3 | sliding_attention
olmo3 | {"sliding_window": null, "layer_types": ["sliding_attention", "full_attention"]} | 6 | off
ministral3 | {} | 6 | llama_4_scaling_beta
ministral3 | {"rope_scaling": {"type": "yarn", "factor": 2.0}} | 6 | llama_4_scaling_beta
ministral3 | {"rope_scaling": {"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": -1}} | 6 | -1
ministral3 | {"rope_scaling": {"type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1, \
    "beta_fast": 3}} | 3 | beta_fast
mistral3 | {"text_config": "ABSENT"} | 6 | text_config
mistral3 | {"text_config": 3} | 6 | text_config
mistral3 | {"text_config": {"model_type": "mistral"}} | 6 | num_attention_heads
mistral3 | {"text_config": {"model_type": 3}} | 6 | model_type
mistral3 | {"text_config": {"model_type": "mistral4"}} | 3 | experts), the text part of 'mistral3'
mistral3 | {"text_config": {"model_type": "llama"}} | 3 | 'llama', the text part of 'mistral3'
mistral3 | {"quantization_config": {"quant_method": "aqlm"}} | 3 | aqlm: not supported
mistral3 | {"eos_token_id": "x"} | 6 | eos_token_id
params | {"n_heads": 6, "n_kv_heads": 2, "head_dim": "ABSENT"} | 6 | dim 64 is not
params | {"rope_theta": "ABSENT"} | 6 | rope_theta
params | {"dim": "ABSENT"} | 6 | dim
params | {"moe": {"num_experts": 8}} | 3 | moe
params | {"quantization": {"qformat_weight": "fp8_e4m3"}} | 3 | fp8_e4m3
params | {"vision_encoder": {}} | 3 | vision_encoder
params | {"use_scaled_rope": true} | 3 | use_scaled_rope
params | {"use_biases": true} | 3 | use_biases
params | {"model_type": "mamba"} | 3 | mamba
params | {"sliding_window": [null, 7, 7]} | 6 | sliding_window
params | {"sliding_window": -1} | 6 | sliding_window
params | {"n_kv_heads": 3} | 6 | KV heads
params | {"head_dim": "ABSENT", "dim": 98} | 6 | dim 98 is not a multiple of n_heads 4
params | {"norm_eps": null} | 6 | norm_eps
params | {"ffn_dim_multiplier": 1.3, "hidden_dim": "ABSENT"} | 3 | ffn_dim_multiplier
params | {"hidden_dim": "ABSENT"} | 6 | hidden_dim
"""
DEEP = json.loads("[" * 900 + "]" * 900)
BAD: list[tuple[str, object, int, str]] = [
    # what is wrong, the file, the exit code, a word of the message
    ("empty file", "", 6, "not valid JSON"),
    ("truncated", '{"model_type": "llama", ', 6, "not valid JSON"),
    ("not an object", "[1, 2]", 6, "object"),
    ("NaN", '{"rms_norm_eps": NaN}', 6, "NaN"),
    ("a key twice", '{"model_type": "llama", "model_type": "llama"}', 6, "twice"),
    ("nested deeply", "[" * 100_000, 6, "not valid JSON"),
    ("a huge integer", '{"vocab_size": ' + "9" * 5000 + "}", 6, "not valid JSON"),
    ("theta infinite", '{"model_type": "llama", "rope_theta": 1e999}', 6, ""),
    ("theta beyond", json.dumps(LLAMA).replace("10000.0", "1" + "0" * 400), 6, "rope_theta"),
    ("eps nested", LLAMA | {"rms_norm_eps": DEEP}, 6, "rms_norm_eps"),
    ("two lengths", LLAMA | ORIGINAL | {"rope_scaling": LLAMA3}, 6, "disagree"),
    ("ten megabytes", LLAMA | {"_": "x" * 10_000_000}, 6, "10,000"),
]
FOREIGN = """
    apertus arcee cohere2 deepseek_v3 exaone4 gemma gemma2 gemma3 gemma3_text gemma4 glm4 gpt2
    gpt_oss granitemoehybrid lfm2 llama4 llama4_text mistral4 mixtral mllama nemotron nemotron-nas
    nemotron_h olmo qwen2_5_vl qwen2_moe qwen3_5 qwen3_moe qwen3_next qwen3_vl seed_oss
"""
for name in FOREIGN.split():
    BAD.append((name, LLAMA | {"model_type": name}, 3, f"architecture '{name}' ("))
for line in REFUSED.replace("\\\n", "").strip().splitlines():
    base, changes, code, word = line.split(" | ")
    BAD.append((f"{base} {changes}", BASES[base](json.loads(changes)), int(code), word))


@pytest.mark.parametrize(("raw", "code", "word"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_config(raw: object, code: int, word: str, tmp_path: Path) -> None:
    refused(lambda: read(tmp_path, raw), word, code=code)


NESTED, LINEAR = ROPE | {"rope_theta": 5e5}, {"type": "linear", "factor": 2, "rope_theta": 1e4}
LOW, FIRST = ROPE | {"rope_theta": 1e4}, "that of rope_parameters"
KEEPS = f"takes {FIRST}; if it is right, delete the others"
DELETES = "transformers takes rope_scaling; if that is right, delete rope_parameters"


@pytest.mark.parametrize(
    ("theta", "nested", "scaling", "stated", "hint"),
    [
        (10_000, NESTED, "ABSENT", "rope_theta 10000, rope_parameters 500000", KEEPS),
        (500_000, LOW, "ABSENT", "rope_theta 500000, rope_parameters 10000", FIRST),
        (1e6, NESTED, LINEAR, "rope_scaling 10000", "that of rope_scaling"),
        (5e5, NESTED, LLAMA3, "rope_parameters and rope_scaling disagree", DELETES),
    ],
)
def test_two_bases_are_refused_with_the_one_that_counts(
    theta: float, nested: Raw, scaling: Any, stated: str, hint: str, tmp_path: Path
) -> None:
    given = {"rope_theta": theta, "rope_parameters": nested, "rope_scaling": scaling}
    assert hint in refused(lambda: read(tmp_path, changed(LLAMA, given)), stated, code=6).hint


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("scaling", "harmless"),
    [
        ({"type": "yarn", "factor": 4.0}, {"finetuned": True}),
        ({"type": "linear", "factor": 2.0}, {"finetuned": False, "low_freq_factor": None}),
        ({"rope_type": "default"}, {"factor": None, "type": None, "rope_theta": None}),
    ],
)
def test_keys_that_compute_nothing(key: str, scaling: Raw, harmless: Raw, tmp_path: Path) -> None:
    plain = read(tmp_path, LLAMA | {key: scaling})
    assert read(tmp_path, LLAMA | {key: scaling | harmless}) == plain


# A published config.json, its number of parameters, and the bytes of a token's rows in 16 bits.
RELEASES = """
Llama-2-7B 6738415616 524288 4096 11008 32 32 - 32000 4096 {"pretraining_tp": 1}
Llama-3.1-8B 8030261248 131072 4096 14336 32 32 8 128256 131072 {"rope_theta": 5e5, "scaled": 8.0}
Llama-3.2-1B 1235814400 32768 2048 8192 16 32 8 128256 131072 \
    {"rope_theta": 5e5, "scaled": 32.0, "tie_word_embeddings": true, "head_dim": 64}
Mistral-7B-v0.1 7241732096 131072 4096 14336 32 32 8 32000 32768 \
    {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 1e4}
Mistral-7B-v0.3 7248023552 131072 4096 14336 32 32 8 32768 32768 \
    {"model_type": "mistral", "sliding_window": null, "rope_theta": 1e6}
Mistral-Nemo 12247782400 163840 5120 14336 40 32 8 131072 1024000 \
    {"model_type": "mistral", "sliding_window": null, "head_dim": 128, "rope_theta": 1e6}
TinyLlama-1.1B 1100048384 22528 2048 5632 22 32 4 32000 2048 {"rope_theta": 10000.0}
SmolLM2-135M 134515008 23040 576 1536 30 9 3 49152 8192 \
    {"tie_word_embeddings": true, "rope_theta": 100000, "rope_interleaved": false}
Qwen2.5-0.5B 494032768 12288 896 4864 24 14 2 151936 32768 {"model_type": "qwen2", \
    "tie_word_embeddings": true, "rope_theta": 1e6, "use_sliding_window": false, \
    "sliding_window": 32768, "max_window_layers": 21}
Qwen3-0.6B 596049920 114688 1024 3072 28 16 8 151936 40960 {"model_type": "qwen3", \
    "head_dim": 128, "tie_word_embeddings": true, "rope_theta": 1000000, "attention_bias": false, \
    "use_sliding_window": false, "sliding_window": null, "max_window_layers": 28}
Phi-4 14659507200 204800 5120 17920 40 40 10 100352 16384 {"model_type": "phi3", \
    "sliding_window": null, "rope_theta": 250000, "original_max_position_embeddings": 16384}
SmolLM3-3B 3075098624 73728 2048 11008 36 16 4 128256 65536 {"model_type": "smollm3", \
    "no_rope_layer_interval": 4, "sliding_window": null, "rope_theta": 5000000.0}
OLMo-2-1124-7B 7298617344 524288 4096 11008 32 32 32 100352 4096 {"model_type": "olmo2", \
    "rope_theta": 500000, "attention_bias": false}
""".replace("\\\n", "")


@pytest.mark.parametrize("line", RELEASES.strip().splitlines(), ids=lambda line: line.split()[0])
def test_published_models_have_their_published_size(line: str, tmp_path: Path) -> None:
    name, parameters, row_bytes, *sizes, rest = line.split(maxsplit=10)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "vocab_size", "max_position_embeddings")
    raw = {key: int(size) for key, size in zip(keys, sizes, strict=True) if size != "-"}
    common = {"hidden_act": "silu", "torch_dtype": "bfloat16", "attention_dropout": 0.0}
    raw |= {"model_type": "llama", "rms_norm_eps": 1e-5} | common | json.loads(rest)
    if factor := raw.pop("scaled", None):
        raw["rope_scaling"] = LLAMA3 | {"factor": factor}
    config = read(tmp_path, raw)
    assert config.parameters == int(parameters)
    assert 4 * config.layers * config.kv_heads * config.head_dim == int(row_bytes)
    assert config.max_context == raw["max_position_embeddings"]
    assert set(config.windows) == {4096 if name == "Mistral-7B-v0.1" else None}
    assert config.notes == ()


def test_bytes_that_are_not_utf8_and_a_folder_without_a_file(tmp_path: Path) -> None:
    error = refused(lambda: ModelConfig.from_folder(tmp_path))
    assert (error.exit_code, "config.json" in str(error)) == (3, True)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    refused(lambda: ModelConfig.from_folder(tmp_path), code=6)


YARN_2 = {"type": "yarn", "factor": 2.0}
# The key of rope_scaling, the other keys, the least value, the largest, and values beyond these.
LIMITS: list[tuple[str, Raw, float, float, tuple[float, ...]]] = [
    ("factor", {"type": "linear"}, 1.0, 1e6, (0.999, 1.001e6)),
    ("low_freq_factor", LLAMA3 | {"high_freq_factor": 1e6}, 1e-3, 1e5, (0.999e-3,)),
    # It must be above the other one, which is at its least.
    ("high_freq_factor", LLAMA3 | {"low_freq_factor": 1e-3}, 2e-3, 1e6, (1.001e6,)),
    ("beta_fast", YARN_2 | {"beta_slow": 1e-3}, 1e-3, 1e6, (0.999e-3, 1.001e6)),
    ("beta_slow", YARN_2 | {"beta_fast": 1e6}, 1e-3, 1e6, (0.999e-3, 1.001e6)),
    ("attention_factor", YARN_2, 1e-6, 1e6, (0.999e-6, 1.001e6)),
    ("mscale", YARN_2, 0.0, 1e3, (-0.001, 1.001e3)),
    ("mscale_all_dim", YARN_2, 0.0, 1e3, (-0.001, 1.001e3)),
    ("rope_theta", {"type": "linear", "factor": 2.0}, 1.0, 1e15, (0.999, 1.001e15)),
]


@pytest.mark.parametrize(
    ("key", "others", "low", "high", "beyond"), LIMITS, ids=[one[0] for one in LIMITS]
)
def test_rotary_settings_up_to_their_limits(
    key: str, others: Raw, low: float, high: float, beyond: tuple[float, ...], tmp_path: Path
) -> None:
    raw = without(LLAMA, "rope_theta")
    for value in (low, high):
        read(tmp_path, raw | {"rope_scaling": others | {key: value}})
    for value in beyond:
        refused(partial(read, tmp_path, raw | {"rope_scaling": others | {key: value}}), key)
    refused(lambda: read(tmp_path, LLAMA | {"rope_theta": 0.999}), "rope_theta")


@pytest.mark.parametrize(
    ("hf", "own", "low", "high"),
    [
        ("intermediate_size", "hidden_dim", 1, MAX_MLP),
        ("vocab_size", "vocab_size", 1, MAX_VOCAB),
        ("max_position_embeddings", "max_seq_len", 1, MAX_POSITIONS),
        ("num_hidden_layers", "n_layers", 1, MAX_LAYERS),
        ("hidden_size", "dim", 1, MAX_HIDDEN),
        ("num_attention_heads", "n_heads", 2, MAX_HEADS),
        ("head_dim", "head_dim", 2, MAX_HEAD_DIM),
    ],
)
def test_sizes_up_to_their_limits_are_read(
    hf: str, own: str, low: int, high: int, tmp_path: Path
) -> None:
    for raw, key in ((LLAMA | {"head_dim": 16}, hf), (PARAMS, own)):
        for size in (low, high):
            config = read(tmp_path, raw | {key: size})
            sizes = (config.mlp, config.vocab, config.max_context, config.layers, config.hidden)
            assert size in (*sizes, config.heads, config.head_dim)
        for size in (0, high + 1):
            refused(partial(read, tmp_path, raw | {key: size}), key)

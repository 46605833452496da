"""config.json and params.json: what is read, what is refused, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from minikv.models.config import (
    MAX_LAYERS,
    MAX_MLP,
    MAX_POSITIONS,
    MAX_VOCAB,
    ModelConfig,
    OwnSampling,
)
from minikv.models.errors import ModelError
from minikv.models.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARAMS: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "head_dim": 16,
    "hidden_dim": 128,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "vocab_size": 100,
    "rope_theta": 1e6,
}


def read(folder: Path, raw: object, generation: str | None = None) -> ModelConfig:
    text = raw if isinstance(raw, str) else json.dumps(raw)
    (folder / "config.json").write_text(text)
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    return ModelConfig.from_folder(folder)


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def test_a_plain_llama(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.hidden, config.mlp, config.vocab) == (64, 128, 100)
    assert config.windows == (None, None)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert config.stop_ids == (2,)
    flags = (config.tied, config.qkv_bias, config.o_bias, config.mlp_bias)
    assert flags == (False, False, False, False)
    assert config.notes == ()
    assert config.kv_row_bytes(2) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": without(LLAMA3, "rope_type") | {"type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": LLAMA3},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3 | {"rope_theta": 500000}},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3, "rope_scaling": None},
    ],
)
def test_every_spelling_of_the_rotary_settings_means_the_same(
    spelling: dict[str, Any], tmp_path: Path
) -> None:
    rope = read(tmp_path, without(LLAMA, "rope_theta") | spelling).rope
    assert rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "absent", "wants"),
    [
        ({}, ("num_key_value_heads",), {"kv_heads": 4}),
        ({"num_key_value_heads": None}, (), {"kv_heads": 4}),
        ({}, ("rms_norm_eps",), {"norm_eps": 1e-6}),
        ({}, ("rope_theta",), {"rope": RopeConfig(10_000.0)}),
        ({}, ("max_position_embeddings",), {"max_context": 2048}),
        ({}, ("eos_token_id",), {"stop_ids": ()}),
        ({"eos_token_id": [7, 3, 7]}, (), {"stop_ids": (3, 7)}),
        ({"eos_token_id": -1}, (), {"stop_ids": ()}),
        ({"head_dim": 32}, (), {"head_dim": 32}),
        ({"head_dim": None}, (), {"head_dim": 16}),
        ({"attention_bias": True}, (), {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
        ({"mlp_bias": True}, (), {"qkv_bias": False, "mlp_bias": True}),
        ({"tie_word_embeddings": True}, (), {"tied": True}),
        ({"model_type": None}, (), {"family": "llama"}),
    ],
)
def test_llama_defaults(
    changes: dict[str, Any], absent: tuple[str, ...], wants: dict[str, Any], tmp_path: Path
) -> None:
    config = read(tmp_path, without(LLAMA, *absent) | changes)
    assert {name: getattr(config, name) for name in wants} == wants


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (MISTRAL, (4096, 4096)),  # absent means 4096 in the configuration class
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (MISTRAL | {"sliding_window": 7}, (7, 7)),
        (QWEN, (None, None)),
        (QWEN | {"sliding_window": 7}, (None, None)),
        (
            QWEN | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
            (None, 7),
        ),
        (QWEN | {"use_sliding_window": True, "sliding_window": 7}, (None, None)),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        (
            MISTRAL
            | {
                "model_type": "ministral",
                "architectures": ["MinistralForCausalLM"],
                "sliding_window": 7,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            (None, 7),
        ),
        (LLAMA | {"layer_types": ["full_attention"] * 2}, (None, None)),
    ],
)
def test_windows(raw: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert read(tmp_path, raw).windows == windows


def test_mistral_defaults_to_eight_kv_heads(tmp_path: Path) -> None:
    raw = without(MISTRAL, "num_key_value_heads") | {"num_attention_heads": 16}
    assert read(tmp_path, raw).kv_heads == 8


def test_qwen_has_bias_on_queries_keys_and_values_only(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


def test_dynamic_scaling_is_held_to_its_original_length(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert config.max_context == 512
    assert any("dynamic" in note for note in config.notes)


def test_what_is_ignored_is_said(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {"pretraining_tp": 1}).notes == ()
    (note,) = read(tmp_path, LLAMA | {"pretraining_tp": 2}).notes
    assert "pretraining_tp is ignored" in note
    (note,) = read(tmp_path, LLAMA | {"auto_map": {"AutoConfig": "x.Y"}}).notes
    assert "auto_map is ignored" in note


def test_yarn_has_its_own_attention_factor_or_none(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    rope = read(tmp_path, LLAMA | {"rope_scaling": yarn}).rope
    assert (rope.kind, rope.factor, rope.original) == ("yarn", 4.0, 512)
    assert (rope.attention_factor, rope.beta_fast, rope.beta_slow) == (None, 32.0, 1.0)
    rope = read(tmp_path, LLAMA | {"rope_scaling": yarn | {"attention_factor": 0.5}}).rope
    assert rope.attention_factor == 0.5


def test_generation_config_adds_stop_ids(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA, '{"eos_token_id": [128001, 128009]}')
    assert config.stop_ids == (2, 128001, 128009)
    assert config.notes == ()


@pytest.mark.parametrize(
    "text",
    ['{"eos_token_id": 5,}', "", "[]", '{"eos_token_id": "x"}', "\xff", '{"a": 1, "a": 2}', "NaN"],
)
def test_a_broken_generation_config_costs_a_note(text: str, tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA, text)
    assert config.stop_ids == (2,)
    assert len(config.notes) == 1
    assert "generation_config.json" in config.notes[0]


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
def test_the_own_sampling_is_that_of_transformers(raw: dict[str, Any], tmp_path: Path) -> None:
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
        *(("do_sample", value) for value in ("yes", 1, [])),
        *(("temperature", value) for value in ("hot", -1, 101, True, [1], 10**400)),
        *(("top_k", value) for value in (1.5, -1, 2**40, "50", False)),
        *(("top_p", value) for value in (1.1, -0.1, {})),
        *(("min_p", value) for value in (2, "0.1")),
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


BAD: list[tuple[str, object, int, str]] = [
    # what is wrong, the file, the exit code, a word of the message
    ("empty file", "", 6, "not valid JSON"),
    ("truncated", '{"model_type": "llama", ', 6, "not valid JSON"),
    ("not an object", "[1, 2]", 6, "object"),
    ("NaN", '{"rms_norm_eps": NaN}', 6, "NaN"),
    ("a key twice", '{"model_type": "llama", "model_type": "llama"}', 6, "twice"),
    ("nested deeply", "[" * 100_000, 6, "not valid JSON"),
    ("a huge integer", '{"vocab_size": ' + "9" * 5000 + "}", 6, "not valid JSON"),
    ("no model_type", without(LLAMA, "model_type", "architectures"), 6, "model_type"),
    ("model_type is a number", LLAMA | {"model_type": 3}, 6, "model_type"),
    ("architectures is a string", LLAMA | {"architectures": "x"}, 6, "architectures"),
    ("phi3", LLAMA | {"model_type": "phi3"}, 3, "phi3"),
    ("gemma", LLAMA | {"model_type": "gemma"}, 3, "gemma"),
    ("mixtral", LLAMA | {"model_type": "mixtral"}, 3, "mixture of experts"),
    ("llama4", LLAMA | {"model_type": "llama4"}, 3, "llama4"),
    ("ministral3", LLAMA | {"model_type": "ministral3"}, 3, "llama_4_scaling"),
    ("unheard of", LLAMA | {"model_type": "\x1b[31mx"}, 3, "\\x1b"),
    ("a classifier", LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, 3, "Sequence"),
    ("own code", LLAMA | {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, 3, "auto_map"),
    ("experts", LLAMA | {"num_local_experts": 8}, 3, "num_local_experts"),
    ("images", LLAMA | {"vision_config": {"a": 1}}, 3, "vision_config"),
    ("gptq", LLAMA | {"quantization_config": {"quant_method": "gptq"}}, 3, "gptq"),
    ("bitsandbytes", LLAMA | {"quantization_config": {"load_in_4bit": True}}, 3, "bitsandbytes"),
    ("quantised, oddly", LLAMA | {"quantization_config": "yes"}, 6, "quantization_config"),
    ("gelu", LLAMA | {"hidden_act": "gelu"}, 3, "gelu"),
    ("rotary pairs", LLAMA | {"rope_interleaved": True}, 3, "rope_interleaved"),
    ("partial rotary", LLAMA | {"partial_rotary_factor": 0.5}, 3, "partial_rotary_factor"),
    ("rotary twice", LLAMA | {"partial_rotary_factor": 2}, 3, "partial_rotary_factor"),
    ("theta huge", LLAMA | {"rope_theta": 1.5e15}, 6, "rope_theta"),
    ("5 of 32 heads", LLAMA | {"num_attention_heads": 32, "num_key_value_heads": 5}, 6, "5 KV"),
    ("hidden not divisible", LLAMA | {"num_attention_heads": 6}, 6, "multiple"),
    ("head_dim 0", LLAMA | {"head_dim": 0}, 6, "head_dim"),
    ("head_dim odd", LLAMA | {"head_dim": 17}, 6, "head_dim"),
    ("head_dim huge", LLAMA | {"head_dim": 4096}, 6, "head_dim"),
    ("vocab -1", LLAMA | {"vocab_size": -1}, 6, "vocab_size"),
    ("vocab huge", LLAMA | {"vocab_size": 2**40}, 6, "vocab_size"),
    ("vocab true", LLAMA | {"vocab_size": True}, 6, "vocab_size"),
    ("vocab 100.0", LLAMA | {"vocab_size": 100.0}, 6, "vocab_size"),
    ("layers missing", without(LLAMA, "num_hidden_layers"), 6, "num_hidden_layers"),
    ("layers huge", LLAMA | {"num_hidden_layers": 513}, 6, "num_hidden_layers"),
    ("hidden huge", LLAMA | {"hidden_size": 2**20}, 6, "hidden_size"),
    ("mlp a string", LLAMA | {"intermediate_size": "128"}, 6, "intermediate_size"),
    ("theta a string", LLAMA | {"rope_theta": "500000"}, 6, "rope_theta"),
    ("theta zero", LLAMA | {"rope_theta": 0}, 6, "rope_theta"),
    ("theta infinite", '{"model_type": "llama", "rope_theta": 1e999}', 6, ""),
    ("eps negative", LLAMA | {"rms_norm_eps": -1e-5}, 6, "rms_norm_eps"),
    ("eps a list", LLAMA | {"rms_norm_eps": []}, 6, "rms_norm_eps"),
    (
        "theta beyond any float",
        json.dumps(LLAMA).replace("10000.0", "1" + "0" * 400),
        6,
        "rope_theta",
    ),
    ("eps nested", LLAMA | {"rms_norm_eps": json.loads("[" * 900 + "]" * 900)}, 6, "rms_norm_eps"),
    ("tied a number", LLAMA | {"tie_word_embeddings": 1}, 6, "tie_word_embeddings"),
    ("eos a string", LLAMA | {"eos_token_id": "</s>"}, 6, "eos_token_id"),
    ("context zero", LLAMA | {"max_position_embeddings": 0}, 6, "max_position_embeddings"),
    ("window zero", MISTRAL | {"sliding_window": 0}, 6, "sliding_window"),
    ("window a string", MISTRAL | {"sliding_window": "4096"}, 6, "sliding_window"),
    ("window in a llama", LLAMA | {"sliding_window": 4096}, 3, "sliding_window"),
    ("mistral with bias", MISTRAL | {"attention_bias": True}, 3, "bias"),
    ("layer_types short", MISTRAL | {"layer_types": ["full_attention"]}, 6, "layer_types"),
    ("layer_types unknown", QWEN | {"layer_types": ["chunked_attention"] * 2}, 3, "chunked"),
    (
        "mistral pattern",
        MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]},
        3,
        "per-layer",
    ),
    ("rope type unknown", LLAMA | {"rope_scaling": {"rope_type": "bogus"}}, 3, "bogus"),
    ("rope type su", LLAMA | {"rope_scaling": {"type": "su", "factor": 2.0}}, 3, "su"),
    ("rope type longrope", LLAMA | {"rope_scaling": {"type": "longrope"}}, 3, "longrope"),
    ("rope type a number", LLAMA | {"rope_scaling": {"rope_type": 3}}, 3, "3"),
    (
        "rope types disagree",
        LLAMA | {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        6,
        "disagree",
    ),
    (
        "rope key unknown",
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}},
        3,
        "alpha",
    ),
    (
        "rope key of another type",
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}},
        3,
        "beta_fast",
    ),
    (
        "rope factor huge",
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 1e6 + 1}},
        6,
        "factor",
    ),
    ("rope factor missing", LLAMA | {"rope_scaling": {"type": "linear"}}, 6, "factor"),
    (
        "rope factor below 1",
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}},
        6,
        "factor",
    ),
    (
        "rope factor a string",
        LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}},
        6,
        "factor",
    ),
    ("rope not an object", LLAMA | {"rope_scaling": "linear"}, 6, "rope_scaling"),
    (
        "rope per layer",
        LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        3,
        "per layer",
    ),
    (
        "llama3 without original",
        LLAMA | {"rope_scaling": without(LLAMA3, "original_max_position_embeddings")},
        6,
        "original",
    ),
    (
        "llama3 factors swapped",
        LLAMA | {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        6,
        "high_freq_factor",
    ),
    (
        "yarn betas swapped",
        LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 32}},
        6,
        "beta_fast",
    ),
    (
        "yarn with a base of 1",
        LLAMA | {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        6,
        "yarn needs a rope_theta above 1",
    ),
    (
        "thetas disagree",
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        6,
        "disagree",
    ),
    ("chunks not an object", QWEN | {"dual_chunk_attention_config": 7}, 6, "dual_chunk"),
    (
        "chunks of no size",
        QWEN | {"dual_chunk_attention_config": {"local_size": 512}},
        6,
        "chunk_size",
    ),
    (
        "spellings disagree",
        LLAMA | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
        6,
        "disagree",
    ),
    ("llama with sliding layers", LLAMA | {"layer_types": ["sliding_attention"] * 2}, 3, "sliding"),
    (
        "sliding layers that nobody uses",
        QWEN | {"layer_types": ["sliding_attention"] * 2},
        6,
        "use_sliding_window is false",
    ),
    (
        "sliding layers without a window",
        MISTRAL | {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
        6,
        "sliding_window is off",
    ),
    (
        "partial rotary inside",
        LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        3,
        "partial_rotary_factor",
    ),
    (
        "original lengths disagree",
        LLAMA | {"original_max_position_embeddings": 4096, "rope_scaling": LLAMA3},
        6,
        "disagree",
    ),
]


@pytest.mark.parametrize(("raw", "code", "word"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_config(raw: object, code: int, word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, raw)
    assert caught.value.exit_code == code
    text = str(caught.value)
    assert word in text
    assert "\n" not in text
    assert text.isprintable()


NESTED = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("given", "stated", "hint"),
    [
        (
            {"rope_theta": 10_000, "rope_parameters": NESTED},
            "rope_theta 10000, rope_parameters 500000",
            'takes that of rope_parameters; if it is right, delete "rope_theta": 10000 outside of '
            "rope_parameters",
        ),
        (
            {"rope_theta": 500_000, "rope_parameters": NESTED | {"rope_theta": 1e4}},
            "rope_theta 500000, rope_parameters 10000",
            'if it is right, delete "rope_theta": 500000 outside of rope_parameters',
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_parameters": NESTED,
                "rope_scaling": {"type": "linear", "factor": 2, "rope_theta": 1e4},
            },
            "rope_scaling 10000",
            'delete "rope_theta": 1000000.0 outside of rope_scaling and "rope_theta": 500000.0 in '
            "rope_parameters",
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": NESTED, "rope_scaling": LLAMA3},
            "rope_parameters and rope_scaling disagree",
            "transformers takes rope_scaling; if that is right, delete rope_parameters",
        ),
    ],
)
def test_two_bases_are_refused_with_the_lines_to_delete(
    given: dict[str, Any], stated: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, without(LLAMA, "rope_theta") | given)
    assert caught.value.exit_code == 6
    assert stated in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("scaling", "harmless"),
    [
        ({"type": "yarn", "factor": 4.0}, {"finetuned": True}),
        ({"type": "linear", "factor": 2.0}, {"finetuned": False, "low_freq_factor": None}),
        ({"rope_type": "default"}, {"factor": None, "type": None, "rope_theta": None}),
    ],
)
def test_keys_that_compute_nothing(
    key: str, scaling: dict[str, Any], harmless: dict[str, Any], tmp_path: Path
) -> None:
    plain = read(tmp_path, LLAMA | {key: scaling})
    assert read(tmp_path, LLAMA | {key: scaling | harmless}) == plain


@pytest.mark.parametrize(
    ("chunks", "most"),
    [
        ({"chunk_size": 8192, "local_size": 512, "original_max_position_embeddings": 4096}, 4096),
        ({"chunk_size": 8192, "original_max_position_embeddings": 16384}, 8192),
        ({"chunk_size": 8192}, 8192),
        ({"chunk_size": 65536}, None),
        (None, None),
        ({}, None),
    ],
)
def test_chunks_end_where_attention_is_no_longer_plain(
    chunks: object, most: int | None, tmp_path: Path
) -> None:
    """The numbers of Qwen2.5-7B-Instruct-1M, smaller."""
    plain = QWEN | {"max_position_embeddings": 32_768}
    config = read(tmp_path, plain | {"dual_chunk_attention_config": chunks})
    assert config.max_context == (most or 32_768)
    assert [f"limited to {most:,} of 32,768 positions" in note for note in config.notes] == (
        [True] if most else []
    )


def release(
    hidden: int, mlp: int, layers: int, heads: int, kv: int | None, vocab: int, **more: Any
) -> dict[str, Any]:
    """The shape of a published config.json; None leaves a key out."""
    raw = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
        "transformers_version": "4.40.0",
        "attention_dropout": 0.0,
        "rope_scaling": None,
    } | more
    return {key: value for key, value in raw.items() if key != "num_key_value_heads" or value}


RELEASES = {
    # published number of parameters, KV rows' bytes per token in 16 bits, config.json
    "Llama-2-7B": (
        6_738_415_616,
        524_288,
        release(4096, 11008, 32, 32, None, 32000, max_position_embeddings=4096, pretraining_tp=1),
    ),
    "Llama-3.1-8B": (
        8_030_261_248,
        131_072,
        release(
            4096,
            14336,
            32,
            32,
            8,
            128256,
            rope_theta=5e5,
            rope_scaling=LLAMA3,
            pretraining_tp=1,
            max_position_embeddings=131072,
            eos_token_id=[128001, 128008, 128009],
            mlp_bias=False,
        ),
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        32_768,
        release(
            2048,
            8192,
            16,
            32,
            8,
            128256,
            rope_theta=5e5,
            rope_scaling=LLAMA3 | {"factor": 32.0},
            tie_word_embeddings=True,
            head_dim=64,
            max_position_embeddings=131072,
        ),
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        131_072,
        release(
            4096,
            14336,
            32,
            32,
            8,
            32000,
            model_type="mistral",
            sliding_window=4096,
            rope_theta=10000.0,
            max_position_embeddings=32768,
        ),
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        131_072,
        release(
            4096,
            14336,
            32,
            32,
            8,
            32768,
            model_type="mistral",
            sliding_window=None,
            rope_theta=1e6,
            max_position_embeddings=32768,
        ),
    ),
    "Mistral-Nemo": (
        12_247_782_400,
        163_840,
        release(
            5120,
            14336,
            40,
            32,
            8,
            131072,
            model_type="mistral",
            sliding_window=None,
            head_dim=128,
            rope_theta=1e6,
            max_position_embeddings=1024000,
        ),
    ),
    "TinyLlama-1.1B": (
        1_100_048_384,
        22_528,
        release(2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048, rope_theta=10000.0),
    ),
    "SmolLM2-135M": (
        134_515_008,
        23_040,
        release(
            576,
            1536,
            30,
            9,
            3,
            49152,
            tie_word_embeddings=True,
            rope_theta=100000,
            is_llama_config=True,
            rope_interleaved=False,
            max_position_embeddings=8192,
        ),
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        12_288,
        release(
            896,
            4864,
            24,
            14,
            2,
            151936,
            model_type="qwen2",
            tie_word_embeddings=True,
            rope_theta=1e6,
            use_sliding_window=False,
            sliding_window=32768,
            max_window_layers=21,
            max_position_embeddings=32768,
        ),
    ),
}


@pytest.mark.parametrize("name", RELEASES)
def test_published_models_have_their_published_size(name: str, tmp_path: Path) -> None:
    parameters, row_bytes, raw = RELEASES[name]
    config = read(tmp_path, raw)
    assert config.parameters == parameters
    assert config.kv_row_bytes(2) == row_bytes
    assert config.max_context == raw["max_position_embeddings"]
    assert set(config.windows) == {4096 if name == "Mistral-7B-v0.1" else None}
    assert config.notes == ()


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert caught.value.exit_code == 6


def test_a_config_of_ten_megabytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, LLAMA | {"_": "x" * 10_000_000})
    assert caught.value.exit_code == 6


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert caught.value.exit_code == 3
    assert "config.json" in str(caught.value)


def params(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    (folder / "params.json").write_text(json.dumps(raw))
    return ModelConfig.from_folder(folder)


def test_params_of_the_original_layout(tmp_path: Path) -> None:
    config = params(tmp_path, PARAMS)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.rope == RopeConfig(theta=1e6)
    assert config.windows == (None, None)
    assert any("context" in note for note in config.notes)


@pytest.mark.parametrize(
    ("lengths", "context"),
    [
        ({"max_seq_len": 700}, 700),
        ({"max_position_embeddings": 900}, 900),
        ({"max_position_embeddings": 900, "max_seq_len": 700}, 900),
        ({"rope_theta": 1e6}, 32_768),
        ({"rope_theta": 5e5}, 8192),
        ({"rope_theta": 4e5}, 4096),
        ({"rope_theta": 1e4, "sliding_window": 4096}, 32_768),
    ],
)
def test_the_context_of_params_is_named_or_assumed(
    lengths: dict[str, Any], context: int, tmp_path: Path
) -> None:
    config = params(tmp_path, PARAMS | lengths)
    assert config.max_context == context
    named = "max_seq_len" in lengths or "max_position_embeddings" in lengths
    assert any("names no context length" in note for note in config.notes) != named


def test_params_with_the_window_of_mistral_v01_means_its_theta(tmp_path: Path) -> None:
    config = params(tmp_path, without(PARAMS, "rope_theta") | {"sliding_window": 4096})
    assert config.rope.theta == 10_000.0
    assert config.windows == (4096, 4096)


def test_params_with_a_list_of_windows_repeat_it(tmp_path: Path) -> None:
    config = params(tmp_path, PARAMS | {"n_layers": 4, "sliding_window": [None, 7]})
    assert config.windows == (None, 7, None, 7)


def test_params_of_meta_derive_the_width_of_the_mlp(tmp_path: Path) -> None:
    raw = without(PARAMS, "hidden_dim") | {
        "dim": 4096,
        "head_dim": 128,
        "n_heads": 32,
        "n_kv_heads": 8,
        "rope_theta": 5e5,
        "multiple_of": 1024,
        "ffn_dim_multiplier": 1.3,
    }
    config = params(tmp_path, raw)
    assert config.mlp == 14336  # Llama-3-8B
    assert config.max_context == 8192


BAD_PARAMS: list[tuple[dict[str, Any], tuple[str, ...], int, str]] = [
    ({"n_heads": 6, "n_kv_heads": 2}, ("head_dim",), 6, "dim 64 is not a multiple of n_heads 6"),
    ({}, ("rope_theta",), 6, "rope_theta"),
    ({}, ("dim",), 6, "dim"),
    ({"vocab_size": -1}, (), 6, "vocab_size"),
    ({"moe": {"num_experts": 8}}, (), 3, "moe"),
    ({"quantization": {"qformat_weight": "fp8_e4m3"}}, (), 3, "fp8_e4m3"),
    ({"vision_encoder": {}}, (), 3, "vision_encoder"),
    ({"use_scaled_rope": True}, (), 3, "use_scaled_rope"),
    ({"use_biases": True}, (), 3, "use_biases"),
    ({"model_type": "mamba"}, (), 3, "mamba"),
    ({"sliding_window": [None, 7, 7]}, (), 6, "sliding_window"),
    ({"sliding_window": -1}, (), 6, "sliding_window"),
    ({"n_kv_heads": 3}, (), 6, "KV heads"),
]


@pytest.mark.parametrize(("changes", "absent", "code", "word"), BAD_PARAMS)
def test_bad_params(
    changes: dict[str, Any], absent: tuple[str, ...], code: int, word: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        params(tmp_path, without(PARAMS, *absent) | changes)
    assert caught.value.exit_code == code
    assert word in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "full_attention", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
KEYS = [
    *LLAMA,
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "head_dim",
    "attention_bias",
    "quantization_config",
    "use_sliding_window",
    "max_window_layers",
    "auto_map",
    "tie_word_embeddings",
    "original_max_position_embeddings",
    "pretraining_tp",
]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    base=st.sampled_from([LLAMA, MISTRAL, QWEN]),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=4),
)
def test_any_json_is_read_or_refused(
    base: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """No exception but ModelError, and whatever is accepted is sound."""
    try:
        config = read(tmp_path, base | changes)
    except ModelError:
        return
    assert config.heads % config.kv_heads == 0
    assert config.head_dim % 2 == 0
    assert len(config.windows) == config.layers
    assert all(window is None or window > 0 for window in config.windows)
    assert config.max_context > 0
    assert config.rope.theta >= 1


LIMITS: list[tuple[str, dict[str, Any], float, float]] = [
    # the key of rope_scaling, the other keys, the least and the largest value
    ("factor", {"type": "linear"}, 1.0, 1e6),
    ("low_freq_factor", LLAMA3 | {"high_freq_factor": 1e6}, 1e-3, 1e5),
    ("high_freq_factor", LLAMA3 | {"low_freq_factor": 1e-3}, 2e-3, 1e6),
    ("beta_fast", {"type": "yarn", "factor": 2.0, "beta_slow": 1e-3}, 1e-3, 1e6),
    ("beta_slow", {"type": "yarn", "factor": 2.0, "beta_fast": 1e6}, 1e-3, 1e6),
    ("attention_factor", {"type": "yarn", "factor": 2.0}, 1e-6, 1e6),
    ("mscale", {"type": "yarn", "factor": 2.0}, 0.0, 1e3),
    ("mscale_all_dim", {"type": "yarn", "factor": 2.0}, 0.0, 1e3),
    ("rope_theta", {"type": "linear", "factor": 2.0}, 1.0, 1e15),
]


@pytest.mark.parametrize(("key", "others", "low", "high"), LIMITS, ids=[one[0] for one in LIMITS])
def test_rotary_settings_up_to_their_limits(
    key: str, others: dict[str, Any], low: float, high: float, tmp_path: Path
) -> None:
    raw = without(LLAMA, "rope_theta")
    for value in (low, high):
        read(tmp_path, raw | {"rope_scaling": others | {key: value}})
    beyond = [low * 0.999 if low else -0.001]
    beyond += [] if key == "low_freq_factor" else [high * 1.001]
    for value in beyond:
        if key == "high_freq_factor" and value < 1:
            continue  # it must be above the other one, which is at its least
        with pytest.raises(ModelError, match=key):
            read(tmp_path, raw | {"rope_scaling": others | {key: value}})
    if key != "rope_theta":
        low_theta = LLAMA | {"rope_theta": 0.999}
        with pytest.raises(ModelError, match="rope_theta"):
            read(tmp_path, low_theta)


def test_an_assumed_context_is_said(tmp_path: Path) -> None:
    (note,) = read(tmp_path, without(LLAMA, "max_position_embeddings")).notes
    assert note == "config.json has no max_position_embeddings: assuming 2048"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_any_share_of_kv_heads_is_read_in_both_layouts(kv_heads: int, tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {"num_key_value_heads": kv_heads}).kv_heads == kv_heads
    (tmp_path / "config.json").unlink()
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | {"n_kv_heads": kv_heads}))
    assert ModelConfig.from_folder(tmp_path).kv_heads == kv_heads


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("linear", {}),
        ("dynamic", {}),
        ("yarn", {"original": 512}),
        ("llama3", {"original": 64, "low_freq_factor": 1.0, "high_freq_factor": 2.0}),
    ],
)
def test_what_a_rotary_scaling_leaves_out_has_its_default(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"rope_type": kind, "factor": 2.0}
    if kind == "llama3":
        given |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 64,
        }
    rope = read(tmp_path, LLAMA | {"rope_scaling": given}).rope
    assert rope == RopeConfig(kind=kind, factor=2.0, **more)


@pytest.mark.parametrize(
    ("hf", "original", "high"),
    [
        ("intermediate_size", "hidden_dim", MAX_MLP),
        ("vocab_size", "vocab_size", MAX_VOCAB),
        ("max_position_embeddings", "max_seq_len", MAX_POSITIONS),
        ("num_hidden_layers", "n_layers", MAX_LAYERS),
    ],
)
def test_sizes_from_one_to_their_limit_are_read(
    hf: str, original: str, high: int, tmp_path: Path
) -> None:
    for name, key, raw in (("config.json", hf, LLAMA), ("params.json", original, PARAMS)):
        for size in (1, high):
            (tmp_path / name).write_text(json.dumps(raw | {key: size}))
            config = ModelConfig.from_folder(tmp_path)
            assert size in (config.mlp, config.vocab, config.max_context, config.layers)
        for size in (0, high + 1):
            (tmp_path / name).write_text(json.dumps(raw | {key: size}))
            with pytest.raises(ModelError, match=key):
                ModelConfig.from_folder(tmp_path)
        (tmp_path / name).unlink()


def test_params_name_the_size_of_a_head_or_it_is_the_width_by_the_heads(tmp_path: Path) -> None:
    """Only where it is not named do the heads have to divide the width."""
    plain = without(PARAMS, "head_dim")
    assert params(tmp_path, plain | {"dim": 96}).head_dim == 24
    assert params(tmp_path, plain | {"dim": 98, "head_dim": 16}).head_dim == 16
    with pytest.raises(ModelError, match="dim 98 is not a multiple of n_heads 4"):
        params(tmp_path, plain | {"dim": 98})


def test_the_smallest_params(tmp_path: Path) -> None:
    """One of everything, and a head of two numbers."""
    least = {"dim": 2, "head_dim": 2, "n_heads": 1, "n_kv_heads": 1, "n_layers": 1}
    config = params(tmp_path, PARAMS | least | {"hidden_dim": 1, "vocab_size": 1, "max_seq_len": 1})
    assert (config.hidden, config.head_dim, config.heads, config.kv_heads) == (2, 2, 1, 1)
    assert (config.layers, config.mlp, config.vocab, config.max_context) == (1, 1, 1, 1)
    for key in ("dim", "head_dim", "n_heads", "n_kv_heads", "n_layers", "hidden_dim"):
        with pytest.raises(ModelError, match=key):
            params(tmp_path, PARAMS | least | {key: 0})


def test_qwen_may_say_that_more_layers_are_full_than_there_are(tmp_path: Path) -> None:
    slides = QWEN | {"use_sliding_window": True, "sliding_window": 7}
    for full in (0, 1, 100, 2**31):
        windows = read(tmp_path, slides | {"max_window_layers": full}).windows
        assert windows == tuple(None if layer < full else 7 for layer in range(2))
    with pytest.raises(ModelError, match="max_window_layers"):
        read(tmp_path, slides | {"max_window_layers": 2**31 + 1})

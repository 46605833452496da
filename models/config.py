"""A model's configuration, read from its files and checked before anything is allocated.

This is deliberately stricter than transformers: a key that could be misread silently (rotary
scaling, window, head size) is an error. A value that makes no sense raises CorruptModel. A setting
that this network does not implement raises UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minikv.models.errors import (
    CorruptModel,
    ModelError,
    ModelUnavailable,
    UnsupportedModel,
    quote,
)
from minikv.models.files import read_json
from minikv.models.rope import RopeConfig

MAX_LAYERS, MAX_HIDDEN, MAX_VOCAB = 512, 65_536, 2**20
MAX_HEADS, MAX_HEAD_DIM, MAX_MLP, MAX_POSITIONS = 1024, 1024, 2**20, 2**26
MAX_TOP_K = 2**31
_LENGTH = "original_max_position_embeddings"  # a key in three places


@dataclass(frozen=True, slots=True)
class OwnSampling:
    """How the model's makers draw its tokens. temperature 0: they take the likeliest. why: why
    nothing else is known, for the user; "" if they draw."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    why: str = "the model has no generation_config.json"


@dataclass(frozen=True, slots=True)
class OwnForm:
    """In which form the files have some of the matrices, so that it is kept.

    matrix: one of those that `weights.matrices` names. form: "int8" or "int4". group: how many
    columns share a scale; 0: a whole row. count: in how many layers it is so.
    """

    matrix: str
    form: str
    group: int
    count: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and settings from which a model's network and cache are built."""

    family: str
    layers: int
    heads: int
    """Query heads, H * G."""
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocab: int
    """Rows of the embedding. There may be more than the tokenizer has entries."""
    norm_eps: float
    rope: RopeConfig
    max_context: int
    """How many positions a conversation may have."""
    windows: tuple[int | None, ...]
    """Per layer: a key is visible iff 0 <= query position - key position < window; None: all."""
    tied: bool = False
    """Whether lm_head is the embedding, according to the file. The loader decides by the tensors;
    `Llama.config` has the result."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    stop_ids: tuple[int, ...] = ()
    """End-of-text ids of config.json and generation_config.json, ascending."""
    own: OwnSampling = OwnSampling()
    """What generation_config.json says about sampling."""
    form: str = ""
    """What the files' own form is called, for the user ("Q4_K_M"); "": they are not quantised."""
    stored: tuple[OwnForm, ...] = ()
    """The matrices that the files have in eight or four bits; the others are plain."""
    notes: tuple[str, ...] = ()
    """Messages for the user: settings that were ignored or assumed."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json (or, without one, params.json of Mistral's own layout).

        Raises CorruptModel, UnsupportedModel or ModelUnavailable, naming the file and the key.
        """
        folder = Path(folder)
        if (folder / "config.json").exists():
            config = from_keys(read_json(folder / "config.json"), "config.json")
        elif (folder / "params.json").exists():
            config = _from_params(read_json(folder / "params.json"))
        else:
            raise ModelUnavailable(
                f"{folder} holds no model: config.json is missing",
                "give the directory that holds config.json and the .safetensors files",
            )
        return _with_generation(config, folder / "generation_config.json")

    @property
    def parameters(self) -> int:
        """Number of weights; a tied lm_head is counted once."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (q + 2 * kv) + q * self.hidden
        attention += self.qkv_bias * (q + 2 * kv) + self.o_bias * self.hidden
        mlp = 3 * self.hidden * self.mlp + self.mlp_bias * (2 * self.mlp + self.hidden)
        head = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + mlp + 2 * self.hidden) + self.hidden + head


@dataclass(frozen=True, slots=True)
class _Family:
    """How one model_type differs from the others. Defaults are those of its configuration class in
    transformers.

    kv_heads: None: as many as heads. window: if sliding_window is absent (null means off); None: it
    has none. pattern: layer_types may mix windows. switch: there are windows only with
    use_sliding_window, from layer max_window_layers on. biases: it reads attention_bias and
    mlp_bias. norm_eps: None: the file must say it.
    """

    architecture: str
    max_context: int
    kv_heads: int | None = None
    window: int | None = None
    pattern: bool = True
    switch: bool = False
    qkv_bias: bool = False
    biases: bool = False
    norm_eps: float | None = 1e-6


# transformers' own mistral class ignores layer_types; a pattern there is ambiguous.
FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", 2048, biases=True),
    "mistral": _Family("MistralForCausalLM", 131_072, kv_heads=8, window=4096, pattern=False),
    "ministral": _Family("MinistralForCausalLM", 131_072, kv_heads=8, window=4096),
    "qwen2": _Family("Qwen2ForCausalLM", 32_768, window=4096, switch=True, qkv_bias=True),
}

_REASONS = {
    "llama4": "mixture of experts",
    "mllama": "an image model",
    "mixtral": "mixture of experts",
    "mistral3": "an image model",
    "mistral4": "another attention",
    "ministral3": "it scales queries by position (llama_4_scaling)",
    "phi3": "fused projections and longrope",
    "qwen2_moe": "mixture of experts",
    "qwen3": "it normalises queries and keys",
    "qwen3_moe": "mixture of experts",
    "gemma": "another normalisation and activation",
    "gemma2": "soft-capped attention",
    "gemma3": "another normalisation and activation",
    "gpt2": "learned positions",
    "smollm3": "layers without rotary positions",
    "deepseek_v3": "latent attention",
}


class _Reader:
    """Typed access to one JSON object by the keys of config.json. Every error names the file and
    the key. names: what the file calls a key, if it has another name for it."""

    def __init__(
        self, raw: Mapping[str, Any], where: str, names: Mapping[str, str] | None = None
    ) -> None:
        self.where, self._names = where, names or {}
        keys = {own: key for key, own in self._names.items()}
        self.raw = {keys.get(own, own): value for own, value in raw.items()}

    def name(self, key: str) -> str:
        """What the file calls this key."""
        return self._names.get(key, key)

    def bad(self, key: str, wants: str) -> CorruptModel:
        got = quote(self.raw[key]) if key in self.raw else "nothing"
        return CorruptModel(f"{self.where}: {self.name(key)} must be {wants}, got {got}")

    def given(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value: Any = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value, int) or not low <= value <= high:
            raise self.bad(key, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value: Any = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value, int, float) or not low <= value <= high:  # false for NaN
            raise self.bad(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return value


def _is_number(value: Any, *kinds: type) -> bool:
    """Whether a value is of one of these kinds. True and false are not numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _sizes(read: _Reader, family: _Family) -> ModelConfig:
    """What both config.json and params.json say. Windows and biases are left out."""
    notes: tuple[str, ...] = ()
    heads = read.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = read.integer("num_key_value_heads", 1, MAX_HEADS, family.kv_heads or heads)
    if read.raw.get("num_key_value_heads", 0) is None:
        kv_heads = heads  # null is not absent: in transformers it means as many as heads
    hidden = read.integer("hidden_size", 1, MAX_HIDDEN)
    layers = read.integer("num_hidden_layers", 1, MAX_LAYERS)
    if not read.given("head_dim") and hidden % heads:
        raise CorruptModel(
            f"{read.where}: {read.name('hidden_size')} {hidden} is not a multiple of "
            f"{read.name('num_attention_heads')} {heads}"
        )
    head_dim = read.integer("head_dim", 2, MAX_HEAD_DIM, hidden // heads)
    if heads % kv_heads:
        raise CorruptModel(f"{read.where}: {heads} heads cannot be shared by {kv_heads} KV heads")
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise CorruptModel(
            f"{read.where}: head_dim {head_dim} must be even and at most {MAX_HEAD_DIM}"
        )
    key = "max_position_embeddings"
    max_context = read.integer(key, 1, MAX_POSITIONS, family.max_context)
    if not read.given(key):
        notes = (f"{read.where} has no {read.name(key)}: assuming {max_context}",)
    return ModelConfig(
        family="llama",
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        mlp=read.integer("intermediate_size", 1, MAX_MLP),
        vocab=read.integer("vocab_size", 1, MAX_VOCAB),
        norm_eps=read.number("rms_norm_eps", 0.0, 0.1, family.norm_eps),
        rope=_rope(read, max_context),
        max_context=max_context,
        windows=(None,) * layers,
        tied=read.flag("tie_word_embeddings"),
        notes=notes,
    )


def from_keys(
    raw: Mapping[str, Any], where: str, names: Mapping[str, str] | None = None
) -> ModelConfig:
    """The configuration that the keys of a config.json say. where: the file. names: see
    `_Reader`."""
    read = _Reader(raw, where, names)
    name = _family_name(read)
    family = FAMILIES[name]
    _refuse_foreign(read)
    config = _sizes(read, family)
    notes, max_context = [*config.notes], config.max_context
    plain = _plain_attention(read)
    if plain is not None and plain < max_context:
        notes.append(
            f"dual_chunk_attention_config: limited to {plain:,} of {max_context:,} positions; "
            "beyond them, the model needs an attention that minikv does not have"
        )
        max_context = plain
    if config.rope.kind == "dynamic":
        notes.append(f"dynamic rotary scaling: limited to its original {max_context} positions")
    if read.integer("pretraining_tp", 0, 1024, 1) > 1:
        notes.append("pretraining_tp is ignored: it changes only the order of additions")
    if read.given("auto_map"):
        notes.append("auto_map is ignored: no code from a model is ever run")
    attention_bias = read.flag("attention_bias")
    mlp_bias = read.flag("mlp_bias")
    if not family.biases and (mlp_bias or (attention_bias and not family.qkv_bias)):
        raise UnsupportedModel(f"config.json: {name} has no attention_bias or mlp_bias")
    return replace(
        config,
        family=name,
        max_context=max_context,
        windows=_windows(read, name, family, config.layers),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias and family.biases,
        mlp_bias=mlp_bias,
        stop_ids=_ids(read, "eos_token_id"),
        notes=tuple(notes),
    )


def _family_name(read: _Reader) -> str:
    name = read.raw.get("model_type")
    architectures = read.raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise read.bad("architectures", "a list of names")
    if name is None:
        name = next((n for n, f in FAMILIES.items() if f.architecture in architectures), None)
        if name is None:
            raise CorruptModel("config.json: model_type is missing")
    if not isinstance(name, str):
        raise read.bad("model_type", "a name")
    hint = f"minikv runs: {', '.join(FAMILIES)}"
    if name not in FAMILIES:
        reason = f" ({_REASONS[name]})" if name in _REASONS else ""
        raise UnsupportedModel(f"unsupported architecture {quote(name)}{reason}", hint)
    if architectures and FAMILIES[name].architecture not in architectures:
        raise UnsupportedModel(
            f"unsupported architecture {quote(architectures[0])}: not a {name} chat model", hint
        )
    return name


def _refuse_foreign(read: _Reader) -> None:
    """Raise UnsupportedModel for settings under which the model computes something that this
    network does not."""
    raw = read.raw
    if read.given("quantization_config"):
        table = read.table("quantization_config")
        method = table.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in table else "?")
        raise quantised(str(method))
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json: hidden_act {quote(act)} is not supported (silu is)")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModel("config.json: partial_rotary_factor other than 1 is not supported")
    if read.flag("rope_interleaved"):
        raise UnsupportedModel("config.json: rope_interleaved is not supported")
    auto_map = read.table("auto_map")
    if "AutoModelForCausalLM" in auto_map:
        raise UnsupportedModel(
            "config.json: auto_map replaces the network by code of its own, which is never run"
        )
    for key in ("num_local_experts", "num_experts", "vision_config", "text_config"):
        if read.given(key):
            raise UnsupportedModel(f"config.json: {key}: not a plain text model")


def _plain_attention(read: _Reader) -> int | None:
    """The positions within which dual chunk attention (arXiv 2402.17463) is plain attention; None
    if the model has no such attention. Up to the size of a chunk, its distances are the true
    ones."""
    key = "dual_chunk_attention_config"
    if not read.given(key) or not (table := read.table(key)):
        return None
    inner = _Reader(table, f"config.json: {key}")
    most = inner.integer("chunk_size", 1, MAX_POSITIONS)
    return min(most, inner.integer(_LENGTH, 1, MAX_POSITIONS, most))


def quantised(method: str) -> UnsupportedModel:
    """The error for a repository that is quantised with this method."""
    return UnsupportedModel(
        f"quantised with {quote(method)[1:-1]}: not supported",
        "use the original repository in bfloat16 or float16",
    )


def _windows(read: _Reader, name: str, family: _Family, layers: int) -> tuple[int | None, ...]:
    types = read.raw.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise read.bad("layer_types", f"a list of {layers} names")
    for odd in types or ():
        if odd not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"config.json: layer type {quote(odd)} is not supported")
    sliding = [kind == "sliding_attention" for kind in types or ()]
    if family.window is None:
        if any(sliding):
            raise UnsupportedModel(f"config.json: {name} has no sliding_attention layers")
        if read.given("sliding_window"):
            raise UnsupportedModel(f"config.json: {name} has no sliding_window")
        return (None,) * layers
    if family.switch and not read.flag("use_sliding_window"):
        if any(sliding):
            raise CorruptModel("config.json: sliding layers, but use_sliding_window is false")
        return (None,) * layers
    window = read.raw.get("sliding_window", family.window)
    if window is not None:
        window = read.integer("sliding_window", 1, MAX_POSITIONS, window)
    if types is None:
        full = read.integer("max_window_layers", 0, 2**31, 28) if family.switch else 0
        sliding = [layer >= full for layer in range(layers)]
    elif window is None and any(sliding):
        raise CorruptModel("config.json: sliding layers, but sliding_window is off")
    elif not family.pattern and not (all(sliding) or window is None):
        raise UnsupportedModel(f"config.json: {name} has no per-layer windows (ministral has)")
    return tuple(window if slides else None for slides in sliding)


_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", _LENGTH, "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}
_ROPE_NUMBERS: Mapping[str, tuple[float, float, float | None]] = {
    # the least and the largest value, and the default; None: the file must say it
    "factor": (1.0, 1e6, None),
    "low_freq_factor": (1e-3, 1e6, None),
    "high_freq_factor": (1e-3, 1e6, None),
    "beta_fast": (1e-3, 1e6, 32.0),
    "beta_slow": (1e-3, 1e6, 1.0),
    "mscale": (0.0, 1e3, 0.0),
    "mscale_all_dim": (0.0, 1e3, 0.0),
}


def _rope(read: _Reader, max_context: int) -> RopeConfig:
    """Read the rotary settings, which have three forms: rope_parameters (transformers v5),
    rope_scaling with rope_theta (v4), or rope_theta alone.

    Several forms may be present, but they must agree.
    """
    spellings = {
        key: read.table(key) for key in ("rope_parameters", "rope_scaling") if read.given(key)
    }
    thetas: dict[str, float] = {}
    if read.given("rope_theta"):
        thetas["rope_theta"] = read.number("rope_theta", 1.0, 1e15)
    scalings: dict[str, RopeConfig] = {}
    for key, table in spellings.items():
        inner = _Reader(table, f"config.json: {key}")
        if inner.given("rope_theta"):
            thetas[key] = inner.number("rope_theta", 1.0, 1e15)
        scalings[key] = _scaling(inner, read, max_context)
    if len(set(thetas.values())) > 1:
        raise _disagreeing(thetas, spellings, raw=read.raw)
    if len(set(scalings.values())) > 1:
        raise CorruptModel(
            "config.json: rope_parameters and rope_scaling disagree",
            "transformers takes rope_scaling; if that is right, delete rope_parameters",
        )
    theta = next(iter(thetas.values()), 10_000.0)
    scaling = next(iter(scalings.values()), RopeConfig())
    if scaling.kind == "yarn" and theta <= 1.0:
        raise CorruptModel(f"{read.where}: yarn needs a rope_theta above 1, got {theta:g}")
    return replace(scaling, theta=theta)


def _disagreeing(
    thetas: Mapping[str, float], tables: Mapping[str, Mapping[str, Any]], raw: Mapping[str, Any]
) -> CorruptModel:
    """The error for two base frequencies, with the lines to delete."""
    stated = ", ".join(f"{key} {value:g}" for key, value in thetas.items())
    taken = next(key for key in ("rope_scaling", "rope_parameters", "rope_theta") if key in thetas)
    lines = " and ".join(
        f'"rope_theta": {quote(tables[key]["rope_theta"])} in {key}'
        if key in tables
        else f'"rope_theta": {quote(raw[key])} outside of {taken}'
        for key, value in thetas.items()
        if value != thetas[taken]
    )
    return CorruptModel(
        f"config.json: rotary base frequencies disagree: {stated}",
        f"transformers takes that of {taken}; if it is right, delete {lines}",
    )


def _scaling(inner: _Reader, read: _Reader, max_context: int) -> RopeConfig:
    where = inner.where
    table = {key: value for key, value in inner.raw.items() if value is not None}
    names = [table.pop(key) for key in ("rope_type", "type") if key in table]
    for key in ("rope_theta", "finetuned"):  # the base is read elsewhere, the other says nothing
        table.pop(key, None)
    if any(isinstance(value, dict) for value in table.values()):
        raise UnsupportedModel(f"{where}: rotary settings per layer are not supported")
    if len({str(name) for name in names}) > 1:
        raise CorruptModel(f"{where}: rope_type and type disagree: {quote(names)}")
    kind = names[0] if names else "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise UnsupportedModel(
            f"{where}: rotary type {quote(kind)} is not supported",
            f"minikv has: {', '.join(_ROPE_KEYS)}",
        )
    if table.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModel(f"{where}: partial_rotary_factor other than 1 is not supported")
    table.pop("partial_rotary_factor", None)
    keys = _ROPE_KEYS[kind]
    unknown = sorted(set(table) - {*keys})
    if unknown:
        raise UnsupportedModel(f"{where}: key {quote(unknown[0])} of type {kind} is not known")
    given: dict[str, Any] = {
        key: inner.number(key, *bounds) for key, bounds in _ROPE_NUMBERS.items() if key in keys
    }
    if _LENGTH in keys:
        given["original"] = _original_length(inner, read, kind, max_context)
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise CorruptModel(f"{where}: high_freq_factor must be above low_freq_factor")
    if kind == "yarn":
        if given["beta_fast"] < given["beta_slow"]:
            raise CorruptModel(f"{where}: beta_fast must not be below beta_slow")
        if inner.given("attention_factor"):
            given["attention_factor"] = inner.number("attention_factor", 1e-6, 1e6)
        given["truncate"] = inner.flag("truncate", True)
    return RopeConfig(kind=kind, **given)


def _original_length(inner: _Reader, read: _Reader, kind: str, max_context: int) -> int:
    lengths = [r.integer(_LENGTH, 1, MAX_POSITIONS) for r in (inner, read) if r.given(_LENGTH)]
    if len(set(lengths)) > 1:
        raise CorruptModel(f"config.json: {_LENGTH} is given twice and disagrees: {lengths}")
    if lengths:
        return lengths[0]
    if kind == "llama3":
        raise inner.bad(_LENGTH, "a whole number")
    return max_context  # yarn, as in transformers


def _ids(read: _Reader, key: str) -> tuple[int, ...]:
    value = read.raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_number(i, int) and abs(i) <= MAX_VOCAB for i in ids):
        raise read.bad(key, "a token id or a list of them")
    return tuple(sorted({i for i in ids if i >= 0}))


def _with_generation(config: ModelConfig, path: Path) -> ModelConfig:
    """Add the stop ids and the sampling of generation_config.json. If that file is broken, add a
    note instead of raising."""
    if not path.exists():
        return config
    try:
        read = _Reader(read_json(path), path.name)
        config = replace(config, own=_own_sampling(read))
        ids: Iterable[int] = _ids(read, "eos_token_id")
    except ModelError as error:
        own = replace(config.own, why=str(error))
        return replace(config, own=own, notes=(*config.notes, f"ignored: {error}"))
    return replace(config, stop_ids=tuple(sorted({*config.stop_ids, *ids})))


def _own_sampling(read: _Reader) -> OwnSampling:
    """A value that is missing or null is that of transformers. If one cannot be used, none is."""
    try:
        if not read.flag("do_sample"):
            return OwnSampling(why=f"{read.where} does not ask for sampling")
        return OwnSampling(
            read.number("temperature", 0, 100, 1.0),
            read.integer("top_k", 0, MAX_TOP_K, 50),
            read.number("top_p", 0, 1, 1.0),
            read.number("min_p", 0, 1, 0.0),
            why="",
        )
    except CorruptModel as error:
        return OwnSampling(why=str(error))


_PARAMS = _Family("", 32_768, norm_eps=None)
"""The defaults of params.json. None of Mistral's releases has a shorter context."""
_PARAMS_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
_PARAMS_KEYS = {
    *_PARAMS_NAMES.values(),
    *("head_dim", "vocab_size", "rope_theta", "sliding_window", "model_type"),
    *("max_seq_len", "max_position_embeddings", "max_batch_size", "use_biases", "causal"),
}


def _from_params(raw: Mapping[str, Any]) -> ModelConfig:
    """Read params.json of Mistral's own releases. It has few keys, so unknown ones are refused."""
    names = _PARAMS_NAMES
    if raw.get("max_position_embeddings") is None:
        names = {**names, "max_position_embeddings": "max_seq_len"}
    read = _Reader(raw, "params.json", names)
    if read.given("quantization"):
        raise quantised(str(read.table("quantization").get("qformat_weight", "?")))
    unknown = sorted(key for key in set(raw) - _PARAMS_KEYS if raw[key] is not None)
    if unknown:
        raise UnsupportedModel(
            f"params.json: {quote(unknown[0])} is not supported",
            "use the repository's config.json form",
        )
    if raw.get("model_type", "transformer") != "transformer":
        raise UnsupportedModel(f"unsupported architecture {quote(raw['model_type'])}")
    if read.flag("use_biases") or not read.flag("causal", True):
        raise UnsupportedModel("params.json: use_biases and causal=false are not supported")
    config = _sizes(read, _PARAMS)
    windows = _params_windows(read, config.layers)
    # Mistral v0.1 is the only release with a window and no rope_theta: it has the usual 1e4.
    if not read.given("rope_theta") and not any(windows):
        raise CorruptModel(
            "params.json: rope_theta is missing", "add it, or use the config.json form"
        )
    return replace(config, family="mistral" if any(windows) else "llama", windows=windows)


def _params_windows(read: _Reader, layers: int) -> tuple[int | None, ...]:
    """`sliding_window` of params.json: absent, a number, or a pattern repeated over the layers."""
    value = read.raw.get("sliding_window")
    pattern = value if isinstance(value, list) else [value]
    for window in pattern:
        if window is not None and not (_is_number(window, int) and 1 <= window <= MAX_POSITIONS):
            raise read.bad("sliding_window", "a whole number, null, or a list of these")
    if not pattern or layers % len(pattern):
        raise CorruptModel("params.json: sliding_window does not divide the layers")
    return tuple(pattern[layer % len(pattern)] for layer in range(layers))

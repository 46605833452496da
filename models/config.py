"""A model's configuration, read from its files and checked before anything is allocated.

This is deliberately stricter than transformers: a key that could be misread silently (rotary
scaling, window, head size) is an error. An impossible value raises CorruptModel. A setting that
this network does not implement raises UnsupportedModel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
_LENGTH = "original_max_position_embeddings"  # a key that may be in three places


@dataclass(frozen=True, slots=True)
class OwnSampling:
    """The sampling that the model's makers recommend. temperature 0: the likeliest token. why: a
    reason for 0, for the user; "" if they recommend sampling."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    why: str = "the model has no generation_config.json"


@dataclass(frozen=True, slots=True)
class OwnForm:
    """The form of some matrices in the files, which is kept.

    matrix: a name in `ModelConfig.matrices`, "head" or "embedding". form: "int8" or "int4". group:
    how many columns share a scale; 0: a whole row. count: the number of layers with this form.
    """

    matrix: str
    form: str
    group: int
    count: int


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The settings of quantised weights in config.json.

    method: its name there. kind: that of the numbers, such as "int4". group: how many columns share
    a scale; block: how many rows and columns; None: the file states none or several. zero: is added
    to each zero point of the file. activations: whether the file asks for quantised activations
    too.
    """

    method: str
    kind: str
    group: int | None = None
    block: tuple[int, int] | None = None
    zero: int = 0
    activations: bool = False

    @property
    def name(self) -> str:
        """A name for the user, such as "int4 (AWQ)"."""
        short = self.method.upper() if self.method in ("awq", "gptq", "fp8") else self.method
        return f"{self.kind} ({short})"

    def stored(self, layers: int) -> tuple[OwnForm, ...]:
        """The expected forms of the layers' matrices, before the files are read."""
        eight = self.kind == "int8" and self.method != "gptq" and self.group is None
        if not eight and not (self.kind == "int4" and (self.group or 32) % 32 == 0):
            return ()
        names = ("q, k, v", "o", "gate, up", "down")
        return tuple(OwnForm(name, self.kind, self.group or 0, layers) for name in names)


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
    """Rows of the embedding. There may be more than entries in the tokenizer."""
    norm_eps: float
    rope: RopeConfig
    """The rotary settings of all layers, unless `layer_ropes` has one for each."""
    max_context: int
    """The most positions of a conversation."""
    windows: tuple[int | None, ...]
    """Per layer: a key is visible iff 0 <= query position - key position < window; None: all."""
    tied: bool | None = False
    """Whether lm_head is the embedding, according to the file; None: only if there is no lm_head.
    The loader decides by the tensors; `Llama.config` has the result."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    layer_ropes: tuple[RopeConfig, ...] = ()
    qk_norm: str = ""
    """RMSNorm of queries and keys before rotation: "head": of each head; "all": of all together."""
    norm_after: bool = False
    """Attention and MLP take x itself, and their outputs are normed before they are added to x."""
    fused: bool = False
    """Whether the file has q, k, v as one matrix, and gate, up as another."""
    query_scale: float = 1.0
    """A factor on queries, in addition to 1 / sqrt(D) and `RopeConfig.query_beta`."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """A factor on the outputs of attention and MLP."""
    logits_scale: float = 1.0
    """A divisor of the logits."""
    stop_ids: tuple[int, ...] = ()
    """End-of-text ids of config.json and generation_config.json, ascending."""
    own: OwnSampling = OwnSampling()
    """The sampling settings of generation_config.json."""
    form: str = ""
    """The name of the files' own form, for the user ("Q4_K_M"); "": they are not quantised."""
    stored: tuple[OwnForm, ...] = ()
    """The matrices with eight or four bits in the files; the others are plain."""
    quantisation: Quantisation | None = None
    """How the weights in the files are quantised; None: they are not."""
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
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary settings of each layer."""
        return self.layer_ropes or (self.rope,) * self.layers

    @property
    def qk_sizes(self) -> tuple[int, int]:
        """The number of weights of a layer's query norm and key norm."""
        heads = {"": (0, 0), "head": (1, 1), "all": (self.heads, self.kv_heads)}[self.qk_norm]
        return heads[0] * self.head_dim, heads[1] * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int, bool]]:
        """The matrices of a layer by name, as the network stores them: rows, columns, and whether
        there is a bias."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q, k, v": (q + 2 * kv, self.hidden, self.qkv_bias),
            "o": (self.hidden, q, self.o_bias),
            "gate, up": (2 * self.mlp, self.hidden, self.mlp_bias),
            "down": (self.hidden, self.mlp, self.mlp_bias),
        }

    @property
    def parameters(self) -> int:
        """Number of weights; a tied lm_head is counted once."""
        sizes = (rows * columns + rows * bias for rows, columns, bias in self.matrices.values())
        layer = sum(sizes) + 2 * self.hidden + sum(self.qk_sizes)
        head = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + self.hidden + head


class Reader:
    """Typed access to one JSON object. Every error names the file and the key. names: the file's
    own names of config.json's keys, if they differ."""

    def __init__(
        self, raw: Mapping[str, Any], where: str, names: Mapping[str, str] | None = None
    ) -> None:
        self.where, self._names = where, names or {}
        keys = {own: key for key, own in self._names.items()}
        self.raw = {keys.get(own, own): value for own, value in raw.items()}

    def name(self, key: str) -> str:
        """The file's name of this key."""
        return self._names.get(key, key)

    def bad(self, key: str, wants: str) -> CorruptModel:
        got = quote(self.raw[key]) if key in self.raw else "nothing"
        return CorruptModel(f"{self.where}: {self.name(key)} must be {wants}, got {got}")

    def given(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        wants = f"a whole number from {low} to {high}"
        return int(self._bounded(key, low, high, default, wants, int))

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        wants = f"a number from {low:g} to {high:g}"
        return float(self._bounded(key, low, high, default, wants, int, float))

    def _bounded(
        self, key: str, low: Any, high: Any, default: Any, wants: str, *kinds: type
    ) -> Any:
        value: Any = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value, *kinds) or not low <= value <= high:  # false for NaN
            raise self.bad(key, wants)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._typed(key, bool, "true or false", default))

    def table(self, key: str) -> Mapping[str, Any]:
        found: dict[str, Any] = self._typed(key, dict, "an object", {})
        return found

    def _typed(self, key: str, kind: type, wants: str, default: Any) -> Any:
        value = default if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, kind):
            raise self.bad(key, wants)
        return value


def _is_number(value: Any, *kinds: type) -> bool:
    """Whether a value is of one of these kinds. True and false are not numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class _Family:
    """How one model_type differs from the others. Defaults are those of its configuration class in
    transformers.

    kv_heads: None: as many as heads. head_dim: None: hidden / heads. windows: which layers have
    one; "": none; "all"; "types": according to layer_types, by default all but each
    `full_every`-th; "switch": only with use_sliding_window, by default from layer max_window_layers
    on. window: the value if sliding_window is absent (null means off). biases: which of
    attention_bias and mlp_bias it reads. norm_eps: None: the file must state it. ropes: the
    possible rotary types; (): all. rope_keys: further keys of the rotary settings. net: fields of
    `ModelConfig`. reads: reads the settings that only this family has. wraps: the families of its
    text_config; only that part is loaded.
    """

    architecture: str
    max_context: int = 0
    kv_heads: int | None = None
    head_dim: int | None = None
    windows: str = ""
    window: int | None = None
    full_every: int = 0
    qkv_bias: bool = False
    biases: tuple[str, ...] = ()
    norm_eps: float | None = 1e-6
    theta: float = 10_000.0
    tied: bool = False
    ropes: tuple[str, ...] = ()
    rope_keys: tuple[str, ...] = ()
    net: Mapping[str, Any] = field(default_factory=dict)
    reads: Callable[[Reader, ModelConfig], ModelConfig] | None = None
    wraps: tuple[str, ...] = ()


def from_keys(
    raw: Mapping[str, Any], where: str, names: Mapping[str, str] | None = None
) -> ModelConfig:
    """The configuration in the keys of a config.json. where: the file. names: see `Reader`."""
    read = Reader(raw, where, names)
    name = _family_name(read)
    family = FAMILIES[name]
    if not family.wraps:
        return _read(read, name, family)
    inner = Reader(_text_part(read), where)
    inside = _family_name(inner, family.wraps, f", the text part of {quote(name)}")
    note = f"only the text part of this {name} model is loaded: it sees no images"
    config = _read(inner, inside, FAMILIES[inside], note)
    # transformers does not read it from the text part
    return config if read.given("tie_word_embeddings") else replace(config, tied=None)


def _read(read: Reader, name: str, family: _Family, *notes: str) -> ModelConfig:
    """The configuration of a model of this family."""
    quantisation = _quantisation(read)
    _refuse_foreign(read, family)
    said = [*notes]
    heads = read.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = read.integer("num_key_value_heads", 1, MAX_HEADS, family.kv_heads or heads)
    if read.raw.get("num_key_value_heads", 0) is None:
        kv_heads = heads  # unlike an absent key, null means in transformers: as many as heads
    hidden = read.integer("hidden_size", 1, MAX_HIDDEN)
    layers = read.integer("num_hidden_layers", 1, MAX_LAYERS)
    if not read.given("head_dim") and family.head_dim is None and hidden % heads:
        raise CorruptModel(
            f"{read.where}: {read.name('hidden_size')} {hidden} is not a multiple of "
            f"{read.name('num_attention_heads')} {heads}"
        )
    head_dim = read.integer("head_dim", 2, MAX_HEAD_DIM, family.head_dim or hidden // heads)
    if heads % kv_heads:
        raise CorruptModel(f"{read.where}: {heads} heads cannot be shared by {kv_heads} KV heads")
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise CorruptModel(
            f"{read.where}: head_dim {head_dim} must be even and at most {MAX_HEAD_DIM}"
        )
    key = "max_position_embeddings"
    max_context = read.integer(key, 1, MAX_POSITIONS, family.max_context)
    if not read.given(key):
        said.append(f"{read.where} has no {read.name(key)}: assuming {max_context}")
    rope = _rope(read, family, max_context)
    plain = _plain_attention(read)
    if plain is not None and plain < max_context:
        said.append(
            f"dual_chunk_attention_config: limited to {plain:,} of {max_context:,} positions; "
            "beyond them, the model needs a kind of attention that minikv does not have"
        )
        max_context = plain
    if rope.kind == "dynamic":
        said.append(f"dynamic rotary scaling: limited to its original {max_context} positions")
    if read.integer("pretraining_tp", 0, 1024, 1) > 1:
        said.append("pretraining_tp is ignored: it changes only the order of additions")
    if read.given("auto_map"):
        said.append("auto_map is ignored: no code from a model is ever run")
    biases = {key for key in ("attention_bias", "mlp_bias") if read.flag(key)}
    for key in biases - {*family.biases, *(("attention_bias",) if family.qkv_bias else ())}:
        raise UnsupportedModel(f"{read.where}: {name} has no {key}")
    biases &= {*family.biases}
    stored: tuple[OwnForm, ...] = ()
    if quantisation is not None:
        stored = quantisation.stored(layers)
        if quantisation.activations:
            said.append("config.json also quantises activations; minikv does not")
        if not stored:
            kept = "only int4 in groups of 32 and int8 by row are kept"
            said.append(f"{quantisation.name} is unpacked: {kept}")
    config = ModelConfig(
        family=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        mlp=read.integer("intermediate_size", 1, MAX_MLP),
        vocab=read.integer("vocab_size", 1, MAX_VOCAB),
        norm_eps=read.number("rms_norm_eps", 0.0, 0.1, family.norm_eps),
        rope=rope,
        max_context=max_context,
        windows=_windows(read, name, family, layers),
        tied=read.flag("tie_word_embeddings", family.tied),
        qkv_bias=family.qkv_bias or "attention_bias" in biases,
        o_bias="attention_bias" in biases,
        mlp_bias="mlp_bias" in biases,
        stop_ids=_stop_ids(read),
        quantisation=quantisation,
        form="" if quantisation is None else quantisation.name,
        stored=stored,
        notes=tuple(said),
        **family.net,
    )
    return family.reads(read, config) if family.reads else config


_WRAPPED = (
    *("quantization_config", "compression_config"),
    *("tie_word_embeddings", "eos_token_id", "auto_map"),
)
"""Keys of a wrapper's configuration that also apply to its text part."""


def _text_part(read: Reader) -> dict[str, Any]:
    """The configuration of the text part of a wrapper."""
    text = read.table("text_config")
    if not text:
        raise read.bad("text_config", "the configuration of the text part")
    own = {key: read.raw[key] for key in _WRAPPED if read.given(key)}
    return {"model_type": "mistral", **text, "architectures": None, **own}


def _family_name(read: Reader, among: Iterable[str] = (), role: str = "") -> str:
    """The name of the family. among: the families that are possible here; (): all. role: a text
    that the message adds to the name."""
    name = read.raw.get("model_type")
    architectures = read.raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise read.bad("architectures", "a list of names")
    if name is None:
        name = next((n for n, f in FAMILIES.items() if f.architecture in architectures), None)
        if name is None:
            raise CorruptModel(f"{read.where}: model_type is missing")
    if not isinstance(name, str):
        raise read.bad("model_type", "a name")
    hint = f"minikv runs: {', '.join(FAMILIES)}"
    if name not in (among or FAMILIES):
        reason = f" ({_REASONS[name]})" if name in _REASONS else ""
        raise UnsupportedModel(f"unsupported architecture {quote(name)}{reason}{role}", hint)
    if architectures and FAMILIES[name].architecture not in architectures:
        raise UnsupportedModel(
            f"unsupported architecture {quote(architectures[0])}: not a {name} chat model", hint
        )
    return name


def _refuse_foreign(read: Reader, family: _Family) -> None:
    """Raise UnsupportedModel for settings that this network does not implement."""
    raw = read.raw
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedModel(f"{read.where}: hidden_act {quote(act)} is not supported (silu is)")
    if raw.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(f"{read.where}: partial_rotary_factor other than 1 is not supported")
    if read.flag("rope_interleaved"):
        raise UnsupportedModel(f"{read.where}: rope_interleaved is not supported")
    # Code for the same class name is a copy of an implementation that transformers has now.
    code = read.table("auto_map").get("AutoModelForCausalLM")
    if code is not None and str(code).split(".")[-1] != family.architecture:
        raise UnsupportedModel(
            f"{read.where}: auto_map replaces the network with other code, which is never run"
        )
    for key in ("num_local_experts", "num_experts", "vision_config", "text_config"):
        if read.given(key):
            raise UnsupportedModel(f"{read.where}: {key}: not a plain text model")


def _plain_attention(read: Reader) -> int | None:
    """The number of positions up to which dual chunk attention (arXiv 2402.17463) equals plain
    attention; None if the model has no such attention. Up to the size of a chunk, its distances are
    the true ones."""
    key = "dual_chunk_attention_config"
    if not read.given(key) or not (table := read.table(key)):
        return None
    inner = Reader(table, f"{read.where}: {key}")
    most = inner.integer("chunk_size", 1, MAX_POSITIONS)
    return min(most, inner.integer(_LENGTH, 1, MAX_POSITIONS, most))


def quantised(method: str) -> UnsupportedModel:
    """The error for a repository that is quantised with this method."""
    return UnsupportedModel(
        f"quantised with {quote(method)[1:-1]}: not supported",
        "minikv reads AWQ (gemm), GPTQ, compressed-tensors (int4, int8, float8), fp8 and "
        "bitsandbytes; or use the original repository in bfloat16 or float16",
    )


def _quantisation(read: Reader) -> Quantisation | None:
    key = next((k for k in ("quantization_config", "compression_config") if read.given(k)), None)
    if key is None:
        return None
    inner = Reader(read.table(key), f"{read.where}: {key}")
    four = inner.flag("load_in_4bit") or inner.flag("_load_in_4bit")
    eight = inner.flag("load_in_8bit") or inner.flag("_load_in_8bit")
    method = inner.raw.get("quant_method") or ("bitsandbytes" if four or eight else "?")
    if method == "bitsandbytes":
        kind = inner.raw.get("bnb_4bit_quant_type", "fp4") if four else "int8" if eight else "?"
        if kind not in ("nf4", "fp4", "int8"):
            raise quantised(f"bitsandbytes, {kind}")
        return Quantisation(method, kind)
    if method == "fp8":
        if (kind := inner.raw.get("fmt") or "e4m3") != "e4m3":
            raise quantised(f"fp8, {kind}")
        return Quantisation(
            method, "float8", block=_block(inner, "weight_block_size"), activations=True
        )
    if method in ("awq", "gptq"):
        return _grouped(method, inner)
    if method == "compressed-tensors":
        return _compressed(inner)
    raise quantised(str(method))


def _grouped(method: str, inner: Reader) -> Quantisation:
    """The settings of AWQ and GPTQ."""
    raw = inner.raw
    given = (raw.get(key) for key in ("version", "checkpoint_format", "format"))
    default, known = ("gemm", ("gemm",)) if method == "awq" else ("gptq", ("gptq", "gptq_v2"))
    form = str(next(filter(None, given), default)).lower()
    if raw.get("is_marlin_format"):
        form = "marlin"
    bits = inner.integer("w_bit" if inner.given("w_bit") else "bits", 1, 16, 4)
    form = "dynamic" if inner.given("dynamic") and inner.table("dynamic") else form
    if form not in known:
        raise quantised(f"{method}, {form}")
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise quantised(f"{method}, {bits} bits")
    group = _group(inner, "q_group_size" if inner.given("q_group_size") else "group_size")
    return Quantisation(method, f"int{bits}", group, zero=int(form == "gptq"))


def _compressed(inner: Reader) -> Quantisation:
    """The settings of compressed-tensors, whose groups are sets of modules with the same form."""
    method, form = "compressed-tensors", str(inner.raw.get("format"))
    tables = inner.table("config_groups").values()
    groups = [Reader(table, inner.where) for table in tables if isinstance(table, dict)]
    mixed = form == "mixed-precision"
    forms = {str(group.raw.get("format")) for group in groups} if mixed else {form}
    odd = next(iter(sorted(forms - {*_COMPRESSED})), None if groups else "no config_groups")
    if odd is not None:
        raise quantised(f"{method}, {odd}")
    for key in ("sparsity_config", "transform_config"):
        if inner.given(key) and (table := inner.table(key)) and table.get("format") != "dense":
            raise quantised(f"{method}, {key}")
    weights = [Reader(g.table("weights"), inner.where) for g in groups if g.given("weights")]
    kinds = sorted({f"{w.raw.get('type', 'int')}{w.raw.get('num_bits', 8)}" for w in weights})
    odd = next((kind for kind in kinds if kind not in ("int4", "int8", "float8")), None)
    if odd is not None or not kinds:
        raise quantised(f"{method}, {odd}")
    sizes = {(_group(w, "group_size"), _block(w, "block_structure")) for w in weights}
    group, block = sizes.pop() if len(sizes) == 1 else (None, None)
    activations = any(g.given("input_activations") for g in groups)
    return Quantisation(method, " and ".join(kinds), group, block, activations=activations)


_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _group(inner: Reader, key: str) -> int | None:
    """A number of columns; None if the file has none, or -1, which means all."""
    return None if inner.raw.get(key) in (None, -1) else inner.integer(key, 1, MAX_MLP)


def _block(inner: Reader, key: str) -> tuple[int, int] | None:
    value = inner.raw.get(key)
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(_is_number(n, int) and 0 < n <= MAX_MLP for n in sizes):
        raise inner.bad(key, "two sizes")
    return value[0], value[1]


def _windows(read: Reader, name: str, family: _Family, layers: int) -> tuple[int | None, ...]:
    types = read.raw.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise read.bad("layer_types", f"a list of {layers} names")
    for odd in types or ():
        if odd not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"{read.where}: layer type {quote(odd)} is not supported")
    sliding = [kind == "sliding_attention" for kind in types or ()]
    if not family.windows:
        if any(sliding):
            raise UnsupportedModel(f"{read.where}: {name} has no sliding_attention layers")
        if read.given("sliding_window"):
            raise UnsupportedModel(f"{read.where}: {name} has no sliding_window")
        return (None,) * layers
    if family.windows == "switch" and not read.flag("use_sliding_window"):
        if any(sliding):
            raise CorruptModel(f"{read.where}: sliding layers, but use_sliding_window is false")
        return (None,) * layers
    window = read.raw.get("sliding_window", family.window)
    if window is not None:
        window = read.integer("sliding_window", 1, MAX_POSITIONS, window)
    if types is None:
        key, every = "max_window_layers", family.full_every or layers + 1
        full = read.integer(key, 0, 2**31, 28) if family.windows == "switch" else 0
        sliding = [layer >= full and (layer + 1) % every > 0 for layer in range(layers)]
    elif window is None and any(sliding):
        raise CorruptModel(f"{read.where}: sliding layers, but sliding_window is off")
    elif family.windows == "all" and not (all(sliding) or window is None):
        raise UnsupportedModel(f"{read.where}: {name} has no per-layer windows (ministral has)")
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
    # the smallest and the largest value, and the default; None: the file must state it
    "factor": (1.0, 1e6, None),
    "low_freq_factor": (1e-3, 1e6, None),
    "high_freq_factor": (1e-3, 1e6, None),
    "beta_fast": (1e-3, 1e6, 32.0),
    "beta_slow": (1e-3, 1e6, 1.0),
    "mscale": (0.0, 1e3, 0.0),
    "mscale_all_dim": (0.0, 1e3, 0.0),
}
_BETA = "llama_4_scaling_beta"


def _rope(read: Reader, family: _Family, max_context: int) -> RopeConfig:
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
        inner = Reader(table, f"{read.where}: {read.name(key)}")
        if _FULL in family.rope_keys and _FULL in table:
            inner = _full_layers(inner)
        if inner.given("rope_theta"):
            thetas[key] = inner.number("rope_theta", 1.0, 1e15)
        scalings[key] = _scaling(inner, read, family, max_context)
    if _BETA in family.rope_keys and not scalings:
        raise read.bad("rope_parameters", f"an object with {_BETA}")
    if len(set(thetas.values())) > 1:
        stated = ", ".join(f"{key} {value:g}" for key, value in thetas.items())
        taken = max(thetas, key=("rope_theta", "rope_parameters", "rope_scaling").index)
        raise CorruptModel(
            f"{read.where}: rotary base frequencies disagree: {stated}",
            f"transformers takes that of {taken}; if it is right, delete the others",
        )
    if len(set(scalings.values())) > 1:
        raise CorruptModel(
            f"{read.where}: rope_parameters and rope_scaling disagree",
            "transformers takes rope_scaling; if that is right, delete rope_parameters",
        )
    theta = next(iter(thetas.values()), family.theta)
    scaling = next(iter(scalings.values()), RopeConfig())
    if scaling.kind == "yarn" and theta <= 1.0:
        raise CorruptModel(f"{read.where}: yarn needs a rope_theta above 1, got {theta:g}")
    return replace(scaling, theta=theta)


_FULL, _SLIDING = "full_attention", "sliding_attention"


def _full_layers(read: Reader) -> Reader:
    """The rotary settings for the layers without a window, if the file has them by kind of layer.
    Those for layers with a window must have the same base and no scaling."""
    full, sliding = (Reader(read.table(key), f"{read.where}: {key}") for key in (_FULL, _SLIDING))
    theta = full.raw.get("rope_theta")
    kinds = (sliding.raw.get(key) for key in ("rope_type", "type"))
    same = sliding.raw.get("rope_theta", theta) == theta
    if not same or any(kind not in (None, "default") for kind in kinds):
        raise UnsupportedModel(
            f"{sliding.where}: only the base frequency of {_FULL}, without a scaling, is supported"
        )
    return full


def _scaling(inner: Reader, read: Reader, family: _Family, max_context: int) -> RopeConfig:
    where = inner.where
    table = {key: value for key, value in inner.raw.items() if value is not None}
    names = [table.pop(key) for key in ("rope_type", "type") if key in table]
    beta = _BETA in family.rope_keys
    # Base and context are read elsewhere; the third key has no effect.
    for key in ("rope_theta", "finetuned", *(("max_position_embeddings",) if beta else ())):
        table.pop(key, None)
    if any(isinstance(value, dict) for value in table.values()):
        raise UnsupportedModel(f"{where}: rotary settings per layer are not supported")
    if len({str(name) for name in names}) > 1:
        raise CorruptModel(f"{where}: rope_type and type disagree: {quote(names)}")
    kind = names[0] if names else "default"
    if not isinstance(kind, str) or kind not in (family.ropes or _ROPE_KEYS):
        raise UnsupportedModel(
            f"{where}: rotary type {quote(kind)} is not supported",
            f"minikv has: {', '.join(family.ropes or _ROPE_KEYS)}",
        )
    if table.pop("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel(f"{where}: partial_rotary_factor other than 1 is not supported")
    keys = (*_ROPE_KEYS[kind], *((_BETA, _LENGTH) if beta else ()))
    unknown = sorted(set(table) - {*keys})
    if unknown:
        raise UnsupportedModel(f"{where}: key {quote(unknown[0])} of type {kind} is not known")
    given: dict[str, Any] = {
        key: inner.number(key, *bounds) for key, bounds in _ROPE_NUMBERS.items() if key in keys
    }
    if beta:
        given["query_beta"] = inner.number(_BETA, 0.0, 1e3)
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


def _original_length(inner: Reader, read: Reader, kind: str, max_context: int) -> int:
    lengths = [r.integer(_LENGTH, 1, MAX_POSITIONS) for r in (inner, read) if r.given(_LENGTH)]
    if len(set(lengths)) > 1:
        raise CorruptModel(f"{read.where}: {_LENGTH} is given twice and disagrees: {lengths}")
    if lengths:
        return lengths[0]
    if kind == "llama3":
        raise inner.bad(_LENGTH, "a whole number")
    return max_context  # yarn, as in transformers


def _stop_ids(read: Reader) -> tuple[int, ...]:
    key = "eos_token_id"
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
        read = Reader(read_json(path), path.name)
        config = replace(config, own=_own_sampling(read))
        ids: Iterable[int] = _stop_ids(read)
    except ModelError as error:
        own = replace(config.own, why=str(error))
        return replace(config, own=own, notes=(*config.notes, f"ignored: {error}"))
    return replace(config, stop_ids=tuple(sorted({*config.stop_ids, *ids})))


def _own_sampling(read: Reader) -> OwnSampling:
    """A missing value or null means the default of transformers. If one value is unusable, none is
    used."""
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


def _granite(read: Reader, config: ModelConfig) -> ModelConfig:
    def number(key: str) -> float:
        return read.number(key, 1e-9, 1e9, 1.0)

    return replace(
        config,
        embedding_scale=number("embedding_multiplier"),
        query_scale=number("attention_multiplier") * math.sqrt(config.head_dim),
        residual_scale=number("residual_multiplier"),
        logits_scale=number("logits_scaling"),
    )


def _smollm3(read: Reader, config: ModelConfig) -> ModelConfig:
    """Layers without rotation: a 0 in no_rope_layers, or each `no_rope_layer_interval`-th one."""
    key, layers = "no_rope_layers", config.layers
    rotated = read.raw.get(key)
    if rotated is None:
        every = read.integer("no_rope_layer_interval", 1, 2**31, 4)
        rotated = [int((layer + 1) % every > 0) for layer in range(layers)]
    elif not isinstance(rotated, list) or len(rotated) < layers:
        raise read.bad(key, f"a list of {layers} numbers")
    if not all(_is_number(one, int) and one in (0, 1) for one in rotated):
        raise read.bad(key, "a list of 0 and 1")
    windows = read.flag("use_sliding_window") and read.given("sliding_window")
    if windows and not read.given("layer_types"):
        raise UnsupportedModel(f"{read.where}: use_sliding_window needs layer_types")
    ropes = (config.rope if turns else RopeConfig(kind="none") for turns in rotated[:layers])
    return replace(config, layer_ropes=tuple(ropes))


def _olmo3(read: Reader, config: ModelConfig) -> ModelConfig:
    """Rotary scaling applies only to layers without a window."""
    plain = RopeConfig(config.rope.theta)
    ropes = (config.rope if window is None else plain for window in config.windows)
    return replace(config, layer_ropes=tuple(ropes))


_BOTH = ("attention_bias", "mlp_bias")
_OLMO = {"qk_norm": "all", "norm_after": True}
# transformers' own mistral class ignores layer_types, so a pattern there is ambiguous.
FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", 2048, biases=_BOTH),
    "mistral": _Family("MistralForCausalLM", 131_072, kv_heads=8, windows="all", window=4096),
    "ministral": _Family("MinistralForCausalLM", 131_072, kv_heads=8, windows="types", window=4096),
    "ministral3": _Family(
        *("Ministral3ForCausalLM", 262_144, 8, 128, "all"),
        norm_eps=1e-5,
        theta=1e6,
        rope_keys=(_BETA,),
    ),
    "mistral3": _Family("Mistral3ForConditionalGeneration", wraps=("mistral", "ministral3")),
    "qwen2": _Family("Qwen2ForCausalLM", 32_768, windows="switch", window=4096, qkv_bias=True),
    "qwen3": _Family(
        *("Qwen3ForCausalLM", 32_768, 32, 128, "switch", 4096),
        biases=("attention_bias",),
        net={"qk_norm": "head"},
    ),
    "granite": _Family("GraniteForCausalLM", 2048, biases=_BOTH, reads=_granite),
    "smollm3": _Family(
        *("SmolLM3ForCausalLM", 32_768, 4, None, "switch"),
        biases=_BOTH,
        theta=2e6,
        tied=True,
        reads=_smollm3,
    ),
    "phi3": _Family(
        *("Phi3ForCausalLM", 4096, None, None, "all"),
        norm_eps=1e-5,
        ropes=("default",),
        net={"fused": True},
    ),
    "olmo2": _Family(
        "Olmo2ForCausalLM", 2048, biases=("attention_bias",), norm_eps=1e-5, net=_OLMO
    ),
    "olmo3": _Family(
        *("Olmo3ForCausalLM", 2048, None, None, "types", 4096, 4),
        biases=("attention_bias",),
        norm_eps=1e-5,
        theta=5e5,
        rope_keys=(_FULL,),
        net=_OLMO,
        reads=_olmo3,
    ),
}
_FOREIGN = """
mixture of experts: mixtral qwen2_moe qwen3_moe gpt_oss llama4_text granitemoe minimax_m2 olmoe
mixture of experts: glm4_moe ernie4_5_moe phimoe dbrx afmoe flex_olmo granitemoeshared
latent attention and mixture of experts: deepseek_v2 deepseek_v3 deepseek_v32 mistral4 kimi_k2
state-space layers: granitemoehybrid nemotron_h mamba mamba2 falcon_mamba falcon_h1 jamba bamba
linear attention: qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe kimi_linear minimax recurrent_gemma
convolutions in place of attention: lfm2 lfm2_moe
soft-capped attention: gemma2
another normalisation and activation: gemma gemma3_text gemma4_text
an image model around a text model with another normalisation: gemma3 gemma3n gemma4
an image model around a text model that attends to images in separate layers: mllama
an image model around a mixture of experts: llama4
an image model: llava llava_next qwen2_vl qwen2_5_vl qwen3_vl idefics3 smolvlm phi4mm internvl
layers that differ in shape: nemotron-nas
another normalisation: nemotron olmo stablelm cohere cohere2 phi gpt_neox starcoder2 falcon
another activation: arcee apertus
biases of queries, keys and values without one of the output: seed_oss
learned positions: gpt2 opt
rotation of a part of each head: glm glm4 chatglm
norms after each block, and layers without rotation: exaone4
"""
_REASONS = {
    name: why
    for why, names in (line.split(": ") for line in _FOREIGN.strip().splitlines())
    for name in names.split()
}
"""Why other families are not supported, by name."""

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
    read = Reader(raw, "params.json", names)
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
    windows = _params_windows(read, read.integer("num_hidden_layers", 1, MAX_LAYERS))
    # Mistral v0.1 is the only release with a window and no rope_theta: it uses the usual 1e4.
    if not read.given("rope_theta") and not any(windows):
        raise CorruptModel(
            "params.json: rope_theta is missing", "add it, or use the config.json form"
        )
    config = _read(read, "mistral" if any(windows) else "llama", _PARAMS)
    return replace(config, windows=windows)


def _params_windows(read: Reader, layers: int) -> tuple[int | None, ...]:
    """`sliding_window` of params.json: absent, a number, or a pattern repeated over the layers."""
    value = read.raw.get("sliding_window")
    pattern = value if isinstance(value, list) else [value]
    for window in pattern:
        if window is not None and not (_is_number(window, int) and 1 <= window <= MAX_POSITIONS):
            raise read.bad("sliding_window", "a whole number, null, or a list of these")
    if not pattern or layers % len(pattern):
        raise CorruptModel("params.json: sliding_window does not divide the layers")
    read.raw.pop("sliding_window", None)  # config.json states windows differently
    return tuple(pattern[layer % len(pattern)] for layer in range(layers))

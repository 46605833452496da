"""Weight files: hand-made bad ones, strict accounting, exact bytes, and no memory wasted."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import peaks
import pytest
import torch
from checkpoints import Spec, edit_json, edit_tensors, write
from faults import Fault
from loaded import network_of, refused
from pairwise import some_by_day
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import minikv.models as models
from minikv.cli.bench import networks as devices
from minikv.models import checkpoint, weights
from minikv.models.checkpoint import Checkpoint, read_header
from minikv.models.config import ModelConfig
from minikv.models.linear import bf16_products
from minikv.models.llama import Llama
from minikv.models.tensors import tensors_of
from minikv.models.weights import load_network

Tensors = dict[str, Any]
Change = Callable[[Tensors], Tensors]


def stored(folder: Path, change: Change | None = None, **spec: Any) -> Path:
    """The weights of a new checkpoint in one file, perhaps changed."""
    write(Spec(**spec), folder)
    path = folder / ("consolidated" if "layout" in spec else "model")
    path = path.with_suffix(".safetensors")
    if change is not None:
        edit_tensors(path, change)
    return path


def plus(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors | {name: tensor}


def drop(name: str) -> Change:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def each(convert: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: {name: convert(tensor) for name, tensor in tensors.items()}


def assert_equal(one: Llama, two: Llama) -> None:
    pairs = zip(tensors_of(one), tensors_of(two), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file from any header, honest or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD = {"a": entry(0, 8, [2]), "b": entry(8, 16, [2, 1])}
ONE, FLAWS = entry(0, 4, [1]), {"dtype": "F32", "shape": [1]}
TWICE = b'{"a":%s,"a":%s}' % ((json.dumps(ONE).encode(),) * 2)
KEYS = b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
NEXT, APART = entry(4, 12, [2]), entry(12, 20, [2])
ROWS: list[tuple[str, object, int, str]] = [
    # what is wrong, the header, the bytes of data, a word of the message
    ("not JSON", b"{nonsense}", 0, "JSON"),
    ("not UTF-8", b'{"\xff": 1}', 0, "JSON"),
    ("nested deeply", b"[" * 100_000, 0, "JSON"),
    ("a list", [1], 0, "object"),
    ("no tensors", {}, 0, "no tensors"),
    ("only metadata", {"__metadata__": {"a": "b"}}, 0, "no tensors"),
    ("metadata of numbers", {"__metadata__": {"a": 1}, **GOOD}, 16, "metadata"),
    ("a name twice", TWICE, 4, "twice"),
    ("a key twice", KEYS, 4, "twice"),
    ("name with a path", {"../a": ONE}, 4, "name"),
    ("name with an escape", {"a\x1b[31m": ONE}, 4, "name"),
    ("empty name", {"": ONE}, 4, "name"),
    ("long name", {"a" * 300: ONE}, 4, "name"),
    ("facts missing", {"a": FLAWS}, 4, "must have"),
    ("facts unknown", {"a": ONE | {"x": 1}}, 4, "must have"),
    ("dtype unknown", {"a": entry(0, 4, [1], "F33")}, 4, "dtype"),
    ("dtype a number", {"a": ONE | {"dtype": 3}}, 4, "dtype"),
    ("shape negative", {"a": entry(0, 4, [-1])}, 4, "shape"),
    ("shape of floats", {"a": entry(0, 4, [1.0])}, 4, "shape"),
    ("shape true", {"a": entry(0, 4, [True])}, 4, "shape"),
    ("shape 0 x 2^62", {"a": entry(0, 0, [0, 2**62])}, 0, "shape"),
    ("shape overflows", {"a": entry(0, 4, [2**61, 2**61])}, 4, "fill"),
    ("shape of 9 axes", {"a": entry(0, 4, [1] * 9)}, 4, "shape"),
    ("shape too large", {"a": entry(0, 4, [2])}, 4, "fill"),
    ("offsets reversed", {"a": entry(4, 0, [1])}, 4, "data_offsets"),
    ("three offsets", {"a": ONE | {"data_offsets": [0, 4, 8]}}, 4, "data_offsets"),
    ("offsets beyond the file", {"a": ONE, "b": entry(4, 400, [99])}, 8, "truncated"),
    ("overlap", {"a": GOOD["a"], "b": NEXT}, 12, "overlap"),
    ("the same bytes twice", {"a": GOOD["a"], "b": GOOD["a"]}, 8, "overlap"),
    ("hole", {"a": GOOD["a"], "b": APART}, 20, "hole"),
    ("hole at the start", {"a": NEXT}, 12, "hole"),
    ("one byte short", GOOD, 15, "truncated"),
    ("one byte long", GOOD, 17, "after the last"),
]
LENGTHS = [
    # what is wrong, the length that the file claims, a word of the message
    ("length beyond the file", 10_000, "truncated, or not safetensors"),
    ("length one beyond the file", len(json.dumps(GOOD)) + 17, "truncated, or not safetensors"),
    ("length over the limit", 2**24 + 1, "header"),
    ("length of 2^63", 2**63, "header"),
    ("length zero", 0, "truncated"),
    ("length cuts the JSON", 20, "JSON"),
]
HEADERS: list[tuple[str, object, bytes, int | None, str]] = [
    *((name, GOOD, b"\0" * 16, length, word) for name, length, word in LENGTHS),
    *((name, header, b"\0" * size, None, word) for name, header, size, word in ROWS),
]


@pytest.mark.parametrize(
    ("header", "data", "length", "word"), [h[1:] for h in HEADERS], ids=[h[0] for h in HEADERS]
)
def test_bad_header(header: object, data: bytes, length: Any, word: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model.safetensors", header, data, length)
    refused(lambda: read_header(path), word, code=6)


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = {f"t{i}": entry(0, 0, [0]) for i in range(10)}
    path = raw_file(tmp_path / "model.safetensors", header)
    assert read_header(path).keys() == header.keys()  # the header is all of the file
    monkeypatch.setattr(checkpoint, "TENSOR_LIMIT", 9)
    refused(lambda: read_header(path), "tensors")


def test_no_regular_file_with_a_header(tmp_path: Path) -> None:
    empty, pipe, folder = (tmp_path / f"{name}.safetensors" for name in ("empty", "pipe", "dir"))
    empty.write_bytes(b"")
    os.mkfifo(pipe)  # opening it for reading must not block
    folder.mkdir()
    for path in (empty, pipe, folder):
        refused(lambda path=path: read_header(path), code=6)


@pytest.mark.parametrize("layout", ["hf", "sharded", "original"])
def test_every_truncation_is_seen_before_anything_is_loaded(
    layout: str, tmp_path: Path, part: float
) -> None:
    """At 32 sizes besides the edges by day, at 256 at night."""
    count = 256 if part == 1 else 32
    write(Spec(layout=layout), tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    whole = shard.read_bytes()
    edge = 8 + int.from_bytes(whole[:8], "little")
    points = {*range(10), edge - 1, edge, edge + 1, len(whole) - 1, len(whole) // 2}
    points |= {len(whole) * i // count for i in range(count)}
    for size in sorted(points):
        shard.write_bytes(whole[:size])
        refused(lambda: Checkpoint.open(tmp_path), code=6)
    shard.write_bytes(whole)
    network_of(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """No map is held, so this is an error message and not a SIGBUS."""
    path = stored(tmp_path)
    checkpoint, config = Checkpoint.open(tmp_path), ModelConfig.from_folder(tmp_path)
    os.truncate(path, path.stat().st_size // 2)
    refused(lambda: load_network(checkpoint, config), "truncated", code=6)


def edit_map(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    edit_json(folder / INDEX, lambda raw: raw | {"weight_map": change(raw["weight_map"])})


NORM = "model.norm.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NO_SHARDS = (
    *("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".hidden.safetensors", ""),
    *("model.bin", "x.safetensors\n", "C:\\x.safetensors", "~/x.safetensors", "\x1b.safetensors"),
)
INDEXES = [
    ("", 6),
    ("[]", 6),
    ("{}", 6),
    ('{"weight_map": {}}', 6),
    ('{"weight_map": []}', 6),
    ('{"weight_map": {"a": 3}}', 6),
    ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', 6),
    ('{"weight_map": {"a": "absent.safetensors"}}', 3),
    # A file system has names of at most 255 bytes.
    ('{"weight_map": {"243": "' + "x" * 243 + '.safetensors"}}', 3),
    ('{"weight_map": {"244": "' + "x" * 244 + '.safetensors"}}', 6),
    ('{"weight_map": {"15 MiB": "' + "x" * (15 << 20) + '.safetensors"}}', 6),
    (json.dumps({"weight_map": {f"{n}": f"{n}.safetensors" for n in range(4097)}}), 6),
    (json.dumps({"weight_map": {f"a{n}": "x.safetensors" for n in range(101_001)}}), 6),
    *((json.dumps({"weight_map": {f"as {n}": name}}), 6) for n, name in enumerate(NO_SHARDS)),
]


@pytest.mark.parametrize(("text", "code"), INDEXES, ids=range(len(INDEXES)))
def test_bad_index(text: str, code: int, tmp_path: Path) -> None:
    write(Spec(layout="sharded"), tmp_path)
    (tmp_path / INDEX).write_text(text)
    refused(lambda: Checkpoint.open(tmp_path), code=code)


def test_the_index_and_the_shards_must_agree(tmp_path: Path) -> None:
    write(Spec(layout="sharded"), tmp_path)
    stale = [tmp_path / f"{name}.safetensors" for name in ("model-00009-of-00009", "consolidated")]
    for path in stale:  # beside the index it is not read
        save_file({NORM: torch.zeros(48)}, path)
    assert network_of(tmp_path).norm.abs().sum() > 0
    for path in stale:
        path.unlink()
    index = tmp_path / INDEX
    good = index.read_text()
    mapping = json.loads(good)["weight_map"]
    other = next(shard for shard in mapping.values() if shard != mapping[NORM])
    for change in (plus(NORM, other), drop(NORM), plus("model.extra.weight", other)):
        edit_map(tmp_path, change)
        refused(lambda: Checkpoint.open(tmp_path), code=6)
        index.write_text(good)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    whole = shards[1].read_bytes()
    edit_tensors(shards[1], plus(*next(iter(load_file(shards[0]).items()))))
    refused(lambda: Checkpoint.open(tmp_path), "both", code=6)
    shards[1].write_bytes(whole)
    (tmp_path / other).unlink()
    refused(lambda: Checkpoint.open(tmp_path), other, code=3)


ONES = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
OTHER, *PARTS = (f"{name}.safetensors" for name in ("model-00001-of-00003", "part-a", "part-b"))
GONE = f"{INDEX} does not fit the files here: it names {ONES[0]}, which are missing, and not "
MORE = f"it names {ONES[0]} and 1 more, which are missing, and not {PARTS[0]} and 1 more, which are"
NO_INDEX = f"{ONES[0]} and 1 more hold weights, but {INDEX} is missing"
BELONGS, COMPLETE = "the index that belongs to these files", "complete the download"
DELETE = f"if {SINGLE} is the whole model, delete the index"


@pytest.mark.parametrize(
    ("before", "after", "words", "hint"),
    [
        (ONES, ONES[:1], f"{ONES[1]} is missing (1 of 2 shards are)", COMPLETE),
        (ONES, [OTHER, ONES[1]], f"{GONE}{OTHER}, which are here", BELONGS),
        (ONES, PARTS, f"{MORE} here", BELONGS),
        (ONES, [SINGLE], f"and not {SINGLE}, which are here", DELETE),
        # An adapter, or the original layout beside shards, is not what the index should name.
        (ONES, ["adapter_model.safetensors"], "2 of 2 shards are", COMPLETE),
        (ONES, ["consolidated.safetensors"], "2 of 2 shards are", COMPLETE),
        ([], ONES, NO_INDEX, "download it too"),
    ],
)
def test_an_index_that_does_not_fit_the_files(
    before: list[str], after: list[str], words: str, hint: str, tmp_path: Path
) -> None:
    weights = stored(tmp_path).rename(tmp_path / "weights").read_bytes()
    if before:
        mapping = dict(zip(("a", "b"), before, strict=True))
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": mapping}))
    for name in after:
        (tmp_path / name).write_bytes(weights)
    error = refused(lambda: Checkpoint.open(tmp_path), words, code=3)
    assert hint in error.hint
    if hint == DELETE:  # the advice can be followed
        (tmp_path / INDEX).unlink()
        network_of(tmp_path)


COMPUTED = {
    "hf": [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "layers.1.attention.rotary_emb.sin_cached",
        "model.rotary_emb.original_inv_freq",
        "rotary_emb.inv_freq",
        "transformer.rotary_pos_emb.inv_freq",
        "model.layers.1.self_attn.cos_cached",
        "sin_cached",
    ],
    "original": ["rope.freqs", "layers.0.attention.inner_attention.rope.freqs", "freqs_cis"],
}


@pytest.mark.parametrize("layout", ["hf", "sharded", "original"])
def test_what_the_network_computes_is_not_read(layout: str, tmp_path: Path) -> None:
    """Whatever its type, wherever it is, and also if only the index still names it."""
    write(Spec(layout=layout), tmp_path)
    before = network_of(tmp_path)
    names = COMPUTED.get(layout, COMPUTED["hf"])
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64]
    tables = {name: torch.ones(6, dtype=kind) for name, kind in zip(names, cycle(kinds))}
    for path in tmp_path.glob("*.safetensors"):  # in each of the shards
        edit_tensors(path, lambda tensors: tensors | tables)
    if layout == "sharded":
        other = "model.layers.7.self_attn.rotary_emb.inv_freq"
        edit_map(tmp_path, lambda shards: shards | {names[0]: ONES[0], other: ONES[1]})
    assert_equal(before, network_of(tmp_path))


@pytest.mark.parametrize("name", ["model.rotary_embed.weight", "xrope.freqs", "my_freqs_cis"])
def test_what_only_looks_like_it_is_refused(name: str, tmp_path: Path) -> None:
    path = stored(tmp_path, plus(name, torch.ones(6)))
    refused(lambda: network_of(tmp_path), "unexpected tensor")
    edit_tensors(path, lambda _: {"rope.freqs": torch.ones(6)})
    refused(lambda: network_of(tmp_path), "no weights")


def test_consolidated_files_in_two_parts(tmp_path: Path) -> None:
    """With an index; without one they are those of a model-parallel program."""
    path = stored(tmp_path, layout="original")
    whole, tensors, mapping = network_of(tmp_path), sorted(load_file(path).items()), {}
    half = len(tensors) // 2
    for number, part in enumerate((tensors[:half], tensors[half:]), 1):
        name = f"consolidated-0000{number}-of-00002.safetensors"
        save_file(dict(part), tmp_path / name)
        mapping |= {key: name for key, _ in part}
    index = path.rename(tmp_path / "whole").with_name("consolidated.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": mapping}))
    assert_equal(network_of(tmp_path), whole)
    for extra in (index, *map(tmp_path.joinpath, {*mapping.values()})):
        extra.unlink()
    for number in (0, 1):
        weights = (tmp_path / "whole").read_bytes()
        (tmp_path / f"consolidated.0{number}.safetensors").write_bytes(weights)
    error = refused(lambda: Checkpoint.open(tmp_path), code=6)
    assert "model-parallel" in error.hint


@pytest.mark.parametrize(
    ("inner", "outer"),
    [("language_model.model.", "language_model."), ("model.language_model.", "")],
)
def test_the_text_part_of_a_wrapper(inner: str, outer: str, tmp_path: Path) -> None:
    """As version 4 of transformers wrote it, and as version 5 names it, beside images."""
    path = stored(tmp_path, family="mistral3", extra={"model_type": "mistral"})
    want = network_of(tmp_path)

    def spelled(tensors: Tensors) -> Tensors:
        vision = {name: tensor for name, tensor in tensors.items() if "vision_tower" in name}
        made = {name.replace("model.", inner, 1): t for name, t in tensors_of(want)}
        made[f"{outer}lm_head.weight"] = made.pop("lm_head.weight")
        assert vision
        return vision | made

    edit_tensors(path, spelled)
    assert_equal(network_of(tmp_path), want)
    edit_json(tmp_path / "config.json", drop("tie_word_embeddings"))
    found = network_of(tmp_path)  # transformers ties what does not say it, if there is no lm_head
    assert_equal(found, want)
    assert "tie_word_embeddings" not in " ".join(found.config.notes)
    edit_tensors(path, drop(f"{outer}lm_head.weight"))
    assert network_of(tmp_path).config.tied is True
    edit_tensors(path, plus(NORM, torch.ones(48)))
    refused(lambda: network_of(tmp_path), "twice")


Q = "model.layers.0.self_attn.q_proj.weight"
ACCOUNTS: list[tuple[Any, int, str]] = [
    (drop(NORM), 6, "lack model.norm.weight"),
    (drop("lm_head.weight"), 6, "lm_head"),
    (drop("model.embed_tokens.weight"), 6, "embed_tokens"),
    (plus("model.layers.2.mlp.up_proj.weight", torch.ones(2)), 6, "unexpected"),
    (plus("model.layers.0.self_attn.q_proj.bias", torch.ones(48)), 6, "unexpected"),
    (plus("model.layers.0.self_attn.q_norm.weight", torch.ones(12)), 6, "q_norm"),
    (plus("score.weight", torch.ones(2, 2)), 6, "score"),
    (lambda t: t | {NORM: torch.ones(47)}, 6, "shape"),
    (lambda t: t | {NORM: torch.ones(48, 1)}, 6, "shape"),
    (lambda t: t | {Q: t[Q][:, :-1]}, 6, "shape"),
    (lambda t: t | {"lm_head.weight": t["lm_head.weight"][:-1]}, 6, "shape"),
    (lambda t: t | {NORM: t[NORM].double()}, 3, "F64"),
    (lambda t: t | {NORM: t[NORM].long()}, 3, "I64"),
    (lambda t: t | {Q: t[Q].to(torch.float8_e4m3fn)}, 3, "quantised"),
    (lambda t: t | {Q: t[Q].to(torch.int8)}, 3, "quantised"),
    (lambda t: t | {Q: t[Q].to(torch.uint8)}, 3, "quantised"),
    (lambda t: t | {Q + "_scale_inv": torch.ones(1)}, 3, "quantised"),
    (lambda t: t | {Q.replace("weight", "qweight"): torch.ones(1)}, 3, "quantised"),
    (lambda t: t | {Q.replace("weight", "g_idx"): torch.ones(1)}, 3, "quantised"),
    (lambda t: t | {Q.replace("weight", "weight_packed"): torch.ones(1)}, 3, "quantised"),
    (lambda t: t | {Q + ".absmax": torch.ones(1)}, 3, "quantised"),
    (lambda t: t | {Q + ".quant_state.bitsandbytes__nf4": torch.ones(1)}, 3, "quantised"),
    (each(lambda v: v.to(torch.float8_e5m2)), 3, "quantised"),
    (each(torch.Tensor.double), 3, "F64"),
]


@pytest.mark.parametrize(("change", "code", "word"), ACCOUNTS)
def test_accounting(change: Change, code: int, word: str, tmp_path: Path) -> None:
    stored(tmp_path, change)
    error = refused(lambda: network_of(tmp_path), word, code=code)
    assert ("not tied" in error.hint) == (word == "lm_head")


@pytest.mark.parametrize(
    "change",
    [
        drop("layers.1.ffn_norm.weight"),
        plus("layers.0.attention.wq.lora", torch.ones(2)),
        lambda t: t | {NORM: t["norm.weight"].clone()},
    ],
    ids=["none", "unknown", "under both names"],
)
def test_the_original_layout_is_accounted_for_too(change: Change, tmp_path: Path) -> None:
    stored(tmp_path, change, layout="original")
    refused(lambda: network_of(tmp_path), code=6)


FORMATS = [
    (["pytorch_model.bin"], "pickled"),
    (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "pickled"),
    (["consolidated.00.pth"], "pickled"),
    (["model.pt"], "pickled"),
    (["model.ckpt"], "pickled"),
    (["model-q4.gguf"], "GGUF"),
    (["flax_model.msgpack"], "Flax"),
    (["training_args.bin"], "no weights"),
    ([], "no weights"),
]


@pytest.mark.parametrize(("files", "word"), FORMATS)
def test_other_formats_are_refused_by_name(files: list[str], word: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x04.")
    refused(lambda: Checkpoint.open(tmp_path), word, code=3)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16, None])
def test_every_pair_of_dtypes_converts_as_torch_does(
    stored: torch.dtype, wanted: torch.dtype | None, tmp_path: Path, monkeypatch: Any
) -> None:
    """And it has the names by which transformers knows it: so a trained network is saved."""
    oracle = write(Spec(bias=True, mlp_bias=True), tmp_path)
    edit_tensors(tmp_path / "model.safetensors", each(lambda tensor: tensor.to(stored)))
    monkeypatch.setattr(weights, "TAKEN", 1)  # tensors are read in many pieces
    network = network_of(tmp_path, wanted)
    dtype = wanted or stored
    assert network.dtype == dtype
    found = dict(tensors_of(network))
    assert found.keys() == oracle.state_dict().keys()
    for name, tensor in oracle.state_dict().items():
        assert torch.equal(found[name], tensor.to(stored).to(dtype)), name


def test_the_storage_dtype_is_that_of_most_bytes(tmp_path: Path) -> None:
    stored(tmp_path, each(lambda tensor: tensor if tensor.dim() == 1 else tensor.bfloat16()))
    assert network_of(tmp_path).dtype == torch.bfloat16


def test_a_model_that_cannot_fit_is_refused_before_it_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path)
    config, checkpoint = ModelConfig.from_folder(tmp_path), Checkpoint.open(tmp_path)
    needs = config.parameters * 4 + weights.STAGING
    monkeypatch.setattr(weights, "free_memory", lambda device: needs - 1)
    monkeypatch.setattr(weights, "Llama", lambda *a, **k: pytest.fail("allocated"))
    refused(lambda: load_network(checkpoint, config), "MiB of memory", code=4)
    monkeypatch.undo()
    monkeypatch.setattr(weights, "free_memory", lambda device: needs)
    load_network(checkpoint, config)


def test_free_memory_respects_a_containers_limit(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    assert weights._cgroup_free(tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert weights._cgroup_free(tmp_path) is None
    assert (weights.free_memory(torch.device("cpu")) or 0) > 2**20
    # Of a GPU, and of a system without meminfo.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 80 << 30))
    assert weights.free_memory(torch.device("cuda")) == 5 << 30
    monkeypatch.setattr(weights, "_cgroup_free", lambda root: None)
    monkeypatch.setattr(weights, "address_space", lambda: None)
    monkeypatch.setattr(Path, "read_text", lambda path: "MemAvailable: 7 kB\nodd line\n")
    assert weights.free_memory(torch.device("cpu")) == 7 * 1024
    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 7 kB\n")
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert weights.free_memory(torch.device("cpu")) == 4_096_000
    monkeypatch.setattr(os, "sysconf_names", {})
    assert weights.free_memory(torch.device("cpu")) is None


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_embedding_is_compared_with_it(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, the last of which is a short one, and where only the last number differs."""
    monkeypatch.setattr(checkpoint, "STAGING", 1000)
    path = stored(tmp_path, tied=True)
    before = network_of(tmp_path)
    with safe_open(path, "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
    head = embedding.clone()
    head[-1, -1] = head[-1, -1] if same else 3.0
    edit_tensors(path, plus("lm_head.weight", head))
    made = network_of(tmp_path)
    assert made.config.tied == same
    assert (made.head.dense() is made.embedding) == same
    assert float(made.head.dense()[-1, -1]) == float(head[-1, -1])
    said = "tie_word_embeddings is set, but lm_head differs from the embedding: not tied"
    notes = [note for note in made.config.notes if note not in before.config.notes]
    assert notes == ([] if same else [said])
    edit_tensors(path, plus("lm_head.weight", embedding[:-1]))  # of another shape
    refused(lambda: network_of(tmp_path), "lm_head.weight")


def test_what_names_of_dtypes_and_devices_mean() -> None:
    for name, stored, device, wants in (
        ("auto", torch.float16, "cpu", torch.float32),
        ("auto", torch.float16, "cuda", torch.float16),
        ("auto", torch.bfloat16, "cpu", torch.bfloat16),
        ("auto", torch.float32, "cpu", torch.float32),
        ("float16", torch.bfloat16, "cpu", torch.float16),
    ):
        assert models.dtype_of(name, stored, torch.device(device)) == wants, (name, stored, device)
    refused(lambda: models.dtype_of("int4", torch.float32, torch.device("cpu")), code=3)
    for name in ("tpu", "meta", "mps", "cuda:99", "cuda:x", ""):
        refused(lambda name=name: models._device(name), code=3)
    assert models._device("cpu") == torch.device("cpu")
    assert models._device("auto").type in ("cpu", "cuda")


def test_a_second_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whatever the tensors are on."""
    now = [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "set_device", now.append)
    assert models._device("cuda") == torch.device("cuda")
    assert models._device("cuda:1") == torch.device("cuda:1")
    assert now == [0, 1]
    assert devices.prepare("cuda:0", 0) == torch.device("cuda:0")
    assert devices.prepare("cpu", 0) == torch.device("cpu")
    assert now == [0, 1, 0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("layers", some_by_day([3, 6], lambda layers: layers == 3))
@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_loading_peaks_at_one_copy_and_keeps_no_file(
    wanted: str, layers: int, tmp_path: Path
) -> None:
    """100 MB of bfloat16 by day, 200 at night: the peak above the start is the weights and the
    staging buffer."""
    peaks.write(tmp_path, layers, 8000)
    made = peaks.loading(tmp_path, wanted)
    assert made.size > layers * 25 * 2**20
    staging = weights.STAGING if wanted == "float32" else 0  # what stays as it is needs none
    assert made.grown < made.size + staging + 16 * 2**20
    assert (made.mapped, made.held, made.sympy) == (False, False, False)


READING = """
import ctypes, sys, threading, time, torch
ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed leaves no holes in the heap
from minikv.models.config import ModelConfig
from minikv.models.llama import Llama
from minikv.models.tensors import randomise
from minikv.models.rope import RopeConfig

class Nothing:
    position = 0
    def attend(self, layer, q, k, v):
        return q
    def advance(self, tokens):
        pass

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.set_num_threads(1)
dtype, tokens = getattr(torch, sys.argv[1]), 8192
config = ModelConfig(
    family="llama", layers=2, heads=8, kv_heads=2, head_dim=64, hidden=512, mlp=1536, vocab=1000,
    norm_eps=1e-5, rope=RopeConfig(), max_context=tokens, windows=(None, None), tied=True,
)
network = randomise(Llama(config, dtype=dtype))
network.forward(torch.zeros(1024, dtype=torch.int64), Nothing())
ids = torch.zeros(tokens, dtype=torch.int64)
before = peak = resident()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
network.forward(ids, Nothing())
done = True
thread.join()
stream = tokens * 512 * dtype.itemsize
wide = network.rows * 2 * 1536 * dtype.itemsize
print(peak - before, stream, wide)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", some_by_day(["bfloat16", "float32"], "float32".__eq__))
def test_a_long_prompt_holds_the_residual_stream_and_one_chunk(dtype: str) -> None:
    """8192 tokens through a network without a cache; 10 MiB for a chunk on the way and the tables
    of rotations: a second tensor of full length, 8 or 16 MiB, would show. A
    processor that does not multiply bfloat16 also has a chunk, a block and its product in float32.
    """
    grown, stream, wide = map(int, forked.run(dtype, code=READING).out.split())
    assert grown >= stream  # the watch has seen the forward
    converted = dtype == "bfloat16" and not bf16_products()
    assert grown <= stream + wide * (5 if converted else 1) + 10 * 2**20


def test_a_file_that_the_disk_does_not_give_is_one_line(tmp_path: Path) -> None:
    """/proc/self/mem is a regular file whose first byte gives EIO."""
    path = stored(tmp_path)
    path.unlink()
    path.symlink_to("/proc/self/mem")
    error = refused(lambda: Checkpoint.open(tmp_path), code=3)
    assert str(error).startswith("model.safetensors cannot be read: Input/output")


def test_a_disk_that_fails_while_weights_are_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every read that there is, and in a folder that cannot be listed."""
    write(Spec(layout="sharded"), tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    fault = Fault("read", 1 << 30)

    class Broken(io.FileIO):
        def readinto(self, into: Any) -> int:
            fault.hit()
            return super().readinto(into)

    for module in (weights, checkpoint):
        monkeypatch.setattr(module, "open_regular", Broken)
    load_network(Checkpoint.open(tmp_path), config)
    reads = fault.count
    assert reads > 30
    for at in range(1, reads + 1):
        fault = Fault("read", at)
        loading = lambda: load_network(Checkpoint.open(tmp_path), config)  # noqa: E731
        refused(loading, "cannot be read: Input/output error", code=3)
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=denied))
    refused(lambda: Checkpoint.open(tmp_path), "cannot be read: Permission denied")

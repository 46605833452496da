"""GGUF files. The package `gguf` writes them and says what their numbers are; what a model computes
is what its folder says. Bad files are made of good ones by hand."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import ggufs
import numpy as np
import pytest
import torch
import vocabularies as v
from checkpoints import Spec
from gguf import GGMLQuantizationType, quants
from loaded import network_of, refused

import minikv
from minikv import models
from minikv.models import weights
from minikv.models.blocks import KINDS, Blocks
from minikv.models.config import ModelConfig
from minikv.models.gguf import Gguf
from minikv.models.linear import Int4, Int8
from minikv.models.stored import apart
from minikv.models.tensors import tensors_of
from minikv.models.weights import load_network

SPEC = Spec(hidden=256, heads=4, kv_heads=2, head_dim=64, vocab=320)
QUANTISED = {kind.name: kind for kind in KINDS.values() if kind.form != "plain"}


@pytest.mark.parametrize("name", QUANTISED)
def test_values_are_those_of_the_specification(name: str, tmp_path: Path) -> None:
    raw, path = ggufs.blocks(name, 70, 512), tmp_path / "blocks"
    path.write_bytes(b"before" + raw.tobytes())
    made = Blocks.at("x", path, 6, (70, 512), QUANTISED[name])
    want = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name]))[3:68]
    assert made.size == raw.nbytes
    assert torch.equal(made.rows(3, 68), want)
    if made.form == "int4":
        codes, scale, middle = made.steps(3, 68)
        assert middle is not None
        values = (apart(codes).view(65, 16, 32).float() - 8) * scale[..., None] + middle[..., None]
        assert (values.flatten(1) - want).abs().max() <= 1e-6 * want.abs().max()


SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 7.0}
SPECS = (
    SPEC,
    replace(SPEC, tied=True, bias=True, head_dim=None),
    replace(SPEC, family="mistral", heads=6, head_dim=32),
    replace(SPEC, family="mistral", window=9),
    replace(SPEC, family="qwen2", head_dim=None, rope="yarn"),
    replace(SPEC, family="qwen3", heads=6, head_dim=32, tied=True),
    replace(SPEC, family="ministral3", rope="ministral3", heads=6, head_dim=32),
    replace(SPEC, family="granite", head_dim=None, extra=SCALES | {"attention_multiplier": 0.125}),
    replace(SPEC, family="smollm3", head_dim=None, layers=5),
    replace(SPEC, family="phi3", head_dim=None, window=9),
    replace(SPEC, family="olmo2", head_dim=None),
    replace(SPEC, family="olmo3", head_dim=None, rope="olmo3", window=9, layers=5),
)


def rounded(value: Any) -> Any:
    """All floats in a value as the file has them."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_plain_numbers_are_those_of_the_folder(spec: Spec, tmp_path: Path) -> None:
    """Also the order of the rows, which some architectures change in the file."""
    made = Gguf(ggufs.model(tmp_path, spec))
    config, folder = made.config(), ModelConfig.from_folder(tmp_path)
    family = "llama" if config.family == "llama" else folder.family  # as a mistral without window
    said = {"stop_ids": config.stop_ids, "own": config.own, "notes": (), "family": family}
    assert rounded(asdict(config)) == rounded(asdict(replace(folder, **said)))
    tensors = dict(tensors_of(network_of(tmp_path)))
    found = dict(tensors_of(load_network(made.checkpoint(), config)))
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, tensors[name]), name


MIXED = {"attn_v": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "token_embd": "Q8_0"}
MIXED |= {"attn_output": "Q4_0", "ffn_gate": "Q4_1", "ffn_up": "Q4_1", "output.": "Q6_K"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_mixed_file_is_kept_in_its_own_forms(tied: bool, tmp_path: Path) -> None:
    """As Q4_K_M is. Eight bits lose at most half a step of a row's largest number, and four bits
    only what their scales are rounded by."""
    spec = replace(SPEC, tied=tied)
    path = ggufs.model(tmp_path, spec, MIXED if not tied else {**MIXED, "token_embd": "Q4_0"})
    loaded = models.load(path)
    net, config = loaded.network, loaded.config
    assert config.form == ("Q4_1" if not tied else "Q4_0") or config.form.startswith("Q")
    assert net.weight_bytes == weights.weight_bytes(config, torch.bfloat16, "auto")
    found = [
        (net.layers[1].qkv, Int8, ["blk.1.attn_q", "blk.1.attn_k", "blk.1.attn_v"]),
        (net.layers[1].out, Int4, ["blk.1.attn_output"]),
        (net.layers[1].gate_up, Int4, ["blk.1.ffn_gate", "blk.1.ffn_up"]),
        (net.embedding, Int8, ["token_embd"]),
        (net.head, Int8, ["token_embd" if tied else "output"]),
    ]
    for matrix, kind, names in found:
        assert isinstance(matrix, kind), names
        parts = [ggufs.dense(path, f"{name}.weight") for name in names]
        for i, heads in enumerate((4, 2) if "attn_q" in names[0] else ()):
            parts[i] = parts[i].reshape(heads, 32, 2, 256).swapaxes(1, 2).reshape(-1, 256)
        want = torch.from_numpy(np.concatenate(parts))
        off = (matrix.dense().float() - want).abs().amax(1) / want.abs().amax(1).clamp(min=1e-9)
        assert off.max() <= 1 / 70, names
    text = "".join(loaded.tokenizer.decode([id]) for id in loaded.tokenizer.encode("Hi 12!\n"))
    assert text == "Hi 12!\n"
    assert loaded.tokenizer.stop_ids == {1}
    assert loaded.template.opening([models.templates.Message("user", "a")])[:3] == [0, 66, 1]


@pytest.mark.parametrize("form", ["int4", "int4+head"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_mixed_file_is_quantised_again_where_four_bits_are_asked_for(
    form: str, kernels: str, tmp_path: Path
) -> None:
    """In groups of 128 columns, where the file's have 16 and 32: off by half a step of a group's
    range at most, of which the largest number is at least half."""
    path = ggufs.model(tmp_path, SPEC, MIXED)
    chat = minikv.load(str(path), weights=form, kernels=kernels, remember="off")
    layer = chat.engine.network.layers[1]  # type: ignore[attr-defined]
    for matrix, names in ((layer.qkv, ["attn_v"]), (layer.out, ["attn_output"])):
        assert isinstance(matrix, Int4)
        parts = [ggufs.dense(path, f"blk.1.{n}.weight") for n in names]
        want = torch.from_numpy(np.concatenate(parts))
        off = (matrix.dense().float()[-len(want) :] - want).abs().amax(1) / want.abs().amax(1)
        assert off.max() <= 1 / 13


def test_factors_of_the_frequencies_are_the_tensor(tmp_path: Path) -> None:
    raw = {"num_hidden_layers": 1, "max_position_embeddings": 64, "hidden_size": 64}
    raw |= {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    raw |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4}
    made = ggufs.begun(tmp_path / "a.gguf", "llama", raw, 100)
    made.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
    made.add_tensor("rope_freqs.weight", np.arange(1, 17, dtype=np.float32))
    ggufs.closed(made)
    rope = Gguf(tmp_path / "a.gguf").config().rope
    frequencies, scale = models.rope.frequencies(rope, 32)
    want = 1e4 ** (-torch.arange(16) / 16) / torch.arange(1, 17)
    assert torch.allclose(frequencies, want)
    assert scale == 1.0


@pytest.mark.parametrize("version", ["v1", "v3", "llama-bpe"])
def test_ids_are_those_of_the_vocabulary(version: str, tmp_path: Path) -> None:
    """sentencepiece's own, and those of the tokenizer.json with the same words."""
    made = Gguf(ggufs.tokenizer(tmp_path / "a.gguf", version))
    ours = made.tokenizer(replace(ModelConfig.from_folder(models.BUNDLED), stop_ids=(2,)))
    rng = random.Random(5)
    other = None
    if version == "llama-bpe":
        data = v.byte_level_json(v.LLAMA_3, 4000)
        other = models.tokenizer.Tokenizer.from_folder(v.write_folder(tmp_path, data))
    for text in (v.random_text(rng, ("<s>", "[INST]", "<|eot_id|>")) for _ in range(1000)):
        want = v.vendor(version).encode(text) if other is None else other.encode(text)
        assert ours.encode(text) == want, text
        assert ours.decode(want) == text
    assert not set(ours.encode("<s><|eot_id|>[/INST]</s>")) & set(ours.control.values())


# -- bad files ------------------------------------------------------------------------------


@cache
def good(folder: Path) -> bytes:
    small = replace(SPEC, hidden=64, heads=2, kv_heads=1, head_dim=32)
    return ggufs.model(folder, small).read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def file(
    *pairs: bytes, tensors: Sequence[bytes] | None = None, version: int = 3, **counts: int
) -> bytes:
    """A GGUF file with this metadata, and one tensor if none are given. counts: what its header
    says instead of the true numbers."""
    tensors = [tensor()] if tensors is None else tensors
    said = counts.get("places", len(tensors)), counts.get("keys", len(pairs))
    made = b"GGUF" + struct.pack("<IQQ", version, *said) + b"".join([*pairs, *tensors])
    return made + bytes(-len(made) % 32 + 4096)


def tensor(
    name: str = "token_embd.weight",
    shape: tuple[int, ...] = (32, 4),
    kind: int = 0,
    offset: int = 0,
    dimensions: int | None = None,
) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    made = text(name) + struct.pack("<I", count) + b"".join(struct.pack("<Q", n) for n in shape)
    return made + struct.pack("<IQ", kind, offset)


def placed(*tensors: bytes) -> bytes:
    """A file without metadata."""
    return file(tensors=tensors)


def number(value: int, form: str = "<Q") -> bytes:
    return struct.pack(form, value)


def array(kind: int, count: int) -> bytes:
    return number(kind, "<I") + number(count)


def damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Files that are refused with exit code 6: a name and the content."""
    for n in (2**31, 2**40, 2**60, 2**63, 2**64 - 1):
        yield f"{n} tensors", file(places=n)
        yield f"{n} pairs", file(keys=n)
        yield f"key of {n}", file(number(n))
        yield f"text of {n}", file(pair("a", 8, number(n)))
        for kind in (0, 4, 8, 12):
            yield f"array of {n} {kind}", file(pair("a", 9, array(kind, n)))
        yield f"columns {n}", placed(tensor(shape=(n, 4)))
        yield f"rows {n}", placed(tensor(shape=(32, n)))
        yield f"offset {n}", placed(tensor(offset=n // 32 * 32))
        yield f"name of {n}", placed(number(n) + bytes(64))
        yield f"dimensions {n % 2**32}", placed(tensor(dimensions=n % 2**32))
        yield f"alignment {n}", file(pair("general.alignment", 10, number(n)))
    for n in (0, 3, 5, 24, 33, 2**21):
        yield f"alignment {n}", file(pair("general.alignment", 4, number(n, "<I")))
    yield "alignment in words", file(pair("general.alignment", 8, text("32")))
    for kind in (13, 14, 99, 2**32 - 1):
        yield f"value of type {kind}", file(pair("a", kind, bytes(8)))
        yield f"items of type {kind}", file(pair("a", 9, array(kind, 1) + bytes(8)))
    yield "an array of arrays", file(pair("a", 9, array(9, 1) * 40))
    yield "a key twice", file(pair("a", 0, b"1"), pair("a", 0, b"1"))
    yield "a key that is no text", file(number(2) + b"\xff\xfe" + bytes(8))
    yield "no tensor", placed()
    for n in (0, 5, 9):
        yield f"{n} dimensions", placed(tensor(shape=(32,) * n))
    for name in ("", "a b", "../x", "x" * 200, "\x1b[2J", "-"):
        yield f"name {name[:9]!r}", placed(tensor(name))
    for kind, one in KINDS.items():
        if one.weights > 1:
            yield f"half a block of {one.name}", placed(tensor(shape=(16, 4), kind=kind))
            yield f"a vector of {one.name}", placed(tensor(shape=(256,), kind=kind))
        size = (one.weights * 8, 4096)
        yield f"{one.name} beyond the end", placed(tensor(shape=size, kind=kind))
    yield "an empty tensor", placed(tensor(shape=(0, 4)))
    for offset in (1, 4, 31, 33):
        yield f"not aligned {offset}", placed(tensor(offset=offset))
    yield "a name twice", placed(tensor("a"), tensor("a", offset=512))
    yield "the same place", placed(tensor("a"), tensor("b"))
    yield "overlapping", placed(tensor("a", (64, 4)), tensor("b", offset=512))
    yield "the second too long", placed(tensor("a"), tensor("b", (32, 400), offset=512))
    others = (b"GGML", b"\0\0\0\3GGUF", b"<html>", b"version https://git-lfs")
    for start in (b"", b"G", b"GGUF", *others):
        yield f"begins {start[:9]!r}", start
    half = array(0, 2**19 + 1) + bytes(2**20)
    yield "two arrays that have too many together", file(pair("a", 9, half), pair("b", 9, half))
    yield "only an architecture", file(pair("general.architecture", 8, text("llama")))
    end = whole.rindex(b"output_norm.weight")
    for at in (*range(8, end, end // 40), len(whole) - 1, len(whole) // 2):
        yield f"cut at {at}", whole[:at]
    for key, old, new in (
        ("block_count", b"\2", b"\xff"),
        ("attention.head_count", b"\2", b"\3"),
        ("embedding_length", b"\x40", b"\0"),
        ("feed_forward_length", b"\x38", b"\x39"),
        ("attention.key_length", b"\x20", b"\x21"),
    ):
        yield f"another {key}", changed(whole, key, old, new)
    for old, new in (
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"),
        (b"blk.1.attn_q.weight", b"blk.9.attn_q.weight"),
        (b"output_norm.weight", b"output_nora.weight"),
        (b"token_embd.weight", b"token_embx.weight"),
        (b"{% for m", b"{% fox m"),
    ):
        yield f"{old!r} is {new!r}", whole.replace(old, new, 1)


def changed(whole: bytes, key: str, old: bytes, new: bytes) -> bytes:
    """The file with another first byte of a number."""
    name = text(f"llama.{key}")
    at = whole.index(name) + len(name) + 4
    assert whole[at : at + 1] == old, key
    return whole[:at] + new + whole[at + 1 :]


def unsupported(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Files that are refused with exit code 3."""
    for kind in (4, 5, 10, 11, 15, 16, 23, 24, 34, 39, 40, 77, 2**31):
        yield f"type {kind}", placed(tensor(kind=kind))
    for n in (0, 1, 4, 2**16, 2**31):
        yield f"version {n}", file(version=n)
    yield "no metadata", file()
    texts = array(8, 2**20) + text("x" * 30) * 2**20
    yield "as many texts as there may be", file(pair("a", 9, texts))
    yield "another architecture", file(pair("general.architecture", 8, text("gpt-9")))
    yield "an architecture of numbers", file(pair("general.architecture", 4, bytes(4)))
    yield "another size of values", changed(whole, "attention.value_length", b"\x20", b"\x10")
    model = b"tokenizer.ggml.mode"
    for old, new in ((model + b"l", model + b"x"), (b"smollm", b"smollx"), (b"gpt2", b"gpt9")):
        yield f"{old!r} is {new!r}", whole.replace(old, new, 1)


def test_bad_files_end_in_one_line(tmp_path: Path) -> None:
    """Quickly, and without the memory that they claim."""
    whole, path = good(tmp_path), tmp_path / "bad.gguf"
    found = [(6, *one) for one in damaged(whole)] + [(3, *one) for one in unsupported(whole)]
    assert len({name for _, name, _ in found}) >= 200
    wrong = []
    for code, name, content in found:
        path.write_bytes(content)
        try:
            refused(lambda: models.load(path), code=code, memory=200 << 20)
        except BaseException as error:
            wrong.append((name, repr(error)))
    assert wrong == []

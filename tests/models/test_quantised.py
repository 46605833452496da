"""Quantised safetensors beside what other programs say that they hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import edit_tensors
from loaded import refused
from quantising import FORMS, folders
from safetensors.torch import load_file, save_file
from test_parity import TOKENS, difference, our_logits, tokens
from torch import Tensor

from minikv import models
from minikv.models.checkpoint import read_header
from minikv.models.config import ModelConfig
from minikv.models.linear import Int4, Int8, Plain
from minikv.models.quantised import Matrix, stored
from minikv.models.stored import apart
from minikv.models.weights import weight_bytes

Written = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A model of a form, and one with its values; written once, so no test may change them."""
    return cache(lambda name: folders(tmp_path_factory.mktemp("model"), FORMS[name]))


@pytest.mark.parametrize("name", FORMS)
def test_a_matrix_has_the_values_that_its_writer_says(
    name: str, written: Written, tmp_path: Path
) -> None:
    form, (folder, _) = FORMS[name], written(name)
    rows, columns = 136, 128
    parts, value = form.write(rows, columns, torch.Generator().manual_seed(3))
    save_file({f"m.{tail}": part for tail, part in parts.items()}, tmp_path / "one.safetensors")
    about = ModelConfig.from_folder(folder).quantisation
    assert about is not None
    made = stored(read_header(tmp_path / "one.safetensors"), about, {"m.weight": (rows, columns)})
    assert list(made) == ["m.weight"]
    matrix = made["m.weight"]
    assert isinstance(matrix, Matrix)
    assert (about.name, matrix.form, matrix.shape) == (form.name, form.held, (rows, columns))
    for start, end in ((0, rows), (8, 136), (3, 70), (64, 128), (135, 136)):
        close = {"rtol": 2e-6, "atol": 1e-7}
        torch.testing.assert_close(matrix.rows(start, end), value[start:end], **close)
        if matrix.form == "plain":
            continue
        codes, scale, middle = matrix.steps(start, end)
        assert codes.dtype == (torch.uint8 if matrix.form == "int4" else torch.int8)
        codes = apart(codes) if matrix.form == "int4" else codes
        got, want = codes.float() * scale if middle is None else codes.float(), value[start:end]
        if middle is None:
            want = want.max(-127 * scale)
        else:
            scale, middle = (part.repeat_interleave(matrix.group, 1) for part in (scale, middle))
            got = (got - 8) * scale + middle
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


Q = "model.layers.0.self_attn.q_proj."
Change = Callable[[dict[str, Tensor]], object]


def _put(tail: str, make: Callable[[Tensor], Tensor]) -> Change:
    """Change one tensor of the first query matrix."""
    return lambda t: t | {Q + tail: make(t[Q + tail])}


def _without(tail: str) -> Change:
    return lambda t: {name: value for name, value in t.items() if name != Q + tail}


def _text(make: Callable[[bytes], bytes]) -> Change:
    tail = "weight.quant_state.bitsandbytes__nf4"
    return _put(tail, lambda x: torch.tensor(list(make(bytes(x))), dtype=torch.uint8))


def _set(value: float, tail: str = "scales") -> Change:
    return _put(tail, lambda x: x.index_fill(0, torch.tensor([0]), value))


TENSORS: list[tuple[str, Change, int, str]] = [
    ("awq", _without("scales"), 6, "scales is missing"),
    ("awq", _without("qzeros"), 6, "qzeros is missing"),
    ("awq", _without("qweight"), 6, "lack"),
    ("awq", _put("qweight", lambda x: x[:-1]), 6, "no codes of"),
    ("awq", _put("qweight", lambda x: x.t()), 6, "no codes of"),
    ("awq", _put("qweight", lambda x: x.view(-1)), 6, "no codes of"),
    ("awq", _put("qweight", lambda x: x[..., None]), 6, "no codes of"),
    ("awq", _put("qweight", lambda x: x.long()), 3, "stored as I64"),
    ("awq", _put("qweight", lambda x: x[:0]), 6, "no codes of"),
    ("awq", _put("qzeros", lambda x: x[:-1]), 6, "is not as"),
    ("awq", _put("qzeros", lambda x: x[:, :-1]), 6, "is not as"),
    ("awq", _put("qzeros", lambda x: x.to(torch.int8)), 3, "stored as I8"),
    ("awq", _put("scales", lambda x: x[:-1]), 6, "no scales of"),
    ("awq", _put("scales", lambda x: x.repeat(2, 1)), 6, "no scales of"),
    ("awq", _put("scales", lambda x: x.t()), 6, "no scales of"),
    ("awq", _put("scales", lambda x: x[:0]), 6, "no scales of"),
    ("awq", _put("scales", lambda x: x.int()), 3, "stored as I32"),
    ("awq", _set(float("nan")), 6, "0 or not a number"),
    ("awq", _set(float("inf")), 6, "0 or not a number"),
    ("awq", _set(0.0), 6, "0 or not a number"),
    ("awq", lambda t: t | {Q + "weight": torch.zeros(64, 64)}, 6, "twice"),
    ("awq", lambda t: t | {Q + "bias": torch.zeros(3)}, 6, "unexpected"),
    ("awq", lambda t: t | {Q + "weight_packed": torch.zeros(3)}, 6, "unexpected"),
    ("awq", lambda t: t | {"x.qweight": torch.zeros(3)}, 6, "unexpected"),
    ("gptq", _without("scales"), 6, "scales is missing"),
    ("gptq", _put("g_idx", lambda x: x[:-1]), 6, "numbers"),
    ("gptq", _put("g_idx", lambda x: x + 1), 6, "is not all 0 to"),
    ("gptq", _put("g_idx", lambda x: x - 1), 6, "is not all 0 to"),
    ("gptq", _put("g_idx", lambda x: x.float()), 3, "stored as F32"),
    ("gptq", _put("g_idx", lambda x: x[:, None]), 6, "numbers"),
    ("gptq", _put("qweight", lambda x: x[:-1]), 6, "no codes of"),
    ("gptq", _put("qzeros", lambda x: x[:, :-1]), 6, "is not as"),
    ("gptq", lambda t: t | {Q + "bias": torch.ones(64)}, 6, "unexpected"),
    ("ct int4", _without("weight_scale"), 6, "weight_scale is missing"),
    ("ct int4", _put("weight_packed", lambda x: x[:, :-1]), 6, "no codes of"),
    ("ct int4", _put("weight_scale", lambda x: x[:, :1]), 6, "no scales of"),
    ("ct int4 zeros", _put("weight_zero_point", lambda x: x[:-1]), 6, "is not as"),
    ("ct int4 zeros", _put("weight_zero_point", lambda x: x.to(torch.int8)), 3, "stored as I8"),
    ("ct int8", _without("weight_scale"), 6, "weight_scale is missing"),
    ("ct int8", _put("weight", lambda x: x.to(torch.uint8)), 3, "stored as U8"),
    ("ct float8", _put("weight", lambda x: x.to(torch.float8_e5m2)), 3, "stored as F8_E5M2"),
    ("ct float8", _set(float("nan"), "weight_scale"), 6, "0 or not a number"),
    ("ct float8", _put("weight", lambda x: x.float()), 6, "unexpected"),
    ("fp8 blocks", _without("weight_scale_inv"), 6, "weight_scale_inv is missing"),
    ("fp8 blocks", _put("weight_scale_inv", lambda x: x[:1]), 6, "no scales of"),
    ("fp8 blocks", _put("weight", lambda x: x[:-1]), 6, "no codes of"),
    ("fp8 tensor", _put("weight_scale_inv", lambda x: x.expand(2)), 6, "no scales of"),
    ("fp8 tensor", _put("weight_scale_inv", lambda x: x * 0), 6, "0 or not a number"),
    ("nf4", _without("weight.absmax"), 6, "weight.absmax is missing"),
    ("nf4", _without("weight.quant_map"), 6, "weight.quant_map is missing"),
    ("nf4", _without("weight.quant_state.bitsandbytes__nf4"), 6, "weight.quant_state is missing"),
    ("nf4", _put("weight.absmax", lambda x: x[:-1]), 6, "numbers"),
    ("nf4", _put("weight.quant_map", lambda x: x[:-1]), 6, "numbers"),
    ("nf4", _put("weight", lambda x: x[:-1]), 6, "quant_state says"),
    ("nf4", _set(float("nan"), "weight.absmax"), 6, "0 or not a number"),
    ("nf4", _text(lambda x: x.replace(b'"blocksize": 32', b'"blocksize": 0')), 6, "quant_state"),
    ("nf4", _text(lambda x: x.replace(b'"blocksize": 32', b'"blocksize": 96')), 3, "blocks of 96"),
    ("nf4", _text(lambda x: x.replace(b"blocksize", b"blackrise")), 6, "blocksize must be"),
    ("nf4", _text(lambda x: b"[" * 1000), 6, "not valid JSON"),
    ("nf4", _text(lambda x: b" " * 70000), 6, "too large"),
    ("nf4 nested", _without("weight.nested_absmax"), 6, "weight.nested_absmax is missing"),
    ("nf4 nested", _put("weight.nested_quant_map", lambda x: x[:-1]), 6, "256 numbers"),
    ("nf4 nested", _put("weight.nested_absmax", lambda x: x.repeat(2)), 6, "numbers"),
    ("llm.int8", _put("weight_format", lambda x: x + 1), 3, "rows in order"),
    ("llm.int8", _without("SCB"), 6, "is missing"),
    ("llm.int8", _put("SCB", lambda x: x[:-1]), 6, "no scales of"),
]
IDS = [f"{i} {form} {word}" for i, (form, _, _, word) in enumerate(TENSORS)]


@pytest.mark.parametrize(("form", "change", "code", "word"), TENSORS, ids=IDS)
def test_bad_tensors(
    form: str, change: Change, code: int, word: str, written: Written, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(written(form)[0], tmp_path / "bad"))
    edit_tensors(folder / "model.safetensors", change)
    refused(lambda: models.load(folder), word, code=code)


@pytest.mark.parametrize("name", FORMS)
def test_a_model_answers_as_one_with_its_values(name: str, written: Written) -> None:
    form, (made, plain) = FORMS[name], written(name)
    ids = tokens(200)
    want = our_logits(models.load(plain).network, ids, [TOKENS])
    unpacked = models.load(made, dtype="float32", weights="plain").network
    assert difference(our_logits(unpacked, ids, [TOKENS]), want) < 1e-5
    network = models.load(made).network
    got = our_logits(network, ids, [TOKENS - 1, 1]).float()
    assert float((got - want).norm() / want.norm()) < 0.03
    assert network.config.form == form.name
    values = load_file(plain / "model.safetensors")
    for i, layer in enumerate(network.layers):
        value, down = values[f"model.layers.{i}.mlp.down_proj.weight"], layer.down
        assert {"int4": Int4, "int8": Int8, "plain": Plain}[form.held] is type(down)
        # A scale and a middle are rounded once, to eight bits.
        assert float((down.dense().float() - value).norm() / value.norm()) < 2**-7
    again = models.load(made, weights=form.held).network if form.held != "plain" else network
    assert torch.equal(again.layers[1].down.dense(), network.layers[1].down.dense())
    assert again.weight_bytes == weight_bytes(again.config, torch.bfloat16, form.held)
    said = any("unpacked" in note for note in network.config.notes)
    assert said == (form.held == "plain")

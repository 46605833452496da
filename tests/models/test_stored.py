"""Matrices that a file has in eight or four bits are kept as they are, whatever they are joined
with. The values are those of the formula in `stored.Steps`, computed here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Spec, write
from loaded import refused
from torch import Tensor

from minikv.models import linear, weights
from minikv.models.checkpoint import Checkpoint
from minikv.models.config import ModelConfig, OwnForm
from minikv.models.linear import Int4, Int8, Plain
from minikv.models.llama import Llama
from minikv.models.stored import Steps, Stored, own_forms, paired
from minikv.models.weights import load_network

SPEC = Spec(
    hidden=128, heads=4, kv_heads=2, head_dim=48, extra={"intermediate_size": 128}, vocab=67
)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Coded(Stored):
    """Random codes, as a reader of a quantised file finds them."""

    def whole(self) -> Steps:
        made = torch.Generator().manual_seed(sum(map(ord, self.name)))
        groups = self.shape[1] // (self.group or self.shape[1])
        low, high, kind = (0, 16, torch.uint8) if self.form == "int4" else (-127, 128, torch.int8)
        codes = torch.randint(low, high, self.shape, generator=made).to(kind)
        scale = 0.01 + 0.01 * torch.rand(self.shape[0], groups, generator=made)
        middle = 0.02 * torch.randn(self.shape[0], groups, generator=made)
        return codes, scale, middle if self.form == "int4" else None

    def values(self, rounded: bool = True) -> Tensor:
        """Float32. rounded: with scales and middles in bfloat16, as they are kept."""
        codes, *others = self.whole()
        scale, middle = (
            None if x is None else x.repeat_interleave(self.shape[1] // x.shape[1], 1)
            for x in (x.bfloat16().float() if rounded and x is not None else x for x in others)
        )
        return codes.float() * scale if middle is None else (codes.float() - 8) * scale + middle

    def _steps(self, start: int, end: int) -> Steps:
        codes, scale, middle = self.whole()
        codes = paired(codes) if self.form == "int4" else codes
        return codes[start:end], scale[start:end], None if middle is None else middle[start:end]

    def _rows(self, start: int, end: int) -> Tensor:
        return self.values(rounded=False)[start:end]


def coded(
    folder: Path, forms: dict[str, tuple[str, int | None]], **spec: object
) -> tuple[Checkpoint, ModelConfig, dict[str, Coded]]:
    """A checkpoint in bfloat16 of which the named matrices are quantised."""
    write(replace(SPEC, **spec), folder, torch.bfloat16)  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(folder)
    made = {
        name: Coded(name, entry.path, entry.start, entry.shape, prod(entry.shape), *forms[part])
        for name, entry in checkpoint.entries.items()
        for part in forms
        if name.endswith(f"{part}.weight")
    }
    entries = {**checkpoint.entries, **made}
    return Checkpoint(entries, checkpoint.original), ModelConfig.from_folder(folder), made


def of(net: Llama, made: dict[str, Coded], slot: str, *parts: str) -> tuple[linear.Linear, Tensor]:
    """A matrix of layer 1, and the values of its parts in the file."""
    names = [next(n for n in made if ".1." in n and part in n) for part in parts]
    return getattr(net.layers[1], slot), torch.cat([made[name].values() for name in names])


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("where", ["tiles", "unknown tiles", "rows of a GPU"])
@pytest.mark.parametrize("groups", [(32, 32), (64, 32), (None, 64)], ids=str)
def test_four_bits_are_kept_as_they_are(
    groups: Any, where: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a matrix whose parts have other groups, too, and read in several blocks."""
    monkeypatch.setattr(weights, "TAKEN", 1)
    if where == "unknown tiles":
        monkeypatch.setattr(linear, "half_tile", lambda: None)
    one, other = groups
    forms = dict.fromkeys(LAYERS, ("int4", one)) | {"k_proj": ("int4", other)}
    checkpoint, config, made = coded(tmp_path, forms, bias=layout == "hf", layout=layout)
    if where == "rows of a GPU":
        real = linear.kept
        monkeypatch.setattr(weights, "kept", lambda p, f, r, _, g: real(p, f, r, None, g))
    net = load_network(checkpoint, config)
    plain = load_network(Checkpoint.open(tmp_path), config, dtype=torch.bfloat16)
    heads = {"q_proj": SPEC.heads, "k_proj": SPEC.kv_heads}
    for slot, *parts in (
        ("qkv", "q_proj", "k_proj", "v_proj"),
        ("out", "o_proj"),
        ("gate_up", "gate_proj", "up_proj"),
        ("down", "down_proj"),
    ):
        matrix, _ = of(net, made, slot, *parts)
        assert isinstance(matrix, Int4)
        assert matrix.group == (other if slot == "qkv" else one or (64 if slot == "out" else 128))
        values = []
        for part in parts:
            value = of(net, made, slot, part)[1]
            if layout == "original" and part in heads:
                value = value.view(heads[part], -1, 2, 128).transpose(1, 2).reshape(-1, 128)
            values.append(value)
        assert torch.equal(matrix.dense(), torch.cat(values).bfloat16())
        bias = getattr(plain.layers[1], slot).bias
        assert matrix.bias is bias is None or torch.equal(matrix.bias, bias)
    assert isinstance(net.embedding, Tensor)


def test_eight_bits_are_kept_by_row_and_beside_four(tmp_path: Path) -> None:
    forms = dict.fromkeys(LAYERS, ("int8", None)) | {"down_proj": ("int8", 32)}
    forms |= dict.fromkeys(("k_proj", "embed_tokens", "lm_head"), ("int4", 32))
    checkpoint, config, made = coded(tmp_path, forms)
    net = load_network(checkpoint, config)
    for slot, parts in (("out", ("o_proj",)), ("gate_up", ("gate_proj", "up_proj"))):
        matrix, values = of(net, made, slot, *parts)
        assert torch.equal(matrix.dense(), values.bfloat16())
    for slot, parts in (("qkv", ("q_proj", "k_proj", "v_proj")), ("down", ("down_proj",))):
        matrix, values = of(net, made, slot, *parts)
        assert isinstance(matrix, Int8)
        off = (matrix.dense().float() - values).abs().amax(1) / values.abs().amax(1)
        assert off.max() <= 1 / 70  # a step, and four roundings to bfloat16
    assert isinstance(net.embedding, Int8)
    assert isinstance(net.head, Int4)
    assert torch.equal(net.head.dense(), made["lm_head.weight"].values().bfloat16())
    rows = made["model.embed_tokens.weight"].values()
    assert (net.embedding.dense().float() - rows).abs().max() <= rows.abs().max() / 80


@pytest.mark.parametrize("form", ["plain", "int8", "int4", "int8+head"])
def test_another_form_is_made_of_the_values(form: str, tmp_path: Path) -> None:
    """What is asked for is not in the file, so it is unpacked, and a note says so."""
    own = "int8" if form == "int4" else "int4"
    forms = dict.fromkeys((*LAYERS, "embed_tokens"), (own, None if own == "int8" else 32))
    checkpoint, config, made = coded(tmp_path, forms, tied=True)
    config = replace(config, form="Q9_K", stored=own_forms(checkpoint.entries, True))
    net = load_network(checkpoint, config, form=form)
    asked = form.removesuffix("+head")
    assert [("Q9_K" in note) for note in net.config.notes] == [True]
    for slot, parts in (("out", ("o_proj",)), ("qkv", ("q_proj", "k_proj", "v_proj"))):
        matrix, _ = of(net, made, slot, *parts)
        names = [next(n for n in made if ".1." in n and part in n) for part in parts]
        values = torch.cat([made[name].values(rounded=False) for name in names]).bfloat16()
        assert torch.equal(matrix.dense(), linear.kept(Plain(values), asked).dense())
    assert isinstance(net.head, Plain if form == "plain" else Int8)
    assert net.weight_bytes == weights.weight_bytes(config, torch.bfloat16, form)


def test_figures_know_the_own_form(tmp_path: Path) -> None:
    forms: dict[str, tuple[str, int | None]] = dict.fromkeys(LAYERS, ("int4", 32))
    forms |= {"v_proj": ("int8", 16), "embed_tokens": ("int8", 32)}
    checkpoint, config, _ = coded(tmp_path, forms)
    kinds = [("q, k, v", "int8", 16), ("o", "int4", 32), ("gate, up", "int4", 32)]
    stored = [OwnForm(*kind, config.layers) for kind in (*kinds, ("down", "int4", 32))]
    found = own_forms(checkpoint.entries, False)
    assert {*found} == {*stored, OwnForm("embedding", "int8", 32, 1)}
    config = replace(config, form="Q9_K", stored=found)
    net = load_network(checkpoint, config)
    assert net.weight_bytes == weights.weight_bytes(config, torch.bfloat16, "auto")
    in_float32 = partial(load_network, checkpoint, config, dtype=torch.float32)
    refused(in_float32, "needs bfloat16", code=2)
    whole = in_float32(form="plain")
    assert whole.weight_bytes == 4 * config.parameters

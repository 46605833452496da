"""Weights in large pages: memory like any other, given back, and never what a load fails by."""

from __future__ import annotations

import json
import mmap
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minikv import pages
from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import Shape
from minikv.cli.bench import networks
from minikv.models.checkpoint import Checkpoint
from minikv.models.config import ModelConfig
from minikv.models.linear import Int8
from minikv.models.tensors import tensors_of
from minikv.models.weights import load_network
from minikv.pages import LARGE, PAGE, SLAB, SMALL, Pages

CPU = torch.device("cpu")
needs_large = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="asks for large pages")


@needs_large
@pytest.mark.parametrize("form", ["auto", "int8"])
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "random"])
def test_matrices_lie_there_and_what_was_packed_is_gone(
    loaded: bool, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gate_up` and `down` are large enough for mappings of their own, in bfloat16 all are;
    the rest shares one. A file's matrices are packed some rows at a time; of random ones, which are
    packed whole, none is left, but each plain matrix that stays has one alone."""
    given = {"layers": 2, "hidden": 2048, "mlp": 4096, "heads": 16, "kv_heads": 4}
    sizes = networks.llama(**given, head_dim=128, vocab=500)
    if loaded:
        net = networks.plain(networks.Spec(sizes))
        save_file(dict(tensors_of(net)), tmp_path / "model.safetensors")
        config = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 4096}
        config |= {"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 16}
        config |= {"num_key_value_heads": 4, "head_dim": 128}
        (tmp_path / "config.json").write_text(json.dumps(config))
    made: list[weakref.ref[mmap.mmap]] = []

    class Known(mmap.mmap):
        def __init__(self, *args: object, **kwargs: object) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(pages.mmap, "mmap", Known)
    if loaded:
        checkpoint, told = Checkpoint.open(tmp_path), ModelConfig.from_folder(tmp_path)
        net = load_network(checkpoint, told, form=form)
    else:
        net = networks.network(networks.Spec(sizes, weights=form))
    for layer in net.layers:
        for matrix in (layer.gate_up, layer.down):
            stored = matrix.weights if isinstance(matrix, Int8) else matrix.dense()
            assert stored.data_ptr() % PAGE == 0
    alive = sum(ref() is not None for ref in made)
    large = 4 if form == "int8" else 8
    assert alive == large + 1 + 2 * (form == "int8" and not loaded)
    assert (len(made) > alive) == (form == "int8" and not loaded)
    del net, layer, matrix, stored
    assert not any(ref() is not None for ref in made)


@needs_large
def test_tensors_lie_beside_each_other_and_do_not_overlap() -> None:
    room = Pages(CPU)
    shapes = [(SMALL // 4, 1), (300, 1001), (3, SMALL + 7), (LARGE + 9, 1), *[(LARGE - 5, 1)] * 9]
    types = [torch.float32, torch.bfloat16, torch.int8, *[torch.uint8] * 10]
    made = [room.empty(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    for number, (tensor, shape, dtype) in enumerate(zip(made, shapes, types, strict=True)):
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    for number, tensor in enumerate(made):
        assert bool((tensor == number + 1).all())
    first, second = made[0].data_ptr(), made[1].data_ptr()
    assert first % PAGE == made[3].data_ptr() % PAGE == 0
    assert 0 <= second - first - made[0].nbytes < 64
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in made)
    assert all(one[1] <= two[0] for one, two in pairwise(spans))


@needs_large
def test_a_matrix_larger_than_a_slab_and_one_that_is_small() -> None:
    room = Pages(CPU)
    large = room.empty((2, SLAB), torch.int8)
    assert large.data_ptr() % PAGE == 0
    large[-1, -1] = 5
    assert room._slab is None
    before = room._used
    assert room.empty((SMALL - 1,), torch.int8).shape == (SMALL - 1,)
    assert room.empty((0, 7), torch.float32).shape == (0, 7)
    assert room._used == before


@needs_large
def test_a_slab_goes_with_its_last_tensor() -> None:
    room = Pages(CPU)
    one, two = room.empty((SMALL,), torch.int8), room.empty((SMALL,), torch.int8)
    assert room._slab is not None
    slab = weakref.ref(room._slab)
    view = two[5:9].fill_(3)
    del room, one, two
    assert slab() is not None
    assert view.tolist() == [3, 3, 3, 3]
    del view
    assert slab() is None


@needs_large
@pytest.mark.parametrize("refused", ["map", "advice"])
def test_without_such_memory_it_is_torch_s(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on address space, and a system that was built without large pages."""

    class Refusing(mmap.mmap):
        def __new__(cls, *args: int, **kwargs: int) -> Refusing:
            if refused == "map":
                raise OSError(12, "Cannot allocate memory")
            return super().__new__(cls, *args, **kwargs)

        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(pages.mmap, "mmap", Refusing)
    room = Pages(CPU)
    made = [room.empty((SMALL,), torch.float32).fill_(n) for n in range(3)]
    assert [t.sum().item() for t in made] == [0, SMALL, 2 * SMALL]


def test_it_can_be_trained_and_elsewhere_it_is_torch_s() -> None:
    weight = Pages(CPU).empty((512, 512), torch.float32).normal_().requires_grad_()
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert bool((weight.grad == 2).all())
    made = Pages(torch.device("meta")).empty((1 << 40, 2), torch.float32)
    assert (made.device.type, made.shape) == ("meta", (1 << 40, 2))


@needs_large
def test_keys_and_values_of_a_long_text_are_in_large_pages() -> None:
    """And those of a short one are in torch's own memory."""
    rows = LARGE // (64 * 2)
    shape = Shape(1, 1, 1, 64, (None,), 1 << 20)
    empty = KVCache(shape, dtype=torch.bfloat16, device="cpu").arena
    for count, filled, large in (
        (rows, None, True),
        (rows, rows // 2, True),
        (rows, rows // 2 - 1, False),  # unused rows would take memory, too
        (rows - 1, None, False),
    ):
        arena = empty.fresh([count], {}, filled=filled)
        for name in ("k", "v"):
            column = arena.columns[name]
            assert column.shape == (count, 64)
            assert (column.data_ptr() % PAGE == 0) == large
            assert not column.is_inference()
        assert arena.columns["pos"].data_ptr() % PAGE
    with torch.inference_mode():
        assert not arena.fresh([rows], {}).columns["k"].is_inference()

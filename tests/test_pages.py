"""Weights in large pages: memory like any other, given back, and never what a load fails by."""

from __future__ import annotations

import mmap
import weakref
from itertools import pairwise

import pytest
import torch

from minikv.models import pages
from minikv.models.pages import PAGE, SLAB, SMALL, Pages

CPU = torch.device("cpu")
needs_large = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="asks for large pages")


@needs_large
def test_tensors_lie_beside_each_other_and_do_not_overlap() -> None:
    room = Pages(CPU)
    shapes = [(SMALL // 4, 1), (300, 1001), (3, SMALL + 7), (SLAB // 2, 1), (SLAB // 4 + 5, 2)]
    types = [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int8]
    made = [room.empty(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    for number, (tensor, shape, dtype) in enumerate(zip(made, shapes, types, strict=True)):
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    for number, tensor in enumerate(made):
        assert bool((tensor == number + 1).all())
    first, second = made[0].data_ptr(), made[1].data_ptr()
    assert first % PAGE == 0
    assert 0 <= second - first - made[0].nbytes < 64
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in made)
    assert all(one[1] <= two[0] for one, two in pairwise(spans))


@needs_large
def test_a_matrix_larger_than_a_slab_and_one_that_is_small() -> None:
    room = Pages(CPU)
    large = room.empty((2, SLAB), torch.int8)
    assert large.data_ptr() % PAGE == 0
    large[-1, -1] = 5
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


def test_it_can_be_trained() -> None:
    weight = Pages(CPU).empty((512, 512), torch.float32).normal_().requires_grad_()
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert bool((weight.grad == 2).all())


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


def test_elsewhere_it_is_torch_s() -> None:
    made = Pages(torch.device("meta")).empty((1 << 40, 2), torch.float32)
    assert (made.device.type, made.shape) == ("meta", (1 << 40, 2))

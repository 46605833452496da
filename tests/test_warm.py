"""At load everything is launched once that the steps of an answer will launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import small
import torch

from minikv.kernels.dispatch import Kernels
from minikv.warm import warm


class Recorder(Kernels):
    """Notes what is called, and what keywords it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[str]]] = []

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name == "calls" or name.startswith("_") or not callable(found):
            return found
        return self._noting(name, found)

    def _noting(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            given = frozenset(key for key, value in kwargs.items() if value is not None)
            self.calls.append((name, given))
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("none", {"append"}), ("streaming", {"append"}), ("h2o", {"append", "h2o_step"}),
        ("roco", {"append", "roco_step"}), ("tova", {"append", "tova_step"}),
        ("scissorhands", {"append", "scissorhands_step"}), ("hashevict", {"hash_append"}),
    ],
)  # fmt: skip
def test_what_a_policy_launches(step: str, expected: set[str]) -> None:
    net = small.network()
    kv = small.scheduler(net, "full", step, 64 if step != "none" else None)
    recorder = kv.ops = Recorder()
    warm(kv)
    names = {name for name, _ in recorder.calls}
    assert names - {"advance"} == expected | {"ragged_attention"}
    assert kv.position == 0
    assert kv.arena.rows == 0


def test_layers_with_and_without_a_window_and_rows_in_int8() -> None:
    net = small.network(windows=(None, 3, None))
    kv = small.over(net, None, None, None, kv=torch.int8)
    recorder = kv.ops = Recorder()
    warm(kv)
    given = [keys for name, keys in recorder.calls if name == "ragged_attention"]
    assert all("k_scale" in keys for keys in given)
    assert {"oldest" in keys for keys in given} == {True, False}


def test_kernels_that_cannot_be_built_are_replaced_and_a_line_says_so() -> None:
    class Broken(Kernels):
        name = "triton"

        @staticmethod
        def ragged_attention(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    kv = small.scheduler(small.network(), "full", "h2o")
    kv.ops = Broken()
    warm(kv)
    assert kv.ops.name == "torch"
    assert kv.notice is not None
    assert "C compiler" in kv.notice
    assert "\n" not in kv.notice

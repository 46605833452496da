"""Who computes: which kernels are chosen, and that every operation has its place in the table."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minikv.kernels import dispatch


def test_nobody_expects_triton_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    for name, line in (("auto", False), ("torch", False), ("triton", True)):
        chosen, notice = dispatch.choose(cpu, name, 64, torch.float32)
        assert chosen.name in (("torch", "native") if name == "auto" else ("torch",))
        assert (notice is not None and "CUDA" in notice) == line


@pytest.mark.parametrize(
    ("changed", "head_dim", "dtype", "line"),
    [
        ({"capability": (7, 5)}, 128, torch.bfloat16, "8.0"),
        ({"version": "3.2.0"}, 128, torch.bfloat16, "too old"),
        ({"version": None}, 128, torch.bfloat16, "not installed"),
        ({"version": "3.8.0+git5c8f3d2e"}, 128, torch.bfloat16, None),
        ({"broken": True}, 128, torch.bfloat16, "OSError"),
        ({"hip": "6.0"}, 128, torch.bfloat16, "NVIDIA"),
        ({}, 100, torch.bfloat16, "not 100"),
        ({}, 256, torch.float32, "not 256"),
        ({}, 64, torch.float64, "float64"),
        ({}, 128, torch.bfloat16, None),
    ],
)
def test_a_reason_is_one_line_and_never_an_error(
    monkeypatch: pytest.MonkeyPatch, changed: Any, head_dim: int, dtype: Any, line: str | None
) -> None:
    def load(name: str) -> object:
        if changed.get("version", "") is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if changed.get("broken"):
            raise OSError("a library is missing")
        return SimpleNamespace(__version__=changed.get("version", "3.6.0"))

    fake, capability = dispatch.Kernels(), changed.get("capability", (9, 0))
    fake.name = "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", changed.get("hip"))
    monkeypatch.setattr(dispatch, "import_module", load)
    monkeypatch.setattr(dispatch, "on_gpu", lambda: fake)
    for name in ("auto", "triton"):
        chosen, notice = dispatch.choose(torch.device("cuda"), name, head_dim, dtype)
        assert (chosen.name == "triton") == (line is None)
        assert (notice is None) == (line is None)
        if notice is not None and line is not None:
            assert line in notice
            assert "\n" not in notice
    assert dispatch.choose(torch.device("cuda"), "torch", head_dim, dtype)[1] is None


@pytest.mark.parametrize("place", ["gpu", "c"])
def test_every_module_of_the_table_has_an_operation_of_its_row(place: str) -> None:
    """Those of C are one name for all ways of an operation (`FORMS` of the module)."""
    if place == "gpu":
        pytest.importorskip("triton", reason="no Triton on this system")
    facts = ("name", "choices", "products", "integer_prompts", "float_rows", "prompt_rows", "block")
    known = {name for name in vars(dispatch.Kernels) if name[0] != "_"} - {*facts}
    assert sorted(name for row in dispatch.FORMS for name in row.names.split()) == sorted(known)
    for row in dispatch.FORMS:
        if module := getattr(row, place):
            there = importlib.import_module(f"minikv.kernels.{module}")
            places = [there, *vars(there).get("FORMS", {}).values()]
            names = row.names.split()
            assert any(hasattr(one, name) for one in places for name in names), row


def test_a_kernel_is_a_folder_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in the table, it is taken where C computes its kind of operation, and nowhere else."""
    toy = SimpleNamespace(silu_mul=lambda both: both)
    monkeypatch.setitem(sys.modules, "minikv.kernels.toy.cpu", toy)
    row = dispatch.Row("silu_mul", "", "toy.cpu", "norms and rotation")
    monkeypatch.setattr(dispatch, "FORMS", (*dispatch.FORMS, row))
    for name, ours in (("auto", True), ("torch", False)):
        chosen, _ = dispatch.choose(torch.device("cpu"), name, 64, torch.float32)
        assert (chosen.silu_mul is toy.silu_mul) == (ours and chosen.name == "native")

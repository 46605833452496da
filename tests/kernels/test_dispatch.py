"""Who computes: which kernels are chosen, and that every operation has its place in the table."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from types import SimpleNamespace

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
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, object],
    head_dim: int,
    dtype: torch.dtype,
    line: str | None,
) -> None:
    def load(name: str) -> object:
        if changed.get("version", "") is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if changed.get("broken"):
            raise OSError("a library is missing")
        return SimpleNamespace(Triton=Fake, __version__=changed.get("version", "3.6.0"))

    class Fake(dispatch.Kernels):
        name = "triton"

    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: changed.get("capability", (9, 0))
    )
    monkeypatch.setattr(torch.version, "hip", changed.get("hip"))
    monkeypatch.setattr(dispatch, "import_module", load)
    for name in ("auto", "triton"):
        chosen, notice = dispatch.choose(torch.device("cuda"), name, head_dim, dtype)
        assert (chosen.name == "triton") == (line is None)
        assert (notice is None) == (line is None)
        if notice is not None and line is not None:
            assert line in notice
            assert "\n" not in notice
    assert dispatch.choose(torch.device("cuda"), "torch", head_dim, dtype)[1] is None


def operations() -> list[str]:
    facts = {
        "name",
        "choices",
        "products",
        "integer_prompts",
        "float_rows",
        "prompt_rows",
        "block",
    }
    return [n for n in vars(dispatch.Kernels) if not n.startswith("_") and n not in facts]


@pytest.mark.parametrize(
    ("column", "table"),
    [(0, "gpu_table.Triton"), (1, "native.table.Native"), (2, "dispatch.Kernels")],
)
def test_the_table_of_who_computes_what_is_true(column: int, table: str) -> None:
    """Each cell names the module of the function; "-" is an operation that torch computes."""
    module, _, name = table.rpartition(".")
    if column == 0:
        pytest.importorskip("triton", reason="no Triton on this system")
    kernels = getattr(importlib.import_module(f"minikv.kernels.{module}"), name)
    assert dispatch.__doc__ is not None
    lines = re.findall(r"^ {4}(\w+) +(\S+) +(\S+) +(\S+)$", dispatch.__doc__, re.MULTILINE)
    said = {line[0]: line[1 + column] for line in lines if line[0] != "operation"}
    assert list(said) == operations()
    for operation, cell in said.items():
        function = getattr(kernels, operation)
        if isinstance(function, Mapping):  # of kernels by the names of policies
            modules = {one.__module__.removeprefix("minikv.kernels.") for one in function.values()}
            assert modules == ({cell.replace("/", ".")} if cell != "policies" else set()), operation
            continue
        if cell in ("policies", "models"):
            assert function is None, operation
        elif cell == "-":
            assert function is getattr(dispatch.Kernels, operation), operation
        else:
            assert function.__module__ == "minikv.kernels." + cell.replace("/", "."), operation

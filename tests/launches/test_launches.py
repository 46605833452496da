"""What a step and a prompt launch on a GPU is what `table.json` says, for every policy, counted
without a GPU; and every Triton kernel passes Triton's own JIT and launcher on the way.

A difference is either a mistake or the point of a change; then write the table anew:

    python tests/launches/counting.py --write
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no Triton on this system")

from builds import builds

from minikv import policies

HERE = Path(__file__).parent
TABLE: dict[str, Any] = json.loads((HERE / "table.json").read_text())
ENV = os.environ | {"PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "0"}

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and its driver"),
    pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang", "cc"))), reason="no C compiler"),
]


def differences(found: dict[str, Any]) -> list[str]:
    """Lines that say what is not as in the table."""
    lines = []
    for name, row in found.items():
        was = TABLE["steps"].get(name) or TABLE["prompts"].get(name)
        if was is None:
            lines.append(f"{name}: not in the table")
            continue
        lines += [
            f"{name}, {part}: {was[part]} -> {row[part]}" for part in row if was[part] != row[part]
        ]
    return lines


def test_steps_and_prompts_launch_what_the_table_says() -> None:
    """One process for all of `checks`: it takes seconds to begin."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, HERE / "checks.py"]
    ran = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-6000:]


@pytest.mark.soak
def test_no_kernel_is_compiled_in_the_middle_of_a_turn_under_any_policy(tmp_path: Path) -> None:
    command = [sys.executable, HERE / "counting.py", "--late", "--json", tmp_path / "found.json"]
    ran = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: late for name, late in found["late"].items() if late} == {}


def test_a_launch_more_is_a_difference() -> None:
    row = {part: [*counts] for part, counts in TABLE["steps"]["full/none"].items()}
    assert differences({"full/none": row}) == []
    row["beside"][1] += 1
    was = TABLE["steps"]["full/none"]["beside"]
    assert differences({"full/none": row, "new/none": row}) == [
        f"full/none, beside: {was} -> {row['beside']}",
        "new/none: not in the table",
    ]


def test_the_table_has_every_policy() -> None:
    steps, prompts = ({name.split()[0] for name in TABLE[part]} for part in ("steps", "prompts"))
    assert {name.partition("/")[2] for name in steps} >= {*policies.step_names()}
    assert {name.partition("/")[0] for name in prompts} >= {*policies.prompt_names()}
    for name in policies.prompt_names():
        assert {f"{name}/none first", f"{name}/none later"} <= {*TABLE["prompts"]}


def test_every_kernel_is_launched() -> None:
    """The compile gate's list of kernels is the one of what the table's runs launch."""
    names = {build.kernel for build in builds().values()}
    assert names == {*TABLE["kernels"]["steps"], *TABLE["kernels"]["prompts"]}

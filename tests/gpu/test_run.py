"""The scripts for a machine with a GPU, without one: each runs on tiny sizes, or in Triton's
interpreter, and what they name exists."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pairwise import some_by_day

sys.path.insert(0, str(Path(__file__).parent))

from run import GROUPS, HERE, ROOT, Runner, Step, steps

from minikv.cli.bench import everything
from minikv.cli.bench.arguments import Arguments


def called(*options: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, options)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"} | env,
    )


def without(folder: Path, names: tuple[str, ...]) -> None:
    """Write a module to a folder that hides these packages from a Python with it in its path."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {names}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )


def test_the_scripts_run_on_a_cpu(tmp_path: Path) -> None:
    """With the packages of an image for GPUs: what only the command line needs is not there."""
    pytest.importorskip("triton", reason="no Triton on this system")
    without(tmp_path, ("platformdirs", "prompt_toolkit", "pydantic"))
    ran = called(
        HERE / "run.py",
        "--small",
        "--out",
        tmp_path,
        "facts",
        "smoke",
        "probe",
        "kernels",
        "ncu",
        GPU_TEST_SEED="77",
        PYTHONPATH=os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
    )
    done = json.loads((tmp_path / "steps.json").read_text())
    assert [one["state"] for one in done] == ["ok"] * 5, ran.stdout[-4000:]
    assert ran.returncode == 0
    assert "== smoke" in (tmp_path / "log.txt").read_text()
    smoke = json.loads((tmp_path / "smoke.json").read_text())
    assert {check["state"] for check in smoke["checks"]} == {"ok"}
    assert smoke["seed"] == 77
    assert {"layers", "step", "lengths", "chunks", "draws", "products"} == {
        *json.loads((tmp_path / "probe.json").read_text())
    }


def test_a_check_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    """Without the interpreter no kernel runs here."""
    file = tmp_path / "smoke.json"
    ran = called(
        HERE / "smoke.py", "--small", "--device", "cpu", "--json", file, TRITON_INTERPRET="0"
    )
    assert ran.returncode == 1
    found = {one["check"]: one["state"] for one in json.loads(file.read_text())["checks"]}
    assert found["rotate_append"] == "FAILED"
    assert found["torch's attention"] == "ok"
    assert "failed: ragged_attention" in ran.stdout


def test_steps_have_a_limit_and_one_that_fails_stops_none(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 600)
    code = "import time; print('begun', flush=True); time.sleep(60)"
    for step in (
        Step("bad", 60, (sys.executable, "-c", "raise SystemExit(3)")),
        Step("long", 1.5, (sys.executable, "-c", code)),
        Step("absent", 60, ("no-such-program",)),
        Step("unneeded", 60, ("true",), needs="no-such-program"),
        Step("good", 60, (sys.executable, "-c", "print('said')")),
    ):
        runner.run(step)
    done = json.loads((tmp_path / "steps.json").read_text())
    states = ["failed", "cut short", "failed", "left out", "ok"]
    assert [one["state"] for one in done] == states
    assert done[0]["why"] == "status 3"
    log = (tmp_path / "log.txt").read_text()
    assert "begun" in log
    assert "said" in log
    late = Runner(tmp_path, 1)
    late.run(Step("good", 60, ("true",)))
    assert late.done[0]["state"] == "left out"


def test_what_would_run_is_listed() -> None:
    ran = called(HERE / "run.py", "--dry")
    *listed, minutes, left = ran.stdout.splitlines()
    assert [line.split()[0] for line in listed] == [
        name for group in ("check", "measure") for name in GROUPS[group]
    ]
    usage = (HERE / "run.py").read_text().partition("\n\n")[2].splitlines()
    assert minutes in usage[0]
    assert left == "not run unless named: 128k, 512k"
    assert called(HERE / "run.py", "--dry", "nothing").returncode == 2
    assert called(HERE / "run.py", "--dry", "first").stdout.splitlines()[-2] in usage[1]


def test_the_parts_of_bench_and_the_kernels_that_are_named_exist(tmp_path: Path) -> None:
    known = steps(tmp_path, small=False)
    words = [step.command for step in known.values()]
    parts = {a[i + 1] for a in words for i, word in enumerate(a) if word == "--part"}
    arguments = Arguments(shape="tinyllama")
    assert parts == {part.name for part in everything.parts(arguments, gpu=True)}
    pytest.importorskip("triton", reason="no Triton on this system")
    pattern = next(word for word in known["ncu"].command if word.startswith("regex:"))
    names = ("decode", "step", "hash_append")
    modules = [importlib.import_module(f"minikv.kernels.triton.{name}") for name in names]
    for name in re.findall(r"\w+", pattern.partition("(")[2]):
        assert any(hasattr(module, name) for module in modules), name


def test_it_runs_without_an_installation() -> None:
    """The finder of an editable installation is taken away first."""
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in str(f)]; "
        f"sys.path.insert(0, {str(HERE)!r}); import plain_tree; plain_tree.linked(); "
        "import minikv.cli.bench.shapes, minikv.models.config; print(minikv.__file__)"
    )
    ran = called("-c", code)
    assert ran.returncode == 0, ran.stderr
    assert "minikv-tree-" in ran.stdout


OPTIONAL = ("hypothesis", "transformers", "mistral_common", "pypdf", "pyte", "matplotlib", "rouge")


@pytest.mark.parametrize("gpu", some_by_day([True, False], bool))
def test_optional_packages_are_not_needed_on_a_gpu(tmp_path: Path, gpu: bool) -> None:
    """With -m gpu files are skipped whose packages are missing; without it they are an error."""
    without(tmp_path, OPTIONAL)
    files = ("tests/cache/test_int8.py", "tests/kernels/triton/test_append.py")
    options = ("-p", "no:hypothesispytest", "-n", "0", "--collect-only")
    mark = ("-m", "gpu") if gpu else ()
    env = {"PYTHONPATH": str(tmp_path), "GPU_TEST_SEED": "12"}
    ran = called("-m", "pytest", *options, *mark, *files, **env)
    assert (ran.returncode == 0) == gpu, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "test_append.py" in ran.stdout
    assert "GPU_TEST_SEED=12 repeats them" in ran.stdout

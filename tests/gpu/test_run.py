"""The scripts for a machine with a GPU, without one: each runs on tiny sizes, or in Triton's
interpreter, and what they name exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pairwise import some_by_day

sys.path.insert(0, str(Path(__file__).parent))

import run
from run import GROUPS, HERE, ROOT, Runner, Step


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


@pytest.mark.parametrize("more", [(), pytest.param(("figures", "peer"), marks=pytest.mark.soak)])
def test_the_scripts_run_on_a_cpu(tmp_path: Path, more: tuple[str, ...]) -> None:
    """By day the checks, at night all. With the packages of an image for GPUs: what only the
    command line needs is not there. There are few files, so that all of them can be copied back
    from another machine."""
    pytest.importorskip("triton", reason="no Triton on this system")
    without(tmp_path, ("platformdirs", "prompt_toolkit", "pydantic"))
    out = tmp_path / "out"
    ran = called(
        HERE / "run.py",
        "--small",
        "--out",
        out,
        *("facts", "smoke", *more),
        GPU_TEST_SEED="77",
        PYTHONPATH=os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
    )
    done = json.loads((out / "steps.json").read_text())
    assert [one["state"] for one in done] == ["ok"] * (2 + len(more)), ran.stdout[-4000:]
    assert ran.returncode == 0
    assert "== smoke" in (out / "log.txt").read_text()
    checks = json.loads((out / "smoke.json").read_text())
    assert {check["state"] for check in checks["checks"]} == {"ok"}
    assert checks["seed"] == 77
    assert len([*out.iterdir()]) <= 8
    if not more:
        return
    figures = json.loads((out / "figures.json").read_text())
    assert {one["state"] for one in figures["items"].values()} == {"ok"}
    assert figures["facts"]["commit"]
    captured = [row["captured"] for row in figures["rows"] if "step_ms" in row]
    assert len(captured) > 8
    assert not any(captured), "there is no graph here"


@pytest.mark.soak
def test_an_item_that_ends_its_process_does_not_end_the_others(tmp_path: Path) -> None:
    """As after an illegal access, and as when the GPU hangs."""
    file, script = tmp_path / "figures.json", tmp_path / "figures_with_faults.py"
    script.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import figures\n"
        "figures.FIRST = (\n"
        "    figures.Item('good', 1, lambda bench: bench.row('x', us=1.0)),\n"
        "    figures.Item('bad', 1, lambda bench: 1 / 0),\n"
        "    figures.Item('dead', 1, lambda bench: os._exit(9)),\n"
        "    figures.Item('hangs', -9.9, lambda bench: time.sleep(600)),\n"
        "    figures.Item('last', 1, lambda bench: bench.row('y', us=2.0)),\n"
        "    figures.Item('long', 1e6, lambda bench: None),\n"
        ")\n"
        "figures.__file__ = __file__\n"
        "sys.exit(figures.main())\n"
    )
    ran = called(script, "--device", "cpu", "--small", "--json", file, TRITON_INTERPRET="1")
    assert ran.returncode == 1, ran.stderr
    found = json.loads(file.read_text())
    states = {name: one["state"] for name, one in found["items"].items()}
    assert states == {
        "good": "ok",
        "bad": "failed",
        "dead": "died",
        "hangs": "hung",
        "last": "ok",
        "long": "left out",
    }
    assert [row["case"] for row in found["rows"]] == ["x", "y"]
    assert "not measured: bad (failed), dead (died), hangs (hung), long (left out)" in ran.stdout


def test_a_check_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    """Without the interpreter no kernel runs here."""
    file = tmp_path / "smoke.json"
    ran = called(
        HERE / "smoke.py", "--small", "--device", "cpu", "--json", file, TRITON_INTERPRET="0"
    )
    assert ran.returncode == 1
    found = {one["check"]: one["state"] for one in json.loads(file.read_text())["checks"]}
    assert found["computed adakv+roco, auto weights"] == "FAILED"
    assert found["torch's attention"] == "ok"
    assert re.search(r"failed: .*computed", ran.stdout)


def test_steps_have_a_limit_and_one_that_fails_stops_none(tmp_path: Path) -> None:
    """A process ends with its children, also one that keeps the pipe open and one that was left
    behind."""
    runner = Runner(tmp_path, 600)
    code = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); "
        "print('begun', child.pid, flush=True); time.sleep(600)"
    )
    python = sys.executable
    merged: list[bool] = []
    for step in (
        Step("bad", 60, [(python, "-c", "raise SystemExit(3)"), ("true",)]),
        Step("long", 3, [(python, "-c", code)], after=lambda: merged.append(True)),
        Step("absent", 60, [("no-such-program",)]),
        Step("good", 60, [(python, "-c", f"print('said {i}')") for i in range(3)]),
        Step("told", 60, [(python, "-c", "import sys; print('has', *sys.argv[1:])", run.LIMIT)]),
    ):
        runner.run(step)
    done = json.loads((tmp_path / "steps.json").read_text())
    states = ["failed", "cut short", "failed", "ok", "ok"]
    assert [one["state"] for one in done] == states
    assert done[0]["why"] == "status 3"
    assert merged == [True]
    log = (tmp_path / "log.txt").read_text()
    assert all(word in log for word in ("begun", "said 0", "said 1", "said 2", "has 50"))
    child = int(re.search(r"begun (\d+)", log)[1])  # type: ignore[index]
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().split()[2] in "ZX", "it still runs"
    late = Runner(tmp_path, 1)
    late.run(Step("good", 60, [("true",)]))
    assert late.done[0]["state"] == "left out"


def test_what_would_run_is_listed() -> None:
    ran = called(HERE / "run.py", "--dry", "first")
    *listed, most, left = ran.stdout.splitlines()
    assert [line.split()[0] for line in listed] == [*GROUPS["first"]], ran.stderr
    assert int(re.search(r"at most (\d+) s", most)[1]) <= 440  # type: ignore[index]
    assert "tests" in left
    assert called(HERE / "run.py", "--dry").stdout.splitlines()[-2:] == [most, left]
    assert called(HERE / "run.py", "--dry", "nothing").returncode == 2


def test_the_tests_for_a_gpu_are_found() -> None:
    names = {path.name for path in run.with_gpu_tests()}
    assert {"test_forms.py", "test_decode_loop.py", "test_no_host_sync.py"} <= names
    assert "test_results.py" not in names


def test_it_runs_without_an_installation() -> None:
    """The finder of an editable installation is taken away first."""
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in str(f)]; "
        f"sys.path.insert(0, {str(HERE)!r}); import plain_tree; plain_tree.linked(); "
        "import minikv.cli.bench.networks, minikv.models.config; print(minikv.__file__)"
    )
    ran = called("-c", code)
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()) == ROOT / "minikv/__init__.py"


OPTIONAL = ("hypothesis", "transformers", "mistral_common", "pypdf", "pyte")


@pytest.mark.parametrize("gpu", some_by_day([True, False], bool))
def test_optional_packages_are_not_needed_on_a_gpu(tmp_path: Path, gpu: bool) -> None:
    """With -m gpu files are skipped whose packages are missing; without it they are an error."""
    without(tmp_path, OPTIONAL)
    files = ("tests/cache/test_int8.py", "tests/kernels/append/test_forms.py")
    options = ("-p", "no:hypothesispytest", "-n", "0", "--collect-only")
    mark = ("-m", "gpu") if gpu else ()
    env = {"PYTHONPATH": str(tmp_path), "GPU_TEST_SEED": "12"}
    ran = called("-m", "pytest", *options, *mark, *files, **env)
    assert (ran.returncode == 0) == gpu, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "test_forms.py" in ran.stdout
    assert "GPU_TEST_SEED=12 repeats them" in ran.stdout

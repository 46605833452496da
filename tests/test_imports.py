"""Who may import whom, read from the sources; no circles; what a light command must not load."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from processes import python
from tables import table

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {name: ROOT / name for name in ("minikv", "models", "kernels", "cli")}

# The assembly is the one place that knows both the core and the models.
EXCEPTIONS = {
    *(
        ("minikv/loader.py", f"minikv.models{name}")
        for name in ("", ".config", ".hub", ".identity", ".linear", ".llama", ".weights")
    ),
    ("minikv/__main__.py", "minikv.cli.__main__"),  # the command, by another name
}
THIRD_PARTY = {
    "kernels": {"torch", "triton"},
    "minikv": {"torch", "numpy"},
}


def area(module: str) -> str | None:
    """Which of the four packages a dotted name belongs to, or None for another project's."""
    parts = module.split(".")
    if parts[0] != "minikv":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ("models", "kernels", "cli") else "minikv"


def allowed(source: str, target: str) -> bool:
    to = area(target)
    if to == source:
        return True
    return {
        "kernels": False,
        "minikv": to == "kernels",
        "models": f"{target}.".startswith(
            ("minikv.kernels.", "minikv.cache.attend.", "minikv.pages.")
        ),
        "cli": to in ("minikv", "models"),
    }[source]


@cache
def statements(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The imports of a source: at its top, under TYPE_CHECKING or in a function."""
    nodes = ast.walk(ast.parse(text))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imports(text: str, modules: Collection[str]) -> Iterator[str]:
    """The modules that a source imports: `from a import b` counts as `a.b` where that is one of
    `modules`, else as `a`."""
    for node in statements(text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, "relative import"
            assert node.module
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in names)


@cache
def sources() -> dict[str, tuple[str, Path]]:
    """Every source by the dotted name under which it is imported: its package, and its file."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            top = "minikv" if package == "minikv" else f"minikv.{package}"
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((top, *(part for part in parts if part != "__init__")))
            found[name] = package, path
    return found


def violations(package: str, name: str, text: str) -> list[str]:
    """Every import in `text` that the rules forbid."""
    found = []
    for module in imports(text, sources()):
        top = module.split(".")[0]
        if top in ("models", "kernels", "cli"):
            found.append(f"{name}: bare {module}")
        elif top == "minikv":
            if not allowed(package, module) and (name, module) not in EXCEPTIONS:
                found.append(f"{name}: {package} may not import {module}")
        elif top == "transformers":
            found.append(f"{name}: transformers is for tests only")
        elif top not in sys.stdlib_module_names and top not in THIRD_PARTY.get(package, {top}):
            found.append(f"{name}: {package} may not import {module}")
    return found


def test_every_import_follows_the_rules() -> None:
    found: list[str] = []
    for package, path in sources().values():
        found += violations(package, path.relative_to(ROOT).as_posix(), path.read_text())
    assert found == []
    assert len(sources()) > 20
    with pytest.raises(AssertionError):
        list(imports("from . import arena", ()))


@table("""
    package | line
    models  | import minikv.errors
    models  | from minikv.cache.arena import Arena
    models  | from minikv import scheduler
    kernels | from minikv.policies.base import View
    kernels | import safetensors
    minikv  | from minikv.models import load
    minikv  | import minikv.cli.main
    minikv  | from minikv import models
    cli     | from minikv.kernels import dispatch
    cli     | import models
    models  | from transformers import AutoModel
    minikv  | def f():\\n    from minikv.models.config import ModelConfig
""")
def test_the_rules_catch_each_kind_of_breach(package: str, line: str) -> None:
    assert violations(package, "x.py", line)


def used(files: Mapping[str, str]) -> dict[str, set[str]]:
    """By name, which of these sources each of them imports."""
    return {name: ({*imports(text, files)} & {*files}) - {name} for name, text in files.items()}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of modules, the first one again at its end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = used({name: path.read_text() for name, (_, path) in sources().items()})
    assert circle(graph) == []
    assert "minikv.cache.kv_cache" in graph["minikv.engine.engine"]
    assert "minikv.chat.session" in graph["minikv"]  # under TYPE_CHECKING
    assert "minikv.loader" in graph["minikv"]  # in a function


@pytest.mark.parametrize(
    "line",
    [
        "import minikv.b",
        "from minikv import b",
        "from minikv.b import thing",
        "if TYPE_CHECKING:\n    from minikv.b import thing",
        "def f():\n    from minikv.b import thing",
    ],
)
def test_every_kind_of_import_can_close_a_circle(line: str) -> None:
    files = {"minikv.a": line, "minikv.b": "from minikv.c import x", "minikv.c": "import minikv.a"}
    assert set(circle(used(files))) == set(files)


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`, started away from the repository."""
    done = python("-c", f"{code}\nimport sys; print(*sorted(sys.modules))", folder=Path("/"))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("folder", ["models", "models/bundled"])
def test_every_data_file_of_models_is_package_data(folder: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = f"minikv.{folder.replace('/', '.')}"
    patterns = project["tool"]["setuptools"]["package-data"][package]
    inside = (ROOT / folder).rglob("*") if folder == "models" else (ROOT / folder).iterdir()
    files = [path for path in inside if path.is_file() and path.suffix not in (".py", ".pyc")]
    names = [path.relative_to(ROOT / folder).as_posix() for path in files]
    data = [name for name in names if not name.startswith("bundled/")]
    assert len(data) >= 7
    assert [n for n in data if not any(fnmatch(n, pattern) for pattern in patterns)] == []


_GO = (
    "import sys, contextlib, io\n"
    "from minikv.cli.main import run\n"
    "def go(*a):\n"
    "    sys.argv = ['minikv', *a]\n"
    "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
    "        run()\n"
)


def test_flags_are_imported_when_a_command_is_typed_and_torch_when_it_is_needed() -> None:
    for typed in ("", "ask"):
        loaded = loaded_after(f"{_GO}go(*'{typed} --help'.split())")
        imported = {"minikv.cli.arguments", "minikv.settings"} & loaded
        assert len(imported) == (2 if typed else 0)
        assert not loaded & {"minikv.cli.plan", "minikv.cli.chat.ask", "minikv.cli.eval.command"}
    light = [
        f"{one} --help" for one in "plan doctor models chats cache policies config ask".split()
    ]
    light += ["--help", "--version", "ask q --policy nonsense x", "chat no/such/file"]
    loaded = loaded_after(_GO + "; ".join(f"go(*{line.split()})" for line in light))
    assert {"minikv.cli.plan", "minikv.cli.documents.named"} <= loaded  # the commands did run
    assert not loaded & {"torch", "numpy", "transformers", "tokenizers", "huggingface_hub"}


def test_nothing_is_imported_under_a_bare_name() -> None:
    loaded = loaded_after(
        "import minikv.cli.main, minikv.cli.chat.command, minikv.chat.session, minikv.models, "
        "minikv.kernels"
    )
    assert not loaded & {"models", "kernels", "cli", "transformers"}
    assert "minikv.chat.session" in loaded


def test_python_in_a_clone_finds_all_of_it() -> None:
    """Also where minikv is installed, but not as a link to the clone."""
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]\n"
        "import minikv.kernels.dispatch, minikv.models, minikv.cli.main; print(minikv.__file__)"
    )
    done = python("-c", code, folder=ROOT)
    assert Path(done.stdout.strip()) == ROOT / "minikv/__init__.py", done.stderr

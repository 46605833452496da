"""Mistakes put into the sources one at a time: the tests must see each of them.

A mutant is a function with one small change: a comparison, a boundary, a sign, a condition, a
number, a statement that is left out. No file is written: for each mutant a child process compiles
the changed text where Python would read the file, and runs the tests that reach the line, those of
the source first, until one fails. `.ci/coverage` notes which tests reach a line, so it runs first.

    .ci/coverage
    python tests/support/mutating.py --count 300 --seed 1          # a sample of all mutants
    python tests/support/mutating.py --only minikv/cache/arena.py:120

The sample depends on the text of a line, so that edits elsewhere do not change it. equivalent.toml,
beside this file, gives a reason for each mutant that no test can see: they are counted apart.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from coverage import Coverage, CoverageData

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build/coverage"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
FILE = 1 << 30
"""Bytes that a file may have which a mutant writes: one filled the disk."""
SOURCES = (
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minikv/cache").glob("*.py")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minikv/policies").glob("*.py")),
    "minikv/loader.py",
    "models/config.py",
    "models/limits.py",
    "models/stream.py",
    "models/checkpoint.py",
    "models/weights.py",
    "cli/screen/terminal.py",
)
_OTHERS = (
    "Lt LtE GtE, LtE Lt Gt, Gt GtE LtE, GtE Gt Lt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is, "
    "In NotIn, NotIn In, Add Sub, Sub Add, Mult Div, Div Mult, FloorDiv Mult, Mod FloorDiv, "
    "Pow Mult, LShift RShift, RShift LShift, BitAnd BitOr, BitOr BitAnd, BitXor BitAnd, "
    "And Or, Or And"
)
OTHERS = {
    getattr(ast, one): [getattr(ast, other) for other in others]
    for one, *others in map(str.split, _OTHERS.split(", "))
}
"""Of an operator of Python, those that it becomes."""
_PLACES = ast.Attribute | ast.Subscript
_SKIPPED = ast.Assert | ast.Raise | ast.Import | ast.ImportFrom
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NO_CODE = ("annotation", "returns", "decorator_list", "bases", "args")
_PAIRS = "minimum maximum, amin amax, argmin argmax, zeros ones, zeros_like ones_like".split(", ")
_ATTRIBUTES = {
    **_NAMES,
    **{one: other for pair in _PAIRS for one, other in (pair.split(), pair.split()[::-1])},
    "cummax": "cummin",
    "mean": "sum",
}


@dataclass(frozen=True)
class Mutant:
    """A change of the line `text`, the `nth` of those that read alike in the file. `line` and
    `number`, in the order of `_changes`, say where it is as the file is now."""

    path: str
    text: str
    change: str
    nth: int = 0
    line: int = field(default=0, compare=False)
    number: int = field(default=0, compare=False)


# -- changes --------------------------------------------------------------------------------------


def mutants(path: str) -> list[Mutant]:
    """All of a file, but for lines with a `pragma: no cover`, and what belongs to them."""
    source = (ROOT / path).read_text()
    measured = Coverage(data_file=None, config_file=str(ROOT / "pyproject.toml"))
    lines, out = source.splitlines(), {*measured.analysis2(str(ROOT / path))[2]}
    alike: Counter[tuple[str, str]] = Counter()
    found = []
    for number, (line, change, _) in enumerate(_changes(ast.parse(source))):
        text = lines[line - 1].strip()
        if line not in out:
            found.append(Mutant(path, text, change, alike[text, change], line, number))
        alike[text, change] += 1
    return found


def mutated(mutant: Mutant) -> ast.Module:
    """The file with the change in it."""
    tree = ast.parse((ROOT / mutant.path).read_text())
    for number, (_, _, apply) in enumerate(_changes(tree)):
        if number == mutant.number:
            apply()
            return ast.fix_missing_locations(tree)
    raise IndexError(mutant)


Change = tuple[int, str, Callable[[], None]]


def _changes(tree: ast.Module) -> list[Change]:
    """Line, text and how to make it. Left out: what is not inside of a function, annotations,
    texts, what is raised, assertions, and `strict` of `zip`, which is one."""
    found: list[Change] = []

    def put(node: ast.AST, field: str, new: Any, at: int | None = None) -> None:
        line = node.lineno  # type: ignore[attr-defined]
        before = ast.unparse(node)
        changed = copy.deepcopy(node)
        _set(changed, field, new, at)
        ast.fix_missing_locations(changed)
        after = ast.unparse(changed)
        text = f"{_short(before)}  ->  {_short(after)}"
        found.append((line, text, lambda: _set(node, field, new, at)))

    def visit(node: ast.AST, inside: bool) -> None:
        if inside:
            change(node)
        for name, below in ast.iter_fields(node):
            if name in _NO_CODE and not isinstance(node, ast.Call):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":
                continue
            within = inside or (name == "body" and isinstance(node, ast.FunctionDef))
            for at, one in enumerate(below) if isinstance(below, list) else ((None, below),):
                if isinstance(one, ast.stmt):
                    text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
                    if text or isinstance(one, _SKIPPED):
                        continue
                    if within:
                        dropped(node, name, at, one)
                if isinstance(one, ast.AST):
                    visit(one, within)

    def change(node: ast.AST) -> None:
        if isinstance(node, ast.Compare):
            for at, one in enumerate(node.ops):
                for new in OTHERS[type(one)]:
                    put(node, "ops", new(), at)
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp):
            left = getattr(node, "left", None)
            if not (isinstance(left, ast.Constant) and isinstance(left.value, str)):
                for new in OTHERS.get(type(node.op), ()):
                    put(node, "op", new())
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.Compare):
                negated = ast.UnaryOp(ast.Not(), node.test)
                text = f"if {_short(ast.unparse(node.test))}  ->  if not"
                found.append((node.test.lineno, text, lambda: _set(node, "test", negated, None)))
        elif isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, bool):
                put(node, "value", not value)
            elif isinstance(value, int | float):
                put(node, "value", value + 1 if isinstance(value, int) else value * 2 or 1.0)
        elif isinstance(node, ast.Name) and node.id in _NAMES:
            put(node, "id", _NAMES[node.id])
        elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            put(node, "attr", _ATTRIBUTES[node.attr])
        elif isinstance(node, ast.keyword) and node.arg in ("min", "max"):
            other = _NAMES[node.arg]
            text = f"{_short(ast.unparse(node))}  ->  {other}="
            found.append((node.value.lineno, text, lambda: _set(node, "arg", other, None)))

    def dropped(parent: ast.AST, field: str, at: int, one: ast.stmt) -> None:
        call, places = isinstance(one, ast.Expr) and isinstance(one.value, ast.Call), _PLACES
        stored = isinstance(one, ast.Assign) and isinstance(one.targets[0], places)
        if call or stored or isinstance(one, ast.AugAssign):
            text = f"{_short(ast.unparse(one))}  ->  pass"
            found.append((one.lineno, text, lambda: _set(parent, field, ast.Pass(), at)))
        if isinstance(one, ast.Break | ast.Continue):
            other = ast.Continue() if isinstance(one, ast.Break) else ast.Break()
            found.append((one.lineno, "break <-> continue", lambda: _set(parent, field, other, at)))

    visit(tree, False)
    return found


def _set(node: ast.AST, field: str, new: Any, at: int | None) -> None:
    if at is None:
        setattr(node, field, new)
    else:
        getattr(node, field)[at] = new


def _short(text: str) -> str:
    return " ".join(text.split())[:90]


# -- tests ----------------------------------------------------------------------------------------


def reaching(path: str, line: int) -> list[str]:
    """Node ids of the tests that ran a line, those of the source first. Of a line that no test was
    seen on: those of the whole source."""
    data = CoverageData(str(PLACE / "data"))
    data.read()
    lines = data.contexts_by_lineno(str(ROOT / path))
    found = set(lines.get(line) or (one for some in lines.values() for one in some)) - {""}
    elsewhere = runpy.run_path(str(ROOT / "tests/test_layout.py"))["ELSEWHERE"]
    folder, _, name = path.removeprefix("minikv/").rpartition("/")
    own = f"tests/{elsewhere[path]}" if path in elsewhere else f"tests/{folder}/test_{name}"
    return sorted(found, key=lambda one: (one.partition("::")[0] != own, one))


_ENOUGH = 9  # pytest has no such exit code


class Limit:
    """A plugin of pytest: no test begins after so many seconds of processor time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.process_time() + seconds

    def pytest_runtest_setup(self) -> None:
        if time.process_time() > self._end:
            pytest.exit("enough", returncode=_ENOUGH)


def attempt(mutant: Mutant, seconds: float) -> str:
    """ "killed", "survived", "untested", "timeout" for a test that does not end in a minute of
    processor time, or "undecided" if not all tests ran within `seconds`."""
    names = reaching(mutant.path, mutant.line)
    if not names:
        return "untested"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            limit = int(seconds) + 60 + int(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))  # a size is a number, too
            _put_in(mutant)
            plain = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "--no-header"]
            code = int(pytest.main([*plain, *names], plugins=[Limit(seconds)]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status, end = None, time.monotonic() + 20 * (seconds + 60)
    while status is None and time.monotonic() < end:
        done, raw = os.waitpid(child, os.WNOHANG)
        status = raw if done else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return "timeout"
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) == signal.SIGXCPU else "killed"
    # 2 and 4: a file of tests could not be imported; 5: the tests that reach the line run at night.
    results = {0: "survived", 1: "killed", 2: "killed", 4: "killed", 5: "untested"}
    results[_ENOUGH] = "undecided"
    code = os.WEXITSTATUS(status)
    if code == 4:  # or a test is gone since `.ci/coverage` ran
        collect = [sys.executable, "-m", "pytest", "-q", "-n0", "--collect-only", *names]
        subprocess.run(collect, check=True, stdout=subprocess.DEVNULL)
    return results[code]


def _put_in(mutant: Mutant) -> None:
    """Whoever imports the file in this process gets it with the change."""
    whole, get_code = str(ROOT / mutant.path), SourceFileLoader.get_code

    def changed(loader: SourceFileLoader, name: str) -> CodeType | None:
        if loader.path != whole:
            return get_code(loader, name)
        return compile(mutated(mutant), whole, "exec")  # type: ignore[no-any-return]

    SourceFileLoader.get_code = changed  # type: ignore[method-assign]


# -- runs -----------------------------------------------------------------------------------------


def main() -> int:
    """A run by hand."""
    given = argparse.ArgumentParser(description="mistakes in the sources, one at a time")
    given.add_argument("--count", type=int, default=300)
    given.add_argument("--seed", type=int, default=1)
    given.add_argument("--only", metavar="FILE[:LINE]", help="every mutant of a file or a line")
    given.add_argument(
        "--seconds", type=float, default=20.0, help="of processor time for the tests of each mutant"
    )
    options = given.parse_args()
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(PLACE / "hypothesis")
    import torch  # noqa: F401  # so that no child has to

    every = [one for path in SOURCES for one in mutants(path)]
    equivalent = _equivalent(every)
    if options.only:
        path, _, line = options.only.partition(":")
        chosen = [one for one in mutants(path) if not line or one.line == int(line)]
    else:
        chosen = sorted(every, key=lambda one: _place(one, options.seed))[: options.count]
    print(f"{len(chosen):,} of {len(every):,} mutants, seed {options.seed}", flush=True)
    counts: Counter[str] = Counter()
    for mutant in chosen:
        result = attempt(mutant, options.seconds)
        if mutant in equivalent:
            result = "equivalent" if result == "survived" else f"{result}, but in equivalent.toml"
        counts[result] += 1
        print(f"{result:<10} {mutant.path}:{mutant.line}  {mutant.change}", flush=True)
    print(dict(counts))
    return 0


def _place(one: Mutant, seed: int) -> bytes:
    """Its place in the order of a seed. Where the sources change, the others stay in this order."""
    words = (seed, one.path, one.text, one.change, one.nth)
    return hashlib.sha256(json.dumps(words).encode()).digest()


def _equivalent(every: Iterable[Mutant]) -> set[Mutant]:
    """Those that no test can see. Raises KeyError for one that is not there any more."""
    found = set()
    for path, reasons in tomllib.loads(EQUIVALENT.read_text()).items():
        for key in reasons:
            text, change = key.split(" :: ")
            change, _, nth = change.partition(" #")
            found.add(Mutant(path, text, change, int(nth or 0)))
    for one in found - set(every):
        raise KeyError(f"{EQUIVALENT.name}: no such mutant: {one}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())

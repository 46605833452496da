"""Mistakes put into the sources one at a time: the tests must see each of them.

A mutant is a function with one small change: a comparison, a boundary, a sign, a condition, a
number, a statement that is left out. No file is written. One process imports everything and
collects the tests. For each mutant it forks, the child puts the changed code into the function and
runs the tests that reach the line, its own first, until one fails. The tests of a line are
those that `.ci/coverage` saw there, so that runs first.

    .ci/coverage
    python tests/support/mutating.py --count 300 --seed 1          # a sample of all mutants
    python tests/support/mutating.py --only minikv/cache/arena.py:120

Results go to build/coverage/mutants.jsonl, a line each, as soon as there is one. What is there
already is not run again. A mutant is known by its text, so that edits elsewhere change neither the
sample nor what is known. Those that no test can see have a reason in equivalent.toml, beside this
file: they are counted apart.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import inspect
import json
import os
import resource
import runpy
import signal
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build/coverage"
RESULTS = PLACE / "mutants.jsonl"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
FILE = 1 << 30
"""Bytes that a file may have which a mutant writes: one filled the disk."""
SOURCES = (
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minikv/cache").glob("*.py")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minikv/policies").glob("*.py")),
    "minikv/loader.py",
    "models/config.py",
    "models/limits.py",
    "models/packed_files.py",
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
    """All of a file, but for lines that no test has to reach."""
    source = (ROOT / path).read_text()
    lines, out = source.splitlines(), _not_covered(path)
    alike: Counter[tuple[str, str]] = Counter()
    found = []
    for number, (line, change, _) in enumerate(_changes(ast.parse(source))):
        text = lines[line - 1].strip()
        if line not in out:
            found.append(Mutant(path, text, change, alike[text, change], line, number))
        alike[text, change] += 1
    return found


def _not_covered(path: str) -> set[int]:
    """Lines with a `pragma: no cover`, and what belongs to them."""
    from coverage import Coverage

    measured = Coverage(data_file=None, config_file=str(ROOT / "pyproject.toml"))
    return set(measured.analysis2(str(ROOT / path))[2])


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
            if isinstance(below, list):
                for at, one in enumerate(below):
                    if isinstance(one, ast.stmt):
                        if _skipped(one):
                            continue
                        if within:
                            dropped(node, name, at, one)
                    if isinstance(one, ast.AST):
                        visit(one, within)
            elif isinstance(below, ast.AST):
                visit(below, within)

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
        call = isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)
        stored = isinstance(one, ast.Assign) and isinstance(
            one.targets[0], ast.Attribute | ast.Subscript
        )
        if call or stored or isinstance(one, ast.AugAssign):
            text = f"{_short(ast.unparse(one))}  ->  pass"
            found.append((one.lineno, text, lambda: _set(parent, field, ast.Pass(), at)))
        if isinstance(one, ast.Break | ast.Continue):
            other = ast.Continue() if isinstance(one, ast.Break) else ast.Break()
            found.append((one.lineno, "break <-> continue", lambda: _set(parent, field, other, at)))

    visit(tree, False)
    return found


def _skipped(one: ast.stmt) -> bool:
    if isinstance(one, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom):
        return True
    return isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)


def _set(node: ast.AST, field: str, new: Any, at: int | None) -> None:
    if at is None:
        setattr(node, field, new)
    else:
        getattr(node, field)[at] = new


def _short(text: str) -> str:
    return " ".join(text.split())[:90]


# -- tests ----------------------------------------------------------------------------------------


class Reach:
    """Which test functions run a line, and how long they take, as `.ci/coverage` saw it."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(PLACE / "data"))
        self._data.read()
        self._seconds: dict[str, float] = defaultdict(float)
        for case in ElementTree.parse(PLACE / "tests.xml").iter("testcase"):
            if case.find("skipped") is not None:  # it may be a whole file, which has no such name
                continue
            name = _node(case.attrib["classname"], case.attrib["name"].partition("[")[0])
            self._seconds[name] += float(case.attrib["time"])
        self._lines: dict[str, dict[int, list[str]]] = {}

    def tests(self, path: str, line: int) -> list[str]:
        """Node ids: those of the source's own tests, then one of every file in turn, always the
        fastest first. Of a line that no test was seen on: those of the source."""
        if path not in self._lines:
            self._lines[path] = self._data.contexts_by_lineno(str(ROOT / path))
        lines = self._lines[path]
        found = {one for one in lines.get(line, ()) if one in self._seconds}
        if not found:
            found = {one for some in lines.values() for one in some if one in self._seconds}
        by_file: dict[str, list[str]] = defaultdict(list)
        for one in sorted(found, key=lambda one: (self._seconds[one], one)):
            by_file[one.partition("::")[0]].append(one)
        own = by_file.pop(_own_tests(path), [])
        turns = zip_longest(*by_file.values())
        return own + [one for turn in turns for one in turn if one is not None]


@functools.cache
def _elsewhere() -> dict[str, str]:
    """Sources whose tests are in another file, and which."""
    found = runpy.run_path(str(ROOT / "tests/test_layout.py"))["ELSEWHERE"]
    assert isinstance(found, dict)
    return found


def _own_tests(path: str) -> str:
    """minikv/cache/arena.py -> tests/cache/test_arena.py"""
    if path in _elsewhere():
        return f"tests/{_elsewhere()[path]}"
    folder, _, name = path.removeprefix("minikv/").rpartition("/")
    return os.path.join("tests", folder, f"test_{name}")


def _node(module: str, name: str) -> str:
    """tests.cache.test_arena and test_x -> tests/cache/test_arena.py::test_x"""
    words = module.split(".")
    file = next(n for n, word in enumerate(words) if word.startswith("test_")) + 1
    return "::".join(["/".join(words[:file]) + ".py", *words[file:], name])


# -- runs -----------------------------------------------------------------------------------------


def _module(path: str) -> str:
    words = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(words if words[0] == "minikv" else ["minikv", *words])


Functions = dict[tuple[str, str, int], list[FunctionType]]
"""By file, name and line."""


def _functions() -> Functions:
    """All that the sources have."""
    for path in SOURCES:  # some are imported when they are first used
        importlib.import_module(_module(path))
    gc.unfreeze()  # tests/conftest.py froze what was collected, and the collector lists none of it
    found: Functions = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is FunctionType:  # isinstance asks lazy modules, which warn
            code = one.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(one)
    assert {str(ROOT / path) for path in SOURCES} & {path for path, *_ in found}
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Of the functions of a module and of its classes, not of those inside of functions."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            if one.co_flags & inspect.CO_OPTIMIZED:
                yield one
            else:
                yield from _codes(one)


def _forget(path: str) -> None:
    """What functions of a source remember (`functools.cache`) was computed without the change."""
    gc.unfreeze()
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper:
            code = getattr(one.__wrapped__, "__code__", None)
            if code is not None and code.co_filename == path:
                one.cache_clear()


class Attempts:
    """A plugin of pytest that runs the collected tests of each mutant in a child of its own."""

    def __init__(self, plan: Sequence[tuple[Mutant, list[str]]], seconds: float) -> None:
        """plan: of each mutant its tests, none of which is begun after so many seconds of processor
        time."""
        self._plan, self._seconds = plan, seconds
        self._child = False
        self._log = PLACE / "mutant.log"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        cases: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            cases[item.nodeid.partition("[")[0]].append(item)
        functions = _functions()
        gc.freeze()
        with RESULTS.open("a") as file:
            for mutant, names in self._plan:
                items = [item for name in names for item in cases.get(name, ())]
                result, by = "untested", ""
                if items:
                    result, by = self._attempt(mutant, items, functions)
                file.write(json.dumps({**asdict(mutant), "result": result, "by": by}) + "\n")
                file.flush()
                where = f"{mutant.path}:{mutant.line}"
                os.write(2, f"{result:<9} {where}  {mutant.change}\n".encode())
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._child and report.failed:
            self._log.write_text(report.nodeid)
            os._exit(1)

    def _attempt(
        self, mutant: Mutant, items: Sequence[pytest.Item], functions: Functions
    ) -> tuple[str, str]:
        """ "killed", "timeout" or "survived", and by what. A timeout is a test that does not end in
        a minute of processor time."""
        seconds = int(self._seconds) + 60
        self._log.write_text("")
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                self._child = True
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
                resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))  # a size is a number, too
                self._run(mutant, items, functions)
                code = 0
            except BaseException:
                self._log.write_text(traceback.format_exc())
            finally:
                os._exit(code)
        end = time.monotonic() + 20 * seconds
        status = None
        while status is None and time.monotonic() < end:
            done, raw = os.waitpid(child, os.WNOHANG)
            status = raw if done else None
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
            return "timeout", ""
        said = self._log.read_text(errors="replace")
        if os.WIFSIGNALED(status):
            late = os.WTERMSIG(status) == signal.SIGXCPU
            return ("timeout", "") if late else ("killed", "a signal")
        code = os.WEXITSTATUS(status)
        if code == 70:
            raise RuntimeError(f"{mutant}: {said[-2000:]}")
        if code == 71:
            return "untested", "the function is not there"
        return ("survived", "") if code == 0 else ("killed", said)

    def _run(self, mutant: Mutant, items: Sequence[pytest.Item], functions: Functions) -> None:
        path = str(ROOT / mutant.path)
        changed = 0
        for code in _codes(compile(mutated(mutant), path, "exec")):
            for function in functions.get((path, code.co_qualname, code.co_firstlineno), ()):
                if function.__code__ != code:
                    function.__code__ = code
                    changed += 1
        if not changed:  # as the default of a field of a class, which is set when it is imported
            os._exit(71)
        _forget(path)
        for item, following in zip(items, [*items[1:], None], strict=True):
            if time.process_time() > self._seconds:
                break
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)


def _sample(every: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of all, in an order that the seed gives; more of them begin with the same. Where the
    sources change, the others stay in this order."""

    def place(one: Mutant) -> bytes:
        words = (seed, one.path, one.text, one.change, one.nth)
        return hashlib.sha256(json.dumps(words).encode()).digest()

    print(f"{len(every):,} mutants, {min(count, len(every)):,} of them, seed {seed}", flush=True)
    return sorted(every, key=place)[:count]


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
    every = [one for path in SOURCES for one in mutants(path)]
    known, equivalent = _known(), _equivalent(every)
    if options.only:
        path, _, line = options.only.partition(":")
        found = [one for one in every if one.path == path]
        chosen = todo = [one for one in found if not line or one.line == int(line)]
    else:
        chosen = _sample(every, options.count, options.seed)
        todo = [one for one in chosen if one not in known]
    reach = Reach()
    plan = [(one, reach.tests(one.path, one.line)) for one in todo]
    files = sorted({name.partition("::")[0] for _, names in plan for name in names})
    if files:
        plain = ["-q", "-n0", "-p", "no:cacheprovider", "--no-header", *files]
        pytest.main(plain, plugins=[Attempts(plan, options.seconds)])
    known = _known()
    _summary([(one, known[one]) for one in chosen if one in known], equivalent)
    return 0


def _known() -> dict[Mutant, str]:
    """The last result of each mutant that was run."""
    rows = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    return {Mutant(*(row[name] for name in _NAME)): row["result"] for row in rows}


_NAME = ("path", "text", "change", "nth")


def _equivalent(every: Sequence[Mutant]) -> dict[Mutant, str]:
    """Those that no test can see, and why. Raises KeyError for one that is not there any more."""
    found = {}
    for path, reasons in tomllib.loads(EQUIVALENT.read_text()).items():
        for key, why in reasons.items():
            text, change = key.split(" :: ")
            change, _, nth = change.partition(" #")
            found[Mutant(path, text, change, int(nth or 0))] = why
    for one in found.keys() - set(every):
        raise KeyError(f"{EQUIVALENT.name}: no such mutant: {one}")
    return found


def _summary(results: Sequence[tuple[Mutant, str]], equivalent: dict[Mutant, str]) -> None:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, result in results:
        if mutant in equivalent and result == "survived":
            result = "equivalent"
        elif mutant in equivalent or result == "survived":
            said = "in equivalent.toml, but" if mutant in equivalent else ""
            print(f"{result} {said} {mutant.path}:{mutant.line}  {mutant.change}")
        for name in (os.path.dirname(mutant.path), "all"):
            found[name][result] += 1
    for name, counts in sorted(found.items()):
        total, dead = counts.total(), counts["killed"] + counts["timeout"]
        others = total - counts["equivalent"]
        print(
            f"{name:<18} {total:>5} mutants, {dead:>5} killed ({dead / total:.1%}; "
            f"{dead / max(1, others):.1%} without the equivalent ones), {dict(counts)}"
        )


if __name__ == "__main__":
    raise SystemExit(main())

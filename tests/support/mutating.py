"""Mistakes put into the sources one at a time: the tests must see each of them.

A mutant is a function with one small change: a comparison, a boundary, a sign, a condition, a
number, a statement that is left out. No file is written. One process imports everything and
collects the tests. For each mutant it forks, the child puts the changed code into the function and
runs the tests that reach the line, the fastest first, until one fails. The tests of a line are
those that `.ci/coverage` saw there, so that runs first.

    .ci/coverage
    python tests/support/mutating.py --count 300 --seed 1          # a sample of all mutants
    python tests/support/mutating.py --again survived              # those of the file once more
    python tests/support/mutating.py --only minikv/cache/arena.py:120

Results go to build/coverage/mutants.jsonl, a line each, as soon as there is one. What is there
already is not run again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import inspect
import json
import os
import random
import resource
import signal
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build/coverage"
RESULTS = PLACE / "mutants.jsonl"
FILE = 1 << 30
"""Bytes that a file may have which a mutant writes: one filled the disk."""
SOURCES = (
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minikv/cache").glob("*.py")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minikv/policies").glob("*.py")),
    "minikv/loader.py",
    "models/config.py",
    "models/digests.py",
    "models/limits.py",
    "models/packed_files.py",
    "models/stream.py",
    "models/weights.py",
    "cli/terminal.py",
)
_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NO_CODE = ("annotation", "returns", "decorator_list", "bases", "args")
_ATTRIBUTES = {
    **_NAMES,
    "minimum": "maximum",
    "maximum": "minimum",
    "amin": "amax",
    "amax": "amin",
    "argmin": "argmax",
    "argmax": "argmin",
    "zeros": "ones",
    "ones": "zeros",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "cummax": "cummin",
    "mean": "sum",
}


@dataclass(frozen=True)
class Mutant:
    """The `number`-th change of a file, in the order of `mutants`."""

    path: str
    line: int
    number: int
    change: str


# -- changes --------------------------------------------------------------------------------------


def mutants(path: str) -> list[Mutant]:
    """All of a file, but for lines that no test has to reach."""
    text = (ROOT / path).read_text()
    out = _not_covered(path)
    every = enumerate(_changes(ast.parse(text)))
    return [Mutant(path, line, n, said) for n, (line, said, _) in every if line not in out]


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
    texts, what is raised, assertions."""
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
                for new in _COMPARE[type(one)]:
                    put(node, "ops", new(), at)
        elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            if not (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)):
                put(node, "op", _BINARY[type(node.op)]())
        elif isinstance(node, ast.AugAssign) and type(node.op) in _BINARY:
            put(node, "op", _BINARY[type(node.op)]())
        elif isinstance(node, ast.BoolOp):
            put(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.Compare):
                negated = ast.UnaryOp(ast.Not(), node.test)
                text = f"if {_short(ast.unparse(node.test))}  ->  if not"
                found.append((node.test.lineno, text, lambda: _set(node, "test", negated, None)))
        elif isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, bool):
                put(node, "value", not value)
            elif isinstance(value, int):
                put(node, "value", value + 1)
            elif isinstance(value, float):
                put(node, "value", value * 2 if value else 1.0)
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
            name = _node(case.attrib["classname"], case.attrib["name"].partition("[")[0])
            self._seconds[name] += float(case.attrib["time"])
        self._lines: dict[str, dict[int, list[str]]] = {}

    def tests(self, path: str, line: int) -> list[str]:
        """Node ids, the fastest first. Of a line that no test was seen on: those of the file."""
        if path not in self._lines:
            self._lines[path] = self._data.contexts_by_lineno(str(ROOT / path))
        lines = self._lines[path]
        found = {one for one in lines.get(line, ()) if one in self._seconds}
        if not found:
            found = {one for some in lines.values() for one in some if one in self._seconds}
        return sorted(found, key=lambda one: (self._seconds[one], one))


def _node(module: str, name: str) -> str:
    """tests.cache.test_arena and test_x -> tests/cache/test_arena.py::test_x"""
    words = module.split(".")
    file = next(n for n, word in enumerate(words) if word.startswith("test_")) + 1
    return "::".join(["/".join(words[:file]) + ".py", *words[file:], name])


# -- runs -----------------------------------------------------------------------------------------


def _module(path: str) -> str:
    words = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(words if words[0] == "minikv" else ["minikv", *words])


def _functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    """All that the sources have, by file, name and line."""
    for path in SOURCES:  # some are imported when they are first used
        importlib.import_module(_module(path))
    found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is FunctionType:  # isinstance asks lazy modules, which warn
            code = one.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(one)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Of the functions of a module and of its classes, not of those inside of functions."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            if one.co_flags & inspect.CO_OPTIMIZED:
                yield one
            else:
                yield from _codes(one)


class Attempts:
    """A plugin of pytest that runs the collected tests of each mutant in a child of its own."""

    def __init__(
        self, plan: Sequence[tuple[Mutant, list[str]]], seconds: float, minutes: float
    ) -> None:
        """plan: of each mutant its tests. Of those none is begun after so many seconds of processor
        time, and no mutant after so many minutes."""
        self._plan, self._seconds = plan, seconds
        self._end = time.monotonic() + 60 * minutes
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
                if time.monotonic() > self._end:
                    break
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
        self,
        mutant: Mutant,
        items: Sequence[pytest.Item],
        functions: dict[tuple[str, str, int], list[FunctionType]],
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

    def _run(
        self,
        mutant: Mutant,
        items: Sequence[pytest.Item],
        functions: dict[tuple[str, str, int], list[FunctionType]],
    ) -> None:
        path = str(ROOT / mutant.path)
        changed = 0
        for code in _codes(compile(mutated(mutant), path, "exec")):
            for function in functions.get((path, code.co_qualname, code.co_firstlineno), ()):
                if function.__code__ != code:
                    function.__code__ = code
                    changed += 1
        if not changed:  # as the default of a field of a class, which is set when it is imported
            os._exit(71)
        for item, following in zip(items, [*items[1:], None], strict=True):
            if time.process_time() > self._seconds:
                break
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)


def _sample(count: int, seed: int) -> Iterator[Mutant]:
    """So many of all, in an order that the seed gives; more of them begin with the same."""
    every = [one for path in SOURCES for one in mutants(path)]
    random.Random(seed).shuffle(every)
    print(f"{len(every):,} mutants, {min(count, len(every)):,} of them, seed {seed}", flush=True)
    yield from every[:count]


def main() -> int:
    """A run by hand."""
    given = argparse.ArgumentParser(description="mistakes in the sources, one at a time")
    given.add_argument("--count", type=int, default=300)
    given.add_argument("--seed", type=int, default=1)
    given.add_argument("--again", metavar="RESULT", help="those of the file with this result")
    given.add_argument("--only", metavar="FILE[:LINE]", help="every mutant of a file or a line")
    given.add_argument(
        "--seconds", type=float, default=20.0, help="of processor time for the tests of each mutant"
    )
    given.add_argument("--minutes", type=float, default=1e6, help="begin none after so many")
    options = given.parse_args()
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(PLACE / "hypothesis")
    known = _known()
    if options.again:
        chosen = todo = [one for one, result in known.items() if result == options.again]
    elif options.only:
        path, _, line = options.only.partition(":")
        chosen = todo = [one for one in mutants(path) if not line or one.line == int(line)]
    else:
        chosen = list(_sample(options.count, options.seed))
        todo = [one for one in chosen if one not in known]
    reach = Reach()
    plan = [(one, reach.tests(one.path, one.line)) for one in todo]
    files = sorted({name.partition("::")[0] for _, names in plan for name in names})
    if files:
        plain = ["-q", "-n0", "-p", "no:cacheprovider", "--no-header", *files]
        pytest.main(plain, plugins=[Attempts(plan, options.seconds, options.minutes)])
    known = _known()
    _summary([(one, known[one]) for one in chosen if one in known])
    return 0


def _known() -> dict[Mutant, str]:
    """The last result of each mutant that was run."""
    rows = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    return {_of(row): row["result"] for row in rows}


def _of(row: dict[str, Any]) -> Mutant:
    return Mutant(row["path"], row["line"], row["number"], row["change"])


def _summary(results: Sequence[tuple[Mutant, str]]) -> None:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, result in results:
        for name in (os.path.dirname(mutant.path), "all"):
            found[name][result] += 1
    for name, counts in sorted(found.items()):
        total, dead = counts.total(), counts["killed"] + counts["timeout"]
        print(
            f"{name:<18} {total:>5} mutants, {dead:>5} killed ({dead / total:.1%}), {dict(counts)}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Renders the chat template of a model, which is a program by a stranger, within limits.

Jinja's immutable sandbox keeps a template away from Python's internals. It does not stop a nested
loop of 99,999 x 99,999 turns or a string of 4 GB. So every loop turn, call, filter and operator
here passes a meter, which checks the time since the start and the size of the value. Filters and
string methods are allowed by name: those whose cost is known.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from minikv.models.errors import CorruptModel

SOURCE_LIMIT = 256 << 10
"""Bytes of a template's source."""
PARTS_LIMIT = 20_000
"""Nodes of a template's syntax tree; the longest published ones have about 5,000."""
SECONDS = 2.0
"""Time for one rendering."""
NUMBER_BITS = 4096
"""Size of the largest integer that a template may compute."""
MAX_RANGE = 100_000
"""Numbers in a range, as in Jinja's own sandbox."""
_CHARACTERS = 4 << 20  # that a rendering may write, and a value may have, beside 8 times the data

_FILTERS = frozenset(
    """
    abs capitalize count d default dictsort first float groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse safe select selectattr sort
    string sum title tojson trim unique upper
    """.split()
)
_TEXT_METHODS = frozenset(
    """
    capitalize casefold count endswith find format index isalnum isalpha isdecimal isdigit
    islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix
    removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip
    swapcase title upper
    """.split()
)
_DATE = re.compile(r"(?:%[-#]?[A-Za-z%]|[^%]){0,100}")
# Replacement fields without fields inside them, and numbers that would be a large width.
_FORMAT = re.compile(r"(?:[^{}]|\{\{|\}\}|\{[^{}]*\})*")
_WIDE = re.compile(r"\d{4}")


class TemplateRefusal(Exception):
    """The template called `raise_exception`: it does not accept this conversation."""


class _TooMuch(Exception):
    """The template went over a limit."""


class _Meter:
    """What is left of one rendering's limits."""

    def __init__(self, characters: int, seconds: float) -> None:
        self.limit = characters
        self._written = 0
        self._deadline = time.monotonic() + seconds

    def tick(self) -> None:
        """Check the time."""
        if time.monotonic() > self._deadline:
            raise _TooMuch(f"it ran for more than {SECONDS:g} seconds")

    def wrote(self, characters: int) -> None:
        """Count output."""
        self.tick()
        self._written += characters
        if self._written > self.limit:
            raise _TooMuch(f"it wrote more than {self.limit} characters")

    def room(self, size: int) -> None:
        """Check the size of a value that is about to be made."""
        self.tick()
        if size > self.limit:
            raise _TooMuch(f"it made a value of more than {self.limit} characters")

    def check(self, value: Any) -> Any:
        """The value, if it is small enough when written out; lists count with their items."""
        self.room(self._weight(value, {}))
        return value

    def _weight(self, value: Any, known: dict[int, int]) -> int:
        # A list of 30 nested pairs is small in memory, but has 2**30 items when it is compared or
        # printed. So a part counts as often as it is reached; it is visited once.
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return 1 if value.bit_length() <= NUMBER_BITS else self.limit + 1
        if not isinstance(value, (list, tuple, dict, set, frozenset)):
            return 1
        if id(value) in known:
            return known[id(value)]
        self.tick()
        known[id(value)] = self.limit  # without a namespace no value can contain itself
        parts: Iterable[Any] = value
        if isinstance(value, dict):
            parts = [*value.keys(), *value.values()]
        weight = 2
        for part in parts:
            weight += self._weight(part, known) + 2
            if weight > self.limit:
                break
        known[id(value)] = weight
        return weight


class _Namespace(Namespace):
    """`namespace()` without underscore names, and without printing what it holds."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012  (declared by Jinja as a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Metered(NodeTransformer):
    """Adds the meter where Jinja has no hook: loop turns, text outside of tags, `~`, literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick"), lineno=node.lineno))
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return _call("same", nodes.Const(node.data))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("tilde", *node.nodes)

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        assigned = isinstance(node, nodes.Tuple) and node.ctx != "load"  # {% set a, b = ... %}
        return node if assigned else _call("same", node)

    visit_Dict = visit_Tuple = visit_List


def _call(method: str, *arguments: nodes.Expr) -> nodes.Expr:
    # As an attribute of the environment: a template cannot give that another meaning.
    target = nodes.EnvironmentAttribute(method)
    return nodes.Call(target, list(arguments), [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed while compiling
            extensions=[_Generation, loopcontrols],
            finalize=_finalize,
        )
        self.meter = _Meter(_CHARACTERS, SECONDS)
        own: dict[str, Callable[..., Any]] = {
            "indent": self.indent_filter,
            "join": self.join_filter,
            "replace": self.replace_filter,
            "safe": self.to_text,
            "string": self.to_text,
            "sum": self.sum_filter,
            "tojson": self.json_filter,
        }
        known: dict[str, Callable[..., Any]] = {**self.filters, **own}
        self.filters = {name: self._metered(known[name]) for name in _FILTERS}
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: self._metered(test) for name, test in tests.items()}
        self.globals = {
            "dict": _dict,
            "namespace": _namespace,
            "raise_exception": _refuse,
            "range": self.range,
            "strftime_now": _date,
        }

    # Called by the code that `_Metered` adds.

    def tick(self) -> None:
        """One turn of a loop."""
        self.meter.tick()

    def same(self, value: Any) -> Any:
        """A literal or text: `call` checks its size, as of every value that a call returns."""
        return value

    def tilde(self, *values: Any) -> str:
        """The operator `~`."""
        return self._joined("", [self.to_text(value) for value in values])

    # Called by Jinja's sandbox.

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.meter.tick()
        return self.meter.check(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators in `intercepted_binops`: the result can be much larger than its parts."""
        sizes = [len(x) for x in (left, right) if isinstance(x, (str, list, tuple))]
        numbers = [x for x in (left, right) if isinstance(x, int)]
        size = sum(sizes)
        if operator == "%" and isinstance(left, str):
            raise _TooMuch("it formats text with %, which has no limit on its size")
        if operator == "*" and sizes and numbers:
            size *= max(0, numbers[0])
        elif operator == "**" and len(numbers) == 2:
            size = left.bit_length() * abs(right) * (self.meter.limit // NUMBER_BITS)
        self.meter.room(size)
        return self.meter.check(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _TEXT_METHODS:
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        # Jinja asks this for every attribute that is read. So the methods of text whose result can
        # be much larger than the text are replaced here by ones with a limit.
        text = getattr(value, "__self__", None)
        if not isinstance(text, str):
            return None
        own: str = text
        match getattr(value, "__name__", ""):
            case "join":
                return lambda parts: self._joined(own, parts)
            case "replace":
                return lambda old, new, count=-1: self._replaced(own, old, new, count)
            case "format":
                original = super().wrap_str_format(value)
                return lambda *args, **kwargs: self._formatted(own, original, args, kwargs)
        return None

    # Filters, functions and methods of text, with limits.

    def to_text(self, value: Any) -> str:
        """What `{{ value }}` writes."""
        if isinstance(value, (str, Undefined)):
            return str(value)
        if value is None or isinstance(value, (int, float, list, tuple, dict)):
            return str(self.meter.check(value))
        return f"<{type(value).__name__}>"

    def _joined(self, separator: str, parts: Iterable[Any]) -> str:
        texts: list[str] = []
        size = 0
        for part in parts:
            texts.append(part)
            size += len(part) + len(separator)
            self.meter.room(size)
        return separator.join(texts)

    def _replaced(self, text: str, old: str, new: str, count: int = -1) -> str:
        times = text.count(old)
        times = min(times, count) if count >= 0 else times
        self.meter.room(len(text) + times * max(0, len(new) - len(old)))
        return text.replace(old, new, count)

    def _formatted(
        self,
        text: str,
        original: Callable[..., str] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str:
        if original is None or not _FORMAT.fullmatch(text) or _WIDE.search(text):
            raise _TooMuch("it formats text with a width that has no limit")
        largest = max((len(self.to_text(value)) for value in [*args, *kwargs.values()]), default=0)
        self.meter.room(len(text) + text.count("{") * (largest + 1000))
        return original(*args, **kwargs)

    def range(self, *args: int) -> range:
        """`range` of at most 100,000 numbers."""
        numbers = range(*args)
        if len(numbers) > MAX_RANGE:
            raise _TooMuch(f"it made a range of more than {MAX_RANGE} numbers")
        return numbers

    def join_filter(self, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        return self._joined(self.to_text(d), map(self.to_text, value))

    def replace_filter(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        return self._replaced(
            self.to_text(s), self.to_text(old), self.to_text(new), -1 if count is None else count
        )

    def indent_filter(
        self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text = self.to_text(s)
        wide = len(width) if isinstance(width, str) else width
        self.meter.room(len(text) + (text.count("\n") + 1) * wide)
        return do_indent(text, width, first, blank)

    def sum_filter(self, iterable: Iterable[Any], attribute: Any = None, start: float = 0) -> Any:
        values = list(map(make_attrgetter(self, attribute), iterable) if attribute else iterable)
        if not all(isinstance(value, (int, float)) for value in values):
            raise TypeError("sum is for numbers")
        return sum(values, start)

    def json_filter(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if (len(indent) if isinstance(indent, str) else indent or 0) > 16:
            raise _TooMuch("it indents JSON by more than 16 characters")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._joined("", encoder.iterencode(value))

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            return self.meter.check(function(*args, **kwargs))

        # Jinja reads here whether the function takes the context or the environment first.
        if (first := getattr(function, "jinja_pass_arg", None)) is not None:
            vars(metered)["jinja_pass_arg"] = first
        return metered


class Program:
    """A compiled template. `name` says where it came from, for messages."""

    def __init__(self, source: str, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._environment = environment = _Environment()
        if len(source.encode("utf-8", "replace")) > SOURCE_LIMIT:
            raise CorruptModel(f"{name} is larger than {SOURCE_LIMIT >> 10} KiB")
        with self._errors():
            tree = environment.parse(source)
            if (
                _count(tree) > PARTS_LIMIT
            ):  # to compile them takes seconds, which no time limit stops
                raise _TooMuch(f"it has more than {PARTS_LIMIT} parts")
            tree = _Metered().visit(tree)
            code = environment.compile(tree)
            self._template = environment.template_class.from_code(
                environment, code, environment.make_globals(None)
            )

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for plain data (strings, numbers, lists, dicts).

        Raises TemplateRefusal if the template calls `raise_exception`, CorruptModel if it fails or
        goes over a limit: SECONDS of time, 4 Mi characters plus 8 times those of the data.
        """
        with self._lock, self._errors():
            meter = self._environment.meter = _Meter(_CHARACTERS, SECONDS)
            meter.limit += 8 * _size(variables)
            return "".join(self._template.generate(variables))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TemplateRefusal:
            raise
        except TemplateSyntaxError as error:
            raise CorruptModel(
                f"{self._name}, line {error.lineno}: {error.message}",
                "minikv runs chat templates with a limited set of Jinja's filters",
            ) from error
        except _TooMuch as error:
            raise CorruptModel(f"{self._name} was stopped: {error}") from error
        except Exception as error:
            detail = " ".join(str(error).split())[:200]
            raise CorruptModel(f"{self._name} failed: {type(error).__name__}: {detail}") from error


@pass_context
def _finalize(context: Context, value: Any) -> str:
    # It takes the context so that Jinja does not compute it while compiling.
    environment = context.environment
    assert isinstance(environment, _Environment)
    text = environment.to_text(value)
    environment.meter.wrote(len(text))
    return text


def _count(tree: nodes.Node) -> int:
    found, waiting = 0, [tree]
    while waiting:
        found += 1
        waiting += waiting.pop().iter_child_nodes()
    return found


def _refuse(message: object = "") -> None:
    raise TemplateRefusal(str(message))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    values = dict(*args, **kwargs)
    for name in values:
        _check_name(name)
    return _Namespace(values)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"{name!r} is not a name for a template's namespace")


def _date(format: str) -> str:
    if not _DATE.fullmatch(format):
        raise _TooMuch("it asks for a date format with widths")
    return datetime.now().strftime(format)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0

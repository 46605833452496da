"""Renders chat templates, which are untrusted programs, in a separate process.

`minikv.models.rendering` starts this file and communicates with it through pipes. Jinja's immutable
sandbox limits what a template can access. The operating system ends this process after some seconds
of processor time, and limits its memory.

A request is one line of JSON with the source and the data. The reply is one line of JSON, then the
number of bytes of text given in that line. The end of the input ends the process.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MEMORY = 384 << 20  # bytes of address space, plus 40 times the size of the request
_SECONDS = 1.0  # of processor time, plus a second per _BYTES_A_SECOND of the request
_BYTES_A_SECOND = 16 << 20
_MESSAGE = 200  # characters of a refusal or an error; otherwise as long as a document
_CHARACTERS = 4 << 20  # of the text, plus 8 times the size of the request; all are tokenised later
_FILTERS = frozenset(
    """
    abs capitalize count d default dictsort first float groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse safe select selectattr sort
    string sum title tojson trim unique upper
    """.split()
)


class _Refusal(Exception):
    """The template called `raise_exception`: it does not accept this conversation."""


class _Namespace(Namespace):
    """`namespace()` that refuses names with a leading underscore and does not print its content."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """Ignores `{% generation %}`, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012  (declared by Jinja as a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment with everything that a template can access: the features that published
    templates use."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # so that nothing is computed during compilation
        extensions=[_Generation, loopcontrols],
        finalize=_finalize,
    )
    known: dict[str, Callable[..., Any]] = {**made.filters, "tojson": _json, "string": _text}
    made.filters = {name: known[name] for name in _FILTERS}
    made.globals = {
        "dict": _dict,
        "namespace": _namespace,
        "raise_exception": _refuse,
        "range": made.globals["range"],
        "strftime_now": _date,
    }
    return made


def _text(value: Any) -> str:
    """The text of `{{ value }}`. For other objects only the name of their type, so that no address
    appears."""
    if isinstance(value, (str, Undefined, int, float, list, tuple, dict)) or value is None:
        return str(value)
    return f"<{type(value).__name__}>"


@pass_context
def _finalize(context: Context, value: Any) -> str:
    # Because it takes the context, Jinja does not call it during compilation.
    return _text(value)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object = "") -> None:
    raise _Refusal(_short(message))


def _short(message: object) -> str:
    """The beginning of a message, in one line."""
    return " ".join(str(message)[: 4 * _MESSAGE].split())[:_MESSAGE]


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
    return datetime.now().strftime(format)


_compiled = functools.lru_cache(1)(_environment().from_string)
"""Compiles a template; caches the last one."""


def _rendered(source: str, data: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The `text` of a template, or why there is none, as the reply to the request. limit: the most
    characters of the text."""
    try:
        text = _compiled(source).render(data)
    except _Refusal as refusal:
        return {"refused": str(refusal)}
    except TemplateSyntaxError as error:
        return {"syntax": _short(error.message), "line": error.lineno}
    except MemoryError:
        return {"stopped": "it took more memory than a template may have"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {_short(error)}"}
    if len(text) > limit:
        return {"stopped": f"it wrote more than {limit:,} characters"}
    return {"text": text}


def main() -> None:
    """Read requests from standard input, and write replies to standard output."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that printed text does not get between the replies
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent process may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    for line in sys.stdin.buffer:
        size = len(line)
        room = _MEMORY + 40 * size
        if most != resource.RLIM_INFINITY:
            room = min(room, most)
        resource.setrlimit(resource.RLIMIT_AS, (room, most))
        signal.setitimer(signal.ITIMER_PROF, _SECONDS + size / _BYTES_A_SECOND)
        given = json.loads(line)
        found = _rendered(given["source"], given["data"], _CHARACTERS + 8 * size)
        text = found.pop("text", "").encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps({**found, "bytes": len(text)}).encode() + b"\n" + text)
        replies.flush()

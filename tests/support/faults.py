"""Faults put into a chat: the n-th allocation, kernel call, read, write, tokenisation or rendering
fails, once or from then on."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlite_calls import WRITES, before
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minikv.chat.session import ChatSession
from minikv.kernels.dispatch import Kernels

KINDS = ("allocation", "kernel", "read", "write", "tokenise", "render")
_READS = ("preadv",)
_WRITES = ("pwritev", "posix_fallocate", "fdatasync", "fsync", "replace", "rename", "mkdir")


class Fault:
    """The `at`-th call of this kind fails, and with `lasting` every one after it."""

    def __init__(self, kind: str, at: int, *, lasting: bool = False) -> None:
        assert kind in KINDS
        self.kind, self.at, self.lasting, self.count = kind, at, lasting, 0

    @property
    def fired(self) -> bool:
        return self.count >= self.at

    def hit(self) -> None:
        """One more call."""
        self.count += 1
        if self.count == self.at or (self.lasting and self.fired):
            raise self._error()

    def _error(self) -> Exception:
        if self.kind == "allocation":  # as torch says it, on this device and on another
            other = RuntimeError("can't allocate memory")
            return MemoryError("no memory") if self.at % 2 else other
        number = {"read": errno.EIO, "write": errno.ENOSPC}.get(self.kind)
        if number is not None:
            return OSError(number, os.strerror(number))
        return RuntimeError(f"the {self.kind} failed")

    def number(self) -> int:
        """One more call of the system by SQLite: the error's number, 0 if it is none."""
        try:
            self.hit()
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, of which this is the fault."""

        def failing(*given: Any, **named: Any) -> Any:
            self.hit()
            return call(*given, **named)

        return failing


class AtLine:
    """While it is entered, the package's `at`-th line raises `error`. count: lines that ran."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.count = at, error, 0
        self._before: Any = None

    def __enter__(self) -> AtLine:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: Any, event: str, _: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("minikv."):
            return None
        self.count += event == "line"
        if event == "line" and self.count == self.at:
            raise self.error
        return self._trace


class Allocations(TorchDispatchMode):
    """Every new tensor is an allocation."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if _storages(found) - _storages((args, kwargs)):
            self.fault.hit()
        return found


def _storages(given: Any) -> set[int]:
    """The addresses of all tensors in it."""
    tensors = (t for t in tree_leaves(given) if isinstance(t, Tensor))
    return {t.untyped_storage().data_ptr() for t in tensors}


class _Stream:
    def __init__(self, stream: Any, fault: Fault) -> None:
        self.push, self.flush = fault.before(stream.push), stream.flush


@contextlib.contextmanager
def failing(session: ChatSession, fault: Fault) -> Iterator[None]:
    """Inside, the fault can come."""
    with pytest.MonkeyPatch.context() as patch:
        if fault.kind == "allocation":
            with Allocations(fault):
                yield
            return
        if fault.kind == "kernel":
            kv = session.engine.kv
            ops = _failing_ops(kv.ops, fault)
            patch.setattr(kv, "ops", ops)
            patch.setattr(kv.decode, "ops", ops)
        elif fault.kind in ("read", "write"):
            for name in _READS if fault.kind == "read" else _WRITES:
                patch.setattr(os, name, fault.before(getattr(os, name)))
            reads = fault.kind == "read"
            with before(fault.number, *(("pread64",) if reads else WRITES)):
                yield
            return
        elif fault.kind == "tokenise":
            tokenizer: Any = session.tokenizer
            stream = tokenizer.stream
            patch.setattr(tokenizer, "encode", fault.before(tokenizer.encode))
            patch.setattr(tokenizer, "stream", lambda: _Stream(stream(), fault))
        else:
            for name in ("opening", "following"):
                patch.setattr(session.template, name, fault.before(getattr(session.template, name)))
        yield


def _failing_ops(ops: Kernels, fault: Fault) -> Kernels:
    """The same kernels, each call of which can fail."""
    made: Any = type("Failing", (type(ops),), {})()
    for name in dir(ops):
        call = getattr(ops, name)
        if not name.startswith("_") and callable(call):
            setattr(made, name, fault.before(call))
    return made  # type: ignore[no-any-return]

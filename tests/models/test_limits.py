"""A limit on the address space of the process."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from loaded import refused
from pairwise import some_by_day

from minikv.models import limits, weights


def test_what_is_left_counts_as_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert limits.address_space() is None
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + (64 << 20), -1))
    found = limits.address_space()
    for found in (limits.address_space(), weights.free_memory(torch.device("cpu"))):
        assert found is not None
        assert 0 < found <= 64 << 20


@pytest.mark.parametrize("text", ["", "x 1 2", None])
def test_where_the_system_does_not_say_what_is_used_nobody_says(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """/proc is not there, or is not what it is on Linux."""
    opened = Mock(side_effect=FileNotFoundError if text is None else lambda _: io.StringIO(text))

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 30, -1))
    monkeypatch.setattr(limits, "open", opened, raising=False)
    assert limits.address_space() is None
    monkeypatch.setattr(limits, "open", lambda path: io.StringIO("3 1 1"))
    assert limits.address_space() == (1 << 30) - 3 * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.getpagesize(), -1))
    assert limits.address_space() == 0  # more is used than is allowed from now on


def test_torch_that_is_there_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "address_space", lambda: 1 << 20)
    limits.refuse_without_torch()
    monkeypatch.delitem(sys.modules, "torch")
    refused(limits.refuse_without_torch, "1 MiB more of address space", code=4)
    for enough in (700 << 20, None):
        monkeypatch.setattr(limits, "address_space", lambda enough=enough: enough)
        limits.refuse_without_torch()


DAILY = [(200, "ask a -"), (500, "ask a -"), (500, "policies show adakv")]
NIGHTLY = [(500, "ask a - -o window=8"), (400, "plan"), (400, "doctor")]


@pytest.mark.parametrize(
    ("megabytes", "words"), some_by_day([*DAILY, *NIGHTLY], DAILY.__contains__)
)
def test_a_process_without_room_for_torch_is_refused(megabytes: int, words: str) -> None:
    """At 400 MiB torch's libraries ended the process, at 500 they never came back."""
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({megabytes} << 20,) * 2); "
        f"from minikv.cli.__main__ import run; sys.argv = ['minikv', *{words.split()}]; run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"text", capture_output=True, timeout=60
    )
    assert done.returncode == 4, done.stderr
    assert b"address space" in done.stderr
    assert len(done.stderr.splitlines()) == 2

"""Mutated files for every reader (tests/support/fuzzing.py): each is read or refused in one line.

FUZZ_COUNT and FUZZ_SEED (or several seeds) change how many, and which; a finding is shown with its
input in base64.
The soak run takes about an hour.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

import fuzzing
import pytest

COUNT, MANY = int(os.environ.get("FUZZ_COUNT", 2000)), 1_000_000
SEEDS = map(int, os.environ.get("FUZZ_SEED", "19").split())


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[fuzzing.Target]:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path))
    return fuzzing.targets(tmp_path)


@pytest.mark.parametrize(
    ("count", "seed"),
    [*((COUNT, seed) for seed in SEEDS), pytest.param(MANY, 1, marks=pytest.mark.soak)],
)
def test_a_mutated_file_is_read_or_refused(
    targets: list[fuzzing.Target], count: int, seed: int
) -> None:
    found = fuzzing.run(targets, count, seed)
    assert found.findings == []
    assert found.tried.total() >= 0.9 * count
    # Mutations that all are refused, or none, would try little.
    some = {target.name: found.refused[target.name] for target in targets}
    free = {"generation_config", "history"}  # what is wrong there costs a note, or is left out
    assert [name for name in some if not some[name] and name not in free] == []
    assert sum(some.values()) < found.tried.total()


def test_a_reader_that_fails_is_found() -> None:
    def read(data: bytes) -> None:
        if data != b'{"a": 1}':
            raise ZeroDivisionError("inside")

    target = fuzzing.Target("x", (b'{"a": 1}',), read, refusals=(ValueError,))
    found = fuzzing.run([target], 20, 0)
    assert len(found.findings) >= 10
    line, data = found.findings[0]
    assert line.startswith("x: ZeroDivisionError: 'inside' (test_fuzz.py:")
    assert base64.b64decode(data) != b'{"a": 1}'


# What long runs found, each once more.
FOUND = [
    ("history", b'{"a":' * 1200),
    ("a tier's manifest", b'{"layers": 2, "heads": "x", "columns": {"k": ["float32", [8]]}}'),
    (
        "a tier's manifest",
        b'{"layers": 2, "heads": 2, "columns": {"k": ["float32", [{}]]}, "identity": {}}',
    ),
    ("a tier's manifest", b"[" * 2000),
]


def test_a_place_that_is_none_is_refused(targets: list[fuzzing.Target]) -> None:
    """Of a turn that had a tier in a place that is none."""
    (target,) = [one for one in targets if one.name == "a turn's facts"]
    (data,) = target.seeds
    assert b'"tier": ""' in data
    with pytest.raises(target.refusals, match=r"record\.tier"):
        target.read(data.replace(b'"tier": ""', b'"tier": "xx"'))


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_stays_fixed(targets: list[fuzzing.Target], name: str, data: bytes) -> None:
    (target,) = [one for one in targets if one.name == name]
    found = fuzzing.Outcome()
    fuzzing._one(target, data, found)
    assert found.findings == []

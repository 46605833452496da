"""What is held and what a full cache would hold count the same rows in the same way."""

from __future__ import annotations

import pytest
from pairwise import beside
from small import PAIRS, by_day, engine, ids, network, over, shape

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import full_cache_bytes, share_saved
from minikv.engine.engine import Engine

WINDOWS = (None, (20, None, 70))
LENGTHS = (1, 5, 40, 48, 49, 60, 150)


def check(kv: KVCache) -> None:
    """The share saved is a share; without eviction and a policy's own data it is exactly 0."""
    stats = kv.stats()
    assert 0 <= stats.saved <= 1
    assert stats.held_bytes - stats.state_bytes <= stats.full_bytes
    if stats.held_bytes >= stats.full_bytes:
        assert stats.saved == 0
    else:
        assert stats.saved == 1 - stats.held_bytes / stats.full_bytes


@pytest.mark.parametrize(
    ("prompt", "step", "windows", "length"), by_day(beside(PAIRS, WINDOWS, LENGTHS)), ids=str
)
def test_what_is_saved_is_a_share_under_every_policy(
    prompt: str, step: str, windows: tuple[int | None, ...] | None, length: int
) -> None:
    run = engine(network(windows=windows), prompt, step, 48)
    check(run.kv)
    for turn in range(2):
        run.prompt(ids(length, seed=turn))
        check(run.kv)
        for token in ids(3, seed=10 + turn):
            run.step(token)
            check(run.kv)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_full_cache_saves_exactly_nothing(
    windows: tuple[int | None, ...] | None, length: int
) -> None:
    """After every prompt and every token of an answer, sliding windows included."""
    run = engine(network(windows=windows), "full", "none", None)
    for turn in range(2):
        run.prompt(ids(length, seed=turn))
        for token in ids(30, seed=10 + turn):
            stats = run.kv.stats()
            assert stats.held_bytes == stats.full_bytes > 0
            assert stats.saved == 0
            assert not stats.gaps
            run.step(token)


def test_a_prompt_read_in_blocks_saves_a_share_too() -> None:
    """Rows slide out of a window when the next block begins, so that more may be held for a
    moment than a full cache holds between prompts."""
    net = network(windows=(20, None, 70))
    kv = over(net, Rules(None, policies.step_policy("roco"), Budget.parse(48), 16))
    run = Engine(net, kv)
    for length in LENGTHS:
        run.reset()
        run.prompt(ids(length))
        assert 0 <= kv.stats().saved <= 1


def test_a_full_cache_by_hand() -> None:
    """Two layers of 3 heads: 12 tokens beside a window that shows 5 tokens to the next one; 8
    numbers of 4 bytes in a key and in a value, and 4 bytes of position."""
    sizes = shape(network(layers=2, windows=(None, 6), head_dim=8))
    assert full_cache_bytes(sizes, 12, 4) == (12 + 5) * 3 * (8 * 4 + 8 * 4 + 4)
    assert full_cache_bytes(sizes, 0, 4) == 0


def test_a_share_is_never_below_zero() -> None:
    assert share_saved(25, 100) == 0.75
    assert share_saved(103, 100) == 0
    assert share_saved(0, 0) == 0

"""A long run of short turns under all policies: memory, descriptors and threads do not grow, and
the log of tokens is the cache's after every turn."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lettered import lettered
from test_machine import BUDGETS, PAIRS, QUESTIONS, TEXTS, eviction
from whole import whole

from minikv.chat.session import ChatSession
from minikv.cli.saved.keeper import Keeper
from minikv.cli.screen.terminal import Terminal
from minikv.errors import ContextError, Interrupted, UsageError

GROWTH = 1 << 20
"""Bytes by which the last half of a run may grow."""


def resident() -> int:
    """Bytes of this process in memory, what nobody uses given back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def turn(session: ChatSession, draw: random.Random) -> int:
    """Something that a user does; how many turns it took."""
    before = session.turn
    if session.room < 400:
        session.reset()
    elif draw.random() < 0.02:
        session.reset(keep_documents=True)
    if draw.random() < 0.3:
        session.attach(draw.choice(TEXTS), draw.choice([None, "a.txt"]))
    if draw.random() < 0.3:
        with contextlib.suppress(UsageError):
            session.configure(eviction(draw.choice(PAIRS), draw.choice(BUDGETS)))
    question, tokens = draw.choice(QUESTIONS), draw.randint(1, 6)
    match draw.randrange(8):
        case 0:
            calls, last = itertools.count(), draw.randrange(6)

            def progress(done: int, total: int) -> None:
                if next(calls) == last:
                    session.cancel()

            with contextlib.suppress(Interrupted):
                "".join(session.ask(question, tokens, progress=progress))
        case 1:
            answer = session.ask(question, 9)
            next(answer, None)
            answer.close()
        case _:
            "".join(session.ask(question, tokens, draw.choice([0.0, 0.8])))
    took = session.turn > before
    if took and draw.random() < 0.1:
        session.undo()
    return took


@contextlib.contextmanager
def chats() -> Iterator[list[tuple[ChatSession, Keeper]]]:
    """One without a tier, one with a tier in memory, one with a tier in a file."""
    made = []
    for tier in ("none", "ram", "file"):
        first = eviction(("adakv", "auto"), 48)
        session = lettered(first, tier=tier, reuse="auto")
        keeper = Keeper(Terminal(quiet=True))
        keeper.attend(session)
        made.append((session, keeper))
    try:
        yield made
    finally:
        for session, keeper in made:
            session.close()
            session.recall.leave()
            keeper.close()


def run(turns: int, saves: int, samples: int) -> tuple[list[int], list[int], list[int]]:
    """Resident bytes, open files and threads, so many times. A chat is saved with every `saves`-th
    turn, and sometimes loaded again in place of the open one."""
    draw = random.Random(14)
    sizes, files, running = list[int](), list[int](), list[int]()
    with chats() as made:
        done, each = 0, turns // samples
        for number in itertools.count():
            if done >= turns:
                break
            session, keeper = made[number % len(made)]
            try:
                took = turn(session, draw)
            except (ContextError, UsageError):  # a share of a short text may be too small
                session.reset()
                continue
            done += took
            whole(session)
            if number % saves == 0 and session.turns and session.fed:
                keeper.save(session)
                assert keeper.name is not None
                if draw.random() < 0.5:
                    keeper.load(session, keeper.name)
                    whole(session)
            if took and done % each == 0:
                sizes.append(resident())
                files.append(len(os.listdir("/proc/self/fd")))
                running.append(len(os.listdir("/proc/self/task")))
    return sizes, files, running


def level(values: list[int]) -> tuple[int, int]:
    """The middle of the values after half of a run, and of those at its end."""
    half, few = len(values) // 2, max(1, len(values) // 10)
    return int(statistics.median(values[half : half + few])), int(statistics.median(values[-few:]))


def test_a_hundred_turns() -> None:
    torch.set_num_threads(1)
    _, files, running = run(100, 10, 10)
    assert len(files) == 10
    assert max(files[5:]) <= max(files[:5]) + 1  # a tier's file may come later
    assert max(running[5:]) <= max(running[:5]) + 1


@pytest.mark.soak
def test_ten_thousand_turns() -> None:
    """Memory grows by a megabyte at the most over the last half; descriptors and threads do not."""
    torch.set_num_threads(1)
    sizes, files, running = run(10_000, 100, 100)
    half, end = level(sizes)
    sys.stderr.write(f"{half=} {end=} files {files[50]} {files[-1]} threads {running[-1]}\n")
    sys.stderr.write(f"{[size >> 10 for size in sizes]}\n{files}\n{running}\n")
    assert end - half <= GROWTH
    assert level(files)[1] <= level(files)[0]
    assert level(running)[1] <= level(running)[0]

"""A step policy gives its kernel its own columns and options, and says False where there is none.

The kernels are compared with the rules in torch in tests/kernels. Here a table of kernels notes
what each is called with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minikv import policies
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import BlockEnd, PromptView, StepAppend, StepEnd, StepPolicy, StepRoom

STEPS = [name for name in policies.step_names() if name != "none"]


def made(name: str, **options: object) -> StepPolicy:
    policy = policies.step_policy(name, options)
    assert policy is not None
    return policy


def noting(*names: str, appends_any: bool = False) -> tuple[Kernels, dict[str, tuple[Any, Any]]]:
    """Kernels of which these are there, and what each was called with."""
    called: dict[str, tuple[Any, Any]] = {}
    ops = Kernels()
    for name in names:

        def note(*given: Any, name: str = name, **named: Any) -> None:
            called[name] = given, named

        setattr(ops, name, note)
    ops.appends_any = appends_any
    return ops, called


def column() -> torch.Tensor:
    return torch.empty(0)


def end_of(policy: StepPolicy) -> StepEnd:
    """Fields that can be told apart."""
    columns = {name: column() for name in policy.columns}
    rows: Any = object()
    return StepEnd(column(), column(), rows, column(), column(), columns, column(), column())


def room_of(*names: str) -> StepRoom:
    rows: Any = object()
    return StepRoom(rows, column(), column(), {name: column() for name in names}, {})


def same(given: Any, *wanted: Any) -> bool:
    return len(given) == len(wanted) and all(a is b for a, b in zip(given, wanted, strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_without_a_kernel_the_rule_in_torch_is_used(name: str) -> None:
    policy = made(name)
    ops = Kernels()  # of torch: it has none of them
    append: Any = append_of(policy)
    assert not policy.end_kernel(ops, end_of(policy))
    assert not policy.update_kernel(ops, end_of(policy))
    assert not policy.room_kernel(ops, room_of("norm"))
    assert not policy.append_kernel(ops, append)


def test_h2o_and_roco_and_tova_end_a_step_with_their_columns() -> None:
    h2o, roco, tova = made("h2o"), made("roco"), made("tova")
    ops, called = noting("h2o_step", "roco_step", "tova_step")
    end = end_of(h2o)
    assert h2o.end_kernel(ops, end)
    heads = end.logits, end.lse, end.rows, end.accepted, end.free_slot
    assert same(called["h2o_step"][0], *heads, end.columns["sum"], end.quota)
    end = end_of(roco)
    assert roco.end_kernel(ops, end)
    state = [end.columns[name] for name in ("weighed", "squares", "count")]
    assert same(called["roco_step"][0], *end.heads, *state, end.quota)
    for per_head in (False, True):
        tova = made("tova", per_head=per_head)
        end = end_of(tova)
        assert tova.end_kernel(ops, end)
        assert same(called["tova_step"][0], *end.heads)
        assert called["tova_step"][1] == {"layerwise": not per_head}


def test_scissorhands_gives_its_register_by_words() -> None:
    policy = made("scissorhands", history=70)
    ops, called = noting("scissorhands_step")
    end = end_of(policy)
    assert policy.end_kernel(ops, end)
    given = called["scissorhands_step"][0]
    assert same(given[5], *(end.columns[f"below{i}"] for i in range(3)))
    assert same(given[:5] + given[6:7] + given[8:], *end.heads, end.columns["queries"], end.window)
    assert given[7] == 70


def test_scissorhands_in_blocks_chooses_by_the_share_of_its_bits() -> None:
    policy = made("scissorhands", history=70, sinks=3, recent=5)
    columns = {name: column() for name in (*policy.columns, "worth")}
    words, queries = [columns[f"below{i}"] for i in range(3)], columns["queries"]
    ops, called = noting("low_share", "unprotected_block", "block_history")
    block = BlockEnd(0, column(), column(), 30, 90, 2, columns, None, column())
    policy.block_kernel(ops, block)
    assert same(called["low_share"][0][0], *words)
    assert same(called["low_share"][0][1:], queries)
    given = called["unprotected_block"][0]
    assert same(given[1:3], block.pos, block.live)
    assert given[3:] == (30, 90, 3, 5, 2)
    p, seen = column(), column()
    policy.update_block(ops, columns, p, lambda: seen)
    given = called["block_history"][0]
    assert same(given[0], *words)
    assert same(given[1:4], queries, p, seen)
    assert given[4:] == (70,)
    assert policy.block_kernel(Kernels(), block) is None


@pytest.mark.parametrize(("history", "observed"), [(70, 25), (7, 7)])
def test_scissorhands_starts_from_the_bits_of_the_last_turns_queries(
    history: int, observed: int
) -> None:
    policy = made("scissorhands", history=history)
    columns = {name: column() for name in policy.columns}
    ops, called = noting("prompt_history")
    found = [column() for _ in range(len(columns))]
    ops.prompt_history = (
        lambda *given: (  # type: ignore[method-assign,assignment]
            called.update(prompt_history=(given, {})) or (found[:-1], found[-1])
        )
    )
    bits, pos = column(), column()
    view = PromptView(
        0,
        90,
        pos,
        0,
        None,
        None,
        column,
        column,
        turns=[(0, 65), (65, 90)],
        below=lambda: bits,
        ops=ops,
    )
    assert same(policy.prompt(view, columns).values(), *found)
    given = called["prompt_history"][0]
    assert same(given[0], *(columns[name] for name in columns if name != "queries"))
    assert same(given[1:4], columns["queries"], bits, pos)
    assert given[4:] == (90, observed, history)


@pytest.mark.parametrize("group", ["mean", "max"])
def test_rkv_shifts_what_its_rows_have_seen_between_two_evictions(group: str) -> None:
    policy = made("rkv", window=3, buffer=5, group=group)
    ops, called = noting("shift_step")
    end = end_of(policy)
    assert policy.update_kernel(ops, end)
    given = called["shift_step"][0]
    assert same(given[:4], end.logits, end.lse, end.rows, end.accepted)
    assert same(given[4], *(end.columns[f"seen{i}"] for i in range(3)))
    assert given[5:] == (group,)
    assert not policy.end_kernel(ops, end)


def test_room_is_made_by_the_policys_own_kernel() -> None:
    ops, called = noting("streaming_step", "l2_step", "random_step")
    room = room_of("k", "norm")
    heads = room.rows, room.free_slot, room.slot, room.columns, room.undo_rows
    for name in ("streaming", "l2", "random"):
        assert made(name, **({"seed": 9} if name == "random" else {})).room_kernel(ops, room)
    assert same(called["streaming_step"][0], *heads)
    assert same(called["l2_step"][0], *heads, room.columns["norm"])
    assert same(called["random_step"][0][:5], *heads)
    assert called["random_step"][0][5:] == (9,)


def append_of(
    policy: StepPolicy, *others: str, shown: bool = False, turn: Any = None
) -> StepAppend:
    """Keys [2, 4], of two heads. others: further columns; shown: some rows leave last."""
    names = "k", "v", "pos", "code", *others
    columns = {name: column() for name in names}
    undo = {name: column() for name in names}
    query, key = torch.empty(2, 3, 4), torch.empty(2, 4)
    tables = [column() for _ in range(5)]
    seen = column() if shown else columns["pos"]
    return StepAppend(1, query, key, column(), *tables, columns, undo, 64, 5, seen, turn, column())


@pytest.mark.parametrize("hash_with", ["query", "key"])
def test_hashevict_gives_what_it_compares_with_and_its_projection(hash_with: str) -> None:
    policy: Any = made("hashevict", hash_with=hash_with, sinks=2, recent=3)
    ops, called = noting("hash_append")
    append = append_of(policy)
    assert policy.append_kernel(ops, append)
    given, named = called["hash_append"]
    c, u = append.columns, append.undo_rows
    if hash_with == "key":
        assert given[0].shape == (2, 1, 4)
        assert given[0].data_ptr() == append.key.data_ptr()
    else:
        assert given[0] is append.query
    assert same(given[1:3], append.key, append.value)
    assert torch.equal(given[3], policy.matrix(1, append.key))
    tables = append.start, append.length, append.cap, append.free_slot, append.position
    assert same(given[4:-1], *tables, c["k"], c["v"], c["pos"], c["code"])
    assert same(given[-1], u["k"], u["v"], u["pos"], u["code"])
    assert named == {"width": 64, "sinks": 2, "recent": 3, "pinned": 5}


@pytest.mark.parametrize("why", ["others", "shown", "turn"])
def test_hashevict_asks_only_a_kernel_that_takes_any_row_for_more(why: str) -> None:
    """Of int8, of rows that leave last, and of rows that are not rotated yet."""
    policy: Any = made("hashevict", hash_with="key")
    turn = (column(), column(), column()) if why == "turn" else None
    others = ("k_scale", "worth") if why == "others" else ()
    append = append_of(policy, *others, shown=why == "shown", turn=turn)
    ops, called = noting("hash_append")
    assert not policy.append_kernel(ops, append)
    assert not called
    ops, called = noting("hash_append", appends_any=True)
    assert policy.append_kernel(ops, append)
    given, named = called["hash_append"]
    assert same(named["others"], *(append.columns[name] for name in others))
    assert same(named["undo_others"], *(append.undo_rows[name] for name in others))
    assert named["shown"] is append.shown
    assert named["turn"] is append.turn
    assert named["arrived"] is append.arrived
    assert named.get("k_scale") is append.columns.get("k_scale")
    assert "v_scale" not in named
    # Where the kernel rotates, it takes the key itself.
    assert named.get("keyed") == (True if why == "turn" else None)
    assert (given[0] is append.query) == (why == "turn")

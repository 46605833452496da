"""A layer that ends without asking the device keeps what one that asks keeps, to the last bit."""

from __future__ import annotations

import pytest
import small
import torch
from torch import Tensor

from minikv import policies
from minikv.cache import prefill
from minikv.cache.arena import Arena
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Plan, Prefill
from minikv.cache.stats import Shape
from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels

CASES = [
    ("full", "none", None, {}),
    ("full", "roco", 40, {}),
    ("adakv", "roco", 44, {}),
    ("adakv", "none", 44, {"rounding": "official"}),
    ("snapkv", "h2o", 40, {}),
    ("nacl", "tova", 72, {}),
    ("h2o", "none", 40, {}),
    ("streaming", "roco", 40, {}),
    ("adakv+pyramid+turns", "none", 48, {}),
    ("expected", "none", 40, {}),
    ("adakv", "hashevict", 48, {"alloc": "floor"}),
    ("adakv", "none", 44, {"normalize": True}),
    ("kvcrush", "scissorhands", 56, {"bits": "query"}),
    ("snapkv+critical", "l2", 48, {}),
    ("kvcrush(tova+ada)+critical+turns", "none", 40, {"alpha": 1 / 3}),
]


def contents(kv: KVCache) -> tuple[list[object], list[Tensor]]:
    """Where every head's rows come from and how many it may keep; and its columns by position."""
    arena, exact, near = kv.arena, [kv.arena.cap.tolist(), kv.stats().shaped], []
    for layer in range(len(arena.start)):
        for h in range(arena.heads):
            pos = arena.segment("pos", layer, h)
            exact.append(pos.sort().values.tolist())
            near += [arena.segment(n, layer, h)[pos.argsort()].float() for n in arena.columns]
    near.append(torch.tensor([-1.0 if x is None else x for x in kv.lost]))
    return exact, near


@pytest.mark.parametrize("windows", [None, (None, 24, 60)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:2])))
def test_the_same_rows_stay(
    case: tuple[str, str, int | None, dict[str, object]],
    windows: tuple[int | None, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three prompts and answers between them, in chunks, some under the budget."""
    name, step, budget, options = case
    net, logits, held = small.network(windows=windows), {}, {}
    for device in (False, True):
        monkeypatch.setattr(prefill, "far", lambda _, device=device: device)
        kv = small.scheduler(net, name, step, budget, prompt_options=options)
        engine = Engine(net, kv)
        last, seen = [], []
        for turn, count in enumerate((30, 45, 20)):
            last.append(engine.prompt(small.ids(count, turn)))
            seen.append(contents(kv))
            last += [engine.step(token) for token in small.ids(5, 9 + turn)]
        logits[device], held[device] = torch.stack(last), seen
    assert [e for e, _ in held[True]] == [e for e, _ in held[False]]
    for (_, got), (_, want) in zip(held[True], held[False], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[True], logits[False], rtol=1e-4, atol=1e-4)


class Silent(Kernels):
    """Kernels whose twins loop over counts on the host leave what they return unwritten, as those
    of a GPU look from the host; and the names of those that were called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def ragged_prefill(self, q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.called.append("segments")
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def gather_rows(self, *_: object) -> None:
        self.called.append("rows")

    def gather_column(self, *_: object) -> None:
        self.called.append("column")


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("h2o", "roco"),
        ("h2o+ada", None),
        ("streaming", "roco"),
        ("full", "h2o"),
        ("snapkv", None),
        ("adakv", "roco"),
        ("nacl", "h2o"),
        ("adakv+pyramid+turns", None),
    ],
)
def test_no_layer_asks_the_device(
    name: str, step: str | None, before: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without memory, every question for a value is an error.

    before: an empty cache, one with heads alike, one with uneven heads and holes.
    """
    ops = Silent()
    monkeypatch.setattr(prefill, "far", lambda _: True)
    chosen = policies.prompt_policy(name)
    stepper = policies.step_policy(step) if step else None
    arena = Arena(2, 3, 8, torch.float32, torch.device("meta"), stepper.columns if stepper else {})
    arena.resize([400, 400])
    for layer in range(2):
        arena.lay(layer, [130, 130, 130])
    if before:
        arena.length += 20
    if before == 2:
        arena.length[:, 1] = 7
        arena.free_slot[:, 0] = arena.start[:, 0] + 3
    if window:
        monkeypatch.setattr(Prefill, "_count_visible", lambda _: [160, 160])  # asks, but only once
    total = None if chosen is None else [120, 120]
    plan = Plan(30, 60, total, 0, 1, [400, 400], False)
    shape = Shape(2, 3, 6, 8, (window, None), 4096)
    read = Prefill(shape, arena, chosen, stepper, plan, torch.float32, ops)
    for layer in range(2):
        for rows in (40, 20):
            q, k, v = (torch.empty((rows, n, 8), device="meta") for n in (6, 3, 3))
            read.stage(layer, q, k, v)
        read.finish(layer)
    assert ("segments" in ops.called) == (before == 2)
    if name != "full" or before != 1:
        assert {"rows", "column"} <= {*ops.called}
        with pytest.raises(NotImplementedError):  # the end of the prompt asks
            read.release()

"""A policy is a file and a name: what CONTRIBUTING says is done here, for a scorer, another part
and a step rule."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from small import Walk, ids
from torch import Tensor
from typer.testing import CliRunner
from views import build

import minikv
from minikv import policies
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.main import app
from minikv.errors import UsageError
from minikv.kernels import Rows
from minikv.policies import registry

pytestmark = pytest.mark.usefixtures("toys")
CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


# -- toys -----------------------------------------------------------------------------------------

LAYERS = '''
    """The first layer keeps `more` rows a head, which the last one lacks."""

    from dataclasses import dataclass

    from minikv.policies.parts import LayerAllocator
    from minikv.policies.options import option


    @dataclass(frozen=True, slots=True, kw_only=True)
    class FirstMore(LayerAllocator):
        name = "first"
        summary = "more rows in the first layer"

        more: int = option(4, "rows", (0, 4096))

        def rows(
            self, layers: int, budget: int, most: int, least: int, protected: int
        ) -> list[int]:
            moved = max(0, min(self.more, most - budget, budget - least)) if layers > 1 else 0
            return [budget + moved, *[budget] * (layers - 2), budget - moved][:layers]
'''
STEP = '''
    """The row that was least looked at since it came leaves, or any."""

    from collections.abc import Callable, Mapping
    from dataclasses import dataclass

    import torch
    from torch import Tensor

    from minikv.policies import options
    from minikv.policies.base import StepPolicy, StepView
    from minikv.policies.counter_rng import uniform
    from minikv.policies.options import Method


    @dataclass(frozen=True, slots=True, kw_only=True)
    class LeastSeen(StepPolicy):
        sinks: int = options.sinks(0)
        seed: int = options.seed()
        name: str = "toystep"

        @property
        def columns(self) -> dict[str, torch.dtype]:
            return {"seen": torch.float32}

        def update(
            self,
            columns: Mapping[str, Tensor],
            attention: Tensor,
            visible: Callable[[], Tensor],
        ) -> None:
            columns["seen"].add_(attention)

        def score(self, view: StepView) -> Tensor:
            return view.column("seen") + 1e-6 * uniform(self.seed, view.layer, view.pos)


    METHOD = Method(
        "toystep",
        "what was least looked at leaves",
        rule=LeastSeen,
        good="a test",
        paper="a test",
        told="attention",
        again="fades",
    )
'''


TOYS = {"first": LAYERS, "toystep": STEP}


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of CONTRIBUTING and two others: a file each, and its name in the registry."""
    (example,) = re.findall(r"   ```python\n(.*?)   ```", CONTRIBUTING, re.S)
    for name, text in {"values": example, **TOYS}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text).lstrip())
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    known = {"PROMPT": "values", "SCORERS": "values", "OTHER_PARTS": "first", "STEP": "toystep"}
    for names, more in known.items():
        monkeypatch.setattr(registry, names, [*getattr(registry, names), more])


def test_toys_are_policies_like_all_others() -> None:
    made = build("values+first", {"power": 2.0, "more": 3})
    assert made.evidence.sinks == 4
    assert made.layer_rows(3, 40, 100, 5) == [43, 40, 37]
    with pytest.raises(UsageError, match="power must be between"):
        policies.prompt_policy("values", {"power": 9.0})
    card = CliRunner().invoke(app, ["policies", "show", "values"])
    assert "power=1.0" in card.output
    assert "fades" in CliRunner().invoke(app, ["policies", "show", "toystep"]).output
    table = CliRunner().invoke(app, ["policies"]).output
    assert re.search(r"^values +prompt +comparisons +safe +baseline$", table, re.M)
    assert re.search(r"^toystep +step ", table, re.M)
    assert re.search(r"parts to add to a policy:.* first \(as", table, re.S)


def test_a_toy_keeps_what_it_says() -> None:
    """Rows of large values."""
    walk = Walk(EvictionConfig.read("values", "none", 30, {"sinks": 0}))
    walk.prompt(ids(90))
    value = torch.cat(walk.fed[0])[:, 1, 1]
    assert walk.kv.kept(0, 1).tolist() == sorted(value.norm(dim=-1).topk(30).indices.tolist())


def test_toys_in_a_chat_and_in_eval(tmp_path: Path) -> None:
    text = "The mill on the river is run by Ada, who came from Velgate. " * 9
    chat = minikv.load(policy="values+first", decode="toystep", budget=72, device="cpu", power=2.0)
    for turn in range(2):
        if not turn:
            chat.attach(text, name="mill.txt")
        assert "".join(chat.ask("Who runs the mill?", max_tokens=6))
        record = chat.report.to_dict()  # type: ignore[union-attr]
        assert record["tokens"]["kept_mean"] == 72
        assert record["policy_options"]["power"] == 2.0
        assert record["policy_options"]["decode"]["policy"] == "toystep"
    out = tmp_path / "out.json"
    arguments = ["eval", "--tasks", "needle", "--length", "400", "-n", "1", "--budget", "128"]
    arguments += ["--policy", "values+first", "--decode", "toystep"]
    ran = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    assert "values+first" in json.dumps(json.loads(out.read_text()))


def test_a_kernel_is_found_by_the_name_of_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in `Kernels.evict`, which then does all that the end of a step does: here the oldest
    row leaves, where the rule in torch would have chosen by attention."""
    walk = Walk(EvictionConfig.read("full", "toystep", 30, {}))

    def oldest(
        logits: Tensor, lse: Tensor, rows: Rows, free_slot: Tensor, columns: object, quota: object
    ) -> None:
        for place, (begin, count) in enumerate(
            zip(rows.start.flatten().tolist(), rows.length.flatten().tolist(), strict=True)
        ):
            free_slot.view(-1)[place] = begin + int(rows.pos[begin : begin + count].argmin())

    monkeypatch.setattr(walk.kv.ops, "evict", {"toystep": oldest})
    walk.prompt(ids(30))
    for token in ids(8):
        walk.step(token)
    assert walk.kv.kept(0, 1).tolist() == walk.kv.kept(1, 2).tolist() == [*range(8, 38)]

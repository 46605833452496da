"""A policy is a file and a row: what CONTRIBUTING says is done here, for a toy of every kind."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from rows import check_part, check_step
from small import Walk, ids
from typer.testing import CliRunner

import minikv
from minikv import policies
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.main import app
from minikv.errors import UsageError
from minikv.policies import PARTS, POLICIES, Option, Part, PolicyInfo
from minikv.policies.tables.part import NO_SINKS, SEED, SINKS

CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


# -- toys -----------------------------------------------------------------------------------------

LAYERS = '''
    """The first layer keeps `more` rows a head, which the last one lacks."""

    from dataclasses import dataclass

    from minikv.policies.base import LayerAllocator


    @dataclass(frozen=True, slots=True, kw_only=True)
    class FirstMore(LayerAllocator):
        more: int

        def rows(
            self, layers: int, budget: int, most: int, least: int, protected: int
        ) -> list[int]:
            moved = max(0, min(self.more, most - budget, budget - least)) if layers > 1 else 0
            return [budget + moved, *[budget] * (layers - 2), budget - moved][:layers]
'''
HEADS = '''
    """The first heads get what they can."""

    from dataclasses import dataclass

    import torch
    from torch import Tensor

    from minikv.policies.base import Candidates, HeadAllocator


    @dataclass(frozen=True, slots=True, kw_only=True)
    class FirstHeads(HeadAllocator):
        def share(self, rows: Candidates, total: Tensor, most: int) -> Tensor:
            have = rows.free.sum(1)
            before = have.cumsum(0) - have
            return torch.minimum(have, (total - before).clamp(min=0))
'''
SELECT = '''
    """The oldest rows, whatever their scores, or the youngest."""

    from dataclasses import dataclass, replace

    from torch import Tensor

    from minikv.policies.base import Candidates, Selector


    @dataclass(frozen=True, slots=True, kw_only=True)
    class Oldest(Selector):
        youngest: bool

        def select(self, rows: Candidates, counts: Tensor, most: int) -> Tensor:
            age = rows.view.pos.float()
            worth = age if self.youngest else -age
            return replace(rows, scores=worth).best(counts, most)
'''
STEP = '''
    """The row that was least looked at since it came leaves, or any."""

    from collections.abc import Callable, Mapping
    from dataclasses import dataclass

    import torch
    from torch import Tensor

    from minikv.policies.base import StepPolicy, StepView, unprotected
    from minikv.policies.counter_rng import uniform


    @dataclass(frozen=True, slots=True, kw_only=True)
    class LeastSeen(StepPolicy):
        sinks: int
        seed: int
        name: str = "toystep"

        @property
        def columns(self) -> dict[str, torch.dtype]:
            return {"seen": torch.float32}

        def update(
            self,
            columns: Mapping[str, Tensor],
            probabilities: Tensor,
            visible: Callable[[], Tensor],
        ) -> None:
            columns["seen"].add_(probabilities)

        def score(self, view: StepView, count: int) -> tuple[Tensor, Tensor]:
            noise = uniform(self.seed, view.layer[:, None], view.pos)
            return view.columns["seen"] + 1e-6 * noise, unprotected(view, self)
'''


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of CONTRIBUTING and three others, as files; and their rows."""
    blocks = re.findall(r"   ```python\n(.*?)   ```", CONTRIBUTING, re.S)
    code, row = (textwrap.dedent(block) for block in blocks)
    for name, text in (
        ("toy_values", code),
        ("toy_layers", LAYERS),
        ("toy_heads", HEADS),
        ("toy_select", SELECT),
        ("toy_step", STEP),
    ):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text).lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    values = eval(row, {"Part": Part, "Option": Option, "SINKS": SINKS})
    parts = [
        dataclasses.replace(values, module="toy_values"),
        Part(
            "first",
            "layers",
            "toy_layers",
            "FirstMore",
            "more rows in the first layer",
            (Option("more", 4, "rows", 0, 4096),),
        ),
        Part("firsts", "heads", "toy_heads", "FirstHeads", "the first heads"),
        Part(
            "oldest",
            "select",
            "toy_select",
            "Oldest",
            "the oldest rows",
            (Option("youngest", False, "the youngest instead"),),
        ),
    ]
    facts = ("prompt", "uniform", "large values", "-", "safe", "a test", "large values stay")
    rows = [
        PolicyInfo("toyvalues", True, False, *facts, parts=("values",)),
        PolicyInfo(
            "toystep", False, True, *facts, module="toy_step", cls="LeastSeen", own=(NO_SINKS, SEED)
        ),
    ]
    for part in parts:
        monkeypatch.setitem(PARTS, part.name, part)
    for info in rows:
        monkeypatch.setitem(POLICIES, info.name, info)


@pytest.mark.usefixtures("toys")
def test_toys_are_policies_like_all_others() -> None:
    for part in ("values", "first", "firsts", "oldest"):
        check_part(PARTS[part])
    check_step(POLICIES["toystep"])
    made = policies.prompt_policy("toyvalues+first+firsts+oldest", {"power": 2.0, "more": 3})
    assert made is not None
    assert made.evidence.sinks == 4
    assert made.layer_rows(3, 40, 100, 5) == [43, 40, 37]
    with pytest.raises(UsageError, match="power must be between"):
        policies.prompt_policy("toyvalues", {"power": 9.0})
    card = CliRunner().invoke(app, ["policies", "show", "toyvalues"])
    assert "power=1.0" in card.output
    table = CliRunner().invoke(app, ["policies"])
    assert "toystep" in table.output


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("policy", "decode"),
    [
        ("toyvalues", "toystep"),
        ("toyvalues+first", "roco"),
        ("toyvalues+firsts", "roco"),
        ("adakv+oldest", "toystep"),
        ("snapkv+oldest+first", "none"),
        ("kvcrush(toyvalues)+critical+turns", "toystep"),
    ],
)
@pytest.mark.parametrize("windows", [(None, None), (20, None)])
def test_toys_in_the_walks_of_the_property_tests(
    policy: str, decode: str, windows: tuple[int | None, ...]
) -> None:
    walk = Walk(EvictionConfig.read(policy, decode, 60), windows=windows, pinned=2)
    for turn in range(2):
        walk.prompt(ids(90, seed=turn))
        for token in ids(8, seed=turn):
            walk.step(token)


@pytest.mark.usefixtures("toys")
def test_a_toy_keeps_what_it_says() -> None:
    """The oldest rows; all that the first heads have; large values."""
    walk = Walk(EvictionConfig.read("toyvalues+oldest", "none", 30, {"sinks": 0}))
    walk.prompt(ids(90))
    assert walk.kv.kept(1, 2).tolist() == [*range(30)]
    walk = Walk(EvictionConfig.read("toyvalues", "none", 30, {"sinks": 0}))
    walk.prompt(ids(90))
    value = torch.cat(walk.fed[0])[:, 1, 1]
    assert walk.kv.kept(0, 1).tolist() == sorted(value.norm(dim=-1).topk(30).indices.tolist())


@pytest.mark.usefixtures("toys")
def test_toys_in_a_chat_and_in_eval(tmp_path: Path) -> None:
    text = "The mill on the river is run by Ada, who came from Velgate. " * 9
    chat = minikv.load(
        policy="toyvalues+first+oldest", decode="toystep", budget=72, device="cpu", power=2.0
    )
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
    arguments += ["--policy", "toyvalues+firsts,adakv+oldest", "--decode", "toystep"]
    ran = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    assert "toyvalues+firsts" in json.dumps(json.loads(out.read_text()))

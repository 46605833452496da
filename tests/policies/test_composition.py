"""Names compose, and what cannot be composed is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small
import torch
from views import build, choose, random_mass, view

from minikv import policies
from minikv.errors import UsageError
from minikv.policies.registry import check_name


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("snapkv+ada", ("snapkv", "ada")),
        ("adakv+pyramid", ("snapkv", "pyramid", "ada")),
        ("h2o+adakv+pyramidkv", ("h2o", "pyramid", "ada")),
        ("kvcrush(h2o)", ("h2o", "kvcrush")),
        ("kvcrush(h2o) + ada", ("h2o", "ada", "kvcrush")),
        ("kvcrush(h2o+ada)+turns", ("h2o", "ada", "kvcrush", "turns")),
        ("kvcrush(proxies)", ("proxies", "kvcrush")),
        ("nacl+critical", ("proxies", "draw", "critical")),
        ("kvcrush+critical", ("snapkv", "kvcrush", "critical")),
        ("kvcrush(adakv)", ("snapkv", "ada", "kvcrush")),
        ("l2+nacl", ("l2", "draw")),
        ("kvzip+uniform", ("kvzip", "uniform")),
        ("kvzip++uniform", ("kvzip", "uniform")),
        ("kvcrush(kvzip+)", ("kvzip", "kvcrush")),
    ],
)
def test_names_compose(name: str, parts: tuple[str, ...]) -> None:
    assert small.parts(name) == parts
    assert build(name).name == name


def test_a_name_is_checked_before_anything_is_made() -> None:
    for name, step in (("adakv", False), ("h2o+ada", False), ("roco", True)):
        check_name(name, step=step)
    for name, step in (("adakw", False), ("h2o+adb", False), ("adakv", True)):
        with pytest.raises(UsageError):
            check_name(name, step=step)


def test_a_plus_may_end_a_name() -> None:
    for name, plus in (("kvzip+uniform", False), ("kvzip++uniform", True)):
        assert build(name).scorer.plus is plus  # type: ignore[attr-defined]


def test_a_composed_method_has_the_step_policy_of_its_first_part() -> None:
    """kvzip keeps a whole cache for any question: nothing leaves while an answer is written."""
    assert policies.default_step("kvzip+ada") == policies.default_step("kvzip") == "none"
    assert policies.default_step("h2o+ada") == "h2o"
    assert policies.default_step("snapkv+ada") == policies.default_step("snapkv")


def test_preset_names_are_rows_of_the_same_table() -> None:
    mass = random_mass()
    for preset, spelled in (("adakv", "snapkv+ada"), ("kvcrush", "kvcrush(snapkv)")):
        assert torch.equal(
            choose(build(preset), view(mass, 32), 200), choose(build(spelled), view(mass, 32), 200)
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h2o+snapkv", "'snapkv' also says what a token is worth"),
        ("foo+ada", "'foo' does not say what a token is worth"),
        ("full+ada", "'full' does not say"),
        ("h2o+adaa", "'adaa' is not a part"),
        ("nacl+kvcrush", "draw and kvcrush answer the same question"),
        ("kvcrush()", "unknown policy"),
        ("h2o+", "'' is not a part"),
        ("+", "'' does not say"),
        ("queryspan", 'queryspan is gone: `policy="global-span"`'),
        ("adakv+queryspan", 'queryspan is gone: `policy="global-span"`'),
    ],
)
def test_what_cannot_be_composed_is_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        policies.find(name)
    assert says in str(refused.value)


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UsageError) as refused:
        policies.find("snapvk")
    assert "snapkv" in refused.value.hint
    with pytest.raises(UsageError, match="works only as `decode`") as refused:
        policies.find("roco")
    assert "`stride=32` makes roco" in refused.value.hint  # `minikv plan` suggests that


def test_the_published_setting_of_expected_attention_has_a_name() -> None:
    """kvpress' scores of ExpectedAttention: epsilon 0.01, 4 sinks, Ada-KV's budgets by its rule."""
    made = build("ada-expected")
    spelled = build(
        "expected+ada", {"epsilon": 0.01, "recent": 0, "alloc": "floor", "alpha": 0.2, "sinks": 4}
    )
    assert (made.scorer, made.heads) == (spelled.scorer, spelled.heads)
    changed = build("ada-expected", {"epsilon": 0.5}).scorer
    assert getattr(changed, "epsilon", None) == 0.5


def test_one_budget_for_all_layers_stays_until_another_way_to_share_is_asked_for() -> None:
    shared = [name for name in policies.prompt_names() if "global" in small.parts(name)]
    assert shared
    for name in shared:
        assert "global" in small.parts(f"{name}+turns")
        assert "global" not in small.parts(f"{name}+ada")
        assert "global" not in small.parts(f"{name}+uniform")


@pytest.mark.parametrize("pinned", [0, 3])
def test_what_is_preferred_counts_among_a_heads_least_rows(pinned: int) -> None:
    """Each head has two preferred rows that are not pinned, the first right behind those that are.
    With these it has the two rows that it needs, and all others go to the head that is best."""
    key = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    key[1] *= 100.0  # of large norm: worth nothing
    seen = replace(view(torch.zeros(2, 1, 12)), key=lambda: key, turns=[(pinned, 12)])
    policy = build("l2+ada+turns", {"alpha": 0.0, "sinks": 0, "recent": 0, "edge": 1})
    kept = policy.keep(seen, 2 * pinned + 4 + 3, pinned, 2)
    assert kept.sum(1).tolist() == [pinned + 2 + 3, pinned + 2]
    assert bool(kept[:, [*range(pinned + 1), 11]].all())

"""The names that the registry knows, what each policy's file says under them, and what composes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import typing
from dataclasses import replace
from typing import Any

import pytest
import small
import torch
from refusals import refused
from tables import table
from views import build, choose, random_mass, view

from minikv import policies
from minikv.policies import base, find, registry
from minikv.policies.options import Method, Option, options_of, read_options


def test_the_registry_names_what_the_files_declare_and_nothing_else() -> None:
    found = [
        (kind, one.name, file)
        for _, file, _ in pkgutil.iter_modules(policies.__path__)
        for one in vars(importlib.import_module(f"minikv.policies.{file}")).values()
        if getattr(one, "__module__", "").endswith(f".{file}") or isinstance(one, Method)
        for kind in ("method" if isinstance(one, Method) else "part",)
        if kind == "method" or (hasattr(one, "axis") and "name" in vars(one))
    ]
    known = [("method", name) for name in registry.method_names()]
    known += [("part", name) for name in (*registry.SCORERS, *registry.OTHER_PARTS)]
    assert sorted(map(str, found)) == sorted(
        str((kind, name, registry.FILES.get(name, name))) for kind, name in known
    )


def test_the_names_of_a_flag_are_of_methods_that_it_can_use() -> None:
    for method in registry.methods():
        assert (method.name in registry.PROMPT) == (bool(method.parts) or method.name == "full")
        assert (method.name in registry.STEP) == (method.rule is not None or method.name == "none")
        assert (method.name in ("full", "none")) == (method.when == "never")
        assert method.rule is None or method.rule().name == method.name
    assert {part.axis for part in map(registry.part, registry.SCORERS)} == {"scorer"}
    told = {method.name: method.stride for method in registry.methods()}
    assert told["h2o"].startswith("after each block")
    assert told["hashevict"].startswith("before each block")
    assert not told["snapkv"]
    assert "scorer" not in {part.axis for part in map(registry.part, registry.OTHER_PARTS)}


DIVIDED = """
name | shape | second
full         | -                            | safe
roco         | each head's own cap          | fades
snapkv       | uniform                      | needs recall
h2o          | uniform                      | fades
l2           | uniform                      | safe
pyramidkv    | per layer                    | needs recall
l2+pyramid   | per layer                    | safe
adakv        | per head                     | needs recall
h2o+ada      | per head                     | fades
ada-pyramid  | per layer and per head       | needs recall
global-span  | one for all layers and heads | needs recall
kvzip        | one for all layers and heads | safe
"""


@table(DIVIDED)
def test_how_a_budget_is_divided_and_a_second_question_answered(
    name: str, shape: str, second: str
) -> None:
    info = find(name, step=name == "roco")
    assert (info.shape, info.second) == (shape, second)


RULES = [method.rule for method in registry.methods() if method.rule is not None]


@pytest.mark.parametrize("cls", [*registry.parts(), *RULES], ids=lambda cls: cls.__name__)
def test_an_option_has_the_type_that_its_field_declares(cls: type) -> None:
    """And every field of a part is an option; one of a step policy may be a fact of it."""
    deep = [one for one in cls.__mro__ if one.__module__.startswith("minikv")]
    assert len(deep) <= 2, "no inheritance deeper than one"
    kinds = typing.get_type_hints(cls)
    options = {option.name: type(option.default) for option in options_of(cls)}
    assert options == {name: kinds[name] for name in options}
    taken = {*inspect.signature(cls).parameters} - {*options}
    facts = {*typing.get_type_hints(base.StepPolicy), "matrices"}
    assert taken <= (facts if issubclass(cls, base.StepPolicy) else set())


LOOKS: dict[str, object] = {"kernel": 7, "pooling": "max", "group": "mean"}
SNAPKV: dict[str, object] = {"window": 32, "sinks": 0, **LOOKS}
ADA: dict[str, object] = {"alpha": 0.2, "rounding": "exact", "normalize": False, "alloc": "blend"}
PYRAMID: dict[str, object] = {"beta": 20, "line": "exact", "rounding": "exact"}
EXPECTED: dict[str, object] = {"sinks": 4, "future": 512, "covariance": True, "value_norm": True}
KVZIP: dict[str, object] = {"sinks": 4, "chunk": 2000, "overlap": 8, "said": 0.25}
ENDS: dict[str, object] = {"sinks": 4, "recent": 10}
DRAWN: dict[str, object] = {"random": 0.35, "draw": "score", "temperature": 1.0}
STANDS: dict[str, object] = {"anchor": "mean", "ranks": "ends"}
ALIKE: dict[str, object] = {"threshold": 0.5, "softmax": "all", "group": "mean"}
DEFAULTS: dict[str, dict[str, object]] = {
    "full": {},
    "none": {},
    "streaming": {"sinks": 4},
    "snapkv": SNAPKV,
    "pyramidkv": SNAPKV | PYRAMID,
    "adakv": SNAPKV | ADA,
    "ada-pyramid": SNAPKV | PYRAMID | ADA,
    "nacl": {"proxies": 32, "sinks": 4, "non_causal": False, "seed": 0} | DRAWN,
    "kvcrush": SNAPKV | {"sinks": 4, "ratio": 0.25, "bits": "kv", "seed": 0} | STANDS,
    "h2o": {"recent_share": 0.5, "sinks": 0, "window": 0, "average": False},
    "tova": {"per_head": False, "protect_newest": True, "sinks": 0},
    "l2": ENDS | {"skip": 0},
    "keydiff": ENDS | {"block": 0},
    "expected": EXPECTED | {"recent": 10, "epsilon": 0.0},
    "ada-expected": EXPECTED | ADA | {"recent": 0, "epsilon": 0.01, "alloc": "floor"},
    "kvzip": KVZIP | {"plus": False},
    "kvzip+": KVZIP | {"plus": True},
    "defensive": {"window": 32, "kernel": 5, "values": "plain", "sure": 0.0, "sinks": 4},
    "global-span": ENDS | {"window": 32, "recent": 4, "decay": 0.995, "across": 0.6, "first": 0},
    "dropkv": SNAPKV | {"pooling": "avg", "epsilon": 1e-6},
    "chunkkv": SNAPKV | {"chunk": 10, "kernel": 1},
    "random": ENDS | {"seed": 0},
    "roco": ENDS | {"scope": 0.3, "scope_prompt": 0.1, "pool": 7, "lead": 100.0},
    "scissorhands": ENDS | {"history": 400},
    "hashevict": ENDS | {"bits": 16, "hash_with": "query", "seed": 0},
    "rkv": {"sinks": 0, "window": 8, "buffer": 128, "kernel": 7, "mix": 0.07} | ALIKE,
    "vase": {"sinks": 4, "window": 32, "buffer": 64, "large": 0.25, "kernel": 5, "seed": 0},
    "triattention": ENDS | {"buffer": 128, "future": 65536, "norm": True},
}
"""Of every option of every policy: a default changes here, in the docs and by a measurement."""


@pytest.mark.parametrize("name", registry.method_names())
def test_defaults(name: str) -> None:
    found = {option.name: option.default for option in registry.method(name).options}
    assert found == DEFAULTS[name]


COMPOSED = ("ada-expected+turns", "ada-expected+critical", "kvcrush(expected)", "expected+ada")


def cards() -> list[Any]:
    """Of every policy and part: what it says of paper and release, and its options."""
    infos = [*registry.methods(), *map(find, COMPOSED)]
    found = [pytest.param(p.differences, p.options, id=f"policy {p.name}") for p in infos]
    parts = registry.parts()
    return [*found, *(pytest.param(p.differs, options_of(p), id=f"part {p.name}") for p in parts)]


@pytest.mark.parametrize(("lines", "options"), cards())
def test_no_card_says_a_default_that_it_does_not_have(
    lines: tuple[str, ...], options: tuple[Option, ...]
) -> None:
    """`option=value` is what minikv does; in parentheses or after a semicolon, it is what makes it
    do as they do. The numbers of protected tokens stand before the semicolon."""
    values = {option.name: option.default for option in options}
    for line in lines:
        first, _, last = re.sub(r"\([^)]*\)", "", line).partition("; ")
        ours, theirs = first, " ".join([*re.findall(r"\([^)]*\)", line), last])
        for said, same in ((ours, True), (theirs, False)):
            for name, value in re.findall(r"\b([a-z_]+)=([\w.]*\w)", said):
                if name in values:
                    read = read_options("", options, {name: value})[name]
                    assert (read == values[name]) == same, line
        for word, name in (("first", "sinks"), ("newest", "recent")):
            found = re.search(rf"\b{word} (\d+)\b.* stay", line.partition(";")[0])
            assert found is None or int(found[1]) == values[name], line


def test_a_preset_leaves_out_what_is_said_of_other_defaults() -> None:
    lines = " ".join(find("ada-expected").differences)
    for words in ("newest 10", "epsilon", "blend"):
        assert words in " ".join(find("expected+ada").differences)
        assert words not in lines
    assert "alpha=0.2" in lines  # a default that it shares
    kvcrush = find("kvcrush(expected)")  # with sinks=4, which is what expected has, too
    assert "newest 10" in " ".join(kvcrush.differences)


@pytest.mark.parametrize("info", [p for p in registry.methods() if p.preset], ids=lambda p: p.name)
def test_no_line_of_a_part_names_an_option_with_another_default(info: Method) -> None:
    for part in info.parts:
        own = {option.name: option.default for option in options_of(part)}
        other = {name for name in own if info.preset.get(name, own[name]) != own[name]}
        for line in part.differs:
            named = set(re.findall(r"[a-z_]\w+", " ".join(re.findall(r"`[^`]+`|\w+=", line))))
            assert not (named & other) or line not in info.differences, line


# -- names that are composed ----------------------------------------------------------------------


COMPOSE = """
name | parts
snapkv+ada              | snapkv ada
adakv+pyramid           | snapkv pyramid ada
h2o+adakv+pyramidkv     | h2o pyramid ada
kvcrush(h2o)            | h2o kvcrush
kvcrush(h2o) + ada      | h2o ada kvcrush
kvcrush(h2o+ada)+turns  | h2o ada kvcrush turns
kvcrush(proxies)        | proxies kvcrush
nacl+critical           | proxies draw critical
kvcrush+critical        | snapkv kvcrush critical
kvcrush(adakv)          | snapkv ada kvcrush
l2+nacl                 | l2 draw
kvzip+uniform           | kvzip uniform
kvzip++uniform          | kvzip uniform
kvcrush(kvzip+)         | kvzip kvcrush
"""


@table(COMPOSE)
def test_names_compose(name: str, parts: str) -> None:
    made = build(name)
    assert small.parts(name) == tuple(parts.split())
    assert made.name == name
    if parts == "kvzip uniform":  # a plus may end a name
        assert made.scorer.plus is ("++" in name)  # type: ignore[attr-defined]


def test_a_name_is_checked_before_anything_is_made() -> None:
    for name, step in (("adakv", False), ("h2o+ada", False), ("roco", True)):
        registry.check_name(name, step=step)
    for name, step in (("adakw", False), ("h2o+adb", False), ("adakv", True)):
        refused("", registry.check_name, name, step=step)


def test_a_composed_method_has_the_step_policy_of_its_first_part() -> None:
    """kvzip keeps a whole cache for any question: nothing leaves while an answer is written."""
    assert policies.default_step("kvzip+ada") == policies.default_step("kvzip") == "none"
    assert policies.default_step("h2o+ada") == "h2o"
    assert policies.default_step("snapkv+ada") == policies.default_step("snapkv")


def test_preset_names_are_rows_of_the_same_table() -> None:
    mass = random_mass()
    for preset, spelled in (("adakv", "snapkv+ada"), ("kvcrush", "kvcrush(snapkv)")):
        one, two = (choose(build(name), view(mass, 32), 200) for name in (preset, spelled))
        assert torch.equal(one, two)


REFUSED = """
name | says | hint
h2o+snapkv      | 'snapkv' also says what a token is worth     |
foo+ada         | 'foo' does not say what a token is worth     |
full+ada        | 'full' does not say                          |
h2o+adaa        | 'adaa' is not a part                         |
nacl+kvcrush    | draw and kvcrush answer the same question    |
kvcrush()       | unknown policy                               |
h2o+            | '' is not a part                             |
+               | '' does not say                              |
queryspan       | queryspan is gone: `policy="global-span"`    |
adakv+queryspan | queryspan is gone: `policy="global-span"`    |
snapvk          | unknown policy                               | snapkv
roco            | works only as `decode`                       | `stride=32` makes roco
"""
"""The last hint is what `minikv plan` suggests."""


@table(REFUSED)
def test_what_cannot_be_composed_is_refused(name: str, says: str, hint: str) -> None:
    error = refused("", find, name)
    assert says in str(error)
    assert hint in error.hint


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

"""The names that the registry knows, and what each policy's file says under them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import typing
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("name", "shape", "second"),
    [
        ("full", "-", "safe"),
        ("roco", "each head's own cap", "fades"),
        ("snapkv", "uniform", "needs recall"),
        ("h2o", "uniform", "fades"),
        ("l2", "uniform", "safe"),
        ("pyramidkv", "per layer", "needs recall"),
        ("l2+pyramid", "per layer", "safe"),
        ("adakv", "per head", "needs recall"),
        ("h2o+ada", "per head", "fades"),
        ("ada-pyramid", "per layer and per head", "needs recall"),
        ("global-span", "one for all layers and heads", "needs recall"),
        ("kvzip", "one for all layers and heads", "safe"),
    ],
)
def test_how_a_budget_is_divided_and_a_second_question_answered(
    name: str, shape: str, second: str
) -> None:
    info = find(name, step=name == "roco")
    assert (info.shape, info.second) == (shape, second)


def classes() -> list[Any]:
    """The class of every part and rule."""
    rules = [method.rule for method in registry.methods() if method.rule is not None]
    return [*registry.parts(), *rules]


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
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
DEFAULTS: dict[str, dict[str, object]] = {
    "full": {},
    "none": {},
    "streaming": {"sinks": 4},
    "snapkv": SNAPKV,
    "pyramidkv": SNAPKV | PYRAMID,
    "adakv": SNAPKV | ADA,
    "ada-pyramid": SNAPKV | PYRAMID | ADA,
    "nacl": {
        "proxies": 32,
        "sinks": 4,
        "non_causal": False,
        "random": 0.35,
        "draw": "score",
        "temperature": 1.0,
        "seed": 0,
    },
    "kvcrush": SNAPKV
    | {"sinks": 4, "ratio": 0.25, "bits": "kv", "anchor": "mean", "ranks": "ends", "seed": 0},
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
    "rkv": {
        "sinks": 0,
        "window": 8,
        "buffer": 128,
        "kernel": 7,
        "mix": 0.07,
        "threshold": 0.5,
        "softmax": "all",
        "group": "mean",
    },
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

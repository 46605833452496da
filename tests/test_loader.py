"""Settings in, a chat out: what each setting reaches, and what is refused before anything loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import small
import tiny
import torch
from refusals import refused
from torch import Tensor

import minikv
from minikv.cache import kv_cache
from minikv.chat.fitting import USEFUL, Machine
from minikv.engine import threads, warmup
from minikv.kernels import dispatch
from minikv.kernels.dispatch import Kernels
from minikv.kernels.native import build as native
from minikv.kernels.native import choice
from minikv.loader import (
    build,
    output_of,
    packing_of,
    prompt_rows,
    settings_from,
    shape_of,
    workspace,
)
from minikv.models import linear
from minikv.models.errors import ModelError
from minikv.settings import Generation, Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny")


class Progress:
    """Notes what it is told, in order, each kind once; of `say`, the line."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, kind: str) -> Callable[..., None]:
        def note(*given: object) -> None:
            what = str(given[0]) if kind == "say" else kind
            self.told += [] if what in self.told[-1:] else [what]

        return note


# -- what the settings reach ----------------------------------------------------------------------


def test_every_setting_reaches_what_it_is_for(folder: Path) -> None:
    began = perf_counter()
    given: dict[str, Any] = {"policy": "snapkv", "budget": "64", "decode": "tova", "kv": "int8"}
    given |= {"kernels": "torch", "seed": 7, "dtype": "bfloat16", "reuse": "blind"}
    given |= {"fidelity": "off", "system": "be brief", "pin_system": True, "options": {"window": 5}}
    chat = build(Settings(model=str(folder), **given))
    kv, net = chat.engine.kv, chat.engine.network
    assert (kv.rules.prompt.name, kv.rules.step.name) == ("snapkv", "tova")  # type: ignore[union-attr]
    assert kv.rules.prompt.evidence.window == 5  # type: ignore[union-attr]
    assert (kv.state.rows, kv.rules.stride) == (64, 0)
    assert (kv.kv, kv.dtype, kv.ops.name) == (torch.int8, torch.bfloat16, "torch")
    assert net.ops.name == "torch"
    assert kv.output is not None
    assert kv.rotary is net.rotation
    assert (chat.seed, chat.system, chat.pin_system) == (7, "be brief", True)
    assert (chat.reuse, chat.fidelity) == ("blind", False)
    facts = chat.facts
    assert (facts.model, facts.revision) == (str(folder), "")
    assert (facts.device, facts.dtype, facts.kv) == ("cpu", "bfloat16", "int8")
    assert (facts.kernels, facts.weights) == ("torch", "auto")
    assert facts.weight_bytes == net.weight_bytes
    assert 0 < facts.load_s < perf_counter() - began
    assert facts.notes == net.config.notes


def test_how_many_rows_of_a_prompt_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More on processors with tiles, and on GPUs with fast attention in long blocks."""
    for processor, rows in (("amx", 2048), ("avx2", None)):
        monkeypatch.setattr(choice, "processor", lambda processor=processor: processor)
        assert prompt_rows(cuda=False, head_dim=64) == rows
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for there, capability, head_dim, rows in (
        (True, (9, 0), 128, 8192),
        (True, (9, 0), 256, None),
        (True, (8, 0), 128, None),
        (False, (8, 0), 128, None),
    ):
        asked = {"is_available": there, "get_device_capability": capability}
        for name, answer in asked.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        assert prompt_rows(cuda=True, head_dim=head_dim) == rows


def test_auto_is_the_sampling_of_the_models_files(folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "own")
    how = {"temperature": 0.6, "top_k": 7, "top_p": 0.9, "min_p": 0.1}
    for asked, why, want in (
        (True, [], how),
        (False, ["generation_config.json does not"], {"temperature": 0.0}),
    ):
        (own / "generation_config.json").write_text(json.dumps({"do_sample": asked, **how}))
        told: list[str] = []
        with build(Settings(model=str(own), policy="full")) as chat:
            list(chat.ask("Who?", 2, "auto", notice=told.append))
        assert [line[:31] for line in told] == why
        assert chat.report is not None
        assert chat.report.sampling.items() >= want.items()


def test_defaults_are_those_of_the_device_and_a_stride_reads_prompts_in_blocks(
    folder: Path,
) -> None:
    chat = build(Settings(model=str(folder)))
    assert chat.engine.kv.ops.name in ("native", "torch")
    assert chat.engine.network.ops.name == chat.engine.kv.ops.name
    assert chat.facts.kv == "float32"
    assert chat.fidelity
    named = {"policy": "roco", "budget": "64", "stride": 16, "kernels": "torch"}
    rules = build(Settings(model=str(folder), **named)).engine.kv.rules  # type: ignore[arg-type]
    assert (rules.stride, rules.prompt) == (16, None)


# -- what the caller is told ----------------------------------------------------------------------


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize(
    ("kernels", "weights", "compiles", "remarks", "told"),
    [
        ("auto", "auto", False, [], ["weights"]),
        ("auto", "auto", True, [], ["weights", "kernels"]),
        ("auto", "auto", True, ["one", "two"], ["weights", "one", "two", "kernels"]),
        ("auto", "int8", False, [], ["weights"]),
        ("auto", "int8", True, [], ["weights", "kernels", "weights", "kernels"]),
        ("torch", "auto", True, ["one"], ["weights"]),
    ],
)
def test_a_compilation_is_announced(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: bool,
    kernels: str,
    weights: str,
    compiles: bool,
    remarks: list[str],
    told: list[str],
) -> None:
    """After the weights, or when the first matrix is packed, and what there is to say about it
    before."""
    monkeypatch.setattr(native, "compiles", lambda: compiles)
    monkeypatch.setattr(native, "remarks", lambda: remarks)
    monkeypatch.setattr(linear, "lacks", lambda form: "")
    progress: Any = Progress()
    asked = Settings(model=str(folder), weights=weights, kernels=kernels)
    chat = build(asked, progress if heard else None)
    assert progress.told == (told if heard else [])
    if weights == "int8":
        assert (chat.facts.form, chat.facts.dtype) == ("int8", "bfloat16")


def test_prompts_are_remembered_as_those_of_the_models_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same files in another place too, but not of others, and not if that is off."""
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))
    copy = Path(shutil.copytree(folder, tmp_path / folder.name))
    store, again = (build(Settings(model=str(one))).recall.store for one in (folder, copy))
    assert store is not None
    assert again is not None
    assert store.folder == tmp_path / "home" / "cache" / "prompts"
    assert store.limit == 10 << 30
    assert store.identity == again.identity
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    other = build(Settings(model=str(copy))).recall.store
    assert other is not None
    assert other.identity != again.identity
    assert build(Settings(model=str(folder), remember="off")).recall.store is None


# -- devices --------------------------------------------------------------------------------------


def test_triton_without_a_gpu_is_refused_before_anything_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    heard: Any = Progress()
    error = refused("CUDA", build, Settings(model=str(folder), kernels="triton"), heard)
    assert error.exit_code == 2
    assert heard.told == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_kernels_of_a_gpu_are_warmed_up_and_left_where_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Kernels that say they are Triton's, in torch: what the loader does with them."""

    class Named(Kernels):
        name = "triton"

    warmed: list[Any] = []

    def warm(kv: Any, network: Any) -> None:
        warmed.append(network.ops)
        if fails:
            kv.use(Kernels())

    monkeypatch.setattr(kv_cache, "choose", lambda *given: (ours, None))
    monkeypatch.setattr(warmup, "warm", warm)
    for budget, times in (("64", 1), ("auto", 2)):  # auto: with all tokens, and with fewer
        warmed.clear()
        ours = Named()
        chat = build(Settings(model=str(folder), budget=budget))
        # The network has them when it is warmed up.
        assert warmed == [ours] * (1 if fails else times)
        assert fails or chat.engine.network.ops is ours
        assert chat.facts.kernels == ("torch" if fails else "triton")
        assert chat.engine.kv.rules.evicts == (budget == "64")


@pytest.mark.parametrize(("asked", "given"), [(None, []), (0, [0]), (2, [2])])
def test_the_number_of_threads_is_set_where_it_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, given: list[int]
) -> None:
    used: list[int] = []
    monkeypatch.setattr(threads, "use", used.append)
    build(Settings(model=str(folder), kernels="torch", threads=asked))
    assert used == given


# -- packing --------------------------------------------------------------------------------------


def test_packing_chooses_once_and_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """`first` is called before the kernels are chosen, and not before there is a matrix."""
    said: list[str] = []

    def choose(device: Any, kernels: str, head_dim: int, dtype: Any) -> tuple[Kernels, None]:
        said.append(f"choose {device} {kernels} {dtype}")
        return Kernels(), None

    monkeypatch.setattr(dispatch, "choose", choose)
    made = packing_of("auto", lambda: said.append("first"))
    assert said == []
    assert made() is made()
    assert said == ["first", "choose cpu auto torch.bfloat16"]


# -- arguments ------------------------------------------------------------------------------------


def test_fields_of_settings_and_options_of_every_policy_are_arguments(tmp_path: Path) -> None:
    """Of prompt policies, of step policies, and of parts that no method has."""
    options = dict.fromkeys(["window", "alpha", "history", "edge", "buffer"], 3)
    made = settings_from(model=tmp_path, budget=512, seed=4, **options)
    assert made == Settings(model=str(tmp_path), budget="512", seed=4, options=options)


# -- facts of the network -------------------------------------------------------------------------


def test_the_shape_of_a_cache_is_the_models_and_the_output_is_cut_by_query_head(
    folder: Path,
) -> None:
    """Mixed values [H, G, D] through it are what the layer's own matrix makes of them."""
    network = build(Settings(model=str(folder), kernels="torch")).engine.network
    shape = shape_of(replace(network.config, windows=(None, 8, None)))
    assert (shape.layers, shape.kv_heads, shape.heads) == (3, 2, 4)
    assert (shape.head_dim, shape.windows, shape.max_context) == (12, (None, 8, None), 2048)
    mixed = torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = torch.einsum("hgd,hgdc->c", mixed, output_of(network)(1))  # type: ignore[arg-type]
        want = network.layers[1].out(mixed.reshape(1, -1))[0]
    torch.testing.assert_close(found, want)


def test_threads_learn_how_to_wait_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a program that uses the package, too."""
    calls: list[str] = []
    monkeypatch.setattr(threads, "wait_briefly", lambda: calls.append("wait"))
    monkeypatch.setattr("minikv.models.refuse_without_torch", lambda: calls.append("torch"))
    refused("", build, Settings(model=str(tmp_path / "nowhere")), error=ModelError)
    assert calls[:2] == ["wait", "torch"]


def test_what_is_public_is_shown_and_nothing_else() -> None:
    assert set(dir(minikv)) == {"ChatSession", "MinikvError", "TurnReport", "__version__", "load"}
    assert set(dir(minikv)) == set(minikv.__all__)
    with minikv.load() as chat:
        assert isinstance(chat, minikv.ChatSession)
        list(chat.ask("Who?", 2))
        assert isinstance(chat.report, minikv.TurnReport)
        names = dir(chat)
        assert all(hasattr(chat, name) and not name.startswith("_") for name in names)
        assert {"ask", "ask_async", "attach", "report", "undo", "close"} <= set(names)
        assert not {"engine", "guard", "recall", "tokenizer", "template", "facts"} & set(names)
        with pytest.raises(minikv.MinikvError):
            chat.ask("")
    # An answer is as long from Python as on the command line.
    for method in (minikv.ChatSession.ask, minikv.ChatSession.continue_answer):
        assert signature(method).parameters["max_tokens"].default == Generation().max_tokens


# -- what fits ------------------------------------------------------------------------------------


def test_a_tier_in_ram_leaves_less_to_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = build(Settings(model=str(folder), policy="adakv", kernels="torch", device="cpu"))
    kv, kept = chat.engine.kv, list[int]()
    config: Any = chat.engine.network.config  # type: ignore[attr-defined]
    space = partial(workspace, config, itemsize=kv.dtype.itemsize, cuda=False)
    machine = Machine(kv.shape, kv.dtype, kv.kv, space)
    needs = machine.needs(chat.eviction.under(1200), 2000, 8)
    assert needs is not None
    free = 8 * needs[1] // 7 + 8
    monkeypatch.setattr("minikv.models.weights.free_memory", lambda device: free)
    for kind in ("auto", "file", "ram"):
        chat.recall.kind = kind
        kept.append(chat.fit(chat.eviction, 2000, 8))
    assert kept[0] == kept[1] >= 1200
    assert USEFUL <= kept[2] < kept[1]


def test_the_work_space_counts_what_a_gpu_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small.network(layers=2).config
    sizes = []
    for asked in (None, 4096):
        monkeypatch.setattr(
            "minikv.loader.prompt_rows", lambda *, cuda, head_dim, asked=asked: asked
        )
        sizes.append(workspace(config, 100_000, 2, cuda=True))
        packed = workspace(config, 100_000, 2, cuda=True, packed=True)
        matrix = 2 * config.mlp * config.hidden  # gate and up are one
        assert packed - sizes[-1] == 2 * matrix
        ours = [workspace(config, 100_000, 2, cuda=False, packed=form) for form in (True, False)]
        assert ours[0] == ours[1]
    assert sizes[1] > sizes[0]
    for asked, tokens, itemsize, block in (
        # block: bytes of a query for attention to the tokens before a chunk
        (None, 10, 4, 0),
        (4096, 4096, 2, 0),
        (4096, 100_000, 2, 48 * (2 * 4 + 2)),
    ):
        monkeypatch.setattr("minikv.loader.prompt_rows", lambda asked=asked, **_: asked)
        # gate and up, q, k, v twice, attention twice, and four times the residual stream
        chunk = (2 * 64 + 2 * (48 + 2 * 24) + 2 * 48 + 4 * 48) * itemsize + block
        stream = (48 + 2 * 8) * itemsize
        found = workspace(config, tokens, itemsize, cuda=True)
        assert found == min(tokens, 4096) * chunk + tokens * stream + 4 * 97

"""The matrices of a network in every form, against the values that they say they multiply by."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import peaks
import pytest
import torch
from checkpoints import Spec, write
from loaded import refused
from pairwise import some_by_day
from torch import Tensor
from typed import invoke

import minikv
import minikv.models as models
from minikv.cache.attend import DenseAttend
from minikv.cli.bench import networks as random_models
from minikv.models import linear, weights
from minikv.models.checkpoint import Checkpoint
from minikv.models.config import ModelConfig
from minikv.models.linear import Int4, Int8, Linear, Plain, kept, kept_bytes
from minikv.models.llama import Llama
from minikv.models.weights import load_network

SHAPES = [(67, 48), (130, 192), (1, 128), (64, 32), (200, 384), (33, 50), (5, 7)]
ROWS = [1, 2, *linear.FEW.values(), *(few + 1 for few in linear.FEW.values()), 40]
PACKED = {"int8": Int8, "int4": Int4}
ON_GPU = ["int8 for a GPU", "int4 for a GPU"]


def packed(plain: Plain, form: str) -> Linear:
    """In this form; what is for a GPU is computed here by torch."""
    if form in ON_GPU:
        return kept(plain, form.partition(" ")[0], packing=None)
    return kept(plain, form)


def matrix(rows: int, columns: int, form: str = "auto", bias: bool = True) -> Linear:
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator).bfloat16()
    added = torch.randn(rows, generator=generator).bfloat16() if bias else None
    return packed(Plain(weight, added), form)


def right(made: Linear, x: Tensor, got: Tensor) -> bool:
    """Is `got` x @ dense.T + bias within the rounding of bfloat16: of the result, before and after
    the bias, and of each weight?"""
    bias, dense, x = made.bias, made.dense().float(), x.float()  # type: ignore[attr-defined]
    want, added = x @ dense.T, 0 if bias is None else bias.float()
    room = 2**-8 * (2 * want.abs() + (want + added).abs()) + 2**-9 * (x.abs() @ dense.abs().T)
    return bool(((got.float() - want - added).abs() <= room).all())


@pytest.fixture(params=[(True, True), (True, False), (False, False)])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that multiplies tiles of bfloat16, one that multiplies bfloat16, and an older one."""
    products, tiles = request.param
    monkeypatch.setattr(linear, "bf16_products", lambda: products)
    monkeypatch.setattr(linear, "has_tiles", lambda: tiles)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("form", ["auto", "int8", "int4", *ON_GPU])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_products_are_those_of_the_dense_values(shape: tuple[int, int], form: str) -> None:
    for bias in (True, False):
        made = matrix(*shape, form, bias)
        assert made.dense().shape == shape
        if form not in ON_GPU:
            assert made.nbytes == kept_bytes(*shape, form, 2) + 2 * shape[0] * bias
        for rows in ROWS:
            x = torch.randn(rows, 2 * shape[1]).bfloat16()[:, : shape[1]]  # not contiguous
            got = made(x)
            assert got.shape == (rows, shape[0])
            assert got.dtype == torch.bfloat16
            assert right(made, x, got)
            room = torch.full((rows + 3, shape[0]), 7.0, dtype=torch.bfloat16)
            assert right(made, x, made(x, room))
            assert (room[rows:] == 7).all()


def test_from_so_many_rows_on_float32_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor that multiplies bfloat16, but slowly."""
    monkeypatch.setattr(linear, "bf16_products", lambda: True)
    noted = Mock(wraps=linear._by_blocks)
    monkeypatch.setattr(linear, "_by_blocks", noted)
    made = matrix(130, 192)
    assert isinstance(made, Plain)
    with torch.no_grad():
        for rows in (None, 9):
            made.float_rows = rows
            for t in (1, 2, 8, 9, 40):
                x = torch.randn(t, 192).bfloat16()
                assert right(made, x, made(x))
    assert [(len(call.args[0]), call.kwargs) for call in noted.call_args_list] == [
        (rows, {"native": False}) for rows in (9, 40)
    ]


@torch.no_grad()
@pytest.mark.parametrize("form", ["auto", "int8", "int4"])
def test_small_blocks_give_the_same(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "bf16_products", lambda: False)
    x, whole = torch.randn(40, 192).bfloat16(), matrix(200, 192, form)
    monkeypatch.setattr(linear, "BLOCK", 192 * 64)
    monkeypatch.setattr(linear, "PACKED", 1)  # tiles
    for blocks in (linear.blocks, linear._packed_blocks):
        assert len(list(blocks(torch.Size((200, 192))))) == 4
    assert torch.equal(matrix(200, 192, form).dense(), whole.dense())
    assert right(whole, x, whole(x))


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("form", ["auto", "int8", "int4"])
def test_memory_used_again_gives_the_same(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several threads at once, over matrices of several sizes and blocks."""
    monkeypatch.setattr(linear, "BLOCK", 64 * 192)
    cases = []
    with torch.no_grad():
        for i, (rows, columns) in enumerate([(130, 192), (200, 384), (64, 32), (300, 192)]):
            made = matrix(rows, columns, form)
            x = torch.randn(40, columns, generator=torch.Generator().manual_seed(i)).bfloat16()
            cases.append((made, x, made(x)))

    def same(number: int) -> bool:
        with torch.inference_mode():
            ours = cases[number:] + cases[:number]
            return all(torch.equal(made(x), want) for made, x, want in ours)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, [*range(4)] * 5))


@pytest.mark.parametrize("form", ["int8", "int4", *ON_GPU])
def test_a_value_is_at_most_half_a_step_off(form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 256, generator=generator).mul_(0.02).bfloat16()
    made = packed(Plain(weight), form)
    values = weight.float().view(96, 2 if "int4" in form else 1, -1)
    steps = 15 if "int4" in form else 254
    if "int8" in form:
        step = 2 * values.abs().amax(2, keepdim=True) / steps
    else:
        step = (values.amax(2, keepdim=True) - values.amin(2, keepdim=True)) / steps
    off = (made.dense().float().view_as(values) - values).abs()
    # Scale, offset and value are rounded to bfloat16 as well.
    slack = 2**-7 * values.abs().amax(2, keepdim=True)
    assert (off <= step / 2 + slack).all()
    assert off.max() > step.min() / 8  # it is not just a copy


def test_the_layout_of_four_bits_for_a_gpu() -> None:
    """Byte i of a group: column i below, column group / 2 + i above."""
    steps = torch.cat((torch.arange(16), 15 - torch.arange(16)))  # scale 1, offset 0
    made = packed(Plain((steps.float() - 8)[None].bfloat16()), "int4 for a GPU")
    assert isinstance(made, Int4)
    assert made.scales.flatten().tolist() == [1.0, 0.0]
    assert made.weights[0].tolist() == [i | (15 - i) << 4 for i in range(16)]


def test_rows_of_zeros_and_extremes_survive() -> None:
    weight = torch.zeros(64, 128, dtype=torch.bfloat16)
    weight[1], weight[2, 5], weight[3] = 3e38, -1.0, 1e-38
    for form in ("int8", "int4"):
        values = kept(Plain(weight), form).dense().float()
        assert values.isfinite().all()
        assert not values[0].any()
        assert values[2, 5] == -1


def test_which_sizes_stay_plain() -> None:
    assert isinstance(matrix(64, 50, "int8"), Plain)  # torch's kernel would read beyond the row
    assert isinstance(matrix(64, 48, "int8"), Int8)
    assert isinstance(matrix(64, 48, "int4"), Plain)
    for columns, group in ((256, 128), (192, 64), (96, 32)):
        made = matrix(64, columns, "int4")
        assert isinstance(made, Int4)
        assert made.group == group
    assert isinstance(matrix(64, 128, "plain"), Plain)


@torch.no_grad()
def test_int4_without_a_known_layout_still_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    made = matrix(70, 128, "int4")
    before = made.dense()
    monkeypatch.setattr(linear, "half_tile", lambda: None)
    assert torch.equal(made.dense(), before)
    x = torch.randn(40, 128).bfloat16()
    assert right(made, x, made(x))


# -- loading --------------------------------------------------------------------------------


def stored(folder: Path, spec: Spec) -> tuple[Checkpoint, ModelConfig]:
    """A checkpoint in bfloat16."""
    write(spec, folder, torch.bfloat16)
    return Checkpoint.open(folder), ModelConfig.from_folder(folder)


def logits(net: Llama, count: int = 24) -> Tensor:
    ids = torch.arange(count) % net.config.vocab
    kv = DenseAttend(net.config.windows)
    net.forward(ids, kv)
    return net.forward(ids[:1], kv)


WIDE = Spec(hidden=64, heads=4, kv_heads=2, head_dim=16, extra={"intermediate_size": 96})


@pytest.mark.parametrize("layout", ["hf", "sharded", "original"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_as_read_is_packed_afterwards(form: str, layout: str, tmp_path: Path) -> None:
    biased = {"bias": True, "mlp_bias": True} if layout == "hf" else {}
    checkpoint, config = stored(tmp_path, replace(WIDE, layout=layout, **biased))
    plain = load_network(checkpoint, config)
    made = load_network(checkpoint, config, form=form)
    assert made.config.notes == plain.config.notes
    for one, two in zip(plain.layers, made.layers, strict=True):
        for slot in ("qkv", "out", "gate_up", "down"):
            whole, packed = getattr(one, slot), getattr(two, slot)
            assert isinstance(packed, PACKED[form])
            assert torch.equal(packed.dense(), kept(whole, form).dense())
            assert packed.bias is whole.bias is None or torch.equal(packed.bias, whole.bias)
            setattr(one, slot, Plain(packed.dense(), whole.bias))
    assert torch.equal(made.head.dense(), plain.head.dense())
    assert made.weight_bytes < plain.weight_bytes
    assert made.weight_bytes == weights.weight_bytes(config, torch.bfloat16, form)
    want, got = logits(plain), logits(made)  # by the same values
    assert (got - want).abs().max() <= 0.03 * want.abs().max()


HEADS = ["int8+head", "int4+head"]


def near(got: Tensor, x: Tensor, values: Tensor) -> bool:
    """Is `got` x @ values.T of float32, but for the rounding of the result to bfloat16?"""
    x, values = x.float(), values.float()
    want = x @ values.T
    room = 2**-8 * want.abs() + 1e-5 * (x.abs() @ values.abs().T)
    return bool(((got - want).abs() <= room).all())


@pytest.mark.parametrize("layout", ["hf", "sharded", "original"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("form", HEADS)
@torch.inference_mode()
def test_logits_of_a_packed_head_are_those_of_its_values(
    form: str, tied: bool, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "PACKED", 1)  # read and packed in three blocks
    checkpoint, config = stored(tmp_path, replace(WIDE, tied=tied, layout=layout, vocab=131))
    told = Mock()
    made = load_network(checkpoint, config, form=form, progress=told)
    plain = load_network(checkpoint, config, form=form.removesuffix("+head"))
    assert isinstance(made.layers[0].qkv, PACKED[form.removesuffix("+head")])
    head = made.head
    assert isinstance(head, Int8)
    assert torch.equal(head.dense(), kept(Plain(plain.head.dense()), "int8").dense())
    (start, total), *_, last = (call.args for call in told.call_args_list)
    assert (start, last) == (0, (total, total))
    assert total > 0
    assert made.weight_bytes == weights.weight_bytes(config, torch.bfloat16, form)
    saved = head.dense().nbytes - head.nbytes
    assert made.weight_bytes == plain.weight_bytes - saved < plain.weight_bytes
    if tied:
        assert made.embedding is head
        plain.embedding = head.dense().contiguous()
    else:
        assert torch.equal(made.embedding, plain.embedding)  # type: ignore[arg-type]
    ids = torch.arange(24) * 5
    states = made.hidden(ids, DenseAttend((None, None)))
    assert torch.equal(states, plain.hidden(ids, DenseAttend((None, None))))
    assert near(made.logits(states), states, head.dense())
    exact = head.weights.float() * head.scales.float()[:, None]
    plain.head = Plain(torch.eye(64, dtype=torch.bfloat16))  # its logits: the last token's state
    one, two = DenseAttend((None, None)), DenseAttend((None, None))
    for part in (ids, ids[3:4], ids[7:8]):  # a prompt, and steps
        assert near(made.forward(part, one)[None], plain.forward(part, two)[None], exact)


def test_a_head_that_is_stored_wider_is_packed_as_bfloat16(tmp_path: Path) -> None:
    write(replace(WIDE, tied=True), tmp_path)
    checkpoint, config = Checkpoint.open(tmp_path), ModelConfig.from_folder(tmp_path)
    made = load_network(checkpoint, config, dtype=torch.bfloat16, form="int4+head")
    plain = load_network(checkpoint, config, dtype=torch.bfloat16)
    assert torch.equal(made.head.dense(), kept(Plain(plain.head.dense()), "int8").dense())
    assert not torch.equal(made.head.dense(), plain.head.dense())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_head_with_odd_rows_stays_plain(tied: bool, tmp_path: Path) -> None:
    spec = Spec(tied=tied, hidden=40, heads=4, kv_heads=2, head_dim=16)
    checkpoint, config = stored(tmp_path, spec)
    made = load_network(checkpoint, config, form="int4+head")
    assert made.config.notes[-2:] == (
        "int4 needs rows of a multiple of 32: q, k, v (rows of 40), gate, up (rows of 40), down "
        "(rows of 56) stay in bfloat16",
        "int8 needs rows of a multiple of 16: head (rows of 40) stay in bfloat16",
    )
    assert made.weight_bytes == weights.weight_bytes(config, torch.bfloat16, "int4+head")
    assert torch.equal(made.head.dense(), load_network(checkpoint, config).head.dense())
    assert (made.head.dense() is made.embedding) == tied
    assert isinstance(made.layers[0].qkv, Plain)


@pytest.mark.parametrize(
    ("number", "length"), some_by_day([(1, 7000), (0, 32_000)], (1, 7000).__eq__)
)
def test_the_bundled_model_answers_with_a_head_of_eight_bits(number: int, length: int) -> None:
    """About its document: the beginning, which has the answer, by day, and all of it at night."""
    chat = minikv.load(policy="full", weights="int8+head", device="cpu")
    net = chat.engine.network
    assert isinstance(net, Llama)
    assert net.embedding is net.head
    text = (models.BUNDLED / "sample.txt").read_text()[:length]
    chat.attach(text)
    asked = json.loads((models.BUNDLED / "questions.json").read_text())[number]
    assert asked["answer"] in text
    assert "".join(chat.ask(asked["question"], max_tokens=8)) == asked["answer"]
    assert chat.report is not None
    assert chat.report.weights == "int8+head"


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    cuda, fp32 = torch.device("cuda"), torch.float32
    sizes = random_models.llama(1, 64, 4, 2, 16, 128, 256)
    for form, device, dtype in (
        *((form, cpu, bf16) for form in ("int2", "auto+head", "int8+")),
        *((form, cpu, fp32) for form in ("int4", "int8+head", "int4+head")),
        ("int8", cuda, fp32),
        ("int4+head", cuda, torch.float16),
    ):
        error = refused(partial(weights.check_form, form, device, dtype, sizes), form, code=2)
        assert error.hint
    monkeypatch.setattr(weights, "lacks", lambda form: "no kernel" if form == "int4" else "")
    weights.check_form("int8", cpu, bf16, sizes)
    weights.check_form("int8+head", cpu, bf16, sizes)
    for form in ("int4", "int4+head"):
        refused(partial(weights.check_form, form, cpu, bf16, sizes), "no kernel", code=2)
        weights.check_form(form, cuda, bf16, sizes)  # there torch's operators can unpack
    monkeypatch.setattr(weights, "lacks", lambda form: "no kernel" if form == "int8" else "")
    weights.check_form("int4", cpu, bf16, sizes)
    with_head = partial(weights.check_form, "int4+head", cpu, bf16, sizes)
    refused(with_head, '"int4+head"`: no kernel', code=2)  # the head is in eight bits
    for form in ("int8", "int8+head", "int4+head"):
        assert models.dtype_of("auto", torch.float32, cpu, form) == bf16


def test_a_missing_kernel_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear.lacks("auto") == ""
    odd = torch.full((1, 128), float("nan"), dtype=torch.bfloat16)
    for broken, word in ((Mock(side_effect=RuntimeError("no")), "has no"), (Mock(), "wrongly")):
        broken.return_value = odd
        monkeypatch.setattr(torch, "_weight_int8pack_mm", broken)
        assert word in linear.lacks.__wrapped__("int8")


LAYERS = {"layers": 20_000, "windows": (None,) * 20_000}
WORDS = {"vocab": 20_000_000}


@pytest.mark.parametrize(
    ("changes", "free", "form", "lacking", "offered"),
    [
        (LAYERS, "int8", "auto", "", ["int8", "int4"]),
        (LAYERS, "int4", "int8", "", ["int4"]),
        (LAYERS, "int8", "auto", "int4", ["int8"]),
        (WORDS, "int8+head", "auto", "", ["int8+head", "int4+head"]),
        (WORDS, "int4+head", "auto", "", ["int4+head"]),
        (WORDS, "int4+head", "auto", "int8", []),  # which the head would be
        (WORDS, "int4+head", "auto", "int4", []),
        (WORDS, "int4+head", "int8+head", "", ["int4+head"]),
        (WORDS, "", "auto", "", []),
    ],
)
def test_the_hint_names_the_forms_that_fit(
    changes: Any, free: str, form: str, lacking: str, offered: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """The head is packed only if packing the layers is not enough. What this processor cannot pack
    is not offered."""
    monkeypatch.setattr(weights, "lacks", lambda form: "it does" if form == lacking else "")
    _, config = stored(tmp_path, WIDE)
    config = replace(config, **changes)
    room = weights.loading_bytes(config, torch.bfloat16, free) if free else 1 << 20
    monkeypatch.setattr(weights, "free_memory", lambda device: room)
    check = partial(weights._check_room, config, torch.device("cpu"), torch.bfloat16)
    error = refused(lambda: check(form), code=4)
    assert re.findall(r'weights="(.*?)"` would need', error.hint) == offered
    if free:
        check(free)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("layers", some_by_day([6, 8], lambda layers: layers == 6))
def test_packing_never_holds_a_second_copy(layers: int, tmp_path: Path) -> None:
    """170 MB of bfloat16 in layers by day, 230 at night, int4: the peak is the packed weights and
    one matrix's work."""
    plain = peaks.write(tmp_path, layers, 1000)
    made = peaks.loading(tmp_path, "bfloat16", "int4")
    assert made.size < plain / 3
    assert made.grown < made.needs + weights.STAGING
    assert made.needs + weights.STAGING < plain  # else this would say nothing


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_packed_head_is_never_beside_its_bfloat16(tied: bool, tmp_path: Path) -> None:
    """A vocabulary of 38 MB in bfloat16, saved by transformers and read in blocks of a MB."""
    spec = replace(WIDE, tied=tied, hidden=256, head_dim=64, vocab=75_000)
    write(spec, tmp_path, torch.bfloat16)
    made = peaks.loading(tmp_path, "bfloat16", "int8+head", 1 << 18)
    head = 75_000 * 256
    assert made.size < (1.1 if tied else 3.1) * head
    flags = ("--tokens", "100", "--weights", "int8+head", "--device", "cpu", "--json")
    planned = json.loads(invoke("plan", "-m", str(tmp_path), *flags).stdout)
    assert (planned["weights"], planned["kept"]) == (made.size, "int8+head")
    slack = 8 << 20
    assert made.grown < made.needs + slack
    assert made.needs + slack < made.size + 2 * head  # else this would say nothing


@pytest.mark.parametrize("capability", some_by_day(["default", "avx2", ""], bool))
def test_int4_is_right_or_refused_whatever_the_processor_can(capability: str) -> None:
    """The packed layout differs; a wrong guess about it gave garbage from 17 rows on."""
    script = """
import sys
import torch
# It is asked for when torch first computes, which the process that forks this one has not done.
assert sys.argv[1] != "default" or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
from minikv.models import linear
made = torch.Generator().manual_seed(1)
weight = torch.randn(192, 128, generator=made)
matrix = linear.kept(linear.Plain(weight.bfloat16()), "int4")
for rows in (1, 4, 40):
    x = torch.randn(rows, 128, generator=made)
    got, want = matrix(x.bfloat16()).float(), x @ weight.T
    assert float((got - want).norm() / want.norm()) < 0.2, rows
assert float((matrix.dense().float() - weight).norm() / weight.norm()) < 0.2
assert linear.lacks("int4") == "" == linear.lacks("int8")
"""
    chosen = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
    run = forked.run(capability, env=chosen, code=script)
    assert run.code == 0, run.err


def test_two_threads_leave_the_products_of_torch_as_they_were(monkeypatch: Any) -> None:
    monkeypatch.setattr(linear, "has_tiles", lambda: False)
    before = torch._C._get_mkldnn_enabled()
    matrix, x = linear.Plain(torch.randn(512, 256).bfloat16()), torch.randn(1, 256).bfloat16()

    def work(_: int) -> None:
        with torch.inference_mode():
            for _ in range(300):
                matrix(x)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert torch._C._get_mkldnn_enabled() == before

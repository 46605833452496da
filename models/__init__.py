"""Models: from a name to a network, a tokenizer and a chat template.

Importing this needs no torch; `load` brings in the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from minikv.models.config import ModelConfig
    from minikv.models.hub import Progress
    from minikv.models.linear import Packing
    from minikv.models.llama import Llama
    from minikv.models.templates import ChatTemplate
    from minikv.models.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "bundled"
"""The folder of the model that ships in the package."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run. `revision` is the commit of a hub model, None for a directory."""

    network: Llama
    tokenizer: Tokenizer
    template: ChatTemplate
    config: ModelConfig
    name: str
    revision: str | None
    weight_bytes: int
    """Bytes that the weights take on the device."""


def free_memory() -> int | None:
    """Bytes of the host's memory that can still be allocated; None where nobody knows."""
    import torch

    from minikv.models import weights

    return weights.free_memory(torch.device("cpu"))


def refuse_without_torch() -> None:
    """Raise ModelTooLarge where torch is still to be imported, and this process has no room."""
    from minikv.models import limits

    limits.refuse_without_torch()


def load(
    model: str | Path | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    device: str = "cpu",
    dtype: str = "auto",
    weights: str = "auto",
    progress: Progress | None = None,
    packing: Packing | None = None,
    keep_packed: int = 0,
) -> Loaded:
    """Load a directory or a hub id; None is the bundled model.

    `device`: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N". `dtype`: "auto",
    "float32", "bfloat16" or "float16"; "auto" is the storage dtype, except that float16 becomes
    float32 on a CPU, which computes in it no faster and overflows earlier. bfloat16 stays: a CPU
    that does not multiply it reads prompts in float32, a block of the weights at a time, which
    config.notes say. `weights`: "auto" and "plain" (as they are stored), "int8" or "int4" (layers
    only, with bfloat16 beside them, which "auto" then is), "int8+head" or "int4+head"
    (what makes logits in eight bits, too). `progress` is told of a download and of the weights as
    they are read. `packing` makes int8 and int4; None is torch. At most `keep_packed` bytes of
    packed weights are kept on disk for later calls, which then need not pack.
    Raises ModelError: a setting that this machine cannot have (exit code 2), not found, gated or
    unsupported (3), too large (4), corrupt (6).
    """
    from minikv.models import rendering

    refuse_without_torch()
    rendering.process().start()  # it is ready when the first template is rendered
    from minikv.models.checkpoint import Checkpoint
    from minikv.models.config import ModelConfig
    from minikv.models.hub import Source, resolve
    from minikv.models.linear import TORCH, packs
    from minikv.models.templates import ChatTemplate
    from minikv.models.tokenizer import Tokenizer
    from minikv.models.weights import load_network

    if model is None:
        source = Source("bundled", BUNDLED, None)
    else:
        source = resolve(model, revision=revision, offline=offline, progress=progress)
    where = _device(device)
    config = ModelConfig.from_folder(source.folder)
    checkpoint = Checkpoint.open(source.folder)
    # Cheap checks first: a bad tokenizer should not cost the reading of all weights.
    tokenizer = Tokenizer.from_folder(source.folder, stop_ids=config.stop_ids)
    template = ChatTemplate.from_folder(source.folder, tokenizer)
    _refuse_unknown_ids(tokenizer, template, config.vocab)
    packed = None
    if keep_packed and packs(weights) and where.type == "cpu":
        from minikv.models.packed import Origin, Packed

        origin = Origin(source.name, source.folder, checkpoint, config, weights)
        packed = Packed(origin, keep_packed, progress)
    try:
        network = load_network(
            checkpoint,
            config,
            device=where,
            form=weights,
            dtype=_dtype(dtype, checkpoint.dtype, where, weights),
            progress=None if progress is None else progress.weights,
            packing=packing or TORCH,
            packed=packed,
        )
        if packed is not None:
            packed.keep(network)
    finally:
        if packed is not None:
            packed.close()
    return Loaded(
        network=network,
        tokenizer=tokenizer,
        template=template,
        config=network.config,
        name=source.name,
        revision=source.revision,
        weight_bytes=network.weight_bytes,
    )


def _refuse_unknown_ids(tokenizer: Tokenizer, template: ChatTemplate, rows: int) -> None:
    """Raise CorruptModel where a text or a chat can have tokens that the embedding lacks."""
    from minikv.models.errors import CorruptModel
    from minikv.models.templates import Message

    chat = template.opening([Message("user", "x")])
    largest = max(tokenizer.largest, *chat)
    if largest >= rows:
        raise CorruptModel(
            f"the tokenizer has a token {largest:,}, and the model's embedding has {rows:,} rows",
            "the two are not of the same model",
        )


def _device(name: str) -> torch.device:
    import torch

    from minikv.models.errors import ModelUnavailable

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ModelUnavailable(f"unknown device {name!r}", "auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelUnavailable(f"no CUDA device for {name!r}", 'use `device="cpu"`')
    if device.type == "cuda" and (device.index or 0) != torch.cuda.current_device():
        torch.cuda.set_device(device.index or 0)  # Triton launches on the current one
    return device


def _dtype(
    name: str, stored: torch.dtype, device: torch.device, weights: str = "auto"
) -> torch.dtype:
    import torch

    from minikv.models.errors import UnsupportedModel

    if name == "auto" and weights not in ("auto", "plain"):
        return torch.bfloat16
    if name == "auto":
        half = stored == torch.float16 and device.type == "cpu"
        return torch.float32 if half else stored
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UnsupportedModel(f"unknown dtype {name!r}", f"auto, {', '.join(known)}")
    return known[name]

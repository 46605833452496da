"""Turns a model's name into a network, a tokenizer and a chat template.

Importing this does not import torch; `load` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.models.limits import refuse_without_torch as refuse_without_torch

if TYPE_CHECKING:
    import torch

    from minikv.models.config import ModelConfig
    from minikv.models.hub import Progress
    from minikv.models.linear import Packing
    from minikv.models.llama import Llama
    from minikv.models.templates import ChatTemplate
    from minikv.models.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "bundled"
"""The folder of the model that is part of the package."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run. revision: the commit of a hub model; None for a directory.
    folder: where its files are."""

    network: Llama
    tokenizer: Tokenizer
    template: ChatTemplate
    config: ModelConfig
    name: str
    revision: str | None
    folder: Path


def free_memory(device: torch.device | None = None) -> int | None:
    """Bytes that can still be allocated on the device, by default the host; None if not known."""
    import torch

    from minikv.models import weights

    return weights.free_memory(device or torch.device("cpu"))


def config_of(path: Path) -> ModelConfig:
    """The configuration of a model's directory or GGUF file. Raises ModelError."""
    if path.is_file():
        from minikv.models.gguf import Gguf

        return Gguf(path).config()
    from minikv.models.config import ModelConfig

    return ModelConfig.from_folder(path)


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
) -> Loaded:
    """Load a directory, a GGUF file or a hub id; None is the bundled model.

    - device: "auto" (CUDA if available), "cpu", "cuda" or "cuda:N".
    - dtype: "auto", "float32", "bfloat16" or "float16". "auto" is the storage dtype, except that
      float16 becomes float32 on a CPU, where float16 is no faster and overflows earlier. bfloat16
      stays: a CPU that cannot multiply bfloat16 reads prompts in float32, converting a block of the
      weights at a time.
    - weights: "auto": as stored; quantised matrices keep their form. "plain": not packed. "int8" or
      "int4": the layers are packed, and the rest is bfloat16, which is then the meaning of `dtype`
      "auto". "int8+head" or "int4+head": the lm_head is packed to int8 too.
    - progress: receives the progress of a download and of reading the weights.
    - packing: returns the kernels that pack to int8 and int4; None: torch.

    Raises ModelError: a setting that this machine cannot use (exit code 2); a model that is not
    found, gated or unsupported (3), too large (4) or corrupt (6).
    """
    from minikv.models import rendering

    refuse_without_torch()
    rendering.process().start()  # early, so that it is ready when the first template is rendered
    from minikv.models.checkpoint import Checkpoint
    from minikv.models.config import ModelConfig
    from minikv.models.hub import Source, resolve
    from minikv.models.linear import TORCH
    from minikv.models.templates import ChatTemplate
    from minikv.models.tokenizer import Tokenizer
    from minikv.models.weights import load_network

    if model is None:
        source = Source("bundled", BUNDLED, None)
    else:
        source = resolve(model, revision=revision, offline=offline, progress=progress)
    where = _device(device)
    # Cheap checks first: a bad tokenizer is found before all weights are read.
    if source.folder.is_file():
        from minikv.models.gguf import Gguf

        file = Gguf(source.folder)
        config, checkpoint = file.config(), file.checkpoint()
        tokenizer = file.tokenizer(config)
        template = file.template(tokenizer)
        del file  # its metadata
    else:
        config = ModelConfig.from_folder(source.folder)
        checkpoint = Checkpoint.open(source.folder)
        tokenizer = Tokenizer.from_folder(
            source.folder, stop_ids=config.stop_ids, family=config.family, rows=config.vocab
        )
        template = ChatTemplate.from_folder(source.folder, tokenizer)
    _refuse_unknown_ids(tokenizer, template, config.vocab)
    stored = None if config.quantisation else checkpoint.dtype
    network = load_network(
        checkpoint,
        config,
        device=where,
        form=weights,
        dtype=dtype_of(dtype, stored, where, weights),
        progress=None if progress is None else progress.weights,
        packing=packing or TORCH,
    )
    return Loaded(
        network=network,
        tokenizer=tokenizer,
        template=template,
        config=network.config,
        name=source.name,
        revision=source.revision,
        folder=source.folder,
    )


def _refuse_unknown_ids(tokenizer: Tokenizer, template: ChatTemplate, rows: int) -> None:
    """Raise CorruptModel if a text or a chat can have token ids without a row in the embedding."""
    from minikv.models.errors import CorruptModel
    from minikv.models.templates import Message

    chat = template.opening([Message("user", "x")])
    largest = max(tokenizer.largest, *chat)
    if largest >= rows:
        raise CorruptModel(
            f"the tokenizer has a token {largest:,}, and the model's embedding has {rows:,} rows",
            "the two do not belong to the same model",
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
        torch.cuda.set_device(device.index or 0)  # Triton launches on the current device
    return device


def dtype_of(
    name: str, stored: torch.dtype | None, device: torch.device, weights: str = "auto"
) -> torch.dtype:
    """The dtype of a network that is loaded with these values of --dtype and --weights. stored:
    None: the files are quantised. Raises UnsupportedModel."""
    import torch

    from minikv.models.errors import UnsupportedModel

    if name == "auto":
        if stored is None or weights not in ("auto", "plain"):
            return torch.bfloat16
        half = stored == torch.float16 and device.type == "cpu"
        return torch.float32 if half else stored
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UnsupportedModel(f"unknown dtype {name!r}", f"auto, {', '.join(known)}")
    return known[name]

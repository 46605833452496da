"""What each form of quantised safetensors costs: seconds to load, bytes held, error of a logit.

    PYTHONPATH=tests/support python docs/measurements/quantised.py --json quantised.json

The model is random, of the shape of a Llama of half a billion parameters. The tests' writers make
each form; layers share their numbers, so that writing is quick. Each form loads in a process of its
own. The error is that of the logits after a prompt of 24 tokens, beside the network in float32
whose weights are the file's own values: it is what minikv adds, not what the form has lost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from quantising import FORMS, Form, Made, folders
from torch import Tensor

from minikv import models
from minikv.cache.attend import DenseAttend

SIZES = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def shared(form: Form) -> Form:
    """The form with one matrix of each shape."""
    draw = torch.Generator().manual_seed(1)

    @cache
    def once(rows: int, columns: int) -> Made:
        return form.write(rows, columns, draw)

    def write(rows: int, columns: int, _: torch.Generator) -> Made:
        parts, value = once(rows, columns)
        return {tail: part.clone() for tail, part in parts.items()}, value.clone()

    return replace(form, write=write)


def peak() -> int:
    """The most memory that this process has had, in MB. (ru_maxrss counts its parent's, too.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


def logits(folder: Path, dtype: str) -> tuple[dict[str, Any], Tensor]:
    """Load a folder and read a prompt."""
    before = peak()
    began = perf_counter()
    loaded = models.load(folder, dtype=dtype)
    seconds, most = perf_counter() - began, peak() - before
    ids = torch.randint(4, 200, (24,), generator=torch.Generator().manual_seed(2))
    config = loaded.config
    with torch.inference_mode():
        found = loaded.network.forward(ids, DenseAttend(config.windows))[-1].float()
    facts = {
        "form": config.form or str(loaded.network.dtype).removeprefix("torch."),
        "load_s": round(seconds, 2),
        "held_mb": loaded.weight_bytes >> 20,
        "peak_mb": most,
        "notes": list(config.notes),
    }
    return facts, found


def _alone(arguments: tuple[Path, str]) -> tuple[dict[str, Any], Tensor]:
    torch.set_num_threads(2)
    return logits(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", action="append", choices=list(FORMS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    for name in given.form or FORMS:
        with tempfile.TemporaryDirectory() as folder, context.Pool(1, maxtasksperchild=1) as pool:
            made, plain = folders(Path(folder), shared(FORMS[name]), SIZES)
            _, want = pool.apply(_alone, ((plain, "float32"),))
            for label, place, dtype in (("bfloat16", plain, "bfloat16"), (name, made, "auto")):
                facts, got = pool.apply(_alone, ((place, dtype),))
                error = float((got - want).norm() / want.norm())
                rows.append({"name": name, "kept": label, **facts, "error": round(error, 5)})
                print(json.dumps(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

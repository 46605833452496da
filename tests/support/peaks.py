"""What loading a model takes in a fresh process: bytes of memory above the start, open files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import forked
import torch
from safetensors.torch import save_file

from minikv.models.config import ModelConfig
from minikv.models.llama import Llama
from minikv.models.tensors import tensors_of

_PROBE = r"""
import json, os, re, sys, torch
from minikv.models import linear, load, weights
from minikv.models.checkpoint import Checkpoint
from minikv.models.config import ModelConfig
from minikv.models.weights import load_network
def highest():
    # Not ru_maxrss: that begins with what the process which started this one held.
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s*(\d+) kB", file.read())[1]) * 1024

folder, dtype, form, small = sys.argv[1:]
dtype = getattr(torch, dtype)
if int(small):
    linear.PACKED = weights.TAKEN = weights.STAGING = int(small)
checkpoint, config = Checkpoint.open(folder), ModelConfig.from_folder(folder)
if form == "auto":
    torch.set_num_threads(1)  # a thread's stack is memory, too
    torch.ones(8, 8) @ torch.ones(8, 8)
    torch.ones(1 << 20).copy_(torch.ones(1 << 20, dtype=torch.bfloat16))
else:
    load(None, dtype="bfloat16", weights=form)  # what the code itself takes
slow = "sympy" in sys.modules
before = highest()
network = load_network(checkpoint, config, dtype=dtype, form=form)
after = highest()
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
held = [os.readlink(link) for link in links if os.path.exists(link)]
print(json.dumps({
    "grown": after - before,
    "size": network.weight_bytes,
    "needs": weights.loading_bytes(config, dtype, form),
    "mapped": "safetensors" in open("/proc/self/maps").read(),
    "held": any(name.endswith(".safetensors") for name in held),
    "sympy": slow != ("sympy" in sys.modules),
}))
"""


def loading(folder: Path, dtype: str, form: str = "auto", small: int = 0) -> SimpleNamespace:
    """grown: the bytes that loading took above what was there; size: of the weights; needs: what
    `loading_bytes` says; mapped, held, sympy: whether a file is mapped or open, or sympy was
    imported. small: bytes that are read and weights that are packed at a time."""
    done = forked.run(str(folder), dtype, form, str(small), code=_PROBE)
    return SimpleNamespace(**json.loads(done.out))


def write(folder: Path, layers: int, vocab: int) -> int:
    """A model in bfloat16 with layers of 27 MB; returns the bytes of its weights."""
    config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    config |= {"vocab_size": vocab, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    made = Llama(ModelConfig.from_folder(folder), dtype=torch.bfloat16)
    tensors = {name: tensor.fill_(0.5).clone() for name, tensor in tensors_of(made)}
    save_file(tensors, folder / "model.safetensors")
    return made.weight_bytes

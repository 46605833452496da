"""On which machine, and with which packages."""

from __future__ import annotations

import platform
from importlib.metadata import distributions

import torch

NAMES = "torch triton numpy typer rich safetensors tokenizers transformers pytest hypothesis"


def main() -> None:
    print(platform.platform(), "python", platform.python_version())
    found = {d.metadata["Name"]: d.version for d in distributions()}
    print("; ".join(f"{name} {found.get(name, 'missing')}" for name in NAMES.split()))
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        return
    facts = torch.cuda.get_device_properties(0)
    print(
        f"{facts.name}, {facts.total_memory >> 20} MiB, {facts.multi_processor_count} "
        f"multiprocessors, compute capability {facts.major}.{facts.minor}"
    )


if __name__ == "__main__":
    main()

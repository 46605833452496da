"""Launches for a profiler: attention and the ends of steps, at the sizes of an 8B model.
Between them the cache of the GPU is overwritten.

    ncu --clock-control none python tests/gpu/profiled.py
    python tests/gpu/profiled.py --device cpu        tries it without a GPU, on few rows
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from plain_tree import linked

linked()

import single_kernels

from minikv.cli.bench import networks
from minikv.kernels import dispatch

WANTED = {
    "ragged attention": ("1,024 rows", "8,192 rows", "32,768 rows", "32,768 rows, logits"),
    "roco step": ("1,024 rows, all layers", "4,096 rows, all layers"),
    "h2o step": ("4,096 rows, all layers",),
    "hash append": ("1,024 rows", "4,096 rows"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    gpu = device.type == "cuda"
    sizes = networks.SHAPES["llama-3-8b"]
    operations = dispatch.choose(device, "auto", sizes.head_dim, torch.bfloat16)[0]
    flush = torch.empty((256 if gpu else 1) << 20, dtype=torch.uint8, device=device)
    found = set()
    with torch.inference_mode():
        lengths = (1024, 4096, 8192, 32_768) if gpu else (1024, 4096)
        for case in single_kernels.cases(sizes, lengths):
            if case.case not in WANTED.get(case.name, ()):
                continue
            run = case.make(single_kernels.Draw(device, 0))
            for _ in range(2):  # the first one compiles
                flush.zero_()
                run(operations)
            if gpu:
                torch.cuda.synchronize()
            found.add(case.name)
            print(case.name, case.case, file=sys.stderr)
    assert found == {*WANTED}, f"no such case: {', '.join({*WANTED} - found)}"


if __name__ == "__main__":
    main()

"""Double the head size of a bundled checkpoint without changing what it computes.

    python docs/measurements/widen.py FROM TO

An old pair of rotated dimensions i becomes pair 2i, which turns at the same rate; queries and keys
grow by the fourth root of 2, as logits are divided by the root of the head size; new query rows and
output columns start at zero, new keys and values at random, so that training can use them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(source / name, target)
    config = json.loads((source / "config.json").read_text())
    old, width = config["head_dim"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * width**-0.5

    grown = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            pairs = weight.view(-1, 2, old // 2, width) * 2**0.25
            new = fresh(*pairs.shape) if "k_proj" in name else torch.zeros_like(pairs)
            weight = torch.stack((pairs, new), 3).reshape(-1, width)
        elif "v_proj" in name:
            rows = weight.view(kv_heads, old, width)
            weight = torch.cat((rows, fresh(*rows.shape)), 1).reshape(-1, width)
        elif "o_proj" in name:
            columns = weight.view(width, heads, old)
            weight = torch.cat((columns, torch.zeros_like(columns)), 2).reshape(width, -1)
        grown[name] = weight.contiguous()
    config["head_dim"] = 2 * old
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(grown, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()

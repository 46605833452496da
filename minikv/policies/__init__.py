"""The eviction policies: one file per method, and `registry`, the table of all of them, whose rows
are in `tables`.

Importing this package does not import torch.
"""

from __future__ import annotations

from minikv.policies.composition import default_step, find, prompt_policy, step_policy
from minikv.policies.options import Option, Value, read_options
from minikv.policies.registry import (
    DEFAULT_BUDGET,
    DEFAULT_PROMPT,
    DEFAULT_STEP,
    PARTS,
    POLICIES,
    Part,
    PolicyInfo,
    prompt_names,
    step_names,
)

__all__ = [
    "DEFAULT_BUDGET",
    "DEFAULT_PROMPT",
    "DEFAULT_STEP",
    "PARTS",
    "POLICIES",
    "Option",
    "Part",
    "PolicyInfo",
    "Value",
    "default_step",
    "find",
    "prompt_names",
    "prompt_policy",
    "read_options",
    "step_names",
    "step_policy",
]

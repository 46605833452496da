"""The eviction policies: each file describes one completely; `registry` lists the names.

Importing this package does not import torch.
"""

from __future__ import annotations

from minikv.policies.options import Option, Value, read_options
from minikv.policies.registry import (
    DEFAULT_BUDGET,
    DEFAULT_PROMPT,
    DEFAULT_STEP,
    check_name,
    default_step,
    find,
    method_names,
    part_names,
    prompt_names,
    prompt_policy,
    step_names,
    step_policy,
)

__all__ = [
    "DEFAULT_BUDGET",
    "DEFAULT_PROMPT",
    "DEFAULT_STEP",
    "Option",
    "Value",
    "check_name",
    "default_step",
    "find",
    "method_names",
    "part_names",
    "prompt_names",
    "prompt_policy",
    "read_options",
    "step_names",
    "step_policy",
]

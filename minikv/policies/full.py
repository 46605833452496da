"""No eviction: every row stays. The baseline, and `--decode none`."""

from __future__ import annotations

from collections.abc import Mapping


def prompt_policy(options: Mapping[str, object]) -> None:
    """Nothing to do at the end of a prompt."""


def step_policy(options: Mapping[str, object]) -> None:
    """Nothing to do while an answer is written."""

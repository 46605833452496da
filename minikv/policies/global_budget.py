"""One budget for all layers and heads: the best rows of the whole cache stay, wherever they are.

KVzip (arXiv 2505.23416, section 3.3), LayerDefensiveKV (arXiv 2510.13334) and QuerySpan share their
budgets like this. Scores of different layers are compared directly, so they need a common unit, as
attention has. In addition, every head keeps the rows that the scorer protects, and a row that a
decode step may evict.

The releases hold every layer until all are scored. Here only the best rows so far are kept while
layers are read (`minikv.cache.global_pool`), so peak memory is that of one layer. The same rows
stay.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GlobalBudget:
    """In place of layer and head budgets; `PromptPolicy.global_key` orders the rows."""

    axis = "layers"
    name = "global"
    summary = "one budget for all layers and heads"
    differs = (
        "scores are compared as they are, which suits attention; of key norms or a draw, layers "
        "may not be comparable",
        "every head keeps what its scorer protects and a token that an answer may overwrite; the "
        "releases may leave a head without any",
        "the releases hold every layer until all are scored; here the best tokens so far are held. "
        "The choice is the same",
    )

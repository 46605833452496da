"""One budget for all layers and heads: the best rows of the whole cache stay, wherever they are.

As KVzip (arXiv 2505.23416, section 3.3), LayerDefensiveKV (arXiv 2510.13334) and QuerySpan give
out theirs. Scores are compared as they are, so this suits scores in a common unit, such as
attention. What every layer and head keeps beside is what the scorer protects, and a row that an
answer may overwrite.

The releases hold every layer until all are scored. Here the best rows so far are kept while layers
are read (`minikv.cache.global_pool`), so that the peak stays that of one layer; what stays is the
same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minikv.policies.base import Candidates, GlobalAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBudget(GlobalAllocator):
    """A row is worth its score in every layer and head."""

    def worth(self, rows: Candidates) -> Tensor:
        return rows.scores

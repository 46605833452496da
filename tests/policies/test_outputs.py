"""How long values are behind the output projection."""

from __future__ import annotations

import torch
from views import looked

from minikv.policies.outputs import output_lengths, output_norms


def test_values_have_the_length_that_the_output_gives_them() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, 5, 3, generator=generator)
    output = torch.randn(2, 2, 3, 7, generator=generator)
    found = output_lengths(looked(torch.zeros(2, 2, 1, 5), value, output=output))
    torch.testing.assert_close(found, (value[:, None] @ output).norm(dim=-1))


def test_the_other_length_is_a_mean_over_the_group() -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(2, 4100, 3, generator=generator)  # more than are projected at once
    output = torch.randn(2, 2, 3, 7, generator=generator)
    found = output_norms(looked(torch.zeros(2, 2, 1, 4100), value, output=output))
    torch.testing.assert_close(found, (value[:, None] @ output).abs().sum(-1).mean(1))

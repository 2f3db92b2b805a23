"""embedding: ids outside the table, refusals, cost."""

from __future__ import annotations

import pytest
import torch
from op_kernels import each, here

from rooflab.kernels.registry import Kernel, get_kernel

TRITON = here("embedding", "triton")


@each(TRITON)
def test_an_id_outside_the_table_reads_nothing(kernel: Kernel) -> None:
    weight = torch.full((6, 4), torch.nan)
    weight[1:4] = 1.0
    result = kernel(token_ids=torch.tensor([-1, 2, 3]), weight=weight[1:4])
    assert result.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]


def test_library_raises_on_an_id_outside_the_table() -> None:
    with pytest.raises(IndexError):
        get_kernel("embedding", "library")(token_ids=torch.tensor([3]), weight=torch.ones(3, 4))

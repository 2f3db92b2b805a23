"""rope: head counts, precision, and positions outside the tables."""

from typing import Any

import torch
from op_kernels import each, here

from rooflab.kernels.registry import Kernel

KERNELS = here("rope")
TRITON = here("rope", "triton")


def inputs(**change: Any) -> dict[str, Any]:
    """Two tokens, D = 4. Position 0 turns nothing; position 1 turns the first pair by 90 degrees."""
    q = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(2, 1, 4).contiguous()
    tables = {"cos": torch.tensor([[1.0, 1.0], [0.0, 1.0]]), "sin": torch.tensor([[0.0, 0.0], [1.0, 0.0]])}
    return {"q": q, "k": 10 * q, **tables, "positions": torch.tensor([1, 0]), **change}


@each(KERNELS)
def test_more_key_heads_than_query_heads_and_no_tokens(kernel: Kernel) -> None:
    made = inputs(k=torch.ones(2, 5, 4))
    q, k = kernel(**made)
    assert q.shape == (2, 1, 4)
    assert k[0, 4].tolist() == [-1.0, 1.0, 1.0, 1.0]
    empty = {name: made[name][:0] for name in ("q", "k", "positions")}
    assert [tuple(t.shape) for t in kernel(**{**made, **empty})] == [(0, 1, 4), (0, 5, 4)]


@each(KERNELS)
def test_low_precision_is_rotated_in_fp32(kernel: Kernel) -> None:
    """1024 cos - 1024 sin = 1/8; in fp16 the cosine rounds to the sine, and 0 comes out."""
    q = torch.tensor([[[1024.0, 1024.0]]], dtype=torch.float16)
    tables = {"cos": torch.tensor([[1.0 - 3 * 2.0**-13]]), "sin": torch.tensor([[1.0 - 4 * 2.0**-13]])}
    new_q, _ = kernel(**inputs(q=q, k=q, positions=torch.tensor([0]), **tables))
    assert new_q.dtype == torch.float16
    assert new_q.tolist() == [[[0.125, 2047.0]]]


@each(TRITON)
def test_a_position_outside_the_tables_reads_nothing(kernel: Kernel) -> None:
    tables = {name: torch.full((3, 2), torch.nan) for name in ("cos", "sin")}
    for table in tables.values():
        table[1] = 1.0
    made = inputs(positions=torch.tensor([1, 0]), cos=tables["cos"][1:2], sin=tables["sin"][1:2])
    q, _ = kernel(**made)
    assert q[0, 0].tolist() == [0.0] * 4
    assert q[1, 0].tolist() == [-2.0, -2.0, 4.0, 6.0]

"""embedding: rows by hand, repeated and outside ids, views, refusals."""

from __future__ import annotations

import pytest
import torch

from rooflab.kernels.registry import Kernel, get_kernel, kernels
from rooflab.reference.embedding import SPEC

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in kernels("embedding").values() if kernel.why_not_here(CPU) is None]
TRITON = [kernel for kernel in KERNELS if kernel.backend == "triton"]
by_id = lambda kernel: kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_first_last_and_repeated_rows(kernel: Kernel) -> None:
    weight = torch.arange(15.0).view(5, 3)
    result = kernel(token_ids=torch.tensor([4, 0, 4, 2, 0]), weight=weight)
    assert result.tolist() == [[12, 13, 14], [0, 1, 2], [12, 13, 14], [6, 7, 8], [0, 1, 2]]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_no_tokens(kernel: Kernel) -> None:
    assert kernel(token_ids=torch.empty(0, dtype=torch.int64), weight=torch.ones(5, 3)).shape == (0, 3)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_padding_of_table_and_output_is_left_alone(kernel: Kernel) -> None:
    table = torch.full((4, 8), torch.nan)
    table[:, :5] = torch.arange(20.0).view(4, 5)
    out = torch.full((3, 5), 7.0)
    result = kernel(token_ids=torch.tensor([3, 1]), weight=table[:, :5], out=out[:2])
    assert result.data_ptr() == out.data_ptr()
    assert out.tolist() == [[15, 16, 17, 18, 19], [5, 6, 7, 8, 9], [7, 7, 7, 7, 7]]


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_an_id_outside_the_table_reads_nothing(kernel: Kernel) -> None:
    weight = torch.full((6, 4), torch.nan)
    weight[1:4] = 1.0
    result = kernel(token_ids=torch.tensor([-1, 2, 3]), weight=weight[1:4])
    assert result.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]


def test_library_raises_on_an_id_outside_the_table() -> None:
    with pytest.raises(IndexError):
        get_kernel("embedding", "library")(token_ids=torch.tensor([3]), weight=torch.ones(3, 4))


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_offsets_past_2_31(kernel: Kernel) -> None:
    """Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are."""
    weight = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((3, 16), (2**30, 1))
    weight.copy_(torch.arange(48).view(3, 16))
    assert kernel(token_ids=torch.tensor([2, 0]), weight=weight).tolist() == weight[[2, 0]].tolist()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_refusals(kernel: Kernel) -> None:
    for change, message in [
        ({"token_ids": torch.tensor([[1]])}, r"token_ids: expected shape \(\*\), got \(1, 1\)"),
        ({"token_ids": torch.tensor([1], dtype=torch.int32)}, "token_ids: expected torch.int64, got torch.int32"),
        ({"token_ids": torch.arange(4)[::2]}, "token_ids: expected stride 1"),
        ({"weight": torch.ones(4)}, r"weight: expected shape \(\*, \*\), got \(4,\)"),
        ({"weight": torch.ones(4, 3, dtype=torch.float64)}, "weight: expected torch.float32 or .*, got torch.float64"),
        ({"weight": torch.ones(3, 4).mT}, "weight: expected stride 1 in the last dimension, got 4"),
        ({"out": torch.ones(2, 2)}, r"out: expected shape \(1, 3\), got \(2, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel(**{"token_ids": torch.tensor([1]), "weight": torch.ones(4, 3), **change})


def test_cost_reads_a_repeated_row_once() -> None:
    weight = torch.empty(100, 64, dtype=torch.bfloat16, device="meta")
    cost = SPEC.cost(token_ids=torch.tensor([7, 7, 7, 9]), weight=weight)
    assert cost.read_bytes == 4 * 8 + 2 * 64 * 2
    assert cost.write_bytes == 4 * 64 * 2

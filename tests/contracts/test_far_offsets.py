"""Offsets past 2**31: if the rows of an operand lie far apart, the CUDA C++ kernels of gemm that take any strides give
the same result as with rows that lie close together.

A check does this with every kernel that can run here; these kernels run in the emulator.  The last row starts at 2**31
elements or beyond; only the memory of the rows is touched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_kernels import CPU

from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case


def spread(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy whose entries along `dim` lie apart."""
    apart = -(-(2**31) // (tensor.shape[dim] - 1) // 64) * 64
    storage = torch.empty(2**31 + 64 * tensor.shape[dim] + tensor.numel(), dtype=tensor.dtype)
    strides = [apart if at == dim else stride for at, stride in enumerate(tensor.stride())]
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("name", ["one_thread", "shared_tiles"])
@pytest.mark.parametrize(
    ("case", "names", "dim"),
    [
        ("M=3,N=16,K=16,layout=NT,bias=false", ("a",), 0),
        ("M=3,N=16,K=16,layout=NT,bias=false,residual=true", ("residual", "out"), 0),
        ("M=16,N=8,K=16,layout=NT,bias=false", ("b",), 1),
    ],
)
def test_rows_far_apart_are_read_and_written_as_near_ones(
    name: str, case: str, names: tuple[str, ...], dim: int
) -> None:
    kernel = get_kernel("gemm", name)
    made: dict[str, Any] = get_op("gemm").make_inputs(Case.parse(case), SCHEMES["fp16"], CPU, 0)
    with emulating_cuda(lambda *launch: emulate(*launch)):
        wanted = kernel.fn(**made)
        given = {**made, "out": torch.empty_like(wanted)} if "out" in names else made
        found = kernel.fn(**{each: spread(x, dim) if each in names else x for each, x in given.items()})
    assert torch.equal(found, wanted)

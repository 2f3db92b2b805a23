"""What sets the CPU's rungs in C++ apart: they call nothing of torch but the allocation of the result."""

from functools import partial

import torch
from rung_claims import calls, rung

from rooflab.kernels.registry import get_kernel

ALLOCATES = {"empty", "empty_like"}


def one_call(op: str, least: int) -> None:
    """`op`/native calls nothing of torch; naive makes at least `least` calls."""
    assert calls(op, "naive").names.total() >= least
    assert calls(op, "native").names.keys() <= ALLOCATES


ONE_CALL = {
    "rmsnorm": 6,
    "fused_add_rmsnorm": 7,  # for sum and norm
    "silu_and_mul": 3,  # silu(gate) is never a tensor
    "gelu_and_mul": 8,
    "rope_and_cache": 20,  # for the rotation and both caches
    "flash_attention_varlen": 10,  # for all sequences
}
"""Ops whose native is one call of C++, and how many calls of torch naive makes at least."""
for _op, _least in ONE_CALL.items():
    rung(f"{_op}/native")(partial(one_call, _op, _least))


@rung("paged_attention/native")
def paged_attention_native() -> None:
    """Pages are read where they lie; library gathers them."""
    one_call("paged_attention", 10)
    assert "index_select" in calls("paged_attention", "library").names


@rung("rope_and_cache/joined")
def rope_and_cache_joined() -> None:
    """Fewer calls of torch than naive."""
    assert calls("rope_and_cache", "joined").names.total() < calls("rope_and_cache", "naive").names.total()


def panels(op: str, dtype: torch.dtype, **beside: torch.Tensor) -> None:
    """A weight is read once, in order, whatever the number of rows: its columns lie side by side in panels of 32, row
    after row of K, and zeros fill the last panel."""
    weight = torch.arange(3 * 40).remainder(101).view(3, 40).to(dtype)
    packed = get_kernel(op, "native").prepare(weight, *beside.values())
    assert packed.tensor.is_contiguous() and packed.tensor.shape == (2, 3, 32)
    assert torch.equal(packed.tensor[0], weight[:, :32]) and torch.equal(packed.tensor[1, :, :8], weight[:, 32:])
    assert not packed.tensor[1, :, 8:].any()


rung("gemm/native")(partial(panels, "gemm", torch.float32))
# Codes are a quarter of the bytes of fp32.
rung("gemm_w8a16/native")(partial(panels, "gemm_w8a16", torch.int8, scale=torch.ones(40, dtype=torch.bfloat16)))

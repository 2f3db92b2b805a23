"""What the naive kernels say that they move, beside the bytes that their torch calls read and write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rooflab.kernels import registry
from rooflab.reference.spec import get_scheme

NAIVE = {op: registry.kernels(op)["naive"] for op in registry.ops()}
TORCH = [op for op, kernel in NAIVE.items() if kernel.backend == "torch" and kernel.traffic and not kernel.prepare]
SAID = {
    "flash_attention": 1.06, "flash_attention_varlen": 1.11, "fused_add_rmsnorm": 0.92, "gelu_and_mul": 0.96,
    "gemm_fp8": 0.91, "gemm_grouped": 0.88, "gemm_silu_and_mul": 1.00, "gemm_w4a16": 1.00, "gemm_w8a16": 1.00,
    "kv_cache_write": 1.02, "layernorm": 0.93, "merge_attention_states": 1.30, "mla_decode": 0.87,
    "paged_attention": 0.99, "rmsnorm": 0.90, "rope": 0.91, "rope_and_cache": 1.06, "sample": 1.26,
    "silu_and_mul": 0.91, "softmax": 1.00, "speculative_verify": 0.78,
}  # fmt: skip
"""What a kernel says over what its calls move: it may leave out small tensors, such as lengths and weights, or count
passes that a call of torch makes by itself."""


class Moved(TorchDispatchMode):
    """Counts each tensor that a call reads or writes; of a broadcast dimension one row, of an indexed tensor the rows
    that are taken or put."""

    bytes = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = call(*args, **(kwargs or {})), call.name().split("::")[1]
        given, made = ([item for item in tree_leaves(part) if isinstance(item, torch.Tensor)] for part in (args, out))
        if call.is_view or name.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            return out
        if "index" in name or "gather" in name or "embedding" in name:
            self.bytes += 2 * sum(map(size, given[-1:] if name.split(".")[0].endswith("_") else made))
            return out
        fresh = [item for item in made if not any(item is one for one in given)]
        self.bytes += sum(map(size, given)) + sum(map(size, fresh or made))
        return out


def size(tensor: torch.Tensor) -> int:
    distinct = [extent for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(torch.tensor(distinct).prod()) * tensor.element_size() if tensor.numel() else 0


@pytest.mark.parametrize("op", TORCH)
def test_a_naive_kernel_moves_what_it_says(op: str) -> None:
    spec, kernel = registry.get_op(op), NAIVE[op]
    inputs = spec.make_inputs(spec.cases["smoke"][-1], get_scheme(spec.schemes[0]), torch.device("cpu"), 0)
    said = kernel.traffic_of(inputs, "cpu", spec)
    with Moved() as moved:
        kernel.fn(**{name: value for name, value in inputs.items() if name in kernel.accepted})
    assert said is not None and said.bytes / moved.bytes == pytest.approx(SAID[op], abs=0.04)
    assert said.bytes >= spec.cost_of(inputs).bytes

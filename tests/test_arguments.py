"""Every tensor that a kernel takes: with one dimension more, or of another dtype, it is refused by its name."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_kernels import CPU

from rooflab.bench.calls.calls import packed
from rooflab.kernels.registry import Kernel, kernels, ops
from rooflab.reference.spec import SCHEMES

META = torch.device("meta")
KERNELS = [kernel for op in ops() for kernel in kernels(op).values() if kernel.role != "peer"]
CHOOSES = {
    *("embedding.weight", "gelu_and_mul.x", "silu_and_mul.x", "softmax.x", "sample.logits"),
    *("merge_attention_states.outs", "gemm_w4a16.scale", "gemm_w8a16.scale"),
}
"""Arguments whose floating-point dtype is the caller's choice."""
OWN_WORDS = {"gemm_fp8.a_scale", "gemm_fp8.b_scale", "gemm_w4a16.b", "gemm_w8a16.b"}
"""Arguments that are refused in other words, which the tests of their ops hold."""


def calls(kernel: Kernel) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Arguments of the first cases that together have each tensor that the kernel takes, and which are new in each."""
    spec, seen = ops()[kernel.op], set[str]()
    for scheme in sorted(spec.schemes, key=lambda name: name != "fp16"):
        for case in (*spec.cases["smoke"], *spec.cases["edge"]):
            priced = spec.make_inputs(case, SCHEMES[scheme], META, 0)  # makes no values
            tensors = {name for name, value in priced.items() if isinstance(value, torch.Tensor)}
            whole = all(priced[name].numel() for name in tensors)
            if whole and not tensors <= seen and kernel.why_not_args(priced) is None:
                inputs = spec.make_inputs(case, SCHEMES[scheme], CPU, 0)
                packs = {spec.prepared: packed(kernel.prepare, spec.prepared, inputs)} if kernel.prepare else {}
                yield (
                    {name: value for name, value in (inputs | packs).items() if name in kernel.accepted},
                    tensors - seen,
                )
                seen |= tensors


def other(dtype: torch.dtype) -> torch.dtype:
    """Another dtype of the same kind."""
    if dtype.is_floating_point:
        return torch.float16 if dtype == torch.float32 else torch.float32
    return torch.int32 if dtype == torch.int64 else torch.int64


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)
def test_one_dimension_more_and_another_dtype_are_refused(kernel: Kernel) -> None:
    for inputs, names in calls(kernel):
        for name in sorted(names):
            tensor, argument = inputs[name], f"{kernel.op}.{name}"
            if not isinstance(tensor, torch.Tensor) or argument in OWN_WORDS:
                continue
            shape = re.escape(str((1, *tensor.shape)))
            no_kernels = torch.float64 if tensor.is_floating_point() else torch.int16
            changes = [(tensor[None], rf"{name}: expected shape \(.*\), got {shape}")]
            changes += [(tensor.to(no_kernels), f"{name}: expected .*torch.*, got {no_kernels}")]
            if argument not in CHOOSES:
                changes += [(tensor.to(other(tensor.dtype)), r"\w+: expected .*torch.*, got torch")]
            for change, message in changes:
                with pytest.raises(ValueError, match=message):
                    kernel.fn(**inputs | {name: change})

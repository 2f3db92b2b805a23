"""Names the ways in which a wrong kernel looks right, where its outputs show them.

Kernels do this by mistake, and generated ones often (Ouyang et al., KernelBench, 2025; reports in the public kernel
contests of 2025 and 2026): they keep answers between calls, finish their work after the call, or return memory that
they did not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflab.bench.core.poison import SENTINEL_BYTE, bits, same_bits
from rooflab.bench.core.system_time import time
from rooflab.reference.spec import OpSpec, Outputs

LATE_S = 0.1
"""How long to watch an output for late writes."""


def aliases(output: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether `output` shares memory with `buffer`, even as another object."""
    if not output.numel() or output.device != buffer.device:
        return False
    storage = buffer.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride(), strict=True))
    begin, end = output.data_ptr(), output.data_ptr() + (last + 1) * output.element_size()
    return begin < storage.data_ptr() + storage.nbytes() and storage.data_ptr() < end


def changes_later(outputs: Outputs, read: Outputs) -> str | None:
    """A fault if `outputs` change from the values `read` within `LATE_S`."""
    ends = time.monotonic() + LATE_S
    while all(same_bits(now, was) for now, was in zip(outputs, read, strict=True)):
        if time.monotonic() > ends:
            return None
        time.sleep(0.002)
    return "a thread that finishes later: the output changed after the call had returned"


def never_written(read: Outputs) -> bool:
    """Whether outputs hold only poison: NaN, the sentinel, or torch's value for uninitialised integers."""
    return bool(read) and all(output.numel() and _is_poison(output) for output in read)


def _is_poison(output: torch.Tensor) -> bool:
    if output.dtype.is_floating_point:
        return bool(output.isnan().all())
    if output.dtype in (torch.bool, torch.uint8):
        return False  # poison is an ordinary value there
    fresh = bool((output == torch.iinfo(output.dtype).max).all())
    return fresh or bool((bits(output) == SENTINEL_BYTE).all())


def kept_names(spec: OpSpec, inputs: Mapping[str, Any]) -> frozenset[str]:
    """Names of the weights: a kernel may keep what it computes from a weight while it is the same tensor."""
    beside = spec.prepared_with
    return frozenset(name for name in inputs if name in (spec.prepared, *beside, "weight"))


def alike(inputs: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether both have the same shapes and scalars, so that the values of one fit into the memory of the other."""
    return all(
        isinstance(value, torch.Tensor) and value.shape == others[name].shape
        if isinstance(others[name], torch.Tensor)
        else value == others[name]
        for name, value in inputs.items()
    )

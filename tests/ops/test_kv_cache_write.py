"""kv_cache_write: slots outside of the cache, and the slots of the op's inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_kernels import META, each, here

from rooflab.kernels.registry import Kernel
from rooflab.reference.kv_cache_write import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNELS = here("kv_cache_write")
TRITON = here("kv_cache_write", "triton")


def inputs(slots: list[int], **caches: torch.Tensor) -> dict[str, Any]:
    """Token t has k = t + 1 and v = -(t + 1); two heads of width 3; caches of 3 blocks of 4 slots, full of zeros."""
    k = torch.arange(1.0, len(slots) + 1).view(-1, 1, 1).repeat(1, 2, 3)
    zeros = {name: torch.zeros(3, 4, 2, 3) for name in ("k_cache", "v_cache")}
    return {"k": k, "v": -k, **zeros, "slot_mapping": torch.tensor(slots, dtype=torch.int64), **caches}


@each(TRITON)
def test_a_slot_past_the_cache_is_skipped(kernel: Kernel) -> None:
    pool = torch.zeros(2, 4, 4, 2, 3)
    made = inputs([12, 1, 15], k_cache=pool[0, :3], v_cache=pool[1, :3])
    kernel(**made)
    for cache, value in ((pool[0], 2.0), (pool[1], -2.0)):
        wanted = torch.zeros(16, 2, 3)
        wanted[1] = value
        assert torch.equal(cache.flatten(0, 1), wanted)


@each([kernel for kernel in KERNELS if kernel.backend == "torch"])
def test_torch_raises_on_a_slot_past_the_cache(kernel: Kernel) -> None:
    with pytest.raises(IndexError):
        kernel(**inputs([12]))


def test_made_slots_are_distinct_and_as_many_skipped_as_asked() -> None:
    case = Case(T=13, H_kv=1, D=4, num_blocks=4, block_size=4, skipped=4)
    slots = SPEC.make_inputs(case, SCHEMES["fp32"], META, 3)["slot_mapping"].tolist()
    assert slots.count(-1) == 4
    used = [slot for slot in slots if slot >= 0]
    assert len(set(used)) == 9
    assert set(used) <= set(range(16))

"""kv_cache_write: slots by hand, skipped tokens, nothing else touched, packed views, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooflab.kernels.registry import Kernel, kernels
from rooflab.reference.kv_cache_write import SPEC
from rooflab.reference.spec import SCHEMES, Case

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in kernels("kv_cache_write").values() if kernel.why_not_here(CPU) is None]
TRITON = [kernel for kernel in KERNELS if kernel.backend == "triton"]
by_id = lambda kernel: kernel.name


def inputs(slots: list[int], **change: Any) -> dict[str, Any]:
    """Token t has k = t + 1 and v = -(t + 1); two heads of width 3; caches of 3 blocks of 4 slots, full of zeros."""
    k = torch.arange(1.0, len(slots) + 1).view(-1, 1, 1).repeat(1, 2, 3)
    caches = {name: torch.zeros(3, 4, 2, 3) for name in ("k_cache", "v_cache")}
    return {"k": k, "v": -k, **caches, "slot_mapping": torch.tensor(slots, dtype=torch.int64), **change}


def slots_of(cache: torch.Tensor) -> list[float]:
    """One value per slot; all values of a slot must agree."""
    flat = cache.flatten(0, 1).flatten(1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_block_and_offset(kernel: Kernel) -> None:
    made = inputs([11, 0, 4, 3])
    assert kernel(**made) is None
    assert slots_of(made["k_cache"]) == [2, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 1]
    assert slots_of(made["v_cache"]) == [-2, 0, 0, -4, -3, 0, 0, 0, 0, 0, 0, -1]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_a_skipped_token_writes_nothing_and_above_all_not_the_last_slot(kernel: Kernel) -> None:
    for slots, expected in [
        ([-1, 5], [0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]),
        ([5, -1], [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]),
        ([-1, 0, -1, 11, -1], [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4]),
        ([-1, -1], [0] * 12),
        ([], [0] * 12),
    ]:
        made = inputs(slots)
        kernel(**made)
        assert slots_of(made["k_cache"]) == expected
        assert slots_of(made["v_cache"]) == [-value for value in expected]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_the_rest_of_the_cache_keeps_its_bits(kernel: Kernel) -> None:
    """Unused slots hold NaN here, as a fresh cache may."""
    caches = {name: torch.full((3, 4, 2, 3), torch.nan) for name in ("k_cache", "v_cache")}
    kernel(**inputs([7, -1], **caches))
    for cache in caches.values():
        flat = cache.flatten(0, 1)
        assert not flat[7].isnan().any()
        assert flat[[slot for slot in range(12) if slot != 7]].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
@pytest.mark.parametrize("slots", [[2, 9, 6], [2, -1, 6]])
def test_views_of_a_packed_projection_and_of_a_pool(kernel: Kernel, slots: list[int]) -> None:
    made = inputs(slots)
    packed = torch.full((3, 7, 3), torch.nan)
    packed[:, 3:5], packed[:, 5:7] = made["k"], made["v"]
    pool = torch.zeros(2, 2, 3, 4, 2, 3)  # (layers, k and v, ...)
    kernel(**{**made, "k": packed[:, 3:5], "v": packed[:, 5:7], "k_cache": pool[1, 0], "v_cache": pool[1, 1]})
    kernel(**made)
    assert torch.equal(pool[1, 0], made["k_cache"])
    assert torch.equal(pool[1, 1], made["v_cache"])
    assert (pool[0] == 0.0).all()


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_a_slot_past_the_cache_is_skipped(kernel: Kernel) -> None:
    pool = torch.zeros(2, 4, 4, 2, 3)
    made = inputs([12, 1, 15], k_cache=pool[0, :3], v_cache=pool[1, :3])
    kernel(**made)
    assert slots_of(pool[0]) == [0, 2, *[0] * 14]
    assert slots_of(pool[1]) == [0, -2, *[0] * 14]


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.backend == "torch"], ids=by_id)
def test_torch_raises_on_a_slot_past_the_cache(kernel: Kernel) -> None:
    with pytest.raises(IndexError):
        kernel(**inputs([12]))


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_offsets_past_2_31(kernel: Kernel) -> None:
    """A cache of 2**31 + 64 values, of which one slot is touched: the one that starts at 2**31."""
    cache = torch.empty(2**25 + 1, 1, 1, 64, dtype=torch.float16)
    k = torch.arange(64, dtype=torch.float16).view(1, 1, 64)
    cache[-1] = 0.0
    kernel(k=k, v=k, k_cache=cache, v_cache=cache, slot_mapping=torch.tensor([2**25]))
    assert torch.equal(cache[-1], k)


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_heads_2_31_apart(kernel: Kernel) -> None:
    """Heads 2**30 values apart, of which the third begins at 2**31; nothing between them is touched."""
    k = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((1, 3, 64), (64, 2**30, 1))
    k.copy_(torch.arange(192.0).view(1, 3, 64))
    cache = torch.zeros(1, 1, 3, 64, dtype=torch.float16)
    kernel(k=k, v=k, k_cache=cache, v_cache=cache.clone(), slot_mapping=torch.tensor([0]))
    assert torch.equal(cache[0], k)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_refusals(kernel: Kernel) -> None:
    for change, message in [
        ({"k": torch.ones(1, 6)}, r"k: expected shape \(\*, \*, \*\), got \(1, 6\)"),
        ({"v": torch.ones(2, 2, 3)}, r"v: expected shape \(1, 2, 3\), got \(2, 2, 3\)"),
        ({"v": torch.ones(1, 2, 3).half()}, "v: expected torch.float32, got torch.float16"),
        ({"k": torch.ones(1, 3, 2).mT}, "k: expected stride 1"),
        ({"k_cache": torch.ones(3, 4, 2, 4)}, r"k_cache: expected shape \(\*, \*, 2, 3\), got \(3, 4, 2, 4\)"),
        ({"v_cache": torch.ones(2, 4, 2, 3)}, r"v_cache: expected shape \(3, 4, 2, 3\), got \(2, 4, 2, 3\)"),
        ({"k_cache": torch.ones(4, 3, 2, 3).transpose(0, 1)}, "k_cache: expected a contiguous tensor"),
        ({"v_cache": torch.ones(3, 4, 2, 3).half()}, "v_cache: expected torch.float32, got torch.float16"),
        ({"slot_mapping": torch.tensor([0, 1])}, r"slot_mapping: expected shape \(1\), got \(2,\)"),
        ({"slot_mapping": torch.tensor([0], dtype=torch.int32)}, "slot_mapping: expected torch.int64"),
        ({"v": torch.ones(1, 2, 3, device="meta")}, "v: expected a tensor on cpu, got meta"),
        ({"slot_mapping": torch.tensor([0], device="meta")}, "slot_mapping: expected a tensor on cpu, got meta"),
    ]:
        made = inputs([0])
        with pytest.raises(ValueError, match=message):
            kernel(**{**made, **change})
        assert (made["k_cache"] == 0.0).all()
        assert (made["v_cache"] == 0.0).all()


def test_a_case_that_does_not_fit_is_refused() -> None:
    case = Case(T=17, H_kv=1, D=4, num_blocks=2, block_size=8, skipped=0)
    with pytest.raises(ValueError, match=r"case: expected skipped <= T <= num_blocks \* block_size"):
        SPEC.make_inputs(case, SCHEMES["fp32"], CPU, 0)


def test_made_slots_are_distinct_and_as_many_skipped_as_asked() -> None:
    case = Case(T=13, H_kv=1, D=4, num_blocks=4, block_size=4, skipped=4)
    slots = SPEC.make_inputs(case, SCHEMES["fp32"], torch.device("meta"), 3)["slot_mapping"].tolist()
    assert slots.count(-1) == 4
    used = [slot for slot in slots if slot >= 0]
    assert len(set(used)) == 9
    assert set(used) <= set(range(16))


def test_cost_leaves_skipped_tokens_out() -> None:
    made = SPEC.make_inputs(
        Case(T=4, H_kv=2, D=8, num_blocks=2, block_size=4, skipped=1), SCHEMES["bf16"], torch.device("meta"), 0
    )
    cost = SPEC.cost(**made)
    moved = 3 * 2 * 2 * 8 * 2  # three tokens, k and v, 16 values of two bytes
    assert (cost.read_bytes, cost.write_bytes) == (4 * 8 + moved, moved)

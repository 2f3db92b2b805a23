"""gemm_grouped: groups of every kind, panels, refusals, and routing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from op_kernels import each, here, refuses

from rooflab.kernels.gemm_grouped._configs import panels
from rooflab.kernels.registry import Kernel, get_kernel
from rooflab.reference.gemm_grouped import route

KERNELS = here("gemm_grouped")


def bounds(*ends: int) -> torch.Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def weights(E: int, K: int, N: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(E, N, K, dtype=dtype).mT


@each(KERNELS)
@pytest.mark.parametrize("ends", [(0, 0, 0, 37), (37, 37, 37, 37), (1, 2, 3, 37), (16, 32, 33, 37), (15, 31, 36, 37)])
def test_groups_of_every_kind(kernel: Kernel, ends: tuple[int, ...]) -> None:
    """Of experts in either order of storage, where the kernel takes both."""
    a, b, offsets = torch.randn(37, 16), weights(4, 16, 24), bounds(*ends)
    starts = offsets.tolist()
    wanted = torch.cat([a[s:t].double() @ b[e].double() for e, (s, t) in enumerate(pairwise(starts))]).float()
    for stored in (b, b.contiguous()):
        if stored is b or kernel.why_not_args({"a": a, "b": stored, "offsets": offsets}) is None:
            torch.testing.assert_close(kernel(a=a, b=stored, offsets=offsets), wanted)


def test_panels_are_enough_and_nobody_shares_one() -> None:
    """Expert e's panels begin at floor(offset / block) + e: over every split of few rows, and over random ones."""
    draws = [torch.randint(0, 40, (4,)).cumsum(0).tolist() for _ in range(300)]
    for ends in [[i, j, k, 6] for i in range(7) for j in range(i, 7) for k in range(j, 7)] + draws:
        for block in (1, 4, 16):
            starts = [0, *ends[:-1]]
            free = 0
            for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
                first = start // block + expert
                assert first >= free
                free = first + -(-(end - start) // block)
            assert free <= panels(ends[-1], 4, block)


@each(KERNELS)
def test_refusals(kernel: Kernel) -> None:
    changes = [
        ({"b": torch.ones(0, 4, 3), "offsets": bounds()}, "b: expected an expert for the 2 rows of a, got none"),
        ({"offsets": bounds(1, 2).to("meta")}, "offsets: expected a tensor on cpu, got one on meta"),
        ({"offsets": bounds(1, 1)}, "offsets: expected offsets from 0 to 2 that never fall, got"),
    ]
    refuses(kernel.fn, lambda: {"a": torch.ones(2, 4), "b": weights(2, 4, 4), "offsets": bounds(1, 2)}, changes)


def test_experts_that_lie_apart_are_refused_by_maps_and_by_torch() -> None:
    a, offsets, half = torch.ones(16, 64), bounds(4, 8, 16), torch.float16
    apart = torch.ones(3, 40, 64, dtype=half)[:, :32].mT
    with pytest.raises(ValueError, match="experts that follow one another in memory"):
        get_kernel("gemm_grouped", "cooperative").fn(a.half(), apart, offsets)
    odd = torch.ones(3 * (16 * 64 + 1)).as_strided((3, 64, 16), (16 * 64 + 1, 1, 64))
    for left, right, name in ((a, odd, "b"), (torch.ones(16, 9), weights(3, 9, 16), "a")):
        with pytest.raises(ValueError, match=f"^{name}: torch wants stride 1"):
            get_kernel("gemm_grouped", "library").fn(left, right, offsets)


def test_routing() -> None:
    """Every row goes to an expert, no token twice to one, and skew goes from none to all to one."""
    for T, top_k, E, skew in ((4096, 2, 8, 0.0), (16384, 8, 128, 1.0), (70, 1, 5, 100.0), (8, 4, 4, 0.0)):
        offsets = route(T, top_k, E, skew, 0)
        sizes = offsets.diff()
        assert offsets.dtype == torch.int32 and offsets[0] == 0 and offsets[-1] == T and (sizes >= 0).all()
        assert sizes.max() <= T // top_k
    even, zipf = (route(4096, 1, 8, skew, 0).diff().sort().values for skew in (0.0, 1.0))
    assert even[0] > 400 and zipf[-1] > 1200 and zipf[0] < 300
    assert route(70, 1, 5, 100.0, 3).diff().max() == 70
    for T, top_k in ((7, 2), (8, 5), (8, 0)):
        with pytest.raises(ValueError, match="top_k: expected a divisor of T="):
            route(T, top_k, 4, 0.0, 0)

"""gemm_grouped: groups of every kind, who reads offsets, refusals, routing, and CTAs with several tiles."""

from __future__ import annotations

import pytest
import torch
from op_kernels import META, each, here, refuses, slow

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.emulate.calls import call
from rooflab.kernels.gemm_grouped._configs import panels
from rooflab.kernels.registry import Kernel, get_kernel, kernels
from rooflab.reference.gemm_grouped import SPEC, route
from rooflab.reference.spec import SCHEMES, Case

KERNELS = here("gemm_grouped")
RUNGS = [kernel for kernel in kernels("gemm_grouped").values() if kernel.role == "optimized"]


def bounds(*ends: int) -> torch.Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def weights(E: int, K: int, N: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(E, N, K, dtype=dtype).mT


def expected(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    edges = offsets.tolist()
    parts = [a[s:t].double() @ b[e].double() for e, (s, t) in enumerate(zip(edges[:-1], edges[1:], strict=True))]
    return torch.cat(parts)


@each(KERNELS)
@pytest.mark.parametrize("ends", [(0, 0, 0, 37), (37, 37, 37, 37), (1, 2, 3, 37), (16, 32, 33, 37), (15, 31, 36, 37)])
def test_groups_of_every_kind(kernel: Kernel, ends: tuple[int, ...]) -> None:
    """Of experts in either order of storage, where the kernel takes both."""
    a, b, offsets = torch.randn(37, 16), weights(4, 16, 24), bounds(*ends)
    for stored in (b, b.contiguous()):
        if stored is b or kernel.why_not_args({"a": a, "b": stored, "offsets": offsets}) is None:
            torch.testing.assert_close(kernel(a=a, b=stored, offsets=offsets), expected(a, b, offsets).float())


@each(RUNGS)
def test_the_host_does_not_read_the_offsets(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets without values: a launcher that reads one raises. The grid is bounded by the shapes alone."""
    grids = []

    class Launch:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(__import__(kernel.fn.__module__, fromlist=["x"]), "_gemm", Launch())
    inputs = SPEC.make_inputs(Case(T=4096, top_k=2, E=8, N=512, K=256, skew=0.0), SCHEMES["bf16"], META, 0)
    kernel(**{**inputs, "offsets": inputs["offsets"].to("meta")})
    config = kernel.tuning.heuristic(Case(T=4096, E=8, N=512, K=256))
    tiles = panels(4096, 8, config.block_m) * -(-512 // config.block_n)
    assert grids == [(min(tiles, 132) if kernel.name == "cooperative" else tiles,)]


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


def test_cooperative_says_what_it_wants_beyond_tma() -> None:
    kernel, half = get_kernel("gemm_grouped", "cooperative"), torch.float16
    a, offsets = torch.ones(16, 64, dtype=half), bounds(4, 8, 16)
    apart = torch.ones(3, 40, 64, dtype=half)[:, :32].mT
    changes = [
        ({"a": a.float(), "b": weights(3, 64, 32)}, "a: expected .* takes it"),
        ({"b": apart}, "experts that follow one another in memory"),
        ({"b": weights(3, 64, 33, half)}, "N of whole 16 bytes"),
        ({"b": weights(3, 64, 32, half), "out": torch.ones(16, 36, dtype=half)[:, 4:]}, "out: expected an address"),
    ]
    refuses(kernel.fn, lambda: {"a": a, "offsets": offsets}, changes)


def test_the_library_says_what_torch_does_not_take() -> None:
    kernel = get_kernel("gemm_grouped", "library")
    reason = kernel.why_not_args({"a": torch.ones(3, 9), "b": weights(2, 9, 8), "offsets": bounds(1, 3)}).reason
    assert "gemm_grouped/library: a: torch wants stride 1" in str(reason)
    apart = torch.ones(3 * (16 * 8 + 1)).as_strided((3, 8, 16), (16 * 8 + 1, 1, 8))
    reason = kernel.why_not_args({"a": torch.ones(3, 8), "b": apart, "offsets": bounds(1, 2, 3)}).reason
    assert "b: torch wants stride 1 in one dimension and addresses and strides of whole 16 bytes" in str(reason)


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
    for T, top_k, E in ((7, 2, 4), (8, 5, 4), (8, 0, 4)):
        with pytest.raises(ValueError, match=f"top_k: expected a divisor of T={T} from 1 to E={E}, got {top_k}"):
            route(T, top_k, E, 0.0, 0)


@pytest.mark.more
@pytest.mark.parametrize("scheme", ["bf16", slow("fp16")])
def test_a_cta_walks_over_tiles_of_several_experts(scheme: str) -> None:
    """Some 220 tiles for 132 CTAs, of which the first and the last run; whole tiles, parts, and halves without rows."""
    case = Case(T=1200, top_k=2, E=6, N=5120, K=136, skew=0.7)
    answer = call(KernelCase("gemm_grouped", "cooperative", case, SCHEMES[scheme]), sample=0).answer
    assert answer["status"] == "OK" and answer["of"] == 132, answer

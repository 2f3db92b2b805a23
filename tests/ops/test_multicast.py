"""gemm/multicast and gemm_fp8/multicast: tiles and rings of clusters in the emulator, and bytes from L2."""

from __future__ import annotations

import pytest
from op_kernels import CPU, assert_right, emulated, slow

from rooflab.bench.emulator.results import LaunchResult
from rooflab.kernels.lib import multicast
from rooflab.kernels.lib.multicast import ClusterTile
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case


def run(op: str, case: Case, scheme: str, config: ClusterTile, seed: int = 0) -> LaunchResult:
    """One call in the emulator, judged; its one launch."""
    spec = get_op(op)
    inputs = spec.make_inputs(spec.check_case(case), SCHEMES[scheme], CPU, 0)
    out, (launch,) = emulated(get_kernel(op, "multicast"), **inputs, config=config, order=seed)
    assert_right(spec, out, inputs, SCHEMES[scheme])
    assert launch.shared_wavefronts == launch.shared_wavefronts_least
    return launch


@pytest.mark.parametrize("seed", [0, slow(3)])
@pytest.mark.parametrize(
    ("op", "scheme", "case", "sizes"),
    [
        ("gemm", "fp16", Case(M=392, N=136, K=136, layout="NN", bias=True), (2, 128, 2, 2, 1)),
        ("gemm_fp8", "fp8_e4m3", Case(M=129, N=200, K=144, scales="block", bias=False), (2, 128, 5, 8, 2)),
        *(
            pytest.param(*more, marks=pytest.mark.more)
            for more in (
                ("gemm", "bf16", Case(M=200, N=520, K=200, layout="NT", bias=True, residual=True), (2, 256, 3, 8, 2)),
                ("gemm", "bf16", Case(M=264, N=328, K=72, layout="TN", bias=False, residual=True), (2, 128, 4, 8, 2)),
                ("gemm", "bf16", Case(M=1, N=37, K=72, layout="NT", bias=True), (2, 256, 2, 8, 4)),
                ("gemm_fp8", "fp8_e4m3", Case(M=400, N=264, K=400, scales="block", bias=True), (3, 128, 3, 8, 2)),
                ("gemm_fp8", "fp8_e4m3", Case(M=130, N=136, K=272, scales="tensor", bias=True), (2, 128, 2, 8, 1)),
            )
        ),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_clusters_go_from_tile_to_tile_without_a_race(
    op: str, scheme: str, case: Case, sizes: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tiles on one cluster, the ring round several times, odd edges; copies and warps in two orders."""
    config = ClusterTile(*sizes)
    monkeypatch.setattr(multicast, "sm_count", lambda device: multicast.CLUSTER_CTAS)
    run(op, case, scheme, config, seed)


def test_a_cluster_asks_l2_once_for_what_it_shares() -> None:
    case = Case(M=256, N=256, K=128, layout="NT", bias=False)
    launch = run("gemm", case, "bf16", ClusterTile(2, 256, 2, 8, 2))
    assert launch.bytes.copy_read == 2 * (128 + 128) * 128 * 2, "each CTA asks for half of b"
    assert launch.bytes.tma_load == 2 * (128 + 256) * 128 * 2, "and has the whole of it"

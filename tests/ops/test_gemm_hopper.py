"""gemm in CUDA C++ and Gluon, and its rungs for few rows of a: rings in the emulator, how work is shared out, and what
their code needs.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from compiled import compile_kernel
from compiled_sizes import assert_is_its_footprint, compiled
from op_kernels import META, check_emulated, slow
from test_ptx_mutants import asked

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core.outside import CheckTask
from rooflab.bench.emulate.calls import call
from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.gemm.cooperative import Ring
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case

BF16 = SCHEMES["bf16"]


def _coop(m: int, n: int, k: int, stages: int, store_n: int) -> dict[str, int]:
    return {"block_m": m, "block_n": n, "block_k": k, "stages": stages, "group_m": 2, "store_n": store_n}


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "scheme", "config"),
    [
        ("M=136,N=72,K=136,layout=NN,bias=true,residual=true", "bf16", _coop(128, 64, 64, 3, 64)),
        ("M=136,N=72,K=104,layout=TN,bias=true", "fp16", _coop(128, 64, 32, 6, 32)),
        slow("M=300,N=136,K=72,layout=NT,bias=false", "bf16", _coop(256, 128, 64, 3, 64)),
        slow("M=136,N=72,K=72,layout=NT,bias=true,residual=true", "tf32", _coop(128, 64, 32, 4, 32)),
        slow("M=200,N=520,K=136,layout=NT,bias=false", "bf16", _coop(128, 256, 64, 4, 128)),
    ],
)
def test_a_cta_goes_from_tile_to_tile_without_a_race(case: str, scheme: str, config: dict[str, int]) -> None:
    """All tiles on one SM, the ring round several times, in the order of the program and in drawn ones."""
    request = {"op": "gemm", "kernel": "cooperative", "cases": [case], "scheme": scheme, "config": config, "sms": 1}
    assert asked({**request, "seeds": [], "clean_seeds": [0, 1], "only": []}) == {"clean": [], "mutants": []}


@pytest.mark.more
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "scheme"),
    [("NN", "bf16"), ("TN", "fp32"), ("NT", "fp32"), slow("NN", "fp32"), slow("TN", "bf16"), slow("NT", "bf16")],
)
def test_shared_tiles_meet_no_bank_conflict(layout: str, scheme: str) -> None:
    case = Case(M=128, N=128, K=24, layout=layout, bias=True, residual=True)
    found = call(KernelCase("gemm", "shared_tiles", case, SCHEMES[scheme])).answer
    assert found["status"] == "OK", found["reason"]
    (launch,) = found["launches"]
    assert launch["shared_wavefronts"] == launch["shared_wavefronts_least"] > 0


@pytest.mark.parametrize("name", ["one_thread", "shared_tiles"])
def test_any_strides(name: str) -> None:
    """Views whose every other element is NaN, and an out in a wider buffer."""
    a = torch.full((34, 66), torch.nan)[::2, ::2]
    b = torch.full((66, 38), torch.nan)[::2, ::2]
    a.copy_(torch.randn(17, 33))
    b.copy_(torch.randn(33, 19))
    buffer = torch.full((19, 24), 7.0)
    launch = get_kernel("gemm", name).fn
    with emulating_cuda(lambda *of: emulate(*of)):
        out = launch(a, b, out=buffer[1:18, 3:22])
        found = launch(torch.ones(2, 0), torch.ones(0, 8), torch.ones(8), residual=torch.ones(2, 8))
    torch.testing.assert_close(out, (a.double() @ b.double()).float())
    assert int((buffer == 7.0).sum()) == 19 * 24 - 17 * 19
    assert found.tolist() == [[2.0] * 8] * 2, "without a K the addends remain"


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "scheme", "config"),
    [("shared_tiles", "fp32", None), ("cooperative", "bf16", Ring(128, 256, 64, 3, 16, 256))],
)
def test_nothing_spills_with_both_addends(name: str, scheme: str, config: Ring | None) -> None:
    case = Case(M=4096, N=4096, K=4096, layout="TN", bias=True, residual=True)
    ((request, info),) = compiled([KernelCase("gemm", name, case, SCHEMES[scheme], config=config)])
    assert info.stack_bytes == 0
    if config is not None:
        assert_is_its_footprint(request, info)


def case_of(M: int, N: int, K: int, **more: bool) -> Case:
    return Case(M=M, N=N, K=K, layout="NT", bias=False, **more)


@pytest.mark.parametrize("name", ["split_k", "stream_k", "swap_ab"])
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)])
def test_a_ring_keeps_as_many_bytes_on_their_way_as_hbm_needs_and_no_share_of_k_is_empty(name, N, K):
    """At least 36 KB of the weight for an SM: 4.8 TB/s for 1 us, of an H200, over 132 SMs."""
    tuning = get_kernel("gemm", name).tuning
    for M in (1, 2, 4, 8, 16, 32, 64):
        config = tuning.heuristic(case_of(M, N, K), BF16)
        assert (config.num_stages - 1) * config.block_n * config.block_k * 2 >= 36 * 1024
        if name != "stream_k":
            assert config.split * config.block_k <= K
            assert tuning.footprint(config, case_of(M, N, K), BF16).ctas >= HOPPER_SMS * 3 // 4


@pytest.mark.parametrize("name", ["split_k", "stream_k"])
def test_traffic_counts_the_partial_sums(name):
    kernel, case = get_kernel("gemm", name), case_of(16, 4096, 4096)
    inputs = get_op("gemm").make_inputs(case, BF16, META, 0)
    least, said, tile = get_op("gemm").cost_of(inputs), kernel.traffic_of(inputs), kernel.tuning.heuristic(case, BF16)
    sums = 16 * 4096 * tile.split if name == "split_k" else 2 * HOPPER_SMS * tile.block_m * tile.block_n
    assert (said.read_bytes, said.write_bytes) == (least.read_bytes + 4 * sums, least.write_bytes + 4 * sums)
    assert said.launches == 2


@pytest.mark.more
def test_rows_past_65535_are_in_the_only_dimension_of_a_grid_that_goes_on():
    config = get_kernel("gemm", "split_k").tuning.config_type(64, 64, 64, split=2, num_warps=4, num_stages=3)
    found = compile_kernel("gemm", "split_k", case_of(70_000, 300, 256), BF16, config=config)
    assert [info.grid for info in found] == [(1094 * 5, 2), (70_000, 2)]


@pytest.mark.more
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (128 * 2 * HOPPER_SMS, 4096), (4096, 1)])
def test_stream_k_adds_up_only_where_a_tile_was_cut(N, K):
    """Not where each CTA has two whole tiles, and not where a tile is one step: it cannot be cut."""
    case = case_of(16, N, K)
    launched = compile_kernel("gemm", "stream_k", case, BF16)
    said = get_kernel("gemm", "stream_k").traffic_of(get_op("gemm").make_inputs(case, BF16, META, 0))
    assert len(launched) == said.launches == (2 if (N, K) == (4096, 4096) else 1)


class Raw:
    """CuPy's kernel with static shared memory, as far as a launch uses it."""

    def __init__(self, static):
        self.shared_size_bytes = static
        self.allowed = []

    def __call__(self, grid, block, values, *, shared_mem, stream):
        assert stream.ptr == 7000

    max_dynamic_shared_size_bytes = property(fset=lambda self, nbytes: self.allowed.append(nbytes))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("static", "allowed"), [(0, [65536]), (64, [49152, 65536])])
def test_a_ring_of_48_kib_is_asked_for_beside_static_barriers(monkeypatch, static, allowed):
    cupy, raw = pytest.importorskip("cupy"), Raw(static)
    monkeypatch.setattr(cupy, "RawModule", lambda path: SimpleNamespace(get_function=lambda name: raw))
    monkeypatch.setattr(_cuda, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(_cuda, "cubin_file", lambda *arguments, **options: "file")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7000))
    kernel = _cuda.CudaKernel("", "swap_ab")
    for nbytes in (49152, 49152, 65536, 1024):
        kernel((1,), (1,), shared_bytes=nbytes)
    assert raw.allowed == allowed


FIRST = [
    ("gemv", case_of(3, 21, 2056, residual=True), "bf16"),
    ("swap_ab", case_of(5, 136, 264, residual=True), "bf16"),
    ("swap_ab", Case(M=2, N=16, K=0, layout="NT", bias=True), "bf16"),
    ("split_k", case_of(5, 72, 1030, residual=True), "bf16"),
    ("stream_k", case_of(5, 72, 530, residual=True), "bf16"),
]
MORE = [
    ("gemv", Case(M=1, N=5, K=0, layout="NT", bias=True), "fp32"),
    ("swap_ab", case_of(33, 136, 200), "fp16"),
    ("swap_ab", case_of(2, 72, 264), "tf32"),
    ("stream_k", Case(M=5, N=72, K=1, layout="NT", bias=True), "bf16"),
]


@pytest.mark.more
@pytest.mark.parametrize("runs", [FIRST, slow(MORE)], ids=["first", "more"])
def test_compiled_code_is_right_and_races_nowhere(runs):
    tasks = [CheckTask(get_kernel("gemm", name), case, SCHEMES[scheme], planted=False) for name, case, scheme in runs]
    found = check_emulated(tasks)
    assert {(result.status, result.checked_by) for result in found} == {("OK", "emulator")}, found

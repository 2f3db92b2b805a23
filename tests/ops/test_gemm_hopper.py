"""gemm in CUDA C++ and Gluon, and its rungs for few rows of a: what they refuse, how work is shared out, layouts and
rings in the emulator, and what their code needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from rooflab.kernels.gemm import split_k, stream_k
from rooflab.kernels.gemm.cooperative import Ring
from rooflab.kernels.gemm.swap_ab import TUNING as SWAP_AB
from rooflab.kernels.gemm.swap_ab import SwapAbConfig
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


def _compiled(name: str, requests: list[tuple[Case, str, Any]]) -> None:
    """Nothing spills, and a CTA needs what its footprint says and a little more."""
    entries = [KernelCase("gemm", name, case, SCHEMES[scheme], config=config) for case, scheme, config in requests]
    for request, info in compiled(entries):
        assert info.stack_bytes == 0, f"{name} spills: {request.case.id} {request.scheme.name} {request.config}"
        if name == "cooperative":
            assert_is_its_footprint(request, info)


def test_nothing_spills() -> None:
    case = Case(M=4096, N=4096, K=4096, layout="TN", bias=True, residual=True)
    _compiled("shared_tiles", [(case, "fp32", None)])
    _compiled("cooperative", [(case, "bf16", Ring(128, 256, 64, 3, 16, 256))])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_nothing_spills_with_any_addend(layout: str) -> None:
    cases = [
        Case(M=4096, N=size, K=4096, layout=layout, bias=bias, residual=residual)
        for size, bias, residual in itertools.product((4096, 4095), (True, False), (True, False))
    ]
    _compiled("shared_tiles", [(case, scheme, None) for case in cases for scheme in ("bf16", "fp32")])
    largest = [
        config
        for config in get_kernel("gemm", "cooperative").tunable.legal_configs(cases[0], BF16)
        if config.block_m * config.block_n == 2**15 and (config.block_k, config.group_m) == (64, 8)
    ]
    _compiled("cooperative", [(case, "bf16", config) for case in cases[:4] for config in largest])


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulating_cuda(lambda launch, grid, values: emulate(launch, grid, values)):  # type: ignore[arg-type,return-value]
        yield


@pytest.mark.parametrize("name", ["one_thread", "shared_tiles"])
def test_any_strides(name: str, emulated: None) -> None:
    """Views whose every other element is NaN, and an out in a wider buffer."""
    a = torch.full((34, 66), torch.nan)[::2, ::2]
    b = torch.full((66, 38), torch.nan)[::2, ::2]
    a.copy_(torch.randn(17, 33))
    b.copy_(torch.randn(33, 19))
    buffer = torch.full((19, 24), 7.0)
    launch = get_kernel("gemm", name).fn
    out = launch(a, b, out=buffer[1:18, 3:22])
    torch.testing.assert_close(out, (a.double() @ b.double()).float())
    assert int((buffer == 7.0).sum()) == 19 * 24 - 17 * 19
    found = launch(torch.ones(2, 0), torch.ones(0, 8), torch.ones(8), residual=torch.ones(2, 8))
    assert found.tolist() == [[2.0] * 8] * 2, "without a K the addends remain"


LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""N and K of Llama-3-8B's products."""
ROWS = (1, 2, 4, 8, 16, 32, 64)


def case_of(M: int, N: int, K: int, **more: bool) -> Case:
    return Case(M=M, N=N, K=K, layout="NT", bias=False, **more)


def layers() -> list[Case]:
    return [case_of(M, N, K) for N, K in LAYERS for M in ROWS]


@pytest.mark.parametrize("name", ["split_k", "swap_ab"])
def test_every_layer_has_a_cta_for_nearly_every_sm_and_no_share_of_k_is_empty(name):
    tuning = get_kernel("gemm", name).tuning
    for case in layers():
        config = tuning.heuristic(case, BF16)
        ctas = tuning.footprint(config, case, BF16).ctas
        assert ctas >= HOPPER_SMS * 3 // 4, case.id
        assert config.split * config.block_k <= int(case["K"])
        two_on_an_sm = tuning.footprint(config, case, BF16).shared_bytes <= 113 * 1024
        assert two_on_an_sm, case.id


def test_a_ring_keeps_as_many_bytes_on_their_way_as_hbm_needs():
    """At least 36 KB of the weight for an SM: 4.8 TB/s for 1 us, of an H200, over 132 SMs."""
    for case in layers():
        for name in ("split_k", "stream_k", "swap_ab"):
            config = get_kernel("gemm", name).tuning.heuristic(case, BF16)
            assert (config.num_stages - 1) * config.block_n * config.block_k * 2 >= 36 * 1024, (name, case.id)


def test_traffic_counts_the_partial_sums():
    spec, case = get_op("gemm"), case_of(16, 4096, 4096)
    inputs = {key: value for key, value in spec.make_inputs(case, BF16, META, 0).items() if value is not None}
    least = spec.cost_of(inputs)
    split = get_kernel("gemm", "split_k").traffic_of(inputs)
    config = get_kernel("gemm", "split_k").tuning.heuristic(case, BF16)
    assert split.launches == 2 and split.read_bytes - least.read_bytes == 4 * 16 * 4096 * config.split
    assert split.write_bytes - least.write_bytes == 4 * 16 * 4096 * config.split
    stream = get_kernel("gemm", "stream_k").traffic_of(inputs)
    tile = get_kernel("gemm", "stream_k").tuning.heuristic(case, BF16)
    assert stream.read_bytes - least.read_bytes == 4 * 2 * HOPPER_SMS * tile.block_m * tile.block_n
    assert get_kernel("gemm", "swap_ab").traffic_of(inputs).bytes == least.bytes


class Grids:
    """Stands for jitted kernels, and keeps the grids that they were launched on."""

    def __init__(self):
        self.found = []

    def __getitem__(self, grid):
        self.found.append(grid)
        return lambda *arguments, **options: None


@pytest.fixture
def grids(monkeypatch):
    found = Grids()
    for module, names in ((split_k, ("_gemm", "_reduce")), (stream_k, ("_gemm", "_fix_up"))):
        for name in names:
            monkeypatch.setattr(module, name, found)
    return found.found


def matrices(M, N, K):
    return torch.empty(M, K, dtype=torch.bfloat16, device=META), torch.empty(N, K, dtype=torch.bfloat16, device=META).mT


def test_rows_past_65535_are_in_the_only_dimension_of_a_grid_that_goes_on(grids):
    config = get_kernel("gemm", "split_k").tuning.config_type(64, 64, 64, split=2, num_warps=4, num_stages=3)
    split_k.split_k(*matrices(70_000, 300, 256), config=config)
    assert grids == [(1094 * 5, 2), (70_000, 2)]


def test_stream_k_adds_up_only_where_a_tile_was_cut(grids):
    for shape, launches in [
        ((16, 4096, 4096), 2),
        ((16, 128 * 2 * HOPPER_SMS, 4096), 1),  # two whole tiles for each
        ((16, 4096, 1), 1),  # of one step a tile cannot be cut, and Triton 3.6 fails to compile the second for K = 1
        ((16, 4096, 0), 1),
    ]:
        grids.clear()
        stream_k.stream_k(*matrices(*shape))
        assert len(grids) == launches
        traffic = get_kernel("gemm", "stream_k").traffic_of(dict(zip("ab", matrices(*shape), strict=True)))
        assert traffic.launches == launches and (launches == 2) == (traffic.write_bytes > 2 * shape[0] * shape[1])


class Raw:
    """CuPy's kernel with static shared memory, as far as a launch uses it."""

    def __init__(self, static):
        self.shared_size_bytes = static
        self.allowed = []

    def __call__(self, grid, block, values, *, shared_mem, stream):
        pass

    max_dynamic_shared_size_bytes = property(fset=lambda self, nbytes: self.allowed.append(nbytes))


@pytest.mark.parametrize(("static", "allowed"), [(0, [65536]), (64, [49152, 65536])])
def test_a_ring_of_48_kib_is_asked_for_beside_static_barriers(monkeypatch, static, allowed):
    config, case = SwapAbConfig(32, 64, 64, num_stages=4, split=1), case_of(32, 4096, 4096)
    assert SWAP_AB.is_legal(config, case) and SWAP_AB.footprint(config, case).shared_bytes == 48 * 1024
    raw = Raw(static)
    module = SimpleNamespace(get_function=lambda name: raw)
    monkeypatch.setattr(_cuda, "_cupy", lambda: SimpleNamespace(RawModule=lambda path: module))
    monkeypatch.setattr(_cuda, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(_cuda, "cubin_file", lambda *arguments, **options: "file")
    monkeypatch.setattr(_cuda, "_stream", lambda address: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    kernel = _cuda.CudaKernel("", "swap_ab")
    for nbytes in (49152, 49152, 65536, 1024):
        kernel((1,), (1,), shared_bytes=nbytes)
    assert raw.allowed == allowed


EMULATED = [
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
@pytest.mark.parametrize("runs", [EMULATED, slow(MORE)], ids=["first", "more"])
def test_compiled_code_is_right_and_races_nowhere(runs):
    asked = [CheckTask(get_kernel("gemm", name), case, SCHEMES[scheme], planted=False) for name, case, scheme in runs]
    found = check_emulated(asked)
    assert [(result.status, result.checked_by) for result in found] == [("OK", "emulator")] * len(asked), [
        result.describe() for result in found
    ]

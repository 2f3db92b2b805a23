"""gemm's rungs for few rows of a: how work is shared out, what they refuse, and what they must not do to memory."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rooflab.bench.emulate.checks import Asked, check_emulated
from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.configs import legal_configs
from rooflab.kernels.gemm import gemv, split_k, stream_k, swap_ab
from rooflab.kernels.gemm._skinny_operands import alignment_bytes
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case

META = torch.device("meta")
BF16 = SCHEMES["bf16"]
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""N and K of Llama-3-8B's products."""
ROWS = (1, 2, 4, 8, 16, 32, 64)


def case_of(M: int, N: int, K: int, **more: bool) -> Case:
    return Case(M=M, N=N, K=K, layout="NT", bias=False, **more)


def layers() -> list[Case]:
    return [case_of(M, N, K) for N, K in LAYERS for M in ROWS]


@pytest.mark.parametrize("module", [split_k, swap_ab], ids=["split_k", "swap_ab"])
def test_every_layer_has_a_cta_for_nearly_every_sm_and_no_share_of_k_is_empty(module):
    for case in layers():
        config = module.heuristic(case, BF16)
        ctas = module.footprint(config, case, BF16).ctas
        assert ctas >= HOPPER_SMS * 3 // 4, case.id
        assert config.split * config.block_k <= int(case["K"])
        two_on_an_sm = module.footprint(config, case, BF16).shared_bytes <= 113 * 1024
        assert two_on_an_sm, case.id


def test_a_ring_keeps_as_many_bytes_on_their_way_as_hbm_needs():
    """At least 36 KB of the weight for an SM: 4.8 TB/s for 1 us, of an H200, over 132 SMs."""
    for case in layers():
        for module in (split_k, stream_k, swap_ab):
            config = module.heuristic(case, BF16)
            assert (config.num_stages - 1) * config.block_n * config.block_k * 2 >= 36 * 1024, (module, case.id)


def test_gemv_gives_every_sm_its_warps():
    for case in (case for case in layers() if int(case["M"]) <= gemv.MOST_ROWS):
        config = gemv.heuristic(case, BF16)
        warps = gemv.footprint(config, case, BF16).ctas * gemv.WARPS
        assert warps >= HOPPER_SMS * 7 and config.rows * config.unroll == 8
        assert gemv.is_legal(config, case, BF16) and config.split == 1
    assert gemv.heuristic(case_of(1, 64, 65536), BF16).split > 1


@pytest.mark.parametrize("name", ["gemv", "split_k", "swap_ab"])
def test_no_legal_config_leaves_a_share_of_k_empty(name):
    kernel, case = get_kernel("gemm", name), case_of(2, 256, 512)
    found = legal_configs(kernel, case, BF16)
    assert found[0] == kernel.tuning.heuristic(case, BF16) and len(found) > 3
    for config in found:
        piece = config.block_k if hasattr(config, "block_k") else 256 * config.warps_k
        assert config.split == 1 or config.split * piece <= 512


def test_refusals_name_a_rung_that_takes_it():
    def reason(name, case, scheme="bf16"):
        refusal = get_kernel("gemm", name).why_not_args(get_op("gemm").make_inputs(case, SCHEMES[scheme], META, 0))
        return refusal and refusal.reason

    assert "takes up to 4 rows of a, got 5; gemm/swap_ab takes more" in reason("gemv", case_of(5, 64, 64))
    assert "transposed (N, K) weight" in reason("gemv", Case(M=1, N=64, K=64, layout="NN", bias=False))
    assert "stride 1 along K" in reason("swap_ab", Case(M=2, N=64, K=64, layout="TN", bias=False))
    assert "multiples of 16 bytes; gemm/split_k takes any" in reason("swap_ab", case_of(2, 64, 65))
    assert "precision='ieee'" in reason("swap_ab", case_of(2, 64, 64), "fp32")
    for scheme in ("bf16", "fp16", "tf32"):
        assert reason("swap_ab", case_of(2, 64, 64), scheme) is None
    for scheme in ("bf16", "fp16", "fp32", "tf32"):
        for name in ("split_k", "stream_k"):
            assert reason(name, Case(M=70, N=33, K=65, layout="TN", bias=True, residual=True), scheme) is None


@pytest.mark.parametrize("name", ["gemv", "swap_ab"])
def test_a_launcher_refuses_what_it_is_called_with_all_the_same(name):
    fn = get_kernel("gemm", name).fn
    half = torch.float16
    with pytest.raises(ValueError, match=r"b: expected shape \(8, \*\)"):
        fn(torch.ones(2, 8, dtype=half), torch.ones(9, 4, dtype=half))
    with pytest.raises(ValueError, match="b must be a transposed"):
        fn(torch.ones(2, 8, dtype=half), torch.ones(8, 16, dtype=half))
    with pytest.raises(ValueError, match="residual: expected shape"):
        fn(torch.ones(2, 8, dtype=half), torch.ones(16, 8, dtype=half).mT, residual=torch.ones(2, 8, dtype=half))
    assert fn(torch.ones(0, 8, dtype=half), torch.ones(16, 8, dtype=half).mT).shape == (0, 16)


def test_the_width_of_a_load_divides_every_row():
    half = torch.bfloat16
    a, weight = torch.ones(2, 24, dtype=half, device=META), torch.ones(4, 24, dtype=half, device=META)
    assert alignment_bytes(a, weight.mT, whole_k=True) == 16
    assert alignment_bytes(a[:, :20], weight[:, :20].mT, whole_k=True) == 8
    assert alignment_bytes(a[:, :20], weight[:, :20].mT, whole_k=False) == 16
    assert alignment_bytes(a[:, 1:21], weight[:, :20].mT, whole_k=False) == 2
    one = torch.ones(1, 23, dtype=half, device=META)
    assert alignment_bytes(one, one.mT, whole_k=False) == 16, "one row's stride says nothing"


def test_traffic_counts_the_partial_sums():
    spec, case = get_op("gemm"), case_of(16, 4096, 4096)
    inputs = {key: value for key, value in spec.make_inputs(case, BF16, META, 0).items() if value is not None}
    least = spec.cost(**inputs)
    split = get_kernel("gemm", "split_k").traffic_of(inputs)
    config = split_k.heuristic(case, BF16)
    assert split.launches == 2 and split.read_bytes - least.read_bytes == 4 * 16 * 4096 * config.split
    assert split.write_bytes - least.write_bytes == 4 * 16 * 4096 * config.split
    stream = get_kernel("gemm", "stream_k").traffic_of(inputs)
    tile = stream_k.heuristic(case, BF16)
    assert stream.read_bytes - least.read_bytes == 4 * 2 * HOPPER_SMS * tile.block_m * tile.block_n
    assert get_kernel("gemm", "swap_ab").traffic_of(inputs).bytes == least.bytes


@pytest.mark.parametrize("name", ["split_k", "stream_k"])
def test_no_k_gives_bias_and_residual(name):
    bias, residual = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, -3.0]])
    found = get_kernel("gemm", name)(a=torch.ones(2, 0), b=torch.ones(0, 3), bias=bias, residual=residual)
    assert found.tolist() == [[1.5, 2.0, 3.0], [1.0, 2.0, 0.0]]


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
    split_k.gemm(*matrices(70_000, 300, 256), config=split_k.Config(64, 64, 64, split=2, num_warps=4, num_stages=3))
    assert grids == [(1094 * 5, 2), (70_000, 2)]


@pytest.mark.parametrize(
    ("shape", "launches"),
    [
        ((16, 4096, 4096), 2),
        ((16, 128 * 2 * HOPPER_SMS, 4096), 1),  # two whole tiles for each
        ((16, 4096, 1), 1),  # of one step a tile cannot be cut, and Triton 3.6 fails to compile the second for K = 1
        ((16, 4096, 0), 1),
    ],
)
def test_stream_k_adds_up_only_where_a_tile_was_cut(grids, shape, launches):
    stream_k.gemm(*matrices(*shape))
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
    config, case = swap_ab.Config(32, 64, 64, num_stages=4, split=1), case_of(32, 4096, 4096)
    assert swap_ab.is_legal(config, case) and swap_ab.footprint(config, case).shared_bytes == 48 * 1024
    raw = Raw(static)
    module = SimpleNamespace(get_function=lambda name: raw)
    monkeypatch.setattr(_cuda, "_cupy", lambda: SimpleNamespace(RawModule=lambda path: module))
    monkeypatch.setattr(_cuda, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(_cuda, "cubin_file", lambda *arguments, **options: SimpleNamespace(with_suffix=lambda s: LOG))
    monkeypatch.setattr(_cuda, "_stream", lambda address: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    kernel = _cuda.CudaKernel("", "swap_ab")
    for nbytes in (49152, 49152, 65536, 1024):
        kernel((1,), (1,), shared_bytes=nbytes)
    assert raw.allowed == allowed


LOG = SimpleNamespace(read_text=lambda: "")


def test_a_stream_is_taken_without_a_warning():
    pytest.importorskip("cupy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [_cuda._stream(address).ptr for address in (0, 7000)] == [0, 7000]


EMULATED = [
    ("gemv", case_of(3, 21, 4104, residual=True), "bf16"),
    ("gemv", Case(M=1, N=5, K=0, layout="NT", bias=True), "fp32"),
    ("swap_ab", case_of(5, 200, 520, residual=True), "bf16"),
    ("swap_ab", case_of(33, 136, 200), "fp16"),
    ("swap_ab", case_of(2, 72, 264), "tf32"),
    ("swap_ab", Case(M=2, N=16, K=0, layout="NT", bias=True), "bf16"),
    ("split_k", case_of(5, 72, 1030, residual=True), "bf16"),
    ("stream_k", case_of(5, 72, 530, residual=True), "bf16"),
    ("stream_k", Case(M=5, N=72, K=1, layout="NT", bias=True), "bf16"),
]


def test_compiled_code_is_right_and_races_nowhere():
    asked = [Asked(get_kernel("gemm", name), case, SCHEMES[scheme], planted=False) for name, case, scheme in EMULATED]
    found = [item.result for item in check_emulated(asked)]
    assert [(result.status, result.checked_by) for result in found] == [("OK", "emulator")] * len(asked), [
        result.describe() for result in found
    ]

"""CUDA C++ without a GPU: its compilation, its cache, and the arguments of a launch; and its runs on a GPU."""

from __future__ import annotations

import ctypes
import runpy
import struct
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import cupy
import numpy as np
import pytest
import torch

from rooflab.bench.compile.compile_worker import read_cubin
from rooflab.kernels import _cuda, _pdl, _tensor_map

SCALE = """
extern "C" __global__ void scale(const float* x, float* out, float by, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = by * x[i];
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path))
    return tmp_path / "cubins"


def anew(module):
    """The names of a copy of the module, which has not looked for CuPy or the driver yet."""
    return runpy.run_path(module.__file__)


def test_a_source_compiles_for_a_hopper_with_no_gpu(cache):
    cubin = _cuda.compile_cubin(SCALE)
    found = read_cubin(cubin, "scale")
    assert found.registers > 0 and "FMUL" in found.sass
    # The flags in the ELF header hold the architecture; which of their bytes does depends on the version of CUDA.
    assert 90 in cubin[48:52] and 80 in _cuda.compile_cubin(SCALE, arch="sm_80")[48:52]
    # CuPy drops the last byte, and cuobjdump then finds no device code.
    (start,), (size, count) = struct.unpack_from("<Q", cubin, 32), struct.unpack_from("<HH", cubin, 54)
    assert len(cubin) >= start + size * count


def test_errors_and_warnings_of_the_compiler_are_told(cache):
    with pytest.raises(_cuda.CudaCompileError, match='identifier "nothing" is undefined') as failed:
        _cuda.compile_cubin('extern "C" __global__ void f() { nothing; }')
    assert "kernel.cu(1)" in failed.value.log
    with pytest.raises(_cuda.CudaCompileError, match="gpu-architecture"):
        _cuda.compile_cubin(SCALE, arch="sm_13")
    for arch in ("90a", "compute_90", "sm_90x", ""):
        with pytest.raises(ValueError, match="^arch: expected"):
            _cuda.compile_cubin(SCALE, arch=arch)
    assert not list(cache.glob("*")), "nothing of it is kept"
    assert "never referenced" in _cuda.compiler_log('extern "C" __global__ void f() { int unused; }')
    assert _cuda.compiler_log(SCALE) == ""


def test_a_cubin_is_kept_by_all_that_goes_into_it(cache, tmp_path, monkeypatch):
    first = _cuda.cubin_file(SCALE)
    first.write_bytes(b"kept")
    assert first.parent == cache and _cuda.compile_cubin(SCALE) == b"kept"
    others = [_cuda.cubin_file(SCALE + "\n"), _cuda.cubin_file(SCALE, arch="sm_80")]
    others.append(_cuda.cubin_file(SCALE, options=("-DX=1",)))
    monkeypatch.setattr(_cuda, "nvrtc_version", lambda: (99, 0))
    others.append(_cuda.cubin_file(SCALE))
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "mine.h").write_text("#define VALUE 1\n")
    monkeypatch.setattr(_cuda, "include_folders", lambda: (str(folder),))
    source = '#include "mine.h"\nextern "C" __global__ void f(int* x) { *x = VALUE; }'
    others.append(_cuda.cubin_file(source))
    (folder / "other.h").write_text("")  # as an upgrade of the package makes its folder anew
    others.append(_cuda.cubin_file(source))
    assert len({first, *others}) == 7
    assert {path.suffix for path in cache.iterdir()} == {".cubin", ".log"}, "no partial file is left"


def broken_nvrtc():
    raise RuntimeError("CuPy failed to load libnvrtc.so.13: OSError: none")


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (None, r"^cupy: expected the package, .*pip install 'rooflab\[cuda\]'.*ModuleNot"),
        (
            SimpleNamespace(cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=broken_nvrtc))),
            "^nvrtc: expected NVIDIA's run-time compiler .*failed to load libnvrtc",
        ),
    ],
)
def test_without_the_compiler_one_sentence_says_what_to_install(monkeypatch, installed, words):
    monkeypatch.setitem(sys.modules, "cupy", installed)
    with pytest.raises(ValueError, match=words):
        anew(_cuda)["compile_cubin"](SCALE)


class FakeTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    place = torch.device("cuda", 1)

    @property
    def device(self):
        return self.place


class FakeRaw:
    """CuPy's kernel, as far as a launch uses it."""

    kernel = SimpleNamespace(ptr=4242)
    shared_size_bytes = 0

    def __init__(self):
        self.launches = []
        self.allowed = []

    def __call__(self, grid, block, values, *, shared_mem, stream):
        self.launches.append((grid, block, values, shared_mem, stream))

    max_dynamic_shared_size_bytes = property(fset=lambda self, nbytes: self.allowed.append(nbytes))


@pytest.fixture
def launched(monkeypatch):
    """What CuPy is told to launch on GPUs made of Python, of which 0 is the current one."""
    raw = FakeRaw()

    @contextmanager
    def on_device(device):
        raw.used = device
        yield

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7000 + device))
    streams = SimpleNamespace(from_external=lambda stream: stream.__cuda_stream__())
    monkeypatch.setattr(cupy.cuda, "Stream", streams)
    monkeypatch.setattr(cupy, "RawModule", lambda path: SimpleNamespace(get_function=lambda name: raw))
    return raw


def test_a_launch_hands_over_addresses_widths_and_torchs_stream_and_encodes_a_map_once(launched, monkeypatch):
    encoded = []
    monkeypatch.setattr(_tensor_map.CudaMap, "encoded", lambda self: encoded.append(self.rows) or np.int32(self.rows))
    x = torch.arange(8.0).as_subclass(FakeTensor)
    one = _tensor_map.CudaMap(x, 2, 4, 4)
    struct_ = np.zeros(1, dtype=[("a", "<i4"), ("b", "<i8")])
    told = (x[2:], None, np.float32(2), np.int32(8), one, struct_, one)
    _cuda.CudaKernel(SCALE, "scale")((3,), (32, 2), *told)
    ((grid, block, values, shared_bytes, stream),) = launched.launches
    assert (grid, block, shared_bytes, stream, launched.used) == ((3,), (32, 2), 0, (0, 7001), 1)
    assert values == (x.data_ptr() + 8, 0, 2.0, 8, 2, struct_, 2) and encoded == [2]
    assert [value.itemsize for value in values[:4]] == [8, 8, 4, 4]


def test_large_shared_memory_is_asked_for_once(launched):
    kernel = _cuda.CudaKernel(SCALE, "scale")
    for nbytes in (49152, 65536, 65536, 50000, 200_000):
        kernel((1,), (1,), shared_bytes=nbytes)
    launched.shared_size_bytes = 64  # beside static memory 48 KiB is large
    _cuda.CudaKernel(SCALE, "scale")((1,), (1,), shared_bytes=49152)
    assert launched.allowed == [65536, 200_000, 49152]
    assert launched.launches[0][4] == (0, 7000), "without tensors, the current device"


def test_a_tensor_map_is_encoded_by_the_driver(monkeypatch):
    asked, status = [], [0]

    def encode(target, kind, rank, address, dims, strides, box, steps, *modes):
        asked.append((kind, rank, address.value, *map(tuple, (dims, strides, box, steps)), modes))
        assert target.value % 64 == 0
        ctypes.memset(target.value, 7, 128)
        return status[0]

    made = anew(_tensor_map)["CudaMap"](x := torch.zeros(5, 24, dtype=torch.bfloat16), 5, 20, 24)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(ValueError, match="^tensor map: expected CUDA's driver with cuTensorMapEncodeTiled, got "):
        made.encoded()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    found = [made.encoded() for _ in range(8)]  # wherever NumPy's memory lies
    assert all(value.tobytes() == b"\7" * 128 and value.size == 1 for value in found)
    assert set(asked) == {(9, 2, x.data_ptr(), (20, 5), (48,), (64, 64), (1, 1), (0, 3, 2, 0))}
    status[0] = 1
    with pytest.raises(ValueError, match="^tensor map: expected .*got error 1 for 5 rows 24 elements apart"):
        made.encoded()


class FakeDriver:
    """libcuda, as far as a dependent launch uses it; keeps what lies at the addresses."""

    status = 0

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        # CUlaunchConfig and CUlaunchAttribute as a C compiler lays them out for CUDA 13's cuda.h.
        *self.config, attributes, count = struct.unpack("3I3II4xQQI4x", bytes(config._obj))
        assert count == 1
        self.attribute, self.function = struct.unpack("Qi60x", ctypes.string_at(attributes, 72)), function.value
        self.values = [ctypes.string_at(place, size) for place, size in zip(arguments, (8, 8, 4, 4), strict=True)]
        return self.status

    def cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE" if status == 1 else None


def test_a_dependent_launch_tells_the_driver_so(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    values = (np.uint64(1 << 40), np.uint64(0), np.float32(2), np.int32(8))
    told, launch = (4242, (3,), (32, 2), values, 65536, 7001), anew(_pdl)["launch_dependent"]
    launch(*told)
    assert driver.config == [3, 1, 1, 32, 2, 1, 65536, 7001]
    assert driver.attribute == (6, 1) and driver.function == 4242
    assert driver.values == [value.tobytes() for value in values]
    driver.status = 1
    with pytest.raises(RuntimeError, match="^cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE$"):
        launch(*told)


def test_a_kernel_that_waits_is_launched_early_and_another_is_not(launched, monkeypatch):
    told = []
    monkeypatch.setattr(_cuda, "launch_dependent", lambda *of: told.append(of))
    kernel = _cuda.CudaKernel('#include "pdl.h"\n' + SCALE, "scale", ("-DX",), dependent=True)
    x = torch.arange(8.0).as_subclass(FakeTensor)
    kernel((3,), (32, 2), x, None, shared_bytes=65536)
    assert told == [(4242, (3,), (32, 2), (x.data_ptr(), 0), 65536, 7001)] and not launched.launches
    assert kernel.options == ("-DX", "-DPDL") and launched.allowed == [65536]
    with pytest.raises(ValueError, match="^dependent: expected a source that includes pdl.h"):
        _cuda.load(SCALE, "scale", dependent=True)


ELSEWHERE = torch.zeros(1)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        *(
            (bad, "a tensor, None or a NumPy scalar .* in place 1, got")
            for bad in (3, 2.0, True, "x", [1], np.zeros(2))
        ),
        (ELSEWHERE, "tensors on one GPU, got cpu, cuda:1"),
    ],
)
def test_an_argument_of_no_known_width_and_tensors_elsewhere_are_refused(launched, bad, words):
    here = ELSEWHERE.as_subclass(FakeTensor)
    with pytest.raises(ValueError, match=f"^arguments: expected {words}"):
        _cuda.CudaKernel(SCALE, "scale")((1,), (1,), here, bad)
    assert not launched.launches


def test_the_architecture_is_the_cards_own(monkeypatch):
    for capability, arch in (((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert _cuda.architecture() == arch


@pytest.mark.gpu
def test_on_a_gpu_it_writes_what_it_should_on_the_current_stream(cache):
    x = torch.randn(1000, device="cuda")
    out = torch.full_like(x, torch.nan)
    kernel = _cuda.load(SCALE, "scale")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # a launch on another stream would be over before this
        out.fill_(0)
        kernel((8,), (128,), x, out, np.float32(3), np.int32(1000))
    side.synchronize()
    assert torch.equal(out, 3 * x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel((8,), (128,), x, out, np.float32(5), np.int32(1000))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, 5 * x)
    assert kernel.raw(torch.cuda.current_device()).attributes["local_size_bytes"] == 0

"""CUDA C++ without a GPU: what compiles, what is kept, what a launch is handed; and on a GPU, that it runs."""

import ctypes
import struct
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rooflab.bench.compile.worker import read_cubin
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


@pytest.fixture
def compiles(monkeypatch):
    """Counts the compilations."""
    calls = []
    compile_ = _cuda._compile
    monkeypatch.setattr(_cuda, "_compile", lambda *args: calls.append(args) or compile_(*args))
    return calls


def test_a_source_compiles_for_a_hopper_with_no_gpu(cache):
    cubin = _cuda.compile_cubin(SCALE)
    found = read_cubin(cubin, "scale")
    assert found.target.startswith("sm_90") and found.registers > 0 and "FMUL" in found.sass  # 12.8 prints no letter
    assert read_cubin(_cuda.compile_cubin(SCALE, arch="sm_80"), "scale").target == "sm_80"


def test_a_cubin_is_whole(cache):
    """CuPy drops the last byte, and cuobjdump then finds no device code."""
    cubin = _cuda.compile_cubin(SCALE)
    (start,), (size, count) = struct.unpack_from("<Q", cubin, 32), struct.unpack_from("<HH", cubin, 54)
    assert len(cubin) >= start + size * count
    assert _cuda._whole(cubin[:-1]) == cubin


@pytest.mark.parametrize("header", ["cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cuda/barrier"])
def test_nvidias_headers_are_found(cache, header):
    _cuda.compile_cubin(f'#include <{header}>\nextern "C" __global__ void f() {{}}')


def test_of_two_toolkits_the_first_wins_whole():
    """The wheels' headers before a toolkit's, CCCL before the copies of its files that lie elsewhere."""
    folders = _cuda.include_folders()
    assert folders[0] == str(_cuda.LIB) and folders[1].endswith("cccl") and len(set(folders)) == len(folders)
    found = [folder for folder in folders if (Path(folder) / "cuda_bf16.h").is_file()]
    assert found and folders.index(found[0]) == 2


def test_an_error_carries_the_compilers_log(cache):
    with pytest.raises(_cuda.CudaCompileError, match='identifier "nothing" is undefined') as failed:
        _cuda.compile_cubin('extern "C" __global__ void f() { nothing; }')
    assert "kernel.cu(1)" in failed.value.log
    with pytest.raises(_cuda.CudaCompileError, match="gpu-architecture"):
        _cuda.compile_cubin(SCALE, arch="sm_13")
    assert not list(cache.glob("*")), "nothing of it is kept"


def test_warnings_are_kept(cache):
    source = 'extern "C" __global__ void f() { int unused; }'
    assert "never referenced" in _cuda.compiler_log(source)
    assert _cuda.compiler_log(SCALE) == ""


def test_an_architecture_that_is_none_is_refused():
    for arch in ["90a", "compute_90", "sm_90x", ""]:
        with pytest.raises(ValueError, match="^arch: expected one like sm_90a"):
            _cuda.compile_cubin(SCALE, arch=arch)


def test_a_cubin_is_kept_by_all_that_goes_into_it(cache, compiles, monkeypatch):
    first = _cuda.cubin_file(SCALE)
    assert first.parent == cache and _cuda.cubin_file(SCALE) == first and len(compiles) == 1
    others = [_cuda.cubin_file(SCALE + "\n"), _cuda.cubin_file(SCALE, arch="sm_80")]
    others.append(_cuda.cubin_file(SCALE, options=("-DX=1",)))
    monkeypatch.setattr(_cuda, "nvrtc_version", lambda: (99, 0))
    others.append(_cuda.cubin_file(SCALE))
    assert len({first, *others}) == 5 and len(compiles) == 5
    assert {path.suffix for path in cache.iterdir()} == {".cubin", ".log"}, "no partial file is left"


def test_headers_are_part_of_what_a_cubin_is_kept_by(cache, compiles, tmp_path, monkeypatch):
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "mine.h").write_text("#define VALUE 1\n")
    monkeypatch.setattr(_cuda, "include_folders", lambda: (str(folder),))
    source = '#include "mine.h"\nextern "C" __global__ void f(int* x) { *x = VALUE; }'
    first = _cuda.cubin_file(source)
    assert _cuda.cubin_file(source) == first and len(compiles) == 1
    (folder / "other.h").write_text("")  # as an upgrade of the package makes its folder anew
    assert _cuda.cubin_file(source) != first and len(compiles) == 2


@pytest.fixture
def forgotten():
    """What was found out about CuPy is found out anew, before and after."""

    def forget():
        for function in (_cuda._cupy, _cuda._nvrtc):
            function.cache_clear()

    forget()
    yield
    forget()


def test_without_cupy_one_sentence_says_what_to_install(forgotten, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match=r"^cupy: expected the package, .*pip install 'rooflab\[cuda\]'.*ModuleNot"):
        _cuda.compile_cubin(SCALE)


def test_without_nvrtc_one_sentence_says_what_to_install(forgotten, monkeypatch):
    def broken():
        raise RuntimeError("CuPy failed to load libnvrtc.so.13: OSError: none")

    nvrtc = SimpleNamespace(getVersion=broken)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc)))
    with pytest.raises(ValueError, match="^nvrtc: expected NVIDIA's run-time compiler .*failed to load libnvrtc"):
        _cuda.compile_cubin(SCALE)


class FakeTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    place = torch.device("cuda", 1)

    @property
    def device(self):
        return self.place


class FakeRaw:
    """CuPy's kernel, as far as a launch uses it."""

    def __init__(self):
        self.launches = []
        self.allowed = []

    def __call__(self, grid, block, values, *, shared_mem, stream):
        self.launches.append((grid, block, values, shared_mem, stream))

    max_dynamic_shared_size_bytes = property(fset=lambda self, nbytes: self.allowed.append(nbytes))


@pytest.fixture
def launched(monkeypatch):
    """A kernel on a GPU made of Python."""
    raw, used = FakeRaw(), []

    @contextmanager
    def on_device(device):
        used.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7000 + device))
    monkeypatch.setattr(_cuda, "_stream", lambda address: ("stream", address))
    kernel = _cuda.CudaKernel(SCALE, "scale")
    kernel._raw = {0: raw, 1: raw}
    return SimpleNamespace(kernel=kernel, raw=raw, used=used)


def test_a_launch_hands_over_addresses_widths_and_torchs_stream(launched):
    x = torch.arange(8.0).as_subclass(FakeTensor)
    struct_ = np.zeros(1, dtype=[("a", "<i4"), ("b", "<i8")])
    launched.kernel((3,), (32, 2), x[2:], None, np.float32(2), np.int32(8), struct_)
    ((grid, block, values, shared_bytes, stream),) = launched.raw.launches
    assert (grid, block, shared_bytes, stream) == ((3,), (32, 2), 0, ("stream", 7001))
    assert values[0] == x.data_ptr() + 8 and values[1] == 0 and values[0].itemsize == values[1].itemsize == 8
    assert values[2:4] == (np.float32(2), np.int32(8)) and [value.itemsize for value in values[2:4]] == [4, 4]
    assert values[4] is struct_ and launched.used == [1]


def test_a_tensor_map_is_encoded_by_the_driver_at_the_launch(launched, monkeypatch):
    asked, status = [], [0]

    def encode(target, kind, rank, address, dims, strides, box, steps, *modes):
        asked.append((kind, rank, address.value, *map(tuple, (dims, strides, box, steps)), modes))
        assert target.value % 64 == 0
        ctypes.memset(target.value, 7, 128)
        return status[0]

    monkeypatch.setattr(_tensor_map, "_encode", lambda: encode)
    x = torch.zeros(5, 24, dtype=torch.bfloat16).as_subclass(FakeTensor)
    made = _tensor_map.CudaMap(x, 5, 20, 24)
    launched.kernel((1,), (1,), made, made)
    value, again = launched.raw.launches[0][2]
    assert again is value and value.tobytes() == bytes([7]) * 128 and value.size == 1 and launched.used == [1]
    assert asked == [(9, 2, x.data_ptr(), (20, 5), (48,), (64, 64), (1, 1), (0, 3, 2, 0))]
    status[0] = 1
    with pytest.raises(ValueError, match="a matrix that cuTensorMapEncodeTiled takes, got error 1 for 5 rows"):
        made.encoded()


def test_without_a_driver_a_tensor_map_says_so(monkeypatch):
    monkeypatch.setattr(_tensor_map, "_encode", _tensor_map._encode.__wrapped__)
    monkeypatch.setattr(_tensor_map, "LIBRARY", "libnone-of-this-name.so.1")
    with pytest.raises(ValueError, match="tensor map: expected CUDA's driver with cuTensorMapEncodeTiled, got libnone"):
        _tensor_map.CudaMap(torch.zeros(1, 8, dtype=torch.float16), 1, 8, 8).encoded()


def test_large_shared_memory_is_asked_for_once(launched):
    for nbytes in (49152, 65536, 65536, 50000, 200_000):
        launched.kernel((1,), (1,), shared_bytes=nbytes)
    assert launched.raw.allowed == [65536, 200_000]
    assert launched.raw.launches[0][4] == ("stream", 7000), "without tensors, the current device"


class FakeDriver:
    """libcuda, as far as a dependent launch uses it; keeps what it finds at the addresses."""

    status = 0

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        found, attribute = config._obj, config._obj.attributes[0]
        self.config = (tuple(found.grid), tuple(found.block), found.shared_bytes, found.stream, found.count)
        self.attribute, self.function, self.extra = (attribute.id, attribute.value), function.value, extra
        self.values = [ctypes.string_at(place, size) for place, size in zip(arguments, (8, 8, 4, 4), strict=True)]
        return self.status

    def cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE" if status == 1 else None


def test_a_dependent_launch_tells_the_driver_so(launched, monkeypatch):
    """The sizes and offsets are those that a C compiler gives for CUDA 13's cuda.h."""
    config, attribute = _pdl._Config, _pdl._Attribute
    assert (config.stream.offset, config.attributes.offset, config.count.offset) == (32, 40, 48)
    assert (ctypes.sizeof(config), ctypes.sizeof(attribute), attribute.value.offset) == (56, 72, 8)
    driver = FakeDriver()
    monkeypatch.setattr(_pdl, "_driver", lambda: driver)
    kernel = _cuda.CudaKernel('#include "pdl.h"\n' + SCALE, "scale", ("-DX",), dependent=True)
    kernel._raw, launched.raw.kernel = {1: launched.raw}, SimpleNamespace(ptr=4242)
    x = torch.arange(8.0).as_subclass(FakeTensor)
    kernel((3,), (32, 2), x, None, np.float32(2), np.int32(8), shared_bytes=65536)
    assert kernel.options == ("-DX", "-DPDL") and launched.raw.allowed == [65536] and not launched.raw.launches
    assert driver.config == ((3, 1, 1), (32, 2, 1), 65536, 7001, 1)
    assert (driver.attribute, driver.function, driver.extra) == ((6, 1), 4242, None)
    values = (np.uint64(x.data_ptr()), np.uint64(0), np.float32(2), np.int32(8))
    assert driver.values == [value.tobytes() for value in values]
    driver.status = 1
    with pytest.raises(RuntimeError, match="^cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE$"):
        kernel((3,), (32, 2), x, None, np.float32(2), np.int32(8))


def test_a_kernel_that_does_not_wait_is_not_launched_early():
    with pytest.raises(ValueError, match="^dependent: expected a source that includes pdl.h.* scale does not$"):
        _cuda.load(SCALE, "scale", dependent=True)


@pytest.mark.parametrize("bad", [3, 2.0, True, "x", [1], np.zeros(2)])
def test_an_argument_of_no_known_width_is_refused(launched, bad):
    with pytest.raises(ValueError, match="^arguments: expected a tensor, None or a NumPy scalar .* in place 1, got"):
        launched.kernel((1,), (1,), np.int32(1), bad)
    assert not launched.raw.launches


def test_tensors_elsewhere_are_refused(launched):
    with pytest.raises(ValueError, match="^arguments: expected tensors on one GPU, got cpu$"):
        launched.kernel((1,), (1,), torch.zeros(1))
    with pytest.raises(ValueError, match="^arguments: expected tensors on one GPU, got cpu, cuda:1"):
        launched.kernel((1,), (1,), torch.zeros(1), torch.zeros(1).as_subclass(FakeTensor))


def test_the_same_source_is_one_kernel():
    assert _cuda.load(SCALE, "scale") is _cuda.load(SCALE, "scale")
    assert _cuda.load(SCALE, "scale") is not _cuda.load(SCALE, "scale", options=("-DX",))


@pytest.mark.parametrize("capability, arch", [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")])
def test_the_architecture_is_the_cards_own(monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
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

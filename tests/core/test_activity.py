import struct
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from fake_cuda import FakeCuda, profiler_of

from rooflab.bench.base.cubin import code_hash
from rooflab.bench.core.timers import activity
from rooflab.bench.core.timers.activity import DeviceKernel, activity_hash, launched_code, observed
from rooflab.kernels import _cuda

GEMM = DeviceKernel("gemm", (8, 2, 1), (128, 1, 1), 4096)
FILL = DeviceKernel("Memset (Device)", nbytes=64)


@pytest.fixture
def card(monkeypatch):
    card = FakeCuda()
    monkeypatch.setattr(activity, "profiled", profiler_of(card))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    return card


def test_a_call_is_observed_after_one_that_may_compile(card):
    calls = []

    def function():
        card.work(1e-6, "compiled once") if not calls else None
        calls.append(1)
        card.work(5e-6, "gemm", grid=(4, 1, 1))

    found = observed(function, card)
    again = observed(function, card)
    assert found == again == {"peak_memory_bytes": 0.0, "device_kernels": ("gemm",), "activity_hash": ANY}
    assert len(calls) == 4
    other = observed(lambda: card.work(5e-6, "gemm", grid=(5, 1, 1)), card)
    assert other["device_kernels"] == found["device_kernels"] and other["activity_hash"] != found["activity_hash"]


def test_kernels_are_in_the_order_of_time_and_none_where_nothing_is_recorded(card, monkeypatch):
    def two():
        card.work(5e-6, "gemm")
        card.work(1e-6, "reduce")

    assert observed(two, card)["device_kernels"] == ("gemm", "reduce")
    nothing = {"peak_memory_bytes": 0.0, "device_kernels": (), "activity_hash": None}
    assert observed(lambda: None, card) == nothing
    monkeypatch.setattr(activity, "profiled", profiler_of(card, running=True))
    assert observed(two, card) == nothing, "another profiler runs"


def elf(sections):
    """A 64-bit little-endian ELF file of these sections, as little as it takes."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    body, headers = bytearray(64), [b"\0" * 64]
    for name, data in (*sections.items(), (".shstrtab", names)):
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, len(body), len(data), 0, 0, 1, 0))
        body += data
    body[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<HHH", body, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(body + b"".join(headers))


def test_the_code_is_the_instructions_and_constants():
    sections = {".text.k": b"instructions", ".nv.constant0.k": b"constants", ".debug_line": b"/home/a/kernel.py:7"}
    base = elf(sections)
    assert code_hash(base) == code_hash(elf(sections | {".debug_line": b"/srv/b/kernel.py:9"}))
    assert code_hash(base) != code_hash(elf(sections | {".text.k": b"others"}))
    assert code_hash(base) != code_hash(elf(sections | {".nv.constant0.k": b"others"}))
    with pytest.raises(ValueError, match="cubin: expected a little-endian 64-bit ELF file"):
        code_hash(b"PTX")


def test_launches_of_triton_are_noted_and_its_method_is_put_back(monkeypatch):
    class JITFunction:
        def run(self, *args, grid, warmup, **kwargs):
            metadata = SimpleNamespace(name="kernel")
            return SimpleNamespace(metadata=metadata, asm={"cubin": elf({".text.kernel": args[0]})})

    jit = ModuleType("triton.runtime.jit")
    jit.JITFunction = JITFunction
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", jit)
    monkeypatch.setattr(activity, "interpreting", lambda: False)
    run = JITFunction.run
    with pytest.raises(ZeroDivisionError), launched_code() as launched:
        JITFunction().run(b"a", grid=(1,), warmup=False)
        JITFunction().run(b"b", grid=(1,), warmup=True)
        raise ZeroDivisionError
    assert launched == [("kernel", code_hash(elf({".text.kernel": b"a"})))] and JITFunction.run is run


def test_launches_of_cuda_are_noted_by_the_cubin_that_was_loaded(monkeypatch, tmp_path):
    file = tmp_path / "kernel.cubin"
    file.write_bytes(elf({".text.copy": b"instructions"}))
    monkeypatch.setattr(_cuda, "cubin_file", lambda source, *, arch, options: file)
    monkeypatch.setattr(_cuda, "architecture", lambda: "sm_90a")
    monkeypatch.setattr(_cuda.CudaKernel, "__call__", lambda self, grid, block: None)
    before = _cuda.CudaKernel.__call__
    with launched_code() as launched:
        _cuda.load("source", "copy")((1,), (32,))
    assert launched == [("copy", code_hash(file.read_bytes()))] and _cuda.CudaKernel.__call__ is before


def test_the_hash_changes_with_everything_that_the_device_does_and_with_no_time():
    base, twice = [GEMM, FILL], [GEMM, FILL, GEMM]
    others = [
        [GEMM._replace(name="gemm2"), FILL],
        [GEMM._replace(grid=(8, 3, 1)), FILL],
        [GEMM._replace(block=(256, 1, 1)), FILL],
        [GEMM._replace(shared_bytes=8192), FILL],
        [GEMM, FILL._replace(nbytes=128)],
        [FILL, GEMM],
        [GEMM],
        [GEMM, GEMM, FILL],
        twice,
    ]
    hashes = [activity_hash(kernels) for kernels in (base, *others)]
    hashes += [activity_hash(base, [("gemm", code)]) for code in ("one", "other")]
    hashes += [activity_hash(twice, [("gemm", code) for code in codes]) for codes in ("ab", "ba")]
    assert len(set(hashes)) == len(hashes)
    assert activity_hash(twice, [("gemm", "a")]) == activity_hash(twice), "one of two is no knowledge of either"
    assert activity_hash([]) is None

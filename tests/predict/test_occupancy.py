"""CTAs per SM against NVIDIA's own calculator, published examples and properties; waves and tail of a grid."""

import ctypes
import importlib.util
import subprocess
from pathlib import Path

import needs
import pytest

from rooflab.roofline.device import get_device
from rooflab.roofline.occupancy import SM_LIMITS, occupancy, waves

CAPABILITIES = sorted(SM_LIMITS)

PROBE = """
#include "cuda_occupancy.h"
int active(int major, int minor, int warps, int shared_kib, int threads, int registers, int dynamic_bytes) {
    struct cudaOccDeviceProp device = {0};
    device.computeMajor = major; device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = 32 * warps;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32; device.numSms = 100;
    device.sharedMemPerBlock = 48 * 1024; device.sharedMemPerMultiprocessor = shared_kib * 1024;
    device.reservedSharedMemPerBlock = 1024; device.sharedMemPerBlockOptin = shared_kib * 1024 - 1024;
    struct cudaOccFuncAttributes function = {0};
    function.maxThreadsPerBlock = 1024; function.numRegs = registers;
    function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    function.maxDynamicSharedSizeBytes = dynamic_bytes;
    struct cudaOccDeviceState state = {CACHE_PREFER_NONE, SHAREDMEM_CARVEOUT_DEFAULT};
    struct cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, threads, dynamic_bytes)) return -1;
    return result.activeBlocksPerMultiprocessor;
}
"""


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    """NVIDIA's cuda_occupancy.h, compiled: CTAs per SM of (capability, threads, registers, shared bytes)."""
    found = importlib.util.find_spec("triton")
    include = Path(found.origin).parent / "backends" / "nvidia" / "include"
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "probe.c").write_text(PROBE)
    library = folder / "probe.so"
    command = [needs.c_compiler(), "-shared", "-fPIC", "-w", f"-I{include}", "-o", library, folder / "probe.c"]
    subprocess.run(command, check=True)
    active = ctypes.CDLL(str(library)).active

    def ask(of, *figures):
        limits = SM_LIMITS[of]
        return active(*of, limits.warps, limits.carveouts_kib[-1], *figures)

    return ask


@pytest.mark.needs("C compiler")
def test_agrees_with_nvidias_calculator(calculator):
    figures = [
        (of, count, regs, kib * 1024 + extra)
        for of in CAPABILITIES
        for count in (1, 32, 33, 64, 96, 128, 160, 256, 288, 320, 384, 416, 512, 640, 736, 768, 1000, 1024)
        for regs in (1, 8, 9, 16, 24, 32, 33, 37, 40, 56, 63, 64, 65, 80, 96, 104, 128, 168, 232, 255)
        for kib, extra in ((0, 0), (1, 1), (3, 0), (7, 0), (8, 0), (31, 129), (48, 1), (75, 0), (113, 0), (113, 1))
    ]
    figures += [(of, 128, 64, size) for of in CAPABILITIES for size in range(0, 234_000, 97)]
    wrong = [entry for entry in figures if occupancy(*entry).ctas_per_sm != calculator(*entry)]
    assert not wrong, f"{len(wrong)} of {len(figures)}, the first {wrong[0]}"
    assert {calculator(*entry) for entry in figures} >= {0, 1, 2, 3, 32}  # it answers, and not the same for all


def test_published_examples_on_hopper():
    for figures, ctas, limiter, fraction in [
        # CUDA C++ Best Practices Guide, "Calculating Occupancy": 37 registers, blocks of 320.
        ((320, 37, 0), 4, "registers", 0.625),
        # The most threads at 32 registers, and the 32 blocks that an SM takes.
        ((1024, 32, 0), 2, "warps", 1.0),
        ((32, 32, 0), 32, "CTA slots", 0.5),
        # Hopper Tuning Guide: 227 KB for one block of the SM's 228, 1 KB of each block being the driver's.
        ((128, 32, 227 * 1024), 1, "shared memory", 4 / 64),
        ((128, 32, 227 * 1024 + 1), 0, "shared memory", 0.0),
    ]:
        found = occupancy((9, 0), *figures)
        assert (found.ctas_per_sm, found.limiter, found.fraction) == (ctas, limiter, fraction)
        assert found.warps_per_sm == ctas * -(-figures[0] // 32)


def test_waves_of_an_h100():
    for grid, per_sm, full, tail, efficiency, busiest, balance in [
        (132, 1, 1, 0, 1.0, 1, 1.0),
        (133, 1, 1, 1, 133 / 264, 2, 133 / 264),  # one CTA more costs a whole wave
        (264, 2, 1, 0, 1.0, 2, 1.0),
        (132, 2, 0, 132, 0.5, 1, 1.0),  # half the places, and yet every SM has one
        (1, 8, 0, 1, 1 / 1056, 1, 1 / 132),
        (1000, 2, 3, 208, 1000 / 1056, 8, 1000 / 1056),
    ]:
        found = waves(grid, per_sm, get_device("h100").sms)
        assert (found.full, found.tail_ctas, found.busiest_sm_ctas) == (full, tail, busiest)
        assert found.efficiency == pytest.approx(efficiency) and found.balance == pytest.approx(balance)
        assert found.waves == pytest.approx(grid / (per_sm * 132))


@pytest.mark.parametrize(
    ("function", "figures", "message"),
    [
        (occupancy, ((9, 0), 1025, 32, 0), "threads: expected 1 to 1024, got 1025"),
        (occupancy, ((9, 0), 32, 0, 0), "registers: expected 1 to 255, got 0"),
        (occupancy, ((9, 0), 32, 32, -1), "shared_bytes: expected at least 0, got -1"),
        (occupancy, ((7, 0), 32, 32, 0), "device: expected one of compute capability 8.0, .*, got 7.0"),
        (waves, (0, 1, 1), "ctas: expected at least 1, got 0"),
        (waves, (1, 0, 1), "ctas_per_sm: expected at least 1, got 0"),
        (waves, (1, 1, 0), "sms: expected at least 1, got 0"),
    ],
)
def test_figures_that_make_no_sense_are_refused(function, figures, message):
    with pytest.raises(ValueError, match=message):
        function(*figures)

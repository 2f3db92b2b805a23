"""The microkernels' own CUDA C++, run on a CPU: right as they are, and found out where they are broken."""

import numpy as np
import pytest
import torch
from microkernels_on_host import CARD, COMPILER, host_load

from rooflab.bench.ceilings import cuda as ceilings_cuda
from rooflab.bench.ceilings.microkernels import arithmetic, memory, microkernel, mma_sync, wgmma
from rooflab.bench.ceilings.microkernels.microkernel import Card, disagreement

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    """One launch shape of each, small: a thread here is a thread of the host."""
    monkeypatch.setattr(memory, "SHAPES", (memory.Shape(64, 1, 4),))
    monkeypatch.setattr(memory, "ONE_CHUNK_SHAPES", (memory.Shape(64, 1, 4, every_chunk=True),))
    monkeypatch.setattr(memory, "HBM_TIMES_L2", 4)
    monkeypatch.setattr(arithmetic, "FMA_SHAPES", (arithmetic.Shape(32, 2, 4, 16),))
    monkeypatch.setattr(arithmetic, "SPECIAL_SHAPES", (arithmetic.Shape(32, 2, 4, 16),))
    monkeypatch.setattr(wgmma, "SHAPES", (wgmma.Shape(64, 2),))
    monkeypatch.setattr(mma_sync, "SHAPES", (mma_sync.Shape(64, 1, 2, 2, 2),))


def kernels(module, limit=None, **options):
    groups = module.groups(CARD, host_load(**options))
    return {group.limit: list(group.kernels) for group in groups if limit is None or limit in group.limit}


@pytest.mark.parametrize("module, repeats", [(memory, 2), (arithmetic, 37)])
def test_streams_and_arithmetic_are_right(module, repeats):
    found = kernels(module)
    assert len(found) == (8 if module is memory else 3)
    for limit, shapes in found.items():
        for kernel in shapes:
            assert kernel.wrong(repeats) == "", limit


@pytest.mark.parametrize(
    "dtype, passes", [("bf16", 9), ("fp8_e4m3", 2), pytest.param("tf32", 2, marks=pytest.mark.slow)]
)
def test_wgmma_is_right_from_shared_memory_and_from_registers(dtype, passes):
    """Swizzle, descriptors, fragments, and accumulators that start anew after 8 passes."""
    found = kernels(wgmma, dtype, dtype=dtype)
    assert list(found) == [f"{dtype} wgmma shared", f"{dtype} wgmma registers"]
    for limit, (kernel,) in found.items():
        assert kernel.wrong(passes) == "", limit
        assert kernel.clock_hz() == 1.5e9


@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(d, marks=pytest.mark.slow) for d in ("tf32", "fp8_e4m3"))])
def test_mma_sync_is_right(dtype, monkeypatch):
    monkeypatch.setattr(mma_sync, "dtypes_of", lambda sm: (dtype,))
    ((kernel,),) = kernels(mma_sync, dtype=dtype).values()
    assert kernel.wrong(2) == ""


COPY = "stream_copy(Vector* a, const Vector* b, u32 chunks, u32 passes) {"
BROKEN = {
    "a word is not read": (memory, "hbm_read", "+ v[u].word[3]", ""),
    "a vector of the chunk is not read": (memory, "l2_read", "u < UNROLL; ++u) sum", "u < UNROLL - 1; ++u) sum"),
    "the last pass is left out": (memory, "hbm_read", "u64(chunks) * passes", "u64(chunks) * (passes - 1)"),
    "a block stays at its chunk": (memory, "l2_read", "chunk += step;", ""),
    "a vector is not written": (memory, "hbm_write", "store(a + at + u * THREADS, V", "if (u) store(a + at, V"),
    "the copy is of a neighbour": (memory, "l2_copy", COPY, COPY + " b += threadIdx.x % 2 ? -1 : 1;"),
    "the triad does not scale": (memory, "hbm_triad", "fmaf(scale,", "fmaf(1.f,"),
    "a step in 1000 is left out": (arithmetic, "fma", "step < STEPS", "step < STEPS - (round == 30)"),
    "one point is left alone": (arithmetic, "fma", "p < PAIRS; ++p) y[p] = f", "p < PAIRS - 1; ++p) y[p] = f"),
    "one value in 16 is left out": (arithmetic, "ex2", "int s = 0", "int s = 1"),
    "all arguments are one": (arithmetic, "rsqrt", "fmaf(n + s, step, origin)", "origin"),
    "tiles are not swizzled": (wgmma, "bf16 wgmma shared", " ^ row % 8 * 16", ""),
    "descriptors overlap": (wgmma, "bf16 wgmma shared", "1024 >> 4", "512 >> 4"),
    "every warpgroup takes the same rows": (wgmma, "bf16 wgmma shared", "+ warpgroup * 64 * ROW", ""),
    "half of K is left out": (wgmma, "bf16 wgmma shared", "at += STEP)\n", "at += 2 * STEP)\n"),
    "one stage is left out": (wgmma, "bf16 wgmma registers", "u32 step = 0; step < STAGES * ROW / STEP; ++step)\n    "
                              "        WGMMA", "u32 step = 4; step < STAGES * ROW / STEP; ++step)\n            WGMMA"),
    "fragments of other rows": (wgmma, "bf16 wgmma registers", "threadIdx.x / 32 * 16", "threadIdx.x / 32 * 8"),
    "accumulators never start anew": (wgmma, "bf16 wgmma shared", "pass % RESTART", "pass"),
    "a tile is left out": (mma_sync, "bf16", "int n = 0; n < N_TILES; ++n) MMA", "int n = 1; n < N_TILES; ++n) MMA"),
    "a pass is left out": (mma_sync, "bf16", "pass < RESTART", "pass < RESTART - 1"),
    "the halves of A are exchanged": (mma_sync, "bf16", "at + i / 2 * 16)", "at + (1 - i / 2) * 16)"),
}  # fmt: skip


ALWAYS = ("a vector of the chunk is not read", "a step in 1000 is left out", "tiles are not swizzled")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what in ALWAYS else [pytest.mark.slow]) for what in BROKEN]
)
def test_work_that_is_left_out_or_wrong_is_found_out(what):
    module, limit, text, instead = BROKEN[what]

    def change(source):
        assert source.count(text) == 1, f"{text!r} is in the source {source.count(text)} times"
        return source.replace(text, instead)

    repeats = {memory: 2, arithmetic: 62, wgmma: 9, mma_sync: 1}[module]
    found = kernels(module, limit, change=change)
    wrong = [kernel.wrong(repeats) for kernel in next(iter(found.values()))]
    assert wrong and all(wrong)


def test_the_whole_measurement_runs_with_the_real_timer(monkeypatch):
    """Rates mean nothing here, but every launch, check and timed call is the one that a GPU gets."""
    monkeypatch.setattr(ceilings_cuda, "MODULES", (arithmetic, mma_sync))
    monkeypatch.setattr(mma_sync, "dtypes_of", lambda sm: ("bf16",))
    named = []
    readings = ceilings_cuda.measure_cuda(
        CARD.device, budget_s=0.1, card=CARD, load=host_load(), timers=("perf_counter",), advance=named.append
    )
    assert [reading.limit for reading in readings] == ["fma", "ex2", "rsqrt", "bf16 mma.sync", "launch perf_counter"]
    assert named == ["fma", "ex2", "rsqrt", "bf16 mma.sync", "launch"]
    # A thread of the host for each of the device's makes halves and wholes of no sure length.
    assert {reading.status for reading in readings} <= {"OK", "INVALID"}
    assert all(len(reading.seconds) >= 3 and reading.timer.startswith("cpu perf_counter") for reading in readings)
    assert all(reading.clock_hz == 1.5e9 for reading in readings[:4]) and readings[-1].floor_s > 0


def test_disagreement_lets_no_nan_pass():
    right = torch.ones(4)
    assert disagreement(right, right + 0.01, 0.02, "sums") == ""
    assert disagreement(right + 0.03, right, 0.02, "sums").startswith("sums: differ by up to 0.03")
    assert disagreement(torch.full((4,), np.nan), right, 0.02, "sums")


def test_a_warps_threads_share_a_tile_without_rest():
    tile = torch.arange(16 * 24.0).reshape(16, 24)
    sums = microkernel.per_thread(tile)
    assert sums.shape == (32,) and sums.sum() == tile.sum()
    assert sums[5] == sum(tile[row, 8 * j + 2 + e] for row in (1, 9) for j in range(3) for e in (0, 1))


@pytest.mark.parametrize("dtype", microkernel.DTYPES)
def test_operands_are_random_and_exact_in_their_dtype(dtype):
    found = microkernel.Operands.random(dtype, 64, 32, 256, torch.device("cpu"))
    assert found.a.nbytes == 64 * 256 and found.b.nbytes == 32 * 256
    assert 0.9 < float(found.a.double().std()) < 1.1 and len(found.a.double().unique()) > 50
    if dtype == "tf32":
        assert not (found.a.view(torch.int32) & 0x1FFF).any()
    assert not torch.equal(found.a[:32], found.b)


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(memory, "HBM_TIMES_L2", 32)
    small = Card(CARD.device, 90, 2, 2**30, 1e9)
    with pytest.raises(memory.TooLittleMemory, match="expected 206.2 GB free for arrays beyond L2, got 1.0"):
        next(memory.groups(small, host_load()))

"""Broken microkernels, run by the emulator: their checks find each fault; and a whole measurement runs.

`test_ptx_microkernels.py` runs the microkernels without faults.
"""

import pytest
import torch
from test_ptx_microkernels import CARD, few_shapes, kernels  # noqa: F401

from rooflab.bench.core.ceilings import compute, cuda_limits, value_of
from rooflab.bench.core.ceilings.compute import mma_sync, vector, wgmma
from rooflab.bench.core.ceilings.microkernel import disagreement, summing
from rooflab.bench.core.ceilings.streams import streams
from rooflab.bench.core.environment import Environment
from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels._cuda import load

COPY = "stream_copy(Vector* a, const Vector* b, u32 chunks, u32 passes) {"
BROKEN = {
    "a word is not read": (streams, "hbm_read", "+ v[u].word[3]", ""),
    "a vector of the chunk is not read": (streams, "l2_read", "u < UNROLL; ++u) sum", "u < UNROLL - 1; ++u) sum"),
    "the last pass is left out": (streams, "hbm_read", "u64(chunks) * passes", "u64(chunks) * (passes - 1)"),
    "a block stays at its chunk": (streams, "hbm_read", "chunk += step;", ""),
    "a vector is not written": (streams, "hbm_write", "store(a + at + u * THREADS, V", "if (u) store(a + at, V"),
    "the copy is of a neighbour": (streams, "l2_copy", COPY, COPY + " b += threadIdx.x % 2 ? -1 : 1;"),
    "the triad does not scale": (streams, "hbm_triad", "fmaf(scale,", "fmaf(1.f,"),
    "a step in 1000 is left out": (vector, "fma", "step < STEPS", "step < STEPS - (round == 30)"),
    "one point is left alone": (vector, "fma", "p < PAIRS; ++p) y[p] = f", "p < PAIRS - 1; ++p) y[p] = f"),
    "one value in 16 is left out": (vector, "ex2", "int s = 0", "int s = 1"),
    "all arguments are one": (vector, "ex2", "fmaf(n + s, step, origin)", "origin"),
    "tiles are not swizzled": (wgmma, "bf16 wgmma shared", " ^ row % 8 * 16", ""),
    "descriptors overlap": (wgmma, "bf16 wgmma shared", "1024 >> 4", "512 >> 4"),
    "every warpgroup takes the same rows": (wgmma, "bf16 wgmma shared", "+ warpgroup * 64 * ROW", ""),
    "half of K is left out": (wgmma, "bf16 wgmma shared", "at += STEP)\n", "at += 2 * STEP)\n"),
    "one stage is left out": (
        wgmma,
        "bf16 wgmma shared",
        "u32 stage = 0; stage < STAGES; ++stage)",
        "u32 stage = 1; stage < STAGES; ++stage)",
    ),
    "accumulators never start anew": (wgmma, "bf16 wgmma shared", "pass % RESTART", "pass"),
    "a tile is left out": (mma_sync, "bf16", "int n = 0; n < N_TILES; ++n) MMA", "int n = 1; n < N_TILES; ++n) MMA"),
    "a pass is left out": (mma_sync, "bf16", "pass < RESTART", "pass < RESTART - 1"),
    "the halves of A are exchanged": (mma_sync, "bf16", "at + i / 2 * 16)", "at + (1 - i / 2) * 16)"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("what", BROKEN)
def test_work_that_is_left_out_or_wrong_is_found_out(what):
    maker, limit, text, instead = BROKEN[what]

    def change(source, name, *, options=()):
        assert source.count(text) == 1, f"{text!r} is in the source {source.count(text)} times"
        return load(source.replace(text, instead), name, options=options)

    repeats = {streams: 2, vector: 62, wgmma: 9, mma_sync: 1}[maker]
    broken = [kernel for kernel in kernels(maker, change) if limit in kernel.limit]
    with emulating_cuda(emulate):
        assert broken and all(kernel.wrong(repeats) for kernel in broken[:1])


def test_the_whole_measurement_runs_with_the_real_timer(monkeypatch):
    """Rates mean nothing here, but every launch, check and timed call is the one that a GPU gets."""
    monkeypatch.setattr(cuda_limits, "KERNEL_MAKERS", (vector, mma_sync))
    monkeypatch.setattr(cuda_limits, "card_of", lambda device: CARD)
    monkeypatch.setattr(compute, "dtypes_of", lambda sm: ("bf16",))
    with emulating_cuda(emulate):
        records = cuda_limits.measure_cuda(CARD.device, Environment.now(), 0.1)
    assert [record.kernel for record in records] == ["fma", "ex2", "bf16 mma.sync", "launch events"]
    assert {record.status for record in records} <= {"OK", "INVALID"}
    assert all(len(record.samples_s) >= 3 and record.timer.startswith("cpu perf_counter") for record in records)
    assert all(record.metrics["sm_clock_hz"] > 0 for record in records[:3]) and value_of(records[-1]) > 0


def test_disagreement_lets_no_nan_pass_and_a_launch_that_writes_nothing_leaves_no_old_sums():
    right = torch.ones(4)
    assert disagreement(right, right + 0.01, 0.02) == ""
    assert disagreement(right + 0.03, right, 0.02).startswith("sums differ by up to 0.03")
    assert disagreement(torch.full((4,), torch.nan), right, 0.02)
    idle, sums = lambda *arguments, shared_bytes: None, torch.ones(1, 32)
    kernel = summing(idle, [], sums, lambda repeats: torch.ones(1), 0.02, limit="fma", config={}, work=1.0)
    assert kernel.wrong(1), "the right sums of an earlier launch"

"""Reads a GPU's SM clock on the device: a kernel counts cycles and reads the nanosecond timer.

NVML reports a clock from the past milliseconds; this kernel reads it at one point in the stream.  The import of this
file imports Triton.  After it, Triton's interpreter mode cannot change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

READING_NS = 100_000
"""The duration of one reading.  It is long, because the nanosecond timer of some cards has steps of a microsecond."""
MAX_READINGS = 4096
"""The largest number of readings.  Later readings are not taken."""
LOAD_MATRIX_SIZE, MATMUL_COUNT = 4096, 100
"""Size and number of the matrix products before a reading under load: 14 TFLOP, 20 ms on an H100."""


@triton.jit  # type: ignore[untyped-decorator]
def _count_cycles(out, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    # One asm block, so that nothing comes between the readings.  The first loop waits for the timer's next step.
    cycle_count, elapsed_ns = tl.inline_asm_elementwise(
        asm="""
        {
            .reg .u64 started, now, first, last;
            .reg .pred waits;
            mov.u64 started, %globaltimer;
        step:
            mov.u64 now, %globaltimer;
            setp.eq.u64 waits, now, started;
            @waits bra step;
            mov.u64 first, %clock64;
            mov.u64 started, now;
        span:
            mov.u64 now, %globaltimer;
            mov.u64 last, %clock64;
            sub.u64 now, now, started;
            setp.lt.u64 waits, now, $2;
            @waits bra span;
            sub.u64 $0, last, first;
            mov.u64 $1, now;
        }
        """,
        constraints="=l,=l,l",
        args=[tl.full((1,), SPAN, tl.int64)],
        dtype=(tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    tl.store(out + tl.arange(0, 1), cycle_count)
    tl.store(out + 1 + tl.arange(0, 1), elapsed_ns)


class DeviceClock:
    """Reads the SM clock on `device`.  A reading is enqueued on the current stream behind earlier work."""

    def __init__(self, device: torch.device):
        self._counts = torch.zeros(MAX_READINGS, 2, dtype=torch.int64, device=device)
        self._taken = 0
        self.enqueue()  # compiles; not kept as a reading
        torch.cuda.synchronize(device)
        self._taken = 0

    def enqueue(self) -> None:
        """Enqueues one reading of the SM clock on the current stream.  The reading takes `READING_NS` nanoseconds."""
        if self._taken < MAX_READINGS:
            with torch.cuda.device(self._counts.device):
                _count_cycles[(1,)](self._counts[self._taken], SPAN=READING_NS, num_warps=1)
            self._taken += 1

    def readings_hz(self) -> list[float]:
        """Waits for the device, and returns all SM clock readings in Hz, in order."""
        readings = self._counts[: self._taken].cpu().tolist()
        return [1e9 * cycle_count / elapsed_ns for cycle_count, elapsed_ns in readings if elapsed_ns]


def sm_clock_under_load(device: torch.device) -> float:
    """Returns the SM clock in Hz, read after matrix multiplications that keep the whole GPU busy."""
    device_clock = DeviceClock(device)
    a, b = (torch.randn(LOAD_MATRIX_SIZE, LOAD_MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(MATMUL_COUNT):
        torch.mm(a, b)
    device_clock.enqueue()
    return device_clock.readings_hz()[0]

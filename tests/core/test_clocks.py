import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from test_environment import FakeNvml, install

from rooflab.bench.core.timers.card import ClockWatch


class WorkingNvml(FakeNvml):
    """A card at work; it answers what `reasons` holds."""

    def __init__(self):
        super().__init__()
        self.refuses = {}
        self.reasons = 4
        self.answers |= {
            "DeviceGetClockInfo": lambda handle, kind: 1755,
            "DeviceGetFieldValues": self._fields,
            "DeviceGetCurrentClocksThrottleReasons": lambda handle: self.reasons,
        }

    def _fields(self, handle, fields):
        assert fields == [186]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=612_500))]


@pytest.fixture
def nvml(monkeypatch):
    return install(monkeypatch, WorkingNvml())


@pytest.mark.parametrize(
    ("bits", "spoils"),
    [
        (0x4, []),
        (0x8, ["hardware slowdown"]),
        (0x20, ["software thermal slowdown"]),
        (0x40 | 0x4, ["hardware thermal slowdown"]),
        (0x80, ["power brake"]),
    ],
)
def test_heat_and_the_power_brake_spoil_a_reading(nvml, bits, spoils):
    nvml.reasons = bits
    with ClockWatch("GPU-1") as watch:
        watch.read()
    assert watch.summary()["throttled"] == spoils and watch.summary()["throttle_reasons"] == bits


def test_what_nobody_answered_does_not_look_like_a_card_that_was_not_throttled(nvml):
    nvml.refuses["DeviceGetCurrentClocksThrottleReasons"] = "not supported"
    with ClockWatch("GPU-1", Counter()) as watch:
        watch.read()
    summary = watch.summary()
    assert summary["throttled"] is None and summary["throttle_unread"] == "NVML gave no reasons"
    assert summary["power_w"] == [612.5, 612.5]
    with ClockWatch(None, Counter()) as watch:
        watch.read()
    assert watch.summary()["throttle_unread"] == "NVML was not asked"


class Counter:
    """A device clock of three readings."""

    def __init__(self):
        self.enqueued = 0

    def enqueue(self):
        self.enqueued += 1

    def readings_hz(self):
        return [1.7e9, 1.98e9, 1.9e9][: self.enqueued]


def test_the_clock_that_the_device_reads_stands_beside_nvmls(nvml):
    for uuid, readings in (("GPU-1", 3), (None, 0)):
        with ClockWatch(uuid, Counter()) as watch:
            for _ in range(3):
                watch.read()
        summary = watch.summary()
        assert summary["sm_clock_hz"] == 1.9e9 and summary["sm_clock_range_hz"] == [1.7e9, 1.98e9]
        assert summary["readings"] == readings
        assert readings == 0 or (summary["sm_clock_mhz"], summary["temperature_c"]) == ([1755, 1755], [61, 61])


def test_other_processes_on_the_card_are_counted_and_our_own_are_not(nvml):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        grandchild = int(child.stdout.readline())
        for pids, others in (([os.getpid(), child.pid, grandchild], 0), ([os.getpid(), 1], 1), ([1, 4711], None)):
            nvml.pids = pids
            with ClockWatch("GPU-1") as watch:
                watch.read()
            assert watch.summary()["other_processes"] == others, pids
        os.kill(grandchild, signal.SIGKILL)

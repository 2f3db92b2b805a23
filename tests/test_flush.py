import math

import pytest
import torch

from rooflab.bench.timing import flush_comparison
from rooflab.bench.timing.flush import Flush
from rooflab.bench.timing.flush_comparison import compare_flushes
from rooflab.bench.timing.memory import peak_memory_bytes
from rooflab.bench.timing.timing import Samples

CPU = torch.device("cpu")


def test_a_flush_reads_or_writes_twice_the_cache():
    read, write = Flush("cpu", 4000, "read"), Flush("cpu", 4000, "write")
    assert read.nbytes == write.nbytes == 8000
    for flush in (read, write):
        flush._buffer.fill_(math.pi)
        flush()
    assert float(read._sink) == pytest.approx(2000 * math.pi) and bool((read._buffer == math.pi).all())
    assert bool((write._buffer == 1.0).all())
    assert read.note == "" and write.note == ", flushed by writing"


def test_without_a_cache_to_empty_nothing_is_done():
    flush = Flush("cpu", 0, "write")
    flush()
    assert flush.nbytes == 0 and flush.note == ""


def test_another_way_is_refused():
    with pytest.raises(ValueError, match="flush: expected one of read, write, got 'wish'"):
        Flush("cpu", 4000, "wish")


details = {}
"""What else the timer says of a read of so many bytes behind a flush by writing."""


@pytest.fixture
def card(monkeypatch):
    """Replaces the timer: how long a read of `size` bytes takes behind each flush, and without one."""
    seconds = {("read", True): 1.0, ("write", True): 1.0, ("read", False): 1.0}
    asked = []
    details.clear()

    def time_functions(functions, device, *, cold, flush, **options):
        asked.append((flush, cold, [function.sets for function in functions.values()]))
        times = {size: (1e-9 * int(size) * seconds[flush, cold],) * 3 for size in functions}
        return {
            size: Samples(times[size], "script", "cold", **(details.get(int(size), {}) if flush == "write" else {}))
            for size in functions
        }

    monkeypatch.setattr(flush_comparison, "time_functions", time_functions)
    return seconds, asked


@pytest.mark.parametrize(("read", "write", "cleaner"), [(1.02, 1.3, "read"), (0.6, 1.1, "write"), (1.0, 1.0, "read")])
def test_the_cleaner_flush_is_the_one_nearest_to_no_flush_at_all(card, read, write, cleaner):
    seconds, asked = card
    seconds["read", True], seconds["write", True] = read, write
    found = compare_flushes("cpu", cache_bytes=2**16)
    assert found["cleaner"] == cleaner and found["sizes_bytes"] == [2**13, 2**15, 2**17]
    assert found["read_error"] == pytest.approx(abs(read - 1)) and found["write_error"] == pytest.approx(write - 1)
    assert found["rotation_s"] == pytest.approx([size * 1e-9 for size in found["sizes_bytes"]])
    assert [(flush, cold) for flush, cold, _ in asked] == [
        ("read", True),
        ("write", True),
        ("read", False),
        ("read", False),
        ("write", True),
        ("read", True),
    ]
    for _, cold, sets in asked:
        assert (
            sets == [1, 1, 1]
            if cold
            else all(
                count * size > 4 * 2**16 and count >= 2 for count, size in zip(sets, found["sizes_bytes"], strict=True)
            )
        )


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"calls_per_sample": 20}, "20 calls per sample, of which the flush stands before the first"),
        ({"fault": "kernels changed"}, "kernels changed"),
        ({"resolved": False}, "the script timer is too coarse for it"),
    ],
)
def test_a_size_with_a_reading_that_says_nothing_of_the_flush_is_left_out(card, told, why):
    details[2**13] = told
    found = compare_flushes("cpu", cache_bytes=2**16)
    assert found["sizes_bytes"] == [2**15, 2**17] and found["left_out"] == {str(2**13): why}
    assert all(len(found[name]) == 2 for name in ("read_s", "write_s", "rotation_s"))
    details.update({2**15: told, 2**17: told})
    with pytest.raises(ValueError, match="flush: expected a size of which every reading counts, got none"):
        compare_flushes("cpu", cache_bytes=2**16)


def test_flushes_are_compared_by_the_real_timer_too():
    found = compare_flushes("cpu", budget_s=0.05, cache_bytes=2**20)
    assert found["timer"].startswith("cpu perf_counter") and all(seconds > 0 for seconds in found["rotation_s"])


X = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
BYTES = X.nbytes


@pytest.mark.parametrize(
    ("call", "peak"),
    [
        (lambda: X + 1, 0),
        (lambda: (X + 1) * 2, BYTES),
        (lambda: ((X + 1) * 2).mul_(3).sum(), 2 * BYTES),
        (lambda: torch.add(X, 1, out=torch.empty_like(X)), 0),
        (lambda: (X + 1, X + 2), 0),
        (lambda: X.mul(1.0) is None, BYTES),
    ],
)
def test_peak_memory_is_what_a_call_holds_beyond_what_it_returns(call, peak):
    assert peak_memory_bytes(call, CPU) == pytest.approx(peak, abs=256)


def test_peak_memory_of_a_gpu_is_that_of_its_allocator(monkeypatch):
    """Peak 900, of which 100 were there before and 300 are what was returned."""
    held = iter([100.0, 400.0])
    for name, value in {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: next(held),
        "max_memory_allocated": lambda device: 900.0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert peak_memory_bytes(lambda: None, torch.device("cuda")) == 500.0

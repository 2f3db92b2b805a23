from decimal import Decimal

import pytest
from fake_cuda import FakeCuda, recorder

from rooflab.bench.core.noise import Samples
from rooflab.bench.core.timers import NotRecorded, cupti
from rooflab.bench.core.timers.cupti import CALL, CuptiTimer, cut, fault, names, span_s
from rooflab.bench.core.timers.timing import time_functions

SAMPLES = Samples((1.0,), "script", "cold")


@pytest.fixture
def card(monkeypatch):
    """A device and a timer on it; `card.lose` decides which of its kernels the profiler drops."""

    class Card(FakeCuda):
        lose = staticmethod(lambda work: False)

        def timer(self):
            return CuptiTimer(self)

    card = Card()
    card.recorded = recorder(card, lambda work: card.lose(work))
    monkeypatch.setattr(cupti, "recorded", card.recorded)
    return card


def test_a_call_takes_from_its_first_kernels_start_to_its_last_ones_end(card):
    def two_kernels():
        card.work(10e-6, "first")
        card.device_s += 3e-6  # what the device needs between two kernels
        card.work(5e-6, "second")

    watch = card.timer()
    read = time_functions({"two": two_kernels}, min_samples=4, budget_s=1e-9, timer=watch)["two"]
    assert read.median_s == pytest.approx(18e-6) and read.busy_s == pytest.approx(15e-6)
    assert names(watch.traced["two"][-1]) == ("first", "second") and read.fault == "" and read.l2_state == "cold"
    assert read.method == "cuda cupti, first kernel's start to last kernel's end, launch gaps hidden"


def test_our_own_kernels_are_told_apart_also_from_the_same_kernels_of_the_function(card):
    def spins():
        card.sleep(20_000)
        card.work(4e-6, "flush")

    watch = card.timer()
    watch.flush = lambda: card.work(30e-6, "flush")
    assert watch.round([("a", spins, 1), ("b", spins, 1)]) == pytest.approx({"a": 24e-6, "b": 24e-6})
    assert names(watch.traced["a"][-1]) == ("spin", "flush")


def test_a_dropped_kernel_is_named(card):
    def two():
        card.work(10e-6, "gemm")
        card.work(5e-6, "reduce")

    runs = []
    card.lose = lambda work: work.name == "reduce" and (runs.append(1) or len(runs) % 4 == 0)
    read = time_functions({"two": two}, min_samples=8, budget_s=1e-9, timer=card.timer())["two"]
    assert read.fault == "kernels changed between samples: 2 of 8 ran without reduce"


def test_what_changed_between_samples_is_said():
    usual = ("gemm", "reduce")
    assert fault([usual] * 5) == ""
    assert fault([usual, ("gemm", *["split"] * 4)]).endswith(
        "1 of 2 ran without reduce and with split, split, split and 1 more"
    )
    assert fault([usual, ("reduce", "gemm")]).endswith("the same kernels in another order")
    assert fault([(), usual]).startswith("no kernel of it was recorded")


def test_without_cupti_there_is_one_sentence(card):
    watch = card.timer()
    card.lose = lambda work: True
    with pytest.raises(NotRecorded, match="cupti: expected the profiler to record the device's work.*none of 3 of 3"):
        watch.round([("a", lambda: card.work(5e-6), 1)])


def event(category, name, ts, dur, tid=7, **args):
    times = {"ts": Decimal(ts), "dur": Decimal(dur)}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "args": args, **times}


def test_times_are_exact_to_the_nanosecond_however_late_the_epoch():
    late = "4398665988582."
    calls = cut(
        [
            event("user_annotation", f"rooflab: 1{CALL}", f"{late}000", "9", tid=1),
            event("gpu_user_annotation", f"rooflab: 1{CALL}", f"{late}099", "0.502"),
            event("kernel", "spin", f"{late}100", "0.500", grid=[1, 1, 1], block=[1, 1, 1]),
            event("kernel", "gemm", f"{late}700", "0.033", grid=[8, 2, 1], block=[128, 1, 1], **{"shared memory": 96}),
            event("gpu_memset", "Memset (Device)", f"{late}735", "0.002", bytes=64),
            {"ph": "M", "name": "process_name"},
        ]
    )
    (call,) = calls
    assert span_s(call) == pytest.approx(37e-9, rel=1e-9)
    gemm, fill = call
    assert (gemm.grid, gemm.block, gemm.shared_bytes, fill.nbytes) == ((8, 2, 1), (128, 1, 1), 96, 64)

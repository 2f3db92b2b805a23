import gc
import itertools
import time

import pytest

from rooflab.bench.timing import stopwatch as stopwatches
from rooflab.bench.timing import timing
from rooflab.bench.timing.stopwatch import CpuStopwatch, OneByOne, check_timer, grid_of
from rooflab.bench.timing.timing import Samples, time_functions


class FakeStopwatch(OneByOne):
    """Reads what a script says and remembers in which order it was asked."""

    batches = True

    def __init__(self, script=lambda name, turn: 1.0, step=1e-3):
        self.script = script
        self.step = step
        self.rounds_seen = []

    def round(self, calls):
        self.rounds_seen.append([(name, count) for name, _, count in calls])
        return {name: self.script(name, len(self.rounds_seen)) * count for name, _, count in calls}

    def step_s(self, readings):
        return self.step

    def method(self, name, calls):
        return "script"

    def rounds_of(self, name):
        return [turn for turn, order in enumerate(self.rounds_seen) if name in dict(order)]


def nothing():
    return None


def test_percentiles_are_per_call():
    samples = Samples((5.0, 1.0, 3.0, 2.0, 4.0), "script", "cold")
    assert (samples.median_s, samples.p20_s, samples.p80_s) == pytest.approx((3.0, 1.8, 4.2))


def test_a_sleeping_function_takes_the_time_that_it_sleeps():
    read = time_functions({"nap": lambda: time.sleep(0.004), "long nap": lambda: time.sleep(0.012)}, budget_s=0.2)
    assert 0.004 <= read["nap"].median_s < read["long nap"].median_s
    assert 0.012 <= read["long nap"].median_s < 0.05
    assert (
        read["nap"].method.startswith("cpu perf_counter, ") and read["nap"].l2_state == "cold" and read["nap"].resolved
    )


def test_functions_are_interleaved_and_every_one_takes_every_place():
    watch = FakeStopwatch()
    time_functions(dict.fromkeys("abc", nothing), min_samples=12, budget_s=1e-9, stopwatch=watch)
    measured = [[name for name, _ in order] for order in watch.rounds_seen[1:]]
    assert len(measured) == 12 and all(sorted(order) == ["a", "b", "c"] for order in measured)
    for place in range(3):
        assert {order[place] for order in measured[:6]} == {"a", "b", "c"}
    assert measured[0] == measured[1][::-1]


def test_the_order_comes_from_the_seed():
    def order(seed):
        watch = FakeStopwatch()
        time_functions(dict.fromkeys("abcdefgh", nothing), min_samples=2, budget_s=1e-9, seed=seed, stopwatch=watch)
        return watch.rounds_seen[-1]

    assert order(1) == order(1) != order(2)


def test_samples_are_kept_raw_and_in_time_order():
    watch = FakeStopwatch(lambda name, turn: 100.0 if turn == 6 else float(turn))
    read = time_functions({"a": nothing}, min_samples=5, budget_s=1e-9, stopwatch=watch)
    assert read["a"].seconds == (2.0, 3.0, 4.0, 5.0, 100.0)


def test_warming_up_ends_when_nothing_gets_faster():
    speeds = [8.0, 4.0, 2.0, 1.0, 0.99, 0.98]
    watch = FakeStopwatch(lambda name, turn: speeds[min(turn, len(speeds)) - 1] if name == "late" else 1.0)
    read = time_functions({"late": nothing, "early": nothing}, min_samples=3, budget_s=0.2, stopwatch=watch)
    assert read["late"].seconds[0] == 0.98, "rounds 1 to 4 get faster, round 5 does not and ends the warm-up"


def test_warming_up_ends_with_its_share_of_the_budget():
    def slow(name, turn):
        time.sleep(0.03)
        return 1.0 / turn

    watch = FakeStopwatch(slow)
    read = time_functions({"a": nothing}, min_samples=1, budget_s=0.1, stopwatch=watch)
    assert len(watch.rounds_seen) - len(read["a"].seconds) <= 2


def test_the_budget_ends_the_sampling_but_not_before_the_least_samples():
    began = time.perf_counter()
    read = time_functions({"a": lambda: time.sleep(0.01)}, budget_s=0.3, cold=False)
    assert 10 <= len(read["a"].seconds) <= 30 and time.perf_counter() - began < 1.5
    assert len(time_functions({"a": lambda: time.sleep(0.01)}, budget_s=0.001, min_samples=7)["a"].seconds) == 7
    many = FakeStopwatch()
    assert len(time_functions({"a": nothing}, budget_s=5, stopwatch=many)["a"].seconds) == timing.MAX_SAMPLES


def test_calls_too_short_for_the_clock_share_a_sample():
    watch = FakeStopwatch(lambda name, turn: 1e-3 if name == "short" else 1.0, step=1e-3)
    read = time_functions({"short": nothing, "long": nothing}, min_samples=2, budget_s=1e-9, stopwatch=watch)
    assert dict(watch.rounds_seen[-1]) == {"short": 20, "long": 1}
    assert read["short"].median_s == pytest.approx(1e-3)
    assert (read["short"].calls_per_sample, read["short"].l2_state, read["short"].resolved) == (20, "warm", True)
    assert (read["long"].calls_per_sample, read["long"].l2_state, read["long"].resolved) == (1, "cold", True)


def test_what_the_clock_cannot_see_is_unresolved():
    invisible = time_functions(
        {"a": nothing}, min_samples=2, budget_s=1e-9, stopwatch=FakeStopwatch(lambda name, turn: 0.0)
    )
    assert not invisible["a"].resolved and invisible["a"].calls_per_sample == timing.MAX_CALLS_PER_SAMPLE
    single = FakeStopwatch(lambda name, turn: 5e-3)
    single.batches = False
    assert not time_functions({"a": nothing}, min_samples=2, budget_s=1e-9, stopwatch=single)["a"].resolved


def test_a_coarse_clock_is_seen_to_be_coarse():
    ticks = (tick // 4 * 0.25 for tick in itertools.count())
    watch = CpuStopwatch(cold=False, clock=lambda: next(ticks))
    assert watch.step_s([]) == 0.25
    assert watch.method("a", 1) == "cpu perf_counter" and "8 calls" in watch.method("a", 8)


def test_the_grid_is_the_least_difference_that_is_no_rounding():
    assert grid_of([3e-6, 5e-6, 4e-6, 3e-6, 4e-6 + 2e-10]) == pytest.approx(1e-6, rel=1e-3)
    assert grid_of([3e-6, 3e-6]) is None


def test_the_cache_is_emptied_by_twice_its_size_before_each_sample(monkeypatch):
    monkeypatch.setattr(stopwatches, "last_level_cache_bytes", lambda: 4000)
    log = []
    watch = CpuStopwatch(clock=lambda: log.append("clock") or float(len(log)))
    assert watch._flush.nbytes == 8000
    watch._flush = lambda: log.append("flush")
    del log[:]
    watch.round([("a", lambda: log.append("a"), 2), ("b", lambda: log.append("b"), 1)])
    assert log == ["flush", "clock", "a", "a", "clock", "flush", "clock", "b", "clock"]


def test_the_garbage_collector_rests_and_comes_back():
    seen = []
    time_functions({"a": lambda: seen.append(gc.isenabled())}, budget_s=1e-6, min_samples=1, cold=False)
    assert not any(seen) and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        time_functions({"a": lambda: 1 // 0}, cold=False)
    assert gc.isenabled()


def test_observe_is_called_once_a_round_of_samples():
    seen = []
    read = time_functions({"a": nothing, "b": nothing}, budget_s=1e-6, cold=False, observe=lambda: seen.append(1))
    assert len(seen) == len(read["a"].seconds), "and not while warming up"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"functions": {}}, "functions: expected at least one"),
        ({"budget_s": 0}, "budget_s: expected a positive"),
        ({"budget_s": float("nan")}, "budget_s: expected a positive"),
        ({"min_samples": 0}, "min_samples: expected at least 1"),
        ({"device": "meta"}, "device: expected cpu or cuda, got meta"),
        ({"timer": "events"}, "timer: expected one of perf_counter on cpu, got events, which needs a CUDA device"),
        ({"timer": "sundial"}, "timer: expected one of perf_counter on cpu, got sundial$"),
        ({"flush": "wish"}, "flush: expected one of read, write, got 'wish'"),
    ],
)
def test_bad_input_is_one_sentence(changes, text):
    with pytest.raises(ValueError, match=text):
        time_functions(**({"functions": {"a": nothing}} | changes))


def test_every_device_has_a_default_timer():
    assert check_timer(None, "cpu") == "perf_counter" and check_timer(None, "cuda") == "events"
    assert check_timer("graph", "cuda") == "graph"
    with pytest.raises(ValueError, match="timer: expected one of events, graph, cupti on cuda, got perf_counter"):
        check_timer("perf_counter", "cuda")


def test_a_stopwatch_may_read_several_rounds_together():
    class Together(FakeStopwatch):
        rounds_at_once = 4

        def rounds(self, orders):
            self.asked = [*getattr(self, "asked", []), len(orders)]
            return super().rounds(orders)

    watch = Together()
    read = time_functions({"a": nothing, "b": nothing}, min_samples=6, budget_s=1e-9, stopwatch=watch)
    assert watch.asked[-2:] == [4, 4] and len(read["a"].seconds) == len(read["b"].seconds) == 8
    assert sorted(watch.rounds_of("a")) == sorted(watch.rounds_of("b"))


def test_a_clock_replaced_while_it_is_read_is_the_fault_of_every_reading(monkeypatch):
    def cheats():
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)

    read = time_functions({"cheats": cheats, "honest": nothing}, budget_s=1e-6, min_samples=2, cold=False)
    assert read["cheats"].fault == read["honest"].fault == "time.perf_counter replaced while the bench ran"
    assert all(sample > 0 for sample in read["honest"].seconds), "the stopwatch keeps the clock that it began with"
    monkeypatch.undo()
    assert time_functions({"honest": nothing}, budget_s=1e-6, min_samples=2, cold=False)["honest"].fault == ""

"""Verdicts and exit statuses follow from evidence: a kernel that was not compared never passes."""

import math
from dataclasses import replace

import pytest

from rooflab.bench.ab.evidence import evidence_of
from rooflab.bench.ab.pairs import run_pairs
from rooflab.bench.ab.sides import Target
from rooflab.bench.ab.verdict import Evidence, Rules, exit_status, judge
from rooflab.bench.core.record import Record

RULES = Rules()
MS = 1e-3


def pairs(ratio, count=12, base=MS, wobble=0.001):
    return tuple((base, base * ratio * (1 + wobble * (-1) ** index)) for index in range(count))


def evidence(ratio, key="k", confirmed=True, **more):
    base = more.pop("base", MS)
    return Evidence(key, first=pairs(ratio, base=base), second=pairs(ratio, base=base) if confirmed else (), **more)


def verdict_of(item):
    return judge([item], RULES)[0]


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (evidence(1.05, confirmed=False), "not confirmed"),
        (Evidence("k", first=pairs(1.05), second=pairs(1.0)), "did not confirm"),
        (evidence(1.05, identical=True), "same device code"),
        (evidence(1.05, noise_floor=0.06), "identical code differs by 6.0%"),
        (evidence(1.05, drifting="measured one after the other"), "one after the other"),
        (Evidence("k", first=pairs(1.05), second=pairs(1.05, count=1)), "not confirmed: 1 more pairs, and it takes 5"),
        (Evidence("k", first=pairs(1.05), second=pairs(1.05, count=4), unconfirmed="it ended"), "it ended"),
        (Evidence("k", first=pairs(1.0, wobble=0.021)), "fit both"),
        (evidence(1.0, noise_floor=0.03), "identical code differs by 3.0%"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_a_verdict_unresolved(item, why):
    found = verdict_of(item)
    assert found.verdict == "UNRESOLVED" and why in found.reason
    assert exit_status([found]) == 0 and exit_status([found], strict=True) == 12


def test_what_could_not_have_been_seen_does_not_pass():
    small = 3e-6  # of which a sixth counts, so half of it must be seen
    for item, passes in (
        (Evidence("k", first=pairs(1.0, count=1)), False),
        (Evidence("k", first=pairs(1.05, count=4)), False),
        (Evidence("k", first=pairs(1.0, wobble=0.2)), False),
        (evidence(1.05, noise_floor=0.061), False),
        (evidence(1.05, noise_floor=0.059), True),
        (Evidence("k", first=pairs(1.0, wobble=0.16, base=small)), True),
        (Evidence("k", first=pairs(1.0, wobble=0.3, base=small)), False),
    ):
        found = verdict_of(item)
        assert found.verdict == "UNRESOLVED" and found.unseen is not passes
        assert ("could not have been seen" in found.reason) is not passes
        assert exit_status([found]) == (0 if passes else 13) and exit_status([found], strict=True) == 13 - passes


def test_a_suite_of_fewer_than_12_pairs_is_not_judged():
    few = [Evidence(key, first=pairs(1.05, count=5), second=pairs(1.05, count=5)) for key in "ab"]
    assert {outcome.verdict for outcome in judge(few, RULES)} == {"UNRESOLVED"}
    assert judge(few[:1], RULES)[0].verdict == "SLOWER"


def test_a_weak_finding_among_many_comparisons_is_not_called():
    # Five pairs have no p-value under 2**-5, confirmed or not: enough alone, not among a hundred.
    weak = Evidence("weak", first=pairs(1.03, count=12, wobble=0.009)[:7], second=pairs(1.03, count=7, wobble=0.02))
    alone = judge([weak], RULES)[0]
    among = judge([weak, *(evidence(1.0, key=f"k{number}") for number in range(400))], RULES)[0]
    assert alone.verdict == "SLOWER" and among.verdict == "UNRESOLVED"
    assert among.p_value > 0.05 >= alone.p_value


def test_the_first_exit_status_of_several_wins():
    missing, wrong = (verdict_of(Evidence("k", broken=(verdict, "why"))) for verdict in ("MISSING", "INCORRECT"))
    slower, open_ = verdict_of(evidence(1.05)), verdict_of(evidence(1.05, confirmed=False))
    for found, status in (
        ([missing, wrong, slower, open_], 11),
        ([missing, slower, open_], 13),
        ([slower, open_], 10),
        ([verdict_of(evidence(0.9)), verdict_of(evidence(1.0))], 0),
        ([verdict_of(Evidence("k"))], 13),  # nothing was measured
    ):
        assert exit_status(found, strict=True) == status


class Machine:
    """Stands for fresh processes: readings by side, with a log of what was asked."""

    def __init__(self, **readings):
        self.readings = readings
        self.asked = []

    def __call__(self, side, keys):
        self.asked.append((side, tuple(keys)))
        return {key: self.readings[side](key) for key in keys}


def reading(seconds=1.0, **values):
    values = {"basis": "measured", "latency_median_ms": seconds * 1e3, "samples": Record.packed([seconds])} | values
    return replace(Target("op", "kernel", "M=1", "fp32").record("cpu", 0), **values)


def reads(seconds):
    return lambda key: reading(seconds)


def evidence_in(read, key):
    sides = ([record for where, name, record in read if (where, name) == (side, key)] for side in "AB")
    return evidence_of(key, *sides, ("A", "B"), RULES, {})


def test_pairs_are_taken_in_abba_order_from_the_seed():
    machine, again = (Machine(A=reads(1.0), B=reads(1.1)) for _ in range(2))
    read, why_fewer = run_pairs(machine, ["k"], 40, seed=3)
    order = "".join(side for side, _ in machine.asked)
    assert {order[start : start + 4] for start in range(0, 80, 4)} == {"ABBA", "BAAB"}
    run_pairs(again, ["k"], 40, seed=3)
    assert again.asked == machine.asked
    assert evidence_in(read, "k").first == ((1.0, 1.1),) * 40 and not why_fewer


@pytest.mark.parametrize(
    ("deadline", "need", "taken", "stopped"),
    [
        (35.0, {}, 3, "the budget ended after 3 of 12 pairs"),
        (80.0, {"least": 5, "later": 5}, 1, "the budget is too short: at 10.0 s a pair, the 10 pairs that a verdict"),
        (125.0, {"least": 5, "later": 5}, 7, ""),  # five more have room
    ],
)
def test_the_budget_ends_a_run_before_a_pair_that_would_not_fit(deadline, need, taken, stopped):
    now = [0.0]

    def measure(side, keys):
        now[0] += 5.0
        return {key: reading() for key in keys}

    _, why_fewer = run_pairs(measure, ["k"], 12, deadline=deadline, clock=lambda: now[0], **need)
    assert now[0] == 10.0 * taken and why_fewer.startswith(stopped)


NOTHING = {"latency_median_ms": None, "samples": None}


@pytest.mark.parametrize(
    ("values", "verdict", "why"),
    (
        (NOTHING | {"status": "INCORRECT", "reason": "wrong"}, "INCORRECT", "wrong"),
        ({"latency_median_ms": 0.0}, "INVALID", "timer did not move"),
        ({"samples": Record.packed([1.0, math.nan])}, "INVALID", "not a finite number"),
        (NOTHING, "INVALID", "no time was measured"),
    ),
)
def test_a_reading_that_cannot_be_compared_takes_its_kernel_out_and_no_other(values, verdict, why):
    machine = Machine(A=reads(1.0), B=lambda key: reading(**values) if key == "bad" else reading())
    read, _ = run_pairs(machine, ["bad", "good"], 3)
    found, reason = evidence_in(read, "bad").broken
    assert found == verdict and reason.startswith("B: ") and why in reason
    assert len(evidence_in(read, "good").first) == 3 and not evidence_in(read, "bad").first
    assert all(keys == ("good",) for _, keys in machine.asked[2:])


@pytest.mark.parametrize(
    ("ratio", "more", "verdict"),
    [
        (1.05, {}, "SLOWER"),
        (1.023, {}, "SLOWER"),
        (0.94, {}, "FASTER"),
        (1.0, {}, "SAME"),
        (1.01, {}, "SAME"),
        (1.05, {"noise_floor": 0.04}, "SLOWER"),
        (1.05, {"base": 3e-6}, "SAME"),  # 0.15 us
        (1.30, {"base": 3e-6}, "SLOWER"),
    ],
)
def test_verdict_by_the_ratio_beyond_half_a_microsecond(ratio, more, verdict):
    found = verdict_of(evidence(ratio, **more))
    assert found.verdict == verdict and found.effect == pytest.approx(ratio - 1, abs=2e-3)
    assert found.effect_low <= found.effect <= found.effect_high
    assert found.smallest_visible_effect >= RULES.threshold * (1 - 1e-9)

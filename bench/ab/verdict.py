"""Makes verdicts from the measured times of two sides, and an exit status from verdicts.  This file runs no kernel.

A pair is one measurement of each side.  A change counts only above a limit: the larger of the threshold and 0.5 us
(`Rules`).  The noise floor of a machine is the effect that comparisons of identical code (A/A) showed there.

SLOWER (side B takes longer) needs all of these conditions:

- In the first batch of pairs, the lower 95% bound of the change is above the limit.
- In a second, independent batch of at least five pairs, the estimate of the change is above the limit.
- In both batches together, the lower 95% bound is above the limit.
- The false-discovery rate over all judged kernels is at most 5%.
- The two sides did not run the same device code.
- The change is larger than the noise floor.

These rules find a change of 3% in 60% of runs.  With a bound on the second batch alone, they would find it in 36%.

FASTER needs these conditions for a shorter time.  SAME needs both bounds inside the limit.  The rest is UNRESOLVED.

The speed of a machine may drift, so the sides must alternate in time.  If they do not alternate, no comparison is SAME.
A difference then needs a bound above `BEYOND_DRIFT` times the estimated drift (`evidence.drift`).

A comparison that cannot be made never passes.  An UNRESOLVED comparison passes only if its measurements were precise.
They must be able to show a change of three times the limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from rooflab.bench.ab.estimate import ALPHA, Effect, adjusted, estimate, p_above
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.core import Verdict
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder
from rooflab.roofline.numbers import counted

MAX_KEPT_OUTCOMES = 50
"""For each kernel, this many A/A comparisons are kept, the newest ones."""
MIN_FLOOR_EFFECTS = 5
"""With this many A/A comparisons or more, a noise floor is a percentile of them; with fewer, it is the widest bound."""
SUITE_PAIRS = 12
"""The least pairs if several kernels are judged together: with fewer, no p-value is small enough for 100 kernels."""
BOUNDED_PAIRS = 5
"""The least pairs that have a one-sided 95% bound, because 2**-5 is the first power of 1/2 below 5%."""
EXIT_STATUS: dict[Verdict, ExitStatus] = {
    "INCORRECT": ExitStatus.INCORRECT,
    "FAILED": ExitStatus.INCORRECT,
    "INVALID": ExitStatus.INVALID,
    "MISSING": ExitStatus.INVALID,
    "SLOWER": ExitStatus.SLOWER,
    "UNRESOLVED": ExitStatus.DONE,
    "SAME": ExitStatus.DONE,
    "FASTER": ExitStatus.DONE,
}
MIN_VISIBLE_RATIO = 3.0
"""An UNRESOLVED passes only if an effect of this many thresholds could have been detected."""
BEYOND_DRIFT = 10.0
"""If the sides were not measured in turn, the bound of an effect must be this many times the possible drift."""


@dataclass(frozen=True)
class Rules:
    """Sets the size of a change that counts as a difference.  The change must exceed both `threshold` and `floor_s`."""

    threshold: float = 0.02
    """The relative change of the time that matters; 0.02 is 2%."""
    floor_s: float = 0.5e-6
    """The change in seconds that matters, because a few percent of a 3 us kernel are below the timer's resolution."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold: expected a ratio between 0 and 1, got {self.threshold}")
        if not 0 <= self.floor_s < 1:
            raise ValueError(f"floor-us: expected 0 or more microseconds, below a second, got {self.floor_s * 1e6}")

    def margin(self, baseline_s: float) -> float:
        """Returns the log ratio that an effect must exceed to count, for a kernel that takes `baseline_s` seconds."""
        return math.log1p(max(self.threshold, self.floor_s / baseline_s))


@dataclass(frozen=True)
class Evidence:
    """Holds the evidence on one comparison: median times of pairs of processes, or the reason for a missing result."""

    key: str
    first: tuple[tuple[float, float], ...] = ()
    """The seconds (side A, side B) of each pair of the first batch, in time order."""
    second: tuple[tuple[float, float], ...] = ()
    """The seconds (side A, side B) of each pair of the confirming batch, in time order."""
    broken: tuple[Verdict, str] | None = None
    """INCORRECT, FAILED, MISSING or INVALID, with the reason; None if there is no such fault."""
    identical: bool = False
    """Whether both sides had the same device activity."""
    noise_floor: float | None = None
    """The relative effect that identical code showed on this machine; None if it was not measured."""
    unconfirmed: str = ""
    """Why the second batch is missing or too short, although the first batch called a difference."""
    drifting: str = ""
    """Why the pairs may show only a drift of the machine; empty if the sides were measured in turn."""
    drift: float = math.inf
    """The possible drift between sides that were not measured in turn, as a log ratio."""


@dataclass(frozen=True)
class Outcome:
    """Holds a verdict and its evidence.  An effect is a ratio minus one: 0.03 means that side B takes 3% longer."""

    key: str
    verdict: Verdict
    reason: str
    baseline_s: float | None = None
    """The median of side A."""
    candidate_s: float | None = None
    """The time of side B, computed from side A's median and the effect, so that both times agree with the effect."""
    effect: float | None = None
    effect_low: float | None = None
    effect_high: float | None = None
    smallest_visible_effect: float | None = None
    """The smallest effect that these pairs would have called a difference with a probability of 80%."""
    unseen: bool = False
    """Whether the verdict is UNRESOLVED, and `MIN_VISIBLE_RATIO` times the change that matters was not detectable."""
    pairs_for_1_percent: float | None = None
    p_value: float | None = None
    """The p-value, adjusted for all comparisons of the run."""
    noise_floor: float | None = None
    pairs: int = 0
    evidence: Evidence | None = field(default=None, repr=False)


def wants_confirmation(evidence: Evidence, rules: Rules) -> bool:
    """Returns whether the first batch alone shows a difference."""
    return evidence.broken is None and _called(evidence.first, rules) is not None


def judge(evidence: Sequence[Evidence], rules: Rules) -> list[Outcome]:
    """Returns one outcome for each item of `evidence`, in order."""
    measured_items = [item for item in evidence if item.broken is None and item.first]
    slower_pvalues = adjusted([_p_value(item, rules, "SLOWER") for item in measured_items])
    faster_pvalues = adjusted([_p_value(item, rules, "FASTER") for item in measured_items])
    p_values = {item.key: p_pair for item, *p_pair in zip(measured_items, slower_pvalues, faster_pvalues, strict=True)}
    has_many_items = len(evidence) > 1
    return [_outcome(item, rules, p_values.get(item.key, [1.0, 1.0]), has_many_items) for item in evidence]


def exit_status(outcomes: Sequence[Outcome], strict: bool = False) -> ExitStatus:
    """Returns the exit status of a run.  A run without outcomes has the exit status of INVALID."""
    return ExitStatus.first({status_of(outcome, strict) for outcome in outcomes} or {ExitStatus.INVALID})


def status_of(outcome: Outcome, strict: bool) -> ExitStatus:
    """Returns the exit status of one outcome."""
    if outcome.unseen:
        return ExitStatus.INVALID
    return ExitStatus.UNDECIDED if strict and outcome.verdict == "UNRESOLVED" else EXIT_STATUS[outcome.verdict]


def _called(pairs: Sequence[tuple[float, float]], rules: Rules) -> Verdict | None:
    """Returns SLOWER or FASTER if the confidence bound of the effect exceeds the margin (`Rules.margin`), else None.
    `pairs` holds the times of sides A and B."""
    if not pairs:
        return None
    effect, log_margin = _estimate(pairs, rules)
    if effect.low > log_margin:
        return "SLOWER"
    return "FASTER" if effect.high < -log_margin else None


def _estimate(pairs: Sequence[tuple[float, float]], rules: Rules) -> tuple[Effect, float]:
    """Returns the effect `log(time_B / time_A)`, and the margin (log ratio) that the effect must exceed to count."""
    return estimate(_effects(pairs)), rules.margin(median(a for a, _ in pairs))


def _effects(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [math.log(b / a) for a, b in pairs]


def _p_value(item: Evidence, rules: Rules, verdict: Verdict) -> float:
    """Returns the p-value of the hypothesis that the change is at most the margin.

    The p-value uses both batches of pairs.  If the first does not show `verdict`, it is 1: there is no second batch."""
    if _called(item.first, rules) != verdict:
        return 1.0
    all_pairs = item.first + item.second
    effect_sign = 1 if verdict == "SLOWER" else -1
    return p_above([effect_sign * effect for effect in _effects(all_pairs)], _estimate(all_pairs, rules)[1])


def _outcome(item: Evidence, rules: Rules, p_values: Sequence[float], several: bool) -> Outcome:
    """Returns the outcome of one comparison.  `p_values` holds the p-values for SLOWER and for FASTER.  If `several`
    kernels are judged together, a verdict needs `SUITE_PAIRS` pairs."""
    if item.broken is not None:
        return Outcome(item.key, *item.broken, evidence=item)
    if not item.first:
        return Outcome(item.key, "INVALID", "nothing was measured", evidence=item)
    all_pairs = item.first + item.second
    effect, log_margin = _estimate(all_pairs, rules)
    verdict, reason = _verdict(item, rules, effect, log_margin, p_values)
    if verdict != "UNRESOLVED" and several and effect.pairs < SUITE_PAIRS:
        verdict, reason = "UNRESOLVED", f"{effect.pairs} pairs; several kernels at once need {SUITE_PAIRS}"
    min_effect = _ratio(effect.smallest_visible(log_margin))
    max_ratio = MIN_VISIBLE_RATIO * math.expm1(log_margin)
    is_unseen = verdict == "UNRESOLVED" and (min_effect is None or max(min_effect, item.noise_floor or 0.0) > max_ratio)
    needed_pairs = effect.pairs_for(math.log1p(0.01))
    return Outcome(
        key=item.key,
        verdict=verdict,
        reason=f"{reason}; a change of {max_ratio:.1%} could not have been seen" if is_unseen else reason,
        baseline_s=(baseline_s := median(a for a, _ in all_pairs)),
        candidate_s=baseline_s * math.exp(effect.effect),
        effect=_ratio(effect.effect),
        effect_low=_ratio(effect.low),
        effect_high=_ratio(effect.high),
        smallest_visible_effect=min_effect,
        unseen=is_unseen,
        pairs_for_1_percent=needed_pairs if math.isfinite(needed_pairs) else None,
        p_value=min(p_values),
        noise_floor=item.noise_floor,
        pairs=effect.pairs,
        evidence=item,
    )


def _ratio(log: float) -> float | None:
    """Converts the log of a ratio to the ratio minus one.  Returns None if the log is infinite or very large."""
    return math.expm1(log) if abs(log) < 700 else None


def _verdict(
    item: Evidence, rules: Rules, effect: Effect, margin: float, p_values: Sequence[float]
) -> tuple[Verdict, str]:
    """Returns the verdict on measured pairs, and the reason if the verdict is UNRESOLVED."""
    first_verdict = _called(item.first, rules)
    if effect.pairs < BOUNDED_PAIRS:
        return "UNRESOLVED", f"{counted(effect.pairs, 'pair')}: expected at least {BOUNDED_PAIRS} for a bound"
    if item.drifting and (first_verdict is None or min(abs(effect.low), abs(effect.high)) <= BEYOND_DRIFT * item.drift):
        return "UNRESOLVED", item.drifting
    if first_verdict is None:
        if effect.low > -margin and effect.high < margin:
            return _unless_noise("SAME", item, math.expm1(margin))
        return "UNRESOLVED", "the readings fit both a difference and none"
    if item.identical:
        return "UNRESOLVED", "both sides ran the same device code on the same grids, so the difference is the machine's"
    if len(item.second) < BOUNDED_PAIRS:
        too_short_reason = f"seen once and not confirmed: {len(item.second)} more pairs, and it takes {BOUNDED_PAIRS}"
        return "UNRESOLVED", item.unconfirmed or too_short_reason
    second_effect = estimate(_effects(item.second)).effect * (1 if first_verdict == "SLOWER" else -1)
    if second_effect <= margin or _called(item.first + item.second, rules) != first_verdict:
        return "UNRESOLVED", "a second batch of pairs did not confirm it"
    if p_values[0 if first_verdict == "SLOWER" else 1] > ALPHA:
        return "UNRESOLVED", "not significant among this many comparisons"
    return _unless_noise(first_verdict, item, abs(math.expm1(effect.effect)))


def _unless_noise(verdict: Verdict, item: Evidence, size: float) -> tuple[Verdict, str]:
    """Returns `verdict`, or UNRESOLVED with the reason.  It is UNRESOLVED if identical code differs by more than
    `size`, the relative effect, on this machine."""
    if item.noise_floor is not None and item.noise_floor > size:
        return "UNRESOLVED", f"identical code differs by {item.noise_floor:.1%} on this machine"
    return verdict, ""


def floor_of(effects: Sequence[tuple[float, float]]) -> float | None:
    """Returns the noise floor of a machine, or None if `effects` is empty.  `effects` holds `(effect, bound)` for each
    comparison of identical code.  `bound` is the largest effect that the measurements allow.

    The noise floor is the effects' 95th percentile; below `MIN_FLOOR_EFFECTS` comparisons, it is the largest bound."""
    if not effects:
        return None
    if len(effects) < MIN_FLOOR_EFFECTS:
        return max(bound for _, bound in effects)
    return float(np.percentile([effect for effect, _ in effects], 95))


def effects_of(outcome: Outcome) -> list[tuple[float, float]]:
    """Returns `[(effect, bound)]` of a comparison of equal code, as absolute values.  `bound` is the largest effect
    that the measurements allow.  Returns an empty list if a value is missing or infinite."""
    effects = [abs(value) for value in (outcome.effect, outcome.effect_low, outcome.effect_high) if value is not None]
    return [(effects[0], max(effects))] if len(effects) == 3 and math.isfinite(max(effects)) else []


def load_floors(machine_key: str) -> dict[str, float]:
    """Returns each kernel's noise floor on one machine.  The dict is empty if equal code was never compared there."""
    floor_by_key = {key: floor_of(effects) for key, effects in _known_effects(machine_key).items()}
    return {key: noise_floor for key, noise_floor in floor_by_key.items() if noise_floor is not None}


def remember_floors(machine_key: str, outcomes: Sequence[Outcome]) -> None:
    """Stores the outcomes of an A/A run (identical code) for the machine.  Skips outcomes without a measurement."""
    effects_by_key = _known_effects(machine_key)
    for outcome in outcomes:
        if effects := effects_of(outcome):
            effects_by_key[outcome.key] = [*effects_by_key.get(outcome.key, []), *effects][-MAX_KEPT_OUTCOMES:]
    write_whole(_floors_file(machine_key), json.dumps(effects_by_key, indent=1, allow_nan=False))


def _floors_file(machine_key: str) -> Path:
    return cache_folder() / "ab" / f"{machine_key}.json"


def _known_effects(machine_key: str) -> dict[str, list[tuple[float, float]]]:
    floors_path = _floors_file(machine_key)
    effects_by_key = json.loads(floors_path.read_text()) if floors_path.is_file() else {}
    return {key: [(effect, bound) for effect, bound in effects] for key, effects in effects_by_key.items()}
